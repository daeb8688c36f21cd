"""Bytes of one cached token in one layer, per element format, as vLLM 0.33 and SGLang 0.5.23 lay them out."""

from dataclasses import dataclass

from kvbench.core.errors import LayoutError, UsageError
from kvbench.core.layers import Attention, LatentAttention, RecurrentState

# Bytes per element and bytes of scale per `scale_block` elements (0: one scale per head row). Per-tensor formats keep
# their scale beside the model, not beside the tokens. Sources: vLLM triton `customize_spec` (4 inline bytes per head),
# vLLM `nvfp4_kv_cache_full_dim` (one fp8 scale per 16).
_HEAD_FORMATS: dict[str, tuple[float, float, int]] = {
    "fp32": (4, 0, 1),
    "bf16": (2, 0, 1),
    "fp16": (2, 0, 1),
    "fp8": (1, 0, 1),
    "int8": (1, 0, 1),
    "fp8_per_token_head": (1, 4, 0),
    "int8_per_token_head": (1, 4, 0),
    "int4_per_token_head": (0.5, 4, 0),
    "nvfp4": (0.5, 1, 16),
}
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp8_e4m3": "fp8", "fp8_per_tensor": "fp8"}
_MLA_ONLY = ("fp8_ds_mla", "nvfp4_ds_mla")
KV_DTYPES = (*_HEAD_FORMATS, *_MLA_ONLY)
STATE_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFormat:
    """Element formats of the cache and how tokens are rounded into pages.

    `page_tokens=None` counts exact tokens. `state_dtype=None` follows the model, else the engines' own default (the
    convolution dtype, except KDA: fp32). `hybrid=False` keeps every token of window layers, as an engine does whose
    hybrid cache manager is off.
    """

    kv_dtype: str = "bf16"
    state_dtype: str | None = None
    conv_dtype: str = "bf16"
    page_tokens: int | None = None
    hybrid: bool = True


def parse_kv_dtype(text: str) -> str:
    """The canonical name of a KV element format; unknown names are refused with the list."""
    name = _ALIASES.get(text.lower(), text.lower())
    if name not in KV_DTYPES:
        raise UsageError(f"kv dtype {text!r} is not known; use one of {', '.join(KV_DTYPES)}")
    return name


def parse_state_dtype(text: str) -> str:
    """The canonical name of a recurrent-state element type."""
    name = _ALIASES.get(text.lower(), text.lower())
    if name not in STATE_DTYPES:
        raise UsageError(f"state dtype {text!r} is not known; use one of {', '.join(STATE_DTYPES)}")
    return name


def _side_bytes(width: int, kv_dtype: str) -> int:
    """Bytes of one head's K or V row of `width` elements, scales included: nvfp4 128 → 64 + 8."""
    element_bytes, scale_bytes, scale_block = _HEAD_FORMATS[kv_dtype]
    scales = 1 if scale_block == 0 else -(-width // scale_block)
    return int(width * element_bytes) + int(scale_bytes * scales)


def head_row_bytes(attention: Attention, kv_dtype: str) -> int:
    """Bytes of K and V per token and KV head."""
    if kv_dtype in _MLA_ONLY:
        raise LayoutError(
            f"kv dtype {kv_dtype} is a layout of MLA rows, but the model has layers that store K and V per head; "
            "use bf16, fp8 or nvfp4"
        )
    return _side_bytes(attention.qk_dim, kv_dtype) + _side_bytes(attention.v_dim, kv_dtype)


def latent_row_bytes(latent: LatentAttention, kv_dtype: str) -> int:
    """Bytes of one MLA row without the index key: bf16 2·(512+64) = 1152, fp8_ds_mla 512 + 4·4 + 2·64 = 656.

    fp8_ds_mla: e4m3 latent, one fp32 scale per 128, bf16 rope. nvfp4_ds_mla: 4-bit latent, one fp8 scale per 16, fp8
    rope = 352. Sources: vLLM flashmla_sparse, SGLang `calculate_mla_kv_cache_dim` and pool_configurator.
    """
    if kv_dtype == "fp8_ds_mla":
        return latent.kv_rank + 4 * -(-latent.kv_rank // 128) + 2 * latent.rope_dim
    if kv_dtype == "nvfp4_ds_mla":
        return latent.kv_rank // 2 + -(-latent.kv_rank // 16) + latent.rope_dim
    return _side_bytes(latent.kv_rank + latent.rope_dim, kv_dtype)


def state_bytes(state: RecurrentState, kv_format: KvFormat, *, model_state_dtype: str | None, tp: int) -> int:
    """Bytes of one layer's recurrent and convolution state on one of `tp` ranks."""
    engine_default = "fp32" if state.kind == "kda" else kv_format.conv_dtype
    state_dtype = kv_format.state_dtype or model_state_dtype or engine_default
    recurrent = state.state_elements // tp * STATE_DTYPES[state_dtype]
    return recurrent + state.rank_conv_elements(tp) * STATE_DTYPES[kv_format.conv_dtype]


def resident_tokens(attention: Attention | LatentAttention, tokens: int, kv_format: KvFormat) -> int:
    """Tokens a layer must hold so that the next one can attend after a prefix of `tokens`.

    Full: all. Window W: the last W-1. Chunk C: those of the open chunk, tokens mod C. Then rounded up to whole pages.
    Source: vLLM `SlidingWindowSpec.num_retained_tokens`, `ChunkedLocalAttentionSpec`.
    """
    resident = tokens
    if isinstance(attention, Attention) and kv_format.hybrid:
        if attention.window_tokens is not None:
            resident = min(tokens, attention.window_tokens - 1)
        elif attention.chunk_tokens is not None:
            resident = tokens % attention.chunk_tokens
    page = kv_format.page_tokens or 1
    return -(-resident // page) * page
