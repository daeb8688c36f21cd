"""What one decoder layer stores and computes: the descriptors every byte and FLOP figure is built from.

A model is a tuple of layers; a layer is a token mixer (attention or a recurrent state) and a feed-forward part.
"Matmul parameters" are weights a token is multiplied with (1 MAC = 2 FLOP): projections, router, routed and shared
experts. Embedding look-ups, norms, biases, convolutions and the LM head are not in them.
"""

from dataclasses import dataclass
from typing import Literal

RecurrentKind = Literal["mamba1", "mamba2", "gated_delta_net", "kda", "lightning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """Selects which cached tokens a sparse layer attends to (DeepSeek Sparse Attention).

    A layer that owns no indexer reuses the selection of an earlier one: `owned=False`, it still attends to `top_k`.
    Engines build the projections as replicated linears, so neither they nor the scores are divided by TP.
    """

    heads: int
    head_dim: int
    top_k: int
    owned: bool = True

    def row_bytes(self) -> int:
        """Bytes of index key per token: fp8 plus one fp32 scale per 128 elements (128 + 4 = 132 for DeepSeek-V3.2)."""
        return self.head_dim + 4 * -(-self.head_dim // 128) if self.owned else 0

    def matmul_params(self, hidden_size: int, q_rank: int) -> int:
        """Query, key and head-weight projections: q_rank·n·d + hidden·(d + n)."""
        return q_rank * self.heads * self.head_dim + hidden_size * (self.head_dim + self.heads) if self.owned else 0

    def other_params(self) -> int:
        """Weight and bias of the LayerNorm on the index key."""
        return 2 * self.head_dim if self.owned else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head, grouped-query or multi-query attention: full, sliding-window or chunked.

    `window_tokens` W: a token sees itself and W-1 before it. `chunk_tokens` C: a token sees its own chunk of C only.
    `stores_kv=False`: the layer reads the cache of an earlier layer (cross-layer sharing) and projects no K or V.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    stores_kv: bool = True
    gated_output: bool = False
    key_is_value: bool = False
    other_params: int = 0

    def sharded_params(self, hidden_size: int) -> int:
        """Query and output projections, which tensor parallelism divides by head."""
        gate = self.heads * self.v_dim if self.gated_output else 0
        return hidden_size * (self.heads * (self.qk_dim + self.v_dim) + gate)

    def kv_params(self, hidden_size: int) -> int:
        """Key and value projections, repeated on ranks that share a KV head."""
        width = self.qk_dim if self.key_is_value else self.qk_dim + self.v_dim
        return hidden_size * self.kv_heads * width if self.stores_kv else 0

    def replicated_params(self, hidden_size: int) -> int:
        """None: every projection is divided."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one row of kv_rank + rope_dim per token, shared by all heads.

    The row is replicated on every tensor-parallel rank. With an `indexer` it is DeepSeek Sparse Attention.
    """

    heads: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int | None = None
    indexer: Indexer | None = None

    def sharded_params(self, hidden_size: int) -> int:
        """Up-projections of query, key and value, and the output projection, divided by head."""
        query = (self.q_rank or hidden_size) * self.heads * (self.nope_dim + self.rope_dim)
        return query + self.kv_rank * self.heads * (self.nope_dim + self.v_dim) + self.heads * self.v_dim * hidden_size

    def kv_params(self, hidden_size: int) -> int:
        """None beside the latent, which counts as replicated."""
        return 0

    def replicated_params(self, hidden_size: int) -> int:
        """Down-projections of query and latent, and the indexer: computed in full on every rank."""
        index = self.indexer.matmul_params(hidden_size, self.q_rank or hidden_size) if self.indexer else 0
        return hidden_size * ((self.q_rank or 0) + self.kv_rank + self.rope_dim) + index

    @property
    def other_params(self) -> int:
        """Norms of the two latents and of the index key."""
        return (self.q_rank or 0) + self.kv_rank + (self.indexer.other_params() if self.indexer else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentState:
    """A layer whose cache is one constant-size state: Mamba, gated delta net, KDA, lightning attention.

    `state_elements` and `conv_elements` are of the whole layer. `conv_groups` groups of `conv_group_elements` are the
    part of the convolution state that is repeated when TP exceeds the groups (Mamba2's B and C).
    `update_flop_per_token` is the algorithmic minimum; chunked kernels do more.
    """

    kind: RecurrentKind
    heads: int
    state_elements: int
    conv_elements: int
    matmul_params: int
    update_flop_per_token: int
    conv_groups: int = 0
    conv_group_elements: int = 0
    replicated_matmul_params: int = 0
    other_params: int = 0

    def sharded_params(self, hidden_size: int) -> int:
        """Projections divided by head."""
        return self.matmul_params - self.replicated_matmul_params

    def kv_params(self, hidden_size: int) -> int:
        """None."""
        return 0

    def replicated_params(self, hidden_size: int) -> int:
        """Low-rank down-projections that every rank repeats."""
        return self.replicated_matmul_params

    def rank_conv_elements(self, tp: int) -> int:
        """Convolution-state elements on one of `tp` ranks; every rank keeps at least one group."""
        plain = self.conv_elements - self.conv_groups * self.conv_group_elements
        return plain // tp + max(1, self.conv_groups // tp) * self.conv_group_elements


Mixer = Attention | LatentAttention | RecurrentState


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFeedForward:
    """A gated (three matrices) or plain (two) feed-forward block."""

    intermediate_size: int
    gated: bool = True
    other_params: int = 0

    def matmul_params(self, hidden_size: int) -> int:
        """Matrices a token is multiplied with."""
        return (3 if self.gated else 2) * hidden_size * self.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeFeedForward:
    """Routed experts, `experts_per_token` of `experts` per token, beside shared experts of width `shared_size`.

    With `latent_size` the routed experts work in that narrower space, between one projection into and one out of it.
    """

    experts: int
    experts_per_token: int
    intermediate_size: int
    shared_size: int = 0
    shared_gate: bool = False
    gated: bool = True
    latent_size: int | None = None
    other_params: int = 0

    def expert_params(self, hidden_size: int) -> int:
        """Matrices of one routed expert."""
        return (3 if self.gated else 2) * (self.latent_size or hidden_size) * self.intermediate_size

    def routed_params(self, hidden_size: int) -> int:
        """Routed experts that one token is multiplied with."""
        return self.experts_per_token * self.expert_params(hidden_size)

    def shared_params(self, hidden_size: int) -> int:
        """Shared experts, touched by every token."""
        return (3 if self.gated else 2) * hidden_size * self.shared_size

    def router_params(self, hidden_size: int) -> int:
        """Router, gate of the shared expert and projections of the latent space, repeated on every rank."""
        return hidden_size * (self.experts + (1 if self.shared_gate else 0) + 2 * (self.latent_size or 0))


FeedForward = DenseFeedForward | MoeFeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer; `extra_matmul_params`: further replicated projections, `other_params`: norms and the like."""

    hidden_size: int
    mixer: Mixer | None
    feed_forward: FeedForward | None
    extra_matmul_params: int = 0
    other_params: int = 0

    def dense_params(self) -> int:
        """Matmul parameters divided by TP that run as ordinary GEMMs (projections except K/V, dense and shared FFN)."""
        params = self.mixer.sharded_params(self.hidden_size) if self.mixer else 0
        if isinstance(self.feed_forward, DenseFeedForward):
            return params + self.feed_forward.matmul_params(self.hidden_size)
        return params + (self.feed_forward.shared_params(self.hidden_size) if self.feed_forward else 0)

    def kv_params(self) -> int:
        """K and V projections."""
        return self.mixer.kv_params(self.hidden_size) if self.mixer else 0

    def moe_params(self) -> int:
        """Routed experts touched per token."""
        moe = self.feed_forward
        return moe.routed_params(self.hidden_size) if isinstance(moe, MoeFeedForward) else 0

    def replicated_params(self) -> int:
        """Matmul parameters that every tensor-parallel rank repeats: router, MLA down-projections, indexer."""
        params = self.extra_matmul_params + (self.mixer.replicated_params(self.hidden_size) if self.mixer else 0)
        moe = self.feed_forward
        return params + (moe.router_params(self.hidden_size) if isinstance(moe, MoeFeedForward) else 0)

    def matmul_params(self) -> int:
        """All matmul parameters one token touches in this layer."""
        return self.dense_params() + self.kv_params() + self.moe_params() + self.replicated_params()

    def total_params(self) -> int:
        """Every weight of the layer, unused experts, norms and biases included."""
        params = self.matmul_params() + self.other_params + (self.mixer.other_params if self.mixer else 0)
        if isinstance(self.feed_forward, MoeFeedForward):
            idle = self.feed_forward.experts - self.feed_forward.experts_per_token
            params += idle * self.feed_forward.expert_params(self.hidden_size)
        return params + (self.feed_forward.other_params if self.feed_forward else 0)
