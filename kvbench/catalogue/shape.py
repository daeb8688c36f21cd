"""What a family's builder returns, and the pieces that several families share."""

from dataclasses import dataclass

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.core.layers import Attention, DenseFeedForward, FeedForward, Layer, MoeFeedForward

# How files spell the attention kinds; the first spelling is the current one.
_SPELLINGS = {
    "full": ("full_attention", "attention", "global_attention"),
    "window": ("sliding_attention", "sliding_window_attention"),
    "chunked": ("chunked_attention",),
    "linear": ("linear_attention", "mamba"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model without its name: everything that the fields of a `config.json` decide."""

    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    layers: tuple[Layer, ...]
    extra_params: int = 0
    state_dtype: str | None = None


def decoder(config: ConfigFields, layers: list[Layer], *, tied: bool = False, final_norm: int = 1) -> Shape:
    """Layers between an embedding and a final norm of `final_norm`·hidden weights (2 where it has a bias)."""
    hidden_size = config.count("hidden_size", "n_embd", "d_model")
    return Shape(
        hidden_size=hidden_size,
        vocab_size=config.count("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings", default=tied),
        layers=tuple(layers),
        extra_params=final_norm * hidden_size,
    )


def layer_words(
    config: ConfigFields, default: list[str], *, allowed: tuple[str, ...] = ("full", "window"), key: str = "layer_types"
) -> list[str]:
    """One of full, window, chunked, linear per layer, from `layer_types` or the family's default pattern."""
    words = config.per_layer(key, len(default)) or default
    return [_word(config, f"{key}[{i}]", word, allowed) for i, word in enumerate(words)]


def _word(config: ConfigFields, key: str, word: str, allowed: tuple[str, ...]) -> str:
    for short in allowed:
        if word == short or word in _SPELLINGS[short]:
            return short
    known = ", ".join(_SPELLINGS[short][0] for short in allowed)
    raise config.refuse(
        key, f"is {word[:40]!r}, which {config.architecture} is not known to have", f"use one of {known}"
    )


def attention(
    config: ConfigFields,
    *,
    head_dim: int,
    word: str = "full",
    qkv_bias: bool = False,
    out_bias: bool = False,
    norm_params: int = 0,
    window_tokens: int | None = None,
    gated_output: bool = False,
) -> Attention:
    """Grouped-query attention of the plain layout: q, k, v and o projections, heads of one width."""
    heads, kv_heads = config.heads()
    biases = (heads + 2 * kv_heads) * head_dim if qkv_bias else 0
    if out_bias:
        biases += config.count("hidden_size", "n_embd")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        window_tokens=window_tokens if word == "window" else None,
        gated_output=gated_output,
        other_params=biases + norm_params,
    )


def window_of(config: ConfigFields, words: list[str], *, default: int | None = None) -> int | None:
    """The sliding window; required only where a layer slides."""
    if "window" not in words:
        return None
    return config.count("sliding_window", default=default)


def dense(config: ConfigFields, *, key: str = "intermediate_size", bias: bool = False) -> DenseFeedForward:
    """A gated feed-forward block (gate, up, down)."""
    width = config.count(key)
    return DenseFeedForward(
        intermediate_size=width, other_params=2 * width + config.count("hidden_size") if bias else 0
    )


def routed(
    config: ConfigFields,
    *,
    width: str = "moe_intermediate_size",
    shared_size: int = 0,
    shared_gate: bool = False,
    routing_bias: bool = False,
) -> MoeFeedForward:
    """Routed experts of `width` beside a shared expert of `shared_size`.

    `routing_bias`: one value per expert that balances the routing (`e_score_correction_bias` in the checkpoint).
    """
    experts = config.count("n_routed_experts", "num_local_experts", "num_experts")
    per_token = config.count("num_experts_per_tok", "num_experts_per_token")
    if per_token > experts:
        raise config.refuse("num_experts_per_tok", f"is {per_token} of {experts} experts", "correct one of them")
    return MoeFeedForward(
        experts=experts,
        experts_per_token=per_token,
        intermediate_size=config.count(width),
        shared_size=shared_size,
        shared_gate=shared_gate,
        other_params=experts if routing_bias else 0,
    )


def layer(config: ConfigFields, mixer: Attention, feed_forward: FeedForward, *, norms: int = 2) -> Layer:
    """A decoder layer with `norms` norms of hidden_size."""
    hidden_size = config.count("hidden_size")
    return Layer(hidden_size=hidden_size, mixer=mixer, feed_forward=feed_forward, other_params=norms * hidden_size)
