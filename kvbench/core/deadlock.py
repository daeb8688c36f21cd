"""The first cause of a hang in the calls that ranks issued: an order cycle, a conflict, or a call that never came.

Two passes, because neither sees everything. Comparing each communicator on its own finds a missing, extra or different
call, and is blind to two communicators that are entered in different orders. The firing simulation finds that, with the
cycle as proof, but sees a dropped call among equal ones only as its distant result. What is found first in program
order is the cause; everything that waits for it is a consequence.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.core.collectives import Communicator, Instance, Program, Signature
from kvbench.core.divergence import (
    CommDivergence,
    Edit,
    calls_on,
    camps,
    comm_divergences,
    explain,
    program_items,
)
from kvbench.core.firing import Blocked, Residue, Wait, cycles, fire

CauseKind = Literal[
    "order-cycle",
    "p2p-cycle",
    "host-cycle",
    "missing-call",
    "extra-call",
    "swapped-calls",
    "field-mismatch",
    "not-entered",
    "p2p-unmatched",
    "p2p-mismatch",
]
Strength = Literal["certain", "possible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A program that stands against the majority, and why."""

    program: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One root of a hang. `place` is the instance at which the ranks first part; `queues` the model that shows it.

    `camps` says who did what there; None stands for "did not issue it". `edit` is the single change that turns the
    majority's program into the suspect's. With two camps of equal size nobody is suspected.
    """

    kind: CauseKind
    strength: Strength
    queues: Literal["streams", "program", "communicator"]
    place: Instance
    camps: tuple[tuple[Signature | None, tuple[int, ...]], ...]
    fields: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    cycle: tuple[Wait, ...] = ()
    edit: Edit | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """What the calls show. No cause means that every call met its partners: call order does not explain a hang."""

    causes: tuple[Cause, ...]
    residue: Residue
    divergences: Mapping[int, CommDivergence]
    consequences: tuple[Instance, ...]


def analyse(programs: Sequence[Program], communicators: Sequence[Communicator], *, streams_known: bool) -> Analysis:
    """Finds the causes, the most important first; `streams_known` is False where the input shows no streams."""
    residue = fire(programs, communicators, queues="streams" if streams_known else "program")
    if not residue.blocked and streams_known:
        residue = fire(programs, communicators, queues="program")
        order = [cycle for cycle in cycles(residue.waits, issued=True) if not _all_p2p(cycle)]
        causes = [_from_cycle(programs, cycle, "program", communicators) for cycle in order]
        return Analysis(causes=tuple(causes), residue=residue if causes else _NOTHING, divergences={}, consequences=())
    divergences = comm_divergences(programs, communicators)
    model: Literal["streams", "program"] = "streams" if streams_known else "program"
    causes = _causes(programs, communicators, residue, divergences, model)
    named = {cause.place for cause in causes} | {wait.instance for cause in causes for wait in cause.cycle}
    later = tuple(sorted((one for one in residue.blocked if one not in named), key=lambda one: (one.comm, one.index)))
    return Analysis(causes=tuple(causes), residue=residue, divergences=divergences, consequences=later)


_NOTHING = Residue(blocked={}, waits=(), num_fired=0)


def _causes(
    programs: Sequence[Program],
    communicators: Sequence[Communicator],
    residue: Residue,
    divergences: Mapping[int, CommDivergence],
    model: Literal["streams", "program"],
) -> list[Cause]:
    strong = cycles(residue.waits, issued=True)
    pure = [cycle for cycle in strong if not _diverging_comms(cycle, divergences)]
    roots = [one for one in residue.blocked.values() if not one.queued and (one.conflict or one.absent)]
    explained = [_from_root(programs, communicators, one, divergences) for one in _earliest(programs, residue, roots)]
    mixed = [cycle for cycle in strong if cycle not in pure]
    if mixed:
        edits = [
            cause
            for cycle in mixed
            for comm in _diverging_comms(cycle, divergences)
            if (cause := _from_divergence(programs, communicators, divergences[comm]))
        ]
        solid = [cause for cause in edits if cause.kind != "not-entered"]
        if solid:
            return _in_program_order(
                programs, [*solid, *(one for one in explained if one.place.comm not in {c.place.comm for c in solid})]
            )
        return [_from_cycle(programs, cycle, model, communicators) for cycle in mixed]
    if pure:
        certain = [_from_cycle(programs, cycle, model, communicators) for cycle in pure]
        before = [cause for cause in explained if cause.kind != "not-entered"]
        return _in_program_order(programs, [*before, *certain])
    hosts = [_from_host_cycle(programs, cycle) for cycle in cycles(residue.waits, issued=False)]
    solid = [cause for cause in explained if cause.kind != "not-entered"]
    return solid or hosts or explained


def _diverging_comms(cycle: Sequence[Wait], divergences: Mapping[int, CommDivergence]) -> list[int]:
    comms = dict.fromkeys(wait.instance.comm for wait in cycle)
    return [comm for comm in comms if comm in divergences]


def _all_p2p(cycle: Sequence[Wait]) -> bool:
    return all(wait.instance.is_p2p for wait in cycle)


def _earliest(programs: Sequence[Program], residue: Residue, roots: Sequence[Blocked]) -> list[Blocked]:
    """Roots that are not the result of another root: their absent programs do not hang in a call that is blocked."""
    last = {
        program: calls[-1].instance
        for program, calls in enumerate(programs)
        if calls and calls[-1].instance in residue.blocked
    }
    first = [
        one
        for one in roots
        if one.conflict or not all(last.get(program, one.instance) != one.instance for program in one.absent)
    ]
    chosen = first or list(roots)
    place = _positions(programs)
    return sorted(chosen, key=lambda one: (not one.conflict, place.get(one.instance, 0), one.instance))


def _positions(programs: Sequence[Program]) -> dict[Instance, int]:
    """Where each instance first stands in any program."""
    found: dict[Instance, int] = {}
    for calls in programs:
        for number, call in enumerate(calls):
            found[call.instance] = min(number, found.get(call.instance, number))
    return found


def _in_program_order(programs: Sequence[Program], causes: Sequence[Cause]) -> list[Cause]:
    place = _positions(programs)
    unique = {(cause.kind, cause.place): cause for cause in causes}
    return sorted(unique.values(), key=lambda cause: place.get(cause.place, 0))


def _from_root(
    programs: Sequence[Program],
    communicators: Sequence[Communicator],
    root: Blocked,
    divergences: Mapping[int, CommDivergence],
) -> Cause:
    if root.instance.is_p2p:
        signatures = {program: call.signature for program, call in root.calls.items()}
        who: list[tuple[Signature | None, tuple[int, ...]]] = [*camps(signatures)]
        if root.absent:
            who.append((None, root.absent))
        return Cause(
            kind="p2p-mismatch" if root.conflict else "p2p-unmatched",
            strength="certain" if root.conflict else "possible",
            queues="communicator",
            place=root.instance,
            camps=tuple(who),
            fields=root.conflict,
        )
    divergence = divergences.get(root.instance.comm)
    assert divergence is not None, "a blocked collective with a conflict or an absent member is a divergence"
    cause = _from_divergence(programs, communicators, divergence)
    assert cause is not None
    return cause


def _from_divergence(
    programs: Sequence[Program], communicators: Sequence[Communicator], divergence: CommDivergence
) -> Cause | None:
    """The cause behind a communicator's first divergence, placed by the programs of its members where those help."""
    members = sorted(communicators[divergence.comm].ranks)
    shared = frozenset(
        comm for comm, one in enumerate(communicators) if set(members) <= set(one.ranks) or comm == divergence.comm
    )
    for comms in (shared, frozenset({divergence.comm})):
        cause = _by_alignment(programs, members, comms, divergence)
        if cause is not None:
            return cause
    who: list[tuple[Signature | None, tuple[int, ...]]] = [*divergence.camps]
    if divergence.absent:
        who.append((None, divergence.absent))
    who.sort(key=lambda camp: -len(camp[1]))
    return Cause(
        kind="field-mismatch" if divergence.fields else "not-entered",
        strength="certain" if divergence.fields else "possible",
        queues="communicator",
        place=divergence.instance,
        camps=tuple(who),
        fields=divergence.fields,
        suspects=_minority(who, "stands alone" if divergence.fields else "never entered it"),
    )


def _minority(camps_: Sequence[tuple[Signature | None, tuple[int, ...]]], reason: str) -> tuple[Suspect, ...]:
    """Everyone outside the largest camp, and nobody when the two largest are equal."""
    if len(camps_) < 2 or len(camps_[0][1]) == len(camps_[1][1]):
        return ()
    return tuple(Suspect(program=program, reason=reason) for _, members in camps_[1:] for program in members)


def _by_alignment(
    programs: Sequence[Program], members: Sequence[int], comms: frozenset[int], divergence: CommDivergence
) -> Cause | None:
    """The cause as one edit of the minority's program, if one edit explains it and touches this communicator."""
    items = {program: tuple(program_items(programs[program], comms)) for program in members}
    groups = Counter(items.values()).most_common()
    reference = groups[0][0]
    others = [program for program in members if items[program] != reference]
    if not others:
        return None
    tie = len(groups) > 1 and groups[0][1] == groups[1][1]
    if tie and len(members) > 2:  # no majority: judge by the camps at the divergence only
        return None
    # The longer program is the reference of a pair, so that the same pair in either order gives the same answer.
    if tie:
        reference = max(groups[0][0], groups[1][0], key=lambda one: (len(one), items[members[0]] == one))
        others = [program for program in members if items[program] != reference]
    found = [(program, explain(reference, items[program])) for program in others]
    edits = [
        (program, edit) for program, edit in found if edit is not None and edit.kind not in {"ended", "unexplained"}
    ]
    if not edits:
        return None
    program, edit = min(edits, key=lambda one: one[1].at)
    holder = next(one for one in members if items[one] == reference)
    expected = calls_on(programs[holder], comms)
    issued = calls_on(programs[program], comms)
    place = (issued if edit.kind == "extra" else expected)[edit.at].instance
    if edit.kind in {"missing", "extra"} and place.comm != divergence.comm:
        return None
    if edit.kind == "swapped" and expected[edit.at].instance.comm != expected[edit.at + 1].instance.comm:
        return None
    if edit.kind == "changed" and expected[edit.at].instance.comm != issued[edit.at].instance.comm:
        return None
    wrong = tuple(one for one, other in edits if (other.kind, other.at) == (edit.kind, edit.at))
    right = tuple(one for one in members if items[one] == reference)
    mine, theirs = expected[edit.at : edit.at + 1], issued[edit.at].signature
    kinds: dict[str, CauseKind] = {
        "missing": "missing-call",
        "extra": "extra-call",
        "swapped": "swapped-calls",
        "changed": "field-mismatch",
    }
    who: tuple[tuple[Signature | None, tuple[int, ...]], ...]
    if edit.kind == "missing":
        who = ((mine[0].signature, right), (None, wrong))
    elif edit.kind == "extra":
        who = ((None, right), (theirs, wrong))
    else:
        who = ((mine[0].signature, right), (theirs, wrong))
    fields = mine[0].signature.differing_fields(theirs) if edit.kind in {"changed", "swapped"} and mine else ()
    reasons = {
        "missing": "left this call out: its following calls agree with the others' when it is put back",
        "extra": "issued a call that the others did not: its following calls agree without it",
        "swapped": "issued two neighbouring calls in the other order",
        "changed": "issued a different call here"
        + ("; its following calls agree" if len(issued) > edit.at + 1 else ", and nothing after it"),
    }
    return Cause(
        kind=kinds[edit.kind],
        strength="certain",
        queues="communicator" if len(comms) == 1 else "program",
        place=place,
        camps=who,
        fields=fields,
        suspects=() if tie else tuple(Suspect(program=one, reason=reasons[edit.kind]) for one in wrong),
        edit=edit,
    )


def _from_cycle(
    programs: Sequence[Program],
    cycle: Sequence[Wait],
    model: Literal["streams", "program"],
    communicators: Sequence[Communicator],
) -> Cause:
    p2p = _all_p2p(cycle)
    instances = [wait.instance for wait in cycle]
    ordered = _order_camps(programs, instances, communicators)
    place = instances[0]
    suspects: tuple[Suspect, ...] = ()
    if len(ordered) > 1 and len(ordered[0][1]) > len(ordered[1][1]):
        minority = tuple(program for _, members in ordered[1:] for program in members)
        suspects = tuple(
            Suspect(program=one, reason="enters them in the other order than most ranks") for one in minority
        )
        place = ordered[0][0][0]
    signatures: list[tuple[Signature | None, tuple[int, ...]]] = []
    for order, members in ordered:
        call = next(call for call in programs[members[0]] if call.instance == order[0])
        signatures.append((call.signature, members))
    return Cause(
        kind="p2p-cycle" if p2p else "order-cycle",
        strength="certain" if model == "streams" else "possible",
        queues=model,
        place=place,
        camps=tuple(signatures),
        suspects=suspects,
        cycle=tuple(cycle),
    )


def _order_camps(
    programs: Sequence[Program], instances: Sequence[Instance], communicators: Sequence[Communicator]
) -> list[tuple[tuple[Instance, ...], tuple[int, ...]]]:
    """Programs by the order in which they issued the instances of a cycle, the largest camp first."""
    wanted = set(instances)
    members = [
        program
        for program in range(len(programs))
        if sum(program in communicators[one.comm].ranks for one in wanted) > 1
    ]
    orders: dict[tuple[Instance, ...], list[int]] = {}
    for program in members:
        order = tuple(call.instance for call in programs[program] if call.instance in wanted)
        if order:
            orders.setdefault(order, []).append(program)
    ordered = sorted(orders.items(), key=lambda camp: (-len(camp[1]), camp[1][0]))
    return [(order, tuple(who)) for order, who in ordered]


def _from_host_cycle(programs: Sequence[Program], cycle: Sequence[Wait]) -> Cause:
    last = [(programs[wait.program][-1].signature, wait.program) for wait in cycle if programs[wait.program]]
    return Cause(
        kind="host-cycle",
        strength="possible",
        queues="program",
        place=cycle[0].instance,
        camps=tuple((signature, (program,)) for signature, program in last),
        cycle=tuple(cycle),
    )
