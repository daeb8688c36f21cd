"""A file of random bytes that really lies on the disk, and whose name is gone before anything is timed."""

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB, format_bytes
from kvbench.probes.device_memory import PAGE_BYTES, random_bytes_into

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_WRITE_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchFile:
    """An open file with the checksum of each of its pages; `direct_descriptor` is None where O_DIRECT is refused."""

    directory: Path
    descriptor: int
    direct_descriptor: int | None
    checksums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.checksums) * PAGE_BYTES


@contextlib.contextmanager
def scratch_file(path: Path, num_bytes: int, *, direct: bool) -> Iterator[ScratchFile]:
    """Writes the file. Its name is gone before the first transfer, so nothing can leave it behind."""
    with contextlib.ExitStack() as stack:
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        stack.callback(os.close, descriptor)
        try:
            direct_descriptor = _opened_direct(path) if direct else None
        finally:
            path.unlink()
        if direct_descriptor is not None:
            stack.callback(os.close, direct_descriptor)
        checksums = tuple(_write_random(descriptor, num_bytes, path.parent))
        if direct_descriptor is not None and not _direct_reads_work(direct_descriptor):
            direct_descriptor = None
        yield ScratchFile(
            directory=path.parent, descriptor=descriptor, direct_descriptor=direct_descriptor, checksums=checksums
        )


def usable_file_bytes(directory: Path, wanted_bytes: int) -> int:
    """How large a file may become: what was asked for, but at most half of what is free."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise KvbenchError(_unusable(directory, error)) from error
    usable = min(wanted_bytes, free // 2)
    return usable - usable % PAGE_BYTES


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        raise KvbenchError(_unusable(path.parent, error)) from error


def _unusable(directory: Path, error: OSError) -> str:
    return f"{directory}: {error.strerror or error}; name a directory that exists and that you may write to"


def _opened_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError):  # AttributeError: no O_DIRECT on this system
        return None


def _direct_reads_work(descriptor: int) -> bool:
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            return os.preadv(descriptor, [page], 0) == PAGE_BYTES
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False


def _write_random(descriptor: int, num_bytes: int, directory: Path) -> list[int]:
    """Writes the file through to the disk and returns the checksum of each page."""
    from crc32c import crc32c

    checksums: list[int] = []
    written = 0
    try:
        for start in range(0, num_bytes, _WRITE_BYTES):
            chunk = bytearray(min(_WRITE_BYTES, num_bytes - start))
            random_bytes_into(memoryview(chunk), seed=start)
            view = memoryview(chunk)
            checksums += [crc32c(view[page : page + PAGE_BYTES]) for page in range(0, len(chunk), PAGE_BYTES)]
            done = 0
            while done < len(chunk):
                done += os.write(descriptor, view[done:])
                written = start + done
        os.fsync(descriptor)  # dirty pages cannot be dropped, and a direct read would wait for them
    except OSError as error:
        raise KvbenchError(
            f"{directory}: {error.strerror} after {format_bytes(written)} of {format_bytes(num_bytes)}; "
            "free some space or give a smaller size"
        ) from error
    return checksums
