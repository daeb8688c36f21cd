"""One rank's calls as arrays: which communicator, which signature, and the record each came from."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvbench.collectives.nccl_lines import P2P, ROOTED
from kvbench.collectives.summary import Kind, ProcessLog
from kvbench.core.collectives import Signature
from kvbench.deadlock_diagnose.identity import CALLS, Actor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


class Tables:
    """Numbers for signatures, shared by all ranks."""

    def __init__(self) -> None:
        self.signatures: list[Signature] = []
        self.numbers: dict[Signature, int] = {}
        self._p2p: Any = None

    @property
    def p2p(self) -> Any:
        """For each signature, whether it is a Send or a Recv."""
        import numpy as np

        if self._p2p is None or len(self._p2p) != len(self.signatures):
            self._p2p = np.array([one.op.startswith(("Send:", "Recv:")) for one in self.signatures], dtype=bool)
        return self._p2p

    def number(self, signature: Signature) -> int:
        found = self.numbers.get(signature)
        if found is None:
            found = self.numbers[signature] = len(self.signatures)
            self.signatures.append(signature)
        return found


def signature_of(kind: Kind) -> Signature:
    """What a call's kind says about what must agree."""
    detail = dict(kind.detail)
    size = detail.get("bytes")
    return Signature(
        op=kind.op,
        count=kind.count,
        dtype=kind.dtype,
        redop=kind.redop,
        root=kind.root if kind.op in ROOTED else None,
        size_bytes=int(size) if size is not None else None,
    )


class RankRecords:
    """One rank's calls and group marks as arrays: communicator, signature, and the record they came from."""

    def __init__(self, actor: Actor, tables: Tables) -> None:
        self.actor = actor
        self.tables = tables
        self.uses = {use.number: use for use in actor.uses}
        self._lookup: dict[int, Any] = {}
        names: dict[str, list[Any]] = defaultdict(list)
        for use in actor.uses:
            names[use.name].append(use)
        self.reused = {name for name, uses in names.items() if len(uses) > 1}
        self.sources = {kind.source for segment in actor.segments for kind in segment.kinds if kind.what == "call"}

    def chunks(self, size: int) -> "Iterator[tuple[Ints, Ints, Ints]]":
        """(communicator, signature, record number), `size` calls at a time; marks have communicator -1."""
        import numpy as np

        held: list[tuple[Ints, Ints, Ints]] = []
        length = 0
        for part in self._parts():
            held.append(part)
            length += len(part[0])
            if length < size:
                continue
            whole = [np.concatenate([one[column] for one in held]) for column in range(3)]
            full = length - length % size
            for start in range(0, full, size):
                yield whole[0][start : start + size], whole[1][start : start + size], whole[2][start : start + size]
            held = [(whole[0][full:], whole[1][full:], whole[2][full:])]
            length -= full
        if length:
            comm, signature, record = (np.concatenate([one[column] for one in held]) for column in range(3))
            yield comm, signature, record

    def _parts(self) -> "Iterator[tuple[Ints, Ints, Ints]]":
        import numpy as np

        counts = self._count_sources() if {"COLL", "CALL"} <= self.sources else {}
        both = bool(counts)
        repeated = both and counts["COLL"] == counts["CALL"]
        for at, segment, ids in self.actor.records():
            comm_of, signature_of_, keep = self._table(segment)
            records = np.arange(at, at + len(ids), dtype=np.int64)
            comm, signature = comm_of[ids], signature_of_[ids]
            chosen = keep[ids]
            if self.reused:
                self._reused_names(segment, ids, records, comm)
            if repeated:
                is_coll = np.array([kind.source == "COLL" for kind in segment.kinds], dtype=bool)
                chosen = chosen & ~is_coll[ids]
            elif both:
                chosen = chosen & ~_doubled(segment, ids)
            chosen = chosen & (comm != -3)
            yield comm[chosen], signature[chosen], records[chosen]

    def _count_sources(self) -> dict[str, int]:
        counts = {"COLL": 0, "CALL": 0}
        for _, segment, ids in self.actor.records():
            for number in ids.tolist():
                kind = segment.kinds[number]
                if kind.what == "call":
                    counts[kind.source] = counts.get(kind.source, 0) + 1
        return counts

    def _table(self, segment: ProcessLog) -> tuple[Any, Any, Any]:
        import numpy as np

        found = self._lookup.get(id(segment.kinds))
        if found is not None:
            return found  # type: ignore[no-any-return]
        comms, signatures, keep = [], [], []
        by_name = {use.name: use for use in self.actor.uses}
        for kind in segment.kinds:
            use = by_name.get(kind.comm)
            mark = kind.what != "call"
            comms.append(-1 if mark else use.comm if use is not None and use.comm >= 0 else -3)
            peer = kind.root if kind.op in P2P else None
            signature = Signature(kind.what) if mark else signature_of(kind) if peer is None else _with_peer(kind, peer)
            signatures.append(self.tables.number(signature))
            keep.append(kind.what in CALLS)
        found = (np.array(comms, dtype=np.int64), np.array(signatures, dtype=np.int64), np.array(keep, dtype=bool))
        self._lookup[id(segment.kinds)] = found
        return found

    def _reused_names(self, segment: ProcessLog, ids: Any, records: Any, comm: Any) -> None:
        """Gives calls on a reused pointer the communicator that the pointer meant at that time."""
        import numpy as np

        for name in self.reused:
            kinds = np.array([kind.comm == name and kind.what == "call" for kind in segment.kinds], dtype=bool)
            here = kinds[ids]
            if not here.any():
                continue
            uses = [use for use in self.actor.uses if use.name == name]
            starts = np.array([use.created_at for use in uses], dtype=np.int64)
            targets = np.array([use.comm if use.comm >= 0 else -3 for use in uses], dtype=np.int64)
            which = np.clip(np.searchsorted(starts, records[here], side="right") - 1, 0, len(uses) - 1)
            comm[here] = targets[which]


def _with_peer(kind: Kind, peer: int) -> Signature:
    return Signature(
        op=f"{kind.op}:{peer}", count=kind.count, dtype=kind.dtype, size_bytes=signature_of(kind).size_bytes
    )


def _doubled(segment: ProcessLog, ids: Any) -> Any:
    """Which COLL records repeat a CALL record right before or after them (both subsystems were on)."""
    import numpy as np

    drop = np.zeros(len(ids), dtype=bool)
    used = np.zeros(len(ids), dtype=bool)
    for at, number in enumerate(ids.tolist()):
        kind = segment.kinds[number]
        if kind.what != "call" or kind.source != "COLL":
            continue
        for other in (at - 1, at + 1):
            if 0 <= other < len(ids) and not used[other]:
                twin = segment.kinds[int(ids[other])]
                if twin.source == "CALL" and twin._replace(source="", num_ranks=None) == kind._replace(
                    source="", num_ranks=None
                ):
                    drop[at] = used[other] = True
                    break
    return drop
