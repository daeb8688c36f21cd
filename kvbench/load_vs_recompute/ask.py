"""From what a user typed to an answer: names looked up, lists and units parsed, this host measured if asked."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from kvbench.catalogue.gpus import find_gpu, gpu_names
from kvbench.catalogue.huggingface import ASSUMPTIONS
from kvbench.catalogue.models import CatalogueEntry, catalogue_names, find_model
from kvbench.core.efficiency import check_weight_dtype
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.gpu import Gpu
from kvbench.core.kv_format import KvFormat, parse_kv_dtype, parse_state_dtype
from kvbench.core.layout import CpMode, CpOrder, Parallelism
from kvbench.core.provenance import Warning_
from kvbench.core.restore import STRATEGIES
from kvbench.core.units import parse_bytes, parse_flop_rate
from kvbench.load_vs_recompute.origins import point_origins
from kvbench.load_vs_recompute.scenario import (
    FlopsMode,
    RankWork,
    Scenario,
    TierRate,
    check_scenario,
    parse_hit_share,
    parse_limit,
    parse_tier_rate,
)
from kvbench.load_vs_recompute.sources import (
    default_tiers,
    measured_tiers,
    merged_limits,
    merged_tiers,
    saved_limits,
    saved_paths,
)
from kvbench.load_vs_recompute.sweep import Answer, load_vs_recompute
from kvbench.results.load_vs_recompute import LoadVsRecomputeResult, Skipped

Report = Callable[[str, float | None], None]

_STRATEGY_OPTIONS = dict(
    zip(
        ("per-rank", "shared", "broadcast-serial", "broadcast", "hashed", "allgather", "native", "layer-split"),
        STRATEGIES,
        strict=True,
    )
)
_EP_IMBALANCE = 1.2  # fused-MoE kernels lose 5 to 25 % from balanced to power-law 1.2 routing (aiconfigurator)
_REAL_TIER = re.compile(r"[a-z][a-z0-9]*[:(]")  # file:/mnt, s3://bucket, throttled(…): the spelling of real tiers


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The options of one call, as typed; see `kvbench load-vs-recompute --help`."""

    models: tuple[str, ...]
    tokens: str = "1024,8192,32768,131072"
    suffixes: str = "0"
    tp: str = "1"
    pp: str = "1"
    cp: str = "1"
    cp_mode: str = "all-gather"
    cp_order: str = "zigzag"
    dp_attention: int = 1
    ep: int = 1
    kv_dtype: str = "bf16"
    state_dtype: str | None = None
    page_tokens: int | None = None
    hybrid: bool = True
    assume: str | None = None
    gpu: str = "H200-SXM"
    peak_flops: str | None = None
    weight_dtype: str | None = None
    efficiency: str = "auto"
    expert_imbalance: float | None = None
    chunk_tokens: int = 8192
    tiers: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    strategy: str = "per-rank"
    flops_mode: str = "exact"
    active_params: float | None = None
    rank_work: str = "exact"
    concurrency: int | None = None
    loads_per_s: float = 0.0
    hits: tuple[str, ...] = ()
    claimed_rate: float | None = None
    claimed_bytes_per_token: str | None = None
    topo: tuple[Path, ...] = ()
    probe: tuple[Path, ...] = ()
    measure: bool = False
    plan: Path | None = None


def ask(question: Question, *, progress: Report = lambda _step, _done: None) -> Answer:
    """The answer to what was typed; with `measure`, rates are taken on this host first."""
    scenario, real_tiers = scenario_of(question)
    if question.measure:
        return _ask_measured(question, scenario, real_tiers, progress)
    return load_vs_recompute(scenario, progress=lambda step: progress(step, None))


def scenario_of(question: Question) -> tuple[Scenario, tuple[str, ...]]:
    """The scenario, and the specs of real tiers that `--measure` is to time."""
    if not question.models:
        raise UsageError("no MODEL given; name one of the catalogue (--list) or a config.json")
    real = tuple(text for text in question.tiers if _REAL_TIER.match(text.strip()))
    if question.assume is not None and question.assume not in ASSUMPTIONS:
        raise UsageError(f"--assume {question.assume!r} is not known; use one of {', '.join(ASSUMPTIONS)}")
    if question.plan is not None and not question.measure:
        raise UsageError(f"--plan {question.plan} says how to measure; add --measure")
    if real and not question.measure:
        raise UsageError(
            f"--tier {real[0]!r} is a real tier; add --measure to time it, or give a rate like dram=50GB/s"
        )
    typed = tuple(parse_tier_rate(text) for text in question.tiers if not _REAL_TIER.match(text.strip()))
    _refuse_twice("--tier", [tier.name for tier in typed])
    hits = [parse_hit_share(text) for text in question.hits]
    _refuse_twice("--hit", [name for name, _ in hits])
    gpu = find_gpu(question.gpu)
    paths = saved_paths(_read(question.probe), "--probe")
    typed_limits = [parse_limit(text) for text in question.limits]
    _refuse_twice("--limit", [limit.name for limit in typed_limits])
    limits = merged_limits(saved_limits(_read(question.topo), "--topo"), typed_limits)
    scenario = Scenario(
        entries=tuple(find_model(name, assume=question.assume) for name in question.models),
        tokens=_integers(question.tokens, "--tokens"),
        suffixes=_integers(question.suffixes, "--suffix"),
        layouts=_layouts(question),
        kv_formats=tuple(
            KvFormat(
                kv_dtype=parse_kv_dtype(name.strip()),
                state_dtype=parse_state_dtype(question.state_dtype) if question.state_dtype else None,
                page_tokens=question.page_tokens,
                hybrid=question.hybrid,
            )
            for name in question.kv_dtype.split(",")
        ),
        gpu=gpu,
        peak_flop_per_s=None if question.peak_flops is None else parse_flop_rate(question.peak_flops),
        weight_dtype=None if question.weight_dtype is None else check_weight_dtype(question.weight_dtype),
        efficiency="auto" if question.efficiency == "auto" else _ratio(question.efficiency),
        expert_imbalance=_expert_imbalance(question),
        chunk_tokens=question.chunk_tokens,
        tiers=_tiers(typed, measured_tiers(paths), gpu, measure=question.measure),
        limits=limits,
        strategy=_STRATEGY_OPTIONS[question.strategy],
        flops_mode=cast("FlopsMode", question.flops_mode),
        active_params=_active_params(question.active_params),
        rank_work=cast("RankWork", question.rank_work),
        concurrent_ranks=question.concurrency,
        loads_per_s=question.loads_per_s,
        hit_shares=dict(hits),
        claimed_rate_per_s=question.claimed_rate,
        claimed_bytes_per_token=_claimed_bytes(question.claimed_bytes_per_token),
        paths=paths,
    )
    real_names = {text.strip().partition(":")[0] for text in real}
    if question.measure and not (scenario.tiers or real_names):
        real_names = {"dram", "file"}
    check_scenario(scenario, more_tiers=real_names)
    return scenario, real


def _refuse_twice(option: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{option} {name} is given {names.count(name)} times; give each name once")


def _expert_imbalance(question: Question) -> float:
    if question.expert_imbalance is not None:
        return question.expert_imbalance
    return _EP_IMBALANCE if question.ep > 1 else 1.0


def _active_params(value: float | None) -> int | None:
    if value is None:
        return None
    if not 1 <= value <= 1e15:  # NaN is in no range
        raise UsageError(f"--active-params {value:g} must be between 1 and 1e15 parameters")
    return int(value)


def _claimed_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_bytes(text)
    if size < 1:
        raise UsageError(f"--claimed-bytes-per-token {text!r} must be 1 byte or more")
    return size


def _tiers(
    typed: tuple[TierRate, ...], measured: tuple[TierRate, ...], gpu: Gpu, *, measure: bool
) -> tuple[TierRate, ...]:
    """What the user typed and measured; priors only where neither names any tier."""
    return merged_tiers(measured, typed) or (() if measure else default_tiers(gpu))


def _layouts(question: Question) -> tuple[Parallelism, ...]:
    sizes = (
        _integers(question.tp, "--tp"),
        _integers(question.pp, "--pp"),
        _integers(question.cp, "--cp"),
    )
    return tuple(
        Parallelism(
            tp=tp,
            pp=pp,
            cp=cp,
            cp_mode=cast("CpMode", question.cp_mode),
            cp_order=cast("CpOrder", question.cp_order),
            dp_attention=question.dp_attention,
            ep=question.ep,
        )
        for tp, pp, cp in product(*sizes)
    )


def _integers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part.replace("_", "")) for part in text.split(",")))
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is not a list of whole numbers; write it like {option} 1024,32768"
        ) from None


def _ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"--efficiency {text!r} is neither auto nor a number; write it like --efficiency 0.5"
        ) from None


def _read(files: tuple[Path, ...]) -> list[tuple[Path, Any]]:
    from kvbench.results.codec import read_document

    return [(file, read_document(file)) for file in files]


def _ask_measured(question: Question, scenario: Scenario, real_tiers: tuple[str, ...], progress: Report) -> Answer:
    from kvbench.probes.measure import measure_host
    from kvbench.probes.plan import load_measure_plan

    if len(scenario.entries) != 1 or any(layout.ranks != 1 for layout in scenario.layouts):
        raise UsageError("--measure times one model on one device; give one MODEL and leave --tp, --pp and --cp at 1")
    entry = scenario.entries[0]
    specs = real_tiers or (() if question.tiers or question.probe else _default_specs())
    measured = measure_host(
        tiers=specs,
        hf_config=entry.config,
        plan=load_measure_plan(question.plan),
        progress=lambda step: progress(step, None),
    )
    tiers = merged_tiers(scenario.tiers, measured_tiers(measured.paths))
    scenario = replace(scenario, tiers=tiers, paths=(*scenario.paths, *measured.paths), prefill=measured.prefill)
    skipped = tuple(Skipped(what=o.case, reason=o.reason or o.status) for o in measured.outcomes if o.status != "ok")
    if measured.prefill is None or not tiers:
        if measured.interrupted:
            return _unfinished(scenario, measured.warnings, skipped)
        reasons = "; ".join(f"{skip.what}: {skip.reason}" for skip in skipped) or "no tier could be measured"
        raise KvbenchError(f"{entry.model.name} could not be compared on this host: {reasons}")
    answer = load_vs_recompute(scenario, progress=lambda step: progress(step, None))
    return replace(
        answer,
        result=replace(answer.result, skipped=(*skipped, *answer.result.skipped)),
        warnings=(*measured.warnings, *answer.warnings),
        interrupted=answer.interrupted or measured.interrupted,
    )


def _default_specs() -> tuple[str, ...]:
    return ("dram:1GiB", f"file:{tempfile.gettempdir()}?size=1GiB")


def _unfinished(scenario: Scenario, warnings: tuple[Warning_, ...], skipped: tuple[Skipped, ...]) -> Answer:
    """What Ctrl-C left of a measurement that had not reached the comparison."""
    result = LoadVsRecomputeResult(
        gpu="this host",
        efficiency="measured",
        models=(),
        inputs=(),
        points=(),
        curves=(),
        skipped=skipped,
        measured_paths=scenario.paths,
        measured_prefill=scenario.prefill,
    )
    return Answer(result=result, warnings=warnings, provenance=point_origins(scenario), interrupted=True)


def catalogue_text() -> str:
    """Names of all models and GPUs, one line each."""
    lines = ["models:"]
    for name in catalogue_names():
        entry: CatalogueEntry = find_model(name)
        kinds = ", ".join(f"{count} {kind}" for kind, count in entry.model.layer_kinds().items())
        lines.append(f"  {name:<26} {entry.hf or '':<40} {kinds}")
    return "\n".join([*lines, "GPUs:", *(f"  {name}" for name in gpu_names())])
