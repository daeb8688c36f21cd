"""How long recomputing a prefix takes: FLOPs over what each kind of kernel reaches, plus communication.

T_recompute = Σ_k F_k/(η_k·P_k) + T_comm on the busiest rank, per pipeline stage. Left out: kernel launches, the
scheduler, sampling, and other requests in the batch; `--measure` replaces the model by a fit that contains them.
"""

from dataclasses import dataclass, replace

from kvbench.core.layers import LatentAttention
from kvbench.core.layout import CacheLayout, Parallelism, stage_sizes
from kvbench.core.model import Model
from kvbench.core.work import Terms

ACTIVATION_BYTES = 2  # bf16 hidden states in every collective


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRates:
    """FLOP per second each kind of work reaches on one rank; attention rises with context, η = η_max·N/(N + N_half)."""

    dense: float
    moe: float
    attention_max: float
    attention_half_tokens: float
    index: float
    allreduce_bytes_per_s: float | None = None
    allgather_bytes_per_s: float | None = None
    expert_imbalance: float = 1.0

    def attention(self, context_tokens: int) -> float:
        """Attention FLOP per second at a context length."""
        return self.attention_max * context_tokens / (context_tokens + self.attention_half_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeParts:
    """Seconds by cause; `bubble_s` is what pipeline stages wait for one another."""

    dense_s: float
    moe_s: float
    attention_s: float
    index_s: float
    comm_s: float
    bubble_s: float

    @property
    def total_s(self) -> float:
        """All parts."""
        return self.dense_s + self.moe_s + self.attention_s + self.index_s + self.comm_s + self.bubble_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeModel:
    """T_recompute of one model under one parallelism at given rates; `comm_s_per_token` and `stages` per stage.

    A prompt runs in chunks of `chunk_tokens`. The first chunk fills the pipeline, later ones follow at the pace of the
    slowest stage: T = Σ_s T_s(c_1) + Σ_{j>1} max_s T_s(c_j). A chunk costs the difference of two whole prefills, so
    chunks add up. Left out: re-expanding cached MLA latents once per chunk (3.8 % of DeepSeek-V3's FLOPs at 128K).
    """

    stages: tuple[Terms, ...]
    comm_s_per_token: tuple[float, ...]
    rates: ComputeRates
    chunk_tokens: int = 8192

    @property
    def start_s(self) -> float:
        """Nothing: the formula has no cost that few tokens pay as well as many."""
        return 0.0

    def parts(self, new: int, cached: int = 0) -> RecomputeParts:
        """Seconds of a prefill of `new` tokens after `cached`, by cause, on the slowest stage's busiest rank."""
        if new == 0:
            return RecomputeParts(dense_s=0, moe_s=0, attention_s=0, index_s=0, comm_s=0, bubble_s=0)
        stages = [self._stage_parts(i, new, cached) for i in range(len(self.stages))]
        slowest = max(stages, key=lambda part: part.total_s)
        if len(stages) == 1:
            return slowest
        return replace(slowest, bubble_s=self._pipelined_s(new, cached) - slowest.total_s)

    def _pipelined_s(self, new: int, cached: int) -> float:
        ends = [*range(self.chunk_tokens, new, self.chunk_tokens), new]
        upto = [[self._stage_parts(i, end, cached).total_s for end in ends] for i in range(len(self.stages))]
        fill_s = sum(stage[0] for stage in upto)
        return fill_s + sum(max(stage[j] - stage[j - 1] for stage in upto) for j in range(1, len(ends)))

    def stage_seconds(self, new: int, cached: int = 0) -> float:
        """Seconds of the slowest stage alone, no bubbles."""
        return max((self._stage_parts(i, new, cached).total_s for i in range(len(self.stages))), default=0.0)

    def _stage_parts(self, stage: int, new: int, cached: int) -> RecomputeParts:
        work, rates = self.stages[stage].at(new, cached), self.rates
        return RecomputeParts(
            dense_s=(work.dense + work.kv + work.replicated + work.recurrent) / rates.dense,
            moe_s=work.moe * rates.expert_imbalance / rates.moe,
            attention_s=work.attention / rates.attention(new + cached) if work.attention else 0.0,
            index_s=work.index / rates.index,
            comm_s=self.comm_s_per_token[stage] * new,
            bubble_s=0.0,
        )

    def seconds(self, new: int, cached: int = 0) -> float:
        """T_recompute of `new` tokens after `cached`."""
        return self.parts(new, cached).total_s


def comm_s_per_token(model: Model, layout: CacheLayout, rates: ComputeRates) -> tuple[float, ...]:
    """Seconds of collectives per new token, for each pipeline stage.

    Two all-reduces per layer of hidden·2 bytes, each 2(n-1)/n of that over the all-reduce bus rate: after attention
    over attention TP, after the feed-forward over all tp ranks (gather and scatter move as much under DP or CP).
    All-gather CP adds (g-1)/g of the layer's cache rows; ring CP moves as much but overlaps with attention, so it is
    left out. Per-collective latency is not in it.
    """
    p = layout.parallelism
    if rates.allreduce_bytes_per_s is None:
        return (0.0,) * p.pp
    hidden = model.hidden_size * ACTIVATION_BYTES
    seconds, start = [], 0
    for size in stage_sizes(len(model.layers), p.pp):
        layers = model.layers[start : start + size]
        mixers = sum(1 for layer in layers if layer.mixer is not None)
        feed_forwards = sum(1 for layer in layers if layer.feed_forward is not None)
        reduce = _ring(p.attention_tp) * mixers / p.token_shards + _ring(p.tp) * feed_forwards
        seconds.append(reduce * hidden / rates.allreduce_bytes_per_s)
        start += size
    gather = _allgather_bytes_per_token(layout)
    rate = rates.allgather_bytes_per_s or rates.allreduce_bytes_per_s
    return tuple(s + rows / rate for s, rows in zip(seconds, gather, strict=True))


def _ring(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _allgather_bytes_per_token(layout: CacheLayout) -> tuple[float, ...]:
    p: Parallelism = layout.parallelism
    if p.cp == 1 or p.cp_mode != "all-gather":
        return (0.0,) * p.pp
    return tuple(sum(g.layers * g.rank_row_bytes for g in stage.rows) * (p.cp - 1) / p.cp for stage in layout.stages)


def has_latent_attention(model: Model) -> bool:
    """Whether FLOPs depend on running MLA expanded or absorbed."""
    return any(isinstance(m, LatentAttention) and m.indexer is None for m in model.mixers())
