"""Run calls that may block for ever in a thread of their own, and wait for them only so long."""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")


class BlockingCalls:
    """One daemon thread that takes calls in order. A call that outlives its caller's patience ends unseen.

    The thread starts here and now, so that it belongs to the network namespace of whoever makes this object. It is a
    daemon: a call into a dead server never keeps the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], _T]) -> "Future[_T]":
        """The future of `call`; cancelled if nobody wants it any more before its turn comes."""
        future: Future[_T] = Future()
        if self._closed:
            future.set_exception(TimeoutError("closed"))
        else:
            self._calls.put((future, call))
        return future

    def run(self, call: Callable[[], _T], timeout_s: float) -> _T:
        """What `call` returns or raises; TimeoutError after `timeout_s`, waiting for earlier calls included."""
        future = self.submit(call)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self, last: Callable[[], object] | None = None, timeout_s: float = 1.0) -> None:
        """Runs `last` after the calls under way, waits for it at most `timeout_s`, and takes no more calls."""
        if self._closed:
            return
        done: Future[Any] = Future()
        self._closed = True
        self._calls.put((done, last or (lambda: None)))
        self._calls.put(None)
        with contextlib.suppress(TimeoutError):
            done.exception(timeout_s)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, call
