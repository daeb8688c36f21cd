"""Copies by a kernel: the GPU's processors read or write mapped pinned host memory over the link, by index list."""

import ctypes
from typing import Any

from kvbench.probes.executions.cuda_pools import CudaPools, Way
from kvbench.probes.segments import Segments
from kvbench.tiers.cuda_runtime import checked, number, pointer


class GatherKernel(CudaPools):
    """One launch for all segments. The upload of the two index lists is part of the call, as it is of a KV load."""

    def launches(self, prepared: Any) -> int:
        del prepared
        return 3

    def plan_way(self, segments: Segments, way: Way) -> tuple[Any, int, int, int]:
        """Both lists back to back in pinned memory, and room for them on the device."""
        count = len(segments)
        num_bytes = max(2 * count, 1) * ctypes.sizeof(ctypes.c_longlong)
        address, view = self._host_memory(num_bytes, pinned=True)
        words = view.cast("q")
        for index, (target, source) in enumerate(zip(segments.targets, segments.sources, strict=True)):
            words[index], words[count + index] = target, source
        device = int(checked(self.runtime.cudaMalloc(num_bytes), "device memory for indexes"))
        self._device_pools.append(device)
        return address, device, count, segments.segment_bytes

    def upload(self, prepared: tuple[Any, int, int, int], way: Way) -> None:
        """Brings the index lists to the device."""
        address, device, count, _ = prepared
        num_bytes = 2 * count * ctypes.sizeof(ctypes.c_longlong)
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        checked(self.runtime.cudaMemcpyAsync(device, address, num_bytes, kind, way.stream), "upload of indexes")

    def enqueue(self, prepared: tuple[Any, int, int, int], way: Way) -> None:
        _, device, count, size = prepared
        if not count:
            return
        self.upload(prepared, way)
        source, target = self.mapped(way)
        lists = pointer(device), pointer(device + count * ctypes.sizeof(ctypes.c_longlong))
        self.kernels.launch("gather", way.stream, pointer(target), pointer(source), *lists, number(count), number(size))


class ZeroCopyRead(GatherKernel):
    """Reads mapped host memory and keeps a sum: what attention over a host-resident cache would pay. Only h2d."""

    def enqueue(self, prepared: tuple[Any, int, int, int], way: Way) -> None:
        _, device, count, size = prepared
        if not count:
            return
        self.upload(prepared, way)
        checked(self.runtime.cudaMemsetAsync(way.target, 0, 8, way.stream), "clearing the sum")
        source, _ = self.mapped(way)
        sources = pointer(device + count * ctypes.sizeof(ctypes.c_longlong))
        self.kernels.launch(
            "read_only", way.stream, pointer(way.target), pointer(source), sources, number(count), number(size)
        )

    def differs(self, segments: Segments) -> int | None:
        """Compares the sum of all bytes: nothing else arrives."""
        import numpy as np

        for way in self.ways:
            pool = np.frombuffer(self._seen(way.source, on_device=not way.to_device), dtype=np.uint8)
            size = segments.segment_bytes
            expected = sum(int(pool[at : at + size].sum(dtype=np.uint64)) for at in segments.sources)
            found = int(np.frombuffer(self._seen(way.target, on_device=way.to_device)[:8], dtype=np.uint64)[0])
            if len(segments) and found != expected:
                return 0
        return None
