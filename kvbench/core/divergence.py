"""Where sequences that should be equal first differ, and which single edit of one of them explains it."""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from kvbench.core.collectives import Call, Communicator, Instance, Program, Signature, conflict

WINDOW = 16

EditKind = Literal["missing", "extra", "swapped", "changed", "ended", "unexplained"]
Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommDivergence:
    """The first instance of a communicator that its members with data did not enter alike.

    `camps` maps each signature to the programs that entered with it, largest camp first; `absent` never entered it.
    `fields` names what differs; empty when only presence does.
    """

    comm: int
    index: int
    camps: tuple[tuple[Signature, tuple[int, ...]], ...]
    absent: tuple[int, ...]
    fields: tuple[str, ...]

    @property
    def instance(self) -> Instance:
        return Instance(self.comm, self.index)


def comm_divergences(programs: Sequence[Program], communicators: Sequence[Communicator]) -> dict[int, CommDivergence]:
    """The first divergence of each communicator, collectives only. It does not depend on the order of programs."""
    entered: dict[int, dict[int, dict[int, Signature]]] = defaultdict(lambda: defaultdict(dict))
    for program, calls in enumerate(programs):
        for call in calls:
            if not call.instance.is_p2p:
                entered[call.instance.comm][call.instance.index][program] = call.signature
    found = {}
    for comm, instances in entered.items():
        members = set(communicators[comm].ranks)
        for index in sorted(instances):
            signatures = instances[index]
            different = conflict(signatures) if len(set(signatures.values())) > 1 else ()
            if different or len(signatures) < len(members):
                found[comm] = CommDivergence(
                    comm=comm,
                    index=index,
                    camps=camps(signatures),
                    absent=tuple(sorted(members - set(signatures))),
                    fields=different,
                )
                break
    return found


def camps(calls: Mapping[int, Signature]) -> tuple[tuple[Signature, tuple[int, ...]], ...]:
    """Programs by signature, the largest camp first, equal ones by their lowest program."""
    by_signature: dict[Signature, list[int]] = defaultdict(list)
    for program in sorted(calls):
        by_signature[calls[program]].append(program)
    ordered = sorted(by_signature.items(), key=lambda camp: (-len(camp[1]), camp[1][0]))
    return tuple((signature, tuple(members)) for signature, members in ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """The change at position `at` that turns the reference into `other`; `agreeing` items after it were checked."""

    kind: EditKind
    at: int
    agreeing: int


def first_difference(one: Sequence[Item], other: Sequence[Item]) -> int | None:
    """The first position at which two sequences differ, or None when they are equal."""
    length = min(len(one), len(other))
    low, high = 0, length
    if one[:length] == other[:length]:
        return None if len(one) == len(other) else length
    while low < high:  # compares slices, which is fast
        middle = (low + high) // 2
        if one[low : middle + 1] == other[low : middle + 1]:
            low = middle + 1
        else:
            high = middle
    return low


def explain(reference: Sequence[Item], other: Sequence[Item], *, window: int = WINDOW) -> Edit | None:
    """The edit that explains the first difference, judged by the items after it; None for equal sequences.

    Tried in this order: the other simply ended, a swap of neighbours, a missing item, an extra one, a changed one. The
    explanation that agrees with most of the following items wins; at equal support the earlier one in this list.
    """
    at = first_difference(reference, other)
    if at is None:
        return None
    if at == len(other):
        return Edit(kind="ended", at=at, agreeing=0)
    tries: list[tuple[EditKind, int, int, int]] = []
    if list(reference[at : at + 2]) == list(reversed(other[at : at + 2])) and len(other) > at + 1:
        tries.append(("swapped", at + 2, at + 2, 2))
    tries += [("missing", at + 1, at, 0), ("extra", at, at + 1, 0), ("changed", at + 1, at + 1, 0)]
    best: Edit | None = None
    for kind, start, other_start, bonus in tries:
        mine, theirs = reference[start : start + window], other[other_start : other_start + window]
        agreeing = 0
        for left, right in zip(mine, theirs, strict=False):
            if left != right:
                break
            agreeing += 1
        complete = agreeing == max(len(mine), len(theirs))
        score = agreeing + bonus + (window if complete else 0)
        if (agreeing or complete) and (best is None or score > best.agreeing):
            best = Edit(kind=kind, at=at, agreeing=score)
    return best or Edit(kind="unexplained", at=at, agreeing=0)


def program_items(program: Program, comms: frozenset[int]) -> list[tuple[int, Signature]]:
    """A program's collectives on some communicators, as items that are equal on ranks that agree."""
    return [(call.instance.comm, call.signature) for call in calls_on(program, comms)]


def calls_on(program: Program, comms: frozenset[int]) -> list[Call]:
    """A program's collectives on some communicators, in host order."""
    return [call for call in program if call.instance.comm in comms and not call.instance.is_p2p]
