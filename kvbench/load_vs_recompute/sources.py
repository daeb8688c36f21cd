"""Where rates come from: the GPU catalogue, saved measurements (`--topo`, `--probe`), then what the user typed."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench.core.errors import UsageError
from kvbench.core.gpu import Gpu
from kvbench.core.links import LinkLimits
from kvbench.core.provenance import Origin, Warning_
from kvbench.core.units import format_bandwidth
from kvbench.load_vs_recompute.scenario import LOCAL_STORAGE, SHARED_TIERS, TierRate
from kvbench.results.document import Document
from kvbench.results.host_paths import Limit, MeasuredPath

# Priors of the tiers that are modelled when nobody names one. The fixed 100 µs stands for descriptor set-up and one
# batched launch; `--measure` or `--probe` replaces all of them.
_FILE_BYTES_PER_S = 7.0e9  # one Gen4 x4 drive, read (PM1733, Mooncake SSD benchmark)
_REMOTE_BYTES_PER_S = 6.0e9  # KV pull through a connector on a 200–400 Gbit/s NIC: 5–7.5 GB/s published (agentic-kvc)
_FIXED_S = {"dram": 100e-6, "file": 200e-6, "remote": 1e-3}


def default_tiers(gpu: Gpu) -> tuple[TierRate, ...]:
    """L2, L3 and L4 of an ordinary node with this GPU, as priors."""
    host = gpu.c2c_h2d_typical_bytes_per_s or gpu.pcie_h2d_typical_bytes_per_s
    tiers = []
    if host is not None:
        source = f"typical pinned H2D of {gpu.name} (GPU catalogue), fixed 100 µs"
        tiers.append(_prior("dram", host, source))
    tiers.append(_prior("file", _FILE_BYTES_PER_S, "one Gen4 NVMe drive reads 7 GB/s (PM1733), shared by all ranks"))
    tiers.append(_prior("remote", _REMOTE_BYTES_PER_S, "published KV pull 5–7.5 GB/s through a connector, shared"))
    return tuple(tiers)


def _prior(name: str, bytes_per_s: float, source: str) -> TierRate:
    origin = Origin(provenance="modelled", source=source)
    shared = name in SHARED_TIERS
    return TierRate(name=name, bytes_per_s=bytes_per_s, latency_s=_FIXED_S[name], shared=shared, origin=origin)


def saved_paths(documents: Iterable[tuple[Path, Document[Any]]], option: str) -> tuple[MeasuredPath, ...]:
    """Load paths in saved results; a result without a `paths` field is refused by its kind."""
    return tuple(path for file, document in documents for path in _field(file, document, "paths", option))


def saved_limits(documents: Iterable[tuple[Path, Document[Any]]], option: str) -> tuple[Limit, ...]:
    """Ceilings in saved results."""
    return tuple(limit for file, document in documents for limit in _field(file, document, "limits", option))


def _field(file: Path, document: Document[Any], name: str, option: str) -> tuple[Any, ...]:
    values = getattr(document.result, name, None)
    if values is None:
        raise UsageError(
            f"{file}: a result of kind {document.kind!r} holds no {name}; {option} takes a result that does"
        )
    return tuple(values)


def measured_tiers(paths: Sequence[MeasuredPath]) -> tuple[TierRate, ...]:
    """Tiers from measured load paths; the widest concurrency measured stands for a tier."""
    best: dict[str, MeasuredPath] = {}
    for path in paths:
        if path.direction == "load" and path.concurrency >= getattr(best.get(path.tier), "concurrency", 0):
            best[path.tier] = path
    return tuple(
        TierRate(
            name=path.tier,
            bytes_per_s=path.bytes_per_s,
            latency_s=path.fixed_s,
            shared=path.tier in SHARED_TIERS,
            measured_concurrency=path.concurrency,
            destination=path.destination,
            origin=Origin(
                provenance="measured",
                source=f"{path.spec} into {path.destination}, {len(path.samples)} samples, {path.cold_evidence}",
                formula="t = fixed + bytes / B",
            ),
        )
        for path in best.values()
    )


def merged_tiers(*sources: Sequence[TierRate]) -> tuple[TierRate, ...]:
    """Tiers by name; a later source replaces an earlier one."""
    tiers: dict[str, TierRate] = {}
    for source in sources:
        tiers.update({tier.name: tier for tier in source})
    return tuple(tiers.values())


def merged_limits(*sources: Sequence[Limit]) -> tuple[Limit, ...]:
    """Limits by name; a later source replaces an earlier one."""
    return tuple({limit.name: limit for source in sources for limit in source}.values())


def link_limits(limits: Sequence[Limit], tier: TierRate) -> LinkLimits:
    """The ceilings on one tier's way; storage of the host bounds the file tier only."""
    values = {limit.name: limit.value for limit in limits}
    return LinkLimits(
        pcie=values.get("pcie"),
        uplink=values.get("uplink"),
        ranks_per_uplink=int(values.get("ranks_per_uplink", 1)),
        host_total=values.get("host_total"),
        storage_total=values.get("storage_total") if tier.name in LOCAL_STORAGE else None,
        home_socket=values.get("home_socket"),
        inter_socket=values.get("inter_socket"),
        sockets=int(values.get("sockets", 1)),
        collective=values.get("collective"),
        alpha_h2d_s=values.get("alpha_h2d", 0.0),
        alpha_collective_s=values.get("alpha_collective", 0.0),
    )


def gpu_limits(gpu: Gpu, allgather_bytes_per_s: float | None) -> tuple[Limit, ...]:
    """Ceilings the GPU itself sets: its host link at theory, and a prior for collectives."""
    limits = []
    host, kind = (
        (gpu.c2c_theory_bytes_per_s, "C2C") if gpu.c2c_theory_bytes_per_s else (gpu.pcie_theory_bytes_per_s, "PCIe")
    )
    if host is not None:
        origin = Origin(provenance="spec", source=f"{kind} theory of {gpu.name} ({gpu.source})")
        limits.append(Limit(name="pcie", value=host, origin=origin))
    if allgather_bytes_per_s is not None:
        origin = Origin(provenance="modelled", source="all-gather bus rate prior of the GPU generation")
        limits.append(Limit(name="collective", value=allgather_bytes_per_s, origin=origin))
    return tuple(limits)


def check_tier_rates(tiers: Sequence[TierRate], limits: Sequence[Limit]) -> tuple[Warning_, ...]:
    """A per-rank tier rate above the link that carries it cannot be."""
    pcie = next((limit for limit in limits if limit.name == "pcie"), None)
    if pcie is None:
        return ()
    return tuple(
        Warning_(
            code="impossible-tier-rate",
            message=(
                f"tier {tier.name} at {format_bandwidth(tier.bytes_per_s)} per rank is above its link, "
                f"{format_bandwidth(pcie.value)} ({pcie.origin.source}); the link's rate was used"
            ),
            remedy="check the unit (Gbit/s against GB/s) and whether the rate is for the whole node (add `,shared`)",
        )
        for tier in tiers
        if tier.bytes_per_s > pcie.value and not tier.shared
    )


def check_measured_tiers(tiers: Sequence[TierRate], ranks: int, *, on_gpu: bool) -> tuple[Warning_, ...]:
    """Measured rates that are used for more than was measured: other memory, or more loads at once."""
    warnings = []
    for tier in tiers:
        if on_gpu and tier.destination is not None and "cuda" not in tier.destination:
            warnings.append(
                Warning_(
                    code="measured-into-host-memory",
                    message=f"tier {tier.name} was measured into a {tier.destination}, not into the modelled GPU",
                    remedy="measure it on a host with that GPU, or compare on this host with --measure",
                )
            )
        given = "a share of the measured rate" if tier.shared else "all of the measured rate, within the known limits"
        if tier.measured_concurrency is not None and ranks > tier.measured_concurrency:
            warnings.append(
                Warning_(
                    code="measured-with-fewer-loads",
                    message=(
                        f"tier {tier.name} was measured with {tier.measured_concurrency} loads in flight, but {ranks} "
                        f"ranks load at once; each is given {given}"
                    ),
                    remedy="measure with that many loads at once, or give --limit host_total=… and storage_total=…",
                )
            )
    return tuple(warnings)
