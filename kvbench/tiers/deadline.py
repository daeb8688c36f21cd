"""Whether a caller still waits for a call: after it has given up, nothing is written to its memory."""

import threading
from collections.abc import Callable


class Deadline:
    """What a caller without a time limit allows: everything."""

    def deliver(self, copy: Callable[[], None]) -> bool:
        """Runs a copy into the caller's buffer, unless the caller has given up."""
        copy()
        return True

    def still_wanted(self) -> bool:
        """Whether the caller still waits."""
        return True


class LimitedDeadline(Deadline):
    """A caller that may give up; afterwards nothing is copied to it and nothing stored for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False

    def deliver(self, copy: Callable[[], None]) -> bool:
        """Runs the copy, which `give_up` waits for, or refuses it."""
        with self._lock:
            if not self._given_up:
                copy()
            return not self._given_up

    def still_wanted(self) -> bool:
        """Until `give_up`."""
        with self._lock:
            return not self._given_up

    def give_up(self) -> None:
        """From here on nothing is delivered."""
        with self._lock:
            self._given_up = True
