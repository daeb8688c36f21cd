"""Looks up what data sheets and named measurements say about kinds of links and GPU products (anchors.yaml)."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.core.errors import UsageError
from kvbench.core.graph import LinkRates, Rate
from kvbench.core.pcie import generation, pcie_bytes_per_s
from kvbench.core.provenance import Origin, Provenance
from kvbench.core.units import format_bandwidth

_FILE = Path(__file__).with_name("anchors.yaml")
_DIMM = re.compile(r"(\d{1,2})x(DDR[45])-(\d{4,5})(?:/(\d{1,2}))?", re.IGNORECASE)
LANE_GT = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


@cache
def anchors() -> Mapping[str, Any]:
    """The parsed file."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loaded: Mapping[str, Any] = yaml.load(_FILE.read_text(encoding="utf-8"), Loader=loader)
    return loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAnchor:
    """What is known of a GPU product; None: not known."""

    name: str
    source: str
    pcie: int | None = None
    nvlink: int | None = None
    links: int | None = None
    c2c: str | None = None
    xgmi: str | None = None
    both: str | None = None
    hbm: float | None = None
    copy_engines: int | None = None
    assumed: bool = False

    @property
    def provenance(self) -> Provenance:
        """`spec` where an input names the product; `modelled` where a person did and no input confirms it."""
        return "modelled" if self.assumed else "spec"


def gpu_anchor(product: str) -> GpuAnchor | None:
    """The row whose pattern the product name holds, such as `NVIDIA H100 80GB HBM3` or `h100`."""
    for row in anchors()["gpus"]:
        if re.search(row["match"], product, re.IGNORECASE):
            return GpuAnchor(**{name: value for name, value in row.items() if name != "match"})
    return None


def named_gpu(text: str) -> GpuAnchor:
    """The GPU a person named with --gpu."""
    found = gpu_anchor(text.replace("-", " "))
    if found is None:
        known = ", ".join(row["name"] for row in anchors()["gpus"])
        raise UsageError(f"--gpu {text!r} is not a product in kvbench/topo/anchors.yaml; it has {known}")
    return replace(found, assumed=True)


def _rate(
    value: float | None, source: str, formula: str | None = None, *, provenance: Provenance = "spec"
) -> Rate | None:
    if value is None:
        return None
    return Rate(bytes_per_s=value, origin=Origin(provenance=provenance, source=source, formula=formula))


def pcie_rates(
    lane_gt_per_s: float, width: int, *, origin: Origin, both: str | None = None, toward_cpu: bool = False
) -> LinkRates:
    """Wire rate of a PCIe link and what copies of that generation reach, scaled to its width.

    `toward_cpu` picks the device-to-host figures. On a link that is only assumed every figure is `modelled`.
    """
    row = anchors()["pcie_x16"].get(generation(lane_gt_per_s), {})
    which = "d2h" if toward_cpu else "h2d"
    typical = row.get(which)
    scaled = None if width == 16 else f"x16 figure · {width}/16"
    kept = anchors()["pcie_both_ways"].get(both, {}) if both and width == 16 else {}
    told: Provenance = "modelled" if origin.provenance == "modelled" else "spec"
    source = f"{row.get('source', '')}; the link is assumed" if told == "modelled" else row.get("source", "")
    return LinkRates(
        theory=Rate(
            bytes_per_s=pcie_bytes_per_s(lane_gt_per_s, width),
            origin=Origin(provenance=origin.provenance, source=origin.source, formula="lanes · GT/s · code rate / 8"),
        ),
        typical=_rate(None if typical is None else typical * width / 16, source, scaled, provenance=told),
        while_both=_rate(kept.get(which), kept.get("source", ""), provenance=told),
    )


def nvlink_rates(version: int | None, count: int, *, provenance: Provenance = "spec") -> LinkRates:
    """`count` bonded NVLinks of one generation; without the generation nothing is known."""
    row = anchors()["nvlink"].get(version)
    if row is None:
        return LinkRates(absent="not measured, and the NVLink generation is unknown; name the GPU with --gpu")
    typical = None if row["typical"] is None else row["typical"] * count
    return LinkRates(
        theory=_rate(row["theory"] * count, row["source"], f"{count} links", provenance=provenance),
        typical=_rate(typical, row["source"], f"{count} links", provenance=provenance),
    )


def c2c_rates(name: str, *, toward_cpu: bool, provenance: Provenance = "spec") -> LinkRates:
    """The chip-to-chip link of a Grace board."""
    row = anchors()["c2c"][name]
    which = "d2h" if toward_cpu else "h2d"
    return LinkRates(
        theory=_rate(row["theory"], row["source"], provenance=provenance),
        typical=_rate(row[which], row["source"], provenance=provenance),
        while_both=_rate(row[f"both_{which}"], row["source"], provenance=provenance),
    )


def xgmi_rates(name: str | None, *, provenance: Provenance = "spec") -> LinkRates:
    """One xGMI link between two GPUs."""
    row = anchors()["xgmi"].get(name)
    if row is None:
        return LinkRates(absent="not measured, and the GPU model is unknown; name the GPU with --gpu")
    return LinkRates(
        theory=_rate(row["theory"], row["source"], provenance=provenance),
        typical=_rate(row["typical"], row["source"], provenance=provenance),
    )


def socket_rates(cpu_model: str | None) -> LinkRates:
    """The link between two sockets: no rate, but what NCCL plans with for the CPU family, in words.

    A planning constant below the wire rate is neither a ceiling nor what such a link reaches.
    """
    for row in anchors()["socket"] if cpu_model else ():
        if re.search(row["match"], cpu_model or "", re.IGNORECASE):
            plan = format_bandwidth(row["planned"])
            return LinkRates(absent=f"not measured; NCCL plans with {plan}, below the wire rate ({row['source']})")
    return LinkRates(absent=f"not measured, and no figure for the CPU model ({cpu_model or 'not in the input'})")


def nvme_read(lane_gt_per_s: float, width: int) -> Rate | None:
    """What an NVMe disk of that generation was measured to read."""
    row = anchors()["nvme_x4"].get(generation(lane_gt_per_s))
    return None if row is None or width != 4 else _rate(row["read"], row["source"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DramSpec:
    """The memory of one socket: channels and data rate, as in `8xDDR5-4800`.

    `nodes` is how many NUMA nodes share these channels, as in `8xDDR5-4800/4`; None: not said.
    """

    channels: int
    transfers_per_s: float
    text: str
    nodes: int | None = None

    @property
    def bytes_per_s(self) -> float:
        width: int = anchors()["dram_channel"]["bytes_per_transfer"]
        return self.channels * self.transfers_per_s * width


def parse_dram(text: str) -> DramSpec:
    """`8xDDR5-4800`: eight channels per socket at 4800 MT/s; `8xDDR5-4800/4`: shared by four NUMA nodes."""
    match = _DIMM.fullmatch(text.strip())
    if match is None or int(match[1]) == 0 or (match[4] is not None and int(match[4]) == 0):
        raise UsageError(f"--dram {text!r} is not like 8xDDR5-4800 (channels per socket, type, MT/s)")
    nodes = int(match[4]) if match[4] is not None else None
    return DramSpec(channels=int(match[1]), transfers_per_s=int(match[3]) * 1e6, text=text.strip(), nodes=nodes)
