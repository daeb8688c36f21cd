"""Every file engine must move exactly the bytes it was asked to, and say in one line why it could not."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.tiers.cuda_runtime import no_gpu_reason
from kvbench.tiers.file_engines import gds
from kvbench.tiers.file_engines.base import (
    Blocks,
    EngineSettings,
    EngineUnavailableError,
    FileEngine,
    aligned_buffer,
    slot_bytes_for,
)
from kvbench.tiers.file_engines.registry import ENGINES, open_engine
from tests.conformance.fake_cuda import FakeCuda

FILE_BYTES = 1 << 20
HERE = [name for name in ENGINES if name != "gds"]
QUEUES = ("aio", "io_uring")


@pytest.fixture
def content() -> bytes:
    return random.Random(5).randbytes(FILE_BYTES)


@pytest.fixture
def path(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "data"
    path.write_bytes(content)
    return path


@pytest.fixture
def buffer() -> memoryview:
    return aligned_buffer(2 * FILE_BYTES)


class Opened:
    """An engine on a file, closed at the end of the test."""

    def __init__(self) -> None:
        self._ends: list[Any] = []

    def __call__(
        self, name: str, path: Path, buffer: memoryview, *, depth: int = 4, slot: int = 65536, direct: bool = False
    ) -> FileEngine:
        flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            pytest.skip(f"no O_DIRECT in this directory: {error}")
        self._ends.append(lambda: os.close(descriptor))
        try:
            engine = open_engine(
                name,
                EngineSettings(
                    descriptor=descriptor,
                    file_bytes=path.stat().st_size,
                    buffer=buffer,
                    depth=depth,
                    slot_bytes=slot_bytes_for(slot),
                    direct=direct,
                ),
            )
        except EngineUnavailableError as error:
            pytest.skip(str(error))
        self._ends.append(engine.close)
        return engine

    def close(self) -> None:
        for end in reversed(self._ends):
            end()


@pytest.fixture
def opened() -> Iterator[Opened]:
    engines = Opened()
    yield engines
    engines.close()


SHAPES = {
    "one byte": [(12345, 1)],
    "an odd size": [(777 * index, 777) for index in (3, 0, 9)],
    "unaligned tails": [(1, 4097), (9001, 4097), (500_003, 60_001)],
    "nothing": [],
    "a block of nothing": [(4096, 0), (8192, 512)],
    "the same block again": [(4096, 4096)] * 9,
    "overlapping blocks": [(start, 8192) for start in range(0, 65536, 2048)],
    "up to the last byte": [(FILE_BYTES - 333, 333), (0, 100)],
    "more blocks than in flight": [(start, 4096) for start in range(0, FILE_BYTES, 4096)],
}


def packed(sizes: list[int]) -> list[int]:
    places, place = [], 0
    for size in sizes:
        places.append(place)
        place += size
    return places


@pytest.mark.parametrize("depth", [1, 16])
@pytest.mark.parametrize("what", SHAPES)
@pytest.mark.parametrize("name", HERE)
def test_loads_arrive_exactly(
    name: str, what: str, depth: int, path: Path, content: bytes, buffer: memoryview, opened: Opened
) -> None:
    offsets, sizes = [start for start, _ in SHAPES[what]], [size for _, size in SHAPES[what]]
    places = packed(sizes)
    engine = opened(name, path, buffer, depth=depth)
    engine.transfer(Blocks(direction="load", offsets=offsets, sizes=sizes, places=places))
    for offset, size, place in zip(offsets, sizes, places, strict=True):
        assert bytes(buffer[place : place + size]) == content[offset : offset + size]
    assert not any(buffer[sum(sizes) : sum(sizes) + 4096]), "bytes beyond the last block were written"


@pytest.mark.parametrize("sync_each", [False, True])
@pytest.mark.parametrize("depth", [1, 16])
@pytest.mark.parametrize("what", [what for what in SHAPES if what != "overlapping blocks"])
@pytest.mark.parametrize("name", HERE)
def test_stores_arrive_exactly_and_nowhere_else(
    name: str, what: str, depth: int, sync_each: bool, path: Path, content: bytes, buffer: memoryview, opened: Opened
) -> None:
    if sync_each and len(SHAPES[what]) > 20:
        pytest.skip("hundreds of syncs show nothing more")
    offsets, sizes = [start for start, _ in SHAPES[what]], [size for _, size in SHAPES[what]]
    places = [0 if offsets.count(offset) > 1 else place for offset, place in zip(offsets, packed(sizes), strict=True)]
    new = random.Random(6).randbytes(sum(sizes))
    buffer[: len(new)] = new
    engine = opened(name, path, buffer, depth=depth)
    engine.transfer(Blocks(direction="store", offsets=offsets, sizes=sizes, places=places, sync_each=sync_each))
    expected = bytearray(content)
    for offset, size, place in zip(offsets, sizes, places, strict=True):
        expected[offset : offset + size] = new[place : place + size]
    assert path.read_bytes() == expected


@pytest.mark.parametrize("name", HERE)
def test_blocks_in_a_ring_use_one_slot_per_request(
    name: str, path: Path, content: bytes, buffer: memoryview, opened: Opened
) -> None:
    engine = opened(name, path, buffer, depth=4, slot=4096)
    offsets = list(range(0, FILE_BYTES, 4096))
    engine.transfer(Blocks(direction="load", offsets=offsets, sizes=[4096] * len(offsets)))
    known = {content[offset : offset + 4096] for offset in offsets}
    assert all(
        bytes(buffer[slot * 4096 : (slot + 1) * 4096]) in known
        for slot in range(4)
        if any(buffer[slot * 4096 : (slot + 1) * 4096])
    )
    assert not any(buffer[4 * 4096 :])


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", HERE)
def test_a_handler_has_the_slot_to_itself_while_it_handles_a_block(
    name: str, depth: int, path: Path, content: bytes, buffer: memoryview, opened: Opened
) -> None:
    engine = opened(name, path, buffer, depth=depth, slot=4096)
    offsets, sizes = list(range(0, FILE_BYTES, 4096)), [4096, 4096, 0, 1000] * (FILE_BYTES // 4096 // 4)
    offsets = offsets[: len(sizes)]
    chance = random.Random(11)
    fresh = [chance.randbytes(size) for size in sizes]
    filled, left, arrived = ([0] * len(sizes) for _ in range(3))

    def fill(index: int, slot: int) -> None:
        filled[index] += 1
        buffer[slot * 4096 : slot * 4096 + sizes[index]] = fresh[index]

    def passed(index: int, slot: int) -> None:
        left[index] += filled[index] == 1 and buffer[slot * 4096 : slot * 4096 + sizes[index]] == fresh[index]

    def compare(index: int, slot: int) -> None:
        arrived[index] += buffer[slot * 4096 : slot * 4096 + sizes[index]] == fresh[index]

    engine.transfer(Blocks(direction="store", offsets=offsets, sizes=sizes, before=fill, after=passed))
    engine.transfer(Blocks(direction="load", offsets=offsets, sizes=sizes, after=compare))
    assert filled == left == arrived == [int(size > 0) for size in sizes]
    written = path.read_bytes()
    for offset, size, data in zip(offsets, sizes, fresh, strict=True):
        assert written[offset : offset + 4096] == data + content[offset + size : offset + 4096]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("direction", ["load", "store"])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", HERE)
def test_what_a_handler_raises_ends_the_transfer_and_not_the_engine(
    name: str, depth: int, direction: Any, when: Any, path: Path, content: bytes, buffer: memoryview, opened: Opened
) -> None:
    engine = opened(name, path, buffer, depth=depth, slot=4096)
    offsets = list(range(0, FILE_BYTES, 4096))
    handled: list[int] = []

    def refuse(index: int, _: int) -> None:
        handled.append(index)
        if index == 7:
            raise LookupError("block 7")

    with pytest.raises(LookupError, match="block 7"):
        engine.transfer(
            Blocks(direction=direction, offsets=offsets, sizes=[4096] * len(offsets), **{when: refuse})  # type: ignore[arg-type]
        )
    if name in ("aio", "io_uring"):
        assert len(handled) < len(offsets)
    loaded = path.read_bytes()
    engine.transfer(Blocks(direction="load", offsets=[8192, 0], sizes=[4096] * 2, places=[0, 4096]))
    assert bytes(buffer[:8192]) == loaded[8192:12288] + loaded[:4096]


@pytest.mark.parametrize("direction", ["load", "store"])
def test_threads_of_a_transfer_that_could_not_begin_end(
    direction: Any, path: Path, buffer: memoryview, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened("psync", path, buffer, depth=4, slot=4096)
    submit, started = ThreadPoolExecutor.submit, list[Future[Any]]()

    def limited(pool: ThreadPoolExecutor, *call: Any) -> Future[Any]:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(submit(pool, *call))
        return started[-1]

    monkeypatch.setattr(ThreadPoolExecutor, "submit", limited)
    handlers: dict[str, Any] = {"after" if direction == "load" else "before": lambda index, slot: None}
    offsets = list(range(0, FILE_BYTES, 4096))
    with pytest.raises(RuntimeError, match="start new thread"):
        engine.transfer(Blocks(direction=direction, offsets=offsets, sizes=[4096] * len(offsets), **handlers))
    assert [one.done() for one in started] == [True] * 2, "closing the engine, or the end of Python, waits for them"


@pytest.mark.parametrize("direction", ["load", "store"])
def test_an_interrupt_is_not_lost_when_a_block_fails_too(
    direction: Any, path: Path, buffer: memoryview, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, failed = opened("psync", path, buffer, depth=4, slot=4096), threading.Event()

    def refuses(*_: Any) -> int:
        failed.set()
        raise OSError(5, "Input/output error")

    def handle(index: int, _: int) -> None:
        if direction == "store" and index == 0:
            return
        assert failed.wait(10)
        raise KeyboardInterrupt

    if direction == "store":
        monkeypatch.setattr(os, "pwritev", refuses)
    else:
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda *call: refuses() if call[2] == 4096 else preadv(*call))
    handlers: dict[str, Any] = {"after" if direction == "load" else "before": handle}
    with pytest.raises(KeyboardInterrupt):
        engine.transfer(Blocks(direction=direction, offsets=[0, 4096], sizes=[4096] * 2, **handlers))


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", [name for name in HERE if name != "mmap"])
def test_direct_blocks_arrive_and_a_misaligned_one_is_refused_in_one_line(
    name: str, depth: int, path: Path, content: bytes, buffer: memoryview, opened: Opened
) -> None:
    engine = opened(name, path, buffer, depth=depth, direct=True)
    engine.transfer(Blocks(direction="load", offsets=[8192, 0], sizes=[4096, 4096], places=[0, 4096]))
    assert bytes(buffer[:8192]) == content[8192:12288] + content[:4096]
    with pytest.raises(KvbenchError, match="1000 B at offset 0: O_DIRECT refused it") as caught:
        engine.transfer(Blocks(direction="load", offsets=[4096, 0, 8192], sizes=[4096, 1000, 4096]))
    assert "\n" not in str(caught.value)
    # what was in flight has landed, and the engine still works
    engine.transfer(Blocks(direction="load", offsets=[4096], sizes=[4096], places=[0]))
    assert bytes(buffer[:4096]) == content[4096:8192]


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("name", [name for name in HERE if name != "mmap"])
def test_a_file_that_got_shorter_is_named(
    name: str, depth: int, path: Path, content: bytes, buffer: memoryview, opened: Opened
) -> None:
    engine = opened(name, path, buffer, depth=depth)
    os.truncate(path, 10_000)
    with pytest.raises(KvbenchError, match="the file ended after 1808 bytes of it"):
        engine.transfer(Blocks(direction="load", offsets=[0, 8192, 4096], sizes=[4096] * 3))
    # the engine still works, and loads what it is asked for and not what the failure left
    engine.transfer(Blocks(direction="load", offsets=[4096, 0], sizes=[4096] * 2, places=[0, 4096]))
    assert bytes(buffer[:8192]) == content[4096:8192] + content[:4096]


@pytest.mark.parametrize("depth", [1, 16])
@pytest.mark.parametrize("name", [name for name in HERE if name != "mmap"])
def test_signals_do_not_end_a_transfer(
    name: str, depth: int, path: Path, content: bytes, buffer: memoryview, opened: Opened
) -> None:
    engine = opened(name, path, buffer, depth=depth, direct=True)
    offsets = list(range(0, FILE_BYTES, 4096)) * 2
    signals = 0

    def count(*_: object) -> None:
        nonlocal signals
        signals += 1

    before = signal.signal(signal.SIGALRM, count)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        engine.transfer(Blocks(direction="load", offsets=offsets, sizes=[4096] * len(offsets), places=offsets))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert signals
    assert bytes(buffer[:FILE_BYTES]) == content


@pytest.mark.parametrize("name", [name for name in HERE if name != "mmap"])
def test_a_full_disk_is_a_reason(name: str, tmp_path: Path, buffer: memoryview, opened: Opened) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small filesystem needs root")
    try:
        path = tmp_path / "sparse"
        path.touch()
        os.truncate(path, FILE_BYTES)
        engine = opened(name, path, buffer)
        offsets = list(range(0, FILE_BYTES, 65536))
        with pytest.raises(KvbenchError, match="no space left on the device"):
            engine.transfer(Blocks(direction="store", offsets=offsets, sizes=[65536] * len(offsets)))
    finally:
        opened.close()
        opened._ends.clear()
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("name", ENGINES)
def test_a_ring_that_does_not_fit_the_buffer_is_refused(name: str, path: Path, buffer: memoryview) -> None:
    with pytest.raises(KvbenchError, match="do not fit a buffer"):
        EngineSettings(descriptor=0, file_bytes=1, buffer=buffer, depth=1 << 12, slot_bytes=4096)


BLOCKED = """
import ctypes, platform, struct, sys
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
def step(code, true, false, value):
    return struct.pack("HBBI", code, true, false, value)
# load the system call's number; io_uring_setup answers EPERM; the rest is allowed
code = step(0x20, 0, 0, 0) + step(0x15, 0, 1, 425) + step(0x06, 0, 0, 0x00050001) + step(0x06, 0, 0, 0x7fff0000)
text = ctypes.create_string_buffer(code)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(4, ctypes.addressof(text))), 0, 0) == 0, ctypes.get_errno()
"""


def test_io_uring_that_seccomp_blocks_is_skipped_with_what_to_do(path: Path) -> None:
    program = BLOCKED + (
        "from kvbench.tiers.file_engines.base import *\n"
        "from kvbench.tiers.file_engines.registry import open_engine\n"
        "import os\n"
        f"fd = os.open({str(path)!r}, os.O_RDWR)\n"
        "try:\n"
        "    open_engine('io_uring', EngineSettings(descriptor=fd, file_bytes=1 << 20, buffer=aligned_buffer(1 << 16),"
        " depth=1, slot_bytes=4096))\n"
        "except EngineUnavailableError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    if "prctl" in done.stderr:
        pytest.skip("this host lets nobody install a seccomp filter")
    assert "io_uring_setup: Operation not permitted" in done.stdout, done.stderr
    assert "seccomp profile" in done.stdout


def test_without_a_gpu_gds_says_so_before_it_touches_cufile(path: Path, buffer: memoryview) -> None:
    with path.open("r+b") as file:
        settings = EngineSettings(
            descriptor=file.fileno(), file_bytes=FILE_BYTES, buffer=buffer, depth=1, slot_bytes=4096
        )
        if no_gpu_reason() is None:
            pytest.skip("this host has a GPU")
        with pytest.raises(EngineUnavailableError, match=r"^no GPU"):
            open_engine("gds", settings)
    assert "cuda.bindings.cufile" not in sys.modules


class FakeCufile:
    """cuFile on a plain file descriptor and host memory."""

    FileHandleType = SimpleNamespace(OPAQUE_FD=1)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.handle: Any = None

    def Descr(self) -> Any:
        self.handle = SimpleNamespace(type=None, handle=SimpleNamespace(fd=None), ptr=77)
        return self.handle

    def driver_open(self) -> None:
        self.calls.append("driver_open")

    def driver_close(self) -> None:
        self.calls.append("driver_close")

    def handle_register(self, pointer: int) -> int:
        assert (pointer, self.handle.type) == (77, 1)
        return 5

    def handle_deregister(self, handle: int) -> None:
        self.calls.append("handle_deregister")

    def buf_register(self, address: int, size: int, flags: int) -> None:
        assert flags == 0

    def buf_deregister(self, address: int) -> None:
        self.calls.append("buf_deregister")

    def read(self, handle: int, base: int, size: int, offset: int, place: int) -> int:
        import ctypes

        part = os.pread(self.handle.handle.fd, min(size, 1000), offset)  # less than was asked for
        ctypes.memmove(base + place, part, len(part))
        return len(part)

    def write(self, handle: int, base: int, size: int, offset: int, place: int) -> int:
        import ctypes

        return os.pwrite(self.handle.handle.fd, ctypes.string_at(base + place, size), offset)


def test_gds_moves_exactly_and_reports_what_carried_the_bytes(
    path: Path, content: bytes, buffer: memoryview, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake, cufile = FakeCuda(), FakeCufile()
    monkeypatch.setattr(gds, "no_gpu_reason", lambda: None)
    monkeypatch.setattr(gds, "cuda_runtime", lambda: fake)
    bindings = SimpleNamespace(cufile=cufile)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    stats = tmp_path / "proc/driver/nvidia-fs/stats"
    stats.parent.mkdir(parents=True)
    stats.write_text("GDS Version: 1.7.0.149\nReads\t\t\t\t: n=16 ok=16 err=0 readMiB=64\nWrites\t\t\t\t: n=2 ok=2\n")
    with path.open("r+b") as file:
        settings = EngineSettings(
            descriptor=file.fileno(), file_bytes=FILE_BYTES, buffer=buffer, depth=3, slot_bytes=8192
        )
        engine = gds.GdsEngine(settings, root=tmp_path)
        offsets, sizes = [4096, 0, 20_000], [5000, 3, 8192]
        engine.transfer(Blocks(direction="load", offsets=offsets, sizes=sizes, places=packed(sizes)))
        engine.show()
        expected = b"".join(content[start : start + size] for start, size in zip(offsets, sizes, strict=True))
        assert bytes(buffer[: sum(sizes)]) == expected
        assert "did not move: cuFile ran in compatibility mode" in engine.what_ran()
        stats.write_text("Reads\t\t\t\t: n=19 ok=19 err=0 readMiB=64\nWrites\t\t\t\t: n=2 ok=2\n")
        assert engine.what_ran() == "nvidia-fs carried 3 operations"
        engine.close()
    assert cufile.calls == ["driver_open", "buf_deregister", "handle_deregister", "driver_close"]


def test_gds_lets_all_of_its_threads_end_before_it_fails(
    path: Path, buffer: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(FakeCufile):
        def read(self, handle: int, base: int, size: int, offset: int, place: int) -> int:
            if offset == 0:
                return -5
            time.sleep(0.2)
            return super().read(handle, base, size, offset, place)

    monkeypatch.setattr(gds, "no_gpu_reason", lambda: None)
    monkeypatch.setattr(gds, "cuda_runtime", FakeCuda)
    bindings = SimpleNamespace(cufile=Slow())
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    with path.open("r+b") as file:
        engine = gds.GdsEngine(
            EngineSettings(descriptor=file.fileno(), file_bytes=FILE_BYTES, buffer=buffer, depth=2, slot_bytes=4096)
        )
        handled: list[int] = []
        with pytest.raises(KvbenchError, match="offset 0: error -5"):
            engine.transfer(
                Blocks(
                    direction="load", offsets=[0, 4096], sizes=[500] * 2, after=lambda index, _: handled.append(index)
                )
            )
        assert handled == [1]
        engine.close()


def test_the_file_tier_stores_and_loads_through_gds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvbench.core.block_key import BlockKey
    from kvbench.tiers.base import Block, Wanted
    from kvbench.tiers.file.tier import FileTier

    monkeypatch.setattr(gds, "no_gpu_reason", lambda: None)
    monkeypatch.setattr(gds, "cuda_runtime", FakeCuda)
    bindings = SimpleNamespace(cufile=FakeCufile())
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    tier = FileTier(tmp_path / "kv", block_bytes=20_000, io="gds", direct=False, depth=3)
    chance = random.Random(7)
    blocks = {BlockKey(chance.randbytes(16), chance.randbytes(32)): chance.randbytes(1 + 999 * n) for n in range(20)}
    stored = tier.store([Block(key, memoryview(data)) for key, data in blocks.items()])
    assert {outcome.result for outcome in stored} == {"ok"}
    for _ in range(2):
        into = {key: bytearray(len(data)) for key, data in blocks.items()}
        loaded = tier.load([Wanted(key, memoryview(buffer)) for key, buffer in into.items()])
        assert {outcome.result for outcome in loaded} == {"ok"}
        assert into == blocks
        tier.close()
        tier = FileTier(tmp_path / "kv", block_bytes=20_000, io="psync", direct=False)
    tier.close()
