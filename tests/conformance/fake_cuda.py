"""A CUDA runtime whose device memory is host memory: it checks the shape of every call, and really copies.

`abi` is the major version of cuda-bindings: 12 returns (error, failed index) from cudaMemcpyBatchAsync, 13 (error).
"""

import ctypes
from enum import IntEnum
from types import SimpleNamespace
from typing import Any


class Error(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1


class Kind(IntEnum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class FakeCuda:
    cudaMemcpyKind = Kind
    cudaMemcpySrcAccessOrder = SimpleNamespace(cudaMemcpySrcAccessOrderStream=1)
    cudaHostAllocMapped, cudaHostAllocPortable, cudaStreamNonBlocking = 2, 1, 1

    def __init__(self, abi: int = 13) -> None:
        self.abi = abi
        self.calls: list[str] = []
        self.memory: dict[int, Any] = {}
        self.freed: list[int] = []
        self._next_handle = 100

    class cudaMemcpyAttributes:
        srcAccessOrder: int | None = None

    def _ok(self, name: str, *values: Any) -> tuple[Any, ...]:
        self.calls.append(name)
        return (Error.cudaSuccess, *values)

    def _allocated(self, size: int) -> int:
        block = (ctypes.c_ubyte * (size + 4096))()
        address = (ctypes.addressof(block) + 4095) // 4096 * 4096
        self.memory[address] = block
        return address

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        return self._ok("cudaSetDevice")

    def cudaFree(self, address: int) -> tuple[Any, ...]:
        self.freed.append(address)
        return self._ok("cudaFree")

    def cudaFreeHost(self, address: int) -> tuple[Any, ...]:
        self.freed.append(address)
        return self._ok("cudaFreeHost")

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        return self._ok("cudaMalloc", self._allocated(size))

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        assert flags == 3, "mapped and portable"
        return self._ok("cudaHostAlloc", self._allocated(size))

    def cudaHostGetDevicePointer(self, address: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return self._ok("cudaHostGetDevicePointer", address)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        assert flags == self.cudaStreamNonBlocking, "a blocking stream would wait for the legacy one"
        self._next_handle += 1
        return self._ok("cudaStreamCreateWithFlags", self._next_handle)

    def cudaEventCreate(self) -> tuple[Any, ...]:
        self._next_handle += 1
        return self._ok("cudaEventCreate", self._next_handle)

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        assert stream
        return self._ok("cudaEventRecord")

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        assert flags == 0
        return self._ok("cudaStreamWaitEvent")

    def cudaStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        return self._ok("cudaStreamSynchronize")

    def cudaEventElapsedTime(self, begin: int, end: int) -> tuple[Any, ...]:
        return self._ok("cudaEventElapsedTime", 2.5)

    def cudaMemset(self, address: int, value: int, size: int) -> tuple[Any, ...]:
        ctypes.memset(address, value, size)
        return self._ok("cudaMemset")

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        ctypes.memset(address, value, size)
        return self._ok("cudaMemsetAsync")

    def cudaMemcpy(self, target: int, source: int, size: int, kind: Kind) -> tuple[Any, ...]:
        ctypes.memmove(target, source, size)
        return self._ok("cudaMemcpy")

    def cudaMemcpyAsync(self, target: int, source: int, size: int, kind: Kind, stream: int) -> tuple[Any, ...]:
        assert stream, "never on the legacy stream"
        assert size > 0
        ctypes.memmove(target, source, size)
        return self._ok("cudaMemcpyAsync")

    def cudaMemcpy2DAsync(
        self, target: int, tpitch: int, source: int, spitch: int, width: int, height: int, kind: Kind, stream: int
    ) -> tuple[Any, ...]:
        assert stream
        assert min(tpitch, spitch) >= width > 0
        for row in range(height):
            ctypes.memmove(target + row * tpitch, source + row * spitch, width)
        return self._ok("cudaMemcpy2DAsync")

    def cudaMemcpyBatchAsync(
        self,
        targets: list[int],
        sources: list[int],
        sizes: list[int],
        count: int,
        attributes: list[Any],
        attribute_indexes: list[int],
        num_attributes: int,
        stream: int,
    ) -> tuple[Any, ...]:
        assert stream, "refuses the legacy stream"
        assert len(targets) == len(sources) == len(sizes) == count > 0
        assert all(isinstance(value, int) for value in (*targets, *sources, *sizes))
        assert len(attributes) == len(attribute_indexes) == num_attributes == 1
        assert attribute_indexes[0] == 0
        assert attributes[0].srcAccessOrder == 1, "without an order the driver answers cudaErrorInvalidValue"
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        failed = () if self.abi >= 13 else (0,)
        return self._ok("cudaMemcpyBatchAsync", *failed)


class FakeKernels:
    """Does in Python what the kernels do, from the arguments a launch really gets."""

    def __init__(self, device: int = 0) -> None:
        self.launched: list[str] = []

    def launch(
        self, name: str, stream: Any, *arguments: tuple[int, Any], blocks: int | None = None, threads: int = 512
    ) -> None:
        assert stream
        self.launched.append(name)
        values = [value for value, _ in arguments]
        assert all(kind in (ctypes.c_void_p, ctypes.c_longlong) for _, kind in arguments)
        if name == "gather":
            target, source, targets, sources, segments, size = values
            for to, origin in zip(_words(targets, segments), _words(sources, segments), strict=True):
                ctypes.memmove(target + to, source + origin, size)
        elif name == "read_only":
            total, source, sources, segments, size = values
            found = sum(sum(ctypes.string_at(source + origin, size)) for origin in _words(sources, segments))
            ctypes.c_ulonglong.from_address(total).value = found
        else:
            assert name == "hold"
            assert (blocks, threads) == (1, 1)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_longlong * count).from_address(address))
