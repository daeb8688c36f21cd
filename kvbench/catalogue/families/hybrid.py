"""Models whose layers keep a constant-size state: gated delta net, lightning attention, Mamba 1 and 2."""

from dataclasses import dataclass, replace

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.catalogue.families.experts import qwen_feed_forwards
from kvbench.catalogue.shape import Shape, attention, decoder, dense, layer_words, routed
from kvbench.core.layers import Attention, DenseFeedForward, FeedForward, Layer, Mixer, MoeFeedForward, RecurrentState

_HYBRID = ("full", "linear")
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def _state_dtype(config: ConfigFields, key: str) -> str | None:
    """What the checkpoint asks its recurrent state to be kept in, None where it leaves that to the engine."""
    word = config.text(key)
    if word is None or word == "auto":
        return None
    if word not in _DTYPES:
        raise config.refuse(key, f"is {word!r}", f"use one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[word]


def _layer(config: ConfigFields, mixer: Mixer, feed_forward: FeedForward) -> Layer:
    hidden_size = config.count("hidden_size")
    return Layer(hidden_size=hidden_size, mixer=mixer, feed_forward=feed_forward, other_params=2 * hidden_size)


def qwen3_next(config: ConfigFields) -> Shape:
    """Qwen3-Next: three gated-delta-net layers to one full layer with gated output; experts everywhere."""
    num_layers = config.num_layers()
    shared = config.count("shared_expert_intermediate_size", minimum=0)
    return _delta_hybrid(config, qwen_feed_forwards(config, num_layers, shared_size=shared))


def qwen3_5(config: ConfigFields) -> Shape:
    """Qwen3.5 dense sizes: as Qwen3-Next, with one gated feed-forward block."""
    return _delta_hybrid(config, [dense(config)] * config.num_layers())


def _delta_hybrid(config: ConfigFields, blocks: list[FeedForward]) -> Shape:
    head_dim = config.count("head_dim")
    interval = config.count("full_attention_interval", default=4)
    words = ["linear" if (i + 1) % interval else "full" for i in range(len(blocks))]
    words = layer_words(config, words, allowed=_HYBRID)
    bias = config.flag("attention_bias", default=False)
    full = attention(
        config,
        head_dim=head_dim,
        qkv_bias=bias,
        out_bias=bias,
        norm_params=2 * head_dim,
        gated_output=config.flag("attn_output_gate", default=True),
    )
    delta = _gated_delta_net(config)
    layers = []
    for word, block in zip(words, blocks, strict=True):
        layers.append(_layer(config, full if word == "full" else delta, block))
    return replace(decoder(config, layers), state_dtype=_state_dtype(config, "mamba_ssm_dtype"))


def _gated_delta_net(config: ConfigFields) -> RecurrentState:
    """Gated delta net: state H_v·d_k·d_v, one convolution over q, k and v.

    Projections q, k (H_k·d_k), v and gate z (H_v·d_v), decay and beta (H_v), output. Work per token ≈ 6·H_v·d_k·d_v
    plus the convolution.
    """
    hidden_size = config.count("hidden_size")
    key_heads, heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    config.check_groups("linear_num_key_heads", heads, key_heads)
    key_dim, value_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    kernel = config.count("linear_conv_kernel_dim")
    channels = 2 * key_heads * key_dim + heads * value_dim
    return RecurrentState(
        kind="gated_delta_net",
        heads=heads,
        state_elements=heads * key_dim * value_dim,
        conv_elements=channels * (kernel - 1),
        matmul_params=hidden_size * (channels + 2 * heads * value_dim + 2 * heads),
        update_flop_per_token=6 * heads * key_dim * value_dim + 2 * channels * kernel,
        other_params=channels * kernel + 2 * heads + value_dim,
    )


def minimax(config: ConfigFields) -> Shape:
    """MiniMax-Text-01 and M1: lightning attention (`attn_type_list` 0) with full attention (1) in between."""
    hidden_size, num_layers = config.count("hidden_size"), config.num_layers()
    heads, _ = config.heads()
    head_dim = config.head_dim(hidden_size, heads)
    kinds = config.counts("attn_type_list")
    if kinds is not None:
        config.check_length("attn_type_list", len(kinds), num_layers)
        words = ["full" if kind else "linear" for kind in kinds]
    else:
        words = layer_words(config, ["linear" if i % 2 else "full" for i in range(num_layers)], allowed=_HYBRID)
    width = heads * head_dim
    lightning = RecurrentState(
        kind="lightning",
        heads=heads,
        state_elements=heads * head_dim**2,
        conv_elements=0,
        matmul_params=5 * hidden_size * width,  # q, k, v, output gate, output
        update_flop_per_token=4 * heads * head_dim**2,
        other_params=width,
    )
    full = attention(config, head_dim=head_dim)
    experts = routed(
        config, width="intermediate_size", shared_size=config.count("shared_intermediate_size", default=0, minimum=0)
    )
    return decoder(config, [_layer(config, full if word == "full" else lightning, experts) for word in words])


def jamba(config: ConfigFields) -> Shape:
    """Jamba: Mamba 1 with one attention layer in `attn_layer_period`, experts on every `expert_layer_period`-th."""
    hidden_size, num_layers = config.count("hidden_size"), config.num_layers()
    heads, _ = config.heads()
    full = attention(config, head_dim=config.head_dim(hidden_size, heads))
    mamba_layer = _mamba1(
        hidden_size,
        inner=config.count("mamba_expand") * hidden_size,
        state=config.count("mamba_d_state"),
        kernel=config.count("mamba_d_conv"),
        rank=_time_step_rank(config, "mamba_dt_rank", hidden_size),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        bias=config.flag("mamba_proj_bias", default=False),
        norms=True,
    )
    attends = _periodic(config, "attn_layer", num_layers)
    sparse = _periodic(config, "expert_layer", num_layers)
    experts: FeedForward = dense(config)
    if config.count("num_experts", "num_local_experts") > 1:
        experts = routed(config, width="intermediate_size")
    layers = [
        _layer(config, full if attends[i] else mamba_layer, experts if sparse[i] else dense(config))
        for i in range(num_layers)
    ]
    return decoder(config, layers)


def _periodic(config: ConfigFields, name: str, num_layers: int) -> list[bool]:
    period, offset = config.count(f"{name}_period"), config.count(f"{name}_offset", minimum=0)
    return [i % period == offset for i in range(num_layers)]


def _time_step_rank(config: ConfigFields, key: str, hidden_size: int) -> int:
    if config.values.get(key, "auto") == "auto":
        return -(-hidden_size // 16)
    return config.count(key)


def _mamba1(
    hidden_size: int, *, inner: int, state: int, kernel: int, rank: int, conv_bias: bool, bias: bool, norms: bool
) -> RecurrentState:
    """Mamba 1: state inner·n, a convolution over inner channels.

    Projections in (hidden·2·inner), x (inner·(rank + 2n)), time step (rank·inner), out (inner·hidden). Work per token
    ≈ 5·inner·n plus the convolution. Jamba adds norms on time step, B and C.
    """
    return RecurrentState(
        kind="mamba1",
        heads=inner,
        state_elements=inner * state,
        conv_elements=inner * (kernel - 1),
        matmul_params=3 * hidden_size * inner + inner * (rank + 2 * state) + rank * inner,
        update_flop_per_token=5 * inner * state + 2 * inner * kernel,
        other_params=inner * (state + 1 + kernel + 1)  # A, D, convolution, bias of the time step
        + (inner if conv_bias else 0)
        + (2 * inner + hidden_size if bias else 0)
        + (rank + 2 * state if norms else 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mamba2Keys:
    """Where a family keeps the sizes of its Mamba 2 layers."""

    heads: tuple[str, ...]
    head_dim: tuple[str, ...]
    groups: tuple[str, ...]
    state: tuple[str, ...]
    kernel: tuple[str, ...]
    bias: str
    conv_bias: str


def _mamba2(config: ConfigFields, keys: _Mamba2Keys, head_dim: int) -> RecurrentState:
    """Mamba 2: state H·p·n, a convolution over x, B and C (inner + 2·groups·n channels).

    Projections in (hidden·(2·inner + 2·groups·n + H)) and out. Work per token ≈ 5·H·p·n plus the convolution.
    """
    hidden_size, heads = config.count("hidden_size"), config.count(*keys.heads)
    groups, state, kernel = config.count(*keys.groups), config.count(*keys.state), config.count(*keys.kernel)
    config.check_groups(keys.groups[0], heads, groups)
    inner = heads * head_dim
    channels = inner + 2 * groups * state
    projected = inner + channels + heads
    bias = config.flag(keys.bias, default=False)
    return RecurrentState(
        kind="mamba2",
        heads=heads,
        state_elements=inner * state,
        conv_elements=channels * (kernel - 1),
        conv_groups=groups,
        conv_group_elements=2 * state * (kernel - 1),
        matmul_params=hidden_size * (projected + inner),
        update_flop_per_token=5 * inner * state + 2 * channels * kernel,
        other_params=channels * (kernel + (1 if config.flag(keys.conv_bias, default=True) else 0))
        + 3 * heads  # A, D, bias of the time step
        + inner  # gated norm
        + (projected + hidden_size if bias else 0),
    )


_NEMOTRON_KEYS = _Mamba2Keys(
    heads=("mamba_num_heads",),
    head_dim=("mamba_head_dim",),
    groups=("n_groups", "mamba_n_groups"),
    state=("ssm_state_size", "mamba_d_state"),
    kernel=("conv_kernel", "mamba_d_conv"),
    bias="use_bias",
    conv_bias="use_conv_bias",
)
_NEMOTRON_LETTERS = {"M": "linear", "*": "full", "-": "mlp", "E": "moe"}


def nemotron_h(config: ConfigFields) -> Shape:
    """Nemotron-H and Nemotron 3: each layer is one of Mamba 2 (M), attention (*), feed-forward (-), experts (E)."""
    layers = [_nemotron_layer(config, word) for word in _nemotron_words(config)]
    shape = decoder(config, layers)
    return replace(shape, state_dtype=_state_dtype(config, "mamba_ssm_cache_dtype"))


def _nemotron_words(config: ConfigFields) -> list[str]:
    pattern = config.text("hybrid_override_pattern")
    if pattern is not None:
        if set(pattern) - set(_NEMOTRON_LETTERS):
            raise config.refuse(
                "hybrid_override_pattern", f"has {sorted(set(pattern) - set(_NEMOTRON_LETTERS))}", "use only M, *, -, E"
            )
        words = [_NEMOTRON_LETTERS[letter] for letter in pattern]
    else:
        key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
        names = config.items(key)
        if names is None:
            raise config.refuse(
                "hybrid_override_pattern", "is missing, and so is layers_block_type", "copy the model's own config.json"
            )
        kinds = {"mamba": "linear", "linear_attention": "linear", "attention": "full", "full_attention": "full"}
        kinds |= {"mlp": "mlp", "moe": "moe"}
        words = [kinds.get(str(name), "") for name in names]
        if "" in words:
            raise config.refuse(f"{key}[{words.index('')}]", "is not a known layer", f"use one of {', '.join(kinds)}")
    if config.has("num_hidden_layers"):
        config.check_length("hybrid_override_pattern", len(words), config.num_layers())
    if not words:
        raise config.refuse("hybrid_override_pattern", "is empty, so there are no layers", "correct it")
    return words


def _nemotron_layer(config: ConfigFields, word: str) -> Layer:
    hidden_size = config.count("hidden_size")
    mixer: Mixer | None = None
    block: FeedForward | None = None
    if word == "linear":
        mixer = _mamba2(config, _NEMOTRON_KEYS, config.count(*_NEMOTRON_KEYS.head_dim))
    elif word == "full":
        mixer = _nemotron_attention(config)
    elif word == "moe":
        block = _nemotron_experts(config)
    else:
        width = config.count("intermediate_size")
        bias = config.flag("mlp_bias", default=False)
        block = DenseFeedForward(intermediate_size=width, gated=False, other_params=width + hidden_size if bias else 0)
    return Layer(hidden_size=hidden_size, mixer=mixer, feed_forward=block, other_params=hidden_size)


def _nemotron_attention(config: ConfigFields) -> Attention:
    bias = config.flag("attention_bias", default=False)
    head_dim = config.count("head_dim", "attention_head_dim")
    return attention(config, head_dim=head_dim, qkv_bias=bias, out_bias=bias)


def _nemotron_experts(config: ConfigFields) -> MoeFeedForward:
    shared_size = config.count("moe_shared_expert_intermediate_size", minimum=0)
    experts = routed(config, shared_size=shared_size, routing_bias=True)
    return replace(experts, gated=False, latent_size=config.optional_count("moe_latent_size"))


_BAMBA_KEYS = _Mamba2Keys(
    heads=("mamba_n_heads",),
    head_dim=("mamba_d_head",),
    groups=("mamba_n_groups",),
    state=("mamba_d_state",),
    kernel=("mamba_d_conv",),
    bias="mamba_proj_bias",
    conv_bias="mamba_conv_bias",
)


def bamba(config: ConfigFields) -> Shape:
    """Bamba: Mamba 2 with attention on `attn_layer_indices`, a gated feed-forward block on every layer."""
    hidden_size, num_layers = config.count("hidden_size"), config.num_layers()
    heads, _ = config.heads()
    bias = config.flag("attention_bias", default=False)
    full = attention(config, head_dim=config.head_dim(hidden_size, heads), qkv_bias=bias, out_bias=bias)
    head_dim = _bamba_head_dim(config, hidden_size)
    mamba_layer = _mamba2(config, _BAMBA_KEYS, head_dim)
    block = dense(config, bias=config.flag("mlp_bias", default=False))
    key = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    attends = config.counts("attn_layer_indices") or []
    default = ["full" if i in attends else "linear" for i in range(num_layers)]
    words = layer_words(config, default, allowed=_HYBRID, key=key)
    return decoder(config, [_layer(config, full if word == "full" else mamba_layer, block) for word in words])


def _bamba_head_dim(config: ConfigFields, hidden_size: int) -> int:
    if config.values.get("mamba_d_head", "auto") != "auto":
        return config.count("mamba_d_head")
    inner, heads = config.count("mamba_expand") * hidden_size, config.count("mamba_n_heads")
    if inner % heads:
        raise config.refuse("mamba_n_heads", f"is {heads}, which does not divide {inner} channels", "correct it")
    return inner // heads


_MAMBA2_KEYS = _Mamba2Keys(
    heads=("num_heads",),
    head_dim=("head_dim",),
    groups=("n_groups",),
    state=("state_size",),
    kernel=("conv_kernel",),
    bias="use_bias",
    conv_bias="use_conv_bias",
)


def mamba2(config: ConfigFields) -> Shape:
    """Mamba 2 without attention (Mamba-Codestral)."""
    hidden_size = config.count("hidden_size")
    head_dim = config.count("head_dim")
    inner = config.count("expand") * hidden_size
    if config.count("num_heads") * head_dim != inner:
        raise config.refuse("num_heads", f"times head_dim is not expand·hidden_size {inner}", "correct one of them")
    mixer = _mamba2(config, _MAMBA2_KEYS, head_dim)
    only = Layer(hidden_size=hidden_size, mixer=mixer, feed_forward=None, other_params=hidden_size)
    return decoder(config, [only] * config.num_layers())


def mamba(config: ConfigFields) -> Shape:
    """Mamba 1 without attention (Mamba, FalconMamba)."""
    hidden_size = config.count("hidden_size")
    inner = config.optional_count("intermediate_size")
    mixer = _mamba1(
        hidden_size,
        inner=inner or config.count("expand") * hidden_size,
        state=config.count("state_size"),
        kernel=config.count("conv_kernel"),
        rank=_time_step_rank(config, "time_step_rank", hidden_size),
        conv_bias=config.flag("use_conv_bias", default=True),
        bias=config.flag("use_bias", default=False),
        norms=False,
    )
    only = Layer(hidden_size=hidden_size, mixer=mixer, feed_forward=None, other_params=hidden_size)
    return decoder(config, [only] * config.num_layers(), tied=True)
