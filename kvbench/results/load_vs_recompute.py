"""The saved answer of `kvbench load-vs-recompute`: one flat point per model, layout, prefix length and tier.

Field names follow the golden vectors. Points are flat so that `jq`, pandas and a spreadsheet can read them without
joins; what is equal for all points (GPU, efficiencies, limits) stands once in `inputs`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.core.claims import MixShare
from kvbench.core.compare import Verdict
from kvbench.core.provenance import Origin
from kvbench.core.restore import Restore
from kvbench.results.host_paths import MeasuredPath
from kvbench.results.prefill import PrefillMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One number that went in: a rate, an efficiency, a limit. `unit` is the base unit it is in."""

    name: str
    value: float
    unit: str
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One prefix in one tier on one layout. Byte and FLOP figures of a rank are those of the busiest rank.

    `node_bytes` sums over all ranks of the instance, `unique_bytes` counts each cached byte once, `replicas` is their
    ratio. `flops_per_rank` counts what every rank repeats; `flops_per_rank_div_tp` is the plain division.
    `t_load_s` is what the request waits for: queue + fixed + wire - overlap; computing the suffix takes `t_suffix_s`
    whichever way the prefix comes. `t_recompute_floor_s` is at peak FLOP/s.
    `rank_bytes_per_s` is the rate at which a rank's whole cache arrives under `strategy`. A field is None where it does
    not apply: `flops_attention_absorbed` without MLA, `mfu_ratio` when measured, load times on a path always busy.
    """

    model: str
    tokens: int
    suffix_tokens: int
    layout: str
    tp: int
    pp: int
    cp: int
    cp_mode: str
    dp_attention: int
    ep: int
    kv_dtype: str
    tier: str
    strategy: str

    bytes_per_token: float
    kv_heads_per_rank: int | None
    head_replicas: int | None
    rank_bytes: int
    other_rank_bytes: int
    node_bytes: int
    node_bytes_all_replicas: int
    unique_bytes: int
    replicas: float
    host_bytes_per_token: float
    shared_host_bytes_per_token: float
    index_bytes: int
    state_bytes: int

    params_total: int
    matmul_params_per_token: int
    flops_mode: Literal["exact", "active-params"]
    flops_linear: int
    flops_attention: int
    flops_attention_absorbed: int | None
    flops_index: int
    flops_recurrent: int
    flops_total: int
    flops_per_rank: int
    flops_per_rank_div_tp: int
    flops_per_rank_active_params: int | None

    i_cache: float | None
    i_hardware: float | None

    tier_bytes_per_s: float
    rank_bytes_per_s: float
    limited_by: str
    concurrent_ranks: int
    utilisation_ratio: float
    t_load_wire_s: float
    t_load_fixed_s: float
    t_load_queue_s: float | None
    t_load_overlap_s: float
    t_load_s: float | None
    t_suffix_s: float
    most_loads_per_s: float
    layer_load_s: float

    t_recompute_s: float
    t_recompute_floor_s: float | None
    t_recompute_active_params_s: float | None
    t_recompute_dense_s: float | None
    t_recompute_moe_s: float | None
    t_recompute_attention_s: float | None
    t_recompute_index_s: float | None
    t_recompute_comm_s: float | None
    t_recompute_bubble_s: float | None
    mfu_ratio: float | None

    break_even_bytes_per_s: float | None
    smallest_useful_tokens: int | None
    suffix_break_even_tokens: int | None
    split_tokens: int
    split_t_s: float | None
    split_gain: float
    layer_split_t_s: float | None

    verdict: Verdict
    verdict_without_split: Verdict
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    sure: bool
    flip_input: str | None
    flip_factor: float | None
    flip_value: float | None
    flip_verdict: Verdict | None

    strategies: tuple[Restore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """T_load and T_recompute over prefix length for one model, layout and tier, and where they cross."""

    model: str
    layout: str
    kv_dtype: str
    tier: str
    suffix_tokens: int
    tokens: tuple[int, ...]
    t_load_s: tuple[float, ...]
    t_recompute_s: tuple[float, ...]
    split_t_s: tuple[float, ...]
    crossover_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A combination of the sweep that cannot exist, or a tier that could not be measured, with the reason."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The model behind some points: parameters, layers by kind, and where its shape comes from."""

    model: str
    hf: str | None
    source: str
    params_total: int
    params_note: str | None
    published_total_params: float | None
    published_active_params: float | None
    layers: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTime:
    """E[T] = Σ p_i·T_i of one look-up over a claimed mix of outcomes, with each outcome's part."""

    model: str
    tokens: int
    layout: str
    expected_s: float
    shares: tuple[MixShare, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Predicted against measured on this host, at a prefix length that no fit has seen."""

    what: str
    tokens: int
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVsRecomputeResult:
    """The answer: points, curves, what went in, and what was measured here where `--measure` ran."""

    KIND: ClassVar[str] = "load-vs-recompute"
    SCHEMA_VERSION: ClassVar[int] = 1

    gpu: str
    efficiency: str
    models: tuple[ModelSummary, ...]
    inputs: tuple[Input, ...]
    points: tuple[Point, ...]
    curves: tuple[Curve, ...]
    expected_times: tuple[ExpectedTime, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    measured_paths: tuple[MeasuredPath, ...] = ()
    measured_prefill: PrefillMeasurement | None = None
    checks: tuple[Check, ...] = ()
