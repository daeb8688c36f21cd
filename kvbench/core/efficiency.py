"""Share of its peak that a GPU reaches in prefill, as priors: a measurement replaces every one of them.

From kernel latencies that ai-dynamo/aiconfigurator at 095f58a collected (vLLM 0.24.0 on H100, H200 and B200, 0.14.0 on
A100; batch 1, causal, BF16, head width 128). Attention over N tokens is fitted as η = η_max·N / (N + N_half).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.core.errors import UsageError
from kvbench.core.gpu import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyPriors:
    """Shares of peak for GEMMs, fused experts and attention, and bus rates of the two collectives that prefill uses.

    `substitutions` say, per field, which number was taken over from another GPU or dtype, scaled, or assumed.
    """

    gemm_ratio: float
    moe_ratio: float
    attention_max_ratio: float
    attention_half_tokens: float
    allreduce_bytes_per_s: float | None
    allgather_bytes_per_s: float | None
    substitutions: Mapping[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Each substitution once."""
        return tuple(dict.fromkeys(self.substitutions.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """One GPU that was measured: shares of peak by dtype of the weights."""

    gemm: dict[str, float]
    moe: dict[str, float]
    attention_max_ratio: float
    attention_half_tokens: float
    moe_of: str | None = None


# GEMM with at least 1,024 rows; H100 BF16 72–85 %, fp8 44–70 %, block fp8 20–64 % measured; H200 within 5 points.
_HOPPER_GEMM = {"bf16": 0.75, "fp8": 0.60, "fp8_block": 0.55, "nvfp4": 0.45}
# Fused experts from 4,096 tokens on, EP 1: H100 BF16 35–52 %, H100 and H200 block fp8 21–31 %.
_HOPPER_MOE = {"bf16": 0.45, "fp8_block": 0.27}
_MEASURED = {
    "H100-SXM": _Measured(gemm=_HOPPER_GEMM, moe=_HOPPER_MOE, attention_max_ratio=0.74, attention_half_tokens=1900.0),
    "H200-SXM": _Measured(gemm=_HOPPER_GEMM, moe=_HOPPER_MOE, attention_max_ratio=0.72, attention_half_tokens=1900.0),
    # BF16 63–80 %, fp8 28–54 %, block fp8 4–58 %, nvfp4 24–52 %; experts were not collected.
    "B200-SXM": _Measured(
        gemm={"bf16": 0.68, "fp8": 0.45, "fp8_block": 0.45, "nvfp4": 0.42},
        moe=_HOPPER_MOE,
        attention_max_ratio=0.66,
        attention_half_tokens=3400.0,
        moe_of="Hopper",
    ),
    # BF16 84–94 %; experts 23–35 %.
    "A100-SXM-80": _Measured(
        gemm={"bf16": 0.85}, moe={"bf16": 0.30}, attention_max_ratio=0.62, attention_half_tokens=1000.0
    ),
}
_STAND_INS = {
    "A100-PCIe-80": "A100-SXM-80",
    "B300-SXM": "B200-SXM",
    "GB200": "B200-SXM",
    "GB300": "B200-SXM",
    "GH200-144": "H200-SXM",
}
_CLOSEST_DTYPES = {
    "bf16": (),
    "fp16": ("bf16",),
    "fp8": ("fp8_block", "bf16"),
    "fp8_block": ("fp8", "bf16"),
    "int8": ("fp8", "fp8_block", "bf16"),
    "fp4": ("nvfp4", "fp8_block", "bf16"),
    "nvfp4": ("fp8_block", "bf16"),
    "mxfp4": ("nvfp4", "fp8_block", "bf16"),
}

# Bus rates of 8 GPUs on NVLink 4, 450 GB/s per GPU and direction (messages of hundreds of MB).
_NVLINK4_BYTES_PER_S = 450e9
_NVLINK4_ALLREDUCE_BYTES_PER_S = 416e9
_NVLINK4_ALLGATHER_BYTES_PER_S = 309e9
# All-reduce of 8 MI300X reached 312.9 GB/s of 448 GB/s xGMI (stas00/ml-engineering at 744d01e).
_XGMI_BUS_RATIO = 312.9 / 448
_PCIE_BUS_RATIO = 0.8


def efficiency_priors(gpu: Gpu, *, weight_dtype: str) -> EfficiencyPriors:
    """Priors for a GPU and the dtype that its linear layers compute in, with a note for each that is not its own."""
    row = gpu.name if gpu.name in _MEASURED else _STAND_INS.get(gpu.name, "H100-SXM")
    measured = _MEASURED[row]
    check_weight_dtype(weight_dtype)
    gemm, gemm_note = _of_dtype(measured.gemm, weight_dtype, "GEMM")
    ceiling = _matmul_ceiling(gpu, weight_dtype)
    if ceiling is not None and ceiling < gemm:
        gemm, gemm_note = ceiling, f"GEMM efficiency is the best matmul measured on {gpu.name}: {ceiling:.0%} of peak"
    moe, moe_note = _of_dtype(measured.moe, weight_dtype, "expert")
    if measured.moe_of:
        moe_note = f"expert efficiency was measured on {measured.moe_of}, not on {gpu.name}"
    allreduce, allgather, bus_note = _bus_rates(gpu)
    stand_in = None if row == gpu.name else f"efficiencies of {row} stand in for {gpu.name}, which was not measured"
    substitutions = {
        "gemm_ratio": gemm_note or stand_in,
        "moe_ratio": moe_note or stand_in,
        "attention_max_ratio": stand_in,
        "attention_half_tokens": stand_in,
        "allreduce_bytes_per_s": bus_note,
        "allgather_bytes_per_s": bus_note,
    }
    return EfficiencyPriors(
        gemm_ratio=gemm,
        moe_ratio=moe,
        attention_max_ratio=measured.attention_max_ratio,
        attention_half_tokens=measured.attention_half_tokens,
        allreduce_bytes_per_s=allreduce,
        allgather_bytes_per_s=allgather,
        substitutions={name: note for name, note in substitutions.items() if note},
    )


def check_weight_dtype(name: str) -> str:
    """The name, if it is a dtype that linear layers compute in; else it is refused with the list."""
    if name not in _CLOSEST_DTYPES:
        raise UsageError(f"weight dtype {name!r} is not known; use one of {', '.join(_CLOSEST_DTYPES)}")
    return name


def _matmul_ceiling(gpu: Gpu, dtype: str) -> float | None:
    """Share of the peak that the best measured matmul of this dtype reached, None where it was not measured."""
    best = {"bf16": gpu.matmul_bf16_flop_per_s, "fp16": gpu.matmul_bf16_flop_per_s, "fp8": gpu.matmul_fp8_flop_per_s}
    rate, peak = best.get(dtype), gpu.peak_flop_per_s(dtype)
    return None if rate is None or peak is None else rate / peak


def _of_dtype(ratios: dict[str, float], dtype: str, kernel: str) -> tuple[float, str | None]:
    if dtype in ratios:
        return ratios[dtype], None
    closest = next(other for other in _CLOSEST_DTYPES[dtype] if other in ratios)
    if dtype == "fp16":  # the same tensor cores at the same rate
        return ratios[closest], None
    return ratios[closest], f"{kernel} efficiency of {dtype} was not measured; that of {closest} stands in"


def _bus_rates(gpu: Gpu) -> tuple[float | None, float | None, str | None]:
    """Bus rates of all-reduce and all-gather within one node, and how they were come by."""
    if gpu.nvlink_bytes_per_s is not None:
        scale = gpu.nvlink_bytes_per_s / _NVLINK4_BYTES_PER_S
        note = None if scale == 1 else f"collective rates are those of 8 GPUs on NVLink 4, scaled by {scale:.3g}"
        return _NVLINK4_ALLREDUCE_BYTES_PER_S * scale, _NVLINK4_ALLGATHER_BYTES_PER_S * scale, note
    if gpu.xgmi_bytes_per_s is not None:
        rate = gpu.xgmi_bytes_per_s * _XGMI_BUS_RATIO
        return rate, rate, "collective rates are the all-reduce share that 8 MI300X reach of their xGMI links"
    if gpu.pcie_h2d_typical_bytes_per_s is not None:
        rate = gpu.pcie_h2d_typical_bytes_per_s * _PCIE_BUS_RATIO
        return rate, rate, f"collective rates are assumed: {_PCIE_BUS_RATIO:g} of the typical PCIe rate, no NVLink"
    return None, None, f"no link of {gpu.name} is known, so collectives are left out"


def compute_dtype(gpu: Gpu, weight_dtype: str) -> tuple[str, str | None]:
    """What the linear layers compute in on this GPU: the dtype of the weights, or BF16 where it has no unit for it."""
    if gpu.peak_flop_per_s(weight_dtype) is not None:
        return weight_dtype, None
    return "bf16", f"{gpu.name} has no {weight_dtype} peak; its linear layers are counted at BF16 rate"
