"""What a GPU's data sheet says, and what its links are known to carry."""

from dataclasses import dataclass

# Weights kept in blocks with scales multiply at the peak of their element type.
_PEAK_OF = {
    "bf16": "bf16",
    "fp16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "int8": "int8",
    "fp4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Dense peaks (no sparsity), memory and links of one GPU; None where no source gives the number.

    Rates are per direction. `nvlink_bytes_per_s` and `xgmi_bytes_per_s` are the sum over all links of one GPU.
    `typical` rates were measured with pinned memory and large copies. `hbm_bytes` is the capacity as marketed.
    `matmul_…` is the best rate that any matrix shape was measured at, a ceiling below the peak.
    """

    name: str
    generation: str
    source: str
    bf16_flop_per_s: float | None
    fp8_flop_per_s: float | None = None
    int8_flop_per_s: float | None = None
    fp4_flop_per_s: float | None = None
    hbm_bytes_per_s: float | None = None
    hbm_bytes: int | None = None
    pcie_theory_bytes_per_s: float | None = None
    pcie_h2d_typical_bytes_per_s: float | None = None
    pcie_d2h_typical_bytes_per_s: float | None = None
    c2c_theory_bytes_per_s: float | None = None
    c2c_h2d_typical_bytes_per_s: float | None = None
    c2c_d2h_typical_bytes_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    xgmi_bytes_per_s: float | None = None
    matmul_bf16_flop_per_s: float | None = None
    matmul_fp8_flop_per_s: float | None = None

    def peak_flop_per_s(self, dtype: str) -> float | None:
        """Dense peak for bf16, fp16, fp8, fp8_block, int8, fp4, nvfp4 or mxfp4; None where the GPU has no such unit."""
        peaks = {
            "bf16": self.bf16_flop_per_s,
            "fp8": self.fp8_flop_per_s,
            "int8": self.int8_flop_per_s,
            "fp4": self.fp4_flop_per_s,
        }
        return peaks.get(_PEAK_OF.get(dtype, ""))
