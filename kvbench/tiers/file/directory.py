"""A tier's directory: its lock, its files, direct or buffered, and whether the paths still lead to those files."""

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import warnings
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.errors import KvbenchError
from kvbench.tiers.file.layout import PAGE_BYTES, TIER_ID_BYTES, Superblock, read_superblock

FILE_NAME = "blocks.kv"
HEADERS_NAME = "headers.kv"
LOCK_NAME = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFile:
    """A tier's file of blocks and file of headers. Blocks go through `data_descriptor`, which may be direct."""

    path: Path
    lock: int
    descriptor: int
    data_descriptor: int
    headers_path: Path
    headers_descriptor: int
    direct: bool
    superblock: Superblock

    def is_there(self) -> bool:
        """Whether the paths still lead to these files: not when a mount has gone, or one was moved or replaced."""
        return _leads_to(self.path, self.descriptor) and _leads_to(self.headers_path, self.headers_descriptor)

    @property
    def descriptors(self) -> tuple[int, int]:
        """What has to be synced, in this order."""
        return self.descriptor, self.headers_descriptor

    def unlock(self) -> None:
        """Lets another process have the directory."""
        fcntl.flock(self.lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes all descriptors; nobody may be using them. A forked process that has them too keeps no lock."""
        self.unlock()
        if self.data_descriptor != self.descriptor:
            os.close(self.data_descriptor)
        os.close(self.headers_descriptor)
        os.close(self.descriptor)
        os.close(self.lock)


def open_file_in(directory: Path, *, slot_bytes: int, direct: bool | None, only_on: Path | None = None) -> OpenFile:
    """Opens the tier in a directory, or makes an empty one. `direct=None`: direct where the filesystem can.

    `only_on`: make an empty tier only on this mount, so that a directory whose mount has gone is not taken for it.
    """
    with contextlib.ExitStack() as undo:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if only_on is not None and not (directory / FILE_NAME).exists() and mount_of(directory) != only_on:
                raise KvbenchError(f"{directory} is not on {only_on} any more; mount it again")
            lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, lock)
            _take(lock, directory)
            if not (directory / FILE_NAME).exists():
                _make(directory, slot_bytes)
            path = directory / FILE_NAME
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, descriptor)
            superblock = read_superblock(os.pread(descriptor, PAGE_BYTES, 0), what=str(path))
            if not (directory / HEADERS_NAME).exists():
                _make_headers(directory)
                _sync_folder(directory)
            headers = os.open(directory / HEADERS_NAME, os.O_RDWR | os.O_CLOEXEC)
            undo.callback(os.close, headers)
        except OSError as error:
            raise KvbenchError(
                f"{directory}: {error.strerror or error}; name a directory that you may write to, on a disk with room"
            ) from error
        if superblock.slot_bytes < slot_bytes:
            raise KvbenchError(
                f"{path} was made for blocks of up to {superblock.slot_bytes} bytes, not {slot_bytes}; "
                "use another directory, or remove this file"
            )
        data_descriptor = None if direct is False else _opened_direct(path)
        if data_descriptor is None and direct is not False:
            warnings.warn(
                f"{directory}: this filesystem has no O_DIRECT, so blocks go through the page cache: loads may come "
                "from memory, and their speed is not the disk's; write direct=0 to say that this is meant",
                stacklevel=2,
            )
        undo.pop_all()
        return OpenFile(
            path=path,
            lock=lock,
            descriptor=descriptor,
            data_descriptor=descriptor if data_descriptor is None else data_descriptor,
            headers_path=directory / HEADERS_NAME,
            headers_descriptor=headers,
            direct=data_descriptor is not None,
            superblock=superblock,
        )


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        named, opened = path.stat(), os.fstat(descriptor)
    except OSError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def mount_of(directory: Path) -> Path:
    """The mount point that a directory is on."""
    place = directory.resolve()
    while not place.is_mount():
        place = place.parent
    return place


def _take(lock: int, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        raise KvbenchError(
            f"{directory} is in use by another tier (process {holder}); close that one, or use another directory"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def _make(directory: Path, slot_bytes: int) -> None:
    """An empty tier. It gets its name only when it is complete."""
    unnamed = directory / f"{FILE_NAME}.new"
    unnamed.unlink(missing_ok=True)
    (directory / HEADERS_NAME).unlink(missing_ok=True)  # of a tier whose blocks are gone
    _make_headers(directory)
    page = Superblock(tier_id=secrets.token_bytes(TIER_ID_BYTES), slot_bytes=slot_bytes).packed()
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, page, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    unnamed.rename(directory / FILE_NAME)
    _sync_folder(directory)


def _make_headers(directory: Path) -> None:
    os.close(os.open(directory / HEADERS_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _sync_folder(directory: Path) -> None:
    """Makes durable which files the directory has."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _opened_direct(path: Path) -> int | None:
    """A direct descriptor that has really read a page, or None where the filesystem cannot."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
    except OSError:
        return None
    with mmap.mmap(-1, PAGE_BYTES) as page:
        try:
            if hasattr(os, "O_DIRECT") and os.preadv(descriptor, [page], 0) == PAGE_BYTES:
                return descriptor
        except OSError as error:
            if error.errno != errno.EINVAL:
                os.close(descriptor)
                raise KvbenchError(f"{path}: {error.strerror}; check the disk and the kernel's log") from error
    os.close(descriptor)
    return None
