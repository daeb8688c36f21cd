"""Older decoders with biased norms and a plain feed-forward block: GPT-2, StarCoder, GPT-NeoX, OPT, Falcon."""

from dataclasses import replace

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.catalogue.shape import Shape, decoder
from kvbench.core.layers import Attention, DenseFeedForward, Layer


def _attention(config: ConfigFields, hidden_size: int, heads: int, kv_heads: int, *, bias: bool) -> Attention:
    """Attention whose heads tile hidden_size."""
    if hidden_size % heads:
        raise config.refuse("num_attention_heads", f"{heads} does not divide hidden_size {hidden_size}", "correct it")
    config.check_groups("num_kv_heads", heads, kv_heads)
    head_dim = hidden_size // heads
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        other_params=(heads + 2 * kv_heads) * head_dim + hidden_size if bias else 0,
    )


def _plain(hidden_size: int, width: int, *, bias: bool = True) -> DenseFeedForward:
    return DenseFeedForward(intermediate_size=width, gated=False, other_params=width + hidden_size if bias else 0)


def _gpt2(config: ConfigFields, *, multi_query: bool) -> Shape:
    hidden_size, heads = config.count("n_embd", "hidden_size"), config.count("n_head", "num_attention_heads")
    mixer = _attention(config, hidden_size, heads, 1 if multi_query else heads, bias=True)
    block = _plain(hidden_size, config.count("n_inner", default=4 * hidden_size))
    one = Layer(hidden_size=hidden_size, mixer=mixer, feed_forward=block, other_params=4 * hidden_size)
    shape = decoder(config, [one] * config.num_layers(), tied=True, final_norm=2)
    positions = config.count("n_positions", "max_position_embeddings") * hidden_size
    return replace(shape, hidden_size=hidden_size, extra_params=shape.extra_params + positions)


def gpt2(config: ConfigFields) -> Shape:
    """GPT-2: one KV head per query head, learned positions."""
    return _gpt2(config, multi_query=False)


def gpt_bigcode(config: ConfigFields) -> Shape:
    """StarCoder: GPT-2 with a single KV head where `multi_query` is true, which is the class's default."""
    return _gpt2(config, multi_query=config.flag("multi_query", default=True))


def gpt_neox(config: ConfigFields) -> Shape:
    """GPT-NeoX and Pythia: one KV head per query head, rotary positions, untied embeddings."""
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    mixer = _attention(config, hidden_size, heads, heads, bias=config.flag("attention_bias", default=True))
    block = _plain(hidden_size, config.count("intermediate_size"))
    one = Layer(hidden_size=hidden_size, mixer=mixer, feed_forward=block, other_params=4 * hidden_size)
    return decoder(config, [one] * config.num_layers(), final_norm=2)


def opt(config: ConfigFields) -> Shape:
    """OPT: learned positions (two more than the context); the 350M size projects narrower embeddings."""
    hidden_size, heads = config.count("hidden_size"), config.count("num_attention_heads")
    bias = config.flag("enable_bias", default=True)
    norm = 2 * hidden_size if config.flag("layer_norm_elementwise_affine", default=True) else 0
    one = Layer(
        hidden_size=hidden_size,
        mixer=_attention(config, hidden_size, heads, heads, bias=bias),
        feed_forward=_plain(hidden_size, config.count("ffn_dim"), bias=bias),
        other_params=2 * norm,
    )
    shape = decoder(config, [one] * config.num_layers(), tied=True)
    extra = (config.count("max_position_embeddings") + 2) * hidden_size
    before = config.flag("do_layer_norm_before", default=True)
    if before and not config.flag("_remove_final_layer_norm", default=False):
        extra += norm
    embedding_dim = config.count("word_embed_proj_dim", default=hidden_size)
    if embedding_dim != hidden_size:
        if not shape.tied_embeddings:
            raise config.refuse("tie_word_embeddings", "is false with a narrower word_embed_proj_dim", "set it true")
        # `Shape` counts the embedding at hidden_size: take that back, add it at its own width and both projections.
        extra += shape.vocab_size * (embedding_dim - hidden_size) + 2 * embedding_dim * hidden_size
    return replace(shape, extra_params=extra)


def falcon(config: ConfigFields) -> Shape:
    """Falcon: a single KV head (7B), or `num_kv_heads` of them in the new decoder architecture (40B, 180B)."""
    hidden_size, heads = config.count("hidden_size", "n_embed"), config.count("num_attention_heads", "n_head")
    bias = config.flag("bias", default=False)
    newer = config.flag("new_decoder_architecture", default=False)
    kv_heads = 1 if config.flag("multi_query", default=True) else heads
    if newer:
        kv_heads = config.count("num_kv_heads", "n_head_kv", default=heads)
    parallel = config.flag("parallel_attn", default=True)
    norms = config.count("num_ln_in_parallel_attn", default=2 if newer else 1) if parallel else 2
    one = Layer(
        hidden_size=hidden_size,
        mixer=_attention(config, hidden_size, heads, kv_heads, bias=bias),
        feed_forward=_plain(hidden_size, config.count("ffn_hidden_size", default=4 * hidden_size), bias=bias),
        other_params=2 * norms * hidden_size,
    )
    return decoder(config, [one] * config.num_layers(), tied=True, final_norm=2)
