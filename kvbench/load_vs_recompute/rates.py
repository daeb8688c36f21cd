"""FLOP per second that each kind of kernel is taken to reach, and where each number comes from."""

from dataclasses import dataclass, replace

from kvbench.core.efficiency import EfficiencyPriors, check_weight_dtype, compute_dtype, efficiency_priors
from kvbench.core.errors import UsageError
from kvbench.core.gpu import Gpu
from kvbench.core.provenance import Origin
from kvbench.core.recompute import ComputeRates
from kvbench.load_vs_recompute.scenario import Scenario
from kvbench.results.load_vs_recompute import Input

_AICONFIGURATOR = "kernel latencies collected by aiconfigurator (vLLM 0.24; A100: 0.14)"
_BUS_RATES = "8 GPUs on NVLink 4, NCCL 2.29, collected by aiconfigurator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """`used` gives T_recompute, `floor` the same work at peak; `inputs` and `notes` say what went into them.

    `collective_bytes_per_s` is the all-gather prior of the GPU's own links, which restore strategies use.
    """

    used: ComputeRates
    floor: ComputeRates
    collective_bytes_per_s: float | None
    inputs: tuple[Input, ...]
    notes: tuple[str, ...]


def model_rates(scenario: Scenario, weight_dtype: str, *, has_index: bool) -> Rates:
    """Rates for a model whose linear layers compute in `weight_dtype` on the scenario's GPU."""
    gpu = scenario.gpu
    dtype, note = compute_dtype(gpu, check_weight_dtype(weight_dtype))
    index_dtype, _ = compute_dtype(gpu, "fp8")
    peaks = {name: _peak(scenario, name) for name in (dtype, "bf16", index_dtype)}
    shown = {name: value for name, value in peaks.items() if has_index or name in (dtype, "bf16")}
    inputs = [
        Input(name=f"peak_{name}", value=value, unit="FLOP/s", origin=_peak_origin(scenario))
        for name, value in shown.items()
    ]
    priors = efficiency_priors(gpu, weight_dtype=dtype)
    floor = ComputeRates(
        dense=peaks[dtype],
        moe=peaks[dtype],
        attention_max=peaks["bf16"],
        attention_half_tokens=0.0,
        index=peaks[index_dtype],
        expert_imbalance=1.0,
    )
    if scenario.efficiency == "auto":
        used = replace(
            floor,
            dense=floor.dense * priors.gemm_ratio,
            moe=floor.moe * priors.moe_ratio,
            attention_max=floor.attention_max * priors.attention_max_ratio,
            attention_half_tokens=priors.attention_half_tokens,
            index=floor.index * priors.attention_max_ratio,
            allreduce_bytes_per_s=priors.allreduce_bytes_per_s,
            allgather_bytes_per_s=priors.allgather_bytes_per_s,
            expert_imbalance=scenario.expert_imbalance,
        )
        inputs += _prior_inputs(priors, dtype)
        notes = (*((note,) if note else ()), *priors.notes)
    else:
        mfu = scenario.efficiency
        used = replace(
            floor,
            dense=floor.dense * mfu,
            moe=floor.moe * mfu,
            attention_max=floor.attention_max * mfu,
            index=floor.index * mfu,
            expert_imbalance=scenario.expert_imbalance,
        )
        inputs.append(
            Input(name="mfu", value=mfu, unit="ratio", origin=_typed("--efficiency, communication inside it"))
        )
        notes = (note,) if note else ()
    if scenario.expert_imbalance != 1:
        origin = _typed("busiest expert rank over the mean: --expert-imbalance, or the prior 1.2 under --ep")
        inputs.append(Input(name="expert_imbalance", value=scenario.expert_imbalance, unit="ratio", origin=origin))
    return Rates(
        used=used,
        floor=floor,
        collective_bytes_per_s=priors.allgather_bytes_per_s,
        inputs=tuple(inputs),
        notes=notes,
    )


def _peak(scenario: Scenario, dtype: str) -> float:
    peak = scenario.peak_flop_per_s or scenario.gpu.peak_flop_per_s(dtype)
    if peak is None:
        raise UsageError(
            f"{scenario.gpu.name} has no published {dtype} peak; give --peak-flops, like --peak-flops 989e12"
        )
    return peak


def _peak_origin(scenario: Scenario) -> Origin:
    if scenario.peak_flop_per_s is not None:
        return _typed("--peak-flops")
    return Origin(provenance="spec", source=f"{scenario.gpu.name}: {scenario.gpu.source}")


def _typed(source: str) -> Origin:
    return Origin(provenance="modelled", source=source)


def _prior_inputs(priors: EfficiencyPriors, dtype: str) -> list[Input]:
    rows = (
        (f"gemm_efficiency_{dtype}", "gemm_ratio", "ratio", _AICONFIGURATOR, "T = F_dense/(η·P)"),
        (f"moe_efficiency_{dtype}", "moe_ratio", "ratio", _AICONFIGURATOR, "T = F_moe·λ_e/(η·P)"),
        ("attention_efficiency_max", "attention_max_ratio", "ratio", _AICONFIGURATOR, "η = η_max·N/(N + N_half)"),
        ("attention_half_tokens", "attention_half_tokens", "tokens", _AICONFIGURATOR, "η = η_max·N/(N + N_half)"),
        ("allreduce_bus_rate", "allreduce_bytes_per_s", "B/s", _BUS_RATES, "t = 2(n-1)/n·bytes / rate"),
        ("allgather_bus_rate", "allgather_bytes_per_s", "B/s", _BUS_RATES, "t = (n-1)/n·bytes / rate"),
    )
    return [
        Input(
            name=name,
            value=getattr(priors, field),
            unit=unit,
            origin=Origin(provenance="modelled", source=priors.substitutions.get(field, source), formula=formula),
        )
        for name, field, unit, source, formula in rows
        if getattr(priors, field) is not None
    ]


def gpu_label(gpu: Gpu, peak_flop_per_s: float | None) -> str:
    """The GPU's name, or what stands for it when a peak was typed."""
    return gpu.name if peak_flop_per_s is None else f"{gpu.name} at --peak-flops"
