"""The threads and the queue of one tier: they run what the schedule says comes next."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Generic, TypeVar

from kvbench.core.io_schedule import IoSchedule, StoreBatch
from kvbench.tiers.base import Outcome
from kvbench.tiers.tiered.index import Slot
from kvbench.tiers.tiered.results import StoreTicket
from kvbench.tiers.tiered.settings import Request
from kvbench.tiers.tiered.spans import SpanEvent

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class QueuedStore:
    """A block on its way into a tier, with bytes of its own."""

    slot: Slot
    data: memoryview
    crc32c: int
    request: Request
    from_tier: str
    event: SpanEvent
    ticket: StoreTicket | None = None


@dataclass(eq=False, slots=True)
class TimedLoad:
    """A load whose caller may give up. It fills `staging`, never the caller's memory; `outcomes` grows in order."""

    slots: list[Slot]
    staging: list[memoryview]
    outcomes: list[Outcome] = field(default_factory=list)
    done: bool = False
    abandoned: bool = False


class Lane:
    """One tier's queue and workers; `lock` is the store's and guards the schedule."""

    def __init__(
        self,
        name: str,
        lock: threading.Lock,
        schedule: IoSchedule[TimedLoad, QueuedStore],
        *,
        workers: int,
        clock: Callable[[], float],
        run_load: Callable[[TimedLoad], None],
        run_stores: Callable[[StoreBatch[QueuedStore]], None],
    ) -> None:
        self.schedule = schedule
        self._name = name
        self._changed = threading.Condition(lock)
        self._workers = workers
        self._threads = 0
        self._closed = False
        self._clock = clock
        self._run_load = run_load
        self._run_stores = run_stores

    def wake(self) -> None:
        """Under the lock: something changed; starts threads when there are too few for the work."""
        if self._threads < self._workers and not self._closed:
            self._threads += 1
            threading.Thread(target=self._work, name=f"kvbench tier {self._name}", daemon=True).start()
        self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Under the lock: whether nothing that is queued now will be run."""
        return self._closed

    def close(self) -> None:
        """Under the lock: threads end after what they are doing."""
        self._closed = True
        self._changed.notify_all()

    def step(self) -> bool:
        """Runs the next load or batch in the caller's thread; False when nothing may begin."""
        with self._changed:
            work = self._next()
        if work is None:
            return False
        self._run(work)
        return True

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    while (work := self._next()) is None and not self._closed:
                        # Stores held back by loads are looked at again when their patience may be over.
                        waiting = self.schedule.stores_waiting
                        self._changed.wait(self.schedule.patience_s / 4 if waiting else None)
                    if work is None:
                        return
                self._run(work)
        finally:
            with self._changed:
                self._threads -= 1
                if not self._closed and not self.schedule.empty:  # an exception ended this thread and not its work
                    self.wake()

    def _next(self) -> "TimedLoad | StoreBatch[QueuedStore] | None":
        return self.schedule.next_load() or self.schedule.next_stores(self._clock())

    def _run(self, work: "TimedLoad | StoreBatch[QueuedStore]") -> None:
        if isinstance(work, TimedLoad):
            self._run_load(work)
        else:
            self._run_stores(work)


class DaemonPool(Generic[T]):
    """A few threads that run calls; unlike the standard executor's they do not hold up the interpreter's end."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._limit = threads
        self._started = 0
        self._closed = False
        self._lock = threading.Lock()
        self._calls: SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = SimpleQueue()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queues a call; after `close` the caller's own thread runs it."""
        future: Future[T] = Future()
        with self._lock:
            closed = self._closed
            if not closed:
                self._calls.put((future, call))
                if self._started < self._limit:
                    self._started += 1
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
        if closed:
            self._run(future, call)
        return future

    def close(self) -> None:
        """Threads end after the calls that are queued."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in range(self._started):
                    self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            self._run(*item)

    @staticmethod
    def _run(future: "Future[T]", call: Callable[[], T]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
