"""Verdicts from counts: how far each rank says it came in each communicator (watchdog text, RAS snapshots)."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.collectives.summary import Progress, Remark
from kvbench.collectives.watchdog import sequence_number
from kvbench.deadlock_diagnose.advice import FIXES
from kvbench.results.deadlock_diagnosis import Camp, Cause, Evidence, Finding, RankProgress, SuspectRank

# Sizes of these may differ between ranks in a correct program.
_UNEVEN = frozenset(
    {"ALLTOALL", "ALLTOALL_BASE", "ALLGATHER", "GATHER", "SCATTER", "REDUCE_SCATTER", "COALESCED", "SEND", "RECV"}
)
_FINGERPRINT = re.compile(
    r"Rank (\d+) is running collective: (CollectiveFingerPrint\(.*?\)), but "
    r"Rank (\d+) is running collective: (CollectiveFingerPrint\(.*?\))(?:\.|$|C)"
)
_OP = re.compile(r"OpType=(\w+)")
_NOT_A_RANK = -1


@dataclass(slots=True)
class _Rank:
    enqueued: int | None = None
    completed: int | None = None
    place: str = ""
    timed_out: Progress | None = None


def progress_rows(progress: Sequence[Progress]) -> tuple[RankProgress, ...]:
    """One row per rank, communicator and operation."""
    return tuple(
        RankProgress(
            rank=_label(rank),
            communicator=comm or "the process group",
            operation=op,
            enqueued=one.enqueued,
            completed=one.completed,
            timed_out_at=_seq_id(one),
            place=one.place,
        )
        for (comm, op), ranks in _table(progress).items()
        for rank, one in sorted(ranks.items())
    )


def _seq_id(rank: _Rank) -> int | None:
    """The number of the call that a rank gave up on; old versions print none."""
    call = rank.timed_out.timed_out if rank.timed_out is not None else None
    return call.seq_id if call is not None and call.seq_id >= 0 else None


def _label(rank: int) -> str:
    return f"rank {rank}" if rank != _NOT_A_RANK else "an unnamed rank"


def _table(progress: Sequence[Progress]) -> dict[tuple[str, str], dict[int, _Rank]]:
    found: dict[tuple[str, str], dict[int, _Rank]] = defaultdict(dict)
    for one in _named(progress):
        rank = found[one.comm, one.op].setdefault(one.rank if one.rank is not None else _NOT_A_RANK, _Rank())
        if one.enqueued is not None:
            rank.place = one.place if rank.enqueued is None else rank.place
            rank.enqueued = max(one.enqueued, rank.enqueued if rank.enqueued is not None else one.enqueued)
        if one.completed is not None:
            rank.completed = max(one.completed, rank.completed if rank.completed is not None else one.completed)
        if one.timed_out is not None and rank.timed_out is None:
            rank.timed_out = one
        rank.place = rank.place or one.place
    return dict(found)


def _named(progress: Sequence[Progress]) -> list[Progress]:
    """Timeout lines of some versions name no group: each gets that of the status line of the same rank and number.

    Where groups are named, what belongs to none of them is left out: it may be of any group.
    """
    groups: dict[tuple[int | None, int], set[str]] = defaultdict(set)
    for one in progress:
        if one.comm and one.failed_at is not None:
            groups[one.rank, one.failed_at].add(one.comm)
    names = {one.comm for one in progress if one.comm and one.op == ""}
    found = []
    for one in progress:
        if one.comm or one.op or not names:
            found.append(one)
            continue
        seq_id = one.timed_out.seq_id if one.timed_out is not None else -1
        own = groups.get((one.rank, seq_id), names if len(names) == 1 else set())
        if len(own) == 1:
            found.append(one._replace(comm=next(iter(own))))
    return found


def progress_causes(progress: Sequence[Progress], remarks: Sequence[Remark], *, source: str) -> tuple[Cause, ...]:
    """Divergences that counts show, the firmest first."""
    causes = _fingerprints(remarks, source)
    for (comm, op), ranks in _table(progress).items():
        known = {rank: one for rank, one in ranks.items() if rank != _NOT_A_RANK}
        found = (
            _different_calls(comm, known, source)
            or _counts(comm, op, known, source)
            or _out_of_step(comm, known, source)
        )
        causes += [found] if found is not None else []
    if not causes:
        causes = _silent(progress, remarks, source)
    return tuple(
        sorted(causes, key=lambda cause: (cause.strength != "certain", cause.index if cause.index is not None else 0))
    )


def _silent(progress: Sequence[Progress], remarks: Sequence[Remark], source: str) -> list[Cause]:
    """Ranks below the highest that say nothing while all others gave up on one call of the group of all ranks."""
    heard = {one.rank for one in progress if one.rank is not None}
    heard |= {one.rank for one in remarks if one.rank is not None}
    absent = sorted(set(range(max(heard, default=-1) + 1)) - heard)
    tables = _table(progress)
    if not absent or len(tables) != 1:
        return []
    (comm, _), ranks = next(iter(tables.items()))
    waiting = sorted(rank for rank, one in ranks.items() if rank != _NOT_A_RANK and one.timed_out is not None)
    calls = {one.timed_out.timed_out for one in ranks.values() if one.timed_out is not None and one.timed_out.timed_out}
    if len(waiting) < 2 or len({(call.op, call.seq_id) for call in calls}) != 1:
        return []
    call = next(iter(calls))
    number = f" #{call.seq_id}" if call.seq_id >= 0 else ""
    who, others = _some(absent), _some(waiting)
    text = (
        f"{who} print{'s' if len(absent) == 1 else ''} nothing while {others} wait in {call.op}{number} of "
        f"{comm or 'the process group'}: not entered there, or the output is not in this input"
    )
    camps = (
        Camp(did=f"waits in {call.op}{number}", ranks=tuple(map(_label, waiting))),
        Camp(did="prints nothing", ranks=tuple(map(_label, absent))),
    )
    suspects = [SuspectRank(rank=_label(rank), reason="prints nothing while the others wait") for rank in absent]
    place = ranks[waiting[0]].place
    index = call.seq_id if call.seq_id >= 0 else None
    return [_cause("not-entered", "possible", text, comm, index, camps, suspects, [place], [camps[0].did], source, ())]


def _some(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    return ", ".join(map(_label, ranks[:4])) + more


def stuck_groups(progress: Sequence[Progress]) -> Finding | None:
    """A finding where every rank gave up in two groups or more: the order across them may be the cause."""
    stuck = {
        comm: places
        for (comm, _), ranks in _table(progress).items()
        if comm and len(places := [one.place for one in ranks.values() if _seq_id(one) is not None]) == len(ranks) > 1
    }
    if len(stuck) < 2:
        return None
    return Finding(
        code="several-groups-stuck",
        message=f"all ranks gave up in {', '.join(list(stuck)[:4])}, as they do when these are entered in two orders",
        remedy="record the order of the calls: NCCL_DEBUG_SUBSYS=INIT,CALL or a flight-recorder dump",
        evidence=tuple(Evidence(place=places[0], text="") for places in list(stuck.values())[:3]),
    )


def entered_alike(progress: Sequence[Progress]) -> bool:
    """Whether at least two ranks of some communicator speak, and all say the same."""
    return any(len([rank for rank in ranks if rank != _NOT_A_RANK]) > 1 for ranks in _table(progress).values())


def _fingerprints(remarks: Sequence[Remark], source: str) -> list[Cause]:
    for remark in remarks:
        match = _FINGERPRINT.search(remark.text) if remark.code == "fingerprint-mismatch" else None
        if match is None:
            continue
        index = sequence_number(match[2])
        camps = (
            Camp(did=match[2].removeprefix("CollectiveFingerPrint"), ranks=(f"rank {match[1]}",)),
            Camp(did=match[4].removeprefix("CollectiveFingerPrint"), ranks=(f"rank {match[3]}",)),
        )
        ops = [found[1] if (found := _OP.search(match[which])) else "?" for which in (2, 4)]
        text = f"collective #{index}: rank {match[1]} runs {ops[0]} while rank {match[3]} runs {ops[1]}"
        return [
            _cause(
                "field-mismatch",
                "certain",
                text,
                "",
                index,
                camps,
                (),
                (remark.place,),
                (remark.text,),
                source,
                ("op",) if ops[0] != ops[1] else ("arguments",),
            )
        ]
    return []


def _different_calls(comm: str, ranks: dict[int, _Rank], source: str) -> Cause | None:
    """Ranks that gave up on the same position with different operations or sizes."""
    by_seq: dict[int, dict[int, Progress]] = defaultdict(dict)
    for rank, one in ranks.items():
        if one.timed_out is not None and one.timed_out.timed_out is not None and one.timed_out.timed_out.seq_id >= 0:
            by_seq[one.timed_out.timed_out.seq_id][rank] = one.timed_out
    for seq_id, members in sorted(by_seq.items()):
        kinds: dict[tuple[str, int | None, int | None], list[int]] = defaultdict(list)
        for rank, progress in sorted(members.items()):
            call = progress.timed_out
            assert call is not None
            sizes = (
                (None, None) if call.op in _UNEVEN and call.op != "COALESCED" else (call.elements_in, call.elements_out)
            )
            kinds[call.op, *sizes].append(rank)
        if len(kinds) < 2:
            continue
        ordered = sorted(kinds.items(), key=lambda one: (-len(one[1]), one[1]))
        camps = tuple(
            Camp(
                did=(
                    f"{op} {numel_in if numel_in is not None else '?'} "
                    f"in, {numel_out if numel_out is not None else '?'} out"
                ),
                ranks=tuple(_label(rank) for rank in who),
            )
            for (op, numel_in, numel_out), who in ordered
        )
        ops = {op for (op, _, _), _ in ordered}
        tie = len(ordered[0][1]) == len(ordered[1][1])
        suspects = (
            ()
            if tie
            else tuple(SuspectRank(rank=_label(rank), reason="stands alone") for _, who in ordered[1:] for rank in who)
        )
        text = f"collective #{seq_id} of {comm or 'the process group'}: " + "; ".join(
            f"{', '.join(camp.ranks[:4])}: {camp.did}" for camp in camps
        )
        places = [members[who[0]].place for _, who in ordered]
        fields = ("op",) if len(ops) > 1 else ("count",)
        return _cause(
            "field-mismatch",
            "certain",
            text,
            comm,
            seq_id,
            camps,
            suspects,
            places,
            [camp.did for camp in camps],
            source,
            fields,
        )
    return None


def _counts(comm: str, op: str, ranks: dict[int, _Rank], source: str) -> Cause | None:
    """Ranks that issued fewer or more calls than most."""
    counts = {rank: one.enqueued for rank, one in ranks.items() if one.enqueued is not None}
    if len(counts) < 2 or len(set(counts.values())) == 1:
        return None
    ordered = Counter(counts.values()).most_common()
    tie = len(ordered) > 1 and ordered[0][1] == ordered[1][1]
    low = min(counts.values())
    usual = max(counts.values()) if tie else ordered[0][0]
    behind = sorted(rank for rank, count in counts.items() if count < usual)
    ahead = sorted(rank for rank, count in counts.items() if count > usual)
    what, where = op or "collective", comm or "the process group"
    by_count: dict[int, list[int]] = defaultdict(list)
    for rank, count in sorted(counts.items()):
        by_count[count].append(rank)
    camps = tuple(
        Camp(did=f"issued {count}" if count >= 0 else "never issued one", ranks=tuple(_label(rank) for rank in who))
        for count, who in sorted(by_count.items(), key=lambda one: -len(one[1]))
    )
    odd_first = sorted(by_count, key=lambda count: count == usual)
    places = [ranks[by_count[count][0]].place for count in odd_first]
    notes = [f"{_label(by_count[count][0])} issued {count}" for count in odd_first]
    # A dump signal counts from 1 and -1 stands for none, so the first call that is missing follows the lowest count.
    if ahead and not behind:
        text = (
            f"{', '.join(map(_label, ahead[:4]))} issued {what} #{usual + 1} of {where}, which "
            "the others did not: an extra call there rather than a missing one here"
        )
        suspects = tuple(SuspectRank(rank=_label(rank), reason="issued more calls than most ranks") for rank in ahead)
        return _cause("extra-call", "possible", text, comm, usual + 1, camps, suspects, places, notes, source, ())
    text = (
        f"{', '.join(map(_label, behind[:4]))} never entered {what} #{max(low, 0) + 1} of {where}, and the others wait"
    )
    suspects = (
        ()
        if tie and len(counts) == 2 and ahead
        else tuple(
            SuspectRank(rank=_label(rank), reason=f"issued {counts[rank]} calls while most issued {usual}")
            for rank in behind
        )
    )
    return _cause("not-entered", "possible", text, comm, max(low, 0) + 1, camps, suspects, places, notes, source, ())


def _out_of_step(comm: str, ranks: dict[int, _Rank], source: str) -> Cause | None:
    """Ranks that gave up on different positions: those further on have finished what the others wait for."""
    stuck = {
        rank: one.timed_out.timed_out.seq_id for rank, one in ranks.items() if one.timed_out and one.timed_out.timed_out
    }
    stuck = {rank: seq_id for rank, seq_id in stuck.items() if seq_id >= 0}
    if len(set(stuck.values())) < 2:
        return None
    low = min(stuck.values())
    behind = sorted(rank for rank, seq_id in stuck.items() if seq_id == low)
    ahead = sorted(rank for rank in stuck if rank not in behind)
    camps = (
        Camp(did=f"waits in #{low}", ranks=tuple(map(_label, behind))),
        Camp(
            did=f"finished #{low} and waits later (#{min(stuck[rank] for rank in ahead)})",
            ranks=tuple(map(_label, ahead)),
        ),
    )
    wait = "waits" if len(behind) == 1 else "wait"
    text = (
        f"{', '.join(camps[0].ranks[:4])} {wait} in #{low} of {comm or 'the process group'}, "
        f"which {', '.join(camps[1].ranks[:4])} had finished: "
        "the sequences do not stand for the same calls from there on, or earlier"
    )
    suspects = (
        tuple(
            SuspectRank(rank=_label(rank), reason="is out of step with most ranks")
            for rank in (behind if len(behind) < len(ahead) else ahead)
        )
        if len(behind) != len(ahead)
        else ()
    )
    places = [ranks[behind[0]].place, ranks[ahead[0]].place]
    return _cause(
        "not-entered", "possible", text, comm, low, camps, suspects, places, [camp.did for camp in camps], source, ()
    )


def _cause(
    kind: str,
    strength: str,
    headline: str,
    comm: str,
    index: int | None,
    camps: Sequence[Camp],
    suspects: Sequence[SuspectRank],
    places: Sequence[str],
    notes: Sequence[str],
    source: str,
    fields: tuple[str, ...],
) -> Cause:
    return Cause(
        kind=kind,
        strength="certain" if strength == "certain" else "possible",
        model="counts that the ranks report",
        headline=headline,
        communicator=comm,
        index=index,
        camps=tuple(camps),
        fields=fields,
        suspects=tuple(suspects),
        no_suspect_reason="" if suspects else "as many ranks stand on one side as on the other",
        cycle=(),
        evidence=tuple(Evidence(place=place, text=note) for place, note in zip(places, notes, strict=False)),
        fix=FIXES["op-mismatch" if "op" in fields else kind],
        source=source,
    )
