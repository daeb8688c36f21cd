"""Formula and source of every number of a result, once per document."""

from collections.abc import Mapping

from kvbench.core.provenance import Origin, Provenance
from kvbench.load_vs_recompute.scenario import Scenario

_BYTES = "layer descriptors of the model; layouts of vLLM 0.33 and SGLang 0.5.23"
_FLOPS = "layer descriptors of the model; 1 MAC = 2 FLOP, forward only, no LM head"
_TIMES = "rates in inputs"

# field: (source, formula). The figure is modelled unless named in `_MEASURED`.
_FORMULAS: dict[str, tuple[str, str]] = {
    "bytes_per_token": (_BYTES, "Σ growing layers, row bytes on the busiest rank"),
    "kv_heads_per_rank": (_BYTES, "max(1, h_kv // attention_tp)"),
    "head_replicas": (_BYTES, "max(1, attention_tp / h_kv)"),
    "rank_bytes": (_BYTES, "Σ_layers row_bytes·resident(N) + state; GQA row = h_loc·(d_k + d_v)·b"),
    "other_rank_bytes": (_BYTES, "0 outside the owner's attention group under DP attention"),
    "node_bytes": (_BYTES, "Σ_ranks rank bytes"),
    "node_bytes_all_replicas": (_BYTES, "node_bytes · dp_attention"),
    "unique_bytes": (_BYTES, "bytes of one replica over all layers and heads"),
    "replicas": (_BYTES, "node_bytes / unique_bytes"),
    "host_bytes_per_token": (_BYTES, "node_bytes / tokens: host memory with a copy per rank"),
    "shared_host_bytes_per_token": (_BYTES, "unique_bytes / tokens: host memory with one shared copy"),
    "index_bytes": (_BYTES, "Σ_owning layers (d_idx + 4·⌈d_idx/128⌉)·N"),
    "state_bytes": (_BYTES, "Σ_recurrent layers (state + conv elements)·dtype bytes / TP"),
    "params_total": (_FLOPS, "embeddings + Σ_layers all weights"),
    "matmul_params_per_token": (_FLOPS, "Ψ_mm: projections + router + routed and shared experts"),
    "flops_linear": (_FLOPS, "2·N·Ψ_mm (active-params: 2·N·Ψ_active)"),
    "flops_attention": (_FLOPS, "Σ_layers 2·h_q·(d_qk + d_v)·pairs, pairs = N(N+1)/2 (active-params: N²/2)"),
    "flops_attention_absorbed": (_FLOPS, "Σ_layers 2·h·(2·r_kv + d_rope)·pairs"),
    "flops_index": (_FLOPS, "Σ_owning layers 2·n_idx·d_idx·N(N+1)/2"),
    "flops_recurrent": (_FLOPS, "Σ_recurrent layers state updates, algorithmic minimum; not in flops_total"),
    "flops_total": (_FLOPS, "flops_linear + flops_attention + flops_index"),
    "flops_per_rank": (_FLOPS, "busiest rank: divided work / ranks + what every rank repeats"),
    "flops_per_rank_div_tp": (_FLOPS, "flops_total / ranks"),
    "flops_per_rank_active_params": (_FLOPS, "(2·Ψ_active·N + 4·N²·h_q·d·L/2) / ranks"),
    "i_cache": (_FLOPS, "flops_per_rank / rank_bytes"),
    "i_hardware": (_TIMES, "peak FLOP/s / rank_bytes_per_s; mixed dtypes: flops_per_rank / floor time"),
    "tier_bytes_per_s": (_TIMES, "as given or measured, before any limit"),
    "rank_bytes_per_s": (
        _TIMES,
        "min(tier, pcie, uplink/r_u, host_total/k, storage/k); else rank_bytes / wire of the strategy",
    ),
    "concurrent_ranks": (_TIMES, "ranks loading at once: attention_tp · cp · pp, or --concurrency"),
    "utilisation_ratio": (_TIMES, "ρ = λ·(fixed + wire)"),
    "t_load_wire_s": (_TIMES, "D/B_r"),
    "t_load_fixed_s": (_TIMES, "tier latency + α_h2d"),
    "t_load_queue_s": (_TIMES, "λ·S²/(2(1-ρ))"),
    "t_load_overlap_s": (_TIMES, "wire - exposed, E_i = max(E_{i-1}, A_i) + c_i"),
    "t_load_s": (_TIMES, "queue + fixed + wire - overlap"),
    "t_suffix_s": (_TIMES, "T_recompute(suffix after the prefix), whichever way the prefix comes"),
    "most_loads_per_s": (_TIMES, "0.8 / (fixed + wire)"),
    "layer_load_s": (_TIMES, "ℓ = D/(L·B)"),
    "t_recompute_s": (_TIMES, "Σ_k F_k/(η_k·P_k) + T_comm + bubbles"),
    "t_recompute_floor_s": (_TIMES, "Σ_k F_k/P_k (η = 1, no communication), with pipeline bubbles"),
    "t_recompute_active_params_s": (_TIMES, "flops_per_rank_active_params / P (η = 1), with pipeline bubbles"),
    "t_recompute_dense_s": (_TIMES, "F_dense/(η_gemm·P)"),
    "t_recompute_moe_s": (_TIMES, "F_moe·λ_e/(η_moe·P)"),
    "t_recompute_attention_s": (_TIMES, "F_attention/(η_max·N/(N + N_half)·P)"),
    "t_recompute_index_s": (_TIMES, "F_index/(η·P_fp8)"),
    "t_recompute_comm_s": (_TIMES, "2 all-reduces per layer: 2(n-1)/n·N·hidden·2 B / bus rate"),
    "t_recompute_bubble_s": (_TIMES, "Σ_s T_s(c_1) + Σ_{j>1} max_s T_s(c_j) - max_s T_s"),
    "mfu_ratio": (_TIMES, "busiest rank: (Σ_k F_k/P_k) / t_recompute_s"),
    "break_even_bytes_per_s": (_TIMES, "B* = D/(T_recompute - T_fixed); solved with queue and overlap, ρ ≤ 0.8"),
    "smallest_useful_tokens": (_TIMES, "first N with t_load_s ≤ t_recompute_s; linear: T_fixed/(t_rec - κ/B)"),
    "suffix_break_even_tokens": (_TIMES, "smallest S with c(S) ≥ ℓ"),
    "split_tokens": (_TIMES, "x* = [-(a+κρ) + sqrt((a+κρ)² + 4b(κNρ + T0·P))]/(2b)"),
    "split_t_s": (_TIMES, "max(C(x*), T0 + κ(N-x*)/B)"),
    "split_gain": (_TIMES, "min(T_load, T_recompute) / T*"),
    "layer_split_t_s": (_TIMES, "T_recompute·(T0 + wire)/(wire + T_recompute)"),
    "ratio": (_TIMES, "t_recompute_s / t_load_s"),
    "ratio_low": (_TIMES, "T_recompute at peak / (1.36·wire + fixed)"),
    "ratio_high": (_TIMES, "T_recompute at 25 % MFU / t_load_s"),
    "flip_factor": (_TIMES, "nearest factor on bandwidth or compute that changes the verdict"),
    "flip_value": (_TIMES, "bandwidth: rank_bytes_per_s·factor; compute: t_recompute_s / factor"),
    "strategies.t_s": (_TIMES, "docs/load-vs-recompute.md, restore strategies"),
    "host_copies": (_BYTES, "replicas kept in host memory"),
    "node_d2h_bytes": (_BYTES, "host_copies · D for one store"),
    "node_h2d_bytes": (_BYTES, "copies over PCIe for one load · D, plus each rank's own state"),
    "gpu_gpu_bytes": (_BYTES, "copies received over the GPU fabric · D"),
    "l1_rank_ratio": (_BYTES, "share of a replica each GPU keeps"),
    "crossover_tokens": (_TIMES, "prefix lengths at which t_load_s = t_recompute_s"),
    "expected_s": (_TIMES, "E[T] = Σ p_i·T_i"),
    "shares.t_s": (_TIMES, "T_i of one outcome"),
    "expected_ratio": (_TIMES, "p_i·T_i / E[T]"),
}
_MEASURED_LOAD = ("rank_bytes_per_s", "t_load_wire_s", "t_load_fixed_s", "t_load_s", "layer_load_s", "tier_bytes_per_s")
_MEASURED_HERE = (
    "fixed_s",
    "bytes_per_s",
    "residual_ratio",
    "concurrency",
    "bytes",
    "seconds",
    "threads",
    "layer_indices",
    "measured_layers",
    "c0_s",
    "c1_s",
    "c2_s",
    "samples.tokens",
    "predicted_s",
    "measured_s",
    "checks.tokens",
)
_ASKED = ("tokens", "suffix_tokens", "tp", "pp", "cp", "dp_attention", "ep")


def point_origins(scenario: Scenario) -> Mapping[str, Origin]:
    """Origin of every numeric field; times are `measured` where all they rest on was measured on this host."""
    measured = _measured_load_fields(scenario)
    origins = {name: _origin(name, name in measured) for name in _FORMULAS}
    if scenario.prefill is not None:
        origins["t_recompute_s"] = Origin(
            provenance="measured",
            source="prefill of a few layers on this host, extrapolated to all layers by the fit",
            formula="overhead(N) + Σ_kinds layers·(c0 + c1·N + c2·N²)",
        )
    asked = Origin(provenance="spec", source="command line")
    origins |= dict.fromkeys(_ASKED, asked)
    catalogue = Origin(provenance="spec", source="model catalogue or config.json, named per model")
    published = ("models.published_total_params", "models.published_active_params")
    kinds = [f"layers.{kind}" for entry in scenario.entries for kind in entry.model.layer_kinds()]
    origins |= dict.fromkeys((*published, *kinds), catalogue)
    claimed = Origin(provenance="spec", source="--hit, as claimed")
    origins["probability_ratio"] = claimed
    if scenario.paths or scenario.prefill is not None:
        measured_here = Origin(provenance="measured", source="this host, raw samples kept")
        origins |= dict.fromkeys(_MEASURED_HERE, measured_here)
    return origins


def _measured_load_fields(scenario: Scenario) -> tuple[str, ...]:
    """Load times that rest on a measurement alone: no more loads at once than were timed, no queue, no suffix."""
    if not scenario.tiers or scenario.loads_per_s or any(scenario.suffixes) or scenario.limits:
        return ()
    ranks = max(scenario.concurrent_ranks or 0, *(layout.ranks for layout in scenario.layouts))
    timed = all((tier.measured_concurrency or 0) >= ranks for tier in scenario.tiers)
    return _MEASURED_LOAD if timed else ()


def _origin(name: str, measured: bool) -> Origin:
    source, formula = _FORMULAS[name]
    provenance: Provenance = "measured" if measured else "modelled"
    return Origin(provenance=provenance, source=source, formula=formula)
