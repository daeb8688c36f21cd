"""Row bytes of every element format, written out by hand from the engines' layouts."""

import pytest

from kvbench.core.errors import UsageError
from kvbench.core.kv_format import (
    KvFormat,
    head_row_bytes,
    latent_row_bytes,
    parse_kv_dtype,
    parse_state_dtype,
    state_bytes,
)
from kvbench.core.layers import Attention, Indexer, LatentAttention, RecurrentState

HEAD = Attention(heads=8, kv_heads=8, qk_dim=128, v_dim=128)
UNEVEN = Attention(heads=8, kv_heads=8, qk_dim=192, v_dim=128)
LATENT = LatentAttention(heads=128, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128)


@pytest.mark.parametrize(
    ("dtype", "head", "latent"),
    [
        ("bf16", 512, 1152),
        ("fp16", 512, 1152),
        ("fp32", 1024, 2304),
        ("fp8", 256, 576),
        ("int8", 256, 576),
        ("fp8_per_token_head", 2 * (128 + 4), 580),
        ("int8_per_token_head", 2 * (128 + 4), 580),
        ("int4_per_token_head", 2 * (64 + 4), 292),
        ("nvfp4", 2 * (64 + 8), 324),
    ],
)
def test_bytes_per_token_and_head_and_per_mla_row(dtype: str, head: int, latent: int) -> None:
    assert head_row_bytes(HEAD, dtype) == head
    assert latent_row_bytes(LATENT, dtype) == latent


def test_mla_only_layouts() -> None:
    assert latent_row_bytes(LATENT, "fp8_ds_mla") == 512 + 4 * 4 + 2 * 64 == 656
    assert latent_row_bytes(LATENT, "nvfp4_ds_mla") == 352
    with pytest.raises(UsageError, match="fp8_ds_mla is a layout of MLA rows"):
        head_row_bytes(HEAD, "fp8_ds_mla")


def test_keys_and_values_of_different_width() -> None:
    assert head_row_bytes(UNEVEN, "bf16") == (192 + 128) * 2


def test_nvfp4_is_nine_thirty_seconds_of_bf16_not_a_quarter() -> None:
    assert head_row_bytes(HEAD, "nvfp4") / head_row_bytes(HEAD, "bf16") == 9 / 32


def test_the_index_key_is_fp8_with_a_scale_and_only_where_it_is_owned() -> None:
    assert Indexer(heads=64, head_dim=128, top_k=2048).row_bytes() == 132
    assert Indexer(heads=64, head_dim=128, top_k=2048, owned=False).row_bytes() == 0


def test_state_dtype_comes_from_the_call_then_the_model_then_the_engine() -> None:
    kda = RecurrentState(
        kind="kda", heads=32, state_elements=1000, conv_elements=100, matmul_params=0, update_flop_per_token=0
    )
    mamba = RecurrentState(
        kind="mamba2", heads=32, state_elements=1000, conv_elements=100, matmul_params=0, update_flop_per_token=0
    )
    assert state_bytes(kda, KvFormat(), model_state_dtype=None, tp=1) == 4000 + 200
    assert state_bytes(mamba, KvFormat(), model_state_dtype=None, tp=1) == 2000 + 200
    assert state_bytes(mamba, KvFormat(), model_state_dtype="fp32", tp=1) == 4000 + 200
    assert state_bytes(mamba, KvFormat(state_dtype="bf16"), model_state_dtype="fp32", tp=1) == 2000 + 200


def test_a_rank_keeps_at_least_one_group_of_the_mamba2_convolution() -> None:
    mamba = RecurrentState(
        kind="mamba2", heads=64, state_elements=64, conv_elements=1024 + 2 * 100, matmul_params=0,
        update_flop_per_token=0, conv_groups=2, conv_group_elements=100,
    )  # fmt: skip
    assert mamba.rank_conv_elements(1) == 1024 + 200
    assert mamba.rank_conv_elements(2) == 512 + 100
    assert mamba.rank_conv_elements(8) == 128 + 100


@pytest.mark.parametrize("parse", [parse_kv_dtype, parse_state_dtype])
def test_unknown_element_types_are_refused_with_the_list(parse: object) -> None:
    with pytest.raises(UsageError, match="'float7' is not known; use one of"):
        parse("float7")  # type: ignore[operator]
