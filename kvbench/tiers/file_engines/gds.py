"""GPUDirect Storage through cuFile: from the disk into device memory, and what really carried the bytes."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from kvbench.core.errors import KvbenchError
from kvbench.tiers.cuda_runtime import checked, cuda_runtime, no_gpu_reason
from kvbench.tiers.file_engines.base import (
    Blocks,
    EngineSettings,
    EngineUnavailableError,
    address_of,
    ended_early,
)

_STATS = "proc/driver/nvidia-fs/stats"


class GdsEngine:
    """Threads that call cuFileRead and cuFileWrite on a registered device buffer of the same shape as the host's.

    The device is looked for first: without one, opening the cuFile driver spins for minutes.
    """

    def __init__(self, settings: EngineSettings, *, root: Path = Path("/")) -> None:
        reason = no_gpu_reason()
        if reason is not None:
            raise EngineUnavailableError(reason)
        try:
            from cuda.bindings import cufile
        except ImportError as error:
            raise EngineUnavailableError(
                "cuFile needs cuda-bindings and nvidia-cufile; run: pip install 'kvbench[nvidia]' nvidia-cufile"
            ) from error
        self._settings, self._cufile, self._runtime, self._root = settings, cufile, cuda_runtime(), root
        num_bytes = len(settings.buffer)
        checked(self._runtime.cudaSetDevice(0), "GPU 0")
        self._device = int(checked(self._runtime.cudaMalloc(num_bytes), "device memory"))
        kinds = self._runtime.cudaMemcpyKind
        self._to_host, self._to_device = kinds.cudaMemcpyDeviceToHost, kinds.cudaMemcpyHostToDevice
        self._host = address_of(settings.buffer)
        self._copy(0, num_bytes, self._to_device)
        self._before = nvidia_fs_operations(root=root)
        cufile.driver_open()
        descriptor = cufile.Descr()
        descriptor.type = cufile.FileHandleType.OPAQUE_FD
        descriptor.handle.fd = settings.descriptor
        self._file = cufile.handle_register(descriptor.ptr)
        cufile.buf_register(self._device, num_bytes, 0)
        self._pool = ThreadPoolExecutor(settings.depth)

    def transfer(self, blocks: Blocks) -> None:
        """One thread per block in flight."""
        indexes = iter(range(len(blocks.offsets)))
        tasks = [self._pool.submit(self._move, slot, blocks, indexes) for slot in range(self._settings.depth)]
        wait(tasks)  # all of them: a thread that still moves would write into memory that is the caller's again
        for task in tasks:
            task.result()

    def _move(self, slot: int, blocks: Blocks, indexes: Iterator[int]) -> None:
        move = self._cufile.read if blocks.direction == "load" else self._cufile.write
        before, after = blocks.before, blocks.after
        for index in indexes:
            size, offset = blocks.sizes[index], blocks.offsets[index]
            place = slot * self._settings.slot_bytes if blocks.places is None else blocks.places[index]
            if before is not None and size:
                before(index, slot)
                if blocks.direction == "store":
                    self._copy(place, size, self._to_device)
            done = 0
            while done < size:
                moved = move(self._file, self._device, size - done, offset + done, place + done)
                if moved < 0:
                    raise KvbenchError(f"cuFile {blocks.direction} at offset {offset}: error {moved}; see cufile.log")
                if moved == 0:
                    raise ended_early(blocks, index, done)
                done += moved
            if blocks.sync_each:
                os.fdatasync(self._settings.descriptor)
            if after is not None and size:
                if blocks.direction == "load":
                    self._copy(place, size, self._to_host)
                after(index, slot)

    def cool(self) -> None:
        """Nothing is held."""

    def show(self) -> None:
        """Copies the device's buffer into the host's."""
        self._copy(0, len(self._settings.buffer), self._to_host)

    def _copy(self, place: int, size: int, kind: Any) -> None:
        """Between the same place of the device's buffer and the host's. A handler sees the host's."""
        device, host = self._device + place, self._host + place
        into, source = (device, host) if kind == self._to_device else (host, device)
        checked(self._runtime.cudaMemcpy(into, source, size, kind), "device memory")

    def what_ran(self) -> str:
        """Whether nvidia-fs carried the bytes, by its own counters and not by the speed."""
        after = nvidia_fs_operations(root=self._root)
        if after is None:
            return "nvidia-fs is not loaded: cuFile ran in compatibility mode, or by the kernel's own P2P DMA"
        if self._before is not None and after > self._before:
            return f"nvidia-fs carried {after - self._before} operations"
        return "nvidia-fs is loaded but its counters did not move: cuFile ran in compatibility mode"

    def close(self) -> None:
        """Deregisters everything."""
        self._pool.shutdown()
        self._cufile.buf_deregister(self._device)
        self._cufile.handle_deregister(self._file)
        self._cufile.driver_close()
        self._runtime.cudaFree(self._device)


def nvidia_fs_operations(*, root: Path = Path("/")) -> int | None:
    """Reads plus writes that nvidia-fs counts, or None where it is not loaded.

    Reads lines such as `Reads				: n=16 ok=16 err=0 readMiB=64 io_state_err=0`.
    """
    try:
        text = (root / _STATS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return sum(int(count) for count in re.findall(r"^(?:Reads|Writes)\s*:\s*n=(\d+)", text, re.MULTILINE))
