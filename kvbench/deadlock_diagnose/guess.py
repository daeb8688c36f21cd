"""Matches communicators that carry no id: what each program called on them, and which of them agree."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvbench.collectives.nccl_lines import P2P, ROOTED
from kvbench.collectives.summary import Kind
from kvbench.core.agreement import Part, blocks, score

if TYPE_CHECKING:
    from kvbench.deadlock_diagnose.identity import Actor, CommUse

FIRST_CALLS = 256
_CAPTURE = "capture with NCCL_DEBUG_SUBSYS=INIT,COLL and NCCL 2.18 or newer"


def guess_keys(
    actors: "Sequence[Actor]",
    guessed: "Sequence[tuple[int, CommUse]]",
    known: "dict[Hashable, list[tuple[int, CommUse]]]",
    doubts: list[tuple[str, str, str]],
    unmatched: list[str],
) -> None:
    """Gives each of the `guessed` uses the key that it shares with those it agrees with, and says that it is a guess.

    `known` holds the communicators that were matched by an id: one with a free place may be that of a log whose
    beginning is lost.
    """
    profiles = _profiles(actors, guessed)
    left = [one for one in guessed if not _joins_known(actors, one, known, profiles, doubts)]
    classes: dict[int | None, list[tuple[int, CommUse]]] = defaultdict(list)
    for number, use in left:
        classes[use.size].append((number, use))
    for size, members in classes.items():
        parts = _parts(actors, members, profiles)
        partition, chosen = _partition(parts, size)
        if partition is None:
            who = ", ".join(actors[number].label for number, _ in members[:4])
            unmatched.append(f"{len(members)} communicators of size {size} on {who}")
            continue
        for at, block in enumerate(partition):
            for part in block:
                members[part][1].key = ("guess", size if size is not None else chosen, at, size is None)
        lone = all(len(block) < 2 for block in partition)
        if not lone or size is None or size > 1:
            doubts.append(
                (
                    "guessed-communicator",
                    (
                        f"{len(partition)} communicator{'s' if len(partition) > 1 else ''} of {chosen} ranks "
                        f"carr{'y' if len(partition) > 1 else 'ies'} no id; "
                        + (f"the size too is a guess among {len(actors)} processes; " if size is None else "")
                        + "what agrees best in calls, then in order, was taken together"
                    ),
                    _CAPTURE,
                )
            )


def _partition(parts: Sequence[Part], size: int | None) -> tuple[list[tuple[int, ...]] | None, int]:
    """Blocks and the size they were made for. Without a size all processes are one, unless smaller blocks fit fully."""
    owners = len({part.owner for part in parts})
    if size is not None:
        return blocks(parts, size), size
    whole = blocks(parts, owners)
    if whole is None or score(whole, parts, owners)[0] == 1.0:
        return whole, owners
    for smaller in range(owners // 2, 1, -1):
        if owners % smaller == 0:
            found = blocks(parts, smaller)
            if found is not None and score(found, parts, smaller)[0] == 1.0:
                return found, smaller
    return whole, owners


def _parts(
    actors: "Sequence[Actor]", members: "Sequence[tuple[int, CommUse]]", profiles: "dict[tuple[int, int], _Profile]"
) -> list[Part]:
    orders: Counter[int] = Counter()
    found = []
    for number, use in members:
        profile = profiles[number, use.number]
        rank = actors[number].rank
        found.append(
            Part(
                owner=number,
                rank=rank if rank is not None else number,
                order=orders[number],
                place=use.rank,
                calls=dict(profile.calls),
                ops=dict(profile.ops),
                first=tuple(profile.first),
            )
        )
        orders[number] += 1
    return found


def _joins_known(
    actors: "Sequence[Actor]",
    one: "tuple[int, CommUse]",
    known: "dict[Hashable, list[tuple[int, CommUse]]]",
    profiles: "dict[tuple[int, int], _Profile]",
    doubts: list[tuple[str, str, str]],
) -> bool:
    """Whether a use without a creation line takes the free place of a communicator that others printed an id of."""
    number, use = one
    if use.created_at >= 0 or use.size is None:
        return False
    free = [
        (key, members)
        for key, members in known.items()
        if members[0][1].size == use.size
        and len(members) < use.size
        and all(other != number for other, _ in members)
        and any(other.first_call is not None for _, other in members)
    ]
    if not free:
        return False
    mine = profiles[number, use.number]

    def common(option: "tuple[Hashable, list[tuple[int, CommUse]]]") -> int:
        other_number, other = option[1][0]
        theirs = _profiles(actors, [(other_number, other)])[other_number, other.number]
        return sum((mine.calls & theirs.calls).values())

    key, members = max(free, key=common)
    taken = {other.rank for _, other in members}
    rank = actors[number].rank
    places = [place for place in range(use.size) if place not in taken]
    use.rank = rank if rank in places else places[0]
    use.key = key
    members.append(one)
    actors[number].cut = True
    doubts.append(
        (
            "guessed-communicator",
            (
                f"the log of {actors[number].label} lacks the creation of a communicator of {use.size} ranks; it was "
                "given the free place of one that others created, and its calls were matched from the end"
            ),
            "keep the beginning of every rank's log (log rotation loses it)",
        )
    )
    return True


class _Profile:
    """How often each call was made on one communicator, and the first calls in order."""

    def __init__(self) -> None:
        self.calls: Counter[Hashable] = Counter()
        self.ops: Counter[Hashable] = Counter()
        self.first: list[Hashable] = []


def _profiles(actors: "Sequence[Actor]", guessed: "Sequence[tuple[int, CommUse]]") -> "dict[tuple[int, int], _Profile]":
    wanted: dict[int, set[int]] = defaultdict(set)
    for number, use in guessed:
        wanted[number].add(use.number)
    found = {(number, use.number): _Profile() for number, use in guessed}
    for number, uses in wanted.items():
        _read(actors[number], number, uses, found)
    return found


def _read(actor: "Actor", number: int, wanted: set[int], found: "dict[tuple[int, int], _Profile]") -> None:
    """Counts an actor's calls piece by piece between the creations that change what a pointer means."""
    import numpy as np

    starts = sorted({use.created_at for use in actor.uses if use.created_at > 0})
    for at, segment, ids in actor.records():
        cuts = [0, *(start - at for start in starts if 0 < start - at < len(ids)), len(ids)]
        for begin, end in pairwise(cuts):
            piece = ids[begin:end]
            profile_of: dict[str, _Profile | None] = {}
            numbers, counts = np.unique(piece, return_counts=True)
            for which, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                kind = segment.kinds[which]
                if kind.what != "call" or kind.op in P2P:
                    continue
                if kind.comm not in profile_of:
                    use = actor.use_of(kind.comm, at + begin)
                    profile_of[kind.comm] = (
                        found.get((number, use.number)) if use is not None and use.number in wanted else None
                    )
                profile = profile_of[kind.comm]
                if profile is not None:
                    profile.calls[_call(kind)] += count
                    profile.ops[kind.op] += count
            _first_calls(segment.kinds, piece, profile_of)


def _first_calls(kinds: Sequence[Kind], piece: Any, profile_of: "dict[str, _Profile | None]") -> None:
    waiting = {name for name, profile in profile_of.items() if profile is not None and len(profile.first) < FIRST_CALLS}
    for which in piece[: FIRST_CALLS * max(len(waiting), 1)].tolist() if waiting else ():
        kind = kinds[which]
        profile = profile_of.get(kind.comm)
        if kind.what == "call" and profile is not None and len(profile.first) < FIRST_CALLS:
            profile.first.append(_call(kind))


def _call(kind: Kind) -> tuple[Hashable, ...]:
    return (kind.op, kind.count, kind.dtype, kind.redop, kind.root if kind.op in ROOTED else None)
