"""GPU memory as a tier: a pool that is one torch tensor; a CPU tensor, and called so, on a host without a GPU."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError, MissingDependencyError, UsageError
from kvbench.core.units import format_bytes
from kvbench.tiers.copying import copy_bytes
from kvbench.tiers.cuda_runtime import no_gpu_reason
from kvbench.tiers.memory import MemoryTier, PoolError
from kvbench.tiers.slots import Parts, SlotAllocator
from kvbench.tiers.spec import TierSpec

if TYPE_CHECKING:
    import torch

_SLOT_ALIGNMENT = 256  # what a CUDA kernel may assume of a tensor of any type
_STAGINGS = 4


def open_device(spec: TierSpec, *, block_bytes: int, name: str) -> "DeviceTier":
    """The tier that `hbm:SIZE` or `device:SIZE` spells."""
    if spec.size_bytes is None:
        raise UsageError(f"tier {spec} has no size; write it like hbm:1GiB")
    if spec.size_bytes < block_bytes:
        raise UsageError(
            f"tier {spec} is smaller than one block of {format_bytes(block_bytes)}; give it room for several"
        )
    return DeviceTier(name=name, block_bytes=block_bytes, capacity_bytes=spec.size_bytes)


class DeviceTier(MemoryTier):
    """A `MemoryTier` whose blocks can be used where they lie. Every block takes a whole slot."""

    def __init__(self, *, name: str, block_bytes: int, capacity_bytes: int) -> None:
        slot_bytes = -(-block_bytes // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT
        slots = max(capacity_bytes // slot_bytes, 1)
        self._tensor_pool = _opened_pool(slots, slot_bytes)
        self.on_gpu = self._tensor_pool.on_gpu
        super().__init__(self._tensor_pool, name=name, block_bytes=block_bytes, capacity_bytes=capacity_bytes)

    @contextmanager
    def view(self, key: BlockKey) -> "Iterator[torch.Tensor | None]":
        """The block as a uint8 tensor in the pool itself, or None; its room stays its own until the `with` ends."""
        with self.held_parts(key) as parts:
            yield None if parts is None else self._tensor_pool.tensor(parts)


def _opened_pool(slots: int, slot_bytes: int) -> "TensorPool":
    reason = no_gpu_reason()  # before torch, whose import takes seconds and does not fail without a GPU
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "torch", "a tier in GPU memory") from error
    num_bytes = slots * slot_bytes
    if reason is None and not torch.cuda.is_available():
        reason = "this torch is built without CUDA"
    if reason is not None:
        return TensorPool(torch.zeros(num_bytes, dtype=torch.uint8), slots, f"torch CPU tensor ({reason})")
    try:
        return CudaPool(torch.empty(num_bytes, dtype=torch.uint8, device="cuda"), slots, slot_bytes)
    except torch.OutOfMemoryError as error:
        raise KvbenchError(
            f"a pool of {format_bytes(num_bytes)} does not fit the GPU's free memory; give a smaller hbm:SIZE"
        ) from error


class TensorPool:
    """Equal slots in a CPU tensor."""

    on_gpu = False

    def __init__(self, pool: "torch.Tensor", slots: int, description: str) -> None:
        self.description = description
        self._pool: torch.Tensor | None = pool
        self._slots = SlotAllocator(len(pool) // slots, align_bytes=len(pool) // slots)
        self._slots.add(range(slots))

    def tensor(self, parts: Parts) -> "torch.Tensor":
        """A block, which is always in one piece here."""
        ((offset, num_bytes),) = parts
        assert self._pool is not None
        return self._pool[offset : offset + num_bytes]

    def allocate(self, num_bytes: int) -> Parts | None:
        """A slot."""
        return self._slots.allocate(num_bytes)

    def free(self, parts: Parts) -> None:
        """Gives a slot back."""
        self._slots.free(parts)

    def write(self, parts: Parts, data: memoryview) -> None:
        """Copies a block in."""
        copy_bytes(memoryview(self.tensor(parts).numpy()), data)

    def read(self, parts: Parts, into: memoryview) -> None:
        """Copies a block out."""
        copy_bytes(into, memoryview(self.tensor(parts).numpy()))

    def shrink(self) -> int:
        """Nothing: one tensor has one size."""
        return 0

    def shrink_idle(self) -> int:
        """Nothing."""
        return 0

    def close(self) -> None:
        """Gives the memory back."""
        self._pool = None


class CudaPool(TensorPool):
    """Equal slots in GPU memory. Copies go through pinned staging buffers, each with a stream of its own."""

    on_gpu = True

    def __init__(self, pool: "torch.Tensor", slots: int, slot_bytes: int) -> None:
        import torch

        super().__init__(pool, slots, f"{pool.device} ({torch.cuda.get_device_name(pool.device)})")
        self._stagings: queue.SimpleQueue[tuple[torch.Tensor, Any]] = queue.SimpleQueue()
        for _ in range(_STAGINGS):
            buffer = torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True)
            self._stagings.put((buffer, torch.cuda.Stream(pool.device)))

    @contextmanager
    def _staging(self) -> "Iterator[tuple[torch.Tensor, Any]]":
        """A buffer for one copy; copies are bounded by the device, so waiting for one ends."""
        staging = self._stagings.get()
        try:
            yield staging
        except RuntimeError as error:  # torch's: the GPU fell off, or another kernel broke its context
            raise PoolError(f"the GPU does not copy ({str(error).partition(chr(10))[0]})") from error
        finally:
            self._stagings.put(staging)

    def write(self, parts: Parts, data: memoryview) -> None:
        """Host → staging → GPU."""
        import torch

        target = self.tensor(parts)
        with self._staging() as (buffer, stream):
            copy_bytes(memoryview(buffer[: data.nbytes].numpy()), data)
            with torch.cuda.stream(stream):
                target.copy_(buffer[: data.nbytes], non_blocking=True)
            stream.synchronize()

    def read(self, parts: Parts, into: memoryview) -> None:
        """GPU → staging → host. Work on the slot that other streams have begun is waited for."""
        import torch

        source = self.tensor(parts)
        with self._staging() as (buffer, stream):
            stream.wait_stream(torch.cuda.current_stream(source.device))
            with torch.cuda.stream(stream):
                buffer[: into.nbytes].copy_(source, non_blocking=True)
            stream.synchronize()
            copy_bytes(into, memoryview(buffer[: into.nbytes].numpy()))
