"""Verdicts from the life of communicators: stuck creation, creation order, use after the end, open groups."""

from collections.abc import Sequence

from kvbench.deadlock_diagnose.advice import FIXES
from kvbench.deadlock_diagnose.causes import Case
from kvbench.deadlock_diagnose.identity import CommUse
from kvbench.results.deadlock_diagnosis import Camp, Cause, SuspectRank

_MOST_CREATED = 200  # pairs are compared, so a rank that creates thousands is looked at to this depth


def lifecycle_causes(case: Case) -> tuple[Cause, ...]:
    """What went wrong around the calls, the most telling first."""
    return (*_init_stuck(case), *_creation_order(case), *_used_after_end(case), *_open_groups(case))


def _make(
    case: Case,
    kind: str,
    strength: str,
    headline: str,
    *,
    comm: int | None,
    camps: Sequence[Camp] = (),
    suspects: Sequence[SuspectRank] = (),
    pairs: Sequence[tuple[int, int]] = (),
) -> Cause:
    case.places.find(case.identity.actors, pairs)
    evidence = [found for pair in pairs if (found := case.places.get(*pair)) is not None]
    return Cause(
        kind=kind,
        strength="certain" if strength == "certain" else "possible",
        model="the life of communicators",
        headline=headline,
        communicator=case.comm(comm) if comm is not None else "",
        index=None,
        camps=tuple(camps),
        fields=(),
        suspects=tuple(suspects),
        no_suspect_reason="" if suspects else "the log does not say which rank is wrong",
        cycle=(),
        evidence=tuple(evidence),
        fix=FIXES[kind],
        source=case.source,
    )


def _init_stuck(case: Case) -> list[Cause]:
    causes = []
    for number, communicator in enumerate(case.identity.communicators):
        members = case.identity.uses[number]
        stuck = [(actor, use) for actor, use in members if use.started and not use.complete and use.ended_at is None]
        if not stuck:
            continue
        done = [actor for actor, use in members if use.complete]
        waiting = [actor for actor, _ in stuck]
        if any(use.first_call is not None for _, use in stuck):
            continue  # it was used, so the COMPLETE line is only missing from the log
        missing = communicator.size - len(members)
        seen = {use.rank for _, use in members if use.rank is not None}
        absent = [rank for rank in range(communicator.size) if rank not in seen]
        text = f"{_list(case, waiting)} printed Init START of comm {communicator.name} and never Init COMPLETE"
        camps = [Camp(did="Init START only", ranks=case.labels(waiting))]
        if done:
            camps.append(Camp(did="Init COMPLETE", ranks=case.labels(done)))
        suspects: list[SuspectRank] = []
        here = {actor.rank for actor in case.identity.actors}
        if missing > 0:
            text += f"; {missing} of {communicator.size} members never printed Init START"
            suspects = [
                SuspectRank(
                    rank=f"rank {rank} of the communicator",
                    reason="never started to create it" if rank in here else "left no record at all",
                )
                for rank in absent[:8]
            ]
        pairs = [(actor, use.created_at) for actor, use in stuck[:4]]
        causes.append(
            _make(
                case,
                "init-stuck",
                "certain" if missing > 0 and not done else "possible",
                text,
                comm=number,
                camps=camps,
                suspects=suspects,
                pairs=pairs,
            )
        )
    return causes


def _creation_order(case: Case) -> list[Cause]:
    """Creating a communicator is a collective over its members: each pair must create the shared ones in one order."""
    orders: dict[int, list[int]] = {}
    for number, actor in enumerate(case.identity.actors):
        created = [use for use in actor.uses if use.created_at >= 0 and use.comm >= 0]
        orders[number] = [use.comm for use in sorted(created, key=lambda use: use.created_at)]
    guessed = {number for number in range(len(case.identity.uses)) if case.identity.guessed(number)}
    before: set[tuple[int, int]] = set()
    for order in orders.values():
        known = [comm for comm in order[:_MOST_CREATED] if comm not in guessed]
        for number, first in enumerate(known):
            for second in known[number + 1 :]:
                if (second, first) in before:
                    return [_order_cause(case, second, first, orders)]
                before.add((first, second))
    return []


def _order_cause(case: Case, first: int, second: int, orders: dict[int, list[int]]) -> Cause:
    camps: dict[bool, list[int]] = {True: [], False: []}
    for actor, order in orders.items():
        if first in order and second in order:
            camps[order.index(first) < order.index(second)].append(actor)
    who = [
        Camp(did=f"created {case.short_comm(a)} before {case.short_comm(b)}", ranks=case.labels(camps[key]))
        for key, a, b in ((True, first, second), (False, second, first))
    ]
    small, large = sorted(camps.values(), key=len)
    suspects = (
        [
            SuspectRank(rank=case.label(actor), reason="creates them in the other order than most ranks")
            for actor in small
        ]
        if len(small) < len(large)
        else []
    )
    pairs = [
        (actor, use.created_at)
        for actor in (*camps[True][:1], *camps[False][:1])
        for use in case.identity.actors[actor].uses
        if use.comm in {first, second}
    ]
    return _make(
        case,
        "creation-order",
        "possible",
        f"communicators {case.comm(first)} and {case.comm(second)} were created in different orders: "
        f"{_list(case, camps[True])} against {_list(case, camps[False])}",
        comm=first,
        camps=who,
        suspects=suspects,
        pairs=pairs,
    )


def _used_after_end(case: Case) -> list[Cause]:
    return [
        _after_end(case, number, use, use.ended_at, use.used_after_end)
        for number, actor in enumerate(case.identity.actors)
        for use in actor.uses
        if use.used_after_end is not None and use.ended_at is not None
    ]


def _after_end(case: Case, number: int, use: CommUse, ended: int, used: int) -> Cause:
    name = case.comm(use.comm) if use.comm >= 0 else use.name
    return _make(
        case,
        "use-after-destroy",
        "certain",
        f"{case.label(number)} issued a call on comm {name} after it was {use.ended_by}",
        comm=use.comm if use.comm >= 0 else None,
        suspects=[SuspectRank(rank=case.label(number), reason=f"calls a communicator that it has {use.ended_by}")],
        pairs=[(number, ended), (number, used)],
    )


def _open_groups(case: Case) -> list[Cause]:
    stuck = case.window.open_groups
    if not stuck:
        return []
    programs = [program for program, _ in stuck]
    return [
        _make(
            case,
            "open-group",
            "possible",
            f"{_list(case, programs)} opened an NCCL group that never "
            "ended: the thread is inside ncclGroupEnd or before it, "
            "so the calls of that group may not have been launched",
            comm=None,
            camps=[Camp(did="last group is open", ranks=case.labels(programs))],
            suspects=[SuspectRank(rank=case.label(one), reason="its last group never ended") for one in programs]
            if len(programs) < len(case.identity.actors)
            else [],
            pairs=stuck[:4],
        )
    ]


def _list(case: Case, programs: Sequence[int]) -> str:
    labels = case.labels(programs)
    return ", ".join(labels) if len(labels) <= 6 else f"{', '.join(labels[:4])} and {len(labels) - 4} more"
