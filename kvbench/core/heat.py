"""How hot a prefix is: its share of the requests of a sliding window."""

from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPrefixes:
    """Blocks named in at least `share_ratio` of the requests of the last `window_s` are hot and belong into `tiers`.

    A hot block leaves these tiers only when nothing else can, and an access places it where it is missing. A prefix is
    as hot as its blocks: a block's hash names all tokens before it, so the head of a shared prefix collects the
    accesses of everything that begins with it. `min_requests` keeps the first few requests from being hot at once.
    """

    tiers: tuple[str, ...]
    share_ratio: float = 0.1
    window_s: float = 24 * 3600.0
    min_requests: int = 20


class SlidingShares(Generic[K]):
    """Counts of keys over a sliding window, from two fixed windows: the present count plus the part of the previous
    window that the sliding one still covers, as if its accesses had been spread evenly.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._window = 0
        self._counts: dict[K, int] = {}
        self._before: dict[K, int] = {}
        self._requests = 0
        self._requests_before = 0

    def add_request(self, now_s: float) -> None:
        """Counts a request."""
        self._turn(now_s)
        self._requests += 1

    def add(self, key: K, now_s: float) -> None:
        """Counts an access of `key` within a request."""
        self._turn(now_s)
        self._counts[key] = self._counts.get(key, 0) + 1

    def requests(self, now_s: float) -> float:
        """Requests in the window."""
        return self._requests + self._requests_before * self._covered(now_s)

    def share_ratio(self, key: K, now_s: float) -> float:
        """Accesses of `key` divided by requests, 0 when there was none."""
        covered = self._covered(now_s)
        requests = self._requests + self._requests_before * covered
        return (self._counts.get(key, 0) + self._before.get(key, 0) * covered) / requests if requests else 0.0

    def _covered(self, now_s: float) -> float:
        self._turn(now_s)
        return 1.0 - (now_s / self._window_s - self._window)

    def _turn(self, now_s: float) -> None:
        window = int(now_s // self._window_s)
        if window == self._window:
            return
        follows = window == self._window + 1
        self._before, self._requests_before = (self._counts, self._requests) if follows else ({}, 0)
        self._counts, self._requests, self._window = {}, 0, window
