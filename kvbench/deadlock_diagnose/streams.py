"""What streams and threads show beside the verdict: the default stream, two streams or threads on one communicator."""

from collections import defaultdict
from collections.abc import Sequence

from kvbench.collectives.summary import Remark
from kvbench.core.collectives import Call
from kvbench.deadlock_diagnose.causes import Case
from kvbench.results.deadlock_diagnosis import Evidence, Finding

DEFAULT_REMEDY = (
    "run it with the load stream as the current stream (a "
    "synchronous c10d collective uses the caller's current stream), "
    "and let the forward stream wait on the load stream's event"
)


def stream_findings(case: Case) -> tuple[Finding, ...]:
    """Findings about streams and threads, the suspicious first."""
    return (*_default_stream(case), *_several(case, "streams"), *_several(case, "threads"))


def _is_default(case: Case, program: int, stream: str | None) -> bool:
    if stream is None:
        return False
    return stream.split(" ")[0] in case.identity.actors[program].segments[0].default_streams


def _calls_by_comm(case: Case) -> dict[int, dict[int, list[Call]]]:
    found: dict[int, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for program, calls in enumerate(case.window.programs):
        for call in calls:
            found[call.instance.comm][program].append(call)
    return found


def _default_stream(case: Case) -> list[Finding]:
    """A collective on the default stream whose peers, earlier calls, or place in a cycle say that it should not be."""
    in_cycle = {wait.instance for cause in case.window.analysis.causes for wait in cause.cycle}
    # Of a cache broadcast and a forward collective that wait for each other, the broadcast is the one to move.
    in_cycle = {one for one in in_cycle if case.operation(one).startswith("Broadcast")}
    findings = []
    for comm, programs in sorted(_calls_by_comm(case).items()):
        on_default = {
            program: [call for call in calls if _is_default(case, program, call.stream)]
            for program, calls in programs.items()
        }
        on_default = {program: calls for program, calls in on_default.items() if calls}
        if not on_default:
            continue
        peers = [program for program in programs if program not in on_default]
        mixed = [program for program, calls in on_default.items() if len(calls) < len(programs[program])]
        cyclic = {
            program: [call for call in calls if call.instance in in_cycle] for program, calls in on_default.items()
        }
        cyclic = {program: calls for program, calls in cyclic.items() if calls}
        if not (peers or mixed or cyclic):
            continue
        chosen = cyclic or on_default
        call = chosen[min(chosen)][-1]
        why = []
        if cyclic:
            why.append("it is part of the cycle")
        if peers:
            why.append(f"{', '.join(case.labels(peers[:3]))} use another stream for this communicator")
        if mixed:
            why.append(f"{', '.join(case.labels(mixed[:3]))} also use another stream for it")
        who = case.labels(sorted(chosen)[:4])
        message = (
            f"{call.signature.op} #{call.instance.index} of comm {case.short_comm(comm)} "
            f"is on the default stream of {', '.join(who)}: {'; '.join(why)}"
        )
        pairs = [(one, calls[-1].position) for one, calls in sorted(chosen.items())][:3]
        findings.append(_finding(case, "default-stream", message, DEFAULT_REMEDY, pairs))
    return findings


def _several(case: Case, what: str) -> list[Finding]:
    """One communicator that one rank uses from several streams or threads."""
    findings = []
    for comm, programs in sorted(_calls_by_comm(case).items()):
        found = {}
        for program, calls in programs.items():
            values = dict.fromkeys(call.stream if what == "streams" else call.thread for call in calls)
            values.pop(None, None)
            values.pop("", None)
            if len(values) > 1:
                found[program] = list(values)
        if not found:
            continue
        program = min(found)
        shown = ", ".join(str(one) for one in found[program][:4])
        message = f"{case.label(program)} uses comm {case.comm(comm)} from {len(found[program])} {what} ({shown})"
        if len(found) > 1:
            message += f", and so do {len(found) - 1} other ranks"
        remedy = (
            "keep one communicator on one stream, or order the streams by events: NCCL runs its calls one after another"
            if what == "streams"
            else (
                "call one communicator from one thread: the order of two "
                "threads is a race, so the order in the log is one of several"
            )
        )
        pairs = []
        for value in found[program][:2]:
            call = next(one for one in programs[program] if (one.stream if what == "streams" else one.thread) == value)
            pairs.append((program, call.position))
        findings.append(_finding(case, f"several-{what}", message, remedy, pairs))
    return findings


def _finding(case: Case, code: str, message: str, remedy: str, pairs: Sequence[tuple[int, int]]) -> Finding:
    case.places.find(case.identity.actors, pairs)
    evidence = tuple(found for pair in pairs if (found := case.places.get(*pair)) is not None)
    return Finding(code=code, message=message, remedy=remedy, evidence=evidence)


_REMEDIES = {
    "size-mismatch": "compare the counts of that call on both sides; a transport saw different sizes",
    "copy-without-event": (
        "record an event on the load stream after the copy and let "
        "the collective's stream wait on it (cudaStreamWaitEvent)"
    ),
    "outside-nccl": (
        "these kernels synchronise ranks too and no NCCL log shows them: disable custom all-reduce to test them"
    ),
    "hung-launch": "this launch has no finished kernel: it is where the GPU stopped",
    "short-log": (
        "calls in CUDA graphs print nothing at replay: capture once with graphs off (for example --enforce-eager)"
    ),
    "no-payload": "export again with --include-blobs=true, so that communicator, size and root of each call are there",
}


def remark_findings(remarks: Sequence[Remark]) -> tuple[Finding, ...]:
    """Lines that are evidence by themselves, one finding per code."""
    by_code: dict[str, list[Remark]] = defaultdict(list)
    for remark in remarks:
        by_code[remark.code].append(remark)
    return tuple(
        Finding(
            code=code,
            message=found[0].text + (f" (and {len(found) - 1} more such lines)" if len(found) > 1 else ""),
            remedy=_REMEDIES.get(code, "read this line in its context"),
            evidence=tuple(Evidence(place=one.place, text=one.text) for one in found[:3]),
        )
        for code, found in by_code.items()
    )
