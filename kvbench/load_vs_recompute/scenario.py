"""What is asked: models, prefix lengths, layouts, tiers, limits, and how efficient the machine is taken to be."""

import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvbench.catalogue.models import CatalogueEntry
from kvbench.core.errors import UsageError
from kvbench.core.gpu import Gpu
from kvbench.core.kv_format import KvFormat
from kvbench.core.layout import Parallelism
from kvbench.core.provenance import Origin
from kvbench.core.units import parse_bandwidth, parse_duration
from kvbench.results.host_paths import Limit, LimitName, MeasuredPath
from kvbench.results.prefill import PrefillMeasurement

FlopsMode = Literal["exact", "active-params"]
RankWork = Literal["exact", "even"]

# Tiers whose medium is one per host, so that ranks loading at once divide it; DRAM rates are per rank (the PCIe path).
LOCAL_STORAGE = ("file", "nvme", "ssd", "disk")
SHARED_TIERS = ("file", "nvme", "ssd", "disk", "remote", "s3", "redis", "mooncake", "nfs")

_LIMIT_NAMES: tuple[LimitName, ...] = get_args(LimitName)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRate:
    """A tier as the model sees it: bandwidth to GPU memory, fixed time per load, and whether ranks share it.

    A measured one also says how many loads were in flight and what memory they went to.
    """

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = False
    origin: Origin
    measured_concurrency: int | None = None
    destination: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One call of `load-vs-recompute`. Lists sweep: every model × layout × KV format × tier × suffix × prefix length.

    `efficiency` is "auto" (priors per kernel kind) or an MFU. `loads_per_s` is the arrival rate of loads on one rank's
    path, for the queue. `prefill` replaces the compute model by a measurement on this host.
    """

    entries: tuple[CatalogueEntry, ...]
    tokens: tuple[int, ...]
    suffixes: tuple[int, ...] = (0,)
    layouts: tuple[Parallelism, ...] = (Parallelism(),)
    kv_formats: tuple[KvFormat, ...] = (KvFormat(),)
    gpu: Gpu
    peak_flop_per_s: float | None = None
    weight_dtype: str | None = None
    efficiency: float | Literal["auto"] = "auto"
    expert_imbalance: float = 1.0
    chunk_tokens: int = 8192
    tiers: tuple[TierRate, ...]
    limits: tuple[Limit, ...] = ()
    strategy: str = "per_rank_host_copies"
    flops_mode: FlopsMode = "exact"
    active_params: int | None = None
    rank_work: RankWork = "exact"
    concurrent_ranks: int | None = None
    loads_per_s: float = 0.0
    hit_shares: Mapping[str, float] = field(default_factory=dict)
    claimed_rate_per_s: float | None = None
    claimed_bytes_per_token: int | None = None
    paths: tuple[MeasuredPath, ...] = ()
    prefill: PrefillMeasurement | None = None


MOST_TOKENS = 10**9


def check_scenario(scenario: Scenario, *, more_tiers: Set[str] = frozenset()) -> None:
    """Refuse numbers that mean nothing, each with its option and value; `more_tiers` are still to be measured."""
    for name, values, least in (("--tokens", scenario.tokens, 1), ("--suffix", scenario.suffixes, 0)):
        for value in values:
            _in_range(name, value, least, MOST_TOKENS, "tokens")
    if scenario.efficiency != "auto":
        _in_range("--efficiency", scenario.efficiency, 1e-6, 1, "(or auto)")
    _in_range("--loads-per-s", scenario.loads_per_s, 0, 1e9, "loads per second")
    _in_range("--expert-imbalance", scenario.expert_imbalance, 1, 1e3, "(1 is balanced)")
    _in_range("--chunk-tokens", scenario.chunk_tokens, 1, MOST_TOKENS, "tokens")
    _in_range("--concurrency", scenario.concurrent_ranks, 1, 1e6, "ranks")
    _in_range("--page-tokens", scenario.kv_formats[0].page_tokens, 1, MOST_TOKENS, "tokens")
    _in_range("--claimed-rate", scenario.claimed_rate_per_s, 1e-9, 1e9, "requests per second")
    known = {*(tier.name for tier in scenario.tiers), *more_tiers, "hbm", "miss"}
    for name in scenario.hit_shares:
        if name not in known:
            raise UsageError(
                f"--hit {name} is not a tier of this run; use {', '.join(sorted(known))}, or add the tier with --tier"
            )


def _in_range(option: str, value: float | None, low: float, high: float, unit: str) -> None:
    if value is not None and not low <= value <= high:  # NaN is in no range
        raise UsageError(f"{option} {value:g} must be between {low:g} and {high:g} {unit}")


def parse_tier_rate(text: str) -> TierRate:
    """A modelled tier: `dram=50GB/s`, `file=7GB/s,100us`, `file=7GB/s,per-rank`, `remote=400Gbit/s,1ms,shared`."""
    name, _, values = text.partition("=")
    parts = [part.strip() for part in values.split(",")]
    if not re.fullmatch(r"[A-Za-z][\w-]*", name.strip()) or not values:
        raise UsageError(f"--tier {text!r} is not a modelled tier; write it like dram=50GB/s or file=7GB/s,100us")
    words = [part for part in parts[1:] if part in ("shared", "per-rank")]
    durations = [part for part in parts[1:] if part not in ("shared", "per-rank")]
    if len(words) > 1 or len(durations) > 1:
        raise UsageError(f"--tier {text!r} says one thing twice; write it like file=7GB/s,100us,shared")
    shared = words == ["shared"] if words else name.strip() in SHARED_TIERS
    with _naming(f"--tier {text!r}"):
        rate = parse_bandwidth(parts[0])
        latency_s = parse_duration(durations[0]) if durations else 0.0
    origin = Origin(provenance="modelled", source=f"--tier {text}")
    return TierRate(name=name.strip(), bytes_per_s=rate, latency_s=latency_s, shared=shared, origin=origin)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Puts the option in front of a refusal that comes from inside its value."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from error


def parse_limit(text: str) -> Limit:
    """One ceiling: `pcie=50GB/s`, `uplink=50GB/s`, `ranks_per_uplink=2`, `alpha_collective=15us`."""
    name, _, value = text.partition("=")
    for known in _LIMIT_NAMES:
        if known == name.strip():
            break
    else:
        raise UsageError(
            f"--limit {text!r} names no known limit; use one of {', '.join(_LIMIT_NAMES)}, like pcie=50GB/s"
        )
    if known in ("ranks_per_uplink", "sockets"):
        if not value.strip().isdecimal() or not 1 <= int(value) <= 10**6:
            raise UsageError(f"--limit {text!r} must be a whole number of 1 or more, like {known}=2")
        number = float(int(value))
    else:
        with _naming(f"--limit {text!r}"):
            number = parse_duration(value) if known.startswith("alpha_") else parse_bandwidth(value)
    return Limit(name=known, value=number, origin=Origin(provenance="modelled", source=f"--limit {text}"))


def parse_hit_share(text: str) -> tuple[str, float]:
    """One outcome of a look-up and how often: `dram=0.14`, `miss=14%`."""
    name, _, value = text.partition("=")
    scale = 0.01 if value.endswith("%") else 1.0
    try:
        share = float(value.removesuffix("%")) * scale
    except ValueError:
        share = -1.0
    if not name or not 0 <= share <= 1:
        raise UsageError(f"--hit {text!r} is not a share between 0 and 1; write it like dram=0.14 or miss=8%")
    return name.strip(), share
