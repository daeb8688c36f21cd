"""The `file` tier: a directory that may be slow, full, damaged or gone, and what becomes of blocks then."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.units import format_bytes, format_duration, parse_duration
from kvbench.tiers.base import Block, Entry, Outcome, TierStats, Wanted
from kvbench.tiers.counters import TierCounters
from kvbench.tiers.deadline import Deadline, LimitedDeadline
from kvbench.tiers.file.directory import OpenFile, mount_of, open_file_in
from kvbench.tiers.file.extent import Extent, ExtentSettings
from kvbench.tiers.file.lanes import OpenEngine, all_memory
from kvbench.tiers.file.layout import PAGE_BYTES, slot_bytes_for
from kvbench.tiers.file.sync import sync_of
from kvbench.tiers.file_engines.base import EngineSettings, EngineUnavailableError, aligned_buffer
from kvbench.tiers.file_engines.registry import open_engine as open_engine_by_name
from kvbench.tiers.spec import FileIo, Fsync, TierSpec

DEFAULT_DEPTH = 16
_PREFERRED_IO: tuple[FileIo, ...] = ("io_uring", "aio", "psync")
_RETRY_S = 0.25
_CALLS = 32
_T = TypeVar("_T")


def open_file(spec: TierSpec, *, block_bytes: int, name: str) -> "FileTier":
    """The tier that `file:DIRECTORY?size=…&io=…&direct=…&fsync=…&depth=…&timeout=…` spells."""
    options = dict(spec.options)
    if spec.size_bytes is not None and spec.size_bytes < slot_bytes_for(block_bytes):
        raise UsageError(
            f"tier {spec} is smaller than one block of {format_bytes(block_bytes)}; give it room for several"
        )
    return FileTier(
        Path(spec.location),
        name=name,
        block_bytes=block_bytes,
        size_bytes=spec.size_bytes,
        io=spec.io,
        direct=spec.direct,
        fsync=spec.fsync or "none",
        depth=int(options.get("depth", DEFAULT_DEPTH)),
        timeout_s=parse_duration(options["timeout"]) if "timeout" in options else None,
    )


class FileTier:
    """Blocks in a file of a directory.

    When the path no longer leads to that file (its mount has gone, or it was moved) every call fails at once, and the
    tier opens the directory again as soon as it is back. With `timeout_s`, a call that the disk does not answer in time
    ends with `timeout`, and calls after it too until the disk answers; without, the kernel's own limits are the limits.
    `direct` says whether blocks really bypass the page cache.
    """

    def __init__(
        self,
        directory: Path,
        *,
        name: str = "file",
        block_bytes: int,
        size_bytes: int | None = None,
        io: FileIo | None = None,
        direct: bool | None = None,
        fsync: Fsync = "none",
        depth: int = DEFAULT_DEPTH,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        open_engine: OpenEngine = open_engine_by_name,
    ) -> None:
        self.name, self.directory, self.block_bytes = name, directory, block_bytes
        self._size_bytes, self._depth, self._open_engine = size_bytes, depth, open_engine
        self._direct, self._sync = False if io == "mmap" else direct, sync_of(fsync)
        self._timeout_s, self._clock = timeout_s, clock
        self._counters = TierCounters()
        self._lock = threading.Lock()  # held while the directory is looked at, which a dead mount never answers
        self._calls_lock = threading.Lock()  # never held while the disk is asked
        self._users: dict[Extent, int] = {}
        self._extent: Extent | None = None
        self._closed = False
        self._next_try = 0.0
        self._lost_reason = ""
        self._late: list[Future[Any]] = []
        self._calls = None if timeout_s is None else ThreadPoolExecutor(_CALLS, thread_name_prefix="kvbench-file")
        file = self._open_directory(None)
        try:
            self._io = self._usable_io(file, io)
            self._use(file)
        except BaseException:
            file.close()
            raise
        self._mount = mount_of(directory)
        self.direct = file.direct
        how = "O_DIRECT" if file.direct else "through the page cache"
        self.description = f"{directory}, {self._io}, {how}, fsync={fsync}"

    def _open_directory(self, only_on: Path | None) -> OpenFile:
        slot_bytes = slot_bytes_for(self.block_bytes)
        return open_file_in(self.directory, slot_bytes=slot_bytes, direct=self._direct, only_on=only_on)

    def _usable_io(self, file: OpenFile, io: FileIo | None) -> FileIo:
        """The engine asked for, or the first of the preferred ones that this host has."""
        for candidate in _PREFERRED_IO if io is None else (io,):
            try:
                self._open_engine(candidate, self._trial(file, candidate)).close()
            except EngineUnavailableError:
                if candidate in (io, _PREFERRED_IO[-1]):
                    raise
            else:
                return candidate
        raise AssertionError("the last candidate was opened or its refusal raised")

    def _trial(self, file: OpenFile, io: FileIo) -> EngineSettings:
        return EngineSettings(
            descriptor=file.data_descriptor,
            file_bytes=PAGE_BYTES,
            buffer=aligned_buffer(self._depth * PAGE_BYTES) if io == "gds" else all_memory(),
            depth=self._depth,
            slot_bytes=PAGE_BYTES,
            direct=file.direct,
        )

    def _use(self, file: OpenFile) -> None:
        slot_bytes = file.superblock.slot_bytes
        extent = Extent(
            file,
            ExtentSettings(
                io=self._io,
                open_engine=self._open_engine,
                depth=self._depth,
                block_bytes=self.block_bytes,
                capacity_slots=None if self._size_bytes is None else max(self._size_bytes // slot_bytes, 1),
                sync=self._sync,
                staged_loads=self._timeout_s is not None,
            ),
        )
        self._counters.corrupted(extent.damaged)
        self._users[extent] = 0
        self._extent = extent

    @contextmanager
    def _using(self) -> Iterator[Extent | None]:
        """The open file while the path leads to it, else None; it is not closed before the `with` ends."""
        with self._lock:
            extent = self._present()
            if extent is not None:
                self._users[extent] += 1
        try:
            yield extent
        finally:
            if extent is not None:
                with self._lock:
                    self._users[extent] -= 1
                    self._let_go_if_closed()
                    self._close_unused(extent)

    def _present(self) -> Extent | None:
        if self._closed:
            self._lost_reason = "the tier is closed"
            return None
        if self._extent is not None and self._extent.file.is_there():
            return self._extent
        if self._extent is not None:
            lost, self._extent = self._extent, None
            self._lost_reason = f"{lost.file.path} is gone; mount or restore it"
            lost.file.unlock()
            self._close_unused(lost)
        if self._clock() >= self._next_try:
            self._next_try = self._clock() + _RETRY_S
            self._reopen()
        return self._extent

    def _reopen(self) -> None:
        try:
            file = self._open_directory(self._mount)
        except KvbenchError as error:
            self._lost_reason = str(error)
            return
        try:
            self._use(file)
        except OSError as error:
            file.close()
            self._lost_reason = f"{self.directory}: {error.strerror}; check the disk and the kernel's log"

    def _close_unused(self, extent: Extent) -> None:
        if extent is not self._extent and not self._users.get(extent, 1):
            del self._users[extent]
            extent.close()

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        """A batch; one call of the engine moves many blocks, and one sync covers the batch."""

        def work(deadline: Deadline) -> list[Outcome]:
            with self._using() as extent:
                return self._gone(len(blocks)) if extent is None else extent.store(blocks, deadline)

        return self._counters.stored(blocks, self._bounded(work, self._too_late(len(blocks))))

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """A batch; every block is checked before it is ok."""

        def work(deadline: Deadline) -> list[Outcome]:
            with self._using() as extent:
                return self._gone(len(wanted)) if extent is None else extent.load(wanted, deadline)

        return self._counters.loaded(wanted, self._bounded(work, self._too_late(len(wanted))))

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """By the index, which is in memory."""

        def work(_: Deadline) -> list[bool]:
            with self._using() as extent:
                return [False] * len(keys) if extent is None else extent.contains(keys)

        return self._bounded(work, [False] * len(keys))

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Frees slots for other blocks."""

        def work(_: Deadline) -> list[bool]:
            with self._using() as extent:
                return [False] * len(keys) if extent is None else extent.evict(keys)

        found = self._bounded(work, [False] * len(keys))
        self._counters.evicted(sum(found))
        return found

    def entries(self) -> Iterator[Entry]:
        """What survived, right after opening."""

        def work(_: Deadline) -> list[Entry]:
            with self._using() as extent:
                return [] if extent is None else extent.entries()

        nothing: list[Entry] = []
        return iter(self._bounded(work, nothing))

    def stats(self) -> TierStats:
        """Counters and fill, in whole slots."""
        extent = self._extent
        blocks, slot_bytes = (0, 0) if extent is None else (extent.blocks, extent.slot_bytes)
        return self._counters.stats(
            blocks=blocks, used_bytes=blocks * slot_bytes, capacity_bytes=self._capacity_bytes(slot_bytes)
        )

    def _capacity_bytes(self, slot_bytes: int) -> int | None:
        if self._size_bytes is None or not slot_bytes:
            return self._size_bytes
        return max(self._size_bytes // slot_bytes, 1) * slot_bytes

    def close(self) -> None:
        """Closes the file after the last call that uses it; blocks stay."""
        with self._calls_lock:
            self._closed = True
            if self._calls is not None:
                self._calls.shutdown(wait=False)
        # Without the lock a call is looking at a directory that does not answer; it closes the file when it ends.
        if self._lock.acquire(timeout=-1 if self._timeout_s is None else self._timeout_s):
            try:
                self._let_go_if_closed()
            finally:
                self._lock.release()

    def _let_go_if_closed(self) -> None:
        if self._closed and self._extent is not None:
            extent, self._extent = self._extent, None
            self._close_unused(extent)

    def _gone(self, count: int) -> list[Outcome]:
        return [Outcome("failed", self._lost_reason)] * count

    def _too_late(self, count: int) -> list[Outcome]:
        limit = "" if self._timeout_s is None else f" within {format_duration(self._timeout_s)}"
        return [Outcome("timeout", f"the disk did not answer{limit}")] * count

    def _bounded(self, work: Callable[[Deadline], _T], too_late: _T) -> _T:
        """The work's result, or `too_late` when it takes too long; what it still does then reaches nobody."""
        if self._calls is None:
            return work(Deadline())
        deadline = LimitedDeadline()
        with self._calls_lock:
            self._late = [call for call in self._late if not call.done()]
            if self._late:
                return too_late
            call = None if self._closed else self._calls.submit(work, deadline)
        if call is None:
            return work(Deadline())  # which finds the tier closed
        try:
            return call.result(self._timeout_s)
        except TimeoutError:
            deadline.give_up()
            with self._calls_lock:
                self._late.append(call)
            return too_late
