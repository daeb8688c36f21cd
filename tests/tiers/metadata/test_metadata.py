"""Every metadata service keeps the same promises; run against SQLite, a real etcd and a real Redis."""

import itertools
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.tiers.metadata import Location, Metadata, open_metadata
from kvbench.tiers.metadata.base import MetadataUnavailableError
from kvbench.tiers.metadata.breaker import Breaker
from kvbench.tiers.metadata.guarded import GuardedMetadata
from kvbench.tiers.metadata.sqlite import SqliteBackend

IDENTITY = KvIdentity(
    model="demo", model_version="1", tokenizer_version="t1", dtype="bf16", page_tokens=4, layers=(0, 8), attention="gqa"
)
HERE = Location(instance="here", tier="dram")
THERE = Location(instance="there", tier="file")
_numbers = itertools.count(1)


def some_keys(count: int) -> tuple[BlockKey, ...]:
    """Keys that no other test uses."""
    number = next(_numbers)
    return block_keys([number, os.getpid()] + list(range(4 * count - 2)), IDENTITY)


Opener = Callable[..., Metadata]


@pytest.fixture(params=["sqlite", "etcd", "redis"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens clients of one service; keyword arguments become keys of the spelling."""
    if request.param == "sqlite":
        base = f"sqlite:{tmp_path}/metadata.db"
    elif request.param == "etcd":
        base = f"etcd://{request.getfixturevalue('etcd_server').address}/test{next(_numbers)}"
    else:
        base = f"redis://{request.getfixturevalue('redis_server').address}/3"
    clients: list[Metadata] = []

    def open_(**keys: str) -> Metadata:
        query = "&".join(f"{key}={value}" for key, value in ({"timeout": "5s"} | keys).items())
        clients.append(open_metadata(f"{base}?{query}"))
        return clients[-1]

    yield open_
    for client in clients:
        client.close()


def places(found: list[Location | None]) -> list[tuple[str, str, int] | None]:
    return [None if one is None else (one.instance, one.tier, one.num_bytes) for one in found]


def test_what_one_client_publishes_another_finds_with_its_sizes(opened: Opener) -> None:
    one, other, keys = opened(), opened(), some_keys(5)
    assert one.put(keys[:3], HERE, [10, 20, 30])
    assert one.put(keys[3:4], THERE, 7)
    assert places(other.find(keys)) == [
        ("here", "dram", 10), ("here", "dram", 20), ("here", "dram", 30), ("there", "file", 7), None,
    ]  # fmt: skip
    found = other.find(keys[:1])[0]
    assert found is not None
    assert found.expires_at_s is not None
    assert 0 < found.expires_at_s - time.time() < 90_000
    stats = other.stats()
    assert (stats.lookups, stats.keys_looked_up, stats.hits, stats.failures) == (2, 6, 5, 0)
    assert one.stats().published == 4
    assert stats.lookup_p50_s is not None
    assert stats.lookup_p99_s is not None
    assert 0 < stats.lookup_p50_s <= stats.lookup_p99_s


def test_a_batch_larger_than_any_limit_of_the_service_is_found_whole(opened: Opener) -> None:
    client, keys = opened(), some_keys(700)
    assert client.put(keys, HERE, 4096)
    assert places(client.find(keys)) == [("here", "dram", 4096)] * 700
    assert client.remove(keys[::2], HERE)
    assert [one is None for one in client.find(keys)] == [True, False] * 350
    assert client.find([]) == []
    assert client.put([], HERE, 1)


def test_publishing_again_counts_the_version_up_and_the_latest_place_is_found(opened: Opener) -> None:
    client, keys = opened(), some_keys(1)
    for version in (1, 2, 3):
        client.put(keys, HERE, version)
        found = client.find(keys)[0]
        assert found is not None
        assert (found.version, found.num_bytes) == (version, version)
    client.put(keys, THERE, 5)
    assert places(client.find(keys)) == [("there", "file", 5)]
    client.remove(keys, THERE)
    assert places(client.find(keys)) == [("here", "dram", 3)]
    client.remove(keys, replace(HERE, tier="file"))
    assert places(client.find(keys)) == [("here", "dram", 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"}, {"model_version": "2"}, {"tokenizer_version": "t2"}, {"dtype": "fp8"}, {"layers": (0, 4)},
        {"rank": 1, "world": 2}, {"attention": "mla-latent"}, {"extra": "lora-7"},
    ],
)  # fmt: skip
def test_another_model_version_tokenizer_or_layout_finds_nothing(tmp_path: Path, change: dict[str, object]) -> None:
    client = open_metadata(f"sqlite:{tmp_path}/metadata.db")
    tokens = list(range(16))
    client.put(block_keys(tokens, IDENTITY), HERE, 1)
    other = replace(IDENTITY, **change)  # type: ignore[arg-type]
    assert client.find(block_keys(tokens, other)) == [None] * 4
    assert None not in client.find(block_keys(tokens, IDENTITY))
    client.close()


def test_names_with_odd_characters_come_back_as_they_went(opened: Opener) -> None:
    client = opened()
    for instance, tier in (("a/b c", "x=1"), ("*[host]?", "ü"), ("", "s3"), ("%2F", "=")):
        keys = some_keys(1)
        assert client.put(keys, Location(instance=instance, tier=tier), 1)
        assert places(client.find(keys)) == [(instance, tier, 1)]
        if instance:
            assert client.drain(instance)
            assert client.find(keys) == [None]


def test_draining_an_instance_withdraws_its_entries_and_nobody_elses(opened: Opener) -> None:
    one, other, keys = opened(), opened(), some_keys(6)
    one.put(keys, HERE, 1)
    other.put(keys[:2], THERE, 2)
    other.put(keys[2:3], Location(instance="", tier="s3"), 3)
    assert other.drain("here")
    assert places(other.find(keys)) == [("there", "file", 2)] * 2 + [("", "s3", 3)] + [None] * 3
    assert one.put(keys[5:], HERE, 9), "an instance that was drained may come back"
    assert places(other.find(keys[4:])) == [None, ("here", "dram", 9)]


def test_closing_a_client_ends_what_its_instance_published_and_keeps_what_belongs_to_nobody(opened: Opener) -> None:
    one, other, keys = opened(), opened(), some_keys(2)
    one.put(keys[:1], HERE, 1)
    one.put(keys[1:], Location(instance="", tier="s3"), 2)
    one.close()
    assert places(other.find(keys)) == [None, ("", "s3", 2)]


def test_a_lease_is_renewed_while_its_client_lives_and_ends_when_the_process_is_killed(opened: Opener) -> None:
    from urllib.parse import quote

    reader, keys = opened(), some_keys(1)
    spec = _spec_of(reader)
    code = (
        "import sys, time\n"
        "from kvbench.core.block_key import parse_block_key\n"
        "from kvbench.tiers.metadata import Location, open_metadata\n"
        "client = open_metadata(sys.argv[1])\n"
        "assert client.put([parse_block_key(sys.argv[2])], Location(instance=sys.argv[3], tier='dram'), 5)\n"
        "print('published', flush=True)\n"
        "time.sleep(60)\n"
    )
    name = quote(f"doomed-{next(_numbers)}")
    child = subprocess.Popen(
        [sys.executable, "-c", code, f"{spec}?timeout=5s&lease=1s", str(keys[0]), name], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"published\n"
        until_s = time.monotonic() + 2.5
        while time.monotonic() < until_s:  # two and a half lives of a lease: it is being renewed
            assert places(reader.find(keys)) == [(name, "dram", 5)]
            time.sleep(0.25)
    finally:
        child.kill()
        child.wait()
    until_s = time.monotonic() + 8
    while reader.find(keys) != [None]:
        assert time.monotonic() < until_s, "the entries of a dead instance stay"
        time.sleep(0.1)


def _spec_of(client: Metadata) -> str:
    """The spelling without keys of a client of the `opened` fixture."""
    backend = client._backend  # type: ignore[attr-defined]
    if backend.name == "sqlite":
        return f"sqlite:{backend._path}"
    if backend.name == "etcd":
        return f"{backend._place}/{backend._root.split('/')[0]}"
    return str(backend._url)


def test_entries_end_with_their_time_to_live(opened: Opener) -> None:
    client, keys = opened(ttl="1s"), some_keys(2)
    client.put(keys[:1], HERE, 1)
    client.put(keys[1:], Location(instance="", tier="s3"), 1)
    assert None not in client.find(keys)
    until_s = time.monotonic() + 5
    while client.find(keys) != [None, None]:
        assert time.monotonic() < until_s
        time.sleep(0.1)


def test_threads_of_one_client_do_not_mix_up_their_answers(opened: Opener) -> None:
    client = opened()
    sets = [some_keys(6) for _ in range(6)]
    wrong: list[object] = []

    def work(number: int) -> None:
        place = Location(instance=f"i{number}", tier="dram")
        for size in range(1, 6):
            client.put(sets[number], place, size)
            found = places(client.find(sets[number]))
            if found != [(f"i{number}", "dram", size)] * 6:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_processes_share_one_sqlite_file(tmp_path: Path) -> None:
    spec = f"sqlite:{tmp_path}/new/metadata.db?timeout=20s"
    keys = some_keys(60)
    code = (
        "import sys\n"
        "from kvbench.core.block_key import parse_block_key\n"
        "from kvbench.tiers.metadata import Location, open_metadata\n"
        "client = open_metadata(sys.argv[1])\n"
        "for text in sys.argv[3:]:\n"
        "    assert client.put([parse_block_key(text)], Location(instance='', tier=sys.argv[2]), 5)\n"
        "client.close()\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, spec, f"w{number}", *map(str, keys[20 * number :][:20])])
        for number in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    client = open_metadata(spec)
    found = client.find(keys)
    assert [one and one.tier for one in found] == [f"w{number // 20}" for number in range(60)]
    client.close()


class Model:
    """What the service should say, kept in a dict and a list of events."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, str], tuple[int, int]] = {}
        self.now = 0

    def put(self, keys: list[int], instance: str, size: int) -> None:
        self.now += 1
        for key in keys:
            self.entries[key, instance] = (self.now, size)

    def find(self, key: int) -> tuple[str, int] | None:
        held = [(when, instance, size) for (one, instance), (when, size) in self.entries.items() if one == key]
        return max(held)[1:] if held else None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "remove", "drain"]),
        st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
        st.sampled_from(["a", "b"]),
        st.integers(1, 9),
    ),
    max_size=15,
)


@pytest.fixture(scope="module")
def clock_s() -> list[float]:
    return [1000.0]


@given(steps=STEPS)
@settings(max_examples=60)
def test_sqlite_agrees_with_a_dict_whatever_the_order(
    steps: list[tuple[str, list[int], str, int]], tmp_path_factory: pytest.TempPathFactory, clock_s: list[float]
) -> None:
    def clock() -> float:
        clock_s[0] += 0.001  # no two publications at the same time
        return clock_s[0]

    path = tmp_path_factory.getbasetemp() / "model.db"
    backend = SqliteBackend(path, lease_s=1e6, ttl_s=1e6, busy_s=5, clock=clock)
    keys, model = some_keys(6), Model()
    for action, numbers, instance, size in steps:
        chosen, place = [keys[number] for number in numbers], Location(instance=instance, tier="dram")
        if action == "put":
            backend.put(chosen, place, [size] * len(chosen))
            model.put(numbers, instance, size)
        elif action == "remove":
            backend.remove(chosen, place)
            for number in numbers:
                model.entries.pop((number, instance), None)
        else:
            backend.drain(instance)
            model.entries = {one: entry for one, entry in model.entries.items() if one[1] != instance}
        found = [one and (one.instance, one.num_bytes) for one in backend.find(keys)]
        assert found == [model.find(number) for number in range(6)]
    for instance in ("a", "b"):
        backend.drain(instance)
    backend.close()


def test_a_damaged_or_unreachable_sqlite_file_is_a_miss_and_comes_back(tmp_path: Path) -> None:
    path, keys = tmp_path / "metadata.db", some_keys(1)
    path.write_bytes(random.Random(1).randbytes(8192))
    client = open_metadata(f"sqlite:{path}", breaker=Breaker(failures=1000))
    assert client.find(keys) == [None]
    assert not client.put(keys, HERE, 1)
    assert client.stats().failures == 2
    assert "cannot be used" in client.stats().last_error
    path.unlink()
    assert client.put(keys, HERE, 1)
    assert places(client.find(keys)) == [("here", "dram", 1)]
    client.close()


class Slow:
    """A backend that takes as long, or fails as often, as the test says."""

    name = "slow"

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.broken = False
        self.asked = 0

    def find(self, keys: object) -> list[Location | None]:
        self.asked += 1
        self.hold.wait(20)
        if self.broken:
            raise MetadataUnavailableError("broken")
        return [HERE]

    def put(self, keys: object, location: object, sizes: object) -> None:
        self.find(keys)

    def remove(self, keys: object, location: object) -> None: ...

    def drain(self, instance: str) -> None: ...

    def renew(self) -> None: ...

    def close(self) -> None: ...


def test_a_slow_service_becomes_misses_is_left_alone_and_is_found_again() -> None:
    now_s = [0.0]
    backend, keys = Slow(), some_keys(1)
    client = GuardedMetadata(
        backend,
        timeout_s=0.05,
        renew_s=1e6,
        breaker=Breaker(failures=3, cooldown_s=1.0, clock=lambda: now_s[0]),
    )
    assert client.find(keys) == [HERE]
    backend.hold.clear()
    begin_s = time.monotonic()
    assert [client.find(keys) for _ in range(10)] == [[None]] * 10
    assert not client.put(keys, HERE, 1)
    assert time.monotonic() - begin_s < 2, "three waits of 50 ms, then none"
    stats = client.stats()
    assert (stats.breaker, stats.timeouts, stats.skipped, stats.breaker_opened) == ("open", 3, 8, 1)
    assert (stats.lookups, stats.hits) == (11, 1)
    assert stats.budget_kept is False
    backend.hold.set()
    now_s[0] += 1.1
    until_s = time.monotonic() + 10
    while client.find(keys) != [HERE]:
        assert time.monotonic() < until_s
        now_s[0] += 10
    assert client.stats().breaker == "closed"
    backend.broken = True
    assert [client.find(keys) for _ in range(4)] == [[None]] * 4
    assert client.stats().failures == 3
    assert client.stats().last_error == "broken"
    client.close()


@pytest.mark.parametrize("scheme", ["redis", "etcd"])
def test_a_service_that_accepts_and_says_nothing_does_not_hold_anybody(scheme: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        client = open_metadata(f"{scheme}://127.0.0.1:{silent.getsockname()[1]}?timeout=100ms")
        begin_s = time.monotonic()
        assert client.find(some_keys(2)) == [None, None]
        assert not client.put(some_keys(1), HERE, 1)
        assert time.monotonic() - begin_s < 1.5
        stats = client.stats()
        assert (stats.timeouts + stats.failures, stats.hits) == (2, 0)
        begin_s = time.monotonic()
        client.close()
        assert time.monotonic() - begin_s < 3


@pytest.mark.parametrize("scheme", ["redis", "etcd"])
def test_a_service_that_is_started_late_is_picked_up(scheme: str, tmp_path: Path) -> None:
    from tests.servers import start
    from tests.servers.processes import free_ports

    (port,) = free_ports(1)
    keys = some_keys(1)
    path = "/0" if scheme == "redis" else ""
    client = open_metadata(f"{scheme}://127.0.0.1:{port}{path}?timeout=2s", breaker=Breaker(cooldown_s=0.05))
    assert client.find(keys) == [None]
    assert not client.put(keys, HERE, 1)
    with getattr(start, scheme)(tmp_path, port=port):
        until_s = time.monotonic() + 10
        while not client.put(keys, HERE, 1):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        assert places(client.find(keys)) == [("here", "dram", 1)]
    assert client.find(keys) == [None], "and it may go again"
    client.close()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("sqlit:/x", "did you mean 'sqlite'"),
        ("sqlite", "has no known scheme"),
        ("sqlite:", "names no file"),
        ("sqlite:/x?tiemout=1s", "did you mean 'timeout'"),
        ("sqlite:/x?timeout=0s", "above zero"),
        ("sqlite:/x?ttl=1s&ttl=2s", "twice"),
        ("etcd://", "names no host"),
        ("etcd://host:notaport", "spelled like"),
        ("redis://127.0.0.1/zero", "database number"),
    ],
)
def test_a_wrong_spelling_is_refused_with_what_to_write(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_metadata(spec)


@pytest.mark.parametrize(("scheme", "module", "extra"), [("redis", "redis", "redis"), ("etcd", "etcd3gw", "etcd")])
def test_a_missing_client_names_the_extra(
    scheme: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KvbenchError, match=rf"pip install 'kvbench\[{extra}\]'"):
        open_metadata(f"{scheme}://127.0.0.1:1")
