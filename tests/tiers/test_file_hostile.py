"""The file tier when calls overlap badly: failed syncs, a stat that hangs, closing in the middle, late threads."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.tiers.base import Block, Wanted
from kvbench.tiers.file.directory import OpenFile
from kvbench.tiers.file.lanes import Lanes, LaneSettings, Move
from kvbench.tiers.file.sync import GroupSync, Sync, sync_of
from kvbench.tiers.file.tier import FileTier
from kvbench.tiers.file_engines import psync
from kvbench.tiers.file_engines.base import Blocks, EngineSettings, FileEngine, aligned_buffer
from kvbench.tiers.file_engines.queued import QueuedEngine
from kvbench.tiers.file_engines.registry import open_engine
from tests.tiers.storing_child import content_of, key_of

BLOCK = 8192
WAIT_S = 20.0


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_everybody_whose_writes_a_failed_sync_may_have_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    # Linux reports a lost page to one fdatasync only, and the next one succeeds: whoever had written by then must not
    # be told that all is well, whichever thread wakes up first.
    sync, gates, begun = GroupSync(), [threading.Event() for _ in range(3)], list[int]()

    def fdatasync(_: int) -> None:
        number = len(begun)
        begun.append(number)
        assert gates[min(number, 2)].wait(WAIT_S)
        if number == 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    results: dict[str, str] = {}

    def waits(name: str) -> None:
        since = sync.mark()
        try:
            sync.wait([0], since)
            results[name] = "ok"
        except OSError:
            results[name] = "failed"

    threads = in_threads([lambda: waits("first")])
    until(lambda: len(begun) == 1)
    threads += in_threads([lambda name=name: waits(name) for name in ("b", "c", "d")])  # type: ignore[misc]
    time.sleep(0.05)
    gates[0].set()
    until(lambda: len(begun) == 2)
    threads += in_threads([lambda: waits("late")])  # its writes may be among what the second sync loses
    time.sleep(0.05)
    gates[1].set()
    gates[2].set()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == {"first": "ok", "b": "failed", "c": "failed", "d": "failed", "late": "failed"}
    sync.wait([0], sync.mark())  # and then it goes on


def test_a_shared_sync_covers_the_files_of_all_who_wait_for_it_whoever_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    # A store that only has to see cleared headers synced may lead the round that others wait for with their blocks.
    sync, go_on, synced = GroupSync(), threading.Event(), list[int]()
    blocks, headers = 100, 101

    def fdatasync(descriptor: int) -> None:
        synced.append(descriptor)
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    threads = in_threads([lambda: sync.wait([blocks], sync.mark())])
    until(lambda: synced == [blocks])
    for files in ([headers], [blocks, headers]):  # the first of them wakes up first
        waiting = len(sync._changed._waiters)  # type: ignore[attr-defined]
        threads += in_threads([lambda files=files: sync.wait(files, sync.mark())])  # type: ignore[misc]
        until(lambda waiting=waiting: len(sync._changed._waiters) > waiting)  # type: ignore[attr-defined, misc]
    go_on.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert synced == [blocks, blocks, headers]


def test_an_interrupted_sync_fails_those_who_shared_it_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    sync, interrupts = GroupSync(), [KeyboardInterrupt()]

    def fdatasync(_: int) -> None:
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    before = sync.mark()
    with pytest.raises(KeyboardInterrupt):
        sync.wait([0], sync.mark())
    ended = list[str]()

    def waits() -> None:
        with pytest.raises(OSError, match="interrupted"):
            sync.wait([0], before)
        sync.wait([0], sync.mark())
        ended.append("ok")

    for thread in in_threads([waits]):
        thread.join(WAIT_S)
    assert ended == ["ok"]


@pytest.mark.parametrize("kind", ["fdatasync", "fsync"])
def test_a_sync_of_its_own_is_no_proof_when_another_failed_meanwhile(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync: Sync = sync_of(kind)
    failing = [True]

    def call(_: int) -> None:
        if failing.pop() if failing else False:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, kind, call)
    mine, others = sync.mark(), sync.mark()
    with pytest.raises(OSError, match="Input/output error"):
        sync.wait([0], others)
    with pytest.raises(OSError, match="Input/output error"):
        sync.wait([0], mine)
    sync.wait([0], sync.mark())


def test_an_engine_of_threads_lets_all_of_them_end_before_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thread that is still reading when the call is over would write into memory that its owner uses again.
    path = tmp_path / "blocks"
    path.write_bytes(bytes(4096) * 4)
    ended = threading.Event()

    preadv = os.preadv

    def slow(descriptor: int, views: Any, offset: int) -> int:
        if offset == 4096:
            time.sleep(0.3)
            ended.set()
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    descriptor = os.open(path, os.O_RDONLY)
    engine = psync.PsyncEngine(
        EngineSettings(
            descriptor=descriptor,
            file_bytes=4 * 4096,
            buffer=aligned_buffer(2 * 4096),
            depth=2,
            slot_bytes=4096,
            direct=False,
        )
    )
    try:
        with pytest.raises(KvbenchError, match="ended"):
            engine.transfer(Blocks(direction="load", offsets=[8 * 4096, 4096], sizes=[4096, 4096], places=[0, 4096]))
        assert ended.is_set()
    finally:
        engine.close()
        os.close(descriptor)


def open_tier(directory: Path, **settings: Any) -> FileTier:
    return FileTier(directory, block_bytes=BLOCK, io="psync", direct=False, depth=2, **settings)


def content(number: int) -> bytes:
    return content_of(number, BLOCK)


def store(tier: FileTier, number: int) -> str:
    return tier.store([Block(key_of(number), memoryview(content(number)))])[0].result


def test_a_path_whose_look_up_hangs_holds_nobody_longer_than_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path, timeout_s=1.0)
    until(lambda: store(tier, 1) in ("ok", "exists"))
    back, before = threading.Event(), tier.stats().timeouts
    is_there = OpenFile.is_there

    def hangs(file: OpenFile) -> bool:
        back.wait(WAIT_S)
        return is_there(file)

    monkeypatch.setattr(OpenFile, "is_there", hangs)
    try:
        began_s = time.monotonic()
        buffer = memoryview(bytearray(len(content(1))))
        assert tier.load([Wanted(key_of(1), buffer)])[0].result == "timeout"
        assert tier.contains([key_of(1)]) == [False]
        assert list(tier.entries()) == []
        assert tier.stats().timeouts == before + 1
        tier.close()
        assert time.monotonic() - began_s < 6
    finally:
        back.set()
    descriptors = Path("/proc/self/fd")
    until(lambda: not any("blocks.kv" in str(one.resolve()) for one in descriptors.iterdir()))
    monkeypatch.undo()
    again = open_tier(tmp_path)  # the lock is free, and the block is there
    assert again.load([Wanted(key_of(1), buffer)])[0].result == "ok"
    again.close()


def test_calls_that_meet_a_close_fail_and_never_raise(tmp_path: Path) -> None:
    for round_ in range(10):
        tier = open_tier(tmp_path, timeout_s=5.0)
        stop = threading.Event()

        def calls(tier: FileTier = tier, stop: threading.Event = stop) -> None:
            number = threading.get_ident()
            while not stop.is_set():
                assert store(tier, number) in ("ok", "exists", "failed")
                tier.evict([key_of(number)])

        with ThreadPoolExecutor(4) as threads:
            running = [threads.submit(calls) for _ in range(4)]
            time.sleep(0.01 + 0.002 * round_)
            tier.close()
            time.sleep(0.01)
            stop.set()
        for one in running:
            one.result()


def test_a_directory_is_free_when_its_tier_was_closed_though_a_forked_process_has_its_descriptors(
    tmp_path: Path,
) -> None:
    tier = open_tier(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        os._exit(0)
    try:
        tier.close()
        open_tier(tmp_path).close()
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_slot_is_written_again_only_after_what_it_held_is_durably_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the old header could be back after a power failure, in front of another block's bytes.
    calls: list[str] = []

    class Recorded:
        """An engine that says what it was asked to do."""

        def __init__(self, engine: FileEngine) -> None:
            self.engine = engine

        def transfer(self, blocks: Blocks) -> None:
            calls.append(f"{blocks.direction} {len(blocks.offsets)}")
            self.engine.transfer(blocks)

        def cool(self) -> None:
            self.engine.cool()

        def show(self) -> None:
            self.engine.show()

        def close(self) -> None:
            self.engine.close()

    fdatasync, pwrite = os.fdatasync, os.pwrite

    def synced(descriptor: int) -> None:
        calls.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fdatasync(descriptor)

    def written(descriptor: int, data: Any, offset: int) -> int:
        calls.append(f"headers, {bytes(data).count(b'KVBH')} used")
        return pwrite(descriptor, data, offset)

    tier = open_tier(
        tmp_path,
        fsync="fdatasync",
        size_bytes=BLOCK,
        open_engine=lambda name, settings: Recorded(open_engine(name, settings)),
    )
    assert store(tier, 1) == "ok"
    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(os, "pwrite", written)
    calls.clear()
    assert tier.evict([key_of(1)]) == [True]
    assert store(tier, 2) == "ok"
    assert calls == [
        "headers, 0 used",
        "sync headers.kv",
        "store 1",
        "headers, 1 used",
        "sync blocks.kv",
        "sync headers.kv",
    ]
    tier.close()


class RefusingQueue:
    """A kernel's queue that has no memory for a request a few times, while others are under way."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.under_way: list[tuple[int, int]] = []

    def aim(self, *, store: bool) -> None:
        """Either way."""

    def push(self, slot: int, address: int, size: int, offset: int) -> None:
        del address, offset
        self.under_way.append((slot, size))

    def submit_and_wait(self, at_least: int = 1) -> list[tuple[int, int]]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(11, "Resource temporarily unavailable")
        return [self.under_way.pop()]

    def in_turn(self, addresses: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]) -> tuple[int, int] | None:
        raise AssertionError("only for a depth of 1")

    def close(self) -> None:
        """Nothing to close."""


def queued(refusals: int) -> tuple[QueuedEngine, RefusingQueue]:
    queue = RefusingQueue(refusals)
    settings = EngineSettings(
        descriptor=0, file_bytes=8 * 4096, buffer=aligned_buffer(2 * 4096), depth=2, slot_bytes=4096, direct=False
    )
    return QueuedEngine(settings, queue), queue


def test_an_engine_that_is_refused_lets_what_is_under_way_land_before_it_says_so() -> None:
    engine, queue = queued(refusals=3)
    with pytest.raises(OSError, match="temporarily unavailable"):
        engine.transfer(Blocks(direction="load", offsets=[0, 4096, 8192], sizes=[4096] * 3))
    assert queue.under_way == []


def test_an_engine_that_is_refused_for_ever_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.tiers.file_engines.queued._LANDING_S", 0.05)
    engine, _ = queued(refusals=10**9)
    with pytest.raises(OSError, match="temporarily unavailable"):
        engine.transfer(Blocks(direction="load", offsets=[0, 4096], sizes=[4096] * 2))


def test_an_engine_that_has_failed_is_opened_anew_and_its_blocks_are_loaded_meanwhile(tmp_path: Path) -> None:
    opened: list[FileEngine] = []

    class Fails:
        """Fails its first load as a kernel without memory does."""

        def __init__(self, engine: FileEngine) -> None:
            self.engine = engine

        def transfer(self, blocks: Blocks) -> None:
            if blocks.direction == "load" and len(opened) == 3:  # after a trial and the engine of the stores
                raise OSError(12, "Cannot allocate memory")
            self.engine.transfer(blocks)

        def cool(self) -> None:
            self.engine.cool()

        def show(self) -> None:
            self.engine.show()

        def close(self) -> None:
            self.engine.close()

    def new(name: str, settings: EngineSettings) -> FileEngine:
        opened.append(open_engine(name, settings))
        return Fails(opened[-1])

    tier = open_tier(tmp_path, open_engine=new)
    assert store(tier, 1) == "ok"
    for _ in range(8):
        buffer = memoryview(bytearray(len(content(1))))
        assert tier.load([Wanted(key_of(1), buffer)])[0].result == "ok"
        assert buffer == content(1)
    assert len(opened) > 3
    tier.close()


def test_a_store_whose_caller_has_gone_is_not_stored(tmp_path: Path) -> None:
    go_on, hanging = threading.Event(), threading.Event()

    class Slow:
        """Hangs in its stores while it is told to."""

        def __init__(self, engine: FileEngine) -> None:
            self.engine = engine

        def transfer(self, blocks: Blocks) -> None:
            if blocks.direction == "store" and hanging.is_set():
                assert go_on.wait(WAIT_S)
            self.engine.transfer(blocks)

        def cool(self) -> None:
            self.engine.cool()

        def show(self) -> None:
            self.engine.show()

        def close(self) -> None:
            self.engine.close()

    tier = open_tier(tmp_path, timeout_s=1.0, open_engine=lambda name, settings: Slow(open_engine(name, settings)))
    until(lambda: store(tier, 1) in ("ok", "exists"))
    hanging.set()
    assert store(tier, 2) == "timeout"
    hanging.clear()
    go_on.set()
    until(lambda: store(tier, 3) in ("ok", "exists"))
    assert tier.contains([key_of(1), key_of(2), key_of(3)]) == [True, False, True]
    tier.close()
    again = open_tier(tmp_path)
    assert {entry.key for entry in again.entries()} == {key_of(1), key_of(3)}
    again.close()


def test_a_lane_in_which_an_interrupted_call_still_moves_blocks_is_no_other_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, inside, overlaps = threading.Event(), set[int](), list[int]()
    slow = [True]

    class Watched:
        """Moves nothing; says who is in it, and hangs where a thread of the lanes' own uses it first."""

        def transfer(self, blocks: Blocks) -> None:
            if id(self) in inside:
                overlaps.append(id(self))
            inside.add(id(self))
            if threading.current_thread() is not threading.main_thread() and slow and slow.pop():
                hung.set()
                assert go_on.wait(WAIT_S)
            inside.discard(id(self))

        def cool(self) -> None:
            """Nothing is held."""

        def show(self) -> None:
            """Nothing is loaded."""

        def close(self) -> None:
            """Nothing is open."""

    hung, opened = threading.Event(), list[Watched]()

    def new(name: str, settings: EngineSettings) -> FileEngine:
        del name, settings
        opened.append(Watched())
        return opened[-1]

    def interrupted(tasks: object) -> None:
        del tasks
        monkeypatch.undo()
        assert hung.wait(WAIT_S)
        raise KeyboardInterrupt

    slot_bytes = 1 << 20
    lanes = Lanes(
        "store",
        LaneSettings(
            io="aio", open_engine=new, descriptor=0, direct=False, depth=2, slot_bytes=slot_bytes, staged_loads=False
        ),
    )
    moves = [Move(number, number * slot_bytes, memoryview(bytes(4096)), None) for number in range(2)]
    monkeypatch.setattr("kvbench.tiers.file.lanes.wait", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            lanes.store(moves, 2 * slot_bytes, lambda move, crc32c: None)
        for _ in range(8):
            assert [outcome.result for outcome in lanes.store(moves, 2 * slot_bytes, lambda *_: None)] == ["ok"] * 2
        assert overlaps == []
    finally:
        go_on.set()
        lanes.close()
    assert len(lanes._idle) == len(set(lanes._idle)) == len(lanes._lanes)
