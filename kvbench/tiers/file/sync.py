"""When a store may be acknowledged: never synced, synced by every call, or one sync shared by all who wait for it."""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvbench.tiers.spec import Fsync


class Sync(Protocol):
    """Makes durable what has been written so far.

    The system reports a page that it could not write to one sync and forgets it, so the next one succeeds although the
    page is lost. Therefore a sync that failed anywhere between `mark`, taken before the first write, and the end of
    `wait` is a failure of that `wait` too.
    """

    durable: bool

    def mark(self) -> int:
        """What `wait` is to be told: which failures lie before the caller's writes."""
        ...

    def wait(self, descriptors: Sequence[int], since: int) -> None:
        """Returns when all that was written to these files since `mark` is durable; OSError where the disk refuses."""
        ...


class NoSync:
    """The system writes when it likes."""

    durable = False

    def mark(self) -> int:
        """Nothing to remember."""
        return 0

    def wait(self, descriptors: Sequence[int], since: int) -> None:
        """Nothing to wait for."""


class _Failures:
    """How many syncs have failed, and the last reason."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._failures = 0
        self._last = OSError()

    def mark(self) -> int:
        """How many there are so far."""
        with self._changed:
            return self._failures

    def _note(self, error: OSError) -> None:
        self._failures += 1
        self._last = error

    def _raise_since(self, since: int) -> None:
        if self._failures != since:
            raise OSError(self._last.errno, self._last.strerror)


class EachSync(_Failures):
    """Every call syncs by itself."""

    durable = True

    def __init__(self, kind: Fsync) -> None:
        super().__init__()
        self._kind = kind

    def wait(self, descriptors: Sequence[int], since: int) -> None:
        """One sync of every file."""
        try:
            _sync_all(descriptors, os.fsync if self._kind == "fsync" else os.fdatasync)
        except OSError as error:
            with self._changed:
                self._note(error)
        with self._changed:
            self._raise_since(since)


class GroupSync(_Failures):
    """Whoever waits while a sync runs shares the next one: it begins after all of their writes."""

    durable = True

    def __init__(self) -> None:
        super().__init__()
        self._begun = self._ended = 0
        self._running = False
        self._files: dict[tuple[int, ...], None] = {}  # of those who wait for the next round

    def wait(self, descriptors: Sequence[int], since: int) -> None:
        """Leads a round, or waits for one that began after this call. A round ends with its system call."""
        with self._changed:
            mine = self._begun + 1  # a round that runs now may have begun before our last write
            self._files[tuple(descriptors)] = None
            while self._running and self._ended < mine:
                self._changed.wait()
            if self._ended >= mine:
                self._raise_since(since)
                return
            self._running, self._begun = True, mine
            files, self._files = self._files, {}  # whoever leads, it is everybody's round
        refused: OSError | None = OSError(errno.EINTR, "the sync was interrupted")
        try:
            _sync_all(dict.fromkeys(itertools.chain(*sorted(files, key=len, reverse=True))), os.fdatasync)
        except OSError as error:
            refused = error
        else:
            refused = None
        finally:
            with self._changed:
                self._running, self._ended = False, mine
                if refused is not None:
                    self._note(refused)
                self._changed.notify_all()
        with self._changed:
            self._raise_since(since)


def _sync_all(descriptors: Iterable[int], sync: Callable[[int], None]) -> None:
    """In their order, also where one is refused: its pages are forgotten, and those of the others need not be."""
    refused = None
    for descriptor in descriptors:
        try:
            sync(descriptor)
        except OSError as error:
            refused = refused or error
    if refused is not None:
        raise refused


def sync_of(kind: Fsync) -> Sync:
    """How the spelling `fsync=…` syncs."""
    if kind == "none":
        return NoSync()
    return GroupSync() if kind == "group" else EachSync(kind)
