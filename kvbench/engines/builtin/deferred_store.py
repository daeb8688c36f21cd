"""A tiered store whose nearest tier may be slow: its writes happen on a thread, so that computing goes on."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvbench.core.block_key import BlockKey
from kvbench.core.units import MIB
from kvbench.tiers.tiered import LoadResult, Lookup, Request, TieredStore


class DeferredStore:
    """Looks up and loads as the store does; stores wait their turn, and are dropped where too many bytes wait."""

    def __init__(self, store: TieredStore, *, queue_bytes: int = 256 * MIB) -> None:
        self.dropped_blocks = 0
        self._store = store
        self._queue_bytes = queue_bytes
        self._waiting_bytes = 0  # those being written included
        self._waiting: deque[tuple[int, Callable[[], object]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._write, name="kvbench-stores", daemon=True).start()

    @property
    def tiers(self) -> tuple[str, ...]:
        return self._store.tiers

    def lookup(self, keys: Sequence[BlockKey]) -> Lookup:
        """Where each block is ready."""
        return self._store.lookup(keys)

    def load(self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, request: Request) -> LoadResult:
        """Fills the buffers."""
        return self._store.load(keys, into, request=request)

    def load_async(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, request: Request
    ) -> "Future[LoadResult]":
        """Fills the buffers on a thread."""
        return self._store.load_async(keys, into, request=request)

    def store(self, keys: Sequence[BlockKey], data: Sequence[memoryview], *, request: Request) -> None:
        """Puts blocks into the queue; the caller leaves their memory alone."""
        num_bytes = sum(map(len, data))
        with self._changed:
            if self._closed or self._waiting_bytes + num_bytes > self._queue_bytes:
                self.dropped_blocks += len(keys)
                return
            self._waiting_bytes += num_bytes
            self._waiting.append((num_bytes, lambda: self._store.store(keys, data, request=request)))
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is in the queue; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_bytes, timeout_s)

    def close(self) -> None:
        """Forgets what is in the queue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                num_bytes, write = self._waiting.popleft()
            try:
                write()
            finally:
                with self._changed:
                    self._waiting_bytes -= num_bytes
                    self._changed.notify_all()
