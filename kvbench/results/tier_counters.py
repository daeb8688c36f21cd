"""What a server counted: prompt tokens by the tier they came from, bytes moved, hits. One form for every engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Where prompt tokens come from, in every engine's counters. `external` is a lower tier whose kind the engine hides
# (vLLM says `external_unspecified` for LMCache and Mooncake); `peer` is another instance.
SOURCES = ("computed", "hbm", "dram", "file", "remote", "peer", "external")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounters:
    """Lifetime counters of one server, in our tier names. A key that is absent was not reported; it is not 0.

    `load_bytes[t]` left tier t upwards, `store_bytes[t]` went into it. With several tiers the bytes of a file pass
    through DRAM and count in both.
    """

    prompt_tokens: Mapping[str, float] = field(default_factory=dict)
    load_bytes: Mapping[str, float] = field(default_factory=dict)
    store_bytes: Mapping[str, float] = field(default_factory=dict)
    load_s: Mapping[str, float] = field(default_factory=dict)
    hit_tokens: Mapping[str, float] = field(default_factory=dict)
    query_tokens: Mapping[str, float] = field(default_factory=dict)
    troubles: Mapping[str, float] = field(default_factory=dict)
    """Preemptions, failed loads, time-outs, dropped stores: anything that should stay 0."""
    gauges: Mapping[str, float] = field(default_factory=dict)

    def since(self, before: "TierCounters") -> "TierCounters":
        """What happened between two readings; gauges are those of the later one."""
        return TierCounters(
            prompt_tokens=_difference(self.prompt_tokens, before.prompt_tokens),
            load_bytes=_difference(self.load_bytes, before.load_bytes),
            store_bytes=_difference(self.store_bytes, before.store_bytes),
            load_s=_difference(self.load_s, before.load_s),
            hit_tokens=_difference(self.hit_tokens, before.hit_tokens),
            query_tokens=_difference(self.query_tokens, before.query_tokens),
            troubles=_difference(self.troubles, before.troubles),
            gauges=dict(self.gauges),
        )

    @property
    def cached_tokens(self) -> float | None:
        """Prompt tokens from any tier; None where the server does not count them."""
        cached = [count for source, count in self.prompt_tokens.items() if source != "computed"]
        return sum(cached) if cached else None


def _difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}
