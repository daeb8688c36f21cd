"""Llama and its close relatives: grouped-query attention with one gated feed-forward block per layer."""

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.catalogue.shape import Shape, attention, decoder, dense, layer, layer_words, window_of


def llama(config: ConfigFields) -> Shape:
    """Llama 1 to 3 and whatever reuses the class (Yi, DeepSeek-LLM, SmolLM, …)."""
    heads, _ = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    bias = config.flag("attention_bias", default=False)
    mixer = attention(config, head_dim=head_dim, qkv_bias=bias, out_bias=bias)
    feed_forward = dense(config, bias=config.flag("mlp_bias", default=False))
    return decoder(config, [layer(config, mixer, feed_forward)] * config.num_layers())


def mistral(config: ConfigFields) -> Shape:
    """Mistral: every layer slides unless `sliding_window` is null; the class's default is 4096."""
    return _one_window(config.with_defaults(sliding_window=4096))


def phi3(config: ConfigFields) -> Shape:
    """Phi-3 and Phi-4: fused projections, every layer slides where `sliding_window` is set."""
    return _one_window(config)


def _one_window(config: ConfigFields) -> Shape:
    heads, _ = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    words = layer_words(config, ["window" if config.has("sliding_window") else "full"] * config.num_layers())
    window = window_of(config, words)
    feed_forward = dense(config)
    return decoder(
        config,
        [
            layer(config, attention(config, head_dim=head_dim, word=word, window_tokens=window), feed_forward)
            for word in words
        ],
    )


def qwen2(config: ConfigFields) -> Shape:
    """Qwen 2 and 2.5: biases on q, k and v; `max_window_layers` counts only where `use_sliding_window` is true."""
    heads, _ = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    words = qwen_layer_words(config)
    window = window_of(config, words)
    feed_forward = dense(config)
    layers = [
        layer(
            config, attention(config, head_dim=head_dim, word=word, qkv_bias=True, window_tokens=window), feed_forward
        )
        for word in words
    ]
    return decoder(config, layers)


def qwen3(config: ConfigFields) -> Shape:
    """Qwen 3: a norm on every query and key head, and a head_dim that hidden_size / heads does not give."""
    head_dim = config.count("head_dim")
    bias = config.flag("attention_bias", default=False)
    words = qwen_layer_words(config)
    window = window_of(config, words)
    feed_forward = dense(config)
    layers = []
    for word in words:
        mixer = attention(
            config,
            head_dim=head_dim,
            word=word,
            qkv_bias=bias,
            out_bias=bias,
            norm_params=2 * head_dim,
            window_tokens=window,
        )
        layers.append(layer(config, mixer, feed_forward))
    return decoder(config, layers)


def qwen_layer_words(config: ConfigFields) -> list[str]:
    """Layers from `max_window_layers` on slide, but only where `use_sliding_window` is true."""
    num_layers = config.num_layers()
    first = num_layers
    if config.flag("use_sliding_window", default=False) and config.has("sliding_window"):
        first = config.count("max_window_layers", default=28, minimum=0)
    return layer_words(config, ["window" if i >= first else "full" for i in range(num_layers)])


def olmo2(config: ConfigFields) -> Shape:
    """OLMo 2: norms over all queries and all keys, and after instead of before each block."""
    heads, kv_heads = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    bias = config.flag("attention_bias", default=False)
    norms = (heads + kv_heads) * head_dim
    mixer = attention(config, head_dim=head_dim, qkv_bias=bias, out_bias=bias, norm_params=norms)
    return decoder(config, [layer(config, mixer, dense(config))] * config.num_layers())


def cohere2(config: ConfigFields) -> Shape:
    """Command R7B and A: one norm per layer (parallel blocks), three sliding layers to one full."""
    config = config.with_defaults(sliding_window=4096)
    heads, _ = config.heads()
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    bias = config.flag("attention_bias", default=False)
    period = config.count("sliding_window_pattern", default=4)
    words = layer_words(config, ["window" if (i + 1) % period else "full" for i in range(config.num_layers())])
    window = window_of(config, words)
    feed_forward = dense(config)
    layers = []
    for word in words:
        mixer = attention(config, head_dim=head_dim, word=word, qkv_bias=bias, out_bias=bias, window_tokens=window)
        layers.append(layer(config, mixer, feed_forward, norms=1))
    return decoder(config, layers, tied=True)
