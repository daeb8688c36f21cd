"""When a store may be acknowledged: never synced, synced by every call, or one sync shared by all who wait for it."""

import os
import threading
from typing import Protocol

from kvbench.tiers.spec import Fsync


class Sync(Protocol):
    """Makes durable what has been written so far."""

    durable: bool

    def wait(self, descriptor: int) -> None:
        """Returns when everything that this thread has written is durable; OSError where the disk refuses."""
        ...


class NoSync:
    """The system writes when it likes."""

    durable = False

    def wait(self, descriptor: int) -> None:
        """Nothing to wait for."""


class EachSync:
    """Every call syncs by itself."""

    durable = True

    def __init__(self, kind: Fsync) -> None:
        self._sync = os.fsync if kind == "fsync" else os.fdatasync

    def wait(self, descriptor: int) -> None:
        """One sync."""
        self._sync(descriptor)


class GroupSync:
    """Whoever waits while a sync runs shares the next one: it begins after all of their writes."""

    durable = True

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = self._ended = 0
        self._running = False
        self._refused: dict[int, OSError] = {}

    def wait(self, descriptor: int) -> None:
        """Leads a round, or waits for one that began after this call. A round ends with its system call."""
        with self._changed:
            mine = self._begun + 1  # a round that runs now may have begun before our last write
            while self._running and self._ended < mine:
                self._changed.wait()
            if self._ended >= mine:
                if mine in self._refused:
                    raise self._refused[mine]
                return
            self._running, self._begun = True, mine
        refused = None
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            refused = error
        with self._changed:
            self._running, self._ended = False, mine
            self._refused = {mine: refused} if refused is not None else {}
            self._changed.notify_all()
        if refused is not None:
            raise refused


def sync_of(kind: Fsync) -> Sync:
    """How the spelling `fsync=…` syncs."""
    if kind == "none":
        return NoSync()
    return GroupSync() if kind == "group" else EachSync(kind)
