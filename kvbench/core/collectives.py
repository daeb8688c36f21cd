"""Collective calls as ranks issued them: signatures, communicators, and which call of one rank meets which of another.

The model: rank r issues calls in host order. The k-th collective of communicator C on r meets the k-th of every other
member: that meeting is an *instance*. The k-th Send from s to d on C meets the k-th Recv from s on d. NCCL keeps the
calls of one communicator in host order even when their streams differ, so this numbering is exact.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

FIELDS = ("op", "count", "dtype", "redop", "root", "size_bytes")


@dataclass(frozen=True, slots=True)
class Signature:
    """What must agree on all members of a communicator. None is unknown to the input, and agrees with anything."""

    op: str
    count: int | None = None
    dtype: str | None = None
    redop: str | None = None
    root: int | None = None
    size_bytes: int | None = None

    def differing_fields(self, other: "Signature") -> tuple[str, ...]:
        """Names of the fields that are known on both sides and differ."""
        pairs = ((item.name, getattr(self, item.name), getattr(other, item.name)) for item in fields(self))
        return tuple(name for name, mine, theirs in pairs if mine is not None and theirs is not None and mine != theirs)

    def __str__(self) -> str:
        parts = [self.op]
        if self.count is not None:
            parts.append(f"{self.count} {self.dtype}" if self.dtype else f"{self.count} elements")
        elif self.size_bytes is not None:
            parts.append(f"{self.size_bytes} B")
        if self.redop is not None and self.redop != "sum":
            parts.append(self.redop)
        if self.root is not None:
            parts.append(f"root {self.root}")
        return " ".join(parts)


class Instance(NamedTuple):
    """One meeting of calls. `source` and `target` are ranks in the communicator for a Send/Recv pair, else -1."""

    comm: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    source: int = -1
    target: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.source >= 0


class Call(NamedTuple):
    """One call of one rank. `group` 0 is no group; `position` is its number in the rank's own program."""

    instance: Instance
    signature: Signature
    stream: str | None = None
    group: int = 0
    position: int = 0
    thread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """`ranks` maps a program (its number in the input) to its rank here; `size` counts unseen members too."""

    name: str
    size: int
    ranks: Mapping[int, int] = field(default_factory=dict)

    @property
    def unseen(self) -> int:
        """Members of which the input holds no data: they are neither present nor missing."""
        return max(self.size - len(self.ranks), 0)


Program = Sequence[Call]


def number_calls(
    records: Sequence[tuple[int, Signature, str | None, int, int, str, int | None]],
    *,
    program: int,
    communicators: Sequence[Communicator],
    first_index: Mapping[int, int],
    first_channel: Mapping[tuple[int, int, int], int] | None = None,
) -> list[Call]:
    """Calls with their instances from `(comm, signature, stream, group, position, thread, peer)` in host order.

    `peer` is None for a collective. `first_index` holds the number of the first collective of a communicator where the
    records do not begin with the run. Numbers begin at 1, as PyTorch's sequence numbers do.
    """
    next_index: dict[int, int] = defaultdict(lambda: 1, first_index)
    next_channel: dict[tuple[int, int, int], int] = defaultdict(lambda: 1, first_channel or {})
    calls = []
    for comm, signature, stream, group, position, thread, peer in records:
        if peer is None:
            instance = Instance(comm, next_index[comm])
            next_index[comm] += 1
        else:
            mine = communicators[comm].ranks.get(program, -1)
            channel = (comm, mine, peer) if signature.op == "Send" else (comm, peer, mine)
            instance = Instance(comm, next_channel[channel], channel[1], channel[2])
            next_channel[channel] += 1
        calls.append(Call(instance, signature, stream, group, position, thread))
    return calls


def conflict(calls: Mapping[int, Signature]) -> tuple[str, ...]:
    """Names of the fields in which the signatures of one instance differ; a Send and its Recv differ only in size."""
    found: dict[str, None] = {}
    signatures = list(dict.fromkeys(calls.values()))
    for index, one in enumerate(signatures):
        for other in signatures[index + 1 :]:
            names = one.differing_fields(other)
            if {one.op, other.op} == {"Send", "Recv"}:
                names = tuple(name for name in names if name in {"count", "dtype", "size_bytes"})
            found.update(dict.fromkeys(names))
    return tuple(found)
