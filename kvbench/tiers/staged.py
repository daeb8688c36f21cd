"""A tier whose client blocks and moves memory by address: one client at a time, in a thread and memory of its own."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar, cast

from kvbench.core.block_key import BlockKey
from kvbench.tiers.base import Block, Entry, Outcome, TierStats, Wanted
from kvbench.tiers.blocking_calls import BlockingCalls
from kvbench.tiers.breaker import Breaker
from kvbench.tiers.remote_ledger import Ledger
from kvbench.tiers.repeated import evict_once, store_once
from kvbench.tiers.staging import Staging

_T = TypeVar("_T")
_PATIENCE = 1.2


class UnavailableError(Exception):
    """There is no store to talk to; the client is dropped, and another is set up after a while."""


class Call(Protocol):
    """Runs one call in the client's thread; TimeoutError when it takes too long."""

    def __call__(self, call: Callable[[], _T]) -> _T: ...


class StagedClient(Protocol):
    """A client of one store and the memory that it has registered. `set_up` and `close` run in the client's thread, the
    others in the caller's; these hand every call that may block to `call`. A batch has at most as many as slots.
    """

    def set_up(self, staging: Staging, timeout_s: float) -> None: ...

    def store(self, blocks: Sequence[Block], call: Call) -> list[Outcome]: ...

    def load(self, wanted: Sequence[Wanted], call: Call) -> list[Outcome]: ...

    def contains(self, keys: Sequence[BlockKey], call: Call) -> list[Outcome]: ...

    def evict(self, keys: Sequence[BlockKey], call: Call) -> list[Outcome]: ...

    def entries(self, call: Call) -> list[tuple[BlockKey, int]] | None:
        """Every block of the store with its size; None where the store cannot be listed."""
        ...

    def close(self) -> None: ...


class _Session:
    """A client, its memory, and its thread, which begins in the network namespace of whoever makes the session."""

    def __init__(self, client: StagedClient, staging: Staging, name: str) -> None:
        self.client, self.staging = client, staging
        self.calls = BlockingCalls(f"tier-{name}")


class StagedTier:
    """A `Tier` over such clients. Blocks go through registered memory, as many at a time as it has slots.

    A call that does not end within `timeout_s` loses its client, thread and memory with it: what it still writes goes
    there. The next call sets up a new client, and while that fails the store is asked again after 0.1 s to 2 s.
    """

    def __init__(
        self,
        new_client: Callable[[], StagedClient],
        *,
        name: str,
        description: str,
        block_bytes: int,
        buffer_bytes: int,
        capacity_bytes: int | None,
        timeout_s: float,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.description, self.block_bytes = name, description, block_bytes
        self._new_client, self._buffer_bytes = new_client, buffer_bytes
        self._timeout_s, self._deadline_s = timeout_s, deadline_s
        self._ledger = Ledger(capacity_bytes)
        self._breaker = Breaker(failures=1, cooldown_s=0.1, max_cooldown_s=2.0, clock=clock)
        self._opening = threading.Lock()
        self._closed = False
        self._next: _Session | None = self._new_session()
        self._session: _Session | None = None

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        """Copies into registered memory, then out of it to the store."""
        refusals, taken, room = self._ledger.admit(blocks, self.block_bytes, self.description)
        done = store_once(
            taken,
            lambda once: self._batches(once, lambda session, part: session.client.store(part, self._call_of(session))),
        )
        self._ledger.stored(zip(taken, done, strict=True), room)
        rest = iter(done)
        return [next(rest) if refusal is None else refusal for refusal in refusals]

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        """Reads into registered memory, checks, then copies to the callers' buffers."""
        outcomes = self._batches(wanted, lambda session, part: session.client.load(part, self._call_of(session)))
        self._ledger.loaded(zip(wanted, outcomes, strict=True))
        return outcomes

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Asks the store."""
        outcomes = self._batches(keys, lambda session, part: session.client.contains(part, self._call_of(session)))
        self._ledger.asked(outcomes)
        return [outcome.result == "ok" for outcome in outcomes]

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Removes from the store."""
        outcomes = evict_once(
            keys,
            lambda once: self._batches(once, lambda session, part: session.client.evict(part, self._call_of(session))),
        )
        self._ledger.evicted(zip(keys, outcomes, strict=True))
        return [outcome.result == "ok" for outcome in outcomes]

    def entries(self) -> Iterator[Entry]:
        """What the store lists; where it lists nothing, what this client stored or met and what is still there."""
        listed: list[tuple[BlockKey, int]] | None = None

        def work(session: _Session, part: Sequence[None]) -> list[Outcome]:
            nonlocal listed
            listed = session.client.entries(self._call_of(session))
            return [Outcome("ok")]

        outcomes = self._batches([None], work)
        self._ledger.asked(outcomes)
        if outcomes[0].result != "ok":
            return iter(())
        if listed is None:
            known = self._ledger.known()
            there = self.contains([key for key, _ in known])
            listed = [one for one, held in zip(known, there, strict=True) if held]
        self._ledger.listed(listed)
        return iter([Entry(key, num_bytes) for key, num_bytes in listed])

    def stats(self) -> TierStats:
        """Counters of this client; fill is what it stored or met."""
        return self._ledger.stats()

    def close(self) -> None:
        """Ends the client."""
        with self._opening:
            self._closed = True
            for session in (self._session, self._next):
                if session is not None:
                    session.calls.close(session.client.close, self._timeout_s)
            self._session = self._next = None

    def _batches(self, items: Sequence[_T], work: Callable[[_Session, Sequence[_T]], list[Outcome]]) -> list[Outcome]:
        """Outcomes of all items, as many at a time as there are slots, at the latest after the deadline."""
        until_s = time.monotonic() + self._deadline_s
        outcomes: list[Outcome] = []
        while len(outcomes) < len(items):
            left = items[len(outcomes) :]
            session = None
            try:
                session = self._connected(until_s)
                with session.staging.taken(until_s - time.monotonic()) as taken:
                    if not taken:
                        raise TimeoutError("an earlier batch has not ended")
                    outcomes += work(session, left[: session.staging.num_slots])
            except UnavailableError as error:
                self._drop(session)
                return outcomes + [Outcome("failed", f"{self.description}: {error}")] * len(left)
            except TimeoutError as error:
                reason = str(error) or f"no answer within {self._timeout_s:g} s"
                return outcomes + [Outcome("timeout", f"{self.description}: {reason}")] * len(left)
        return outcomes

    def _call_of(self, session: _Session) -> Call:
        def call(one: Callable[[], _T]) -> _T:
            try:
                # A little longer than what the client allows itself, so that its own reason comes first.
                return session.calls.run(one, _PATIENCE * self._timeout_s)
            except TimeoutError:
                self._drop(session)
                raise

        return cast("Call", call)

    def _drop(self, session: _Session | None) -> None:
        """Leaves a client to itself; it is closed when its call ends, if it ever does."""
        if session is None:
            return
        with self._opening:
            if self._session is not session:
                return
            self._session = None
        self._breaker.failed()
        session.calls.close(session.client.close, 0.0)

    def _connected(self, until_s: float) -> _Session:
        if not self._opening.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise TimeoutError("another thread is still connecting")
        try:
            if self._closed:
                raise UnavailableError("the tier is closed")
            if self._session is not None:
                return self._session
            if not self._breaker.allows():
                raise UnavailableError(f"it does not answer; it is asked again in {self._breaker.retry_in_s:.1f} s")
            session, self._next = self._next or self._new_session(), None
            try:
                session.calls.run(lambda: session.client.set_up(session.staging, self._timeout_s), self._deadline_s)
            except UnavailableError:
                self._breaker.failed()
                self._next = session
                raise
            except BaseException:
                self._breaker.failed()
                session.calls.close(session.client.close, 0.0)
                raise
            self._breaker.succeeded()
            self._session = session
            return session
        finally:
            self._opening.release()

    def _new_session(self) -> _Session:
        staging = Staging(self._buffer_bytes, self.block_bytes, self.description)
        return _Session(self._new_client(), staging, self.name)
