"""Which communicators of several ranks are one and the same, judged by their calls, where no id says so.

A *part* is a communicator as one program knows it. Parts of one size are put together so that the members of each block
agree best: in the calls themselves (operation, count, type, root; each as often), then in operations alone, then in the
order of the calls, then in the order of first use. It is a guess, and whoever uses it has to say so.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

_MOST_TRIED = 6  # 720 assignments; beyond, pairs are taken greedily
_DIGITS = 9
Score = tuple[float, ...]
Block = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """`owner` is the program, `rank` its rank in the run, `place` its rank in the communicator where that is known.

    `calls` says how often each call was made, `ops` the same by operation, `first` holds the first calls in order.
    """

    owner: int
    rank: int
    order: int
    place: int | None = None
    calls: Mapping[Hashable, int] = field(default_factory=dict)
    ops: Mapping[Hashable, int] = field(default_factory=dict)
    first: tuple[Hashable, ...] = ()


def blocks(parts: Sequence[Part], size: int) -> list[Block] | None:
    """Numbers of parts by communicator of `size` ranks; None where their known places contradict every partition."""
    return _Matching(parts, size).blocks()


def score(partition: Sequence[Block], parts: Sequence[Part], size: int) -> Score:
    """How well the members of each block agree, each with its block's most common calls; a lone member counts 0."""
    return _Matching(parts, size).score(partition)


class _Layer(NamedTuple):
    """One part of each program, with how often each class of equal parts stands in it, and the places taken."""

    members: dict[int, int]
    classes: Counter[int]
    places: Counter[int]


class _Matching:
    """Equal parts share a class, so that a thousand ranks with a few programs cost a few comparisons."""

    def __init__(self, parts: Sequence[Part], size: int) -> None:
        self.parts, self.size = parts, size
        numbers: dict[Hashable, int] = {}
        self.class_of = [
            numbers.setdefault((frozenset(part.calls.items()), part.first), len(numbers)) for part in parts
        ]
        self.example = dict(zip(self.class_of, parts, strict=True))
        self.known: dict[tuple[int, int], Score] = {}
        self.chosen: dict[Hashable, Sequence[int]] = {}

    def blocks(self) -> list[Block] | None:
        layers = self._layers()
        if len({part.owner for part in self.parts}) <= self.size:
            return self._best([layers])
        chosen: list[Block] | None = []
        for layer in layers:
            best = self._best(self._strided(layer))
            chosen = None if best is None or chosen is None else [*chosen, *best]
        return self._best([one for one in (chosen, self._clustered()) if one is not None])

    def score(self, partition: Sequence[Block]) -> Score:
        total = [0.0, 0.0, 0.0]
        for block in partition:
            if len(block) < 2 <= self.size:
                continue
            classes = Counter(self.class_of[number] for number in block)
            usual = _usual(classes)
            for one, count in classes.items():
                for at, value in enumerate(self._agreement(one, usual)):
                    total[at] += value * count
        return tuple(round(value / max(len(self.parts), 1), _DIGITS) for value in total)

    def _best(self, options: Sequence[Sequence[Block]]) -> list[Block] | None:
        """The first of the best-scoring partitions in which no block holds a rank or a program twice."""
        fitting = [one for one in options if all(self._fits(block) for block in one)]
        best = max(fitting, key=self.score, default=None)  # max keeps the first of equals
        return None if best is None else list(best)

    def _fits(self, block: Block) -> bool:
        places = [self.parts[number].place for number in block if self.parts[number].place is not None]
        owners = {self.parts[number].owner for number in block}
        return len(block) <= self.size and len(owners) == len(block) and len(set(places)) == len(places)

    def _agreement(self, one: int, other: int) -> Score:
        found = self.known.get((one, other))
        if found is None:
            mine, theirs = self.example[one], self.example[other]
            found = self.known[one, other] = (
                _shared(mine.calls, theirs.calls),
                _shared(mine.ops, theirs.ops),
                _prefix(mine.first, theirs.first),
            )
        return found

    def _layers(self) -> list[Block]:
        """One part of each program per layer, so that layers agree; the program with most parts sets their number."""
        by_owner: dict[int, list[int]] = {}
        for number in sorted(range(len(self.parts)), key=lambda one: (self.parts[one].owner, self.parts[one].order)):
            by_owner.setdefault(self.parts[number].owner, []).append(number)
        start = max(by_owner, key=lambda owner: len(by_owner[owner]))
        layers = [_Layer({}, Counter(), Counter()) for _ in by_owner[start]]
        for number, layer in zip(by_owner[start], layers, strict=True):
            self._add(layer, number, 1)
        for owner, mine in by_owner.items():
            if owner != start:
                self._place(layers, mine)
        for owner, mine in by_owner.items():  # once more, now that every layer has all its members
            if len(layers) > 1 and len(by_owner) > 2:
                for layer in layers:
                    if owner in layer.members:
                        self._add(layer, layer.members[owner], -1)
                self._place(layers, mine)
        return [tuple(sorted(layer.members.values())) for layer in layers]

    def _add(self, layer: _Layer, number: int, count: int) -> None:
        part = self.parts[number]
        layer.classes[self.class_of[number]] += count
        if part.place is not None:
            layer.places[part.place] += count
        if count > 0:
            layer.members[part.owner] = number
        else:
            del layer.members[part.owner]

    def _place(self, layers: Sequence[_Layer], mine: Sequence[int]) -> None:
        worth = [[self._worth(number, layer, at) for at, layer in enumerate(layers)] for number in mine]
        key = tuple(map(tuple, worth))
        places = self.chosen.get(key)
        if places is None:
            places = self.chosen[key] = _assignment(worth)
        for number, at in zip(mine, places, strict=True):
            self._add(layers[at], number, 1)

    def _worth(self, number: int, layer: _Layer, at: int) -> Score:
        part = self.parts[number]
        agreed = self._agreement(self.class_of[number], _usual(layer.classes)) if layer.members else (0.0, 0.0, 0.0)
        clash = -1000.0 if part.place is not None and layer.places[part.place] > 0 else 0.0
        return (clash + agreed[0], agreed[1], agreed[2], -float(abs(part.order - at)))

    def _strided(self, layer: Block) -> list[list[Block]]:
        """Neighbouring ranks together, then every second one, and so on: the layouts that launchers make."""
        ranks = {self.parts[number].rank for number in layer}
        fewest = -(-len(ranks) // self.size)
        options = []
        for stride in range(1, -(-max(max(ranks) + 1, len(ranks)) // self.size) + 1):
            groups: dict[tuple[int, int], list[int]] = {}
            for number in layer:
                rank = self.parts[number].rank
                groups.setdefault((rank // (self.size * stride), rank % stride), []).append(number)
            if len(groups) == fewest or stride == 1:
                options.append([tuple(group) for group in groups.values()])
        return options

    def _clustered(self) -> list[Block] | None:
        """Parts with the same calls together; a part that is alone joins the block it agrees with best."""
        groups: dict[int, list[list[int]]] = {}
        for number in sorted(range(len(self.parts)), key=lambda one: (self.parts[one].rank, self.parts[one].order)):
            alike = groups.setdefault(self.class_of[number], [])
            for group in alike:
                if self._fits((*group, number)):
                    group.append(number)
                    break
            else:
                alike.append([number])
        every = [group for alike in groups.values() for group in alike]
        lone = [group[0] for group in every if len(group) == 1]
        full = [group for group in every if len(group) > 1]
        if len(lone) > len(self.parts) // 4 + 1:
            return None
        for number in lone:
            mine = self.class_of[number]
            open_ = [group for group in full if self._fits((*group, number))]
            if open_:
                max(open_, key=lambda group: self._agreement(mine, self.class_of[group[0]])).append(number)
            else:
                full.append([number])
        return [tuple(group) for group in full]


def _usual(classes: Counter[int]) -> int:
    """The most common class, the lowest of equal ones."""
    return max(classes, key=lambda one: (classes[one], -one))


def _shared(one: Mapping[Hashable, int], other: Mapping[Hashable, int]) -> float:
    """Calls in common as a share of all: 1 for equal multisets."""
    keys = set(one) | set(other)
    most = sum(max(one.get(key, 0), other.get(key, 0)) for key in keys)
    return sum(min(one.get(key, 0), other.get(key, 0)) for key in keys) / most if most else 1.0


def _prefix(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    longest = max(len(one), len(other))
    same = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        same += 1
    return same / longest if longest else 1.0


def _sum(scores: Sequence[Score]) -> Score:
    return tuple(round(sum(column), _DIGITS) for column in zip(*scores, strict=True))


def _assignment(worth: Sequence[Sequence[Score]]) -> Sequence[int]:
    """A column for each row, so that the worths add up to most."""
    columns = range(len(worth[0]))
    if len(columns) > _MOST_TRIED:
        return _greedy(worth)
    return max(
        permutations(columns, len(worth)), key=lambda chosen: _sum([worth[i][at] for i, at in enumerate(chosen)])
    )


def _greedy(worth: Sequence[Sequence[Score]]) -> list[int]:
    """A place for each row, the best pairs first."""
    pairs = sorted(
        ((value, -row, -at) for row, values in enumerate(worth) for at, value in enumerate(values)), reverse=True
    )
    found: dict[int, int] = {}
    taken: set[int] = set()
    for _, row, at in pairs:
        if -row not in found and -at not in taken:
            found[-row] = -at
            taken.add(-at)
    return [found[row] for row in range(len(worth))]
