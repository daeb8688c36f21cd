"""How an experiment is run: pairs, limits, what counts as good, and how a cold cache is made."""

from dataclasses import dataclass, field
from typing import Literal

from kvbench.core.errors import UsageError
from kvbench.core.paired import MARGIN_RATIO
from kvbench.core.units import parse_duration
from kvbench.replay.load.plan import Limits
from kvbench.results.replay import Slo

CacheMode = Literal["cold", "salt", "warm", "as-is"]
ServerMode = Literal["keep", "one-at-a-time", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """`cache`: cold resets and verifies before each run; salt gives each run a `cache_salt` of its own; warm sends
    every prompt once, unmeasured; as-is does nothing. `servers`: keep all arms up, or only the one that runs; switch
    starts the arm with the most tiers and turns those of the others off while it runs, where the engine can.
    """

    pairs: int = 5
    cache: CacheMode = "cold"
    servers: ServerMode = "keep"
    slo: Slo | None = None
    margin_ratio: float = MARGIN_RATIO
    limits: Limits = field(default_factory=Limits)
    workers: int = 1
    scrape_every_s: float = 1.0
    warm_up_requests: int = 2
    max_run_s: float | None = None
    seed: int = 1


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,tpot=50ms,e2e=5s`, each at most once."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in ("ttft", "tpot", "e2e") or not equals:
            raise UsageError(f"SLO {part.strip()!r} is not one of ttft, tpot, e2e; write it like ttft=500ms,tpot=50ms")
        if name in bounds:
            raise UsageError(f"SLO {text!r} bounds {name} twice; write it like ttft=500ms,tpot=50ms")
        bounds[name] = parse_duration(value)
    return Slo(ttft_s=bounds.get("ttft"), tpot_s=bounds.get("tpot"), e2e_s=bounds.get("e2e"))
