"""From millions of calls to the few that matter: skips what all ranks did alike, and numbers the calls around the rest.

Chunks that every member of every communicator holds with the same calls at the same positions of its program cannot
hold a divergence, and no cycle either (the position is a common order). They are skipped with numpy, a chunk at a time.
Where programs differ in shape, a consistent cut is used: every communicator has the same number of calls before it on
each of its members.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.collectives.nccl_lines import P2P, ROOTED
from kvbench.collectives.summary import Kind
from kvbench.core.collectives import Call, Communicator, Instance, Signature, conflict, number_calls
from kvbench.core.deadlock import Analysis, analyse
from kvbench.core.firing import cycles, fire
from kvbench.deadlock_diagnose.identity import Actor, Identity
from kvbench.deadlock_diagnose.records import RankRecords, Tables

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

CHUNK = 4096
PIECE = 256
FIRST_WINDOW = 16_384
TAIL_WINDOW = 50_000
_SHIFTS = 64
EXPLICIT = frozenset({"CALL", "NVTX"})  # sources that show groups


@dataclass(slots=True, kw_only=True)
class Window:
    """Numbered calls of every rank, the analysis of them, and what was left out of it."""

    programs: list[list[Call]]
    analysis: Analysis
    num_calls: list[int]
    skipped: list[int]
    streams_known: bool
    notes: list[tuple[str, str, str]]
    open_groups: list[tuple[int, int]]
    cycle_if_ungrouped: bool = False


def build_window(identity: Identity, *, tail_window: int = TAIL_WINDOW) -> Window:
    """Finds the calls that matter and analyses them."""
    tables = Tables()
    ranks = [RankRecords(actor, tables) for actor in identity.actors]
    partial = any(actor.lost_beginning for actor in identity.actors)
    notes: list[tuple[str, str, str]] = []
    iterators = [rank.chunks(CHUNK) for rank in ranks]
    skipped_chunks, held = 0, [next(iterator, None) for iterator in iterators]
    before: Counter[int] = Counter()
    while not partial and (counts := _aligned(held, identity.communicators, tables, CHUNK)) is not None:
        skipped_chunks += 1
        before.update(counts)
        held = [next(iterator, None) for iterator in iterators]
    skipped_calls = skipped_chunks * CHUNK
    if not partial and all(chunk is not None for chunk in held):
        skipped_calls += _trim(held, identity.communicators, tables, before)
    rest = [_rest(first, iterator) for first, iterator in zip(held, iterators, strict=True)]
    skipped = [skipped_calls for _ in rest]
    builder = _Builder(identity, ranks, tables, rest, before)
    longest = max((len(one[0]) for one in rest), default=0)
    if partial:
        builder.align_tails(notes)
    if longest <= tail_window:
        programs = builder.programs([0] * len(rest), None)
        analysis = builder.analyse(programs)
        return builder.window(programs, analysis, skipped, notes)
    programs = builder.programs([0] * len(rest), FIRST_WINDOW)
    analysis = builder.analyse(programs)
    if any(cause.kind not in {"not-entered", "host-cycle", "p2p-unmatched"} for cause in analysis.causes):
        notes.append(
            (
                "window",
                (
                    f"the first {FIRST_WINDOW} calls per rank after the last common point "
                    f"were analysed; {longest - FIRST_WINDOW} later ones follow from it"
                ),
                "nothing to do: what comes after the first divergence is its consequence",
            )
        )
        return builder.window(programs, analysis, skipped, notes)
    starts = builder.consistent_cut(builder.before_divergence(tail_window))
    programs = builder.programs(starts, None)
    analysis = builder.analyse(programs)
    notes.append(
        (
            "order-window",
            (
                "each communicator was compared over all its calls; the order "
                f"across communicators only over the last {tail_window} calls per rank"
            ),
            "pass a larger --order-window to look further back",
        )
    )
    return builder.window(programs, analysis, [one + start for one, start in zip(skipped, starts, strict=True)], notes)


def _trim(
    held: "list[tuple[Ints, Ints, Ints] | None]",
    communicators: Sequence[Communicator],
    tables: Tables,
    before: "Counter[int]",
) -> int:
    """Cuts off what ranks did alike at the start of the first chunk that differs; returns how many calls that is."""
    for start in range(0, CHUNK, PIECE):
        pieces = [None if chunk is None else _slice(chunk, start, start + PIECE) for chunk in held]
        counts = _aligned(pieces, communicators, tables, PIECE)
        if counts is None:
            held[:] = [None if chunk is None else _slice(chunk, start, None) for chunk in held]
            return start
        before.update(counts)
    return 0


def _slice(chunk: "tuple[Ints, Ints, Ints]", start: int, stop: int | None) -> "tuple[Ints, Ints, Ints]":
    return chunk[0][start:stop], chunk[1][start:stop], chunk[2][start:stop]


def _aligned(
    held: "Sequence[tuple[Ints, Ints, Ints] | None]",
    communicators: Sequence[Communicator],
    tables: Tables,
    length: int,
) -> Mapping[int, int] | None:
    """How many calls of each communicator a chunk holds, if all members agree call by call at the same positions.

    None where they do not, where a chunk is not full, or where it holds Sends and Recvs, which meet crosswise.
    """
    import numpy as np

    if not held or any(chunk is None or len(chunk[0]) < length for chunk in held):
        return None
    alike: dict[int, tuple[bytes, int]] = {}
    calls: dict[int, int] = {}
    for chunk in held:
        if chunk is None:
            return None
        comm, signature, _ = chunk
        if tables.p2p[signature].any():
            return None
        for one in np.unique(comm).tolist():
            if one < 0:
                continue
            where = np.flatnonzero(comm == one)
            content = where.tobytes() + signature[where].tobytes()
            before = alike.get(one)
            if before is not None and before[0] != content:
                return None
            alike[one] = (content, (before[1] if before else 0) + 1)
            calls[one] = len(where)
    complete = all(count == len(communicators[one].ranks) for one, (_, count) in alike.items())
    return calls if complete else None


def _rest(
    first: "tuple[Ints, Ints, Ints] | None", iterator: "Iterator[tuple[Ints, Ints, Ints]]"
) -> "tuple[Ints, Ints, Ints]":
    import numpy as np

    parts = [] if first is None else [first, *iterator]
    if not parts:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    return tuple(np.concatenate([part[column] for part in parts]) for column in range(3))  # type: ignore[return-value]


def _end_alignment(base: "Ints", one: "Ints") -> tuple[int, bool]:
    """Where `one` begins in `base`, judged from their ends, and whether another place fits as well."""
    import numpy as np

    best: list[tuple[int, int, int]] = []
    for shift in sorted(range(-_SHIFTS, _SHIFTS + 1), key=abs):
        start = len(base) - len(one) + shift
        low, high = max(start, 0), min(start + len(one), len(base))
        if high - low > 0:
            different = int(np.count_nonzero(base[low:high] != one[low - start : high - start]))
            best.append((different + abs(shift), abs(shift), start))  # what hangs over at the end agrees with nothing
    cost, _, start = min(best)
    return start, sum(1 for other in best if other[0] == cost) > 1


class _Builder:
    """Turns arrays into numbered calls, from a cut on."""

    def __init__(
        self,
        identity: Identity,
        ranks: Sequence[RankRecords],
        tables: Tables,
        rest: "Sequence[tuple[Ints, Ints, Ints]]",
        before: Mapping[int, int],
    ) -> None:
        self.identity = identity
        self.ranks = ranks
        self.tables = tables
        self.rest = list(rest)
        self.first_index: list[dict[int, int]] = [{comm: count + 1 for comm, count in before.items()} for _ in rest]
        self.open_groups: list[tuple[int, int]] = []
        self.streams_known = self._streams_known()
        self._common_starts()

    def _streams_known(self) -> bool:
        kinds = [
            kind
            for rank in self.ranks
            for segment in rank.actor.segments
            for kind in segment.kinds
            if kind.what == "call"
        ]
        return any(kind.stream is not None for kind in kinds)

    def _common_starts(self) -> None:
        """Drops calls before the first position that all members still hold, where a format numbers its calls."""
        import numpy as np

        if not any(segment.seq_ids is not None for rank in self.ranks for segment in rank.actor.segments):
            return
        first: dict[int, int] = {}
        sequences = []
        for rank, (comm, signature, record) in zip(self.ranks, self.rest, strict=True):
            seq_ids = rank.actor.segments[0].seq_ids
            numbers = np.array(seq_ids if seq_ids is not None else [], dtype=np.int64)
            mine = numbers[record] if len(numbers) else np.full(len(record), -1)
            mine = np.where(self.tables.p2p[signature], -1, mine)
            sequences.append(mine)
            for one in np.unique(comm[mine >= 0]).tolist() if len(comm) else []:
                low = int(mine[(comm == one) & (mine >= 0)].min())
                first[one] = max(first.get(one, 0), low)
        rest = []
        for number, ((comm, signature, record), mine) in enumerate(zip(self.rest, sequences, strict=True)):
            if len(comm) == 0:
                rest.append((comm, signature, record))
                continue
            floor = np.array([first.get(one, 0) for one in range(len(self.identity.communicators))] + [0, 0, 0])
            keep = (mine < 0) | (mine >= floor[comm])
            rest.append((comm[keep], signature[keep], record[keep]))
            self.first_index[number] = dict(first)
        self.rest = rest

    def align_tails(self, notes: list[tuple[str, str, str]]) -> None:
        """Finds how sequences that begin somewhere in a run stand against each other, from their ends."""
        ambiguous = 0
        for comm, communicator in enumerate(self.identity.communicators):
            sequences = {}
            for program in communicator.ranks:
                mine, signature, _ = self.rest[program]
                sequences[program] = signature[(mine == comm) & ~self.tables.p2p[signature]]
            known = {program: one for program, one in sequences.items() if len(one)}
            if not any(self.ranks[program].actor.lost_beginning for program in known):
                continue
            whole = [program for program in known if not self.ranks[program].actor.lost_beginning]
            reference = max(whole or known, key=lambda program: len(known[program]))
            starts = {}
            for program, one in known.items():
                start, unsure = _end_alignment(known[reference], one)
                starts[program] = 0 if program in whole else start
                ambiguous += program != reference and unsure
            self._drop_before_common_start(comm, starts, numbered=bool(whole))
        notes.append(
            (
                "tail-alignment",
                "the beginning of some files was not read or is lost, so their calls were matched from the ends of the "
                "sequences, and numbers count from the first call that all members still hold unless a whole log tells"
                + (f"; {ambiguous} of them match in more than one way and the nearest was taken" if ambiguous else ""),
                "give the whole logs, without --tail-bytes, for a proof",
            )
        )

    def _drop_before_common_start(self, comm: int, starts: Mapping[int, int], *, numbered: bool) -> None:
        """Forgets calls that some member's file no longer holds; numbers are the run's where a whole log tells."""
        import numpy as np

        floor = max(starts.values())
        for program, start in starts.items():
            self.first_index[program][comm] = floor + 1 if numbered else 1
            surplus = self._collectives(program, comm)[: floor - start]
            keep = np.ones(len(self.rest[program][0]), dtype=bool)
            keep[surplus] = False
            self.rest[program] = (
                self.rest[program][0][keep],
                self.rest[program][1][keep],
                self.rest[program][2][keep],
            )

    def before_divergence(self, tail: int) -> list[int]:
        """Where to start in each rank: before the first mismatch of a communicator, else `tail` calls from the end."""
        import numpy as np

        upper = [max(len(one[0]) - tail, 0) for one in self.rest]
        for comm, communicator in enumerate(self.identity.communicators):
            where = {program: self._collectives(program, comm) for program in communicator.ranks}
            values = {program: self.rest[program][1][at] for program, at in where.items()}
            if len(values) < 2:
                continue
            shortest = min(len(one) for one in values.values())
            reference = next(iter(values.values()))[:shortest]
            first = shortest
            for one in values.values():
                different = np.flatnonzero(one[:shortest] != reference)
                if len(different):
                    first = min(first, int(different[0]))
            for program, at in where.items():
                if first < len(at):
                    upper[program] = min(upper[program], max(int(at[first]) - FIRST_WINDOW // 4, 0))
        return upper

    def _collectives(self, program: int, comm: int) -> Any:
        import numpy as np

        mine, signature, _ = self.rest[program]
        return np.flatnonzero((mine == comm) & ~self.tables.p2p[signature])

    def _meetings(self) -> list[dict[int, Any]]:
        """For each communicator and each channel of Sends and Recvs: where its calls stand in each member's program."""
        import numpy as np

        found = []
        for comm, communicator in enumerate(self.identity.communicators):
            found.append({program: self._collectives(program, comm) for program in communicator.ranks})
            program_of = {rank: program for program, rank in communicator.ranks.items()}
            channels: dict[tuple[int, int], dict[int, Any]] = defaultdict(dict)
            for program, rank in communicator.ranks.items():
                mine, signature, _ = self.rest[program]
                for number in np.unique(signature[(mine == comm) & self.tables.p2p[signature]]).tolist():
                    op, _, peer_text = self.tables.signatures[number].op.partition(":")
                    peer = int(peer_text)
                    channel = (rank, peer) if op == "Send" else (peer, rank)
                    where = np.flatnonzero((mine == comm) & (signature == number))
                    before = channels[channel].get(program)
                    channels[channel][program] = where if before is None else np.sort(np.concatenate([before, where]))
            for (source, target), members in channels.items():
                for rank in (source, target):
                    if rank in program_of:
                        members.setdefault(program_of[rank], np.zeros(0, dtype=np.int64))
                found.append(members)
        return found

    def consistent_cut(self, upper: list[int]) -> list[int]:
        """The latest positions at or before `upper` at which every communicator has equally many calls behind it."""
        import numpy as np

        cut = list(upper)
        meetings = self._meetings()
        changed = True
        while changed:
            changed = False
            for members in meetings:
                counts = {program: int(np.searchsorted(where, cut[program])) for program, where in members.items()}
                low = min(counts.values(), default=0)
                for program, count in counts.items():
                    if count > low:
                        cut[program] = int(members[program][low])
                        changed = True
        for program, position in enumerate(cut):
            comm, signature, _ = self.rest[program]
            comm = comm[:position][~self.tables.p2p[signature[:position]]]
            for one in np.unique(comm).tolist():
                if one >= 0:
                    self.first_index[program][one] = self.first_index[program].get(one, 1) + int(
                        np.count_nonzero(comm == one)
                    )
        return cut

    def programs(self, starts: Sequence[int], length: int | None) -> list[list[Call]]:
        """Numbered calls from a start in each rank."""
        self.open_groups = []
        programs = []
        for number, (rank, arrays, start) in enumerate(zip(self.ranks, self.rest, starts, strict=True)):
            stop = None if length is None else start + length
            comm, signature, record = (column[start:stop].tolist() for column in arrays)
            programs.append(self._program(number, rank, comm, signature, record))
        return programs

    def _program(
        self, number: int, rank: RankRecords, comm: list[int], signature: list[int], record: list[int]
    ) -> list[Call]:
        kinds = _kinds_at(rank.actor, record)
        explicit = bool(EXPLICIT & rank.sources)
        groups = _groups(comm, kinds, explicit)
        rows = []
        for one, which, position, kind, group in zip(comm, signature, record, kinds, groups, strict=True):
            if one < 0:
                continue
            found = self.tables.signatures[which]
            peer = None
            if kind.op in P2P:
                peer = kind.root
                found = Signature(kind.op, found.count, found.dtype, None, None, found.size_bytes)
            rows.append((one, found, kind.stream, group, position, kind.thread, peer))
        open_group = _open_group(kinds, record)
        if open_group is not None:
            self.open_groups.append((number, open_group))
        return number_calls(
            rows, program=number, communicators=self.identity.communicators, first_index=self.first_index[number]
        )

    def analyse(self, programs: list[list[Call]]) -> Analysis:
        """Analyses what had not completed: a call that completed met its partners, whatever order it was issued in."""
        fired = self._completed(programs)
        if fired:
            programs = [[call for call in calls if call.instance not in fired] for calls in programs]
        return analyse(programs, self.identity.communicators, streams_known=self.streams_known)

    def _completed(self, programs: Sequence[Sequence[Call]]) -> set[Instance]:
        """Instances that ran: one member's completed, and up to it all members entered alike.

        A rooted call may complete on its root before the others enter, so it needs all its members.
        """
        done = [_completed_records(rank.actor) for rank in self.ranks]
        if not any(done):
            return set()
        entered: dict[Instance, dict[int, Call]] = defaultdict(dict)
        for program, calls in enumerate(programs):
            for call in calls:
                entered[call.instance][program] = call
        last: dict[int, int] = {}
        fired: set[Instance] = set()
        for instance, calls_ in entered.items():
            completed = sum(call.position in done[program] for program, call in calls_.items())
            everyone = completed == len(calls_)
            if instance.is_p2p:
                if everyone and len(calls_) > 1:
                    fired.add(instance)
            elif everyone or (completed and next(iter(calls_.values())).signature.op not in ROOTED):
                last[instance.comm] = max(last.get(instance.comm, 0), instance.index)
        for instance in sorted(one for one in entered if not one.is_p2p):
            comm, members = instance.comm, self.identity.communicators[instance.comm].ranks
            calls_ = entered[instance]
            if instance.index > last.get(comm, 0):
                continue
            if len(calls_) < len(members) or conflict({one: call.signature for one, call in calls_.items()}):
                last[comm] = 0  # from the first difference on, nothing of this communicator is taken as done
            else:
                fired.add(instance)
        return fired

    def _cycle_if_ungrouped(self, programs: Sequence[Sequence[Call]]) -> bool:
        """Whether Sends and Recvs that were taken as groups, since COLL lines show none, would deadlock one by one."""
        if any(rank.sources - {"COLL"} for rank in self.ranks) or not self.streams_known:
            return False
        if not any(call.instance.is_p2p for calls in programs for call in calls):
            return False
        alone = [[call._replace(group=0) if call.instance.is_p2p else call for call in calls] for calls in programs]
        residue = fire(alone, self.identity.communicators, queues="streams")
        return bool(cycles(residue.waits, issued=True))

    def window(
        self, programs: list[list[Call]], analysis: Analysis, skipped: list[int], notes: list[tuple[str, str, str]]
    ) -> Window:
        return Window(
            programs=programs,
            analysis=analysis,
            num_calls=[len(one[0]) + before for one, before in zip(self.rest, skipped, strict=True)],
            skipped=skipped,
            streams_known=self.streams_known,
            notes=notes,
            open_groups=self.open_groups,
            cycle_if_ungrouped=not analysis.causes and self._cycle_if_ungrouped(programs),
        )


def _completed_records(actor: Actor) -> set[int]:
    """Numbers of an actor's records whose state says that the call completed; only flight recorders tell."""
    found: set[int] = set()
    if not any(kind.get("state") == "completed" for segment in actor.segments for kind in segment.kinds):
        return found
    for at, segment, ids in actor.records():
        complete = {number for number, kind in enumerate(segment.kinds) if kind.get("state") == "completed"}
        if complete:
            found.update(at + offset for offset, number in enumerate(ids.tolist()) if number in complete)
    return found


def _kinds_at(actor: Actor, records: list[int]) -> list[Kind]:
    """The kinds of records, in the order of `records`, which ascends."""
    found: list[Kind] = []
    at_record = 0
    for at, segment, ids in actor.records():
        end = at + len(ids)
        while at_record < len(records) and records[at_record] < end:
            found.append(segment.kinds[ids[records[at_record] - at]])
            at_record += 1
        if at_record == len(records):
            break
    return found


def _groups(comm: Sequence[int], kinds: Sequence[Kind], explicit: bool) -> list[int]:
    """A group number for each record. COLL lines show no groups: there, neighbouring Sends and Recvs may be one."""
    groups: list[int] = []
    depth: dict[str, int] = defaultdict(int)
    current: dict[str, int] = {}
    last_p2p: tuple[int, str, int] | None = None
    following = 1
    for one, kind in zip(comm, kinds, strict=True):
        if kind.what == "group-start":
            if depth[kind.thread] == 0:
                current[kind.thread] = following
                following += 1
            depth[kind.thread] += 1
            groups.append(0)
        elif kind.what == "group-end":
            depth[kind.thread] = max(depth[kind.thread] - 1, 0)
            groups.append(0)
        elif depth[kind.thread]:
            groups.append(current[kind.thread])
        elif kind.op in P2P and not explicit:
            if last_p2p is not None and last_p2p[:2] == (one, kind.thread):
                groups.append(last_p2p[2])
            else:
                groups.append(following)
                last_p2p = (one, kind.thread, following)
                following += 1
            continue
        else:
            groups.append(0)
        last_p2p = None
    return groups


def _open_group(kinds: Sequence[Kind], records: Sequence[int]) -> int | None:
    """The record that opened a group which never closed."""
    opened: dict[str, list[int]] = defaultdict(list)
    for kind, record in zip(kinds, records, strict=True):
        if kind.what == "group-start":
            opened[kind.thread].append(record)
        elif kind.what == "group-end" and opened[kind.thread]:
            opened[kind.thread].pop()
    left = [stack[0] for stack in opened.values() if stack]
    return min(left) if left else None
