"""Gemma 1 to 4: wide heads, tied embeddings, from the second generation on mostly sliding layers."""

from dataclasses import replace

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.catalogue.shape import Shape, attention, decoder, dense, layer, layer_words, window_of
from kvbench.core.layers import Attention, DenseFeedForward, FeedForward, Layer, MoeFeedForward


def gemma(config: ConfigFields) -> Shape:
    """Gemma 1: full attention, two norms a layer."""
    bias = config.flag("attention_bias", default=False)
    mixer = attention(config, head_dim=config.count("head_dim"), qkv_bias=bias, out_bias=bias)
    return decoder(config, [layer(config, mixer, dense(config))] * config.num_layers(), tied=True)


def gemma2(config: ConfigFields) -> Shape:
    """Gemma 2: every other layer slides, the first among them; four norms a layer."""
    config = config.with_defaults(sliding_window=4096)
    words = layer_words(config, ["full" if i % 2 else "window" for i in range(config.num_layers())])
    return _windowed(config, words, norm_params=0)


def gemma3(config: ConfigFields) -> Shape:
    """Gemma 3: five sliding layers to one full, norms on query and key heads.

    Published files of the small sizes leave out heads and vocabulary, so the defaults of the class apply.
    """
    config = config.with_defaults(
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, vocab_size=262_208, sliding_window=4096
    )
    period = config.count("sliding_window_pattern", default=6)
    words = layer_words(config, ["window" if (i + 1) % period else "full" for i in range(config.num_layers())])
    return _windowed(config, words, norm_params=2 * config.count("head_dim"))


def _windowed(config: ConfigFields, words: list[str], *, norm_params: int) -> Shape:
    bias = config.flag("attention_bias", default=False)
    head_dim, window, feed_forward = config.count("head_dim"), window_of(config, words), dense(config)
    layers = []
    for word in words:
        mixer = attention(
            config,
            head_dim=head_dim,
            word=word,
            qkv_bias=bias,
            out_bias=bias,
            norm_params=norm_params,
            window_tokens=window,
        )
        layers.append(layer(config, mixer, feed_forward, norms=4))
    return decoder(config, layers, tied=True)


def gemma3n(config: ConfigFields) -> Shape:
    """Gemma 3n: the last `num_kv_shared_layers` read the cache of an earlier layer and store nothing.

    Each layer also has a low-rank bypass (LAuReL), a gate for per-layer embeddings and a four-stream mixer (AltUp);
    the projections that split the streams run once per token before the first layer and are counted there.
    """
    config = config.with_defaults(
        sliding_window=512,
        num_kv_shared_layers=15,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
        altup_num_inputs=4,
        laurel_rank=64,
    )
    hidden, num_layers = config.count("hidden_size"), config.num_layers()
    words = layer_words(config, ["window" if (i + 1) % 5 else "full" for i in range(num_layers)])
    per_layer, streams = config.count("hidden_size_per_layer_input"), config.count("altup_num_inputs")
    rank = config.count("laurel_rank")
    # LAuReL in and out, per-layer gate and projection, this layer's share of the model-wide per-layer projection,
    # AltUp's router and its two coefficient maps.
    matmul = 2 * hidden * rank + 3 * hidden * per_layer + streams * hidden + streams**3 + streams**2
    layers = []
    for i, mixer in enumerate(_shared_attention(config, words)):
        layers.append(
            Layer(
                hidden_size=hidden,
                mixer=mixer,
                feed_forward=DenseFeedForward(intermediate_size=_width(config, i, num_layers)),
                extra_matmul_params=matmul + ((streams - 1) * hidden**2 if i == 0 else 0),
                # four norms, AltUp's output scale and router norm, norms after LAuReL and the per-layer input
                other_params=8 * hidden,
            )
        )
    shape = decoder(config, layers, tied=True)
    embeddings = config.count("vocab_size_per_layer_input") * num_layers * per_layer
    unembed = (streams - 1) * hidden**2  # needed only where a token is sampled, like the LM head
    return replace(shape, extra_params=shape.extra_params + embeddings + unembed + per_layer)


def _width(config: ConfigFields, i: int, num_layers: int) -> int:
    """Feed-forward width of layer `i`: one number, or a list with one per layer."""
    if not isinstance(config.values.get("intermediate_size"), (list, tuple)):
        return config.count("intermediate_size")
    widths = config.counts("intermediate_size", minimum=1) or []
    config.check_length("intermediate_size", len(widths), num_layers)
    return widths[i]


def _shared_attention(config: ConfigFields, words: list[str]) -> list[Attention]:
    """Attention of each layer, without K, V and their norm where the cache of an earlier layer is read."""
    bias = config.flag("attention_bias", default=False)
    hidden, head_dim, window = config.count("hidden_size"), config.count("head_dim"), window_of(config, words)
    heads, kv_heads = config.heads()
    first_shared = first_shared_layer(config, words)
    mixers = []
    for i, word in enumerate(words):
        stores = i < first_shared
        biases = hidden + (heads + (2 * kv_heads if stores else 0)) * head_dim if bias else 0
        mixers.append(
            Attention(
                heads=heads,
                kv_heads=kv_heads,
                qk_dim=head_dim,
                v_dim=head_dim,
                window_tokens=window if word == "window" else None,
                stores_kv=stores,
                other_params=biases + (2 if stores else 1) * head_dim,
            )
        )
    return mixers


def first_shared_layer(config: ConfigFields, words: list[str]) -> int:
    """Index of the first layer that reads an earlier layer's cache; each kind needs an earlier layer that stores."""
    shared = config.count("num_kv_shared_layers", default=0, minimum=0)
    first = len(words) - shared
    if shared and (first < 1 or not set(words[first:]) <= set(words[:first])):
        raise config.refuse(
            "num_kv_shared_layers",
            f"is {shared} of {len(words)} layers, which leaves a kind of layer without one that stores its cache",
            "correct it or layer_types",
        )
    return first


def gemma4(config: ConfigFields) -> Shape:
    """Gemma 4: sliding layers of head_dim, full layers of global_head_dim whose V may be the K projection.

    With `attention_k_eq_v` a full layer has no V projection. Its cache is still K and V: the norms after it differ.
    """
    config = config.with_defaults(
        sliding_window=512,
        global_head_dim=512,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
    )
    hidden, num_layers = config.count("hidden_size"), config.num_layers()
    words = layer_words(config, ["window" if (i + 1) % 6 else "full" for i in range(num_layers)])
    words[-1] = "full"  # the class forces it
    first_shared = first_shared_layer(config, words)
    per_layer = config.count("hidden_size_per_layer_input", minimum=0)
    layers = []
    for i, word in enumerate(words):
        mixer = _gemma4_attention(_overridden(config, i), word, stores=i < first_shared)
        block = _gemma4_feed_forward(config, wide=i >= first_shared)
        norms = 4 + (3 if isinstance(block, MoeFeedForward) else 0) + (1 if per_layer else 0)
        layers.append(
            Layer(
                hidden_size=hidden,
                mixer=mixer,
                feed_forward=block,
                extra_matmul_params=3 * hidden * per_layer,
                other_params=norms * hidden,
            )
        )
    shape = decoder(config, layers, tied=True)
    if not per_layer:
        return shape
    embeddings = config.count("vocab_size_per_layer_input") * num_layers * per_layer
    return replace(shape, extra_params=shape.extra_params + embeddings + per_layer)


def _overridden(config: ConfigFields, i: int) -> ConfigFields:
    """What layer `i` sees: transformers 5 saves the full layers' own sizes under `per_layer_config`."""
    layers = config.mapping("per_layer_config")
    if layers is None:
        return config
    keys = [key for key in layers.values if str(key) in (str(i), f"{i:02}")]
    own = layers.mapping(keys[0]) if keys else None
    if own is None:
        return config
    head_dim, kv_heads = own.optional_count("head_dim"), own.optional_count("num_key_value_heads")
    overrides = {"global_head_dim": head_dim, "head_dim": head_dim, "num_global_key_value_heads": kv_heads}
    return replace(config, values={**config.values, **{k: v for k, v in overrides.items() if v is not None}})


def _gemma4_attention(config: ConfigFields, word: str, *, stores: bool) -> Attention:
    heads, kv_heads = config.heads()
    head_dim, key_is_value, window = config.count("head_dim"), False, None
    if word == "window":
        window = config.count("sliding_window")
    else:
        head_dim = config.count("global_head_dim")
        key_is_value = config.flag("attention_k_eq_v", default=False)
        if key_is_value:
            kv_heads = config.count("num_global_key_value_heads", default=kv_heads)
            config.check_groups("num_global_key_value_heads", heads, kv_heads)
    values = 1 if key_is_value else 2
    biases = 0
    if config.flag("attention_bias", default=False):
        biases = config.count("hidden_size") + (heads + (values * kv_heads if stores else 0)) * head_dim
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        window_tokens=window,
        stores_kv=stores,
        key_is_value=key_is_value,
        other_params=biases + (2 if stores else 1) * head_dim,
    )


def _gemma4_feed_forward(config: ConfigFields, *, wide: bool) -> FeedForward:
    width = config.count("intermediate_size")
    if config.flag("enable_moe_block", default=False):
        experts, per_token = config.count("num_experts"), config.count("top_k_experts")
        if per_token > experts:
            raise config.refuse("top_k_experts", f"is {per_token} of {experts} experts", "correct one of them")
        return MoeFeedForward(
            experts=experts,
            experts_per_token=per_token,
            intermediate_size=config.count("moe_intermediate_size"),
            shared_size=width,  # the dense block runs beside the experts
            other_params=config.count("hidden_size") + experts,  # scales of the router and of each expert
        )
    return DenseFeedForward(intermediate_size=width * (2 if wide and _doubles(config) else 1))


def _doubles(config: ConfigFields) -> bool:
    return config.flag("use_double_wide_mlp", default=False)
