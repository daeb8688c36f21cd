"""All points of one model, layout and tier: what does not depend on the prefix length is worked out once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, Protocol

from kvbench.catalogue.models import CatalogueEntry
from kvbench.core.compare import Comparison, Flip, flips
from kvbench.core.layers import LatentAttention
from kvbench.core.layout import CacheBytes, CacheLayout, Parallelism, kv_heads_per_rank
from kvbench.core.links import LinkLimits, Rate, queue_time_s, rank_rate, utilisation
from kvbench.core.model import Model
from kvbench.core.overlap import exposed_s, layer_split_s, smallest, suffix_break_even_tokens
from kvbench.core.recompute import RecomputeModel, has_latent_attention
from kvbench.core.restore import STRATEGIES, Restore, hashed_imbalance, restore_options
from kvbench.core.work import Terms, Work, active_params_terms, model_terms
from kvbench.load_vs_recompute.scenario import Scenario, TierRate
from kvbench.results.load_vs_recompute import Curve, Point

# How far a modelled time may be off, from published end-to-end runs: a CPU-hit TTFT was 1.36 times the raw copy above a
# GPU hit (H20, vLLM 0.18.1, 64K tokens), and prefill MFU of real servers reaches down to a quarter of the peak.
LOAD_OVERHEAD = 1.36
LOWEST_MFU = 0.25

_CURVE_LOW, _CURVE_HIGH = 64, 131072


class RecomputeTime(Protocol):
    """Seconds to compute `new` tokens after `cached`: the model's formula, or a fit measured on this host."""

    def seconds(self, new: int, cached: int = 0) -> float: ...


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
    def active_params(self) -> int | None:
        """Active parameters of the rule of thumb: what the user said, else what the publisher says."""
        published = self.entry.published_active_params
        return self.scenario.active_params or (int(published) if published else None)

    @cached_property
    def _params(self) -> tuple[int, int]:
        return self.model.total_params(), self.model.matmul_params_per_token()

    @cached_property
    def whole_terms(self) -> Terms:
        """FLOPs of all ranks together in the chosen mode."""
        if self.scenario.flops_mode == "active-params" and self.active_params:
            return active_params_terms(self.model, self.active_params)
        return model_terms(self.model)

    @cached_property
    def _active_terms(self) -> Terms | None:
        return active_params_terms(self.model, self.active_params) if self.active_params else None

    @cached_property
    def _absorbed_terms(self) -> Terms | None:
        return model_terms(self.model, mla_kernel="absorbed") if has_latent_attention(self.model) else None

    @cached_property
    def identical_ranks(self) -> int:
        """Ranks that hold the same bytes of one prefix."""
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
        """Ranks that share the node's links: those of this request, or as many as the user said."""
        return max(self.scenario.concurrent_ranks or 0, self.loading_ranks)

    @cached_property
    def rate(self) -> Rate:
        """What one rank gets from the tier."""
        private = None if self.tier.shared else self.tier.bytes_per_s
        return rank_rate(self.limits, concurrent_ranks=self.concurrent_ranks, tier_bytes_per_s=private)

    @cached_property
    def cached_layers(self) -> int:
        """Layers of the busiest stage that hold any cache: the chunks of a layer-wise load."""
        stages = [sum(group.layers for group in stage.rows) + stage.state_layers for stage in self.layout.stages]
        return max(1, *stages)

    @cached_property
    def growing_bytes_per_token(self) -> float:
        """Bytes one more token adds on the busiest rank."""
        p = self.parallelism
        sharded = p.cp_mode in ("ring", "dcp", "layer-split")
        return self.layout.bytes_per_token() / (p.cp if sharded else 1)

    def strategies(self, cache: CacheBytes) -> tuple[Restore, ...]:
        """Every way to restore this prefix to the ranks that need the same bytes; hashing spreads whole pages."""
        page = self.layout.kv_format.page_tokens
        return restore_options(
            replica_bytes=cache.rank_bytes,
            ranks=self.identical_ranks,
            limits=self.limits,
            chunks=self.cached_layers,
            concurrent_ranks=self.concurrent_ranks,
            tier_bytes_per_s=None if self.tier.shared else self.tier.bytes_per_s,
            tier_latency_s=self.tier.latency_s,
            imbalance=hashed_imbalance(self.identical_ranks, -(-cache.tokens // page)) if page else 1.0,
        )

    def comparison(self, tokens: int, suffix_tokens: int = 0, cache: CacheBytes | None = None) -> Comparison:
        """The closed form of one prefix: bytes against FLOPs on the busiest rank."""
        cache = cache or self.layout.at(tokens)
        fixed_s = self.limits.alpha_h2d_s + self.tier.latency_s
        bytes_per_s = self._strategy_rate(cache, fixed_s)
        wire_s = cache.rank_bytes / bytes_per_s
        queue_s = queue_time_s(loads_per_s=self.scenario.loads_per_s, service_s=fixed_s + wire_s)
        growing = min(self.growing_bytes_per_token, cache.rank_bytes / tokens)
        half_s, whole_s = self.recompute.seconds(tokens // 2), self.recompute.seconds(tokens)
        quadratic_s = (
            max(0.0, 2 * (whole_s - 2 * half_s) / tokens**2) if tokens % 2 == 0 else self._odd_curvature(tokens)
        )
        return Comparison(
            tokens=tokens,
            bytes_per_token=growing,
            const_bytes=cache.rank_bytes - growing * tokens,
            bytes_per_s=bytes_per_s,
            fixed_s=fixed_s + (queue_s if isfinite(queue_s) else 0.0),
            linear_s=whole_s / tokens - quadratic_s * tokens,
            quadratic_s=quadratic_s,
            hidden_s=self._hidden_s(tokens, suffix_tokens, wire_s) if suffix_tokens else 0.0,
            utilisation_ratio=utilisation(
                loads_per_s=self.scenario.loads_per_s, load_bytes=cache.rank_bytes, bytes_per_s=bytes_per_s
            ),
        )

    def _odd_curvature(self, tokens: int) -> float:
        if tokens == 1:
            return 0.0
        even = tokens - 1
        half_s, whole_s = self.recompute.seconds(even // 2), self.recompute.seconds(even)
        return max(0.0, 2 * (whole_s - 2 * half_s) / even**2)

    def _strategy_rate(self, cache: CacheBytes, fixed_s: float) -> float:
        """Bytes per second as the chosen strategy delivers them to one rank."""
        if self.scenario.strategy == STRATEGIES[0] or self.identical_ranks == 1 or not cache.rank_bytes:
            return self.rate.bytes_per_s
        chosen = self.strategies(cache)[STRATEGIES.index(self.scenario.strategy)]
        if chosen.t_s is None or chosen.t_s <= fixed_s:
            return self.rate.bytes_per_s
        return cache.rank_bytes / (chosen.t_s - fixed_s)

    def _hidden_s(self, tokens: int, suffix_tokens: int, wire_s: float) -> float:
        layers = self.cached_layers
        compute_s = self.recompute.seconds(suffix_tokens, tokens) / layers
        return wire_s - exposed_s([wire_s / layers] * layers, [compute_s] * layers)

    def point(self, tokens: int, suffix_tokens: int = 0) -> Point:
        """Everything about one prefix length."""
        cache = self.layout.at(tokens)
        comparison = self.comparison(tokens, suffix_tokens, cache)
        split = comparison.split()
        flip = next(iter(flips(comparison)), None)
        low, high, sure = self._doubt(comparison, tokens)
        layer_load_s = cache.rank_bytes / self.cached_layers / comparison.bytes_per_s
        p, scenario = self.parallelism, self.scenario
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
            strategy=scenario.strategy,
            **self._byte_fields(cache),
            **self._flop_fields(tokens, cache),
            **self._load_fields(comparison, cache),
            layer_load_s=layer_load_s,
            **self._recompute_fields(tokens, comparison),
            break_even_bytes_per_s=comparison.break_even_bytes_per_s(),
            smallest_useful_tokens=comparison.smallest_useful_tokens(),
            suffix_break_even_tokens=suffix_break_even_tokens(
                layer_load_s=layer_load_s,
                layer_compute_s=lambda new: self.recompute.seconds(new, tokens) / self.cached_layers,
            ),
            split_tokens=split.x_star,
            split_t_s=split.t_s,
            split_gain=comparison.split_gain(),
            layer_split_t_s=layer_split_s(comparison.t_load_s, comparison.t_recompute_s),
            verdict=comparison.verdict(),
            verdict_without_split=comparison.whole_verdict(),
            ratio=_finite(comparison.ratio),
            ratio_low=_finite(low),
            ratio_high=_finite(high),
            sure=sure,
            flip_input=flip.input if flip else None,
            flip_factor=flip.factor if flip else None,
            flip_value=self._flip_value(flip, comparison) if flip else None,
            flip_verdict=flip.becomes if flip else None,
            strategies=self.strategies(cache) if self.identical_ranks > 1 else (),
        )

    def _byte_fields(self, cache: CacheBytes) -> dict[str, Any]:
        p, kv_heads = self.parallelism, self.model.kv_heads()
        local = None if kv_heads is None else kv_heads_per_rank(kv_heads, p.attention_tp)
        return {
            "bytes_per_token": self.layout.bytes_per_token(),
            "kv_heads_per_rank": local,
            "head_replicas": None if kv_heads is None or local is None else max(1, local * p.attention_tp // kv_heads),
            "rank_bytes": cache.rank_bytes,
            "other_rank_bytes": 0 if p.dp_attention > 1 else cache.rank_bytes,
            "node_bytes": cache.node_bytes,
            "node_bytes_all_replicas": cache.node_bytes * p.dp_attention,
            "unique_bytes": cache.unique_bytes,
            "replicas": cache.replicas,
            "index_bytes": cache.index_bytes,
            "state_bytes": cache.state_bytes,
        }

    def _flop_fields(self, tokens: int, cache: CacheBytes) -> dict[str, Any]:
        whole, rank = self.whole_terms.at(tokens), self._rank_work(tokens)
        active = self._active_terms.at(tokens).total / self.parallelism.ranks if self._active_terms else None
        floor_s = self.floor.seconds(tokens) if self.floor else None
        flop_per_s = rank.total / floor_s if floor_s else None
        absorbed = self._absorbed_terms.at(tokens).attention if self._absorbed_terms else None
        return {
            "params_total": self._params[0],
            "matmul_params_per_token": self._params[1],
            "flops_mode": self.scenario.flops_mode,
            "flops_linear": round(whole.linear),
            "flops_attention": round(whole.attention),
            "flops_attention_absorbed": None if absorbed is None else round(absorbed),
            "flops_index": round(whole.index),
            "flops_recurrent": round(whole.recurrent),
            "flops_total": round(whole.total),
            "flops_per_rank": round(rank.total),
            "flops_per_rank_div_tp": round(whole.total / self.parallelism.ranks),
            "flops_per_rank_active_params": None if active is None else round(active),
            "i_cache": rank.total / cache.rank_bytes if cache.rank_bytes else None,
            "i_hardware": None if flop_per_s is None else flop_per_s / self.rate.bytes_per_s,
        }

    def _rank_work(self, tokens: int) -> Work:
        return max((terms.at(tokens) for terms in self.rank_stages), key=lambda work: work.total)

    def _load_fields(self, comparison: Comparison, cache: CacheBytes) -> dict[str, Any]:
        fixed_s = self.limits.alpha_h2d_s + self.tier.latency_s
        queue_s = queue_time_s(loads_per_s=self.scenario.loads_per_s, service_s=fixed_s + comparison.wire_s)
        return {
            "tier_bytes_per_s": self.tier.bytes_per_s,
            "rank_bytes_per_s": comparison.bytes_per_s,
            "limited_by": self.rate.limited_by,
            "concurrent_ranks": self.concurrent_ranks,
            "utilisation_ratio": comparison.utilisation_ratio,
            "t_load_wire_s": cache.rank_bytes / comparison.bytes_per_s,
            "t_load_fixed_s": fixed_s,
            "t_load_queue_s": _finite(queue_s),
            "t_load_overlap_s": comparison.hidden_s,
            "t_load_s": comparison.t_load_s,
        }

    def _recompute_fields(self, tokens: int, comparison: Comparison) -> dict[str, Any]:
        t_s = self.recompute.seconds(tokens)
        parts = self.recompute.parts(tokens) if isinstance(self.recompute, RecomputeModel) else None
        floor_s = self.floor.seconds(tokens) if self.floor else None
        active_s = None
        if self.floor is not None and self._active_terms is not None:
            flat = RecomputeModel(stages=(self._active_terms,), comm_s_per_token=(0.0,), rates=self.floor.rates)
            active_s = flat.seconds(tokens) / self.parallelism.ranks
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
            "mfu_ratio": floor_s / t_s if floor_s and t_s else None,
        }

    def _doubt(self, comparison: Comparison, tokens: int) -> tuple[float, float, bool]:
        """Ratio at the worst and best case for loading, and whether the verdict is the same at both."""
        slow_load = comparison.with_factors(bandwidth=1 / LOAD_OVERHEAD)
        floor_s = self.floor.seconds(tokens) if self.floor else None
        fast, slow = 1.0, 1.0
        if floor_s:
            fast = max(1.0, comparison.t_recompute_s / floor_s)
            slow = min(1.0, comparison.t_recompute_s * LOWEST_MFU / floor_s)
        elif self.scenario.prefill is not None:
            doubt = self.scenario.prefill.residual_ratio
            fast, slow = 1 + doubt, 1 / (1 + doubt)
        worst = slow_load.with_factors(compute=fast)
        best = comparison.with_factors(compute=slow)
        return worst.ratio, best.ratio, worst.verdict() == best.verdict() == comparison.verdict()

    def _flip_value(self, flip: Flip, comparison: Comparison) -> float:
        if flip.input == "bandwidth":
            return comparison.bytes_per_s * flip.factor
        return comparison.t_recompute_s / flip.factor

    def curve(self, around: Sequence[int]) -> Curve:
        """Both times over prefix length, and every length at which they cross."""
        high = max(_CURVE_HIGH, *around)
        grid, tokens = [], min(_CURVE_LOW, *around)
        while tokens < high:
            grid.append(tokens)
            tokens *= 2
        grid.append(high)
        points = [self.comparison(n) for n in grid]
        crossings = [
            self._crossing(n, m)
            for n, m, a, b in zip(grid, grid[1:], points, points[1:], strict=False)
            if (a.ratio > 1) != (b.ratio > 1)
        ]
        return Curve(
            model=self.model.name,
            layout=self.parallelism.label(),
            kv_dtype=self.layout.kv_format.kv_dtype,
            tier=self.tier.name,
            tokens=tuple(grid),
            t_load_s=tuple(point.t_load_s for point in points),
            t_recompute_s=tuple(point.t_recompute_s for point in points),
            split_t_s=tuple(point.split().t_s for point in points),
            crossover_tokens=tuple(n for n in crossings if n is not None),
        )

    def _crossing(self, low: int, high: int) -> int | None:
        rising = self.comparison(high).ratio > 1
        return smallest(lambda n: (self.comparison(n).ratio > 1) == rising, low=low, high=high)


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
