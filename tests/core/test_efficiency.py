"""Priors are the published shares where a GPU was measured, and say so where something stands in."""

import pytest

from kvbench.catalogue.gpus import find_gpu, gpu_names
from kvbench.core.efficiency import compute_dtype, efficiency_priors
from kvbench.core.errors import UsageError


@pytest.mark.parametrize(
    ("gpu", "dtype", "gemm", "moe", "attention"),
    [
        ("H100-SXM", "bf16", 0.75, 0.45, (0.74, 1900)),
        ("H200-SXM", "fp8_block", 0.55, 0.27, (0.72, 1900)),
        ("H200-SXM", "fp8", 0.60, 0.27, (0.72, 1900)),
        ("B200-SXM", "bf16", 0.68, 0.45, (0.66, 3400)),
        ("B200-SXM", "nvfp4", 0.42, 0.27, (0.66, 3400)),
        ("A100-SXM-80", "bf16", 0.85, 0.30, (0.62, 1000)),
    ],
)
def test_measured_gpus_have_their_own_shares(
    gpu: str, dtype: str, gemm: float, moe: float, attention: tuple[float, float]
) -> None:
    priors = efficiency_priors(find_gpu(gpu), weight_dtype=dtype)
    assert (priors.gemm_ratio, priors.moe_ratio) == (gemm, moe)
    assert (priors.attention_max_ratio, priors.attention_half_tokens) == attention


def test_nothing_stands_in_for_bf16_on_h100() -> None:
    priors = efficiency_priors(find_gpu("H100-SXM"), weight_dtype="bf16")
    assert priors.notes == ()
    assert (priors.allreduce_bytes_per_s, priors.allgather_bytes_per_s) == (416e9, 309e9)


def test_collectives_scale_with_nvlink_and_fall_back_to_pcie_with_a_note() -> None:
    wide = efficiency_priors(find_gpu("B200"), weight_dtype="bf16")
    assert wide.allreduce_bytes_per_s == 2 * 416e9
    assert any("scaled by 2" in note for note in wide.notes)
    narrow = efficiency_priors(find_gpu("L40S"), weight_dtype="bf16")
    assert narrow.allreduce_bytes_per_s == pytest.approx(0.8 * 26e9)
    assert any("assumed" in note for note in narrow.notes)
    assert any("H100-SXM stand in for L40S" in note for note in narrow.notes)


def test_a_gemm_share_is_never_above_the_best_matmul_measured_on_that_gpu() -> None:
    priors = efficiency_priors(find_gpu("MI300X"), weight_dtype="bf16")
    assert priors.gemm_ratio == pytest.approx(668.4 / 1307)
    assert any("best matmul measured on MI300X" in note for note in priors.notes)


@pytest.mark.parametrize("gpu", gpu_names())
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", "fp8_block", "int8", "fp4", "nvfp4", "mxfp4"])
def test_every_gpu_and_dtype_has_shares_between_zero_and_one(gpu: str, dtype: str) -> None:
    found = find_gpu(gpu)
    computed, note = compute_dtype(found, dtype)
    assert found.peak_flop_per_s(computed) is not None
    assert (computed == dtype) == (note is None)
    priors = efficiency_priors(found, weight_dtype=computed)
    for ratio in (priors.gemm_ratio, priors.moe_ratio, priors.attention_max_ratio):
        assert 0 < ratio < 1
    assert priors.attention_half_tokens > 0


def test_a_dtype_without_a_unit_is_counted_at_bf16_rate() -> None:
    assert compute_dtype(find_gpu("H100-SXM"), "mxfp4") == (
        "bf16",
        "H100-SXM has no mxfp4 peak; its linear layers are counted at BF16 rate",
    )
    assert compute_dtype(find_gpu("B200"), "mxfp4") == ("mxfp4", None)
    assert compute_dtype(find_gpu("A100-SXM-80"), "fp8_block")[0] == "bf16"


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="weight dtype 'fp7' is not known; use one of bf16"):
        efficiency_priors(find_gpu("H200"), weight_dtype="fp7")
