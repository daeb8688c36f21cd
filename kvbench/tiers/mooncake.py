"""Tier `mooncake`: one object per block in a Mooncake store, through its own client, from and into registered memory."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvbench.core.block_key import BlockKey, parse_block_key
from kvbench.core.errors import MissingDependencyError, UsageError
from kvbench.core.units import MIB, parse_bytes
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Entry, Outcome, Result, TierStats, Wanted
from kvbench.tiers.blocking_calls import BlockingCalls
from kvbench.tiers.breaker import Breaker
from kvbench.tiers.envelope import HEADER_BYTES
from kvbench.tiers.remote_ledger import Ledger
from kvbench.tiers.remote_settings import remote_settings
from kvbench.tiers.spec import TierSpec
from kvbench.tiers.staging import Staging

_T = TypeVar("_T")
_BUFFER_BYTES = 64 * MIB
# What the client allocates for calls that copy; this tier makes none.
_LOCAL_BUFFER_BYTES = 16 * MIB
# Codes of the client. A lease that ends while its object is read makes the bytes untrustworthy, not the object bad.
_RESULTS: dict[int, Result] = {
    -200: "full",  # no segment has room
    -703: "miss",  # a put that has not ended
    -704: "miss",
    -707: "timeout",  # the lease ended before the read did
    -801: "corrupt",
    -901: "timeout",
}
_ABSENT = -704
_MEANINGS = {
    -200: "no segment has room",
    -600: "the arguments are refused, or the master is not there",
    -703: "the replica is not ready",
    -705: "the object exists already",
    -706: "the object is leased",
    -707: "the lease ended before the read",
    -800: "the transfer failed",
    -801: "the client's checksum differs",
    -900: "the master was not reached",
    -901: "the master did not answer",
}
_UNREACHABLE = frozenset({-900, -901})
_AGAIN = frozenset({-707, -800})
# setup() holds Python's lock for seconds when the master takes the connection and says nothing, so another process tries
# it first and is killed when that takes too long.
_TRIAL = (
    "import sys; from mooncake.store import MooncakeDistributedStore; store = MooncakeDistributedStore(); "
    "code = store.setup(sys.argv[1], 'P2PHANDSHAKE', 0, 1 << 24, sys.argv[2], sys.argv[3], sys.argv[4]); "
    "code or store.close(); sys.exit(code != 0)"
)


def open_mooncake(spec: TierSpec, *, block_bytes: int, name: str) -> "MooncakeTier":
    """The tier that `mooncake://MASTER:PORT` spells. The client is set up when it is first needed."""
    try:
        import mooncake.store
    except ImportError as error:
        raise MissingDependencyError("mooncake-transfer-engine-non-cuda", "mooncake", f"tier {spec}") from error
    del mooncake
    options, settings = dict(spec.options), remote_settings(spec)
    host, colon, port = spec.location.rpartition(":")
    if not colon or not port.isdecimal() or not host:
        raise UsageError(f"tier {spec}: the master is spelled HOST:PORT, like mooncake://127.0.0.1:50051")
    return MooncakeTier(
        Place(
            master=spec.location,
            protocol=options.get("protocol", "tcp"),
            devices=options.get("devices", ""),
            host=options.get("host"),
            segment_bytes=parse_bytes(options["segment"]) if "segment" in options else 0,
            replicas=int(options.get("replicas", 1)),
            metrics=options.get("metrics"),
        ),
        name=name,
        block_bytes=block_bytes,
        buffer_bytes=parse_bytes(options["buffer"]) if "buffer" in options else _BUFFER_BYTES,
        capacity_bytes=spec.size_bytes,
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which store, and what this client brings to it: `segment_bytes` of its own memory, by default none."""

    master: str
    protocol: str
    devices: str
    host: str | None
    segment_bytes: int
    replicas: int
    metrics: str | None


class _Session:
    """One client that is set up, its registered memory, and the thread that talks to it."""

    def __init__(self, buffer_bytes: int, block_bytes: int, place: Place) -> None:
        self.staging = Staging(buffer_bytes, block_bytes, f"mooncake://{place.master}")
        self.calls = BlockingCalls("tier-mooncake")
        self.client: Any = None
        self._place = place

    def set_up(self, timeout_s: float) -> None:
        """Raises `_UnavailableError` where the master is not there. Runs in the session's thread."""
        from mooncake.store import MooncakeDistributedStore

        place = self._place
        host, _, port = place.master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
                mine = place.host or connection.getsockname()[0]
        except OSError as error:
            raise _UnavailableError(f"the master cannot be reached ({error})") from error
        try:
            tried = subprocess.run(
                [sys.executable, "-c", _TRIAL, _own_address(mine), place.protocol, place.devices, place.master],
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _UnavailableError(f"the master did not answer within {timeout_s:g} s") from error
        if tried.returncode != 0:
            reason = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise _UnavailableError(f"the client cannot be set up ({reason})")
        client = MooncakeDistributedStore()
        code = client.setup(
            _own_address(mine), "P2PHANDSHAKE", place.segment_bytes, _LOCAL_BUFFER_BYTES, place.protocol,
            place.devices, place.master,
        )  # fmt: skip
        if code != 0:
            raise _UnavailableError(f"the client cannot be set up (code {code})")
        code = client.register_buffer(self.staging.address, self.staging.num_bytes)
        if code != 0:
            client.close()
            raise _UnavailableError(f"the client does not register memory (code {code})")
        self.client = client

    def close(self, timeout_s: float) -> None:
        def last() -> None:
            if self.client is not None:
                self.client.unregister_buffer(self.staging.address)
                self.client.close()

        self.calls.close(last, timeout_s)


class MooncakeTier:
    """A `Tier` over a Mooncake store. Blocks go through registered memory, a batch of its slots at a time.

    A call that does not end within `timeout_s` loses its client, thread and memory with it; the next one sets up anew.
    """

    def __init__(
        self,
        place: Place,
        *,
        name: str,
        block_bytes: int,
        buffer_bytes: int,
        capacity_bytes: int | None,
        timeout_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.description, self.block_bytes = name, f"mooncake://{place.master}", block_bytes
        self._place, self._buffer_bytes = place, buffer_bytes
        self._timeout_s, self._deadline_s = timeout_s, deadline_s
        self._ledger = Ledger(capacity_bytes)
        self._breaker = Breaker(failures=1, cooldown_s=0.1, max_cooldown_s=2.0, clock=clock)
        self._opening = threading.Lock()
        self._closed = False
        # Threads belong to the network namespace of the one that starts them, so the first is started here and now.
        self._next: _Session | None = _Session(buffer_bytes, block_bytes, place)
        self._session: _Session | None = None

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        refusals, taken = self._ledger.admit(blocks, self.block_bytes, self.description)
        done = self._batches(taken, self._store)
        self._ledger.stored(zip(taken, done, strict=True))
        rest = iter(done)
        return [next(rest) if refusal is None else refusal for refusal in refusals]

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        outcomes = self._batches(wanted, self._load)
        self._ledger.loaded(zip(wanted, outcomes, strict=True))
        return outcomes

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        outcomes = self._batches(keys, self._contains)
        self._ledger.asked(outcomes)
        return [outcome.result == "ok" for outcome in outcomes]

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        outcomes = self._batches(keys, self._evict)
        self._ledger.evicted(zip(keys, outcomes, strict=True))
        return [outcome.result == "ok" for outcome in outcomes]

    def entries(self) -> Iterator[Entry]:
        """What the master lists where `metrics=` names its HTTP port; else what this client stored and is still there."""
        if self._place.metrics is None:
            known = self._ledger.known()
            there = self.contains([key for key, _ in known])
            return iter([Entry(key, num_bytes) for (key, num_bytes), held in zip(known, there, strict=True) if held])
        keys = self._listed_keys(self._place.metrics)
        sizes = self._batches(keys, self._sizes)
        found = [
            (key, int(outcome.reason) - HEADER_BYTES)
            for key, outcome in zip(keys, sizes, strict=True)
            if outcome.result == "ok"
        ]
        self._ledger.listed(found)
        return iter([Entry(key, num_bytes) for key, num_bytes in found])

    def stats(self) -> TierStats:
        return self._ledger.stats()

    def replicas(self, key: BlockKey) -> int:
        """How many replicas the store has of a block; fewer than asked for where there are too few segments."""
        (outcome,) = self._batches([key], self._replicas)
        return int(outcome.reason) if outcome.result == "ok" else 0

    def close(self) -> None:
        with self._opening:
            self._closed = True
            for session in (self._session, self._next):
                if session is not None:
                    session.close(self._timeout_s)
            self._session = self._next = None

    def _store(self, session: _Session, blocks: Sequence[Block]) -> list[Outcome]:
        from mooncake.store import ReplicateConfig

        client, names = session.client, [str(block.key) for block in blocks]
        held = self._call(session, lambda: client.batch_is_exist(names))
        new = [index for index, one in enumerate(held) if one != 1]
        outcomes = [EXISTS if one == 1 else OK for one in held]
        if not new:
            return outcomes
        sizes = session.staging.put([blocks[index] for index in new])
        addresses = session.staging.addresses(len(new))
        config = ReplicateConfig()
        config.replica_num = self._place.replicas
        chosen = [names[index] for index in new]
        codes = self._call(session, lambda: client.batch_put_from(chosen, addresses, sizes, config))
        for index, code in zip(new, codes, strict=True):
            outcomes[index] = OK if code == 0 else self._refusal(code)
        return outcomes

    def _load(self, session: _Session, wanted: Sequence[Wanted]) -> list[Outcome]:
        client, staging = session.client, session.staging
        outcomes = [MISS] * len(wanted)
        left = list(range(len(wanted)))
        for again in (True, False):
            names = [str(wanted[index].key) for index in left]
            addresses, sizes = staging.addresses(len(left)), [staging.slot_bytes] * len(left)
            codes = self._call(session, _bound(client.batch_get_into, names, addresses, sizes))
            later = []
            for slot, (index, code) in enumerate(zip(left, codes, strict=True)):
                if code >= 0:
                    outcomes[index] = staging.take(slot, code, wanted[index], self.description)
                else:
                    outcomes[index] = self._refusal(code)
                    later += [index] if again and code in _AGAIN else []
            left = later
            if not left:
                break
        if damaged := [str(want.key) for want, one in zip(wanted, outcomes, strict=True) if one.result == "corrupt"]:
            self._call(session, lambda: client.batch_remove(damaged, True))
        return outcomes

    def _contains(self, session: _Session, keys: Sequence[BlockKey]) -> list[Outcome]:
        names = [str(key) for key in keys]
        codes = self._call(session, lambda: session.client.batch_is_exist(names))
        return [OK if code == 1 else MISS if code == 0 else self._refusal(code) for code in codes]

    def _evict(self, session: _Session, keys: Sequence[BlockKey]) -> list[Outcome]:
        # By force: without it an object that was read a moment ago is kept for its lease, and stays where it is.
        names = [str(key) for key in keys]
        codes = self._call(session, lambda: session.client.batch_remove(names, True))
        return [OK if code == 0 else self._refusal(code) for code in codes]

    def _sizes(self, session: _Session, keys: Sequence[BlockKey]) -> list[Outcome]:
        names = [str(key) for key in keys]
        sizes = self._call(session, lambda: [session.client.get_size(name) for name in names])
        return [Outcome("ok", str(size)) if size >= HEADER_BYTES else MISS for size in sizes]

    def _replicas(self, session: _Session, keys: Sequence[BlockKey]) -> list[Outcome]:
        names = [str(key) for key in keys]
        counts = self._call(session, lambda: [len(session.client.get_replica_desc(name)) for name in names])
        return [Outcome("ok", str(count)) for count in counts]

    def _refusal(self, code: int) -> Outcome:
        if code in _UNREACHABLE:
            self._breaker.failed()
        result = _RESULTS.get(code, "failed")
        if code == _ABSENT:
            return MISS
        return Outcome(result, f"{self.description}: {_MEANINGS.get(code, 'the client refuses')} (code {code})")

    def _batches(self, items: Sequence[_T], work: Callable[[_Session, Sequence[_T]], list[Outcome]]) -> list[Outcome]:
        """Outcomes of all items, as many at a time as there are slots, at the latest after the deadline."""
        until_s = time.monotonic() + self._deadline_s
        outcomes: list[Outcome] = []
        while len(outcomes) < len(items):
            part = items[len(outcomes) :]
            try:
                session = self._connected(until_s)
                part = part[: session.staging.num_slots]
                with session.staging.taken(until_s - time.monotonic()) as taken:
                    if not taken:
                        raise TimeoutError
                    outcomes += work(session, part)
            except _UnavailableError as error:
                return outcomes + [Outcome("failed", f"{self.description}: {error}")] * (len(items) - len(outcomes))
            except TimeoutError:
                late = Outcome("timeout", f"{self.description} did not answer within {self._timeout_s:g} s")
                return outcomes + [late] * (len(items) - len(outcomes))
        return outcomes

    def _call(self, session: _Session, call: Callable[[], _T]) -> _T:
        """What the client answers; one that is late is left behind, with its memory."""
        try:
            return session.calls.run(call, self._timeout_s)
        except TimeoutError:
            self._breaker.failed()
            with self._opening:
                if self._session is session:
                    self._session = None
            session.close(0.0)
            raise

    def _connected(self, until_s: float) -> _Session:
        if not self._opening.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise TimeoutError
        try:
            if self._closed:
                raise _UnavailableError("the tier is closed")
            if self._session is not None:
                return self._session
            if not self._breaker.allows():
                raise _UnavailableError(f"it does not answer; it is asked again in {self._breaker.retry_in_s:.1f} s")
            session = self._next or _Session(self._buffer_bytes, self.block_bytes, self._place)
            self._next = None
            try:
                # The master is asked three times over: by connecting, by a trial, by the set-up itself.
                session.calls.run(lambda: session.set_up(self._timeout_s), 3 * self._timeout_s)
            except TimeoutError:
                self._breaker.failed()
                session.close(0.0)
                raise
            except _UnavailableError:
                self._breaker.failed()
                self._next = session
                raise
            self._breaker.succeeded()
            self._session = session
            return session
        finally:
            self._opening.release()

    def _listed_keys(self, metrics: str) -> list[BlockKey]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{metrics.rstrip('/')}/get_all_keys", timeout=self._timeout_s) as answer:
                text = answer.read().decode(errors="replace")
        except (OSError, urllib.error.URLError) as error:
            self._ledger.asked([Outcome("failed", f"{metrics}: {error}")])
            return []
        keys = []
        for name in text.split():
            with contextlib.suppress(ValueError):
                keys.append(parse_block_key(name.strip('",[]')))
        return keys


class _UnavailableError(Exception):
    """There is no store to talk to."""


def _bound(call: Callable[..., _T], *arguments: object) -> Callable[[], _T]:
    return lambda: call(*arguments)


def _own_address(host: str) -> str:
    """An address of this client with a port that is free now. Without one the client tries twenty of its own, seconds each."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"
