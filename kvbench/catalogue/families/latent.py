"""Multi-head latent attention: DeepSeek V2 to V3.2 (with Kimi-K2), GLM-5 and GLM-4.7-Flash, Kimi Linear."""

from dataclasses import replace

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.catalogue.families.experts import leading_dense
from kvbench.catalogue.shape import Shape, decoder
from kvbench.core.layers import DenseFeedForward, FeedForward, Indexer, LatentAttention, Layer, RecurrentState


def deepseek(config: ConfigFields) -> Shape:
    """DeepSeek V2, V3, R1 and Kimi-K2; with `index_topk` DeepSeek V3.2. num_key_value_heads is not a cache width."""
    num_layers = config.num_layers()
    mixer = latent_attention(config)
    if config.has("index_topk"):
        mixer = replace(mixer, indexer=_indexer(config))
    blocks = _feed_forwards(config, num_layers)
    return decoder(config, [latent_layer(config, mixer, block) for block in blocks])


def _feed_forwards(config: ConfigFields, num_layers: int) -> list[FeedForward]:
    if not config.has("n_routed_experts"):
        return [DenseFeedForward(intermediate_size=config.count("intermediate_size"))] * num_layers
    return leading_dense(config, routing_bias=config.architecture != "DeepseekV2ForCausalLM")


def latent_attention(config: ConfigFields) -> LatentAttention:
    """The latent row and its up-projections."""
    return LatentAttention(
        heads=config.count("num_attention_heads"),
        kv_rank=config.count("kv_lora_rank"),
        rope_dim=config.count("qk_rope_head_dim", minimum=0),
        nope_dim=config.count("qk_nope_head_dim"),
        v_dim=config.count("v_head_dim"),
        q_rank=config.optional_count("q_lora_rank"),
    )


def latent_layer(config: ConfigFields, mixer: LatentAttention, feed_forward: FeedForward) -> Layer:
    """A layer with two norms and, where `attention_bias` is set, biases on the down- and output projections."""
    hidden_size = config.count("hidden_size")
    biases = 0
    if config.flag("attention_bias", default=False):
        biases = (mixer.q_rank or 0) + mixer.kv_rank + mixer.rope_dim + hidden_size
    return Layer(hidden_size=hidden_size, mixer=mixer, feed_forward=feed_forward, other_params=2 * hidden_size + biases)


def _indexer(config: ConfigFields) -> Indexer:
    return Indexer(
        heads=config.count("index_n_heads"),
        head_dim=config.count("index_head_dim"),
        top_k=config.count("index_topk"),
    )


def glm_moe_dsa(config: ConfigFields) -> Shape:
    """GLM-5: sparse attention on every layer. From 5.2 on only some layers own an indexer, the next ones reuse it."""
    owner = replace(latent_attention(config), indexer=_indexer(config))
    reuser = replace(owner, indexer=replace(_indexer(config), owned=False))
    config = config.with_defaults(first_k_dense_replace=3)
    owned = _owns_indexer(config, config.num_layers())
    pairs = zip(owned, leading_dense(config), strict=True)
    return decoder(config, [latent_layer(config, owner if owns else reuser, block) for owns, block in pairs])


def _owns_indexer(config: ConfigFields, num_layers: int) -> list[bool]:
    """Per layer, in the order of precedence that engines use: indexer_types, index_topk_pattern, freq and offset."""
    words = config.per_layer("indexer_types", num_layers)
    pattern = config.values.get("index_topk_pattern")
    if words is None and isinstance(pattern, str):
        config.check_length("index_topk_pattern", len(pattern), num_layers)
        words = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    elif words is None:
        words = config.per_layer("index_topk_pattern", num_layers)
    if words is None:
        every = config.count("index_topk_freq", default=1)
        offset = config.count("index_skip_topk_offset", default=2, minimum=0)
        return [max(i - offset + 1, 0) % every == 0 for i in range(num_layers)]
    for i, word in enumerate(words):
        if word not in ("full", "shared"):
            raise config.refuse(f"indexer_types[{i}]", f"is {word!r}", "use full or shared")
    if words[0] != "full":
        raise config.refuse("indexer_types[0]", "is shared, but no earlier layer has an indexer", "correct it")
    return [word == "full" for word in words]


def glm4_moe_lite(config: ConfigFields) -> Shape:
    """GLM-4.7-Flash: latent attention without an indexer, one dense layer first."""
    blocks = leading_dense(config, default_dense=1)
    return decoder(config, [latent_layer(config, latent_attention(config), block) for block in blocks])


def kimi_linear(config: ConfigFields) -> Shape:
    """Kimi Linear: Kimi delta attention (KDA) on most layers, latent attention without rope on the others."""
    _refuse_unknown_variants(config)
    hidden_size, num_layers = config.count("hidden_size"), config.num_layers()
    full = _full_layers(config, num_layers)
    # The class in transformers keeps the sizes of `linear_attn_config` flat, under longer names.
    linear, keys = config.mapping("linear_attn_config"), ("num_heads", "head_dim", "short_conv_kernel_size")
    if linear is None:
        linear, keys = config, ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    heads, head_dim, kernel = (linear.count(key) for key in keys)
    delta = kda_state(hidden_size, heads=heads, head_dim=head_dim, kernel=kernel)
    layers = []
    for i, block in enumerate(leading_dense(config, default_dense=1)):
        if full[i]:
            layers.append(latent_layer(config, latent_attention(config), block))
        else:
            layers.append(Layer(hidden_size=hidden_size, mixer=delta, feed_forward=block, other_params=2 * hidden_size))
    # Engines keep this state in fp32 even where they would keep others in the model's dtype.
    return replace(decoder(config, layers), state_dtype="fp32")


def _refuse_unknown_variants(config: ConfigFields) -> None:
    """Kimi-K3 reuses the class with gates and latent experts whose exact shape is not published in a reference."""
    for key in ("routed_expert_hidden_size", "mla_use_output_gate"):
        if config.has(key) and config.values[key] is not False:
            raise config.refuse(
                key, "is a variant of Kimi Linear that kvbench does not model", "use a Kimi Linear config"
            )


def _full_layers(config: ConfigFields, num_layers: int) -> list[bool]:
    """Per layer whether attention is latent; the lists of `linear_attn_config` count layers from one."""
    words = config.per_layer("layer_types", num_layers)
    if words is not None:
        return [word == "full_attention" for word in words]
    linear = config.mapping("linear_attn_config")
    full = linear.counts("full_attn_layers", minimum=1) if linear else None
    delta = linear.counts("kda_layers", minimum=1) if linear else None
    if full is None or delta is None:
        raise config.refuse(
            "linear_attn_config",
            "must list full_attn_layers and kda_layers, or layer_types must be there",
            "copy the model's own config.json",
        )
    if sorted(full + delta) != list(range(1, num_layers + 1)):
        raise config.refuse(
            "linear_attn_config",
            f"does not name each of the layers 1 to {num_layers} once",
            "correct full_attn_layers and kda_layers",
        )
    return [i + 1 in full for i in range(num_layers)]


def kda_state(hidden_size: int, *, heads: int, head_dim: int, kernel: int) -> RecurrentState:
    """Kimi delta attention: heads·d² state, one convolution each over q, k and v.

    Projections q, k, v, o (hidden·H·d each), the low-rank forget and output gates (hidden·d + d·H·d each, whose
    down-projections every rank repeats) and the head gate (hidden·H). Work per token ≈ 6·H·d² plus the convolutions.
    """
    width = heads * head_dim
    low_rank = 2 * hidden_size * head_dim
    return RecurrentState(
        kind="kda",
        heads=heads,
        state_elements=heads * head_dim**2,
        conv_elements=3 * width * (kernel - 1),
        matmul_params=4 * hidden_size * width + low_rank + 2 * head_dim * width + hidden_size * heads,
        replicated_matmul_params=low_rank,
        update_flop_per_token=6 * heads * head_dim**2 + 2 * 3 * width * kernel,
        other_params=3 * width * kernel + width + heads + head_dim,
    )
