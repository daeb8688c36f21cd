"""The GPUs kvbench knows by name, from `gpus.yaml`."""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import cast

from kvbench.catalogue.yaml_file import read_yaml
from kvbench.core.errors import UsageError
from kvbench.core.gpu import Gpu
from kvbench.core.units import GIGA, TERA

_FILE = Path(__file__).parent / "gpus.yaml"

_Row = Mapping[str, object]
_Table = Mapping[str, _Row]


def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs whose BF16 peak is known, in the order of the file."""
    return tuple(name for name, gpu in _gpus().items() if gpu.bf16_flop_per_s is not None)


def find_gpu(name: str) -> Gpu:
    """The GPU of that name without regard to case; a beginning that only one name has is enough (`h200`)."""
    gpus = _gpus()
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    exact = [known for known in gpus if known.lower() == wanted]
    matches = exact or [known for known in gpus if wanted and known.lower().startswith(wanted)]
    if len(matches) > 1:
        raise UsageError(f"GPU {name!r} could be {' or '.join(matches)}; give the full name")
    if not matches:
        raise UsageError(_unknown(name, wanted))
    gpu = gpus[matches[0]]
    if gpu.bf16_flop_per_s is None:
        raise UsageError(f"GPU {gpu.name} has no agreed BF16 peak: {gpu.source}; give --peak-flops instead")
    return gpu


def _unknown(name: str, wanted: str) -> str:
    spellings = {known.lower(): known for known in gpu_names()}
    close = [spellings[match] for match in get_close_matches(wanted[:100], spellings, n=3, cutoff=0.5)]
    meant = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(gpu_names())}."
    shown = name if len(name) <= 60 else f"{name[:57]}..."
    return f"GPU {shown!r} is not known; {meant} For any other GPU name the closest and give --peak-flops"


@cache
def _gpus() -> dict[str, Gpu]:
    tables = cast("dict[str, _Table]", read_yaml(_FILE))
    return {name: _gpu(name, row, tables) for name, row in tables["gpus"].items()}


def _gpu(name: str, row: _Row, tables: Mapping[str, _Table]) -> Gpu:
    pcie, c2c, nvlink = (_link(row, tables, key) for key in ("pcie", "c2c", "nvlink"))
    capacity = _scaled(row, "hbm_gb", GIGA)
    return Gpu(
        name=name,
        generation=cast(str, row["generation"]),
        source=cast(str, row["source"]),
        bf16_flop_per_s=_scaled(row, "bf16_tflop_per_s", TERA),
        fp8_flop_per_s=_scaled(row, "fp8_tflop_per_s", TERA),
        int8_flop_per_s=_scaled(row, "int8_tflop_per_s", TERA),
        fp4_flop_per_s=_scaled(row, "fp4_tflop_per_s", TERA),
        hbm_bytes_per_s=_scaled(row, "hbm_gb_per_s", GIGA),
        hbm_bytes=None if capacity is None else round(capacity),
        pcie_theory_bytes_per_s=_scaled(pcie, "theory_gb_per_s", GIGA),
        pcie_h2d_typical_bytes_per_s=_scaled(pcie, "h2d_typical_gb_per_s", GIGA),
        pcie_d2h_typical_bytes_per_s=_scaled(pcie, "d2h_typical_gb_per_s", GIGA),
        c2c_theory_bytes_per_s=_scaled(c2c, "theory_gb_per_s", GIGA),
        c2c_h2d_typical_bytes_per_s=_scaled(c2c, "h2d_typical_gb_per_s", GIGA),
        c2c_d2h_typical_bytes_per_s=_scaled(c2c, "d2h_typical_gb_per_s", GIGA),
        nvlink_bytes_per_s=_scaled(nvlink, "total_gb_per_s", GIGA),
        xgmi_bytes_per_s=_scaled(row, "xgmi_gb_per_s", GIGA),
        matmul_bf16_flop_per_s=_scaled(row, "matmul_bf16_tflop_per_s", TERA),
        matmul_fp8_flop_per_s=_scaled(row, "matmul_fp8_tflop_per_s", TERA),
    )


def _link(row: _Row, tables: Mapping[str, _Table], key: str) -> _Row:
    generation = cast("str | None", row.get(key))
    return {} if generation is None else tables["pcie_x16" if key == "pcie" else key][generation]


def _scaled(row: _Row, key: str, unit: float) -> float | None:
    value = cast("float | None", row.get(key))
    return None if value is None else round(value * unit, 3)
