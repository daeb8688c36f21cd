"""The memory a load ends in: a CUDA tensor, and on a host without a GPU a torch CPU tensor or a numpy buffer."""

from dataclasses import dataclass
from typing import Any, Protocol

from kvbench.core.units import MIB

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBuffer:
    """Pre-faulted, page-aligned host memory; `view` reads and writes the same bytes as `handle`."""

    view: memoryview
    handle: Any
    pinned: bool


class DeviceMemory(Protocol):
    """A pool of bytes that loads are copied into; `name` says what it really is."""

    name: str
    wants_pinned: bool

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        """Page-aligned host memory to copy from, pinned where that exists."""
        ...

    def adopt(self, view: memoryview) -> HostBuffer:
        """Memory that somebody else owns, such as a mapped file, as something to copy from."""
        ...

    def copy_in(self, offset: int, source: HostBuffer, source_offset: int, num_bytes: int) -> None:
        """Copies into the pool and returns when the bytes are there."""
        ...

    def read_back(self, offset: int, num_bytes: int) -> memoryview:
        """A part of the pool as the CPU can read it, to compare with what was loaded."""
        ...


def open_device_memory(device: str, pool_bytes: int) -> DeviceMemory:
    """The memory named `cuda`, `cpu`, or by `auto` the best there is; falls back to numpy where torch is missing."""
    try:
        import torch
    except ImportError:
        return _NumpyMemory(pool_bytes)
    use_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return _TorchMemory("cuda:0" if use_cuda else "cpu", pool_bytes)


def random_bytes_into(view: memoryview, *, seed: int) -> None:
    """Fills a buffer with random bytes: storage that compresses or merges equal blocks must not get a gift."""
    import numpy as np

    generator = np.random.default_rng(seed)
    target = np.frombuffer(view, dtype=np.uint8)
    for start in range(0, len(target), 16 * MIB):
        part = target[start : start + 16 * MIB]
        words = generator.integers(0, 1 << 64, size=(len(part) + 7) // 8, dtype=np.uint64)
        part[:] = words.view(np.uint8)[: len(part)]


class _TorchMemory:
    """A uint8 tensor. Copies to CUDA run on a stream of their own per call and are waited for."""

    def __init__(self, device: str, pool_bytes: int) -> None:
        import torch

        self._device = torch.device(device)
        self.name = "torch cpu tensor" if device == "cpu" else device
        self.wants_pinned = self._device.type == "cuda"
        # one thread per reader: with torch's own threads, "one reader" would mean as many copies as there are cores
        torch.set_num_threads(1)
        self._pool = torch.zeros(pool_bytes, dtype=torch.uint8, device=self._device)  # zeros touch every page
        if self.wants_pinned:
            torch.cuda.synchronize(self._device)

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        import torch

        pinned = self.wants_pinned
        try:
            # CUDA gives whole pages; a spare page on top would make torch round a pool up to twice its size
            whole = torch.empty(num_bytes + (0 if pinned else PAGE_BYTES), dtype=torch.uint8, pin_memory=pinned)
        except RuntimeError:  # the limit on locked memory; a pageable copy is slower and says so
            pinned = False
            whole = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
        start = 0 if pinned else -whole.data_ptr() % PAGE_BYTES
        handle = whole[start : start + num_bytes].zero_()
        return HostBuffer(view=memoryview(handle.numpy()), handle=handle, pinned=pinned)

    def adopt(self, view: memoryview) -> HostBuffer:
        import torch

        return HostBuffer(view=view, handle=torch.frombuffer(view, dtype=torch.uint8), pinned=False)

    def copy_in(self, offset: int, source: HostBuffer, source_offset: int, num_bytes: int) -> None:
        import torch

        target = self._pool[offset : offset + num_bytes]
        origin = source.handle[source_offset : source_offset + num_bytes]
        if self._device.type == "cpu":
            target.copy_(origin)
            return
        stream = torch.cuda.Stream(self._device)  # a pooled handle: making one costs no driver call
        with torch.cuda.stream(stream):
            target.copy_(origin, non_blocking=source.pinned)
        stream.synchronize()

    def read_back(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._pool[offset : offset + num_bytes].cpu().numpy())


class _NumpyMemory:
    """A numpy array, for hosts without torch."""

    name = "numpy buffer"
    wants_pinned = False

    def __init__(self, pool_bytes: int) -> None:
        self._pool = _aligned(pool_bytes)

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        handle = _aligned(num_bytes)
        return HostBuffer(view=memoryview(handle), handle=handle, pinned=False)

    def adopt(self, view: memoryview) -> HostBuffer:
        import numpy as np

        return HostBuffer(view=view, handle=np.frombuffer(view, dtype=np.uint8), pinned=False)

    def copy_in(self, offset: int, source: HostBuffer, source_offset: int, num_bytes: int) -> None:
        import numpy as np

        np.copyto(self._pool[offset : offset + num_bytes], source.handle[source_offset : source_offset + num_bytes])

    def read_back(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._pool[offset : offset + num_bytes])


def _aligned(num_bytes: int) -> Any:
    import numpy as np

    whole = np.empty(num_bytes + PAGE_BYTES, dtype=np.uint8)
    start = -whole.ctypes.data % PAGE_BYTES
    buffer = whole[start : start + num_bytes]
    buffer[:] = 0
    return buffer
