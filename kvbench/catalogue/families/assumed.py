"""What `--assume` builds for an architecture nobody described: full attention from the generic fields."""

from dataclasses import replace

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.catalogue.families.experts import leading_dense
from kvbench.catalogue.families.latent import deepseek
from kvbench.catalogue.shape import Shape, attention, decoder, dense, layer, layer_words, window_of
from kvbench.core.layers import FeedForward

# Keys of recurrent layers, compressed rows or shared caches.
_OTHER_LAYOUTS = (
    "attn_layer_period",
    "attn_type_list",
    "compress_ratios",
    "full_attention_interval",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_attn_config",
    "num_kv_shared_layers",
    "ssm_state_size",
)


def assumed(config: ConfigFields, kind: str) -> Shape:
    """A decoder with `kind` attention (mha, gqa, mqa or mla) on every layer and gated feed-forward blocks.

    Biases and extra norms are left out. Keys of another cache layout are refused: no assumption covers them.
    """
    for key in _OTHER_LAYOUTS:
        if config.has(key):
            raise config.refuse(
                key, f"says that not every layer has {kind} attention", "use a config whose layers all have it"
            )
    if kind == "mla":
        return deepseek(config)
    heads = config.count("num_attention_heads")
    if kind == "gqa" and not config.has("num_key_value_heads"):
        raise config.refuse("num_key_value_heads", "is missing", "add it, or say --assume mha or --assume mqa")
    kv_heads = {"mha": heads, "mqa": 1}.get(kind)
    if kv_heads is not None:
        config = replace(config, values={**config.values, "num_key_value_heads": kv_heads})
    head_dim = config.head_dim(config.count("hidden_size"), heads)
    words = layer_words(config, ["full"] * config.num_layers())
    window = window_of(config, words)
    layers = [
        layer(config, attention(config, head_dim=head_dim, word=word, window_tokens=window), block)
        for word, block in zip(words, _feed_forwards(config), strict=True)
    ]
    return decoder(config, layers)


def _feed_forwards(config: ConfigFields) -> list[FeedForward]:
    experts = config.optional_count("n_routed_experts", "num_local_experts", "num_experts")
    if experts is None or experts == 1:
        return [dense(config)] * config.num_layers()
    width = config.count("moe_intermediate_size", "intermediate_size")
    values = {**config.values, "moe_intermediate_size": width}
    return leading_dense(replace(config, values=values), default_dense=0, routing_bias=False)
