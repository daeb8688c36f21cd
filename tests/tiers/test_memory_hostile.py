"""Tiers in host memory when there is none left, when their index fails in the middle, and when processes meet."""

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.tiers import dram
from kvbench.tiers.base import Block, Wanted
from kvbench.tiers.copying import copy_bytes
from kvbench.tiers.memory import PoolError
from kvbench.tiers.registry import open_tier
from kvbench.tiers.shared_dram import SharedDramTier
from tests.tiers.storing_child import key_of

BLOCK = 4096


def store(tier: SharedDramTier, *numbers: int) -> list[str]:
    blocks = [Block(key_of(number), memoryview(bytes([number]) * BLOCK)) for number in numbers]
    return [outcome.result for outcome in tier.store(blocks)]


def load(tier: SharedDramTier, number: int) -> str:
    buffer = bytearray(BLOCK)
    (outcome,) = tier.load([Wanted(key_of(number), memoryview(buffer))])
    assert outcome.result != "ok" or buffer == bytes([number]) * BLOCK
    return outcome.result


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[SharedDramTier]:
    tier = SharedDramTier(uuid.uuid4().hex[:8], name="dram", block_bytes=BLOCK, capacity_bytes=4 * BLOCK, root=tmp_path)
    yield tier
    tier.close()


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), KvbenchError("pinning host memory: no")])
def test_memory_that_the_system_does_not_give_makes_a_pool_full(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = [True]

    class Pinning:
        def new(self, num_bytes: int) -> memoryview:
            if refused[0]:
                raise error
            return dram.host_memory(num_bytes)

        def release(self, memory: memoryview) -> None:
            """The memory goes with its last view."""

    monkeypatch.setattr(dram, "_pinning", lambda: (Pinning(), "for a test"))
    tier = open_tier("dram:1MiB", block_bytes=BLOCK)
    block = Block(key_of(1), memoryview(bytes(BLOCK)))
    assert tier.store([block])[0].result == "full"
    assert tier.stats().used_bytes == 0
    refused[0] = False
    assert tier.store([block])[0].result == "ok"
    tier.close()


def test_a_block_whose_index_failed_in_the_middle_can_be_stored_again(
    shared: SharedDramTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing, calls = SharedDramTier._changing, [0]

    @contextmanager
    def second_fails(self: SharedDramTier) -> Iterator[sqlite3.Connection]:
        calls[0] += 1
        with changing(self) as index:
            yield index
            if calls[0] == 2:
                raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(SharedDramTier, "_changing", second_fails)
    assert store(shared, 1, 2, 3, 4) == ["failed"] * 4
    assert load(shared, 1) == "miss"
    assert store(shared, 1, 2, 3, 4) == ["ok"] * 4
    assert [load(shared, number) for number in (1, 2, 3, 4)] == ["ok"] * 4


def test_a_commit_that_fails_is_undone_and_the_index_goes_on(shared: SharedDramTier) -> None:
    class Index:
        """The connection, whose next COMMIT fails as one does on a full disk."""

        def __init__(self, index: sqlite3.Connection) -> None:
            self.index, self.failing = index, True

        def __getattr__(self, name: str) -> object:
            return getattr(self.index, name)

        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            if statement == "COMMIT" and self.failing:
                self.failing = False
                raise sqlite3.OperationalError("disk I/O error")
            return self.index.execute(statement, *values)  # type: ignore[arg-type]

    shared._index = Index(shared._index)  # type: ignore[assignment]
    assert store(shared, 1) == ["failed"]
    assert store(shared, 1) == ["ok"]
    assert load(shared, 1) == "ok"


def test_an_index_that_cannot_be_read_lists_nothing_and_raises_nothing(shared: SharedDramTier) -> None:
    assert store(shared, 1) == ["ok"]
    shared._index.execute("DROP TABLE slots")
    assert list(shared.entries()) == []
    assert shared.contains([key_of(1)]) == [False]
    assert shared.evict([key_of(1)]) == [False]
    assert load(shared, 1) == "failed"
    assert shared.stats().failures == 1


def test_a_process_that_looks_who_is_alive_keeps_nobody_from_opening(tmp_path: Path) -> None:
    # Looking takes the lock of a file for a moment, maybe that of a user who has just made it.
    stop = threading.Event()

    def looks() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                for path in (tmp_path / "kvbench-x").iterdir():
                    if not path.name.startswith("user-"):
                        continue
                    descriptor = os.open(path, os.O_RDWR)
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                        time.sleep(0.002)
                    finally:
                        os.close(descriptor)

    looking = threading.Thread(target=looks, daemon=True)
    looking.start()
    try:
        for _ in range(30):
            SharedDramTier("x", name="dram", block_bytes=BLOCK, capacity_bytes=4 * BLOCK, root=tmp_path).close()
    finally:
        stop.set()
        looking.join(10)


@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
def test_a_slot_that_another_process_takes_during_a_load_is_never_served_as_the_block(
    shared: SharedDramTier, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = SharedDramTier(shared._segment, name="dram", block_bytes=BLOCK, capacity_bytes=4 * BLOCK, root=tmp_path)
    assert store(shared, 1, 2, 3, 4) == ["ok"] * 4
    meddled = [False]

    def meddle(into: memoryview, source: memoryview) -> None:
        if meddled[0]:
            copy_bytes(into, source)
            return
        meddled[0] = True
        if moment == "after the copy":
            copy_bytes(into[: BLOCK // 2], source[: BLOCK // 2])
        assert other.evict([key_of(1)]) == [True]
        assert store(other, 5) == ["ok"]  # into the only free slot
        if moment == "before the copy":
            copy_bytes(into, source)
        else:
            copy_bytes(into[BLOCK // 2 :], source[BLOCK // 2 :])

    monkeypatch.setattr("kvbench.tiers.shared_dram.copy_bytes", meddle)
    assert load(shared, 1) == "miss"
    assert load(shared, 5) == "ok"
    other.close()


def test_memory_that_breaks_while_it_is_copied_fails_the_block_and_keeps_its_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise PoolError("the GPU does not copy")

    tier = open_tier(f"dram:{BLOCK}B", block_bytes=BLOCK)
    block, buffer = Block(key_of(1), memoryview(b"x" * BLOCK)), memoryview(bytearray(BLOCK))
    with monkeypatch.context() as patch:
        patch.setattr(dram.HostPool, "write", broken)
        assert tier.store([block])[0].result == "failed"
    assert tier.stats().used_bytes == 0
    assert tier.store([block])[0].result == "ok"
    with monkeypatch.context() as patch:
        patch.setattr(dram.HostPool, "read", broken)
        assert tier.load([Wanted(key_of(1), buffer)])[0].result == "failed"
    assert tier.load([Wanted(key_of(1), buffer)])[0].result == "ok"
    assert tier.evict([key_of(1)]) == [True]
    assert (tier.stats().used_bytes, tier.stats().failures) == (0, 2)
    tier.close()
