"""The tiers of a server: opened from their spelling, and what the API asks of them."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kvbench.core.errors import UsageError
from kvbench.core.eviction import Eviction
from kvbench.core.units import parse_bytes, parse_duration
from kvbench.engines.builtin.deferred_store import DeferredStore
from kvbench.engines.builtin.generation import Cleared, TierCounts, TierSetting
from kvbench.tiers.base import Tier
from kvbench.tiers.metadata.registry import open_metadata
from kvbench.tiers.registry import default_name, open_tier
from kvbench.tiers.spec import Scheme, TierSpec, parse_tier_spec
from kvbench.tiers.tiered import JsonlSpans, TieredStore, TierSettings, WritePolicy

POLICIES: tuple[WritePolicy, ...] = ("write-through", "write-through-selective", "write-back")
EVICTIONS: tuple[Eviction, ...] = ("lru", "lfu", "score")
_Choice = TypeVar("_Choice", bound=str)
_REMOTE: tuple[Scheme, ...] = ("s3", "redis", "mooncake", "nixl")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """The tiers as a person asks for them. `l1_bytes=0`: no L1, so that every hit comes from a lower tier."""

    l1_bytes: int
    specs: tuple[str, ...] = ()
    policy: WritePolicy = "write-through"
    load_timeout_s: float | None = None
    eviction: Eviction = "lru"
    cooldown_s: float = 0.0
    ttl_s: float | None = None
    spans: Path | None = None
    metadata: str | None = None
    l1_in_host_memory: bool = False
    """L1 without torch, for an engine that has no tensors."""


@dataclass(slots=True)
class ServedTiers:
    """A tiered store, or none, with the spelling of its tiers."""

    store: TieredStore | None
    specs: dict[str, TierSpec] = field(default_factory=dict)
    rules: dict[str, TierSettings] = field(default_factory=dict)
    deferred: DeferredStore | None = None

    @property
    def for_runner(self) -> TieredStore | DeferredStore | None:
        """The store as an engine uses it."""
        return self.deferred or self.store

    def settings(self) -> tuple[TierSetting, ...]:
        """The tiers as configured now, nearest first."""
        if self.store is None:
            return ()
        return tuple(
            TierSetting(
                name=name,
                spec=str(self.specs[name]),
                capacity_bytes=figures.capacity_bytes,
                policy=self.rules[name].write,
                eviction=self.rules[name].eviction,
                cooldown_s=self.rules[name].cooldown_s,
                ttl_s=self.rules[name].ttl_s,
                load_timeout_s=self.rules[name].load_timeout_s,
                shared=self.rules[name].shared,
                enabled=figures.enabled,
            )
            for name, figures in self.store.stats().tiers.items()
        )

    def counts(self) -> tuple[TierCounts, ...]:
        """The counters of every tier."""
        if self.store is None:
            return ()
        first = self.store.tiers[0]
        unwritten = {first: self.deferred.dropped_blocks} if self.deferred is not None else {}
        return tuple(
            TierCounts(
                name=name,
                query_blocks=figures.queries,
                hit_blocks=figures.hits,
                load_blocks=figures.loaded_blocks,
                load_bytes=figures.loaded_bytes,
                load_s=figures.loaded_seconds,
                store_blocks=figures.stored_blocks,
                store_bytes=figures.stored_bytes,
                store_s=figures.stored_seconds,
                evicted=figures.evicted_blocks,
                dropped=figures.dropped_blocks + figures.full_blocks + unwritten.get(name, 0),
                lost=figures.lost_blocks,
                timeouts=figures.timeouts,
                corrupt=figures.corrupt,
                failures=figures.failures,
                pending=figures.pending_blocks,
                blocks=figures.ready_blocks,
                used_bytes=figures.ready_bytes,
                capacity_bytes=figures.capacity_bytes,
            )
            for name, figures in self.store.stats().tiers.items()
        )

    def clear(self, tiers: Sequence[str] | None) -> dict[str, Cleared]:
        """Empties tiers and says what was there."""
        if self.store is None:
            return {}
        cleared = (
            self.store.clear()  # forgets accesses too
            if tiers is None
            else {name: what for asked in tiers for name, what in self.store.clear(asked).items()}
        )
        return {name: Cleared(blocks=what.blocks, bytes=what.bytes) for name, what in cleared.items()}

    def set_enabled(self, tier: str, enabled: bool) -> None:
        """Turns a tier on or off."""
        if self.store is not None:
            self.store.set_enabled(tier, enabled)

    def flush(self, timeout_s: float) -> bool:
        """Waits until every store is done."""
        if self.store is None:
            return True
        deadline_s = time.monotonic() + timeout_s
        if self.deferred is not None and not self.deferred.flush(timeout_s):
            return False
        return self.store.flush(max(0.0, deadline_s - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Finishes what is on its way, for so long at most, and closes the tiers."""
        if self.deferred is not None:
            self.deferred.flush(timeout_s)
            self.deferred.close()
        if self.store is not None:
            self.store.close(timeout_s=timeout_s)


def open_tiers(options: TierOptions, *, block_bytes: int) -> ServedTiers:
    """The tiered store of these options; none if there is no tier at all."""
    named: dict[str, TierSpec] = {}
    if options.l1_bytes:
        scheme: Scheme = "dram" if options.l1_in_host_memory else "hbm"
        named["hbm"] = TierSpec(scheme=scheme, size_bytes=options.l1_bytes)
    for spec in map(parse_tier_spec, options.specs):
        name = number_name = default_name(spec)
        count = 1
        while number_name in named:
            count += 1
            number_name = f"{name}{count}"
        named[number_name] = spec
    if not named:
        return ServedTiers(None)
    # the nearest tier takes every block at once: nothing lies above it that could hold them back
    policies: dict[str, WritePolicy] = dict.fromkeys(named, options.policy)
    policies[next(iter(named))] = "write-through"
    with ExitStack() as opened:
        spans = None if options.spans is None else _open_spans(options.spans, opened)
        metadata = None if options.metadata is None else open_metadata(options.metadata)
        if metadata is not None:
            opened.callback(metadata.close)
        rules: dict[str, TierSettings] = {}
        for name, spec in named.items():
            tier = open_tier(spec, block_bytes=block_bytes, name=name)
            opened.callback(tier.close)
            rules[name] = tier_rules(tier, spec, policies[name], options)
        # a tier that cannot keep up costs blocks, never the time of those who wait for tokens
        store = TieredStore(list(rules.values()), when_full="drop", spans=spans, metadata=metadata)
        opened.pop_all()  # they are the store's now
    # memory is written at once, so that the next request finds its prefix; what may be slow or hang is written later
    deferred = None if _is_memory(next(iter(named.values()))) else DeferredStore(store)
    return ServedTiers(store, named, rules, deferred)


def _is_memory(spec: TierSpec) -> bool:
    return spec.scheme in ("hbm", "dram")


def tier_rules(tier: Tier, spec: TierSpec, policy: WritePolicy, options: TierOptions) -> TierSettings:
    """The rules of one open tier."""
    return TierSettings(
        tier=tier,
        write=policy,
        eviction=options.eviction,
        cooldown_s=options.cooldown_s,
        ttl_s=options.ttl_s,
        # memory answers at once; a timed load goes through a buffer and a thread of its own
        load_timeout_s=None if _is_memory(spec) else options.load_timeout_s,
        shared=options.metadata is not None and is_shared(spec),
    )


def is_shared(spec: TierSpec) -> bool:
    """Whether several servers can use the place of this tier at once."""
    while spec.inner is not None:
        spec = spec.inner
    return spec.scheme in _REMOTE or (spec.scheme == "dram" and "shared" in dict(spec.options))


def _open_spans(path: Path, opened: ExitStack) -> JsonlSpans:
    try:
        spans = JsonlSpans(path)
    except OSError as error:
        raise UsageError(f"--spans {path}: {error.strerror or error}; name a file that can be written") from error
    opened.callback(spans.close)
    return spans


def tier_options(
    l1: str,
    specs: Sequence[str],
    policy: str,
    load_timeout: str,
    *,
    eviction: str = "lru",
    cooldown: str = "0s",
    ttl: str | None = None,
    spans: Path | None = None,
    metadata: str | None = None,
) -> TierOptions:
    """The tiers of a command line; everything in it is checked before anything is opened."""
    parsed = tuple(map(parse_tier_spec, specs))
    if metadata is not None:
        open_metadata(metadata).close()  # connects when it is first used, so this only reads the spelling
        if not any(map(is_shared, parsed)):
            raise UsageError(
                f"--metadata {metadata}: no tier is one that several servers use; "
                "add an s3, redis, mooncake or nixl tier, or dram:SIZE?shared=NAME"
            )
    return TierOptions(
        l1_bytes=0 if l1.strip() in ("0", "off", "none") else parse_bytes(l1),
        specs=tuple(specs),
        policy=parse_policy(policy),
        load_timeout_s=_above_zero(load_timeout, "--load-timeout", "10s"),
        eviction=_chosen(eviction, EVICTIONS, "eviction"),
        cooldown_s=parse_duration(cooldown),
        ttl_s=None if ttl is None else _above_zero(ttl, "--ttl", "10min"),
        spans=spans,
        metadata=metadata,
    )


def _above_zero(text: str, option: str, example: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise UsageError(f"{option} {text!r} must be above zero; write it like {example}")
    return seconds


def parse_policy(text: str) -> WritePolicy:
    """A write policy by its name."""
    return _chosen(text, POLICIES, "write policy")


def _chosen(text: str, choices: tuple[_Choice, ...], what: str) -> _Choice:
    for choice in choices:
        if text == choice:
            return choice
    raise UsageError(f"there is no {what} {text!r}; choose one of {', '.join(choices)}")
