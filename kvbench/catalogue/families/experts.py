"""Grouped-query attention with routed experts: Mixtral, Qwen MoE, GLM-4.5, gpt-oss, MiniMax-M2, Llama 4, MiMo."""

from dataclasses import replace

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.catalogue.families.dense import qwen_layer_words
from kvbench.catalogue.shape import Shape, attention, decoder, dense, layer, layer_words, routed, window_of
from kvbench.core.layers import Attention, FeedForward


def mixtral(config: ConfigFields) -> Shape:
    """Mixtral: experts of intermediate_size, no shared expert."""
    heads, _ = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    words = layer_words(config, ["window" if config.has("sliding_window") else "full"] * config.num_layers())
    window = window_of(config, words)
    experts = routed(config, width="intermediate_size")
    layers = [
        layer(config, attention(config, head_dim=head_dim, word=word, window_tokens=window), experts) for word in words
    ]
    return decoder(config, layers)


def qwen2_moe(config: ConfigFields) -> Shape:
    """Qwen 1.5 and 2 MoE: a gated shared expert; alternate layers slide where `use_sliding_window` is true."""
    heads, _ = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    num_layers = config.num_layers()
    slides = config.flag("use_sliding_window", default=False) and config.has("sliding_window")
    last = config.count("max_window_layers", default=28, minimum=0) if slides else 0
    words = layer_words(config, ["window" if i % 2 == 0 and i < last else "full" for i in range(num_layers)])
    window = window_of(config, words)
    bias = config.flag("qkv_bias", default=True)
    shared = config.count("shared_expert_intermediate_size", minimum=0)
    blocks = qwen_feed_forwards(config, num_layers, shared_size=shared)
    layers = [
        layer(config, attention(config, head_dim=head_dim, word=word, qkv_bias=bias, window_tokens=window), block)
        for word, block in zip(words, blocks, strict=True)
    ]
    return decoder(config, layers)


def qwen3_moe(config: ConfigFields) -> Shape:
    """Qwen 3 MoE: no shared expert, a norm on every query and key head; all layers slide or none."""
    head_dim = config.count("head_dim")
    bias = config.flag("attention_bias", default=False)
    words = qwen_layer_words(config.with_defaults(max_window_layers=0)) if _all_slide(config) else _all_full(config)
    window = window_of(config, words)
    layers = []
    for word, block in zip(words, qwen_feed_forwards(config, len(words)), strict=True):
        mixer = attention(
            config,
            head_dim=head_dim,
            word=word,
            qkv_bias=bias,
            out_bias=bias,
            norm_params=2 * head_dim,
            window_tokens=window,
        )
        layers.append(layer(config, mixer, block))
    return decoder(config, layers)


def _all_slide(config: ConfigFields) -> bool:
    return config.flag("use_sliding_window", default=False) and config.has("sliding_window")


def _all_full(config: ConfigFields) -> list[str]:
    return layer_words(config, ["full"] * config.num_layers())


def qwen_feed_forwards(config: ConfigFields, num_layers: int, *, shared_size: int = 0) -> list[FeedForward]:
    """Experts on every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name, a dense block elsewhere."""
    step = config.count("decoder_sparse_step", default=1)
    plain = set(config.counts("mlp_only_layers") or [])
    experts = routed(config, shared_size=shared_size, shared_gate=shared_size > 0)
    sparse = [i not in plain and (i + 1) % step == 0 for i in range(num_layers)]
    return [experts if is_sparse else dense(config) for is_sparse in sparse]


def glm4_moe(config: ConfigFields) -> Shape:
    """GLM-4.5 to 4.7: biased q, k and v, a shared expert, `first_k_dense_replace` dense layers first."""
    heads, _ = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    norms = 2 * head_dim if config.flag("use_qk_norm", default=False) else 0
    bias = config.flag("attention_bias", default=False)
    mixer = attention(config, head_dim=head_dim, qkv_bias=bias, norm_params=norms)
    return decoder(config, [layer(config, mixer, block) for block in leading_dense(config)])


def leading_dense(
    config: ConfigFields, *, default_dense: int | None = None, routing_bias: bool = True
) -> list[FeedForward]:
    """Dense or sparse per layer: `mlp_layer_types`, else `first_k_dense_replace` and `moe_layer_freq`."""
    num_layers = config.num_layers()
    words = config.per_layer("mlp_layer_types", num_layers)
    if words is None:
        first = config.count("first_k_dense_replace", default=default_dense, minimum=0)
        every = config.count("moe_layer_freq", default=1)
        words = ["sparse" if i >= first and i % every == 0 else "dense" for i in range(num_layers)]
    for i, word in enumerate(words):
        if word not in ("dense", "sparse"):
            raise config.refuse(f"mlp_layer_types[{i}]", f"is {word!r}", "use dense or sparse")
    shared = config.count("n_shared_experts", "num_shared_experts", default=0, minimum=0)
    experts = None
    if "sparse" in words:
        shared_size = shared * config.count("moe_intermediate_size")
        experts = routed(config, shared_size=shared_size, routing_bias=routing_bias)
    return [experts if experts is not None and word == "sparse" else dense(config) for word in words]


def gpt_oss(config: ConfigFields) -> Shape:
    """gpt-oss: sliding layers first, attention sinks, and biases everywhere. head_dim 64 is not hidden / heads."""
    hidden_size, head_dim = config.count("hidden_size"), config.count("head_dim")
    heads, _ = config.heads()
    words = layer_words(config, ["full" if i % 2 else "window" for i in range(config.num_layers())])
    window = window_of(config, words)
    bias = config.flag("attention_bias", default=True)
    experts = routed(config, width="intermediate_size")
    biases = experts.experts * (1 + 2 * experts.intermediate_size + hidden_size)
    experts = replace(experts, other_params=biases)
    layers = []
    for word in words:
        mixer = attention(
            config,
            head_dim=head_dim,
            word=word,
            qkv_bias=bias,
            out_bias=bias,
            norm_params=heads,  # one learned sink per head
            window_tokens=window,
        )
        layers.append(layer(config, mixer, experts))
    return decoder(config, layers)


def minimax_m2(config: ConfigFields) -> Shape:
    """MiniMax-M2: full attention only, norms over all queries and all keys."""
    head_dim = config.count("head_dim")
    heads, kv_heads = config.heads()
    norms = (heads + kv_heads) * head_dim if config.flag("use_qk_norm", default=True) else 0
    mixer = attention(config, head_dim=head_dim, norm_params=norms)
    experts = routed(
        config,
        width="intermediate_size",
        shared_size=config.count("shared_intermediate_size", default=0, minimum=0),
        routing_bias=config.flag("use_routing_bias", default=True),
    )
    return decoder(config, [layer(config, mixer, experts)] * config.num_layers())


def llama4(config: ConfigFields) -> Shape:
    """Llama 4: chunked attention with every fourth layer global, one shared beside the routed expert."""
    num_layers = config.num_layers()
    heads, _ = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    chunk = config.optional_count("attention_chunk_size")
    bias = config.flag("attention_bias", default=False)
    full = attention(config, head_dim=head_dim, qkv_bias=bias, out_bias=bias)
    step = config.count("interleave_moe_layer_step", default=1)
    sparse = config.counts("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, num_layers, step))
    experts = routed(config, width="intermediate_size", shared_size=config.count("intermediate_size"))
    layers = []
    for i, word in enumerate(_llama4_words(config, num_layers, chunk)):
        if word == "chunked" and chunk is None:
            raise config.refuse("attention_chunk_size", "is missing, and layer_types asks for it", "add the key")
        mixer = replace(full, chunk_tokens=chunk) if word == "chunked" else full
        block = experts if i in sparse else dense(config, key="intermediate_size_mlp")
        layers.append(layer(config, mixer, block))
    return decoder(config, layers)


def _llama4_words(config: ConfigFields, num_layers: int, chunk: int | None) -> list[str]:
    interval = config.count("no_rope_layer_interval", default=4)
    rope = config.counts("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    config.check_length("no_rope_layers", len(rope), num_layers)
    default = ["chunked" if uses_rope and chunk is not None else "full" for uses_rope in rope]
    return layer_words(config, default, allowed=("full", "chunked"))


def mimo_v2_flash(config: ConfigFields) -> Shape:
    """MiMo-V2-Flash: keys wider than values, sliding layers with their own KV heads and sinks."""
    num_layers = config.num_layers()
    pattern = config.counts("hybrid_layer_pattern")
    if pattern is not None:
        config.check_length("hybrid_layer_pattern", len(pattern), num_layers)
        words = ["window" if slides else "full" for slides in pattern]
    else:
        words = layer_words(config, ["full" if i == 0 or (i + 1) % 6 == 0 else "window" for i in range(num_layers)])
    full = _mimo_attention(config, None)
    window = _mimo_attention(config, config.count("sliding_window")) if "window" in words else full
    layers = []
    for word, block in zip(words, _mimo_feed_forwards(config, num_layers), strict=True):
        layers.append(layer(config, window if word == "window" else full, block))
    return decoder(config, layers)


def _mimo_attention(config: ConfigFields, window_tokens: int | None) -> Attention:
    heads, kv_heads = config.heads()
    qk_dim, v_dim = config.count("head_dim"), config.count("v_head_dim")
    sink_key, sinks = "add_full_attention_sink_bias", False
    if window_tokens is not None:
        # The class in transformers has no swa_ keys: its sliding layers have twice the KV heads and always a sink.
        heads = config.count("swa_num_attention_heads", default=heads)
        kv_heads = config.count("swa_num_key_value_heads", default=2 * kv_heads)
        qk_dim = config.count("swa_head_dim", default=qk_dim)
        v_dim = config.count("swa_v_head_dim", default=v_dim)
        config.check_groups("swa_num_key_value_heads", heads, kv_heads)
        sink_key, sinks = "add_swa_attention_sink_bias", True
    biases = heads * qk_dim + kv_heads * (qk_dim + v_dim) if config.flag("attention_bias", default=False) else 0
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        window_tokens=window_tokens,
        other_params=biases + (heads if config.flag(sink_key, default=sinks) else 0),
    )


def _mimo_feed_forwards(config: ConfigFields, num_layers: int) -> list[FeedForward]:
    if isinstance(config.values.get("moe_layer_freq"), (list, tuple)):
        sparse = config.counts("moe_layer_freq") or []
        config.check_length("moe_layer_freq", len(sparse), num_layers)
        words = ["sparse" if is_sparse else "dense" for is_sparse in sparse]
        return leading_dense(replace(config, values={**config.values, "mlp_layer_types": words}))
    return leading_dense(config, default_dense=1)
