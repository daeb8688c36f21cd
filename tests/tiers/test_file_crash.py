"""What a file tier has after a crash or damage: every acknowledged block, or a clean miss, and never a wrong byte."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError
from kvbench.tiers.base import Block, Outcome, Wanted
from kvbench.tiers.file.directory import FILE_NAME, HEADERS_NAME
from kvbench.tiers.file.layout import PAGE_BYTES, SLOTS_PER_GROUP, Geometry, slot_bytes_for
from kvbench.tiers.file.tier import FileTier
from kvbench.tiers.file_engines.base import Blocks, EngineSettings, FileEngine
from kvbench.tiers.file_engines.registry import open_engine
from tests.tiers.storing_child import content_of, key_of

ROUNDS = int(os.environ.get("KVBENCH_CRASH_ROUNDS", "25"))
BLOCK_BYTES = 20_000
GEOMETRY = Geometry(slot_bytes_for(BLOCK_BYTES))
FSYNC = ("none", "fdatasync", "group")
IO = ("io_uring", "psync", "aio", "mmap")


def load(tier: FileTier, key: BlockKey, size: int) -> tuple[str, bytes]:
    buffer = bytearray(size)
    (outcome,) = tier.load([Wanted(key, memoryview(buffer))])
    return outcome.result, bytes(buffer)


def store(tier: FileTier, blocks: dict[BlockKey, bytes]) -> list[str]:
    return [outcome.result for outcome in tier.store([Block(key, memoryview(data)) for key, data in blocks.items()])]


def test_after_kill_9_every_acknowledged_block_is_there_and_no_byte_is_wrong(tmp_path: Path) -> None:
    chance = random.Random(20261130)
    expected: set[int] = set()  # acknowledged and not evicted
    unsure: set[int] = set()  # an evict had begun, or the store was not acknowledged
    acknowledged = 0
    for number in range(ROUNDS):
        spelling = f"file:{tmp_path}?size=2MiB&io={IO[number % len(IO)]}&fsync={FSYNC[number % len(FSYNC)]}"
        lines = lines_until_killed(spelling, seed=number + 1, chance=chance)
        assert lines[0] == f"opened {lines[0].split()[1]}"
        for line in lines[1:]:
            kind, block = line[0], int(line[2:])
            if kind == "s":
                expected.add(block)
                acknowledged += 1
            elif kind == "b":
                expected.discard(block)
                unsure.add(block)
        tier = FileTier(tmp_path, block_bytes=BLOCK_BYTES, size_bytes=2 << 20)
        known = {key_of(block): block for block in expected | unsure}
        for block in expected:
            data = content_of(block, BLOCK_BYTES)
            assert load(tier, key_of(block), len(data)) == ("ok", data), f"round {number}, {spelling}, block {block}"
        for entry in list(tier.entries()):
            block = known.get(entry.key, -1)
            if block in expected:
                continue
            result, data = load(tier, entry.key, entry.num_bytes)
            assert result == "ok"
            if block in unsure:
                assert data == content_of(block, BLOCK_BYTES)
        assert tier.stats().corrupt == 0
        tier.evict([entry.key for entry in tier.entries() if known.get(entry.key, -1) not in expected])
        old = chance.sample(
            sorted(expected), k=max(len(expected) - 30, 0)
        )  # leaves room, and old blocks to check again
        tier.evict([key_of(block) for block in old])
        expected.difference_update(old)
        unsure.clear()
        tier.close()
    assert acknowledged > 10 * ROUNDS


def lines_until_killed(spelling: str, *, seed: int, chance: random.Random) -> list[str]:
    """What the child wrote until kill -9 hit it, a random time after its first store."""
    command = [sys.executable, "-m", "tests.tiers.storing_child", spelling, str(BLOCK_BYTES), str(seed)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
    ) as child:
        assert child.stdout is not None
        begin = [child.stdout.readline() for _ in range(2)]
        timer = threading.Timer(chance.uniform(0, 0.1), lambda: child.send_signal(signal.SIGKILL))
        timer.start()
        rest = child.stdout.read()
        timer.join()
    assert child.returncode == -signal.SIGKILL, begin
    return [line for line in (b"".join(begin) + rest).decode().split("\n") if line]


@pytest.fixture
def new_tier(tmp_path: Path) -> Iterator[Callable[..., FileTier]]:
    tiers: list[FileTier] = []

    def new(**settings: object) -> FileTier:
        tiers.append(FileTier(tmp_path / "kv", block_bytes=BLOCK_BYTES, **settings))  # type: ignore[arg-type]
        return tiers[-1]

    yield new
    for tier in tiers:
        tier.close()


@pytest.fixture
def blocks() -> dict[BlockKey, bytes]:
    return {key_of(number): content_of(number, BLOCK_BYTES) for number in range(40)}


def damage(path: Path, offset: int, change: Callable[[bytes], bytes], size: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        data = change(file.read(size))
        file.seek(offset)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def slots_by_key(tier: FileTier) -> dict[BlockKey, int]:
    assert tier._extent is not None
    return {key: held.slot for key, held in tier._extent._index.items()}


@pytest.mark.parametrize("settings", [{"io": "io_uring"}, {"io": "mmap"}, {"direct": False, "io": "psync"}], ids=str)
def test_every_flipped_bit_of_a_block_is_found_and_the_block_dropped(
    new_tier: Callable[..., FileTier], blocks: dict[BlockKey, bytes], settings: dict[str, object]
) -> None:
    tier = new_tier(**settings)
    store(tier, blocks)
    chance = random.Random(1)
    for key, slot in slots_by_key(tier).items():
        at = GEOMETRY.data_offset(slot) + chance.randrange(len(blocks[key]))
        bit = 1 << chance.randrange(8)
        damage(tier.directory / FILE_NAME, at, lambda data, bit=bit: bytes([data[0] ^ bit]), 1)  # type: ignore[misc]
    assert [load(tier, key, len(data))[0] for key, data in blocks.items()] == ["corrupt"] * len(blocks)
    assert tier.stats().corrupt == len(blocks)
    assert [load(tier, key, len(data))[0] for key, data in blocks.items()] == ["miss"] * len(blocks)
    tier.close()
    assert list(new_tier().entries()) == []


def test_every_flipped_bit_of_a_header_loses_that_block_and_no_other(
    new_tier: Callable[..., FileTier], blocks: dict[BlockKey, bytes]
) -> None:
    tier = new_tier()
    store(tier, blocks)
    slots = slots_by_key(tier)
    tier.close()
    chance = random.Random(2)
    hit = chance.sample(list(blocks), 15)
    for key in hit:
        at = GEOMETRY.page_offset(slots[key] // SLOTS_PER_GROUP) + slots[key] % SLOTS_PER_GROUP * 128
        place, bit = at + chance.randrange(128), 1 << chance.randrange(8)
        damage(tier.directory / HEADERS_NAME, place, lambda data, bit=bit: bytes([data[0] ^ bit]), 1)  # type: ignore[misc]
    again = new_tier()
    assert again.stats().corrupt == len(hit)
    for key, data in blocks.items():
        assert load(again, key, len(data)) == (("miss", bytes(len(data))) if key in hit else ("ok", data))


@pytest.mark.parametrize("reopened", [False, True], ids=["while open", "before opening"])
@pytest.mark.parametrize("io", IO)
def test_what_a_truncated_file_lost_is_never_served(
    new_tier: Callable[..., FileTier], blocks: dict[BlockKey, bytes], io: str, reopened: bool
) -> None:
    tier = new_tier(io=io)
    store(tier, blocks)
    slots = slots_by_key(tier)
    if reopened:
        tier.close()
    cut = GEOMETRY.data_offset(20) + 5000  # in the middle of a block, and of a page
    os.truncate(tier.directory / FILE_NAME, cut)
    if reopened:
        tier = new_tier(io=io)
    for key, data in blocks.items():
        whole = GEOMETRY.data_offset(slots[key]) + -(-len(data) // PAGE_BYTES) * PAGE_BYTES <= cut
        result, found = load(tier, key, len(data))
        if whole:
            assert (result, found) == ("ok", data)
        elif result == "ok":  # its last bytes were before the cut, and only padding is gone
            assert found == data
        else:
            assert result in ("corrupt", "miss")
    assert store(tier, {key_of(1000): b"after"}) == ["ok"]
    assert load(tier, key_of(1000), 5) == ("ok", b"after")


def test_swapped_blocks_swapped_files_and_a_stale_index_are_found(
    new_tier: Callable[..., FileTier], blocks: dict[BlockKey, bytes], tmp_path: Path
) -> None:
    tier = new_tier()
    store(tier, blocks)
    path, headers, slots = tier.directory / FILE_NAME, tier.directory / HEADERS_NAME, slots_by_key(tier)
    tier.close()
    first, second = list(blocks)[:2]
    whole = bytearray(path.read_bytes())
    old_headers = headers.read_bytes()[:PAGE_BYTES]
    a, b = (GEOMETRY.data_offset(slots[key]) for key in (first, second))
    size = GEOMETRY.slot_bytes
    whole[a : a + size], whole[b : b + size] = whole[b : b + size], whole[a : a + size]
    path.write_bytes(whole)
    tier = new_tier()
    assert [load(tier, key, len(blocks[key]))[0] for key in (first, second)] == ["corrupt"] * 2
    assert load(tier, list(blocks)[2], len(blocks[list(blocks)[2]]))[0] == "ok"

    # a stale index: the headers of before, over slots that hold other blocks now
    tier.evict(list(blocks))
    others = {key_of(number): content_of(number, BLOCK_BYTES) for number in range(100, 140)}
    store(tier, others)
    tier.close()
    damage(headers, GEOMETRY.page_offset(0), lambda _: old_headers, PAGE_BYTES)
    tier = new_tier()
    for key, data in (blocks | others).items():
        result, found = load(tier, key, len(data))
        assert result in ("corrupt", "miss") or found == data
    assert tier.stats().corrupt >= SLOTS_PER_GROUP - 1
    tier.close()

    # pages of another tier's file
    other = FileTier(tmp_path / "other", block_bytes=BLOCK_BYTES)
    store(other, blocks)
    other.close()
    theirs = (tmp_path / "other" / HEADERS_NAME).read_bytes()
    damage(headers, 0, lambda _: theirs[:PAGE_BYTES], PAGE_BYTES)
    tier = new_tier()
    assert tier.stats().corrupt == SLOTS_PER_GROUP
    assert [load(tier, key, len(data))[0] for key, data in blocks.items()] == ["miss"] * len(blocks)
    store(tier, blocks)
    held = len(list(tier.entries()))
    tier.close()

    # another tier's file of blocks, then none of headers
    path.write_bytes((tmp_path / "other" / FILE_NAME).read_bytes())
    tier = new_tier()
    assert tier.stats().corrupt == held >= len(blocks)
    assert [load(tier, key, len(data))[0] for key, data in blocks.items()] == ["miss"] * len(blocks)
    store(tier, blocks)
    tier.close()
    headers.unlink()
    tier = new_tier()
    assert [load(tier, key, len(data))[0] for key, data in blocks.items()] == ["miss"] * len(blocks)
    assert store(tier, blocks) == ["ok"] * len(blocks)
    assert [load(tier, key, len(data)) for key, data in blocks.items()] == [("ok", data) for data in blocks.values()]


def test_a_file_that_was_put_in_place_of_the_open_one_is_read_anew(
    new_tier: Callable[..., FileTier], blocks: dict[BlockKey, bytes], tmp_path: Path
) -> None:
    tier = new_tier(clock=iter(range(10_000)).__next__)
    store(tier, {key_of(500): b"mine"})
    other = FileTier(tmp_path / "other", block_bytes=BLOCK_BYTES)
    store(other, blocks)
    other.close()
    for name in (FILE_NAME, HEADERS_NAME):
        (tmp_path / "other" / name).rename(tier.directory / name)
    assert tier.contains([key_of(500)]) == [False]
    assert [load(tier, key, len(data)) for key, data in blocks.items()] == [("ok", data) for data in blocks.values()]


@pytest.mark.parametrize("content", [b"", b"x" * 100, bytes(PAGE_BYTES), b"KVBTIER\0" + bytes(PAGE_BYTES)])
def test_a_file_that_is_no_tier_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(KvbenchError, match="move it away"):
        FileTier(tmp_path, block_bytes=BLOCK_BYTES)
    assert (tmp_path / FILE_NAME).read_bytes() == content


def test_a_directory_has_one_tier_at_a_time(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, block_bytes=BLOCK_BYTES)
    with pytest.raises(KvbenchError, match=rf"in use by another tier \(process {os.getpid()}\)"):
        FileTier(tmp_path, block_bytes=BLOCK_BYTES)
    tier.close()
    FileTier(tmp_path, block_bytes=BLOCK_BYTES).close()
    with pytest.raises(KvbenchError, match="made for blocks of up to"):
        FileTier(tmp_path, block_bytes=10 * BLOCK_BYTES)


def test_a_filesystem_without_direct_io_is_used_and_said_loudly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.warns(UserWarning, match="no O_DIRECT"):
        tier = FileTier(tmp_path, block_bytes=BLOCK_BYTES)
    assert "through the page cache" in tier.description
    assert store(tier, {key_of(1): b"bytes"}) == ["ok"]
    assert load(tier, key_of(1), 5) == ("ok", b"bytes")
    tier.close()


class Hanging:
    """An engine whose transfers wait for the test."""

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.inner: FileEngine = open_engine(name, settings)

    gate = threading.Event()

    def transfer(self, blocks: Blocks) -> None:
        assert self.gate.wait(30)
        self.inner.transfer(blocks)

    def cool(self) -> None:
        self.inner.cool()

    def show(self) -> None:
        self.inner.show()

    def close(self) -> None:
        self.inner.close()


def test_a_disk_that_hangs_costs_one_timeout_and_late_bytes_reach_nobody(tmp_path: Path) -> None:
    Hanging.gate.set()
    tier = FileTier(tmp_path, block_bytes=BLOCK_BYTES, timeout_s=0.2, open_engine=Hanging)
    data = content_of(1, BLOCK_BYTES)
    assert store(tier, {key_of(1): data}) == ["ok"]
    Hanging.gate.clear()
    buffer = bytearray(len(data))
    assert tier.load([Wanted(key_of(1), memoryview(buffer))])[0].result == "timeout"
    begin = time.monotonic()
    assert store(tier, {key_of(2): b"later"}) == ["timeout"]
    assert tier.contains([key_of(1)]) == [False]
    assert time.monotonic() - begin < 0.1  # nobody waits for a place that is known to hang
    Hanging.gate.set()
    deadline = time.monotonic() + 10
    while load(tier, key_of(1), len(data)) != ("ok", data):
        assert time.monotonic() < deadline
    assert buffer == bytes(len(data))
    assert load(tier, key_of(2), 5)[0] == "miss"
    assert tier.stats().timeouts >= 2
    tier.close()


@contextlib.contextmanager
def small_filesystem(place: Path, *, size: str = "8m") -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "kvbench-test", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a filesystem: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], capture_output=True, check=False)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount command")
@pytest.mark.parametrize("io", ["io_uring", "psync", "mmap"])
def test_a_full_disk_refuses_blocks_and_takes_them_again_when_there_is_room(tmp_path: Path, io: str) -> None:
    with small_filesystem(tmp_path / "disk") as disk:
        tier = FileTier(disk / "kv", block_bytes=BLOCK_BYTES, io=io)  # type: ignore[arg-type]
        filler = disk / "filler"
        filler.write_bytes(bytes(4 << 20))
        blocks = {key_of(number): content_of(number, BLOCK_BYTES) for number in range(400)}
        results = store(tier, blocks)
        held = [key for key, result in zip(blocks, results, strict=True) if result == "ok"]
        assert set(results) == {"ok", "full"}
        assert len(held) > 100
        assert [load(tier, key, len(blocks[key])) for key in held] == [("ok", blocks[key]) for key in held]
        assert tier.evict(held[:1]) == [True]
        assert store(tier, {key_of(1000): b"in its place", key_of(1001): b"no room"}) == ["ok", "full"]
        filler.unlink()
        assert store(tier, {key_of(1001): b"room now"}) == ["ok"]
        tier.close()
        again = FileTier(disk / "kv", block_bytes=BLOCK_BYTES, io=io)  # type: ignore[arg-type]
        assert [load(again, key, len(blocks[key])) for key in held[1:]] == [("ok", blocks[key]) for key in held[1:]]
        again.close()


@pytest.mark.skipif(shutil.which("umount") is None, reason="no umount command")
def test_a_vanished_mount_fails_at_once_and_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    place, now = tmp_path / "disk", [0.0]
    with contextlib.ExitStack() as mounts:
        mounts.enter_context(small_filesystem(place))
        tier = FileTier(place, block_bytes=BLOCK_BYTES, clock=lambda: now[0])
        mounts.callback(tier.close)
        assert store(tier, {key_of(1): b"one"}) == ["ok"]
        subprocess.run(["umount", "-l", place], check=True)
        for _ in range(3):
            now[0] += 10
            begin = time.monotonic()
            assert store(tier, {key_of(2): b"two"}) == ["failed"]
            assert load(tier, key_of(1), 3)[0] == "failed"
            assert tier.contains([key_of(1)]) == [False]
            assert tier.evict([key_of(1)]) == [False]
            assert time.monotonic() - begin < 1
        assert list(place.iterdir()) == []  # the directory under the mount is not taken for the place
        assert "not on" in tier.store([Block(key_of(2), memoryview(b"two"))])[0].reason
        mounts.enter_context(small_filesystem(place))
        now[0] += 10
        assert store(tier, {key_of(3): b"three"}) == ["ok"]
        assert load(tier, key_of(3), 5) == ("ok", b"three")
        assert load(tier, key_of(1), 3)[0] == "miss"
        assert tier.stats().failures >= 6


@pytest.mark.parametrize("failing", ["pwrite", "posix_fallocate", "fdatasync"])
def test_a_disk_that_refuses_fails_the_store_and_serves_what_it_has(
    new_tier: Callable[..., FileTier], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    tier = new_tier(fsync="fdatasync", size_bytes=GEOMETRY.slot_bytes * 8)
    assert store(tier, {key_of(1): b"one"}) == ["ok"]
    if failing == "posix_fallocate":
        assert store(tier, {key_of(number): b"fill" for number in range(10, 17)}) == ["ok"] * 7
        tier.close()
        tier = new_tier(fsync="fdatasync", size_bytes=GEOMETRY.slot_bytes * 20)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, refuse)
        assert tier.store([Block(key_of(2), memoryview(b"two"))]) == [Outcome("failed", "Input/output error")]
        assert load(tier, key_of(1), 3) == ("ok", b"one")
        assert load(tier, key_of(2), 3)[0] == "miss"
    assert store(tier, {key_of(2): b"two"}) == ["ok"]
    assert load(tier, key_of(2), 3) == ("ok", b"two")
    tier.close()
    assert load(new_tier(), key_of(2), 3) == ("ok", b"two")


def test_stores_that_wait_for_a_sync_share_the_next_one(
    new_tier: Callable[..., FileTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = new_tier(fsync="group")
    syncs: list[int] = []
    real, first, go_on = os.fdatasync, threading.Event(), threading.Event()

    def counted(descriptor: int) -> None:
        syncs.append(descriptor)
        first.set()
        assert go_on.wait(10)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", counted)
    leader = threading.Thread(target=store, args=(tier, {key_of(0): b"leader"}))
    leader.start()
    assert first.wait(10)
    followers = [threading.Thread(target=store, args=(tier, {key_of(n): b"follower"})) for n in range(1, 9)]
    for thread in followers:
        thread.start()
    deadline = time.monotonic() + 10
    assert tier._extent is not None
    while len(tier._extent.file.path.read_bytes()) and tier._extent._pages[0].count(b"KVBH") < 9:
        assert time.monotonic() < deadline
    assert list(tier.entries()) == []  # nothing is visible before it is durable
    time.sleep(0.05)  # the last of them is on its way from its header to the sync
    go_on.set()
    for thread in (leader, *followers):
        thread.join(10)
    assert len(list(tier.entries())) == 9
    assert len(syncs) <= 2 * 3  # of two files each


def test_headers_of_slots_that_are_gone_do_not_come_back_in_front_of_blocks_stored_later(
    new_tier: Callable[..., FileTier], blocks: dict[BlockKey, bytes]
) -> None:
    tier = new_tier()
    store(tier, blocks)
    slots = slots_by_key(tier)
    tier.close()
    last = max(slots, key=slots.__getitem__)
    os.truncate(tier.directory / FILE_NAME, GEOMETRY.end_of(slots[last] - 4))
    tier = new_tier()
    assert load(tier, last, len(blocks[last]))[0] == "miss"
    assert store(tier, {last: blocks[last]}) == ["ok"]
    assert slots_by_key(tier)[last] == slots[last] - 4
    tier.close()
    again = new_tier()
    assert load(again, last, len(blocks[last])) == ("ok", blocks[last])
    assert again.stats().corrupt == 0


def test_a_file_of_headers_that_was_missing_is_durably_in_the_directory_before_a_block_is_acknowledged(
    new_tier: Callable[..., FileTier], blocks: dict[BlockKey, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = new_tier()
    store(tier, blocks)
    tier.close()
    (tier.directory / HEADERS_NAME).unlink()
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert list(new_tier().entries()) == []
    assert synced == [str(tier.directory)]


def test_growing_leaves_pages_of_headers_alone_that_another_thread_may_be_writing(
    new_tier: Callable[..., FileTier], blocks: dict[BlockKey, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without fallocate, as on NFS, the C library reads a byte of each page and writes it back if it is zero.
    monkeypatch.setattr("kvbench.tiers.file.extent._GROWTH_BYTES", 10 * GEOMETRY.slot_bytes)
    tier = new_tier()
    ranges: list[tuple[int, int]] = []
    real = os.posix_fallocate

    def allocated(descriptor: int, offset: int, size: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == HEADERS_NAME:
            ranges.append((offset, size))
        real(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocated)
    assert set(store(tier, blocks)) == {"ok"}
    assert ranges == [(0, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES)]
    assert (tier.directory / HEADERS_NAME).stat().st_size == 2 * PAGE_BYTES
