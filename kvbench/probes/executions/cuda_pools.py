"""Pinned host memory and device memory for one GPU, and what every CUDA execution does with them."""

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from kvbench.core.errors import KvbenchError
from kvbench.core.units import seconds_from_ms
from kvbench.probes.device_memory import random_bytes_into
from kvbench.probes.executions.base import Direction, ExecutionUnavailableError
from kvbench.probes.executions.host import first_difference
from kvbench.probes.segments import Segments
from kvbench.tiers.cuda_runtime import Kernels, checked, cuda_runtime, no_gpu_reason, pointer
from kvbench.tiers.file_engines.base import address_of, aligned_buffer

# The hardware queue holds about a thousand launches. Behind a gate nothing drains it, so a launch beyond that would
# wait for the gate while the gate waits for it.
MOST_GATED_LAUNCHES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One direction: where it begins and ends, the kind of memcpy, and a stream that is not the legacy one."""

    source: int
    target: int
    kind: Any
    to_device: bool
    stream: Any


class CudaPools(ABC):
    """Pools on both sides, a stream per way, and the clock. Subclasses say how bytes get onto a stream."""

    pinned = True
    gated = True

    def __init__(self, *, direction: Direction, pool_bytes: int, device: int = 0) -> None:
        reason = no_gpu_reason()
        if reason is not None:
            raise ExecutionUnavailableError(reason)
        if direction == "h2h":
            raise KvbenchError(f"direction h2h does not touch a GPU, and {type(self).__name__} does; use h2d or d2h")
        runtime = cuda_runtime()
        self.runtime, self.device, self._pool_bytes = runtime, device, pool_bytes
        checked(runtime.cudaSetDevice(device), f"GPU {device}")
        checked(runtime.cudaFree(0), f"context of GPU {device}")
        self.kernels = Kernels(device)
        self._pinned_views: list[tuple[int, memoryview]] = []
        self._device_pools: list[int] = []
        self.ways = [self._way(to_device) for to_device in self._sides(direction)]
        # the gate is one int in host memory that the device sees
        self._gate_address, self._gate = self._host_memory(ctypes.sizeof(ctypes.c_int), pinned=True)
        self._begin = self._event()
        self._ends = [self._event() for _ in self.ways]
        host = "pinned host memory" if self.pinned else "pageable host memory"
        names = {"h2d": (host, f"cuda:{device}"), "d2h": (f"cuda:{device}", host)}
        self.source, self.target = names.get(direction, (f"{host} and cuda:{device}", f"cuda:{device} and {host}"))

    @staticmethod
    def _sides(direction: Direction) -> tuple[bool, ...]:
        return (True, False) if direction == "duplex" else (direction == "h2d",)

    def _way(self, to_device: bool) -> Way:
        runtime = self.runtime
        host, view = self._host_memory(self._pool_bytes, pinned=self.pinned)
        device = int(checked(runtime.cudaMalloc(self._pool_bytes), "device memory"))
        self._device_pools.append(device)
        random_bytes_into(view, seed=1 + len(self._device_pools))
        kinds = runtime.cudaMemcpyKind
        if not to_device:
            kind = kinds.cudaMemcpyHostToDevice
            checked(runtime.cudaMemcpy(device, host, self._pool_bytes, kind), "filling device memory")
        stream = checked(runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking), "a stream")
        kind = kinds.cudaMemcpyHostToDevice if to_device else kinds.cudaMemcpyDeviceToHost
        source, target = (host, device) if to_device else (device, host)
        return Way(source=source, target=target, kind=kind, to_device=to_device, stream=stream)

    def _host_memory(self, num_bytes: int, *, pinned: bool) -> tuple[int, memoryview]:
        if not pinned:
            view = aligned_buffer(num_bytes)
            self._pinned_views.append((0, view))
            return address_of(view), view
        flags = self.runtime.cudaHostAllocMapped | self.runtime.cudaHostAllocPortable
        address = int(checked(self.runtime.cudaHostAlloc(num_bytes, flags), "pinned host memory"))
        view = memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")
        self._pinned_views.append((address, view))
        return address, view

    def _event(self) -> Any:
        return checked(self.runtime.cudaEventCreate(), "an event")

    def mapped(self, way: Way) -> tuple[int, int]:
        """Source and target as a kernel sees them: the host side through its device address."""
        host = way.source if way.to_device else way.target
        seen = int(checked(self.runtime.cudaHostGetDevicePointer(host, 0), "mapping of host memory"))
        return (seen, way.target) if way.to_device else (way.source, seen)

    def launches(self, prepared: Any) -> int:
        """How many entries one way puts into the queue of its stream."""
        del prepared
        return 1

    @abstractmethod
    def plan_way(self, segments: Segments, way: Way) -> Any:
        """What `enqueue` needs, made outside the clock."""

    @abstractmethod
    def enqueue(self, prepared: Any, way: Way) -> None:
        """Puts the copies of one way onto its stream."""

    def prepare(self, segments: Segments) -> list[Any]:
        return [self.plan_way(segments, way) for way in self.ways]

    def copy(self, prepared: list[Any]) -> None:
        """From the first call to the end of the last stream."""
        self.runtime.cudaSetDevice(self.device)
        for plan, way in zip(prepared, self.ways, strict=True):
            self.enqueue(plan, way)
        for way in self.ways:
            checked(self.runtime.cudaStreamSynchronize(way.stream), "the copy")

    def wire_s(self, prepared: list[Any]) -> float | None:
        """Time between two events, with everything enqueued before the first copy may begin (as nvbandwidth does)."""
        if not self.gated or max(map(self.launches, prepared)) > MOST_GATED_LAUNCHES:
            return None
        runtime = self.runtime
        gate = ctypes.c_int.from_address(self._gate_address)
        gate.value = 0
        seen = int(checked(runtime.cudaHostGetDevicePointer(self._gate_address, 0), "mapping of the gate"))
        first = self.ways[0].stream
        self.kernels.launch("hold", first, pointer(seen), blocks=1, threads=1)
        checked(runtime.cudaEventRecord(self._begin, first), "an event")
        for way in self.ways[1:]:
            checked(runtime.cudaStreamWaitEvent(way.stream, self._begin, 0), "waiting for the gate")
        try:
            for plan, way, end in zip(prepared, self.ways, self._ends, strict=True):
                self.enqueue(plan, way)
                checked(runtime.cudaEventRecord(end, way.stream), "an event")
        finally:
            gate.value = 1
        for way in self.ways:
            checked(runtime.cudaStreamSynchronize(way.stream), "the gated copy")
        ends = (checked(runtime.cudaEventElapsedTime(self._begin, end), "event times") for end in self._ends)
        return seconds_from_ms(max(float(milliseconds) for milliseconds in ends))

    def clear_target(self) -> None:
        for way in self.ways:
            if way.to_device:
                checked(self.runtime.cudaMemset(way.target, 0, self._pool_bytes), "clearing device memory")
            else:
                ctypes.memset(way.target, 0, self._pool_bytes)

    def differs(self, segments: Segments) -> int | None:
        """Copies both pools of every way back with one plain copy each, and compares."""
        for way in self.ways:
            found = first_difference(
                segments, self._seen(way.source, not way.to_device), self._seen(way.target, way.to_device)
            )
            if found is not None:
                return found
        return None

    def _seen(self, address: int, on_device: bool) -> memoryview:
        if not on_device:
            return memoryview((ctypes.c_ubyte * self._pool_bytes).from_address(address)).cast("B")
        view = aligned_buffer(self._pool_bytes)
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        checked(self.runtime.cudaMemcpy(address_of(view), address, self._pool_bytes, kind), "reading device memory")
        return view

    def close(self) -> None:
        for address in self._device_pools:
            self.runtime.cudaFree(address)
        for address, _ in self._pinned_views:
            if address:
                self.runtime.cudaFreeHost(address)


class CudaCompute:
    """Arithmetic on a stream of its own, to run beside copies; `rounds_per_s` says how fast it went."""

    def __init__(self, device: int = 0) -> None:
        self._runtime = cuda_runtime()
        checked(self._runtime.cudaSetDevice(device), f"GPU {device}")
        self._device, self._kernels = device, Kernels(device)
        self._stream = checked(self._runtime.cudaStreamCreateWithFlags(self._runtime.cudaStreamNonBlocking), "a stream")
        self._sink = int(checked(self._runtime.cudaMalloc(4), "device memory"))

    def one_round(self) -> None:
        """Some hundred microseconds of arithmetic on every multiprocessor."""
        self._runtime.cudaSetDevice(self._device)
        self._kernels.launch("burn", self._stream, pointer(self._sink), (200_000, ctypes.c_int))
        checked(self._runtime.cudaStreamSynchronize(self._stream), "arithmetic")
