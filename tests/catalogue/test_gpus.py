"""GPUs are found by name or by an unambiguous beginning, in base units, with nulls left as nulls."""

import pytest

from kvbench.catalogue.gpus import find_gpu, gpu_names
from kvbench.core.errors import UsageError


def test_a_gpu_has_its_data_sheet_in_base_units() -> None:
    gpu = find_gpu("H200-SXM")
    assert gpu.peak_flop_per_s("bf16") == 989e12
    assert gpu.peak_flop_per_s("fp8_block") == gpu.peak_flop_per_s("fp8") == 1979e12
    assert gpu.peak_flop_per_s("nvfp4") is None
    assert gpu.hbm_bytes_per_s == 4800e9
    assert gpu.hbm_bytes == 141_000_000_000
    assert gpu.pcie_theory_bytes_per_s == 63.02e9
    assert gpu.pcie_h2d_typical_bytes_per_s == 55.43e9
    assert gpu.pcie_d2h_typical_bytes_per_s == 55.06e9
    assert gpu.nvlink_bytes_per_s == 450e9
    assert gpu.generation == "hopper"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("h200", "H200-SXM"), ("H20", "H20"), ("b200", "B200-SXM"), ("gb200", "GB200"), ("rtx 4090", "RTX-4090")],
)
def test_case_does_not_matter_and_a_unique_beginning_is_enough(spelling: str, name: str) -> None:
    assert find_gpu(spelling).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("H100", "'H100' could be H100-SXM or H100-PCIe; give the full name"),
        ("GH200", "could be GH200-96 or GH200-144"),
        ("RTX4090", "'RTX4090' is not known; did you mean RTX-4090"),
        ("abacus", "'abacus' is not known; known are A100-SXM-80, .* give --peak-flops"),
        ("", "'' is not known"),
        ("Ascend-910B", "Ascend-910B has no agreed BF16 peak: .*; give --peak-flops"),
    ],
)
def test_a_gpu_that_is_not_one_is_refused_with_what_to_give(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find_gpu(name)


def test_both_memory_sizes_of_gh200_are_rows_with_a_c2c_link_instead_of_pcie() -> None:
    small, large = find_gpu("gh200-96"), find_gpu("gh200-144")
    assert (small.hbm_bytes_per_s, large.hbm_bytes_per_s) == (4000e9, 4800e9)
    assert small.c2c_theory_bytes_per_s == 450e9
    assert small.c2c_h2d_typical_bytes_per_s == 346e9
    assert small.c2c_d2h_typical_bytes_per_s is None
    assert small.pcie_theory_bytes_per_s is None


@pytest.mark.parametrize("name", gpu_names())
def test_every_row_has_a_source_and_peaks_that_make_sense(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu.source
    assert gpu.hbm_bytes_per_s is not None
    bf16 = gpu.peak_flop_per_s("bf16")
    assert bf16 is not None
    for faster in ("fp8", "fp4"):
        peak = gpu.peak_flop_per_s(faster)
        assert peak is None or peak > bf16
    if gpu.pcie_h2d_typical_bytes_per_s is not None:
        assert gpu.pcie_theory_bytes_per_s is not None
        assert gpu.pcie_h2d_typical_bytes_per_s < gpu.pcie_theory_bytes_per_s
    assert gpu.matmul_bf16_flop_per_s is None or gpu.matmul_bf16_flop_per_s < bf16
    assert gpu.peak_flop_per_s("int3") is None
