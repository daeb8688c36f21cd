"""How each tier of a tiered store behaves, and what a caller may say about a request."""

from dataclasses import dataclass
from typing import Literal

from kvbench.core.errors import UsageError
from kvbench.core.eviction import Eviction
from kvbench.tiers.base import Tier

WritePolicy = Literal["write-through", "write-through-selective", "write-back"]
WhenFull = Literal["block", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """One tier of the store and its rules.

    `capacity_bytes=None` takes the tier's own, or none. `write` says when a block comes into this tier from above:
    at once, at its `threshold`-th access, or when the tier above evicts it. Above `high_watermark` (a share of the
    capacity) eviction candidates down to `low_watermark` begin to cool; they leave after `cooldown_s` unless they are
    accessed. A write that needs the space at once evicts without waiting. `load_timeout_s=None` waits for the tier.
    `promote`: a block found in a lower tier is written here too. `recover`: blocks the tier holds at start are ready.
    `verify`: the store checks the CRC32C of every block it loads from here, for a tier that does not.
    """

    tier: Tier
    capacity_bytes: int | None = None
    write: WritePolicy = "write-through"
    threshold: int = 2
    eviction: Eviction = "lru"
    high_watermark: float = 0.95
    low_watermark: float = 0.85
    cooldown_s: float = 0.0
    load_timeout_s: float | None = None
    ttl_s: float | None = None
    promote: bool = True
    read_only: bool = False
    recover: bool = True
    verify: bool = False
    enabled: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise UsageError(
                f"tier {self.tier.name!r}: watermarks are 0 < low ≤ high ≤ 1, got low {self.low_watermark:g}, "
                f"high {self.high_watermark:g}"
            )
        if self.threshold < 1:
            raise UsageError(f"tier {self.tier.name!r}: the threshold is at least 1 access, got {self.threshold}")
        for what, seconds in (("load timeout", self.load_timeout_s), ("TTL", self.ttl_s)):
            if seconds is not None and seconds <= 0:
                raise UsageError(f"tier {self.tier.name!r}: the {what} is more than 0 s, got {seconds:g}; leave it out")


@dataclass(frozen=True, slots=True)
class Request:
    """On whose behalf blocks move, for spans; an access counts once per request that has an id.

    `token_range` and `layers` are (first, end) of all blocks of the call.
    """

    id: str = ""
    token_range: tuple[int, int] | None = None
    layers: tuple[int, int] | None = None


NO_REQUEST = Request()
