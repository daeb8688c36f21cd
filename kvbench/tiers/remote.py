"""A tier in a store that is spoken to over a network, whatever it speaks: deadlines, back-off, envelopes, counters."""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from kvbench.core.block_key import BlockKey, parse_block_key
from kvbench.core.errors import KvbenchError
from kvbench.tiers.base import EXISTS, MISS, OK, Block, Entry, Outcome, TierStats, Wanted
from kvbench.tiers.breaker import Breaker
from kvbench.tiers.checksum import crc32c_of
from kvbench.tiers.copying import copy_bytes
from kvbench.tiers.counters import wrong_buffer
from kvbench.tiers.deadline import LimitedDeadline
from kvbench.tiers.envelope import (
    HEADER_BYTES,
    damage,
    header_damage,
    header_of,
    stored_bytes,
    stored_crc32c,
)
from kvbench.tiers.remote_ledger import Ledger
from kvbench.tiers.repeated import evict_once, store_once

# A listing goes page by page, each within a call's time, and may be long.
_LISTING_DEADLINES = 20
# How much longer than its own deadline a batch is waited for: the loop's thread has to get a turn.
_GRACE_S = 5.0
_OPEN_S = 30.0
_LOOK_S = 1.0
_ITEM = TypeVar("_ITEM")


class StoreError(KvbenchError):
    """The store did not do it."""


class StoreFullError(StoreError):
    """The store has no room."""


class StoreUnreachableError(StoreError):
    """Nobody takes the connection."""


class StoreInterruptedError(StoreError):
    """The connection broke in the middle; asking again does no harm."""


class StoreClient(Protocol):
    """Named values in one store. Methods raise `StoreError` and its children, and may be cancelled at any await."""

    async def put(self, name: str, *parts: bytes | memoryview) -> None:
        """Stores the parts as one value."""
        ...

    async def get(self, name: str) -> bytes | None:
        """The value; None where there is none."""
        ...

    async def head(self, name: str, num_bytes: int) -> tuple[bytes, int] | None:
        """The first `num_bytes` of the value and its whole length; None where there is none."""
        ...

    async def delete(self, names: Sequence[str]) -> list[bool]:
        """Removes values; True where one was there."""
        ...

    def names(self) -> AsyncIterator[tuple[str, int]]:
        """Name and length of every value."""
        ...

    async def check(self) -> None:
        """Raises `StoreError` or TimeoutError unless the store can be used."""
        ...

    async def close(self) -> None:
        """Ends the connections."""
        ...


class RemoteTier:
    """A `Tier` over a `StoreClient`, whose connections live in the event loop of one thread.

    `timeout_s` bounds a call and `deadline_s` a batch. After three calls in a row without an answer the store is left
    alone for a moment, longer each time; the first call that gets through ends that.
    """

    def __init__(
        self,
        name: str,
        place: str,
        block_bytes: int,
        open_client: Callable[[], Coroutine[Any, Any, StoreClient]],
        *,
        timeout_s: float,
        deadline_s: float,
        concurrency: int,
        capacity_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.description, self.block_bytes = name, place, block_bytes
        self._place, self._block_bytes, self._open_client = place, block_bytes, open_client
        self._timeout_s, self._deadline_s, self._concurrency = timeout_s, deadline_s, concurrency
        self._ledger = Ledger(capacity_bytes)
        self._breaker = Breaker(failures=3, cooldown_s=0.1, max_cooldown_s=2.0, clock=clock)
        self._client: StoreClient | None = None
        self._opening = asyncio.Lock()
        self._closed, self._closing = False, threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"tier-{name}", daemon=True)
        self._thread.start()
        # Connects to nothing, but reads a client's models and takes a while, which no call should have to pay for.
        with contextlib.suppress(TimeoutError, StoreError):
            asyncio.run_coroutine_threadsafe(self._connected(), self._loop).result(_OPEN_S)

    def store(self, blocks: Sequence[Block]) -> list[Outcome]:
        refusals, taken, room = self._ledger.admit(blocks, self._block_bytes, self._place)

        async def one(block: Block) -> Outcome:
            crc32c = crc32c_of(block.data) if block.crc32c is None else block.crc32c
            client, num_bytes = await self._connected(), block.data.nbytes
            held = await client.head(str(block.key), HEADER_BYTES)
            if held is not None and _is_that(held, block.key, num_bytes, crc32c):
                return EXISTS
            await client.put(str(block.key), header_of(block.key, num_bytes, crc32c), block.data)
            return OK

        done = store_once(taken, lambda once: self._batch(once, one))
        self._ledger.stored(zip(taken, done, strict=True), room)
        rest = iter(done)
        return [next(rest) if refusal is None else refusal for refusal in refusals]

    def load(self, wanted: Sequence[Wanted]) -> list[Outcome]:
        caller = LimitedDeadline()

        async def one(item: Wanted) -> Outcome:
            client = await self._connected()
            stored = await client.get(str(item.key))
            if stored is None:
                return MISS
            if reason := damage(stored, item.key):
                await client.delete([str(item.key)])
                return Outcome("corrupt", f"{self._place}: {reason}")
            if refusal := wrong_buffer(item.into, stored_bytes(stored)):
                return refusal
            if not caller.deliver(lambda: copy_bytes(item.into, memoryview(stored)[HEADER_BYTES:])):
                return Outcome("timeout", f"{self._place}: it came too late")
            return OK

        outcomes = self._batch(wanted, one)
        caller.give_up()  # a loop that was stuck may get to a block only now
        self._ledger.loaded(zip(wanted, outcomes, strict=True))
        return outcomes

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        async def one(key: BlockKey) -> Outcome:
            held = await (await self._connected()).head(str(key), HEADER_BYTES)
            if held is None or header_damage(held[0], key) or held[1] != HEADER_BYTES + stored_bytes(held[0]):
                return MISS
            return OK

        outcomes = self._batch(keys, one)
        self._ledger.asked(outcomes)
        return [outcome.result == "ok" for outcome in outcomes]

    def evict(self, keys: Sequence[BlockKey]) -> list[bool]:
        async def one(key: BlockKey) -> Outcome:
            (was_there,) = await (await self._connected()).delete([str(key)])
            return OK if was_there else MISS

        outcomes = evict_once(keys, lambda once: self._batch(once, one))
        self._ledger.evicted(zip(keys, outcomes, strict=True))
        return [outcome.result == "ok" for outcome in outcomes]

    def entries(self) -> Iterator[Entry]:
        """What the store lists now; nothing where it does not answer, which is counted."""

        async def one(found: list[tuple[BlockKey, int]]) -> Outcome:
            client = await self._connected()
            async for name, num_bytes in client.names():
                try:
                    key = parse_block_key(name)
                except ValueError:
                    continue  # another's object
                if num_bytes >= HEADER_BYTES:
                    found.append((key, num_bytes - HEADER_BYTES))
            return OK

        found: list[tuple[BlockKey, int]] = []
        (outcome,) = self._batch([found], one, times=_LISTING_DEADLINES)
        self._ledger.asked([outcome])
        if outcome.result != "ok":
            return iter(())
        self._ledger.listed(found)
        return iter([Entry(key, num_bytes) for key, num_bytes in found])

    def stats(self) -> TierStats:
        return self._ledger.stats()

    def close(self) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        try:
            ending.result(self._timeout_s + _GRACE_S)
        except TimeoutError:
            return  # the loop is stuck; its thread is a daemon
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1)
        if self._client is not None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._client.close()
            except (TimeoutError, StoreError):
                pass

    async def _connected(self) -> StoreClient:
        async with self._opening:
            if self._client is None:
                self._client = await self._open_client()
            return self._client

    def _batch(
        self, items: Sequence[_ITEM], one: Callable[[_ITEM], Coroutine[Any, Any, Outcome]], *, times: int = 1
    ) -> list[Outcome]:
        """An outcome for each item, at the latest after the deadline of the batch, `times` over."""
        if not items:
            return []
        closed = Outcome("failed", f"{self._place} is closed")
        if self._closed:
            return [closed] * len(items)
        outcomes: list[Outcome | None] = [None] * len(items)
        work = self._all(items, one, outcomes, times)
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop was closed meanwhile
            work.close()
            return [closed] * len(items)
        try:
            self._result_of(future, self._deadline_s * times + _GRACE_S)
        except TimeoutError:
            future.cancel()
        except concurrent.futures.CancelledError:
            return [closed if outcome is None else outcome for outcome in outcomes]
        late = Outcome("timeout", f"{self._place}: the batch took longer than {self._deadline_s * times:g} s")
        return [late if outcome is None else outcome for outcome in outcomes]

    def _result_of(self, future: "concurrent.futures.Future[None]", timeout_s: float) -> None:
        """Waits; at most a moment once the tier is closed, whose loop may have stopped before it saw the call."""
        until_s = time.monotonic() + timeout_s
        while (left_s := until_s - time.monotonic()) > 0:
            done, _ = concurrent.futures.wait([future], timeout=min(left_s, _LOOK_S))
            if done or (self._closed and not self._thread.is_alive()):
                break
        future.result(0)

    async def _all(
        self,
        items: Sequence[_ITEM],
        one: Callable[[_ITEM], Coroutine[Any, Any, Outcome]],
        outcomes: list[Outcome | None],
        times: int,
    ) -> None:
        waiting = iter(enumerate(items))

        async def take(most: int) -> None:
            for index, item in waiting:
                outcomes[index] = await self._tried(one, item, self._timeout_s * times)
                most -= 1
                if most == 0:
                    return

        until_s = self._loop.time() + self._deadline_s * times
        tasks: set[asyncio.Task[None]] = set()
        try:
            if self._breaker.state != "closed":  # one call tries; if it gets through, the others follow
                tasks = {asyncio.create_task(take(1))}
                await asyncio.wait(tasks, timeout=until_s - self._loop.time())
            tasks |= {asyncio.create_task(take(0)) for _ in range(min(self._concurrency, len(items)))}
            await asyncio.wait(tasks, timeout=max(0.0, until_s - self._loop.time()))
        finally:
            for task in tasks:
                task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):  # not an outcome but a bug
                raise ended

    async def _tried(
        self, one: Callable[[_ITEM], Coroutine[Any, Any, Outcome]], item: _ITEM, timeout_s: float
    ) -> Outcome:
        for last in (False, True):
            if not self._breaker.allows():
                wait_s = self._breaker.retry_in_s
                return Outcome("failed", f"{self._place} does not answer; it is asked again in {wait_s:.1f} s")
            try:
                async with asyncio.timeout(timeout_s):
                    outcome = await one(item)
            except TimeoutError:
                self._breaker.failed()
                return Outcome("timeout", f"{self._place} did not answer within {timeout_s:g} s")
            except StoreUnreachableError as error:
                self._breaker.failed()
                return Outcome("failed", str(error))
            except StoreError as error:
                self._breaker.succeeded()  # it is there, and says no
                if isinstance(error, StoreInterruptedError) and not last:
                    continue
                return Outcome("full" if isinstance(error, StoreFullError) else "failed", str(error))
            except BaseException:  # cancelled by the deadline, or a bug: either way the breaker's try has ended
                self._breaker.failed()
                raise
            self._breaker.succeeded()
            return outcome
        raise AssertionError("a second interruption is a failure")


def _is_that(held: tuple[bytes, int], key: BlockKey, num_bytes: int, crc32c: int) -> bool:
    """Whether what the store holds is, by its header and length, this very block."""
    header, total = held
    return total == HEADER_BYTES + num_bytes and not header_damage(header, key) and stored_crc32c(header) == crc32c
