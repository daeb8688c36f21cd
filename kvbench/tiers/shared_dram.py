"""Host memory that several processes of one machine use as one tier: blocks in /dev/shm, their index in SQLite."""

import contextlib
import fcntl
import mmap
import os
import shutil
import sqlite3
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.units import format_bytes
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Entry, Outcome, TierStats, Wanted
from kvbench.tiers.copying import copy_bytes
from kvbench.tiers.counters import TierCounters, unfit, wrong_buffer
from kvbench.tiers.cuda_runtime import no_gpu_reason

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "kvbench-"
_LAYOUT = 1
_ALIGNMENT = 4096
_WAIT_S = 10.0
_FREE, _PENDING, _READY = 0, 1, 2
_TABLES = """
CREATE TABLE meta (layout INTEGER, slots INTEGER, slot_bytes INTEGER);
CREATE TABLE slots (
    slot INTEGER PRIMARY KEY, state INTEGER NOT NULL DEFAULT 0, generation INTEGER NOT NULL DEFAULT 0,
    identity BLOB, prefix BLOB, num_bytes INTEGER NOT NULL DEFAULT 0, owner TEXT
);
CREATE UNIQUE INDEX by_key ON slots (identity, prefix) WHERE state != 0;
CREATE INDEX free ON slots (slot) WHERE state = 0;
"""
_FULL = Outcome("full", "no room; evict blocks and try again")
_ELSEWHERE = Outcome("exists", "another process is storing it")
_Reserved = tuple[int, int]  # slot, generation


class SharedDramTier:
    """A pool of equal slots that every process which opens the same name reads and writes.

    A block is pending while it is copied in, and only ready blocks are seen. Whoever takes a slot raises its generation
    first; a load looks at it before and after its copy, and so never returns bytes of two blocks. Who is alive is told
    by file locks, which end with their process: what a killed writer left pending is free again. The memory goes back
    to the system when the last process closes the tier; if that one was killed, the next to open the name finds its
    ready blocks.
    """

    def __init__(
        self, segment: str, *, name: str, block_bytes: int, capacity_bytes: int, root: Path = SHARED_MEMORY
    ) -> None:
        self.name, self.block_bytes = name, block_bytes
        self._slot_bytes = -(-block_bytes // _ALIGNMENT) * _ALIGNMENT
        self._slots = max(capacity_bytes // self._slot_bytes, 1)
        self._capacity_bytes = self._slots * self._slot_bytes
        self._segment, self._root = segment, root
        self._folder = root / f"{_PREFIX}{segment}"
        self._owner = uuid.uuid4().hex
        self._counters = TierCounters()
        self._lock = threading.Lock()
        self._closed = False
        self._unfinished: list[_Reserved] = []  # reserved, and the index failed before they were ready
        with _setting_up(self._folder):
            self._attach()
        self._pinned = self._pin()
        where = f"shared by name {segment!r} in {root}"
        self.description = f"{'pinned' if self._pinned else 'pageable'} host memory {where}"
        others = [found for found in stale_segments(root) if found != segment]
        if others:
            warnings.warn(
                f"{root} holds shared tiers that no process uses any more: {', '.join(others)}; "
                f"open one by its name to use it again, or remove {root / _PREFIX}NAME",
                stacklevel=2,
            )

    def _attach(self) -> None:
        living = _living_users(self._folder)
        found = self._found_geometry()
        if found is not None and found != (_LAYOUT, self._slots, self._slot_bytes):
            if living:
                raise UsageError(
                    f"shared tier {self._segment!r} is in use with {found[1]} slots of {format_bytes(found[2])}, not "
                    f"{self._slots} of {format_bytes(self._slot_bytes)}; open it with the same sizes or another name"
                )
            found = None
        if found is None:
            if living:
                raise KvbenchError(f"shared tier {self._segment!r} is damaged and in use; close it everywhere first")
            self._create()
        self._users_lock = _locked_file(self._folder / f"user-{self._owner}")
        self._index = _opened_index(self._folder)
        descriptor = os.open(self._folder / "blocks", os.O_RDWR)
        try:
            self._memory = memoryview(mmap.mmap(descriptor, self._capacity_bytes))
        finally:
            os.close(descriptor)
        self._free_dead(living)

    def _found_geometry(self) -> tuple[int, int, int] | None:
        """Layout, slots and bytes of a slot of what is there; None where there is nothing that can be used."""
        if not (self._folder / "index").exists():
            return None
        try:
            with contextlib.closing(_opened_index(self._folder)) as index:
                layout, slots, slot_bytes = index.execute("SELECT layout, slots, slot_bytes FROM meta").fetchone()
                (rows,) = index.execute("SELECT count(*) FROM slots").fetchone()
            size = (self._folder / "blocks").stat().st_size
        except (sqlite3.Error, OSError, TypeError):
            return None
        return (layout, slots, slot_bytes) if rows == slots and size == slots * slot_bytes else None

    def _create(self) -> None:
        for leftover in self._folder.iterdir():
            if leftover.name != "lock":
                leftover.unlink()
        descriptor = os.open(self._folder / "blocks", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:  # memory that is not there would end the process at its first touch; here it is an error
            os.posix_fallocate(descriptor, 0, self._capacity_bytes)
        except OSError as error:
            (self._folder / "blocks").unlink()
            raise KvbenchError(
                f"{self._root} has no {format_bytes(self._capacity_bytes)} left for a shared tier "
                f"({error.strerror}); give a smaller size, or enlarge it: mount -o remount,size=… {self._root}"
            ) from error
        finally:
            os.close(descriptor)
        with contextlib.closing(_opened_index(self._folder)) as index:
            index.executescript("BEGIN;" + _TABLES)
            index.execute("INSERT INTO meta VALUES (?, ?, ?)", (_LAYOUT, self._slots, self._slot_bytes))
            index.executemany("INSERT INTO slots (slot) VALUES (?)", ((slot,) for slot in range(self._slots)))
            index.execute("COMMIT")

    def _pin(self) -> bool:
        if no_gpu_reason() is not None:
            return False
        from kvbench.tiers.cuda_runtime import checked, cuda_runtime
        from kvbench.tiers.file_engines.base import address_of

        checked(cuda_runtime().cudaHostRegister(address_of(self._memory), len(self._memory), 0), "pinning host memory")
        return True

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        """Reserves slots for the batch, copies, and makes all of it visible at once."""
        outcomes: list[Outcome] = [unfit(block, self.block_bytes) or OK for block in blocks]
        reserved: dict[int, _Reserved] = {}
        try:
            with self._lock, self._changing() as index:
                self._free_unfinished(index)
                for at, block in enumerate(blocks):
                    if outcomes[at] is OK:
                        found = self._reserve(index, block)
                        if isinstance(found, Outcome):
                            outcomes[at] = found
                        else:
                            reserved[at] = found
            for at, (slot, _) in reserved.items():
                copy_bytes(self._room(slot, blocks[at].data.nbytes), blocks[at].data)
            with self._lock, self._changing() as index:
                index.executemany(
                    f"UPDATE slots SET state = {_READY} WHERE slot = ? AND generation = ?", reserved.values()
                )
        except sqlite3.Error as error:
            with self._lock:
                self._unfinished += reserved.values()
            for at in (at for at, outcome in enumerate(outcomes) if outcome is OK):
                outcomes[at] = _index_failed(error)
        return self._counters.stored(blocks, outcomes)

    def _free_unfinished(self, index: sqlite3.Connection) -> None:
        """Under the lock, in a transaction."""
        unfinished, self._unfinished = self._unfinished, []
        index.executemany(
            f"UPDATE slots SET state = {_FREE} WHERE state = {_PENDING} AND slot = ? AND generation = ?", unfinished
        )

    def _reserve(self, index: sqlite3.Connection, block: Block) -> _Reserved | Outcome:
        key = (block.key.identity, block.key.prefix)
        row = index.execute(
            "SELECT state, owner FROM slots WHERE state != 0 AND identity = ? AND prefix = ?", key
        ).fetchone()
        if row is not None and (row[0] == _READY or row[1] == self._owner):
            return EXISTS
        if row is not None and row[1] in _living_users(self._folder):
            return _ELSEWHERE
        if row is not None:
            self._free_owner(index, row[1])
        taken = self._take_slot(index, key, block.data.nbytes)
        if taken is None and self._free_dead(_living_users(self._folder)):
            taken = self._take_slot(index, key, block.data.nbytes)
        return _FULL if taken is None else taken

    def _take_slot(self, index: sqlite3.Connection, key: tuple[bytes, bytes], num_bytes: int) -> _Reserved | None:
        row = index.execute(f"SELECT slot, generation FROM slots WHERE state = {_FREE} LIMIT 1").fetchone()
        if row is None:
            return None
        slot, generation = int(row[0]), int(row[1]) + 1
        index.execute(
            f"UPDATE slots SET state = {_PENDING}, generation = ?, identity = ?, prefix = ?, num_bytes = ?, owner = ? "
            "WHERE slot = ?",
            (generation, *key, num_bytes, self._owner, slot),
        )
        return slot, generation

    def _free_dead(self, living: set[str]) -> int:
        """Frees what processes that are gone left pending."""
        owners = self._index.execute(f"SELECT DISTINCT owner FROM slots WHERE state = {_PENDING}").fetchall()
        dead = [owner for (owner,) in owners if owner not in living and owner != self._owner]
        return sum(self._free_owner(self._index, owner) for owner in dead)

    @staticmethod
    def _free_owner(index: sqlite3.Connection, owner: str) -> int:
        return index.execute(
            f"UPDATE slots SET state = {_FREE} WHERE state = {_PENDING} AND owner = ?", (owner,)
        ).rowcount

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Copies out and looks again whether the slot is still the block's."""
        outcomes = []
        for want in wanted:
            try:
                outcomes.append(self._load(want))
            except sqlite3.Error as error:
                outcomes.append(_index_failed(error))
        return self._counters.loaded(wanted, outcomes)

    def _load(self, want: Wanted) -> Outcome:
        for _ in range(3):
            row = self._row(
                f"SELECT slot, generation, num_bytes FROM slots WHERE state = {_READY} AND identity = ? AND prefix = ?",
                (want.key.identity, want.key.prefix),
            )
            if row is None:
                return MISS
            slot, generation, num_bytes = row
            refusal = wrong_buffer(want.into, num_bytes)
            if refusal is not None:
                return refusal
            copy_bytes(want.into, self._room(slot, num_bytes))
            if self._row("SELECT generation, state FROM slots WHERE slot = ?", (slot,)) == (generation, _READY):
                return OK
        return MISS

    def _row(self, query: str, values: tuple[object, ...]) -> tuple[int, ...] | None:
        with self._lock:
            row: tuple[int, ...] | None = self._index.execute(query, values).fetchone()
        return row

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Ready blocks of any process."""
        query = f"SELECT 1 FROM slots WHERE state = {_READY} AND identity = ? AND prefix = ?"
        try:
            return [self._row(query, (key.identity, key.prefix)) is not None for key in keys]
        except sqlite3.Error:
            return [False] * len(keys)

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Frees slots for every process; a load that is copying from one finds out and returns a miss."""
        query = f"UPDATE slots SET state = {_FREE} WHERE state = {_READY} AND identity = ? AND prefix = ?"
        try:
            with self._lock, self._changing() as index:
                found = [index.execute(query, (key.identity, key.prefix)).rowcount > 0 for key in keys]
        except sqlite3.Error:
            return [False] * len(keys)
        self._counters.evicted(sum(found))
        return found

    def entries(self) -> Iterator[Entry]:
        """Ready blocks of any process."""
        try:
            with self._lock:
                rows = self._index.execute(
                    f"SELECT identity, prefix, num_bytes FROM slots WHERE state = {_READY}"
                ).fetchall()
        except sqlite3.Error:
            rows = []
        return iter([Entry(BlockKey(identity, prefix), num_bytes) for identity, prefix, num_bytes in rows])

    def stats(self) -> TierStats:
        """Counters of this process; fill by all processes, in whole slots."""
        try:
            row = self._row(f"SELECT sum(state = {_READY}), sum(state != {_FREE}) FROM slots", ())
        except sqlite3.Error:
            row = None
        blocks, used = row or (0, 0)
        return self._counters.stats(
            blocks=blocks, used_bytes=used * self._slot_bytes, capacity_bytes=self._capacity_bytes
        )

    def close(self) -> None:
        """Detaches; the last process to close removes the memory."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with self._lock, _setting_up(self._folder):
            self._index.close()
            (self._folder / f"user-{self._owner}").unlink(missing_ok=True)
            os.close(self._users_lock)
            if self._pinned:
                from kvbench.tiers.cuda_runtime import checked, cuda_runtime
                from kvbench.tiers.file_engines.base import address_of

                checked(cuda_runtime().cudaHostUnregister(address_of(self._memory)), "unpinning host memory")
            if not _living_users(self._folder):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _room(self, slot: int, num_bytes: int) -> memoryview:
        return self._memory[slot * self._slot_bytes : slot * self._slot_bytes + num_bytes]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """A transaction; what a killed process began is undone by the next one."""
        self._index.execute("BEGIN IMMEDIATE")
        try:
            yield self._index
            self._index.execute("COMMIT")
        except BaseException:
            if self._index.in_transaction:
                self._index.execute("ROLLBACK")
            raise


def stale_segments(root: Path = SHARED_MEMORY) -> list[str]:
    """Names of shared tiers that no living process has open: memory that a killed process left behind."""
    return sorted(
        folder.name.removeprefix(_PREFIX)
        for folder in root.glob(f"{_PREFIX}*")
        if (folder / "lock").exists() and not _living_users(folder) and (folder / "lock").exists()
    )


def _index_failed(error: sqlite3.Error) -> Outcome:
    return Outcome("failed", f"the shared index does not answer ({error})")


def _opened_index(folder: Path) -> sqlite3.Connection:
    index = sqlite3.connect(folder / "index", timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
    index.execute("PRAGMA journal_mode = WAL")
    index.execute("PRAGMA synchronous = OFF")  # memory outlives a process, and nothing outlives the machine
    return index


def _locked_file(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody is looking who is alive, which takes a moment
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise KvbenchError(
                    f"{path} stays locked by another process; remove the folder if none is left"
                ) from None
            time.sleep(0.001)
        else:
            return descriptor


def _living_users(folder: Path) -> set[str]:
    """Who has the segment open: those whose lock is held."""
    try:
        users = [path for path in folder.iterdir() if path.name.startswith("user-")]
    except OSError:  # the last of them has just removed it
        return set()
    return {path.name.removeprefix("user-") for path in users if _is_locked(path)}


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextlib.contextmanager
def _setting_up(folder: Path) -> Iterator[None]:
    """One process at a time opens or closes a segment; its folder may be gone and back meanwhile."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # removed between the two
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, folder / "lock"):
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise KvbenchError(
                    f"{folder} has been locked by another process for {_WAIT_S:.0f} s; is one hung while opening it?"
                ) from None
            time.sleep(0.01)
        os.close(descriptor)
    try:
        yield
    finally:
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        named = path.stat()
    except FileNotFoundError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)
