"""Run a transfer plan: one child per case, then the fits, the crossovers, and the paths that others read."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench.catalogue.gpus import find_gpu
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.provenance import Origin, Warning_
from kvbench.probes.copy_case import CopyCase
from kvbench.probes.doubts import child_warnings
from kvbench.probes.executions.registry import EXECUTIONS
from kvbench.probes.file_case import FileCase
from kvbench.probes.machine import cpu_times, load_average, taken_by_others_ratio
from kvbench.probes.measure import busy_host_warnings, own_cpu_s
from kvbench.probes.remote_case import RemoteCase
from kvbench.probes.runner import ChildRun, not_begun, run_child
from kvbench.probes.segments import KvShape
from kvbench.probes.transfer_fit import case_warnings, crossovers, fitted, measured_path
from kvbench.probes.transfer_plan import PlannedCase, TransferPlan, planned_cases, throttle_of
from kvbench.results.host import Gpu, discover_gpus
from kvbench.results.host_paths import Limit, MeasuredPath
from kvbench.results.probe import Anchor, ProbeCase, ProbeResult, ProbeSample
from kvbench.tiers.cuda_runtime import no_gpu_reason

Progress = Callable[[str, float | None], None]
RunChild = Callable[..., ChildRun]
_REFERENCE_GPU = "H200-SXM"


def probe(
    plan: TransferPlan,
    *,
    gpu: str | None = None,
    progress: Progress = lambda _step, _done: None,
    run: RunChild = run_child,
    why_no_gpu: Callable[[], str | None] = no_gpu_reason,
) -> ProbeResult:
    """Every case of the plan, each in a child of its own.

    Ctrl-C ends the running case, keeps what it measured, and no other case begins; nor does one begin once the plan's
    total time is used up. `gpu` names the GPU of the catalogue whose link the anchor line shows.
    """
    started = time.monotonic()
    reason = why_no_gpu()
    shape = plan.shape()
    cases = list(planned_cases(plan, has_gpu=reason is None))
    anchors = _anchors(plan, gpu, has_gpu=reason is None)
    done: list[ProbeCase] = []
    taken: list[float] = []
    interrupted = False
    for number, case in enumerate(cases):
        left_s = plan.total_s - (time.monotonic() - started)
        progress(case.name, number / len(cases))
        before, own_before_s, load_before = cpu_times(), own_cpu_s(), load_average()
        child = _run(case, plan, shape, reason, interrupted, left_s, run, progress, number / len(cases))
        after = cpu_times()
        if before and after and child.of_kind("sample"):
            taken.append(taken_by_others_ratio(before, after, own_s=own_cpu_s() - own_before_s))
        interrupted = interrupted or child.interrupted
        done.append(_finished(case, child, (*load_before, *load_average())))
    return ProbeResult(
        plan=plan.name,
        question=plan.question,
        cases=tuple(done),
        crossovers=tuple(crossing for group in _comparable(done) for crossing in crossovers(group)),
        anchors=anchors,
        paths=measured_paths(cases, done),
        limits=_limits(cases, done),
        interrupted=interrupted,
        elapsed_s=time.monotonic() - started,
        warnings=(*_busy_warning(plan.name, taken), *_stand_in_warning(done)),
    )


def _run(
    case: PlannedCase,
    plan: TransferPlan,
    shape: KvShape | None,
    no_gpu: str | None,
    interrupted: bool,
    left_s: float,
    run: RunChild,
    progress: Progress,
    done_ratio: float,
) -> ChildRun:
    on_gpu = EXECUTIONS[case.method].runs_on == "cuda" if case.method in EXECUTIONS else case.method == "gds"
    if interrupted:
        return not_begun("interrupted before it began")
    if on_gpu and no_gpu is not None:
        return not_begun(no_gpu)
    if left_s <= 0:
        return not_begun(f"the plan's total of {plan.total_s:g} s was used up before it began")
    file = _scratch_path(case) if case.family == "file" else None
    try:
        return run(
            _child_case(case, plan, shape, file),
            timeout_s=min(left_s, plan.timeout_s),
            on_stage=lambda stage: progress(f"{case.name}: {stage}", done_ratio),
        )
    finally:
        if file is not None:  # the child removes the name before it measures; this is for one killed before that
            with contextlib.suppress(OSError):
                file.unlink()


def _scratch_path(case: PlannedCase) -> Path:
    return Path(case.spec.location) / f".kvbench-{os.getpid()}-{secrets.token_hex(4)}.tmp"


def _child_case(case: PlannedCase, plan: TransferPlan, shape: KvShape | None, file: Path | None) -> dict[str, Any]:
    common: dict[str, Any] = {
        "points": case.points,
        "repeats": plan.repeats,
        "warmups": plan.warmups,
        "time_s": plan.time_s,
    }
    if file is not None:
        made: Any = FileCase(
            file=str(file),
            engine=case.method,
            direction="store" if case.direction == "store" else "load",
            direct=bool(case.direct),
            fsync=case.fsync or "none",
            depth=case.concurrency,
            huge_pages=case.huge_pages,
            file_bytes=min(case.spec.size_bytes or plan.file_bytes, plan.file_bytes),
            **common,
        )
        return {"case": "file-io", **asdict(made)}
    if case.family in ("redis", "s3"):
        direction: Any = case.direction
        made = RemoteCase(spec=str(case.spec), direction=direction, depth=case.concurrency, **common)
        return {"case": "remote", **asdict(made)}
    throttle = throttle_of(case.spec)
    way: Any = case.direction
    made = CopyCase(
        execution=case.method,
        direction=way,
        layout=case.layout,
        shape=None if shape is None else asdict(shape),
        throttle=None if throttle is None else dict(throttle),
        copiers=case.concurrency,
        beside=case.beside,
        pool_bytes=plan.pool_bytes,
        **common,
    )
    return {"case": "copy", **asdict(made)}


def _finished(case: PlannedCase, child: ChildRun, load_average: tuple[float, ...]) -> ProbeCase:
    samples = tuple(
        ProbeSample(
            bytes=record["bytes"],
            segments=record["segments"],
            seconds=record["seconds"],
            wire_s=record.get("wire_s"),
        )
        for record in child.of_kind("sample")
    )
    facts: Mapping[str, Any] = next(reversed(child.of_kind("facts")), {})
    fit = fitted(samples) if samples and all(sample.seconds > 0 for sample in samples) else None
    return ProbeCase(
        name=case.name,
        path=str(case.spec),
        direction=case.direction,
        method=case.method,
        layout=case.layout,
        concurrency=max(case.concurrency, 1),
        direct=case.direct,
        fsync=case.fsync,
        huge_pages=case.huge_pages,
        beside=case.beside,
        stands_in_for=case.stands_in_for,
        status=child.status,
        reason=child.reason,
        elapsed_s=child.elapsed_s,
        source=facts.get("source", ""),
        destination=facts.get("destination", ""),
        cold=facts.get("cold"),
        cold_evidence=facts.get("cold_evidence", ""),
        placement=facts.get("placement", ""),
        load_average=load_average if samples else (),
        beside_slowdown_ratio=facts.get("beside_slowdown_ratio"),
        setup_s=_setup_s(child, samples),
        samples=samples,
        fit=fit,
        warnings=(*child_warnings(child), *(case_warnings(samples, fit) if samples else ())),
    )


def _setup_s(child: ChildRun, samples: Sequence[ProbeSample]) -> float | None:
    """Seconds of the case that are not under the clock: starting the child, preparing memory, checking bytes."""
    return max(child.elapsed_s - sum(sample.seconds for sample in samples), 0.0) if samples else None


def _comparable(cases: Sequence[ProbeCase]) -> list[list[ProbeCase]]:
    """Cases that differ only in their method: those whose curves may cross."""
    groups: dict[tuple[Any, ...], list[ProbeCase]] = {}
    for case in cases:
        key = (
            case.path,
            case.direction,
            case.layout,
            case.concurrency,
            case.direct,
            case.fsync,
            case.huge_pages,
            case.beside,
        )
        groups.setdefault(key, []).append(case)
    return list(groups.values())


def measured_paths(planned: Sequence[PlannedCase], cases: Sequence[ProbeCase]) -> tuple[MeasuredPath, ...]:
    """One path per tier, direction and concurrency: the case that carried most. Copies of nothing are no path."""
    best: dict[tuple[str, str, int], tuple[float, MeasuredPath]] = {}
    for plan, case in zip(planned, cases, strict=True):
        wrapped = plan.spec.inner is not None or plan.family == "null"
        if wrapped or case.status == "skipped" or case.direction == "duplex" or case.beside != "nothing":
            continue
        if case.direction == "store" and case.cold is False:  # the page cache took them
            continue
        path = measured_path(case, plan.family, case.direction)
        if path is None:
            continue
        key = (path.tier, path.direction, path.concurrency)
        if key not in best or path.bytes_per_s > best[key][0]:
            best[key] = (path.bytes_per_s, path)
    return tuple(path for _, path in best.values())


def _limits(planned: Sequence[PlannedCase], cases: Sequence[ProbeCase]) -> tuple[Limit, ...]:
    """All of a host's storage in cold loads, and what host memory carries for all of several GPUs at once."""
    storage: list[tuple[float, ProbeCase]] = []
    memory: list[tuple[float, ProbeCase]] = []
    for plan, case in zip(planned, cases, strict=True):
        best = case.best_point()
        if best is None or case.status != "ok":
            continue
        if plan.family == "file" and case.direction == "load" and case.cold:
            storage.append((best.bytes_per_s, case))
        if plan.family == "dram" and case.direction == "h2d" and plan.concurrency != 1:
            memory.append((best.bytes_per_s, case))
    found: list[Limit] = []
    for name, values in (("storage_total", storage), ("host_total", memory)):
        if values:
            rate, case = max(values, key=lambda pair: pair[0])
            origin = Origin(provenance="measured", source=f"{case.name} into {case.destination}, {case.cold_evidence}")
            found.append(Limit(name=name, value=rate, origin=origin))  # type: ignore[arg-type]  # both are LimitNames
    return tuple(found)


def _anchors(plan: TransferPlan, gpu: str | None, *, has_gpu: bool) -> tuple[Anchor, ...]:
    """Lines from the plan, and for copies to or from a GPU what its link is known to carry."""
    anchors = [
        Anchor(
            name=line.name,
            bytes_per_s=line.bytes_per_s,
            origin=Origin(provenance="spec", source=line.source),
            direction=line.direction,
        )
        for line in plan.anchors
    ]
    if not set(plan.directions) & {"h2d", "d2h", "duplex"} and gpu is None:
        return tuple(anchors)
    found = discover_gpus() if has_gpu and gpu is None else ()
    name = gpu or _catalogue_name(found) or _REFERENCE_GPU
    known = find_gpu(name)
    load = "d2h" not in plan.directions
    rate = known.c2c_h2d_typical_bytes_per_s if load else known.c2c_d2h_typical_bytes_per_s
    rate = rate or (known.pcie_h2d_typical_bytes_per_s if load else known.pcie_d2h_typical_bytes_per_s)
    if rate is not None:
        where = "" if has_gpu else ", not on this host"
        origin = Origin(
            provenance="spec", source=f"typical pinned copy of {known.name} (GPU catalogue: {known.source})"
        )
        anchors.append(
            Anchor(name=f"{known.name} {'H2D' if load else 'D2H'} typical{where}", bytes_per_s=rate, origin=origin)
        )
    return tuple(anchors)


def _catalogue_name(found: tuple[Gpu, ...] | str) -> str | None:
    """The catalogue's name for the first GPU: `NVIDIA H100 80GB HBM3` begins like `H100-SXM`."""
    if isinstance(found, str) or not found:
        return None
    words = found[0].name.replace("NVIDIA", "").split()
    for count in range(len(words), 0, -1):
        with contextlib.suppress(UsageError, KvbenchError):
            return find_gpu("-".join(words[:count])).name
    return None


def _busy_warning(plan: str, taken: Sequence[float]) -> list[Warning_]:
    """One doubt for the whole plan: what others took in the case that lost most."""
    return busy_host_warnings(f"plan {plan}", max(taken, default=0.0))


def _stand_in_warning(cases: Sequence[ProbeCase]) -> tuple[Warning_, ...]:
    if not any(case.stands_in_for and case.samples for case in cases):
        return ()
    return (
        Warning_(
            code="no-gpu",
            message="no GPU here: copies from host memory to host memory stand in for those to a GPU",
            remedy="read them as this host's memory, never as a GPU's link; run the plan on a host with a GPU",
        ),
    )


def provenance() -> dict[str, Origin]:
    """Where the numbers of a result come from: all were measured here, and fits were made from them."""
    measured = Origin(provenance="measured", source="kvbench probe on this host")
    fit = Origin(
        provenance="measured",
        source="least squares over the median of every size, each error relative to its time",
        formula="t = fixed + n·per-segment + bytes / B",
    )
    names = (
        "samples.bytes", "samples.segments", "samples.seconds", "samples.wire_s", "concurrency", "elapsed_s",
        "load_average", "setup_s", "beside_slowdown_ratio",
    )  # fmt: skip
    fits = (
        "fit.fixed_s", "fit.per_segment_s", "fit.s_per_byte", "fit.residual_ratio", "paths.fixed_s",
        "paths.bytes_per_s", "paths.residual_ratio", "crossovers.segment_bytes", "crossovers.bytes_per_s",
    )  # fmt: skip
    return {**dict.fromkeys(names, measured), **dict.fromkeys(fits, fit)}
