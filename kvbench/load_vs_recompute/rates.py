"""FLOP per second that each kind of kernel is taken to reach, and where each number comes from."""

from dataclasses import dataclass

from kvbench.core.efficiency import EfficiencyPriors, compute_dtype, efficiency_priors
from kvbench.core.errors import UsageError
from kvbench.core.gpu import Gpu
from kvbench.core.provenance import Origin
from kvbench.core.recompute import ComputeRates
from kvbench.load_vs_recompute.scenario import Scenario
from kvbench.results.load_vs_recompute import Input


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """`used` gives T_recompute, `floor` the same work at peak; `inputs` and `notes` say what went into them."""

    used: ComputeRates
    floor: ComputeRates
    inputs: tuple[Input, ...]
    notes: tuple[str, ...]


def model_rates(scenario: Scenario, weight_dtype: str) -> Rates:
    """Rates for a model whose linear layers compute in `weight_dtype` on the scenario's GPU."""
    gpu = scenario.gpu
    dtype, note = compute_dtype(gpu, weight_dtype)
    weights, bf16 = _peak(scenario, dtype), _peak(scenario, "bf16")
    index_dtype, _ = compute_dtype(gpu, "fp8")
    index = _peak(scenario, index_dtype)
    floor = ComputeRates(dense=weights, moe=weights, attention_max=bf16, attention_half_tokens=0.0, index=index)
    peaks = tuple(
        Input(name=f"peak_{name}", value=value, unit="FLOP/s", origin=_peak_origin(scenario))
        for name, value in {dtype: weights, "bf16": bf16, index_dtype: index}.items()
    )
    notes = (note,) if note else ()
    if scenario.efficiency != "auto":
        mfu = scenario.efficiency
        origin = Origin(provenance="modelled", source="--efficiency, communication inside it")
        share = Input(name="mfu", value=mfu, unit="ratio", origin=origin)
        return Rates(used=_times(floor, mfu), floor=floor, inputs=(*peaks, share), notes=notes)
    priors = efficiency_priors(gpu, weight_dtype=dtype)
    used = ComputeRates(
        dense=weights * priors.gemm_ratio,
        moe=weights * priors.moe_ratio,
        attention_max=bf16 * priors.attention_max_ratio,
        attention_half_tokens=priors.attention_half_tokens,
        index=index * priors.attention_max_ratio,
        allreduce_bytes_per_s=priors.allreduce_bytes_per_s,
        allgather_bytes_per_s=priors.allgather_bytes_per_s,
        expert_imbalance=scenario.expert_imbalance,
    )
    inputs = (*peaks, *_prior_inputs(priors, scenario.expert_imbalance))
    return Rates(used=used, floor=floor, inputs=inputs, notes=(*notes, *priors.notes))


def _peak(scenario: Scenario, dtype: str) -> float:
    peak = scenario.peak_flop_per_s or scenario.gpu.peak_flop_per_s(dtype)
    if peak is None:
        raise UsageError(
            f"{scenario.gpu.name} has no published {dtype} peak; give --peak-flops, like --peak-flops 989e12"
        )
    return peak


def _peak_origin(scenario: Scenario) -> Origin:
    if scenario.peak_flop_per_s is not None:
        return Origin(provenance="spec", source="--peak-flops")
    return Origin(provenance="spec", source=f"{scenario.gpu.name}: {scenario.gpu.source}")


def _times(rates: ComputeRates, factor: float) -> ComputeRates:
    return ComputeRates(
        dense=rates.dense * factor,
        moe=rates.moe * factor,
        attention_max=rates.attention_max * factor,
        attention_half_tokens=0.0,
        index=rates.index * factor,
    )


def _prior_inputs(priors: EfficiencyPriors, imbalance: float) -> tuple[Input, ...]:
    values = (
        ("gemm_efficiency", priors.gemm_ratio, "ratio"),
        ("moe_efficiency", priors.moe_ratio, "ratio"),
        ("attention_efficiency_max", priors.attention_max_ratio, "ratio"),
        ("attention_half_tokens", priors.attention_half_tokens, "tokens"),
        ("allreduce_bus_rate", priors.allreduce_bytes_per_s, "B/s"),
        ("allgather_bus_rate", priors.allgather_bytes_per_s, "B/s"),
        ("expert_imbalance", imbalance, "ratio"),
    )
    origin = Origin(
        provenance="modelled",
        source="; ".join(priors.notes) or "kernel latencies collected by aiconfigurator (vLLM 0.24)",
        formula="T = Σ F_k/(η_k·P_k) + T_comm; attention η = η_max·N/(N + N_half)",
    )
    return tuple(Input(name=n, value=v, unit=u, origin=origin) for n, v, u in values if v is not None)


def gpu_label(gpu: Gpu, peak_flop_per_s: float | None) -> str:
    """The GPU's name, or what stands for it when a peak was typed."""
    return gpu.name if peak_flop_per_s is None else f"{gpu.name} at --peak-flops"
