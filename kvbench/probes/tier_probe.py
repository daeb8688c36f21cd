"""Run a plan of tier stacks: one child per case, then the checks, the fits, and the paths that others read."""

import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvbench.core.percentiles import least_samples
from kvbench.core.provenance import Origin, Warning_
from kvbench.core.units import format_bytes
from kvbench.probes.doubts import child_warnings
from kvbench.probes.machine import cpu_times, load_average, taken_by_others_ratio
from kvbench.probes.measure import busy_host_warnings, own_cpu_s
from kvbench.probes.runner import ChildRun, not_begun, run_child
from kvbench.probes.segments import KvShape
from kvbench.probes.tier_plan import PlannedTierCase, TierPlan, planned_tier_cases, stack_text
from kvbench.probes.tier_work import TierWork, innermost_spec
from kvbench.probes.transfer_fit import case_warnings, fitted, measured_path
from kvbench.results.document import numeric_fields
from kvbench.results.host_paths import MeasuredPath
from kvbench.results.probe import ProbeCase, ProbeSample
from kvbench.results.tier_probe import (
    EdgeCheck,
    MixedLoads,
    PolicyCase,
    TierCase,
    TierPhase,
    TierProbeResult,
    TierSample,
)
from kvbench.tiers.spec import TierSpec

Progress = Callable[[str, float | None], None]
RunChild = Callable[..., ChildRun]

_REMOTE = ("s3", "redis", "mooncake", "nixl")
_NO_PATH = ("hbm", "null")


def probe_tiers(
    plan: TierPlan,
    *,
    progress: Progress = lambda _step, _done: None,
    run: RunChild = run_child,
) -> TierProbeResult:
    """Every tier by itself, then every stack under every policy, each in a child of its own.

    Ctrl-C ends the running case, keeps what it measured, and no other case begins; nor does one begin once the plan's
    total time is used up. File tiers live in new directories, which are removed.
    """
    started = time.monotonic()
    shape = plan.shape()
    cases = planned_tier_cases(plan)
    tiers: list[TierCase] = []
    policies: list[PolicyCase] = []
    paths: list[MeasuredPath] = []
    taken: list[float] = []
    interrupted = False
    for number, case in enumerate(cases):
        left_s = plan.total_s - (time.monotonic() - started)
        progress(case.name, number / len(cases))
        before, own_before_s, loads = cpu_times(), own_cpu_s(), load_average()
        child = _run(case, plan, shape, interrupted, left_s, run, progress, number / len(cases))
        after = cpu_times()
        if before and after and child.of_kind("sample"):
            taken.append(taken_by_others_ratio(before, after, own_s=own_cpu_s() - own_before_s))
        interrupted = interrupted or child.interrupted
        loads = (*loads, *load_average())
        if case.tier is not None:
            measured = _tier_case(case, child, loads)
            tiers.append(measured)
            path = _path(case, measured)
            paths += [path] if path is not None else []
        else:
            policies.append(_policy_case(case, child, loads))
    return TierProbeResult(
        plan=plan.name,
        question=plan.question,
        model=shape.model,
        tp=plan.tp,
        page_tokens=plan.page_tokens,
        block_bytes=shape.page_bytes,
        block_shape=_shape_text(shape),
        load_share_ratio=plan.load_share_ratio,
        queue_bytes=plan.queue_bytes,
        tiers=tuple(tiers),
        policies=tuple(policies),
        paths=tuple(paths),
        interrupted=interrupted,
        elapsed_s=time.monotonic() - started,
        warnings=tuple(busy_host_warnings(f"plan {plan.name}", max(taken, default=0.0))),
    )


def _shape_text(shape: KvShape) -> str:
    planes = "K and V" if shape.planes == 2 else "one latent"
    return (
        f"{shape.page_tokens} tokens × {shape.layers} layers × {planes} of {shape.row_bytes} bytes = "
        f"{shape.page_bytes} bytes"
    )


def _run(
    case: PlannedTierCase,
    plan: TierPlan,
    shape: KvShape,
    interrupted: bool,
    left_s: float,
    run: RunChild,
    progress: Progress,
    done_ratio: float,
) -> ChildRun:
    if interrupted:
        return not_begun("interrupted before it began")
    if left_s <= 0:
        return not_begun(f"the plan's total of {plan.total_s:g} s was used up before it began")
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    specs = [_moved(spec, f"{token}-{number}") for number, spec in enumerate(case.stack)]
    timeout_s = min(left_s, plan.timeout_s)
    work = TierWork(
        specs=[str(spec) for spec in specs],
        names=case.tier_names,
        tier=case.tier or 0,
        policy=case.policy or "write-through",
        model=shape.model,
        page_tokens=plan.page_tokens,
        block_bytes=shape.page_bytes,
        blocks=plan.blocks,
        batches=plan.batches,
        mixed_batch=plan.mixed_batch,
        concurrency=case.concurrency,
        load_share_ratio=plan.load_share_ratio,
        queue_bytes=plan.queue_bytes,
        threshold=plan.threshold,
        repeats=plan.repeats,
        warmups=plan.warmups,
        pool_bytes=plan.pool_bytes,
        file_bytes=plan.file_bytes,
        time_s=plan.time_s,
        wait_s=timeout_s,
    )
    kind = "tier-policy" if case.tier is None else "tier-alone"
    try:
        return run(
            {"case": kind, **asdict(work)},
            timeout_s=timeout_s,
            on_stage=lambda stage: progress(f"{case.name}: {stage}", done_ratio),
        )
    finally:
        for spec in specs:
            if (directory := _directory(spec)) is not None:
                shutil.rmtree(directory, ignore_errors=True)


def _moved(spec: TierSpec, token: str) -> TierSpec:
    """The tier in a new directory inside the one that was named, so that no tier that is there is touched."""
    if spec.inner is not None:
        return replace(spec, inner=_moved(spec.inner, token))
    if spec.scheme == "file" or spec.plugin == "posix":
        return replace(spec, location=str(Path(spec.location).absolute() / f".kvbench-tier-{token}"))
    return spec


def _directory(spec: TierSpec) -> Path | None:
    inside = innermost_spec(spec)
    return Path(inside.location) if inside.scheme == "file" or inside.plugin == "posix" else None


def _samples(records: Sequence[Mapping[str, Any]]) -> tuple[TierSample, ...]:
    return tuple(
        TierSample(
            phase=record["phase"],
            bytes=record["bytes"],
            blocks=record["blocks"],
            seconds=record["seconds"],
            call_s=record["call_s"],
            calls_s=tuple(record["calls_s"]),
            queue_ratio=record["queue_ratio"],
        )
        for record in records
    )


def _tier_case(case: PlannedTierCase, child: ChildRun, loads: tuple[float, ...]) -> TierCase:
    assert case.tier is not None
    spec = case.stack[case.tier]
    samples = _samples(child.of_kind("sample"))
    facts: Mapping[str, Any] = next(reversed(child.of_kind("facts")), {})
    fits = {phase: fitted(_transfers(samples, phase)) for phase in ("store", "load")}
    doubts = [
        replace(doubt, message=f"{phase}s: {doubt.message}")
        for phase in ("store", "load")
        for doubt in case_warnings(_transfers(samples, phase), fits[phase])
    ]
    return TierCase(
        name=case.name,
        stack=stack_text(case.stack),
        spec=str(spec),
        tier=case.tier_names[case.tier],
        concurrency=case.concurrency,
        synchronous=case.tier == 0,
        status=child.status,
        reason=child.reason,
        elapsed_s=child.elapsed_s,
        description=facts.get("description", ""),
        blocks=facts.get("blocks", 0),
        checksum_bytes_per_s=facts.get("checksum_bytes_per_s"),
        checked_on_load=facts.get("checked_on_load"),
        cold=facts.get("cold"),
        cold_evidence=facts.get("cold_evidence", ""),
        verified_blocks=facts.get("verified_blocks", 0),
        failed_blocks=facts.get("failed_blocks", 0),
        load_average=loads if samples else (),
        samples=samples,
        store_fit=fits["store"],
        load_fit=fits["load"],
        warnings=(
            *child_warnings(child),
            *doubts,
            *_few_for_p99(_by_phase(samples)),
            *_left_behind(case, child),
        ),
    )


def _transfers(samples: Sequence[TierSample], phase: TierPhase | str) -> tuple[ProbeSample, ...]:
    return tuple(
        ProbeSample(bytes=sample.bytes, segments=sample.blocks, seconds=sample.seconds)
        for sample in samples
        if sample.phase == phase
    )


def _few_for_p99(groups: Mapping[str, Sequence[TierSample]]) -> list[Warning_]:
    few: list[tuple[int, str]] = []
    for label, samples in groups.items():
        counts: Counter[int] = Counter()
        for sample in samples:
            calls = max(len(sample.calls_s), 1)
            counts[sample.blocks // calls] += calls
        few += [(count, f"{label} of {size} blocks") for size, count in counts.items() if count < least_samples(0.99)]
    if not few:
        return []
    count, label = min(few)
    others = f", and too few of {len(few) - 1} others" if len(few) > 1 else ""
    return [
        Warning_(
            code="no-p99",
            message=f"no P99 without {least_samples(0.99)} calls: there were {count} {label}{others}",
            remedy="give the plan more time, and repeats of at least that many",
        )
    ]


def _by_phase(samples: Sequence[TierSample], *, of: str = "") -> dict[str, list[TierSample]]:
    names = {"store": "stores", "load": "loads", "idle": "idle loads", "saturated": "loads beside stores"}
    groups: dict[str, list[TierSample]] = {}
    for sample in samples:
        groups.setdefault(names[sample.phase] + of, []).append(sample)
    return groups


def _left_behind(case: PlannedTierCase, child: ChildRun) -> list[Warning_]:
    """A child that was ended could not remove its blocks from a store on the network."""
    stack = case.stack if case.tier is None else case.stack[case.tier : case.tier + 1]
    remote = [str(spec) for spec in stack if innermost_spec(spec).scheme in _REMOTE]
    if not remote or child.status != "failed":
        return []
    return [
        Warning_(
            code="left-behind",
            message=f"blocks of this case may be left in {', '.join(remote)}",
            remedy="empty that prefix, or let it evict them",
        )
    ]


def _path(case: PlannedTierCase, measured: TierCase) -> MeasuredPath | None:
    """Loads into host memory as a path t = fixed + bytes/B; wrapped tiers, hbm and null are none."""
    assert case.tier is not None
    spec = case.stack[case.tier]
    loads = _transfers(measured.samples, "load")
    if spec.inner is not None or spec.scheme in _NO_PATH or not loads:
        return None
    by_batch = ProbeCase(
        name=f"tiered store, {measured.name}",
        path=str(spec),
        direction="load",
        method="tiered store",
        layout="scattered",
        concurrency=case.concurrency,
        status=measured.status,
        reason=measured.reason,
        elapsed_s=measured.elapsed_s,
        source=measured.description or str(spec),
        destination="host memory",
        cold=measured.cold,
        cold_evidence=measured.cold_evidence or "the case ended before that was looked at",
        placement="",
        samples=loads,
        warnings=measured.warnings,
    )
    return measured_path(by_batch, measured.tier, "load")


def _policy_case(case: PlannedTierCase, child: ChildRun, loads: tuple[float, ...]) -> PolicyCase:
    records = child.of_kind("sample")
    facts = child.of_kind("facts")
    stored: Mapping[str, Any] = next((fact for fact in facts if fact["about"] == "edges"), {})
    edges = tuple(EdgeCheck(**edge) for edge in stored.get("edges", ()))
    mixed = tuple(
        _mixed(name, records, next((fact for fact in facts if fact.get("tier") == name), {}))
        for name in case.tier_names
        if any(record["tier"] == name for record in records)
    )
    beside: dict[str, list[TierSample]] = {}
    for one in mixed:
        beside |= _by_phase(one.samples, of=f" from {one.tier}")
    return PolicyCase(
        name=case.name,
        stack=stack_text(case.stack),
        policy=case.policy or "",
        concurrency=case.concurrency,
        status=child.status,
        reason=child.reason,
        elapsed_s=child.elapsed_s,
        blocks=stored.get("blocks", 0),
        repeated_blocks=stored.get("repeated_blocks", 0),
        load_average=loads if records else (),
        samples=_samples([record for record in records if record["phase"] == "store"]),
        edges=edges,
        mixed=mixed,
        warnings=(
            *child_warnings(child),
            *_disagreements(edges),
            *_few_for_p99(beside),
            *_never_full(mixed),
            *_missing(mixed),
            *_left_behind(case, child),
        ),
    )


def _mixed(name: str, records: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> MixedLoads:
    return MixedLoads(
        tier=name,
        stored_bytes=facts.get("stored_bytes", 0),
        stored_s=facts.get("stored_s", 0.0),
        failed_blocks=facts.get("failed_blocks", 0),
        samples=_samples([record for record in records if record["tier"] == name]),
    )


def _disagreements(edges: Sequence[EdgeCheck]) -> list[Warning_]:
    return [
        Warning_(
            code="bytes-differ",
            message=(
                f"{edge.source} → {edge.target}: {edge.blocks} blocks and {format_bytes(edge.bytes)} were counted, "
                f"{edge.expected_blocks} blocks and {format_bytes(edge.expected_bytes)} are what the policy moves"
            ),
            remedy="look for failed, dropped or refused blocks in the doubts of this case; else please report it",
        )
        for edge in edges
        if not edge.agrees
    ]


def _never_full(mixed: Sequence[MixedLoads]) -> list[Warning_]:
    low = [
        f"{loads.tier} ({loads.queue_ratio:.0%})"
        for loads in mixed
        if loads.queue_ratio is not None and loads.queue_ratio < 0.5
    ]
    if not low:
        return []
    return [
        Warning_(
            code="queue-not-full",
            message=f"no store queue was half full at most of the loads from {', '.join(low)}: the tiers keep up",
            remedy="read these loads as beside stores, not beside a full queue; --set queue=8MiB makes it smaller",
        )
    ]


def _missing(mixed: Sequence[MixedLoads]) -> list[Warning_]:
    missing = [f"{loads.failed_blocks} from {loads.tier}" for loads in mixed if loads.failed_blocks]
    if not missing:
        return []
    return [
        Warning_(
            code="failed-blocks",
            message=f"blocks to load beside stores were missing: {', '.join(missing)}; their calls are no samples",
            remedy="give the tier a larger size, and see how it fares alone",
        )
    ]


def tier_provenance(result: TierProbeResult) -> dict[str, Origin]:
    """Where the numbers of a result come from."""
    measured = Origin(provenance="measured", source="kvbench probe on this host")
    fit = Origin(
        provenance="measured",
        source="least squares over the median of every call size, each error relative to its time",
        formula="t = fixed + bytes / B",
    )
    plan = Origin(provenance="spec", source=f"plan {result.plan}")
    shape = Origin(
        provenance="modelled",
        source=f"KV cache of {result.model} on one of {result.tp} ranks, bf16, the shape that most layers have",
        formula=result.block_shape,
    )
    due = Origin(
        provenance="modelled",
        source="what the write policy says of these blocks",
        formula="write-through: all; selective: those stored twice; write-back: those that the tier above did not keep",
    )
    origins = dict.fromkeys(numeric_fields(result), measured)
    for name in origins:
        tail = name.rpartition(".")[2]
        if "fit" in name or (name.startswith("paths.") and not name.startswith("paths.samples")):
            origins[name] = fit
        elif tail.startswith("expected_"):
            origins[name] = due
    return (
        origins
        | {"block_bytes": shape}
        | dict.fromkeys(("tp", "page_tokens", "load_share_ratio", "queue_bytes", "concurrency"), plan)
    )
