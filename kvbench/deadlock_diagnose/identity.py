"""Who is who: processes become ranks, and each process's own communicators become communicators that ranks share.

Order of trust: an id that every member printed; (parent, split ordinal, colour); for logs without ids the agreement of
the calls, which is a guess and is said to be one.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from kvbench.collectives.nccl_lines import LOCAL_LABEL
from kvbench.collectives.summary import Kind, ProcessLog
from kvbench.core.collectives import Communicator
from kvbench.deadlock_diagnose.guess import guess_keys

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_RANK_IN_NAME = re.compile(r"rank[_\-.]?(\d+)", re.IGNORECASE)
_TRAILING_NUMBER = re.compile(r"(?:^|[_.\-])(\d+)(?:\.[A-Za-z.]+)?$")
_ENDINGS = {"destroyed": "destroyed", "aborted": "aborted", "aborting": "aborted", "revoking": "revoked"}
CALLS = frozenset({"call", "group-start", "group-end"})


@dataclass(slots=True, kw_only=True)
class CommUse:
    """One communicator as one process knows it: its name there, and what creation and the calls told about it."""

    name: str
    created_at: int = -1
    ended_at: int | None = None
    ended_by: str = ""
    used_after_end: int | None = None
    started: bool = False
    complete: bool = False
    api: str = ""
    comm_id: str | None = None
    rank: int | None = None
    size: int | None = None
    device: str | None = None
    parent: "CommUse | None" = None
    ordinal: int | None = None
    color: str | None = None
    first_call: int | None = None
    desc: str = ""
    key: Hashable = None
    comm: int = -1
    number: int = 0


@dataclass(slots=True, kw_only=True)
class Actor:
    """One process (or one GPU of it): the log segments that hold its records, in order."""

    segments: list[ProcessLog]
    uses: list[CommUse] = field(default_factory=list)
    steps: list[tuple[int, Kind]] = field(default_factory=list)
    device: str | None = None
    rank: int | None = None
    rank_source: str = ""
    label: str = ""
    world: Hashable = None
    cut: bool = False

    @property
    def name(self) -> str:
        return self.segments[0].name

    @property
    def path(self) -> str:
        return self.segments[0].path

    @property
    def lost_beginning(self) -> bool:
        """Whether its first calls are not in the input."""
        return self.cut or self.segments[0].partial

    def records(self) -> "Iterator[tuple[int, ProcessLog, npt.NDArray[np.uint32]]]":
        """(number of the first record, segment, kinds' numbers), chunk by chunk."""
        at = 0
        for segment in self.segments:
            for ids in segment.records():
                yield at, segment, ids
                at += len(ids)

    def use_of(self, name: str, at: int) -> CommUse | None:
        """The communicator that `name` means at record number `at`."""
        found = None
        for use in self.uses:
            if use.name == name and (use.created_at <= at or found is None):
                found = use
        return found


@dataclass(slots=True, kw_only=True)
class Identity:
    """Ranks and communicators of the whole input, and how both were recognised."""

    actors: list[Actor]
    communicators: list[Communicator]
    uses: list[list[tuple[int, CommUse]]]
    how_ranks: str
    how_communicators: tuple[str, ...]
    doubts: list[tuple[str, str, str]]
    unmatched: list[str]

    def guessed(self, comm: int) -> bool:
        """Whether a communicator's members were matched by a guess."""
        return any(actor.cut and use.created_at < 0 for actor, use in self._members(comm)) or any(
            is_guess(use.key) for _, use in self._members(comm)
        )

    def _members(self, comm: int) -> list[tuple[Actor, CommUse]]:
        return [(self.actors[number], use) for number, use in self.uses[comm]]


def identify(logs: Sequence[ProcessLog]) -> Identity:
    """Matches processes and communicators; nothing is guessed without a doubt that says so."""
    actors = _actors(logs)
    doubts: list[tuple[str, str, str]] = []
    for actor in actors:
        _walk(actor)
    actors = [part for actor in actors for part in _by_device(actor)]
    how = _name_ranks(actors, doubts)
    actors.sort(key=lambda actor: (actor.rank if actor.rank is not None else 2**31, actor.name, actor.path))
    communicators, uses, how_comms, unmatched = _match(actors, doubts)
    return Identity(
        actors=actors,
        communicators=communicators,
        uses=uses,
        how_ranks=how,
        how_communicators=how_comms,
        doubts=doubts,
        unmatched=unmatched,
    )


def _actors(logs: Sequence[ProcessLog]) -> list[Actor]:
    groups: dict[tuple[str, str, str], list[ProcessLog]] = defaultdict(list)
    for log in logs:
        groups[log.path, log.host, log.pid].append(log)
    return [Actor(segments=segments) for segments in groups.values()]


def _walk(actor: Actor) -> None:
    """Reads the lifecycle records in order, and notes where each communicator is first used."""
    import numpy as np

    current: dict[str, CommUse] = {}
    splits: dict[int, int] = Counter()
    tables: dict[int, tuple[list[Kind], Any, Any]] = {}
    for at, segment, ids in actor.records():
        kinds = segment.kinds
        if id(kinds) not in tables:
            steps = np.array([kind.what not in CALLS for kind in kinds], dtype=bool)
            tables[id(kinds)] = kinds, steps, np.array([kind.what == "call" for kind in kinds], dtype=bool)
        _, is_step, unseen = tables[id(kinds)]
        marks = np.flatnonzero(is_step[ids]).tolist()
        for begin, end in pairwise([-1, *marks, len(ids)]):
            if begin >= 0:
                kind = kinds[ids[begin]]
                actor.steps.append((at + begin, kind))
                _step(actor, kind, at + begin, current, splits)
                for known, _, flags in tables.values():  # what the name means has changed: look at its calls again
                    flags[[one.what == "call" and one.comm == kind.comm for one in known]] = True
            part = ids[begin + 1 : end]
            new = np.flatnonzero(unseen[part])
            if len(new):
                numbers, first = np.unique(part[new], return_index=True)
                unseen[numbers] = False
                for offset, number in sorted(zip(new[first].tolist(), numbers.tolist(), strict=True)):
                    _called(actor, kinds[number], at + begin + 1 + offset, current)


def _called(actor: Actor, kind: Kind, at: int, current: dict[str, CommUse]) -> None:
    use = current.get(kind.comm)
    if use is None:
        use = current[kind.comm] = _new_use(actor, kind.comm, -1)
    if use.first_call is None:
        use.first_call = at
    if kind.num_ranks is not None and use.size is None:
        use.size = kind.num_ranks
    use.desc = use.desc or kind.get("desc") or ""
    if use.ended_at is not None and use.used_after_end is None:
        use.used_after_end = at


def _new_use(actor: Actor, name: str, at: int) -> CommUse:
    use = CommUse(name=name, created_at=at, number=len(actor.uses))
    actor.uses.append(use)
    return use


def _step(actor: Actor, kind: Kind, at: int, current: dict[str, CommUse], splits: dict[int, int]) -> None:
    detail = dict(kind.detail)
    if kind.what == "split-without-colour":
        parent = current.get(detail.get("parent", ""))
        if parent is not None:
            splits[parent.number] += 1
        return
    use = current.get(kind.comm)
    if kind.what in {"init-start", "init-done", "split-done", "grow-done"}:
        merges = use is not None and use.ended_at is None and _same_creation(use, kind, detail)
        if not merges or use is None:
            use = current[kind.comm] = _new_use(actor, kind.comm, at)
        _fill(use, kind, detail, current, splits)
    elif use is not None and use.ended_at is None and kind.what in _ENDINGS:
        use.ended_at, use.ended_by = at, _ENDINGS[kind.what]


def _same_creation(use: CommUse, kind: Kind, detail: dict[str, str]) -> bool:
    """Whether this record goes on with a creation that is known: COMPLETE after START, or CALL beside INIT."""
    comm_id = detail.get("commId")
    if comm_id is not None and use.comm_id is not None:
        return comm_id == use.comm_id
    if kind.what == "init-start":
        return False
    if use.started and not use.complete:
        return True
    return use.complete and use.first_call is None and kind.num_ranks == use.size


def _fill(
    use: CommUse, kind: Kind, detail: dict[str, str], current: dict[str, CommUse], splits: dict[int, int]
) -> None:
    use.started = use.started or kind.what == "init-start"
    use.complete = use.complete or kind.what != "init-start"
    use.api = use.api or detail.get("api", "")
    use.comm_id = use.comm_id or detail.get("commId")
    use.size = kind.num_ranks if kind.num_ranks is not None else use.size
    if "rank" in detail:
        use.rank = int(detail["rank"])
    use.device = use.device or detail.get("dev")
    parent = current.get(detail.get("parent", ""))
    if parent is not None and use.parent is None:
        use.parent = parent
        use.color = detail.get("color")
        use.ordinal = splits[parent.number]
        splits[parent.number] += 1
    if "ordinal" in detail:
        use.ordinal = int(detail["ordinal"])


def _by_device(actor: Actor) -> list[Actor]:
    """Splits a process that drives several GPUs, which holds the same communicator once per GPU."""
    ids = Counter(use.comm_id for use in actor.uses if use.comm_id is not None and use.parent is None)
    devices = sorted({use.device for use in actor.uses if use.device is not None})
    if not ids or max(ids.values()) < 2 or len(devices) < 2:
        return [actor]
    parts = []
    for device in devices:
        uses = [use for use in actor.uses if use.device == device]
        parts.append(Actor(segments=actor.segments, uses=uses, steps=actor.steps, device=device))
    return parts


def _name_ranks(actors: Sequence[Actor], doubts: list[tuple[str, str, str]]) -> str:
    """Gives every actor its rank in the run, and says where the ranks come from."""
    one_host = len({actor.segments[0].host for actor in actors}) == 1
    for actor in actors:
        first = actor.segments[0]
        if first.rank is not None and (first.rank_source != LOCAL_LABEL or (one_host and _world(actor) is None)):
            actor.rank, actor.rank_source = first.rank, first.rank_source
    how: dict[str, None] = {}
    for actor in actors:
        world = _world(actor)
        if world is not None:
            actor.world = world.comm_id
            if actor.rank is None:
                actor.rank = world.rank
                actor.rank_source = f"its rank in the largest communicator ({world.size} ranks)"
        if actor.rank is None:
            name = PurePath(actor.path).name
            found = _RANK_IN_NAME.search(name)
            if found is None and actor.segments[0].format != "nccl-log":  # those end in a process id
                found = _TRAILING_NUMBER.search(name)
            if found is not None:
                actor.rank, actor.rank_source = int(found[1]), "the file's name"
    unknown = [actor for actor in actors if actor.rank is None]
    if unknown:
        taken = {actor.rank for actor in actors}
        free = (number for number in range(2 * len(actors) + 1) if number not in taken)
        for actor in sorted(unknown, key=lambda one: (one.name, one.path)):
            actor.rank, actor.rank_source = next(free), "the order of host and process id, a guess"
        doubts.append(
            (
                "guessed-ranks",
                f"{len(unknown)} processes say nowhere which rank they are; they were numbered by host and process id",
                "capture with NCCL_DEBUG_SUBSYS=INIT,… or put the rank into the file's name",
            )
        )
    _label(actors, doubts)
    how.update(dict.fromkeys(actor.rank_source for actor in actors))
    return "; ".join(how)


def _world(actor: Actor) -> CommUse | None:
    best = None
    for use in actor.uses:
        if (
            use.parent is None
            and use.rank is not None
            and use.size is not None
            and (best is None or use.size > (best.size or 0))
        ):
            best = use
    return best


def _linked(actors: Sequence[Actor]) -> list[int]:
    """A number per actor, equal for those that communicators with ids link, directly or by others: one run."""
    run = list(range(len(actors)))
    first: dict[Hashable, int] = {}
    for number, actor in enumerate(actors):
        for key in {(use.comm_id, use.size) for use in actor.uses if use.comm_id is not None}:
            other = first.setdefault(key, number)
            if run[other] != run[number]:
                low, high = sorted((run[other], run[number]))
                run = [low if one == high else one for one in run]
    return run


def _number_by_process(actors: Sequence[Actor], doubts: list[tuple[str, str, str]]) -> None:
    """One run without a communicator of all ranks: ranks in its parts repeat, so host and process id number them."""
    for number, actor in enumerate(sorted(actors, key=_by_process)):
        actor.rank, actor.rank_source = number, "the order of host and process id, a guess"
        actor.label = f"rank {number}"
    doubts.append(
        (
            "guessed-ranks",
            "no communicator holds all ranks, so the processes were numbered by host and process id",
            "put the rank into the file's name",
        )
    )


def _by_process(actor: Actor) -> tuple[str, int, str, str]:
    pid = actor.segments[0].pid
    return (actor.segments[0].host, int(pid) if pid.isdigit() else 0, actor.device or "", actor.path)


def _label(actors: Sequence[Actor], doubts: list[tuple[str, str, str]]) -> None:
    counts = Counter(actor.rank for actor in actors)
    if not counts or max(counts.values()) == 1:
        for actor in actors:
            actor.label = f"rank {actor.rank}"
        return
    linked = _linked(actors)
    repeated = Counter((run, actor.rank) for run, actor in zip(linked, actors, strict=True))
    if max(repeated.values()) > 1 and len(set(linked)) == 1:
        _number_by_process(actors, doubts)
        return
    runs: dict[Hashable, int] = {}
    files: dict[int, dict[str, None]] = defaultdict(dict)
    for actor in actors:
        run = runs.setdefault(actor.world if actor.world is not None else actor.path, len(runs) + 1)
        actor.label = f"run {run} rank {actor.rank}"
        files[run][PurePath(actor.path).name] = None
    shown = "; ".join(f"run {run}: {', '.join(list(names)[:3])}" for run, names in list(files.items())[:4])
    doubts.append(
        (
            "mixed-runs",
            (
                f"the input holds {len(runs)} groups of processes whose "
                f"ranks repeat, so it mixes runs or replicas ({shown})"
            ),
            "give the files of one run if they are not meant to be together",
        )
    )


def _match(
    actors: Sequence[Actor], doubts: list[tuple[str, str, str]]
) -> tuple[list[Communicator], list[list[tuple[int, CommUse]]], tuple[str, ...], list[str]]:
    how: Counter[str] = Counter()
    unmatched: list[str] = []
    by_key: dict[Hashable, list[tuple[int, CommUse]]] = {}
    guessed: list[tuple[int, CommUse]] = []
    splits: list[tuple[int, CommUse]] = []
    for number, actor in enumerate(actors):
        ordered = sorted(
            actor.uses, key=lambda use: (use.created_at, use.first_call if use.first_call is not None else 2**62)
        )
        for use in ordered:
            use.key = _key(actor, use)
            listed = actor.segments[0].members.get(use.name)
            if use.rank is None and listed is not None and actor.rank in listed:
                use.rank = listed.index(actor.rank)
            if use.key is not None:
                by_key.setdefault(use.key, []).append((number, use))
            else:
                (splits if use.parent is not None else guessed).append((number, use))
    guess_keys(actors, guessed, by_key, doubts, unmatched)
    joined = {id(use) for members in by_key.values() for _, use in members}
    for number, use in guessed:
        if use.key is not None and id(use) not in joined:
            by_key.setdefault(use.key, []).append((number, use))
    for number, use in splits:  # a parent's key is known before its children's, which were created later
        parent = use.parent.key if use.parent is not None and use.parent.key is not None else None
        use.key = ("split", parent, use.ordinal, use.color)
        by_key.setdefault(use.key, []).append((number, use))
    _add_silent_members(actors, by_key)
    _add_processes_to_whole_guesses(actors, by_key)
    _add_members_of_unlisted_groups(actors, by_key, doubts)
    communicators: list[Communicator] = []
    uses: list[list[tuple[int, CommUse]]] = []
    for key, group in by_key.items():
        assert isinstance(key, tuple)
        size = max((use.size or 0 for _, use in group), default=0)
        size = size or (key[1] if key[0] == "guess" else len(group))
        for _, use in group:
            use.comm = len(communicators)
        communicators.append(
            Communicator(name=_comm_name(key, group, len(communicators)), size=size, ranks=_ranks_of(group))
        )
        uses.append(group)
        how[_HOW[key[0]]] += 1
    return communicators, uses, tuple(f"{count} by {text}" for text, count in how.items()), unmatched


def _ranks_of(group: Sequence[tuple[int, CommUse]]) -> dict[int, int]:
    """Each actor's rank in a communicator; those that no line tells take the free ones in the order of actors."""
    taken = {use.rank for _, use in group if use.rank is not None}
    free = (rank for rank in range(2 * len(group) + 1) if rank not in taken)
    ordered = sorted(group, key=lambda one: one[0])
    return {number: use.rank if use.rank is not None else next(free) for number, use in ordered}


def _add_silent_members(actors: Sequence[Actor], by_key: dict[Hashable, list[tuple[int, CommUse]]]) -> None:
    """Members that a group's list names and that left data, but no call on this group: they are missing, not unseen."""
    by_rank: dict[int, list[int]] = defaultdict(list)
    for number, actor in enumerate(actors):
        if actor.rank is not None:
            by_rank[actor.rank].append(number)
    for key, group in by_key.items():
        listed = key[2] if isinstance(key, tuple) and key[0] == "name" else None
        if not isinstance(listed, tuple):
            continue
        present = {number for number, _ in group}
        for rank in listed:
            numbers = by_rank.get(rank, [])
            if len(numbers) == 1 and numbers[0] not in present:
                use = CommUse(name=str(group[0][1].name), size=len(listed), rank=listed.index(rank), key=key, number=-1)
                actors[numbers[0]].uses.append(use)
                group.append((numbers[0], use))


def _add_processes_to_whole_guesses(actors: Sequence[Actor], by_key: dict[Hashable, list[tuple[int, CommUse]]]) -> None:
    """A guessed communicator as large as the number of processes holds all of them, also those that never used it."""
    for key, group in by_key.items():
        if not isinstance(key, tuple) or key[0] != "guess" or key[1] != len(actors):
            continue
        present = {number for number, _ in group}
        for number, actor in enumerate(actors):
            if number not in present:
                use = CommUse(name="", size=key[1], key=key, number=-1)
                actor.uses.append(use)
                group.append((number, use))


def _add_members_of_unlisted_groups(
    actors: Sequence[Actor], by_key: dict[Hashable, list[tuple[int, CommUse]]], doubts: list[tuple[str, str, str]]
) -> None:
    """Gloo's dumps list no members. The default group holds all ranks; so does, as a guess, a group with one user."""
    for key, group in by_key.items():
        unlisted = isinstance(key, tuple) and key[0] == "name" and key[2] is None
        desc = group[0][1].desc
        if not unlisted or len(actors) < 2 or (desc != "default_pg" and len(group) > 1):
            continue
        present = {number for number, _ in group}
        for number, actor in enumerate(actors):
            if number not in present:
                use = CommUse(name=group[0][1].name, key=key, number=-1)
                actor.uses.append(use)
                group.append((number, use))
        if desc != "default_pg":
            doubts.append(
                (
                    "guessed-members",
                    f"the dumps list no members of group {group[0][1].name} and one rank used it; all were taken",
                    "check that this group holds all ranks",
                )
            )


_HOW = {
    "id": "the id that every member prints",
    "name": "the process group's name",
    "split": "(parent, split number, colour)",
    "guess": "size and agreement of the calls, a guess",
}


def _key(actor: Actor, use: CommUse) -> Hashable:
    """What identifies a communicator on all ranks; None for the child of a split, and where nothing does."""
    if actor.segments[0].format == "nsys":  # the communicator's hash is its name, whether its creation was seen or not
        return ("id", use.name)
    if use.comm_id is not None:
        return ("id", use.comm_id, use.size)
    if actor.segments[0].format != "nccl-log":
        members = actor.segments[0].members.get(use.name)
        return ("name", use.name, members if members is not None else use.size)
    return None


def is_guess(key: Hashable) -> bool:
    """Whether a communicator, or one that it was split from, was matched by a guess."""
    if not isinstance(key, tuple):
        return False
    return key[0] == "guess" or (key[0] == "split" and (key[1] is None or is_guess(key[1])))


def _comm_name(key: tuple[Any, ...], group: Sequence[tuple[int, CommUse]], number: int) -> str:
    use = group[0][1]
    size = use.size or len(group)
    letter = _letter(number)
    if key[0] == "id":
        return f"{letter} (commId {str(key[1])[:12]}, {size} ranks)"
    if key[0] == "name":
        desc = f":{use.desc.replace(' ', '-')}" if use.desc not in {"", "undefined"} else ""
        return f"{use.name}{desc} ({size} ranks)"
    if key[0] == "split":
        return f"{letter} (split {use.ordinal} colour {use.color} of {_parent_letter(use)}, {size} ranks)"
    if key[0] == "guess" and key[3]:
        return f"{letter} (perhaps {key[1]} ranks)"
    return f"{letter} ({size} ranks)"


def _parent_letter(use: CommUse) -> str:
    return _letter(use.parent.comm) if use.parent is not None and use.parent.comm >= 0 else "an earlier one"


def _letter(number: int) -> str:
    name = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, 26)
        name = chr(ord("A") + rest) + name
    return name
