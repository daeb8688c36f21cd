"""FLOPs of a prefill of `new` tokens after `cached` ones: whole model, and on the busiest rank.

1 MAC = 2 FLOP, forward only, LM head left out (recomputing a prefix needs none). Linear work is 2 × tokens × matmul
parameters; attention is 2·h·(d_qk + d_v) per causal pair. Pairs are counted exactly (N(N+1)/2, not N²/2).
"""

from dataclasses import dataclass
from typing import Literal

from kvbench.core.layers import Attention, Indexer, LatentAttention, Layer, RecurrentState
from kvbench.core.layout import Parallelism, kv_heads_per_rank, stage_sizes
from kvbench.core.model import Model

MlaKernel = Literal["expanded", "absorbed"]


def full_pairs(new: int, cached: int = 0) -> int:
    """Causal pairs of full attention: S·P + S(S+1)/2."""
    return new * cached + new * (new + 1) // 2


def window_pairs(new: int, cached: int, window: int) -> int:
    """Pairs where a token sees at most `window` tokens, itself included."""

    def upto(n: int) -> int:
        return n * (n + 1) // 2 if n <= window else window * (window + 1) // 2 + (n - window) * window

    return upto(cached + new) - upto(cached)


def chunk_pairs(new: int, cached: int, chunk: int) -> int:
    """Pairs where a token sees its own chunk only."""

    def upto(n: int) -> int:
        whole, rest = divmod(n, chunk)
        return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2

    return upto(cached + new) - upto(cached)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs by what limits them: of the whole model, or of one rank."""

    dense: float = 0  # GEMMs that TP divides: projections, dense and shared feed-forward
    kv: float = 0  # K and V projections
    moe: float = 0  # routed experts
    replicated: float = 0  # router, MLA down-projections, indexer projections
    attention: float = 0
    index: float = 0  # indexer scores, fp8
    recurrent: float = 0  # state updates; reported beside the total, as the golden vectors do

    @property
    def linear(self) -> float:
        """All matrix products with weights."""
        return self.dense + self.kv + self.moe + self.replicated

    @property
    def total(self) -> float:
        """Linear, attention and index scores."""
        return self.linear + self.attention + self.index

    def __add__(self, other: "Work") -> "Work":
        return Work(
            dense=self.dense + other.dense,
            kv=self.kv + other.kv,
            moe=self.moe + other.moe,
            replicated=self.replicated + other.replicated,
            attention=self.attention + other.attention,
            index=self.index + other.index,
            recurrent=self.recurrent + other.recurrent,
        )

    def scaled(self, factor: float) -> "Work":
        """Every part times `factor`."""
        return Work(
            dense=self.dense * factor,
            kv=self.kv * factor,
            moe=self.moe * factor,
            replicated=self.replicated * factor,
            attention=self.attention * factor,
            index=self.index * factor,
            recurrent=self.recurrent * factor,
        )


PairKind = Literal["full", "half_square", "window", "chunk"]


def causal_pairs(kind: PairKind, size: int, new: int, cached: int) -> float:
    """Causal pairs of `new` tokens after `cached`, for full attention, a window or a chunk of `size` tokens."""
    if kind == "full":
        return full_pairs(new, cached)
    if kind == "half_square":  # the seed's N²/2, which leaves out half of the diagonal
        return (2 * new * cached + new * new) / 2
    return window_pairs(new, cached, size) if kind == "window" else chunk_pairs(new, cached, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What makes up a layer's (or stage's) work: FLOP per new token, per causal pair and per cached token.

    `attention` maps (pair kind, size) to FLOP per pair; `index` is FLOP per full pair; `expansion` is FLOP per cached
    token, paid where MLA prefill expands latents to K and V again, once per pass over them.
    """

    per_token: Work
    attention: dict[tuple[PairKind, int], float]
    index: float = 0
    expansion: float = 0

    def at(self, new: int, cached: int = 0) -> Work:
        """The work of a prefill of `new` tokens after `cached`."""
        pairs = sum(flop * causal_pairs(kind, size, new, cached) for (kind, size), flop in self.attention.items())
        linear = self.per_token
        return Work(
            dense=linear.dense * new,
            kv=linear.kv * new,
            moe=linear.moe * new,
            replicated=linear.replicated * new,
            attention=pairs + self.expansion * cached,
            index=self.index * full_pairs(new, cached) if self.index else 0,
            recurrent=linear.recurrent * new,
        )


def layer_terms(layer: Layer, *, mla_kernel: MlaKernel = "expanded") -> Terms:
    """Terms of one whole layer: all ranks together, nothing counted twice.

    Sources: MLA expanded 2·h·(d_nope+d_rope+d_v) per pair, absorbed 2·h·(2·r_kv+d_rope); DSA runs the absorbed core
    over `top_k` tokens and scores every pair with 2·n_idx·d_idx. See docs/load-vs-recompute.md.
    """
    mixer = layer.mixer
    per_token = Work(
        dense=2 * layer.dense_params(),
        kv=2 * layer.kv_params(),
        moe=2 * layer.moe_params(),
        replicated=2 * layer.replicated_params(),
        recurrent=mixer.update_flop_per_token if isinstance(mixer, RecurrentState) else 0,
    )
    match mixer:
        case Attention() as a:
            flop = 2 * a.heads * (a.qk_dim + a.v_dim)
            kind: tuple[PairKind, int] = ("full", 0)
            if a.window_tokens is not None:
                kind = ("window", a.window_tokens)
            elif a.chunk_tokens is not None:
                kind = ("chunk", a.chunk_tokens)
            return Terms(per_token=per_token, attention={kind: flop})
        case LatentAttention(indexer=Indexer() as indexer) as latent:
            absorbed = 2 * latent.heads * (2 * latent.kv_rank + latent.rope_dim)
            scores = 2 * indexer.heads * indexer.head_dim if indexer.owned else 0
            return Terms(per_token=per_token, attention={("window", indexer.top_k): absorbed}, index=scores)
        case LatentAttention() as latent if mla_kernel == "absorbed":
            absorbed = 2 * latent.heads * (2 * latent.kv_rank + latent.rope_dim)
            return Terms(per_token=per_token, attention={("full", 0): absorbed})
        case LatentAttention() as latent:
            expanded = 2 * latent.heads * (latent.nope_dim + latent.rope_dim + latent.v_dim)
            expansion = 2 * latent.kv_rank * latent.heads * (latent.nope_dim + latent.v_dim)
            return Terms(per_token=per_token, attention={("full", 0): expanded}, expansion=expansion)
        case _:
            return Terms(per_token=per_token, attention={})


def layer_counts(layers: tuple[Layer, ...]) -> list[tuple[Layer, int]]:
    """Distinct layers with how often each occurs, in order of first appearance."""
    counts: dict[Layer, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + 1
    return list(counts.items())


def summed_terms(parts: list[tuple[Terms, float]]) -> Terms:
    """The sum of terms, each times a factor."""
    attention: dict[tuple[PairKind, int], float] = {}
    for terms, factor in parts:
        for kind, flop in terms.attention.items():
            attention[kind] = attention.get(kind, 0) + flop * factor
    per_token = Work()
    for terms, factor in parts:
        per_token += terms.per_token.scaled(factor)
    return Terms(
        per_token=per_token,
        attention=attention,
        index=sum(terms.index * factor for terms, factor in parts),
        expansion=sum(terms.expansion * factor for terms, factor in parts),
    )


def model_terms(model: Model, *, mla_kernel: MlaKernel = "expanded") -> Terms:
    """Terms of the whole model over all ranks, nothing counted twice; integers stay exact."""
    return summed_terms(
        [(layer_terms(layer, mla_kernel=mla_kernel), count) for layer, count in layer_counts(model.layers)]
    )


def rank_terms(layer: Layer, parallelism: Parallelism, *, replicated_work: bool = True) -> Terms:
    """Terms of one layer on the busiest rank.

    Token shards (CP) divide the tokens and, in zigzag order, the pairs. Attention is divided
    by attention TP, the feed-forward by all tp ranks. Every rank repeats router, MLA down-projections, indexer
    projections and scores, and the K/V projections of shared heads; `replicated_work=False` divides these too, as most
    calculators do.
    """
    p, whole = parallelism, layer_terms(layer)
    even = 1 / p.tp
    tokens = 1 / p.token_shards
    heads = tokens / p.attention_tp
    repeated = tokens if replicated_work else even
    kv = heads
    if replicated_work and isinstance(layer.mixer, Attention):
        kv = tokens * kv_heads_per_rank(layer.mixer.kv_heads, p.attention_tp) / layer.mixer.kv_heads
    mixer_dense = 2 * layer.mixer.sharded_params(layer.hidden_size) if layer.mixer else 0
    return Terms(
        per_token=Work(
            dense=mixer_dense * heads + (whole.per_token.dense - mixer_dense) * even,
            kv=whole.per_token.kv * kv,
            moe=whole.per_token.moe * even,
            replicated=whole.per_token.replicated * repeated,
            recurrent=whole.per_token.recurrent / p.attention_tp,
        ),
        attention={kind: flop * heads * p.attention_imbalance for kind, flop in whole.attention.items()},
        index=whole.index * repeated * p.attention_imbalance,
        expansion=whole.expansion * heads,
    )


def stage_terms(model: Model, parallelism: Parallelism, *, replicated_work: bool = True) -> tuple[Terms, ...]:
    """Terms of the busiest rank of each pipeline stage."""
    stages, start = [], 0
    for size in stage_sizes(len(model.layers), parallelism.pp):
        counts = layer_counts(model.layers[start : start + size])
        parts = [(rank_terms(layer, parallelism, replicated_work=replicated_work), float(n)) for layer, n in counts]
        stages.append(summed_terms(parts))
        start += size
    return tuple(stages)


def active_params_terms(model: Model, active_params: int) -> Terms:
    """Terms of the rule of thumb 2·Ψ_active·N + 4·N²·h_q·d·L/2, which needs no layer shapes but the attention's.

    Published active counts often include embedding and LM head, so this is high by their share; pairs are N²/2.
    """
    exact = model_terms(model)
    attention: dict[tuple[PairKind, int], float] = {
        ("half_square", 0) if kind == "full" else (kind, size): flop for (kind, size), flop in exact.attention.items()
    }
    return Terms(per_token=Work(dense=2 * active_params), attention=attention, index=exact.index)


def divided_terms(terms: Terms, ranks: int) -> Terms:
    """Terms spread evenly over ranks, nothing repeated."""
    return summed_terms([(terms, 1 / ranks)])
