"""Runs a scenario: every model × layout × tier × prefix length, with what to doubt about the result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbench.catalogue.models import CatalogueEntry
from kvbench.core.claims import (
    check_bytes_per_token,
    check_request_rate,
    check_shares,
    check_tail,
    expected_time_s,
    mix,
)
from kvbench.core.compare import MAX_UTILISATION
from kvbench.core.errors import UsageError
from kvbench.core.kv_format import KvFormat
from kvbench.core.layout import CacheLayout, Parallelism, check_parallelism
from kvbench.core.provenance import Origin, Warning_
from kvbench.core.recompute import RecomputeModel, comm_s_per_token
from kvbench.core.work import Terms, active_params_terms, divided_terms, stage_terms
from kvbench.load_vs_recompute.origins import point_origins
from kvbench.load_vs_recompute.rates import Rates, gpu_label, model_rates
from kvbench.load_vs_recompute.scenario import Scenario, check_scenario
from kvbench.load_vs_recompute.series import RecomputeTime, Series
from kvbench.load_vs_recompute.sources import check_tier_rates, gpu_limits, link_limits
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

    def seconds(self, new: int, cached: int = 0) -> float:
        """Seconds of `new` tokens after `cached`."""
        if new == 0:
            return 0.0
        before_s = self.prefill.seconds(cached) if cached else 0.0
        return max(0.0, self.prefill.seconds(cached + new) - before_s)


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
        self.warn(*check_shares(self.scenario.hit_shares) if self.scenario.hit_shares else ())
        for entry in self.scenario.entries:
            progress(f"comparing {entry.model.name}")
            for parallelism in self.scenario.layouts:
                try:
                    check_parallelism(entry.model, parallelism)
                    self.layout_points(entry, parallelism)
                except UsageError as error:
                    if len(self.scenario.layouts) * len(self.scenario.entries) * len(self.scenario.kv_formats) == 1:
                        raise
                    self.skipped.append(Skipped(model=entry.model.name, layout=parallelism.label(), reason=str(error)))

    def layout_points(self, entry: CatalogueEntry, parallelism: Parallelism) -> None:
        """All cache formats, tiers and prefix lengths of one model on one layout."""
        for kv_format in self.scenario.kv_formats:
            for series in self.series(entry, parallelism, kv_format):
                for suffix_tokens in self.scenario.suffixes:
                    self.points.extend(series.point(tokens, suffix_tokens) for tokens in self.scenario.tokens)
                self.curves.append(series.curve(self.scenario.tokens))
                self.check_point_limits(series)
        if self.scenario.hit_shares:
            self.mix(entry, parallelism)

    def series(self, entry: CatalogueEntry, parallelism: Parallelism, kv_format: KvFormat) -> list[Series]:
        """One series per tier, sharing everything else."""
        scenario = self.scenario
        layout = CacheLayout(entry.model, parallelism, kv_format)
        if scenario.flops_mode == "active-params":
            active = scenario.active_params or entry.published_active_params
            if not active:
                raise UsageError(
                    f"{entry.model.name} has no published active parameters; give --active-params, like 22e9"
                )
            stages: tuple[Terms, ...] = (
                divided_terms(active_params_terms(entry.model, int(active)), parallelism.ranks),
            )
        else:
            stages = stage_terms(entry.model, parallelism, replicated_work=scenario.rank_work == "exact")
        recompute: RecomputeTime
        floor: RecomputeModel | None = None
        limits: tuple[Limit, ...] = scenario.limits
        if scenario.prefill is not None:
            recompute = MeasuredRecompute(prefill=scenario.prefill)
        else:
            rates = model_rates(scenario, scenario.weight_dtype or entry.model.weight_dtype)
            self.note(rates)
            comm = comm_s_per_token(entry.model, layout, rates.used) if len(stages) == parallelism.pp else (0.0,)
            recompute = RecomputeModel(
                stages=stages, comm_s_per_token=comm, rates=rates.used, chunk_tokens=scenario.chunk_tokens
            )
            floor = RecomputeModel(
                stages=stages,
                comm_s_per_token=(0.0,) * len(stages),
                rates=rates.floor,
                chunk_tokens=scenario.chunk_tokens,
            )
            limits = (*gpu_limits(scenario.gpu, rates.used.allgather_bytes_per_s), *scenario.limits)
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

    def check_point_limits(self, series: Series) -> None:
        """Doubts that belong to a series: saturation, claims about its model, extrapolation."""
        scenario, model = self.scenario, series.model
        busiest = max((p.utilisation_ratio for p in self.points[-len(scenario.tokens) :]), default=0.0)
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
        if scenario.claimed_bytes_per_token is not None:
            exact = series.layout.at(longest).unique_bytes // longest
            self.warn(*check_bytes_per_token(scenario.claimed_bytes_per_token, exact, model.name))

    def mix(self, entry: CatalogueEntry, parallelism: Parallelism) -> None:
        """E[T] over the claimed outcomes, and whether the claimed rate can be."""
        scenario = self.scenario
        series = {one.tier.name: one for one in self.series(entry, parallelism, scenario.kv_formats[0])}
        any_series = next(iter(series.values()))
        unknown = [n for n in scenario.hit_shares if n not in {*series, "miss", "hbm"}]
        if unknown:
            raise UsageError(
                f"--hit {unknown[0]} is not a tier of this run; use {', '.join(series)}, hbm or miss, or add --tier"
            )
        for tokens in scenario.tokens:
            times = {name: one.comparison(tokens).t_load_s for name, one in series.items()}
            times |= {"miss": any_series.recompute.seconds(tokens), "hbm": 0.0}
            shares = mix(scenario.hit_shares, times)
            self.warn(*check_tail(shares))
            self.expected.append(
                ExpectedTime(
                    model=entry.model.name,
                    tokens=tokens,
                    layout=parallelism.label(),
                    expected_s=expected_time_s(scenario.hit_shares, times),
                    shares=shares,
                )
            )
            if scenario.claimed_rate_per_s is not None and any_series.floor is not None:
                miss_ratio = scenario.hit_shares.get("miss", 0.0)
                floor_s = any_series.floor.seconds(tokens)
                self.warn(
                    *check_request_rate(
                        claimed_per_s=scenario.claimed_rate_per_s, miss_ratio=miss_ratio, prefill_floor_s=floor_s
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
