"""Says in words what the analysis found: headline, camps, cycle, suspects, evidence, timeline."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbench.core.collectives import Call, Instance, Signature
from kvbench.core.deadlock import Cause as CoreCause
from kvbench.core.firing import Wait
from kvbench.core.units import MIB
from kvbench.deadlock_diagnose.advice import FIXES
from kvbench.deadlock_diagnose.evidence import Places
from kvbench.deadlock_diagnose.identity import Identity
from kvbench.deadlock_diagnose.window import Window
from kvbench.results.deadlock_diagnosis import Camp, Cause, CycleStep, Evidence, SuspectRank, TimelineCall

AROUND = 4
MOST_RANKS = 16
_MOST_CAUSES = 8
_BUFFERED_BYTES = 4 * MIB  # NCCL_BUFFSIZE: a smaller Send may finish before its Recv comes
_SIZES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int64": 8, "uint64": 8, "float64": 8}

_MODELS = {
    "streams": "stream and communicator queues",
    "program": "host order of each rank",
    "communicator": "the calls of one communicator",
}


class Damage(NamedTuple):
    """What is wrong with a file's lines: the numbers of those that were damaged, and of a last one that was cut off."""

    lines: tuple[int, ...]
    ends_inside: int


@dataclass(slots=True, kw_only=True)
class Case:
    """One family of inputs with its identity, window and places."""

    identity: Identity
    window: Window
    places: Places
    source: str
    damage: Mapping[str, Damage] = field(default_factory=dict)

    def label(self, program: int) -> str:
        return self.identity.actors[program].label

    def labels(self, programs: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.label(program) for program in programs)

    def ranks_of(self, comm: int) -> Iterable[int]:
        return self.identity.communicators[comm].ranks

    def comm(self, number: int) -> str:
        return self.identity.communicators[number].name

    def short_comm(self, number: int) -> str:
        return self.comm(number).split(" (")[0]

    def operation(self, instance: Instance) -> str:
        """`broadcast #7 of comm A`."""
        blocked = self.window.analysis.residue.blocked.get(instance)
        calls = blocked.calls if blocked is not None else {}
        name = next((call.signature.op for call in calls.values()), None) or self._op(instance)
        if instance.is_p2p:
            return (
                f"Send {instance.source}->{instance.target} #{instance.index} of comm {self.short_comm(instance.comm)}"
            )
        return f"{name} #{instance.index} of comm {self.short_comm(instance.comm)}"

    def _op(self, instance: Instance) -> str:
        for program in self.window.programs:
            for call in program:
                if call.instance == instance:
                    return call.signature.op
        return "call"


def describe(case: Case) -> tuple[Cause, ...]:
    """The causes in words, with their evidence."""
    causes = case.window.analysis.causes[:_MOST_CAUSES]
    evidence = [_evidence(case, cause) for cause in causes]
    case.places.find(case.identity.actors, [pair for _, pairs in evidence for pair in pairs])
    return tuple(_cause(case, cause, found) for cause, found in zip(causes, evidence, strict=True))


def _cause(case: Case, cause: CoreCause, evidence: tuple[list[str], list[tuple[int, int]]]) -> Cause:
    suspects = tuple(SuspectRank(rank=case.label(one.program), reason=one.reason) for one in cause.suspects)
    steps = tuple(_steps(case, cause.cycle))
    doubts = _doubts(case, cause)
    lines = []
    for note, pair in zip(*evidence, strict=True):
        found = case.places.get(*pair)
        if found is not None:
            lines.append(Evidence(place=found.place, text=found.text or note))
    return Cause(
        kind=cause.kind,
        strength="possible" if doubts or (cause.kind == "p2p-cycle" and _buffered(case, cause)) else cause.strength,
        model=_MODELS[cause.queues],
        headline=headline(case, cause),
        communicator=case.comm(cause.place.comm),
        index=cause.place.index,
        camps=tuple(
            Camp(did=str(signature) if signature is not None else "did not enter it", ranks=case.labels(members))
            for signature, members in cause.camps
        ),
        fields=cause.fields,
        suspects=suspects,
        no_suspect_reason="" if suspects else _nobody(cause),
        cycle=steps,
        evidence=tuple(lines),
        fix=FIXES[_fix(case, cause)],
        source=case.source,
        doubts=doubts,
    )


def _doubts(case: Case, cause: CoreCause) -> tuple[str, ...]:
    """Why a cause may be an artefact of the input: its communicators or positions are guesses, a line is damaged."""
    comms = {
        cause.place.comm,
        *(wait.instance.comm for wait in cause.cycle),
        *(wait.behind.comm for wait in cause.cycle),
    }
    found = []
    if any(case.identity.guessed(comm) for comm in comms):
        found.append("communicators matched by guess")
    if any(case.identity.actors[program].lost_beginning for comm in comms for program in case.ranks_of(comm)):
        found.append("positions matched from the ends")
    if cause.kind in {"missing-call", "extra-call", "not-entered", "p2p-unmatched"}:
        absent = [program for signature, members in cause.camps if signature is None for program in members]
        found += [text for program in absent[:_MOST_CAUSES] if (text := _damage_in_gap(case, cause.place, program))][:2]
    return tuple(found)


def _damage_in_gap(case: Case, place: Instance, program: int) -> str:
    """A damaged line between the calls of a rank that enclose the one it seems to lack."""
    segment = case.identity.actors[program].segments
    damage = case.damage.get(segment[0].path)
    if damage is None or not (damage.lines or damage.ends_inside):
        return ""
    mine = [call for call in case.window.programs[program] if call.instance.comm == place.comm]
    before = [call for call in mine if call.instance.index < place.index][-1:]
    after = [call for call in mine if call.instance.index >= place.index][:1]
    case.places.find(case.identity.actors, [(program, call.position) for call in (*before, *after)])
    low = case.places.line(program, before[0].position) if before else 0
    high = case.places.line(program, after[0].position) if after else None
    path = segment[0].path
    if not after and damage.ends_inside:
        return f"{case.label(program)}'s log ends inside a line ({path}:{damage.ends_inside})"
    inside = [line for line in damage.lines if line >= low and (high is None or line <= high)]
    return f"{path}:{inside[0]} is damaged and may have held this call" if inside else ""


def _fix(case: Case, cause: CoreCause) -> str:
    if cause.kind == "field-mismatch" and "op" in cause.fields:
        return "op-mismatch"
    if cause.kind == "order-cycle" and any(
        case.operation(wait.instance).startswith("Broadcast") for wait in cause.cycle
    ):
        return "broadcast-cycle"
    return cause.kind


def _nobody(cause: CoreCause) -> str:
    if cause.cycle:
        return "no order has a majority"
    sizes = [len(members) for _, members in cause.camps]
    if len(sizes) > 2 and max(sizes) == 1:
        return "every rank has its own value: no majority"
    if len(sizes) > 2 or len(set(sizes)) > 1:
        return "no value has a majority"
    return "as many ranks stand on one side as on the other"


def _buffered(case: Case, cause: CoreCause) -> bool:
    """Whether every Send of the cycle may have gone into NCCL's buffer."""
    sizes = []
    for wait in cause.cycle:
        for call in case.window.analysis.residue.blocked[wait.instance].calls.values():
            signature = call.signature
            size = signature.size_bytes
            if size is None and signature.count is not None:
                size = signature.count * _SIZES.get(signature.dtype or "", 4)
            sizes.append(size or 0)
    return all(size < _BUFFERED_BYTES for size in sizes)


def _steps(case: Case, cycle: Sequence[Wait]) -> list[CycleStep]:
    """Each rank of a cycle with the call it waits in; the lowest rank first."""
    steps = []
    for number, wait in enumerate(cycle):
        holder = cycle[number - 1].program
        if holder == wait.program and len(cycle) > 1:
            continue  # the same rank is behind one call on one queue and behind the next on another
        steps.append((holder, wait))
    first = min(range(len(steps)), key=lambda one: steps[one][0], default=0)
    steps = steps[first:] + steps[:first]
    return [
        CycleStep(
            rank=case.label(holder),
            waits_in=case.operation(wait.instance),
            for_rank=case.label(wait.program),
            held_by=case.operation(wait.behind),
            queue=wait.queue,
        )
        for holder, wait in steps
    ]


def headline(case: Case, cause: CoreCause) -> str:
    """The cause in one sentence."""
    if cause.cycle:
        steps = _steps(case, cause.cycle)
        text = f"{steps[0].rank} waits in {steps[0].waits_in} for {steps[0].for_rank}"
        for step in steps[1:]:
            text += f", which waits in {step.waits_in} for {step.for_rank}"
        return text
    place = case.operation(cause.place)
    did = dict(cause.camps)
    present = [(signature, members) for signature, members in cause.camps if signature is not None]
    absent = did.get(None, ())
    if cause.kind == "missing-call":
        text = f"{_names(case, absent)} left out {_which(case, cause)}{_call_text(case, cause, present)}"
        return text + ("" if cause.suspects else f", or {_names(case, present[0][1])} issued it in excess")
    if cause.kind == "extra-call":
        text = (
            f"{_names(case, present[0][1])} issued an extra {present[0][0]} "
            f"as {_which(case, cause)}#{cause.place.index} of comm {case.comm(cause.place.comm)}"
        )
        return text + ("" if cause.suspects else f", or {_names(case, absent)} left it out")
    if cause.kind == "swapped-calls":
        return (
            f"{_names(case, cause.camps[1][1])} entered {cause.camps[1][0]} "
            f"where {_names(case, cause.camps[0][1])} entered "
            f"{cause.camps[0][0]}, and the other way round right after: #{cause.place.index} "
            f"and its neighbour of comm {case.comm(cause.place.comm)} are swapped"
        )
    if cause.kind in {"not-entered", "p2p-unmatched"}:
        waiting = _all(present)
        wait = "waits" if len(waiting) == 1 else "wait"
        return (
            f"{_names(case, absent)} never entered {place} "
            f"({present[0][0] if present else '?'}), where {_names(case, waiting)} {wait}"
        )
    camps = "; ".join(f"{_names(case, members)}: {signature}" for signature, members in present)
    return f"{place}: the ranks differ in {' and '.join(cause.fields) or 'what they call'} ({camps})"


def _which(case: Case, cause: CoreCause) -> str:
    """`one of #1–#100, at the latest ` where the call ends a run of equal ones: which of them it is stays open."""
    holder = next((members[0] for signature, members in cause.camps if signature is not None and members), None)
    calls = case.window.programs[holder] if holder is not None else []
    at = next((number for number, call in enumerate(calls) if call.instance == cause.place), 0)
    first = at
    while first > 0 and (calls[first - 1].instance.comm, calls[first - 1].signature) == (
        cause.place.comm,
        calls[at].signature,
    ):
        first -= 1
    if first == at or holder is None:
        return ""
    earlier = " or an earlier equal call" if first == 0 and case.window.skipped[holder] else ""
    return f"one of #{calls[first].instance.index}–#{cause.place.index}{earlier}, at the latest "


def _call_text(case: Case, cause: CoreCause, present: Sequence[tuple[Signature | None, tuple[int, ...]]]) -> str:
    return f"{case.operation(cause.place)} ({present[0][0]})" if present else case.operation(cause.place)


def _all(present: Sequence[tuple[Signature | None, tuple[int, ...]]]) -> tuple[int, ...]:
    return tuple(program for _, members in present for program in members)


def _names(case: Case, programs: Sequence[int]) -> str:
    labels = case.labels(programs)
    if not labels:
        return "nobody"
    if len(labels) > 6:
        return f"{', '.join(labels[:4])} and {len(labels) - 4} more"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _evidence(case: Case, cause: CoreCause) -> tuple[list[str], list[tuple[int, int]]]:
    """What to show: the call of two ranks of each camp, and for those who did not enter it their last call."""
    notes: list[str] = []
    pairs: list[tuple[int, int]] = []
    instances = [wait.instance for wait in cause.cycle] or [cause.place]
    suspects = {one.program for one in cause.suspects}
    for _, members in sorted(cause.camps, key=lambda camp: suspects.isdisjoint(camp[1])):
        for program in members[:2]:
            found = [call for call in case.window.programs[program] if call.instance in instances]
            if not found:
                found = [call for call in case.window.programs[program] if call.instance.comm == cause.place.comm][-1:]
            if not found:
                found = list(case.window.programs[program][-1:])
            for call in found:
                on_stream = f" on stream {call.stream}" if call.stream is not None else ""
                notes.append(f"{case.label(program)}: {call.signature}{on_stream}")
                pairs.append((program, call.position))
    return notes, pairs


def timeline(case: Case) -> tuple[TimelineCall, ...]:
    """The calls around the first cause on the ranks it touches, and on a few others for comparison."""
    causes = case.window.analysis.causes
    residue = case.window.analysis.residue
    if not causes:
        return ()
    of_cause: dict[Instance, int] = {}
    for number, cause in enumerate(causes, start=1):
        for instance in [cause.place, *(wait.instance for wait in cause.cycle)]:
            of_cause.setdefault(instance, number)
    first = causes[0]
    comms = {first.place.comm, *(wait.instance.comm for wait in first.cycle)}
    touched = list(dict.fromkeys([*(one.program for one in first.suspects), *(wait.program for wait in first.cycle)]))
    touched += [program for _, members in first.camps for program in members if program not in touched]
    touched += [
        program
        for comm in sorted(comms)
        for program in case.identity.communicators[comm].ranks
        if program not in touched
    ]
    shown = sorted(touched[:MOST_RANKS])
    rows: list[tuple[int, Call]] = []
    instances = {first.place, *(wait.instance for wait in first.cycle)}
    for program in shown:
        calls = case.window.programs[program]
        at = [number for number, call in enumerate(calls) if call.instance in instances]
        centre = (min(at), max(at)) if at else (len(calls) - 1, len(calls) - 1)
        low, high = max(centre[0] - AROUND, 0), min(centre[1], centre[0] + 3 * AROUND) + AROUND + 1
        rows += [(program, call) for call in calls[low:high]]
    case.places.find(case.identity.actors, [(program, call.position) for program, call in rows])
    return tuple(_row(case, program, call, of_cause, residue.blocked) for program, call in rows)


def _row(case: Case, program: int, call: Call, of_cause: dict[Instance, int], blocked: object) -> TimelineCall:
    one = case.window.analysis.residue.blocked.get(call.instance)
    place = case.places.get(program, call.position)
    operation = str(call.signature)
    if call.instance.is_p2p:
        peer = call.instance.target if call.signature.op == "Send" else call.instance.source
        operation += f" {'to' if call.signature.op == 'Send' else 'from'} {peer}"
    return TimelineCall(
        rank=case.label(program),
        stream=call.stream or "unknown",
        position=call.position,
        communicator=case.short_comm(call.instance.comm),
        index=call.instance.index,
        operation=operation,
        state="ran" if one is None else "conflict" if one.conflict else "waits" if program in one.ready else "queued",
        cause=of_cause.get(call.instance),
        place=place.place if place is not None else "",
    )


def consequences(case: Case, limit: int = 12) -> tuple[str, ...]:
    """What hangs because of the causes: the first blocked call of each communicator, and how many more."""
    later = case.window.analysis.consequences
    by_comm: dict[int, list[Instance]] = {}
    for instance in later:
        by_comm.setdefault(instance.comm, []).append(instance)
    lines = []
    for instances in list(by_comm.values())[:limit]:
        more = f" and {len(instances) - 1} later calls" if len(instances) > 1 else ""
        lines.append(f"{case.operation(instances[0])}{more} cannot run")
    if len(by_comm) > limit:
        lines.append(f"and calls of {len(by_comm) - limit} more communicators")
    return tuple(lines)
