"""Remote tiers when calls overlap with a close, come late, or meet a server that talks nonsense."""

import asyncio
import os
import random
import socketserver
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvbench.core.block_key import BlockKey
from kvbench.tiers.base import OK, Block, Outcome, Wanted
from kvbench.tiers.breaker import Breaker
from kvbench.tiers.checksum import crc32c_of
from kvbench.tiers.envelope import header_of
from kvbench.tiers.metadata import Location
from kvbench.tiers.metadata.guarded import GuardedMetadata
from kvbench.tiers.nixl import Files
from kvbench.tiers.registry import open_tier
from kvbench.tiers.remote import RemoteTier, StoreClient
from kvbench.tiers.remote_ledger import Ledger
from tests.tiers.storing_child import key_of

WAIT_S = 20.0
DATA = b"some bytes of a block"


@dataclass
class HeldClient:
    """A `StoreClient` of one value that answers when it is told to, or blocks its whole event loop."""

    value: bytes
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    asked: threading.Event = field(default_factory=threading.Event)
    block_loop_s: float = 0.0

    async def put(self, name: str, *parts: bytes | memoryview) -> None:
        await self.get(name)

    async def get(self, name: str) -> bytes | None:
        del name
        self.asked.set()
        if self.block_loop_s:
            time.sleep(self.block_loop_s)
            return self.value
        await self.go_on.wait()
        return self.value

    async def head(self, name: str, num_bytes: int) -> tuple[bytes, int] | None:
        del name, num_bytes
        return None

    async def delete(self, names: Sequence[str]) -> list[bool]:
        return [False] * len(names)

    async def names(self) -> AsyncIterator[tuple[str, int]]:
        for nothing in tuple[tuple[str, int], ...]():
            yield nothing

    async def check(self) -> None:
        """All is well."""

    async def close(self) -> None:
        """Nothing to close."""


def tier_over(client: HeldClient, **times: float) -> RemoteTier:
    async def opened() -> StoreClient:
        return client

    settings = {"timeout_s": 5.0, "deadline_s": 10.0} | times
    return RemoteTier(
        "held",
        "held:",
        4096,
        opened,
        concurrency=2,
        capacity_bytes=None,
        **settings,  # type: ignore[arg-type]
    )


def envelope(key: BlockKey) -> bytes:
    return header_of(key, len(DATA), crc32c_of(DATA)) + DATA


def test_a_close_in_the_middle_of_a_call_ends_it_with_an_outcome() -> None:
    client = HeldClient(envelope(key_of(1)))
    tier = tier_over(client)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(tier.load, [Wanted(key_of(1), memoryview(bytearray(len(DATA))))])
        assert client.asked.wait(WAIT_S)
        tier.close()
        assert loading.result(WAIT_S)[0].result in ("failed", "timeout")
    assert tier.stats().failures + tier.stats().timeouts == 1


def test_calls_that_race_with_a_close_have_outcomes() -> None:
    for _ in range(20):
        client = HeldClient(envelope(key_of(1)))
        client.go_on.set()
        tier, stop = tier_over(client), threading.Event()

        def calls(tier: RemoteTier = tier, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                (outcome,) = tier.load([Wanted(key_of(1), memoryview(bytearray(len(DATA))))])
                assert outcome.result in ("ok", "failed", "timeout")

        with ThreadPoolExecutor(3) as threads:
            running = [threads.submit(calls) for _ in range(3)]
            time.sleep(0.005)
            tier.close()
            stop.set()
            for one in running:
                one.result(WAIT_S)


def test_bytes_of_a_loop_that_was_stuck_do_not_reach_a_caller_who_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.tiers.remote._GRACE_S", 0.1)
    client = HeldClient(envelope(key_of(1)), block_loop_s=0.8)
    tier = tier_over(client, timeout_s=5.0, deadline_s=0.2)
    buffer = bytearray(len(DATA))
    assert tier.load([Wanted(key_of(1), memoryview(buffer))])[0].result == "timeout"
    buffer[:] = bytes(len(DATA))  # the caller uses its memory for something else
    time.sleep(1.2)
    assert buffer == bytes(len(DATA))
    tier.close()


class Nonsense(socketserver.ThreadingTCPServer):
    """Answers whatever it is asked with the next of its answers."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.answers = answers
        self.asked = 0
        super().__init__(("127.0.0.1", 0), _Answer)


class _Answer(socketserver.BaseRequestHandler):
    server: Nonsense

    def handle(self) -> None:
        self.request.settimeout(5)
        try:
            while asked := self.request.recv(65536):
                if b"SETINFO" in asked:  # how redis-py begins; without an answer to that it gets no further
                    self.request.sendall(b"+OK\r\n" * asked.count(b"SETINFO"))
                    continue
                self.server.asked += 1
                self.request.sendall(self.server.answers[self.server.asked % len(self.server.answers)])
                if self.server.asked % 3 == 0:
                    return
        except OSError:
            return


def redis_answers() -> list[bytes]:
    chance = random.Random(7)
    shapes = [
        b"+OK\r\n", b":1\r\n", b":nonsense\r\n", b"$5\r\nab\r\n", b"$-7\r\n", b"$x\r\n", b"*2\r\n:1\r\n", b"*-1\r\n",
        b"_\r\n", b"%1\r\n+a\r\n:1\r\n", b"-ERR no\r\n", b"-\r\n", b"\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*2\r\n+a\r\n+b\r\n", b"*1\r\n*1\r\n:3\r\n", b"$3\r\nabc\r\n:9\r\n", b"\xff\xfe\r\n", b"-OOM \xff\r\n",
        b"*2\r\n$1\r\nx\r\n*1\r\n$2\r\n\xff\xfe\r\n", b"#t\r\n", b",1.x\r\n", b"(12x\r\n",
    ]  # fmt: skip
    return shapes + [chance.randbytes(chance.randint(1, 40)) + b"\r\n" for _ in range(10)]


def s3_answers() -> list[bytes]:
    chance = random.Random(9)

    def http(status: str, body: bytes, **headers: str) -> bytes:
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{lines}\r\n".encode() + body

    return [
        http("200 OK", b"<not xml"), http("200 OK", b""), http("404 Not Found", b"<Error><Code>"),
        http("500 Oops", b"\xff\xfe"), http("206 Partial Content", b"x", Content_Range="bytes 0-1/many"),
        http("200 OK", b"<a/>", Last_Modified="yesterday"), http("301 Moved", b"", Location="nowhere"),
        http("307 Temporary", b"", Location="http://127.0.0.1:1/"), b"HTTP/1.1 abc\r\n\r\n", b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", http("400 Bad", b"<Error/>"),
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", http("204 No Content", b""),
        http("200 OK", b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"),
        http("200 OK", b"<ListBucketResult><Contents><Size>x</Size></Contents></ListBucketResult>"),
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
        http("301 Moved", b"<Error><Code>PermanentRedirect</Code></Error>"), chance.randbytes(60) + b"\r\n\r\n",
    ]  # fmt: skip


@pytest.fixture(params=["redis", "s3"])
def talking_nonsense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    answers = redis_answers() if request.param == "redis" else s3_answers()
    with Nonsense(answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.server_address[1]}"
        spelling = (
            f"redis://{address}/0" if request.param == "redis" else f"s3://b/p?endpoint=http://{address}&region=x"
        )
        yield spelling + ("&" if "?" in spelling else "?") + "timeout=300ms&concurrency=1"
        server.shutdown()


def test_a_server_that_talks_nonsense_costs_outcomes_and_nothing_is_raised(talking_nonsense: str) -> None:
    tier = open_tier(talking_nonsense, block_bytes=4096)
    assert isinstance(tier, RemoteTier)
    tier._breaker = Breaker(failures=10**6)  # every answer is met
    calls: list[Callable[[], object]] = [
        lambda: [o.result for o in tier.load([Wanted(key_of(1), memoryview(bytearray(20)))])],
        lambda: [o.result for o in tier.store([Block(key_of(2), memoryview(DATA))])],
        lambda: tier.contains([key_of(3)]),
        lambda: tier.evict([key_of(4)]),
        lambda: list(tier.entries()),
    ]
    seen = set()
    for round_ in range(12):
        for call in calls[round_ % 2 :]:
            seen.add(str(call()))
    assert "['ok']" not in {str(calls[0]())}
    assert len(seen) > 3
    stats = tier.stats()
    assert stats.loaded_blocks == 0
    assert stats.failures + stats.timeouts + stats.corrupt > 20
    tier.close()


class BrokenBackend:
    """A metadata service whose answers cannot be read."""

    name = "broken"

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def put(self, keys: Sequence[BlockKey], location: Location, sizes_bytes: Sequence[int]) -> None:
        self._answer()

    def find(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        self._answer()
        return [None] * len(keys)

    def remove(self, keys: Sequence[BlockKey], location: Location) -> None:
        self._answer()

    def drain(self, instance: str) -> None:
        self._answer()

    def renew(self) -> None:
        self._answer()

    def close(self) -> None:
        """Nothing to close."""

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [ValueError("not a number"), KeyError("bytes"), TypeError("None"), IndexError("1")])
def test_an_answer_of_the_metadata_that_cannot_be_read_is_a_failure_and_not_the_end(error: Exception) -> None:
    backend = BrokenBackend(error)
    metadata = GuardedMetadata(
        backend, timeout_s=5, renew_s=0.02, breaker=Breaker(cooldown_s=0.02, max_cooldown_s=0.02)
    )
    for _ in range(5):
        assert metadata.find([key_of(1)]) == [None]
        time.sleep(0.03)
    assert metadata.stats().failures >= 3
    backend.error = None
    deadline_s = time.monotonic() + WAIT_S
    while metadata.stats().breaker != "closed":
        metadata.find([key_of(1)])
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert any(thread.name == "metadata-leases" for thread in threading.enumerate())
    metadata.close()


def test_blocks_that_are_there_already_need_no_room_of_their_own() -> None:
    ledger = Ledger(100)
    blocks = [Block(key_of(number), memoryview(bytes(50))) for number in range(2)]
    for _ in range(3):
        refusals, taken, room = ledger.admit(blocks, 100, "place")
        assert refusals == [None, None]
        ledger.stored(((block, OK) for block in taken), room)
    refusals, _, _ = ledger.admit([Block(key_of(9), memoryview(b"x"))], 100, "place")
    assert isinstance(refusals[0], Outcome)
    assert refusals[0].result == "full"
    assert ledger.stats().used_bytes == 100


def test_nixl_leaves_a_directory_without_half_blocks(tmp_path: Path) -> None:
    files, other = Files(tmp_path, io=None, direct=False), Files(tmp_path, io=None, direct=False)
    key = key_of(1)
    with files.open([key], [4], new=True) as first, other.open([key], [4], new=True) as second:
        os.write(first[0][2], b"aaaa")
        os.write(second[0][2], b"bb")  # two clients, as in two containers with the same process number
        assert len(list(tmp_path.rglob("*.tmp"))) == 2
    assert not list(tmp_path.rglob("*.tmp"))
    assert files.sizes([key]) == [4]
    with pytest.raises(TimeoutError), files.open([key_of(2)], [4], new=True) as late:
        raise TimeoutError("late")
    os.fstat(late[0][2])  # what may still move keeps its own file, and never writes into another one
    assert files.sizes([key_of(2)]) == [None]
    files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(late[0][2])


def test_nixl_removes_what_killed_processes_left_and_nothing_younger_or_of_others(tmp_path: Path) -> None:
    files = Files(tmp_path, io=None, direct=False)
    files.start()
    with files.open([key_of(1)], [4], new=True) as mine:
        os.write(mine[0][2], b"mine")
        (young,) = tmp_path.rglob("*.tmp")
        old, others = young.with_name(young.name.replace("-0.tmp", "-1.tmp")), young.with_name("notes.tmp")
        for path in (old, others):
            path.write_bytes(b"left")
            os.utime(path, (time.time() - 2 * 86400,) * 2)
        files.listed()
        assert (young.exists(), old.exists(), others.exists()) == (True, False, True)
    assert files.sizes([key_of(1)]) == [4]
    files.close()
