"""Copies by the GPU's copy engines: one call, one call per segment, one batch, equal rows, and unpinned memory."""

from typing import Any

from kvbench.core.errors import KvbenchError
from kvbench.probes.executions.base import ExecutionUnavailableError
from kvbench.probes.executions.cuda_pools import CudaPools, Way
from kvbench.probes.segments import Segments
from kvbench.tiers.cuda_runtime import checked


class BlockCopy(CudaPools):
    """One contiguous copy; segments only say how many bytes."""

    def plan_way(self, segments: Segments, way: Way) -> int:
        return segments.total_bytes

    def enqueue(self, prepared: int, way: Way) -> None:
        if prepared:
            checked(
                self.runtime.cudaMemcpyAsync(way.target, way.source, prepared, way.kind, way.stream), "cudaMemcpyAsync"
            )

    def differs(self, segments: Segments) -> int | None:
        """Compares the block."""
        return super().differs(Segments(max(segments.total_bytes, 1), [0], [0])) if len(segments) else None


class PerSegment(CudaPools):
    """One driver call per segment."""

    def launches(self, prepared: Any) -> int:
        return len(prepared)

    def plan_way(self, segments: Segments, way: Way) -> list[tuple[int, int, int]]:
        return [
            (way.target + target, way.source + source, segments.segment_bytes)
            for source, target in zip(segments.sources, segments.targets, strict=True)
        ]

    def enqueue(self, prepared: list[tuple[int, int, int]], way: Way) -> None:
        copy, kind, stream = self.runtime.cudaMemcpyAsync, way.kind, way.stream
        for target, source, size in prepared:
            (error,) = copy(target, source, size, kind, stream)
            if int(error):
                checked((error,), "cudaMemcpyAsync")


class Pageable(PerSegment):
    """The same from memory that is not pinned: the driver stages it, and the call blocks until that is done."""

    pinned = False
    gated = False  # a call that blocks behind a closed gate would wait for ever


class Batch(CudaPools):
    """`cudaMemcpyBatchAsync` (CUDA 12.8 and later): one call for all segments.

    cuda-bindings 12 returns (error, index of the copy that failed), 13 only (error); the arguments are the same. Each
    attribute needs a source access order, and the stream must not be the legacy one.
    """

    def plan_way(self, segments: Segments, way: Way) -> tuple[list[int], list[int], list[int], Any]:
        runtime = self.runtime
        if not hasattr(runtime, "cudaMemcpyBatchAsync"):
            raise ExecutionUnavailableError("this cuda-bindings has no cudaMemcpyBatchAsync; install 12.9 or later")
        attributes = runtime.cudaMemcpyAttributes()
        attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        return (
            [way.target + offset for offset in segments.targets],
            [way.source + offset for offset in segments.sources],
            [segments.segment_bytes] * len(segments),
            attributes,
        )

    def enqueue(self, prepared: tuple[list[int], list[int], list[int], Any], way: Way) -> None:
        targets, sources, sizes, attributes = prepared
        if not sizes:
            return
        error, *failed = self.runtime.cudaMemcpyBatchAsync(
            targets, sources, sizes, len(sizes), [attributes], [0], 1, way.stream
        )
        if int(error):
            at = f" at copy {failed[0]}" if failed else ""
            raise KvbenchError(
                f"cudaMemcpyBatchAsync of {len(sizes)} copies{at}: {getattr(error, 'name', error)}; "
                "it needs a driver of CUDA 12.8 or later: see nvidia-smi"
            )


class Rows(CudaPools):
    """`cudaMemcpy2DAsync`: one call wherever segments lie at equal distances on both sides."""

    def launches(self, prepared: Any) -> int:
        return len(prepared)

    def plan_way(self, segments: Segments, way: Way) -> list[tuple[int, int, int, int, int, int]]:
        size = segments.segment_bytes
        return [
            (way.target + target, target_pitch, way.source + source, source_pitch, size, count)
            for source, target, source_pitch, target_pitch, count in equal_strides(segments)
        ]

    def enqueue(self, prepared: list[tuple[int, int, int, int, int, int]], way: Way) -> None:
        for target, target_pitch, source, source_pitch, width, height in prepared:
            checked(
                self.runtime.cudaMemcpy2DAsync(
                    target, target_pitch, source, source_pitch, width, height, way.kind, way.stream
                ),
                "cudaMemcpy2DAsync",
            )


def equal_strides(segments: Segments) -> list[tuple[int, int, int, int, int]]:
    """Runs of segments with one distance between sources and one between targets, neither below the segment's size.

    Each run is (first source, first target, source distance, target distance, count).
    """
    size = segments.segment_bytes
    runs: list[tuple[int, int, int, int, int]] = []
    for source, target in zip(segments.sources, segments.targets, strict=True):
        if runs:
            first_source, first_target, source_pitch, target_pitch, count = runs[-1]
            step = source - first_source, target - first_target
            if count == 1 and min(step) >= size:
                runs[-1] = first_source, first_target, step[0], step[1], 2
                continue
            if count > 1 and step == (source_pitch * count, target_pitch * count):
                runs[-1] = first_source, first_target, source_pitch, target_pitch, count + 1
                continue
        runs.append((source, target, size, size, 1))
    return runs
