"""The tiers of a server: opened from their spelling, and what the API asks of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.core.errors import UsageError
from kvbench.core.units import parse_bytes, parse_duration
from kvbench.engines.builtin.generation import Cleared, TierCounts, TierSetting
from kvbench.tiers.registry import default_name, open_tier
from kvbench.tiers.spec import Scheme, TierSpec, parse_tier_spec
from kvbench.tiers.tiered import TieredStore, TierSettings, WritePolicy

POLICIES: tuple[WritePolicy, ...] = ("write-through", "write-through-selective", "write-back")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """The tiers as a person asks for them. `l1_bytes=0`: no L1, so that every hit comes from a lower tier."""

    l1_bytes: int
    specs: tuple[str, ...] = ()
    policy: WritePolicy = "write-through"
    load_timeout_s: float | None = None
    l1_in_host_memory: bool = False
    """L1 without torch, for an engine that has no tensors."""


@dataclass(slots=True)
class ServedTiers:
    """A tiered store, or none, with the spelling of its tiers."""

    store: TieredStore | None
    specs: dict[str, TierSpec] = field(default_factory=dict)
    policies: dict[str, str] = field(default_factory=dict)

    def settings(self) -> tuple[TierSetting, ...]:
        """The tiers as configured now, nearest first."""
        if self.store is None:
            return ()
        return tuple(
            TierSetting(
                name=name,
                spec=str(self.specs[name]),
                capacity_bytes=figures.capacity_bytes,
                policy=self.policies[name],
                enabled=figures.enabled,
            )
            for name, figures in self.store.stats().tiers.items()
        )

    def counts(self) -> tuple[TierCounts, ...]:
        """The counters of every tier."""
        if self.store is None:
            return ()
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
                dropped=figures.dropped_blocks + figures.lost_blocks,
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
        names = list(self.specs) if tiers is None else tiers
        return {
            name: Cleared(blocks=what.blocks, bytes=what.bytes)
            for asked in names
            for name, what in self.store.clear(asked).items()
        }

    def set_enabled(self, tier: str, enabled: bool) -> None:
        """Turns a tier on or off."""
        if self.store is not None:
            self.store.set_enabled(tier, enabled)

    def flush(self, timeout_s: float) -> bool:
        """Waits until every store is done."""
        return self.store is None or self.store.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Finishes what is on its way and closes the tiers."""
        if self.store is not None:
            self.store.flush(timeout_s)
            self.store.close()


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
    policies = {
        name: "write-through" if not place and options.l1_bytes else options.policy for place, name in enumerate(named)
    }
    settings: list[TierSettings] = []
    try:
        for name, spec in named.items():
            settings.append(
                TierSettings(
                    tier=open_tier(spec, block_bytes=block_bytes, name=name),
                    write=policies[name],
                    load_timeout_s=options.load_timeout_s,
                )
            )
        return ServedTiers(TieredStore(settings), named, dict(policies))
    except BaseException:
        for opened in settings:
            opened.tier.close()
        raise


def tier_options(l1: str, specs: Sequence[str], policy: str, load_timeout: str) -> TierOptions:
    """The tiers of a command line; everything in it is checked before anything is opened."""
    timeout_s = parse_duration(load_timeout)
    if timeout_s <= 0:
        raise UsageError(f"--load-timeout {load_timeout!r} must be above zero; write it like 10s")
    for spec in specs:
        parse_tier_spec(spec)
    return TierOptions(
        l1_bytes=0 if l1.strip() in ("0", "off", "none") else parse_bytes(l1),
        specs=tuple(specs),
        policy=parse_policy(policy),
        load_timeout_s=timeout_s,
    )


def parse_policy(text: str) -> WritePolicy:
    """A write policy by its name."""
    for policy in POLICIES:
        if text == policy:
            return policy
    raise UsageError(f"there is no write policy {text!r}; choose one of {', '.join(POLICIES)}")
