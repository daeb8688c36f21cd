"""Runs a scenario: every model × layout × tier × prefix length, with what to doubt about the result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import isfinite

from kvbench.catalogue.huggingface import is_known
from kvbench.catalogue.models import CatalogueEntry
from kvbench.core.claims import (
    check_bytes_per_token,
    check_request_rate,
    check_shares,
    check_slow_hits,
    check_tail,
    expected_time_s,
    mix,
)
from kvbench.core.compare import MAX_UTILISATION
from kvbench.core.errors import LayoutError, UsageError
from kvbench.core.kv_format import KvFormat
from kvbench.core.layers import RecurrentState
from kvbench.core.layout import CacheLayout, Parallelism, check_parallelism
from kvbench.core.provenance import Origin, Warning_
from kvbench.core.recompute import RecomputeModel, comm_s_per_token
from kvbench.core.work import active_params_terms, divided_terms, stage_terms
from kvbench.load_vs_recompute.origins import point_origins
from kvbench.load_vs_recompute.rates import Rates, gpu_label, model_rates
from kvbench.load_vs_recompute.scenario import Scenario, check_scenario
from kvbench.load_vs_recompute.series import RecomputeTime, Series, active_params
from kvbench.load_vs_recompute.sources import (
    check_measured_tiers,
    check_tier_rates,
    gpu_limits,
    link_limits,
    merged_limits,
)
from kvbench.results.host_paths import Limit
from kvbench.results.load_vs_recompute import (
    Check,
    Curve,
    ExpectedTime,
    Input,
    LoadVsRecomputeResult,
    ModelSummary,
    Point,
    Skipped,
)
from kvbench.results.prefill import PrefillMeasurement

GPUS_PER_NODE = 8  # of an HGX board, the usual NVLink domain; NVL72 racks hold more


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result with the doubts and origins that go into its document."""

    result: LoadVsRecomputeResult
    warnings: tuple[Warning_, ...]
    provenance: Mapping[str, Origin]
    interrupted: bool

    @property
    def found_impossible(self) -> bool:
        """Whether an input contradicts the model, the machine or itself."""
        return any(warning.code.startswith("impossible-") for warning in self.warnings)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRecompute:
    """T_recompute from a fit measured on this host; tokens after a prefix cost the difference of two prefills."""

    prefill: PrefillMeasurement

    @property
    def start_s(self) -> float:
        """The fit's constant: what a prefill of hardly any tokens takes."""
        return self.prefill.overhead.c0_s + sum(kind.num_layers * kind.cost.c0_s for kind in self.prefill.layers)

    def seconds(self, new: int, cached: int = 0) -> float:
        """Seconds of `new` tokens after `cached`."""
        if new == 0:
            return 0.0
        before_s = self.prefill.seconds(cached) - self.start_s if cached else 0.0
        return self.prefill.seconds(cached + new) - before_s

    def stage_seconds(self, new: int, cached: int = 0) -> float:
        """The same: one device has one stage."""
        return self.seconds(new, cached)


def load_vs_recompute(scenario: Scenario, *, progress: Callable[[str], None] = lambda _: None) -> Answer:
    """Compare loading with recomputing for every point of the scenario; a combination that cannot exist is skipped.

    Ctrl-C keeps the points done so far and marks the answer `interrupted`.
    """
    check_scenario(scenario)
    run = _Run(scenario)
    interrupted = False
    try:
        run.all_points(progress)
    except KeyboardInterrupt:
        interrupted = True
    if not run.points and run.skipped and not interrupted:
        raise UsageError(run.skipped[0].reason)
    return run.answer(interrupted)


class _Run:
    """Collects points, so that an interrupted sweep keeps what it has."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.points: list[Point] = []
        self.curves: list[Curve] = []
        self.skipped: list[Skipped] = []
        self.expected: list[ExpectedTime] = []
        self.warnings: dict[tuple[str, str], Warning_] = {}
        self.inputs: dict[tuple[str, float], Input] = {}

    def all_points(self, progress: Callable[[str], None]) -> None:
        """Every combination, model by model."""
        scenario = self.scenario
        self.warn(*check_shares(scenario.hit_shares) if scenario.hit_shares else ())
        for entry in scenario.entries:
            progress(f"comparing {entry.model.name}")
            self.check_model(entry)
            for parallelism, kv_format in product(scenario.layouts, scenario.kv_formats):
                try:
                    check_parallelism(entry.model, parallelism)
                    self.series_points(self.series(entry, parallelism, kv_format))
                except LayoutError as error:
                    what = f"{entry.model.name} {parallelism.label()} {kv_format.kv_dtype}"
                    self.skipped.append(Skipped(what=what, reason=str(error)))

    def series_points(self, all_series: list[Series]) -> None:
        """All tiers and prefix lengths of one model, layout and cache format."""
        for series in all_series:
            for suffix_tokens in self.scenario.suffixes:
                first = len(self.points)
                self.points.extend(series.point(tokens, suffix_tokens) for tokens in self.scenario.tokens)
                self.curves.append(series.curve(self.scenario.tokens, suffix_tokens))
                self.check_points(series, self.points[first:])
        self.mix(all_series)

    def series(self, entry: CatalogueEntry, parallelism: Parallelism, kv_format: KvFormat) -> list[Series]:
        """One series per tier, sharing everything else."""
        scenario = self.scenario
        layout = CacheLayout(entry.model, parallelism, kv_format)
        if scenario.flops_mode == "active-params":
            terms = active_params_terms(entry.model, active_params(scenario, entry))
            stages = (divided_terms(terms, parallelism.ranks),) * parallelism.pp
        else:
            stages = stage_terms(entry.model, parallelism, replicated_work=scenario.rank_work == "exact")
        recompute: RecomputeTime
        floor: RecomputeModel | None = None
        limits = scenario.limits
        if scenario.prefill is not None:
            recompute = MeasuredRecompute(prefill=scenario.prefill)
        else:
            rates = model_rates(
                scenario,
                scenario.weight_dtype or entry.model.weight_dtype,
                has_index=any(terms.index for terms in stages),
            )
            self.note(rates)
            recompute = RecomputeModel(
                stages=stages,
                comm_s_per_token=comm_s_per_token(entry.model, layout, rates.used),
                rates=rates.used,
                chunk_tokens=scenario.chunk_tokens,
            )
            floor = replace(recompute, rates=rates.floor, comm_s_per_token=(0.0,) * parallelism.pp)
            limits = merged_limits(gpu_limits(scenario.gpu, rates.collective_bytes_per_s), scenario.limits)
            self.warn(*check_tier_rates(scenario.tiers, limits))
        self.add_inputs(*(_limit_input(limit) for limit in limits))
        return [
            Series(
                scenario=scenario,
                entry=entry,
                layout=layout,
                recompute=recompute,
                rank_stages=stages,
                floor=floor,
                tier=tier,
                limits=link_limits(limits, tier),
            )
            for tier in scenario.tiers
        ]

    def note(self, rates: Rates) -> None:
        """Keep the efficiencies used, and what is doubtful about them."""
        self.add_inputs(*rates.inputs)
        remedy = "give --efficiency, --weight-dtype or --peak-flops, or measure with --measure"
        self.warn(*(Warning_(code="efficiency-prior", message=note, remedy=remedy) for note in rates.notes))

    def add_inputs(self, *inputs: Input) -> None:
        """Keep each distinct input once."""
        self.inputs.update({(item.name, item.value): item for item in inputs})

    def warn(self, *warnings: Warning_) -> None:
        """Keep each distinct warning once."""
        self.warnings.update({(warning.code, warning.message): warning for warning in warnings})

    def check_points(self, series: Series, points: Sequence[Point]) -> None:
        """Doubts that belong to a series: saturation, measured rates stretched too far."""
        scenario = self.scenario
        busiest = max((point.utilisation_ratio for point in points), default=0.0)
        if busiest >= MAX_UTILISATION:
            self.warn(
                Warning_(
                    code="saturated",
                    message=(
                        f"{series.tier.name} would be {busiest:.0%} busy at {scenario.loads_per_s:g} loads/s per rank; "
                        f"no verdict from {MAX_UTILISATION:.0%} on, waiting grows without bound"
                    ),
                    remedy="lower --loads-per-s, or give a faster tier",
                )
            )
        if series.parallelism.ranks > GPUS_PER_NODE:
            self.warn(
                Warning_(
                    code="more-than-one-node",
                    message=(
                        f"{series.parallelism.label()} has {series.parallelism.ranks} ranks; they are taken to share "
                        "one host's storage and one NVLink domain"
                    ),
                    remedy="for several nodes give the tier `per-rank` and --limit collective=… of the slowest link",
                )
            )
        on_gpu = scenario.prefill is None
        self.warn(*check_measured_tiers((series.tier,), series.concurrent_ranks, on_gpu=on_gpu))
        if scenario.concurrent_ranks is not None and scenario.concurrent_ranks < series.loading_ranks:
            self.warn(
                Warning_(
                    code="concurrency-raised",
                    message=(
                        f"--concurrency {scenario.concurrent_ranks} is below the {series.loading_ranks} ranks that "
                        f"load one prefix under {series.parallelism.label()}; {series.loading_ranks} were counted"
                    ),
                    remedy="give --concurrency for all requests that load at once",
                )
            )

    def check_model(self, entry: CatalogueEntry) -> None:
        """Doubts that belong to a model: its context, its state, an extrapolated fit, a claim about its cache."""
        scenario, model = self.scenario, entry.model
        longest = max(scenario.tokens)
        if scenario.prefill is not None:
            extrapolated = scenario.prefill.extrapolation_warning(longest)
            self.warn(*((extrapolated,) if extrapolated else ()), *scenario.prefill.warnings)
        if model.max_context_tokens is not None and longest > model.max_context_tokens:
            self.warn(
                Warning_(
                    code="beyond-context",
                    message=f"{longest} tokens exceed the {model.max_context_tokens} that {model.name} is made for",
                    remedy="the arithmetic holds, the model's answers may not",
                )
            )
        if not is_known(model.architecture):
            self.warn(
                Warning_(
                    code="assumed-architecture",
                    message=(
                        f"{model.architecture} is not known; every layer of {model.name} was taken as --assume says "
                        f"({', '.join(f'{count} {kind}' for kind, count in model.layer_kinds().items())})"
                    ),
                    remedy="check that number against the model card; windows and other layouts would make it smaller",
                )
            )
        has_state = any(isinstance(mixer, RecurrentState) for mixer in model.mixers())
        if scenario.kv_formats[0].state_dtype is not None and not has_state:
            self.warn(
                Warning_(
                    code="state-dtype-unused",
                    message=f"--state-dtype {scenario.kv_formats[0].state_dtype}: {model.name} has no recurrent state",
                    remedy="leave it out for this model",
                )
            )
        if scenario.claimed_bytes_per_token is not None:
            layout = CacheLayout(model, Parallelism(), scenario.kv_formats[0])
            exact = {layout.at(tokens).unique_bytes // tokens for tokens in scenario.tokens}
            exact |= {int(layout.bytes_per_token()), int(layout.bytes_per_token(short=True))}
            self.warn(*check_bytes_per_token(scenario.claimed_bytes_per_token, sorted(exact), model.name))

    def mix(self, all_series: list[Series]) -> None:
        """E[T] over the claimed outcomes, and whether the claimed rate can be; without --hit everything misses."""
        scenario, first = self.scenario, all_series[0]
        for tokens in scenario.tokens:
            times = {one.tier.name: one.comparison(tokens).t_load_s for one in all_series}
            times |= {"miss": first.recompute.seconds(tokens), "hbm": 0.0}
            hit = [name for name, share in scenario.hit_shares.items() if share > 0]
            if hit and all(isfinite(times[name]) for name in hit):
                shares = mix(scenario.hit_shares, times)
                self.warn(*check_tail(shares), *check_slow_hits(shares))
                self.expected.append(
                    ExpectedTime(
                        model=first.model.name,
                        tokens=tokens,
                        layout=first.parallelism.label(),
                        expected_s=expected_time_s(scenario.hit_shares, times),
                        shares=shares,
                    )
                )
            if scenario.claimed_rate_per_s is not None:
                self.check_rate(first, tokens, scenario.claimed_rate_per_s)

    def check_rate(self, series: Series, tokens: int, claimed_per_s: float) -> None:
        """The claimed request rate against all ranks at peak, work spread evenly and nothing counted twice."""
        scenario = self.scenario
        if series.floor is None:
            self.warn(
                Warning_(
                    code="claim-not-checked",
                    message="--claimed-rate is checked against a GPU's peak, which --measure does not know",
                    remedy="leave --measure out and give --gpu",
                )
            )
            return
        even = divided_terms(series.whole_terms, series.parallelism.ranks)
        bound = replace(series.floor, stages=(even,), comm_s_per_token=(0.0,))
        miss_ratio = scenario.hit_shares.get("miss", 0.0) if scenario.hit_shares else 1.0
        self.warn(
            *check_request_rate(
                claimed_per_s=claimed_per_s,
                miss_ratio=miss_ratio,
                prefill_floor_s=bound.stage_seconds(tokens),
            )
        )

    def answer(self, interrupted: bool) -> Answer:
        """The result so far."""
        scenario = self.scenario
        prefill = scenario.prefill
        self.add_inputs(*(_tier_input(scenario, index) for index in range(len(scenario.tiers))))
        gpu = prefill.device if prefill is not None else gpu_label(scenario.gpu, scenario.peak_flop_per_s)
        result = LoadVsRecomputeResult(
            gpu=gpu,
            efficiency="measured" if prefill is not None else str(scenario.efficiency),
            models=tuple(_summary(entry) for entry in scenario.entries),
            inputs=tuple(self.inputs.values()),
            points=tuple(self.points),
            curves=tuple(self.curves),
            expected_times=tuple(self.expected),
            skipped=tuple(self.skipped),
            measured_paths=scenario.paths,
            measured_prefill=prefill,
            checks=_checks(prefill),
        )
        return Answer(
            result=result,
            warnings=tuple(self.warnings.values()),
            provenance=point_origins(scenario),
            interrupted=interrupted,
        )


def _summary(entry: CatalogueEntry) -> ModelSummary:
    return ModelSummary(
        model=entry.model.name,
        hf=entry.hf,
        source=entry.source,
        params_total=entry.model.total_params(),
        params_note=entry.total_note,
        published_total_params=entry.published_total_params,
        published_active_params=entry.published_active_params,
        layers=entry.model.layer_kinds(),
    )


def _limit_input(limit: Limit) -> Input:
    if limit.name.startswith("alpha_"):
        unit = "s"
    else:
        unit = "count" if limit.name in ("ranks_per_uplink", "sockets") else "B/s"
    return Input(name=f"limit_{limit.name}", value=limit.value, unit=unit, origin=limit.origin)


def _tier_input(scenario: Scenario, index: int) -> Input:
    tier = scenario.tiers[index]
    return Input(name=f"tier_{tier.name}", value=tier.bytes_per_s, unit="B/s", origin=tier.origin)


def _checks(prefill: PrefillMeasurement | None) -> tuple[Check, ...]:
    if prefill is None or prefill.held_out is None:
        return ()
    held_out = prefill.held_out
    return (
        Check(
            what="prefill of the measured layers",
            tokens=held_out.tokens,
            predicted_s=held_out.predicted_s,
            measured_s=held_out.measured_s,
        ),
    )
