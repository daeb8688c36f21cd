"""All points of one model, layout and tier: what does not depend on the prefix length is worked out once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import Any, Protocol

from kvbench.catalogue.models import CatalogueEntry
from kvbench.core.compare import Comparison, Flip, flips
from kvbench.core.errors import UsageError
from kvbench.core.layers import LatentAttention
from kvbench.core.layout import CacheBytes, CacheLayout, Parallelism, kv_heads_per_rank
from kvbench.core.links import LinkLimits, Rate, TierSpeed, rank_rate
from kvbench.core.model import Model
from kvbench.core.overlap import smallest, suffix_break_even_tokens
from kvbench.core.recompute import RecomputeModel, has_latent_attention
from kvbench.core.restore import STRATEGIES, Restore, hashed_imbalance, restore_options
from kvbench.core.work import Terms, active_params_terms, divided_terms, model_terms
from kvbench.load_vs_recompute.scenario import Scenario, TierRate
from kvbench.results.load_vs_recompute import Curve, Point

# How far a modelled time may be off, from published end-to-end runs: a CPU-hit TTFT was 1.36 times the raw copy above a
# GPU hit (H20, vLLM 0.18.1, 64K tokens), and prefill MFU of real servers reaches down to a quarter of the peak.
LOAD_OVERHEAD = 1.36
LOWEST_MFU = 0.25

_CURVE_LOW, _CURVE_HIGH = 64, 131072
_LONGEST_SEARCH = 1 << 20


class RecomputeTime(Protocol):
    """Seconds to compute `new` tokens after `cached`: the model's formula, or a fit measured on this host.

    `start_s` is paid once, however few tokens there are; `stage_seconds` is the slowest pipeline stage alone.
    """

    @property
    def start_s(self) -> float: ...

    def seconds(self, new: int, cached: int = 0) -> float: ...

    def stage_seconds(self, new: int, cached: int = 0) -> float: ...


@dataclass(frozen=True)
class Series:
    """Points of one model, layout and tier."""

    scenario: Scenario
    entry: CatalogueEntry
    layout: CacheLayout
    recompute: RecomputeTime
    rank_stages: tuple[Terms, ...]
    floor: RecomputeModel | None
    tier: TierRate
    limits: LinkLimits

    @property
    def model(self) -> Model:
        """The model of all points."""
        return self.entry.model

    @property
    def parallelism(self) -> Parallelism:
        """The layout of all points."""
        return self.layout.parallelism

    @cached_property
    def whole_terms(self) -> Terms:
        """FLOPs of all ranks together in the chosen mode."""
        if self.scenario.flops_mode == "active-params":
            return active_params_terms(self.model, active_params(self.scenario, self.entry))
        return model_terms(self.model)

    @cached_property
    def identical_ranks(self) -> int:
        """Ranks that hold the same rows of one prefix."""
        p, kv_heads = self.parallelism, self.model.kv_heads()
        has_latent = any(isinstance(mixer, LatentAttention) for mixer in self.model.mixers())
        heads = p.attention_tp if has_latent else p.attention_tp // min(p.attention_tp, kv_heads or p.attention_tp)
        if p.cp_mode == "dcp":
            return max(1, heads // p.cp)
        return heads * (p.cp if p.cp_mode == "all-gather" else 1)

    @cached_property
    def loading_ranks(self) -> int:
        """Ranks that load one request's prefix at the same time."""
        p = self.parallelism
        return p.attention_tp * p.token_shards * p.pp

    @cached_property
    def concurrent_ranks(self) -> int:
        """Ranks that share the node's links: those of this request, or more if the user said so."""
        return max(self.scenario.concurrent_ranks or 0, self.loading_ranks)

    @cached_property
    def tier_speed(self) -> TierSpeed:
        """The tier as links see it."""
        return TierSpeed(bytes_per_s=self.tier.bytes_per_s, shared=self.tier.shared)

    @cached_property
    def rate(self) -> Rate:
        """What one rank gets from the tier with private copies."""
        return rank_rate(self.limits, concurrent_ranks=self.concurrent_ranks, tier=self.tier_speed)

    @property
    def latency_s(self) -> float:
        """Fixed time of a load."""
        return self.limits.alpha_h2d_s + self.tier.latency_s

    @cached_property
    def cached_layers(self) -> int:
        """Layers of the busiest stage that hold any cache: the chunks of a layer-wise load."""
        stages = [sum(group.layers for group in stage.rows) + stage.state_layers for stage in self.layout.stages]
        return max(1, *stages)

    @cached_property
    def row_layers(self) -> int:
        """Layers of the busiest stage that hold rows: the chunks a pipelined restore moves through collectives."""
        return max(1, *(sum(group.layers for group in stage.rows) for stage in self.layout.stages))

    @cached_property
    def _bytes_per_token(self) -> float:
        return self.layout.bytes_per_token()

    @cached_property
    def _shortest_window_tokens(self) -> int | None:
        return self.layout.shortest_window_tokens()

    @cached_property
    def _short_bytes_per_token(self) -> float:
        return self.layout.bytes_per_token(short=True)

    def strategies(self, cache: CacheBytes) -> tuple[Restore, ...]:
        """Every way to restore this prefix to the ranks that need the same rows; hashing spreads whole pages.

        Recurrent state is a rank's own whatever the strategy.
        """
        replica_bytes = cache.rank_bytes - cache.state_bytes
        if self.identical_ranks == 1 or replica_bytes == 0:
            return ()
        page = self.layout.kv_format.page_tokens
        return restore_options(
            replica_bytes=replica_bytes,
            ranks=self.identical_ranks,
            limits=replace(self.limits, alpha_h2d_s=self.latency_s),
            chunks=self.row_layers,
            concurrent_ranks=self.concurrent_ranks,
            tier=self.tier_speed,
            imbalance=hashed_imbalance(self.identical_ranks, -(-cache.tokens // page)) if page else 1.0,
            private_bytes=cache.state_bytes,
        )

    def delivered(self, cache: CacheBytes) -> Rate:
        """Bytes per second at which a rank's whole cache arrives under the chosen strategy, and what limits it."""
        name = self.scenario.strategy
        chosen = next((option for option in self.strategies(cache) if option.name == name), None)
        if name == STRATEGIES[0] or chosen is None:
            return self.rate
        if chosen.t_s is None or chosen.limited_by is None:
            raise UsageError(f"--strategy {name} cannot be timed: {chosen.reason}")
        wire_s = chosen.t_s - self.latency_s
        return Rate(bytes_per_s=cache.rank_bytes / wire_s, limited_by=chosen.limited_by)

    def comparison(self, tokens: int, suffix_tokens: int = 0, cache: CacheBytes | None = None) -> Comparison:
        """The closed form of one prefix: bytes against FLOPs on the busiest rank."""
        cache = cache or self.layout.at(tokens)
        shortest = self._shortest_window_tokens
        short = shortest is not None and tokens <= shortest
        growing = self._short_bytes_per_token if short else self._bytes_per_token
        growing = min(growing, cache.rank_bytes / tokens)
        linear_s, quadratic_s = self._compute_curve(tokens)
        return Comparison(
            tokens=tokens,
            bytes_per_token=growing,
            const_bytes=cache.rank_bytes - growing * tokens,
            bytes_per_s=self.delivered(cache).bytes_per_s,
            latency_s=self.latency_s,
            linear_s=linear_s,
            quadratic_s=quadratic_s,
            start_s=self.recompute.start_s,
            loads_per_s=self.scenario.loads_per_s,
            layer_bytes=self.layout.layer_bytes(tokens) if suffix_tokens else (),
            suffix_layer_s=self._layer_compute_s(suffix_tokens, tokens) if suffix_tokens else 0.0,
        )

    def _compute_curve(self, tokens: int) -> tuple[float, float]:
        """Linear and quadratic seconds of a curve through T(N) and T(N/2), start-up time aside."""
        start_s = self.recompute.start_s
        whole_s = self.recompute.seconds(tokens) - start_s
        even = tokens - tokens % 2
        if even == 0:
            return whole_s, 0.0
        even_s = whole_s if even == tokens else self.recompute.seconds(even) - start_s
        half_s = self.recompute.seconds(even // 2) - start_s
        quadratic_s = max(0.0, 2 * (even_s - 2 * half_s) / even**2)
        return whole_s / tokens - quadratic_s * tokens, quadratic_s

    def _layer_compute_s(self, new: int, cached: int) -> float:
        return self.recompute.stage_seconds(new, cached) / self.cached_layers

    @cached_property
    def smallest_useful_tokens(self) -> int | None:
        """The first prefix length at which loading is no slower; None if there is none up to a million tokens.

        With linear compute and no constant bytes it is T_fixed / (t_rec - κ/B).
        """
        low = 1
        while low <= _LONGEST_SEARCH and self.comparison(low).ratio < 1:
            low *= 2
        if low > _LONGEST_SEARCH:
            return None
        return smallest(lambda n: self.comparison(n).ratio >= 1, low=low // 2 + 1, high=low)

    def point(self, tokens: int, suffix_tokens: int = 0) -> Point:
        """Everything about one prefix length."""
        cache = self.layout.at(tokens)
        comparison = self.comparison(tokens, suffix_tokens, cache)
        split = comparison.split()
        flip = next(iter(flips(comparison)), None)
        low, high, sure = self._doubt(comparison, tokens)
        layer_load_s = cache.rank_bytes / self.cached_layers / comparison.bytes_per_s
        p = self.parallelism
        return Point(
            model=self.model.name,
            tokens=tokens,
            suffix_tokens=suffix_tokens,
            layout=p.label(),
            tp=p.tp,
            pp=p.pp,
            cp=p.cp,
            cp_mode=p.cp_mode,
            dp_attention=p.dp_attention,
            ep=p.ep,
            kv_dtype=self.layout.kv_format.kv_dtype,
            tier=self.tier.name,
            strategy=self.scenario.strategy,
            **self._byte_fields(cache),
            **self._flop_fields(tokens, cache, comparison.bytes_per_s),
            tier_bytes_per_s=self.tier.bytes_per_s,
            rank_bytes_per_s=comparison.bytes_per_s,
            limited_by=self.delivered(cache).limited_by,
            concurrent_ranks=self.concurrent_ranks,
            utilisation_ratio=comparison.utilisation_ratio,
            t_load_wire_s=comparison.wire_s,
            t_load_fixed_s=comparison.latency_s,
            t_load_queue_s=_finite(comparison.queue_s),
            t_load_overlap_s=comparison.hidden_s,
            t_load_s=_finite(comparison.t_load_s),
            t_suffix_s=self.recompute.seconds(suffix_tokens, tokens),
            layer_load_s=layer_load_s,
            most_loads_per_s=comparison.most_loads_per_s(),
            **self._recompute_fields(tokens),
            break_even_bytes_per_s=comparison.break_even_bytes_per_s(),
            smallest_useful_tokens=self.smallest_useful_tokens,
            suffix_break_even_tokens=suffix_break_even_tokens(
                layer_load_s=layer_load_s, layer_compute_s=lambda new: self._layer_compute_s(new, tokens)
            ),
            split_tokens=split.x_star,
            split_t_s=_finite(split.t_s),
            split_gain=comparison.split_gain(),
            layer_split_t_s=comparison.layer_split_s(),
            verdict=comparison.verdict(),
            verdict_without_split=comparison.whole_verdict(),
            ratio=_finite(comparison.ratio) if isfinite(comparison.t_load_s) else None,
            ratio_low=low,
            ratio_high=high,
            sure=sure,
            flip_input=flip.input if flip else None,
            flip_factor=flip.factor if flip else None,
            flip_value=self._flip_value(flip, comparison) if flip else None,
            flip_verdict=flip.becomes if flip else None,
            strategies=self.strategies(cache),
        )

    def _byte_fields(self, cache: CacheBytes) -> dict[str, Any]:
        p, kv_heads = self.parallelism, self.model.kv_heads()
        local = None if kv_heads is None else kv_heads_per_rank(kv_heads, p.attention_tp)
        return {
            "bytes_per_token": self._bytes_per_token,
            "kv_heads_per_rank": local,
            "head_replicas": None if kv_heads is None or local is None else max(1, local * p.attention_tp // kv_heads),
            "rank_bytes": cache.rank_bytes,
            "other_rank_bytes": 0 if p.dp_attention > 1 else cache.rank_bytes,
            "node_bytes": cache.node_bytes,
            "node_bytes_all_replicas": cache.node_bytes * p.dp_attention,
            "unique_bytes": cache.unique_bytes,
            "replicas": cache.replicas,
            "host_bytes_per_token": cache.node_bytes / cache.tokens,
            "shared_host_bytes_per_token": cache.unique_bytes / cache.tokens,
            "index_bytes": cache.index_bytes,
            "state_bytes": cache.state_bytes,
        }

    @cached_property
    def _params(self) -> tuple[int, int]:
        return self.model.total_params(), self.model.matmul_params_per_token()

    @cached_property
    def _absorbed_terms(self) -> Terms | None:
        return model_terms(self.model, mla_kernel="absorbed") if has_latent_attention(self.model) else None

    @cached_property
    def _rule_of_thumb(self) -> Terms | None:
        """Terms of one rank by 2·Ψ_active·N, where Ψ_active is known."""
        if self.scenario.active_params is None and not self.entry.published_active_params:
            return None
        terms = active_params_terms(self.model, active_params(self.scenario, self.entry))
        return divided_terms(terms, self.parallelism.ranks)

    def _flop_fields(self, tokens: int, cache: CacheBytes, bytes_per_s: float) -> dict[str, Any]:
        whole = self.whole_terms.at(tokens)
        rank = max((terms.at(tokens) for terms in self.rank_stages), key=lambda work: work.total)
        peak_s = self.floor.stage_seconds(tokens) if self.floor else None
        return {
            "params_total": self._params[0],
            "matmul_params_per_token": self._params[1],
            "flops_mode": self.scenario.flops_mode,
            "flops_linear": round(whole.linear),
            "flops_attention": round(whole.attention),
            "flops_attention_absorbed": round(self._absorbed_terms.at(tokens).attention)
            if self._absorbed_terms
            else None,
            "flops_index": round(whole.index),
            "flops_recurrent": round(whole.recurrent),
            "flops_total": round(whole.total),
            "flops_per_rank": round(rank.total),
            "flops_per_rank_div_tp": round(whole.total / self.parallelism.ranks),
            "flops_per_rank_active_params": round(self._rule_of_thumb.at(tokens).total)
            if self._rule_of_thumb
            else None,
            "i_cache": rank.total / cache.rank_bytes if cache.rank_bytes else None,
            "i_hardware": rank.total / peak_s / bytes_per_s if peak_s else None,
        }

    def _recompute_fields(self, tokens: int) -> dict[str, Any]:
        t_s = self.recompute.seconds(tokens)
        parts = self.recompute.parts(tokens) if isinstance(self.recompute, RecomputeModel) else None
        floor_s = self.floor.seconds(tokens) if self.floor else None
        active_s = None
        if self.floor is not None and self._rule_of_thumb is not None:
            active_s = replace(self.floor, stages=(self._rule_of_thumb,) * self.parallelism.pp).seconds(tokens)
        return {
            "t_recompute_s": t_s,
            "t_recompute_floor_s": floor_s,
            "t_recompute_active_params_s": active_s,
            "t_recompute_dense_s": parts.dense_s if parts else None,
            "t_recompute_moe_s": parts.moe_s if parts else None,
            "t_recompute_attention_s": parts.attention_s if parts else None,
            "t_recompute_index_s": parts.index_s if parts else None,
            "t_recompute_comm_s": parts.comm_s if parts else None,
            "t_recompute_bubble_s": parts.bubble_s if parts else None,
            "mfu_ratio": self.floor.stage_seconds(tokens) / t_s if self.floor and t_s else None,
        }

    def _doubt(self, comparison: Comparison, tokens: int) -> tuple[float | None, float | None, bool]:
        """Ratio at the worst and best case for loading, and whether the verdict is the same at both."""
        if comparison.verdict() == "no_verdict":
            return None, None, False
        floor_s = self.floor.seconds(tokens) if self.floor else None
        fast, slow = 1.0, 1.0
        if floor_s:
            fast = max(1.0, comparison.t_recompute_s / floor_s)
            slow = min(1.0, comparison.t_recompute_s * LOWEST_MFU / floor_s)
        elif self.scenario.prefill is not None:
            doubt = self.scenario.prefill.residual_ratio
            fast, slow = 1 + doubt, 1 / (1 + doubt)
        worst = comparison.with_factors(bandwidth=1 / LOAD_OVERHEAD, compute=fast)
        best = comparison.with_factors(compute=slow)
        # A load that a split might still beat is surely a load rather than a recompute.
        decide = Comparison.verdict if comparison.verdict() == "split" else Comparison.whole_verdict
        sure = decide(worst) == decide(best) == decide(comparison)
        return _finite(worst.ratio), _finite(best.ratio), sure

    def _flip_value(self, flip: Flip, comparison: Comparison) -> float:
        if flip.input == "bandwidth":
            return comparison.bytes_per_s * flip.factor
        return comparison.t_recompute_s / flip.factor

    def curve(self, around: Sequence[int], suffix_tokens: int = 0) -> Curve:
        """Both times over prefix length, and every length at which they cross."""
        high = max(_CURVE_HIGH, *around)
        grid, tokens = [], min(_CURVE_LOW, *around)
        while tokens < high:
            grid.append(tokens)
            tokens *= 2
        grid.append(high)
        # A path that is always busy never delivers; such lengths are not drawn.
        points = [(n, c) for n in grid if isfinite((c := self.comparison(n, suffix_tokens)).t_load_s)]
        crossings = [
            self._crossing(n, m, suffix_tokens) for (n, a), (m, b) in pairwise(points) if (a.ratio > 1) != (b.ratio > 1)
        ]
        return Curve(
            model=self.model.name,
            layout=self.parallelism.label(),
            kv_dtype=self.layout.kv_format.kv_dtype,
            tier=self.tier.name,
            suffix_tokens=suffix_tokens,
            tokens=tuple(n for n, _ in points),
            t_load_s=tuple(c.t_load_s for _, c in points),
            t_recompute_s=tuple(c.t_recompute_s for _, c in points),
            split_t_s=tuple(c.split().t_s for _, c in points),
            crossover_tokens=tuple(n for n in crossings if n is not None),
        )

    def _crossing(self, low: int, high: int, suffix_tokens: int) -> int | None:
        rising = self.comparison(high, suffix_tokens).ratio > 1
        return smallest(lambda n: (self.comparison(n, suffix_tokens).ratio > 1) == rising, low=low, high=high)


def active_params(scenario: Scenario, entry: CatalogueEntry) -> int:
    """Ψ_active: what the user said, else what the publisher says."""
    count = scenario.active_params or entry.published_active_params
    if not count:
        raise UsageError(f"{entry.model.name} has no published active parameters; give --active-params, like 22e9")
    return count


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
