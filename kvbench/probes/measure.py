"""Measure this host: load paths from the named tiers into device memory, and prefill of a model."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.core.errors import UsageError
from kvbench.core.provenance import Warning_
from kvbench.probes.load_fit import tier_load_result
from kvbench.probes.machine import cpu_times, taken_by_others_ratio
from kvbench.probes.measured_tiers import measurable_tier
from kvbench.probes.plan import LoadPlan, MeasurePlan, PrefillPlan
from kvbench.probes.prefill import PrefillCase
from kvbench.probes.prefill_fit import prefill_result
from kvbench.probes.runner import ChildRun, not_begun, run_child
from kvbench.probes.tier_load import TierLoadCase
from kvbench.results.host_measurement import CaseOutcome, HostMeasurement
from kvbench.results.host_paths import MeasuredPath
from kvbench.results.prefill import PrefillMeasurement
from kvbench.tiers.spec import TierSpec

_BUSY_RATIO = 0.1

Progress = Callable[[str], None]
RunChild = Callable[..., ChildRun]


def measure_host(
    *,
    tiers: Sequence[str],
    hf_config: Mapping[str, Any] | None,
    plan: MeasurePlan,
    progress: Progress = lambda _: None,
    device: str = "auto",
    run: RunChild = run_child,
) -> HostMeasurement:
    """Loads from every tier in `tiers`, then prefill of the model in `hf_config` (None: no prefill).

    A tier that this version cannot measure is refused before anything runs. Ctrl-C ends the running case, keeps what it
    measured so far, and no other case begins; nor does one begin once the plan's total time is used up.
    """
    specs = [measurable_tier(text) for text in tiers]
    if len(set(specs)) < len(specs):
        raise UsageError(f"a tier is named twice in {', '.join(tiers)}; name each place once")
    started = time.monotonic()
    paths: list[MeasuredPath] = []
    outcomes: list[CaseOutcome] = []
    prefill: PrefillMeasurement | None = None
    warnings: list[Warning_] = []
    interrupted = False

    def child(case: str, timeout_s: float, start: Callable[[float, Progress], ChildRun]) -> ChildRun:
        left_s = plan.total_s - (time.monotonic() - started)
        if interrupted:
            return not_begun("interrupted before it began")
        if left_s <= 0:
            return not_begun(f"the plan's total of {plan.total_s:g} s was used up before it began")
        before, own_before_s = cpu_times(), own_cpu_s()
        result = start(min(left_s, timeout_s), lambda stage: progress(f"{case}: {stage}"))
        after = cpu_times()
        if before and after:
            taken_ratio = taken_by_others_ratio(before, after, own_s=own_cpu_s() - own_before_s)
            warnings.extend(busy_host_warnings(case, taken_ratio))
        return result

    for spec in specs:
        case = f"load from {spec}"
        load = partial(_run_tier_load, spec, plan.load, device, run)
        loaded = child(case, plan.load.timeout_s, load)
        path, outcome = tier_load_result(case, spec, plan.load.concurrency, loaded)
        paths += [path] if path else []
        outcomes.append(outcome)
        interrupted = interrupted or loaded.interrupted
    if hf_config is not None:
        case = f"prefill of {hf_config.get('model_type', 'a model without model_type')}"
        filled = child(case, plan.prefill.timeout_s, partial(_run_prefill, hf_config, plan.prefill, device, run))
        prefill, outcome = prefill_result(case, filled)
        outcomes.append(outcome)
        interrupted = interrupted or filled.interrupted
    return HostMeasurement(
        paths=tuple(paths),
        prefill=prefill,
        outcomes=tuple(outcomes),
        interrupted=interrupted,
        elapsed_s=time.monotonic() - started,
        warnings=tuple(warnings),
    )


def own_cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def busy_host_warnings(case: str, taken_ratio: float) -> list[Warning_]:
    """A doubt about a case beside which others used more than a tenth of this host's CPU time."""
    if taken_ratio <= _BUSY_RATIO:
        return []
    return [
        Warning_(
            code="busy-host",
            message=f"{case}: other programs or guests took {taken_ratio:.0%} of this host's CPU time meanwhile",
            remedy="measure again while nothing else runs; threads that wait for each other lose more than that share",
        )
    ]


def _run_tier_load(
    spec: TierSpec, plan: LoadPlan, device: str, run: RunChild, timeout_s: float, progress: Progress
) -> ChildRun:
    file = Path(spec.location) / f".kvbench-{os.getpid()}-{secrets.token_hex(4)}.tmp" if spec.scheme == "file" else None
    bound = spec.size_bytes or plan.pool_bytes
    case = TierLoadCase(
        tier="file" if file else "dram",
        file=str(file) if file else "",
        io="mmap" if spec.io == "mmap" else "psync",
        direct=spec.io != "mmap" and spec.direct is not False,
        device=device,
        sizes_bytes=plan.sizes_bytes,
        warmups=plan.warmups,
        repeats=plan.repeats,
        concurrency=plan.concurrency,
        pool_bytes=plan.pool_bytes if file else min(bound, plan.pool_bytes),
        file_bytes=min(spec.size_bytes or plan.file_bytes, plan.file_bytes),
        time_s=plan.time_s,
    )
    try:
        return run({"case": "tier-load", **asdict(case)}, timeout_s=timeout_s, on_stage=progress)
    finally:
        if file:  # the child removes the name before it measures; this is for a child that was killed before that
            with contextlib.suppress(OSError):
                file.unlink()


def _run_prefill(
    hf_config: Mapping[str, Any], plan: PrefillPlan, device: str, run: RunChild, timeout_s: float, progress: Progress
) -> ChildRun:
    case = PrefillCase(
        hf_config=dict(hf_config),
        device=device,
        dtype=plan.dtype,
        tokens=plan.tokens,
        check_tokens=plan.check_tokens,
        repeats=plan.repeats,
        max_layers_per_kind=plan.max_layers_per_kind,
        memory_bytes=plan.memory_bytes,
        time_s=plan.time_s,
    )
    return run({"case": "prefill", **asdict(case)}, timeout_s=timeout_s, on_stage=progress)
