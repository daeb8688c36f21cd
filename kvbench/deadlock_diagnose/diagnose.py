"""Reduce: from file summaries to one diagnosis."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.collectives.summary import FORMAT_NAMES, FileSummary, Format, ProcessLog
from kvbench.core.errors import KvbenchError
from kvbench.core.provenance import Origin, Warning_
from kvbench.deadlock_diagnose import advice
from kvbench.deadlock_diagnose.causes import Case, Damage, consequences, describe, timeline
from kvbench.deadlock_diagnose.evidence import Places
from kvbench.deadlock_diagnose.gather import Report, gather
from kvbench.deadlock_diagnose.identity import identify
from kvbench.deadlock_diagnose.lifecycle import lifecycle_causes
from kvbench.deadlock_diagnose.progress import entered_alike, progress_causes, progress_rows, stuck_groups
from kvbench.deadlock_diagnose.stragglers import straggler_findings
from kvbench.deadlock_diagnose.streams import remark_findings, stream_findings
from kvbench.deadlock_diagnose.window import TAIL_WINDOW, build_window
from kvbench.results.deadlock_diagnosis import (
    Cause,
    CommunicatorInput,
    DeadlockDiagnosis,
    FileInput,
    Finding,
    RankInput,
    Status,
    TimelineCall,
)

_FAMILIES: tuple[Format, ...] = ("nccl-log", "nsys", "flight-recorder", "kineto")
_FEW_CALLS = 50
_COUNTERS: tuple[Format, ...] = ("watchdog", "ras")

PROVENANCE = {
    name: Origin(provenance="measured", source="counted in the input files")
    for name in (
        "num_calls",
        "num_skipped_calls",
        "index",
        "position",
        "cause",
        "size",
        "num_unseen",
        "num_bytes",
        "num_lines",
        "num_recovered",
        "num_damaged",
        "enqueued",
        "completed",
        "timed_out_at",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """The diagnosis with the doubts that belong to its document."""

    diagnosis: DeadlockDiagnosis
    warnings: tuple[Warning_, ...]
    interrupted: bool


@dataclass(slots=True, kw_only=True)
class _Family:
    """What one kind of input says."""

    format: Format
    causes: tuple[Cause, ...] = ()
    findings: tuple[Finding, ...] = ()
    timeline: tuple[TimelineCall, ...] = ()
    consequences: tuple[str, ...] = ()
    case: Case | None = None
    enough: bool = False
    why_not: str = ""
    doubts: Sequence[tuple[str, str, str]] = ()

    @property
    def rank(self) -> tuple[int, int]:
        """How much this family says: a certain cause, a possible one, all alike, nothing."""
        if self.causes:
            return (0 if self.causes[0].strength == "certain" else 1, 0)
        return (2 if self.enough else 3, 0)


def diagnose(
    paths: Sequence[Path],
    *,
    jobs: int | None = None,
    tail_bytes: int | None = None,
    order_window: int = TAIL_WINDOW,
    report: Report = lambda _step, _ratio: None,
) -> Diagnosed:
    """Reads everything under `paths` and says what diverged first."""
    with gather(paths, jobs=jobs, tail_bytes=tail_bytes, report=report) as gathered:
        report("comparing ranks", None)
        return reduce_summaries(
            gathered.summaries, gathered.paths, order_window=order_window, interrupted=gathered.interrupted
        )


def reduce_summaries(
    summaries: Sequence[FileSummary],
    paths: dict[str, Path],
    *,
    order_window: int = TAIL_WINDOW,
    interrupted: bool = False,
) -> Diagnosed:
    """One diagnosis of all summaries. `paths` says where the files are that lines are shown from."""
    readable = [one for one in summaries if not one.refused]
    if not any(one.processes or one.progress or one.remarks or one.versions for one in readable):
        reasons = [one.refused or f"{one.path}: holds no line or record of a known kind" for one in summaries]
        more = f" (and {len(reasons) - 1} more files)" if len(reasons) > 1 else ""
        raise KvbenchError(
            f"{reasons[0]}{more}; give NCCL logs, watchdog text, "
            "flight-recorder dumps, nsys sqlite exports, torch traces or RAS JSON; "
            f"to record them: {advice.CAPTURE_NCCL}"
        )
    families = [_family(name, readable, paths, order_window) for name in _FAMILIES]
    families += [_counters(name, readable) for name in _COUNTERS]
    families = [family for family in families if family is not None]
    present = sorted([one for one in families if one is not None], key=lambda one: one.rank)
    return _diagnosed(summaries, present, interrupted)


def _family(
    name: Format, summaries: Sequence[FileSummary], paths: dict[str, Path], order_window: int
) -> "_Family | None":
    logs: list[ProcessLog] = [log for one in summaries for log in one.processes if log.format == name]
    if not logs:
        return None
    family = _Family(format=name)
    identity = identify(logs)
    window = build_window(identity, tail_window=order_window)
    case = Case(identity=identity, window=window, places=Places(paths=paths), source=FORMAT_NAMES[name])
    case.damage = _damage(summaries)
    family.case = case
    found = describe(case)
    life = lifecycle_causes(case)
    firm = [one for one in (*found, *life) if one.strength == "certain"]
    rest = [one for one in (*life, *found) if one.strength != "certain"]
    strong_life = [one for one in rest if one.kind in {"init-stuck", "creation-order"}]
    family.causes = (*firm, *strong_life, *(one for one in rest if one not in strong_life and one.kind != "open-group"))
    family.causes += tuple(one for one in rest if one.kind == "open-group")
    family.timeline = timeline(case)
    family.consequences = consequences(case)
    remarks = [remark for one in summaries if one.format == name for remark in (*one.remarks, *one.stream_facts)]
    family.findings = (
        *stream_findings(case),
        *remark_findings([one for one in remarks if one.code != "fingerprint-mismatch"]),
    )
    if not found:
        family.findings += straggler_findings(case)
    family.doubts = [*identity.doubts, *window.notes]
    compared = [comm for comm in identity.communicators if len(comm.ranks) > 1]
    calls = sum(window.num_calls)
    family.enough = bool(calls) and bool(compared)
    if not calls:
        family.why_not = _no_calls(name)
    elif not compared:
        who = (
            f"only {case.label(0)}"
            if len(identity.actors) == 1
            else f"{len(identity.actors)} processes that share no communicator"
        )
        family.why_not = f"the input holds {who}, and a divergence is a difference between ranks"
        if identity.unmatched:
            family.why_not = (
                f"communicators could not be matched across ranks without guessing: {identity.unmatched[0]}"
            )
    return family


def _damage(summaries: Sequence[FileSummary]) -> dict[str, Damage]:
    """Damaged lines by file, whose ranges may have been read one by one."""
    found: dict[str, Damage] = {}
    for one in summaries:
        before = found.get(one.path, Damage((), 0))
        found[one.path] = Damage((*before.lines, *one.doubtful), one.ends_inside or before.ends_inside)
    return found


def _no_calls(name: Format) -> str:
    if name == "nccl-log":
        return "the NCCL logs hold no collective calls: the default subsystems print only communicator creation"
    return f"the {FORMAT_NAMES[name]} holds no collective calls"


def _counters(name: Format, summaries: Sequence[FileSummary]) -> "_Family | None":
    """Watchdog lines may stand in the same files as NCCL lines, so all files are looked at."""
    mine = [one for one in summaries if (one.format == "ras") == (name == "ras")]
    progress = [row for one in mine for row in one.progress]
    remarks = [remark for one in mine for remark in one.remarks]
    fingerprints = [one for one in remarks if one.code == "fingerprint-mismatch"]
    if not progress and not fingerprints:
        return None
    family = _Family(format=name)
    family.causes = progress_causes(progress, remarks, source=FORMAT_NAMES[name])
    if not any(one.processes for one in mine):
        family.findings = remark_findings([one for one in remarks if one.code != "fingerprint-mismatch"])
    stuck = stuck_groups(progress)
    family.findings = (*family.findings, stuck) if stuck is not None else family.findings
    family.enough = entered_alike(progress)
    family.why_not = "only one rank reports its progress" if not family.enough else ""
    return family


def _diagnosed(summaries: Sequence[FileSummary], families: Sequence[_Family], interrupted: bool) -> Diagnosed:
    main = families[0] if families else None
    case = (
        next((one.case for one in families if one.case is not None), None)
        if main is None or main.case is None
        else main.case
    )
    status: Status
    if main is not None and main.causes:
        status = "divergence"
    elif main is not None and main.enough:
        status = "no-divergence"
    else:
        status = "insufficient-input"
    progress = [row for one in summaries if not one.refused for row in one.progress]
    causes = main.causes if main is not None else ()
    diagnosis = DeadlockDiagnosis(
        status=status,
        kind=causes[0].kind if causes else "all-entered" if status == "no-divergence" else "none",
        strength=causes[0].strength if causes else None,
        verdict=_verdict(status, main, case, summaries),
        causes=causes,
        findings=tuple(finding for family in families for finding in family.findings),
        timeline=main.timeline if main is not None else (),
        consequences=main.consequences if main is not None else (),
        cannot_show=_cannot_show(families, case),
        capture_next=_capture_next(status, families),
        also=tuple(_also(one) for one in families[1:]),
        ranks=_ranks(case),
        communicators=_communicators(case),
        progress=progress_rows(progress),
        files=_file_inputs(summaries),
        how_ranks=case.identity.how_ranks if case is not None else "",
        how_communicators=case.identity.how_communicators if case is not None else (),
        num_calls=sum(case.window.num_calls) if case is not None else 0,
        num_skipped_calls=sum(case.window.skipped) if case is not None else 0,
    )
    return Diagnosed(diagnosis=diagnosis, warnings=_warnings(summaries, families), interrupted=interrupted)


def _entered(case: Case) -> str:
    counts = case.window.num_calls
    comms = len(case.identity.communicators)
    each = (
        f"{counts[0]:,} call{'s' if counts[0] != 1 else ''} each" if len(set(counts)) == 1 else f"{sum(counts):,} calls"
    )
    return (
        f"all {len(counts)} ranks entered the same {each} on {comms} communicator{'s' if comms != 1 else ''}, "
        "in an order that can run"
    )


def _reservations(case: Case, name: Format) -> list[str]:
    """What may still be wrong although every call met its partners."""
    found = []
    if case.window.cycle_if_ungrouped:
        found.append(
            "Neighbouring Sends and Recvs are assumed to be one group, which COLL lines do not show: ungrouped, their "
            "order is a cycle (record CALL lines)."
        )
    if any(actor.lost_beginning for actor in case.identity.actors):
        found.append("Only the ends of some logs were compared: a divergence before them is not seen.")
    most = max(case.window.num_calls, default=0)
    if name == "nccl-log" and most <= _FEW_CALLS:
        found.append(f"Only {most} calls per rank: if CUDA graphs replay the rest, those print nothing.")
    return found


def _verdict(
    status: Status, main: "_Family | None", case: Case | None, summaries: Sequence[FileSummary]
) -> tuple[str, str, str]:
    if status == "divergence" and main is not None:
        cause = main.causes[0]
        more = f" ({len(main.causes) - 1} more below)" if len(main.causes) > 1 else ""
        first = f"DIVERGENCE, {cause.strength}, {cause.kind.replace('-', ' ')}: {cause.headline}.{more}"
        where = f"First shown at {cause.evidence[0].place}; " if cause.evidence else ""
        suspects = ", ".join(one.rank for one in cause.suspects[:6])
        who = f"suspect: {suspects}" if suspects else f"no suspect: {cause.no_suspect_reason}"
        streams = [one.message for one in main.findings if one.code in {"default-stream", "copy-without-event"}]
        stream = f" {streams[0].partition(':')[0]}." if streams and cause.cycle else ""
        doubt = f" ({'; '.join(cause.doubts)})" if cause.doubts else ""
        return (first, f"{where}{who}{doubt}.{stream}", f"Fix: {cause.fix}.")
    if status == "no-divergence" and main is not None:
        size = (
            _entered(case)
            if main.case is not None and case is not None
            else "all ranks that speak report the same calls"
        )
        unseen = sum(one.unseen for one in case.identity.communicators) if case is not None else 0
        second = (
            "Entered is not completed: if the job hung, look below the "
            "call order (a dead rank, the network, a kernel, a host wait)."
        )
        stuck = [one.message for one in main.findings if one.code == "several-groups-stuck"]
        second = " ".join((*(f"{message[0].upper()}{message[1:]}." for message in stuck), second))
        if case is not None and main.case is not None:
            second = " ".join((*_reservations(case, main.format), second))
        if case is not None and any(case.identity.guessed(comm) for comm in range(len(case.identity.communicators))):
            second = f"{second} (communicators matched by guess)"
        if unseen:
            members = "1 member of a communicator" if unseen == 1 else f"{unseen} members of communicators"
            second = f"{members} left no data, so nothing is said about {'it' if unseen == 1 else 'them'}. {second}"
        return (
            f"No divergence: {size}.",
            second,
            "Next: py-spy dump on every rank, and a flight-recorder dump with the stacks.",
        )
    refused = [one for one in summaries if one.refused]
    why = main.why_not if main is not None and main.why_not else "the input holds no collective calls"
    second = f"Read {len(summaries) - len(refused)} files, refused {len(refused)}."
    return (f"Cannot tell: {why}.", second, f"Next time capture: {_capture_next(status, [main] if main else [])[0]}")


def _cannot_show(families: Sequence[_Family], case: Case | None) -> tuple[str, ...]:
    lines = [line for family in families for line in advice.CANNOT_SHOW[family.format]]
    if case is not None:
        sources = {
            kind.source for actor in case.identity.actors for segment in actor.segments for kind in segment.kinds
        }
        if "COLL" in sources and "CALL" not in sources:
            lines.append("COLL lines do not show groups: neighbouring Sends and Recvs were taken as one group")
        unseen = [one for one in case.identity.communicators if one.unseen]
        if unseen:
            lines.append(
                f"{len(unseen)} communicators have members that left no data "
                f"({', '.join(f'{one.name}: {one.unseen} unseen' for one in unseen[:3])})"
            )
    return tuple(dict.fromkeys(lines))


def _capture_next(status: Status, families: Sequence[_Family]) -> tuple[str, ...]:
    present = {family.format for family in families}
    commands = [advice.CAPTURE_NCCL]
    if "nsys" in present:
        commands.append(advice.EXPORT_NSYS)
    if status != "insufficient-input":
        commands.append(advice.CAPTURE_NSYS)
    commands.append(advice.CAPTURE_FLIGHT_RECORDER)
    return tuple(commands)


def _also(family: _Family) -> str:
    name = FORMAT_NAMES[family.format]
    if family.causes:
        return (
            f"{name}: {family.causes[0].strength} "
            f"{family.causes[0].kind.replace('-', ' ')}: {family.causes[0].headline}"
        )
    if family.enough:
        return f"{name}: no divergence"
    return f"{name}: {family.why_not or 'says nothing about order'}"


def _ranks(case: Case | None) -> tuple[RankInput, ...]:
    if case is None:
        return ()
    return tuple(
        RankInput(
            rank=actor.label,
            process=actor.name,
            path=actor.path,
            num_calls=case.window.num_calls[number],
            rank_source=actor.rank_source,
        )
        for number, actor in enumerate(case.identity.actors)
    )


def _communicators(case: Case | None) -> tuple[CommunicatorInput, ...]:
    if case is None:
        return ()
    streams: dict[int, dict[str, None]] = defaultdict(dict)
    for calls in case.window.programs:
        for call in calls:
            if call.stream is not None:
                streams[call.instance.comm][call.stream] = None
    return tuple(
        CommunicatorInput(
            name=one.name,
            size=one.size,
            ranks=case.labels(sorted(one.ranks)),
            num_unseen=one.unseen,
            streams=tuple(streams[number])[:6],
        )
        for number, one in enumerate(case.identity.communicators)
    )


def _file_inputs(summaries: Sequence[FileSummary]) -> tuple[FileInput, ...]:
    by_path: dict[str, list[FileSummary]] = defaultdict(list)
    for one in summaries:
        by_path[one.path].append(one)
    return tuple(
        FileInput(
            path=path,
            format=next(
                (one.format for one in parts if one.format and (one.processes or one.progress)), parts[0].format
            ),
            num_bytes=sum(one.num_bytes for one in parts),
            num_lines=sum(one.num_lines for one in parts),
            num_recovered=sum(one.recovered for one in parts),
            num_damaged=sum(one.damaged for one in parts),
            refused=next((one.refused for one in parts if one.refused), ""),
        )
        for path, parts in by_path.items()
    )


def _warnings(summaries: Sequence[FileSummary], families: Sequence[_Family]) -> tuple[Warning_, ...]:
    found = [
        Warning_(code=code, message=message, remedy=remedy) for one in families for code, message, remedy in one.doubts
    ]
    found += [
        Warning_(code=code, message=message, remedy=remedy) for one in summaries for code, message, remedy in one.notes
    ]
    damaged, recovered = sum(one.damaged for one in summaries), sum(one.recovered for one in summaries)
    if damaged or recovered:
        found.append(
            Warning_(
                code="damaged-lines",
                message=f"{recovered} interleaved lines were put together again, {damaged} could not be read",
                remedy="let every process write its own file: NCCL_DEBUG_FILE=nccl.%h.%p.log",
            )
        )
    refused = [one for one in summaries if one.refused]
    if refused and len(refused) < len(summaries):
        found.append(
            Warning_(
                code="refused-files",
                message=f"{len(refused)} files were left out, the first: {refused[0].refused}",
                remedy="give only what the ranks wrote",
            )
        )
    return tuple(dict.fromkeys(found))
