"""Which communicators of several ranks are one and the same, judged by their calls, where no id says so.

A *part* is a communicator as one program knows it. Parts of one size are put together so that the members of each block
agree best: in the calls themselves (operation, count, type, root; each as often), then in operations alone, then in the
order of the calls, then in the order of first use. It is a guess, and whoever uses it has to say so.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

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
    owners = sorted({part.owner for part in parts})
    if len(owners) <= size:
        return _allowed([_layers(parts, list(range(len(parts))))], parts, size)
    layers = _layers(parts, list(range(len(parts))))
    tries = [_strided(parts, layer, size) for layer in layers]
    chosen: list[Block] | None = []
    for options in tries:
        best = _allowed(options, parts, size)
        chosen = None if best is None or chosen is None else [*chosen, *best]
    clustered = _clustered(parts, size)
    return _allowed([one for one in (chosen, clustered) if one is not None], parts, size)


def score(partition: Sequence[Block], parts: Sequence[Part], size: int) -> Score:
    """How well the members of each block agree, each with its block's most common calls; a lone member counts 0."""
    total = [0.0, 0.0, 0.0]
    for block in partition:
        if len(block) < 2 <= size:
            continue
        usual = _usual([parts[number] for number in block])
        for number in block:
            for at, value in enumerate(_agreement(parts[number], usual)):
                total[at] += value
    return tuple(round(value / max(len(parts), 1), _DIGITS) for value in total)


def _allowed(options: Sequence[Sequence[Block]], parts: Sequence[Part], size: int) -> list[Block] | None:
    """The first of the best-scoring partitions in which no block holds a rank or a program twice."""
    fitting = [one for one in options if all(_fits(block, parts, size) for block in one)]
    best = max(fitting, key=lambda one: score(one, parts, size), default=None)  # max keeps the first of equals
    return None if best is None else list(best)


def _fits(block: Block, parts: Sequence[Part], size: int) -> bool:
    places = [parts[number].place for number in block if parts[number].place is not None]
    owners = {parts[number].owner for number in block}
    return len(block) <= size and len(owners) == len(block) and len(set(places)) == len(places)


def _usual(members: Sequence[Part]) -> Part:
    kinds = Counter((frozenset(part.calls.items()), part.first) for part in members)
    best = kinds.most_common(1)[0][0]
    return next(part for part in members if (frozenset(part.calls.items()), part.first) == best)


def _agreement(one: Part, other: Part) -> Score:
    if one is other:
        return (1.0, 1.0, 1.0)
    return (_shared(one.calls, other.calls), _shared(one.ops, other.ops), _prefix(one.first, other.first))


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


def _layers(parts: Sequence[Part], numbers: Sequence[int]) -> list[Block]:
    """One part of each program per layer, so that layers agree; the program with most parts sets their number."""
    by_owner: dict[int, list[int]] = {}
    for number in sorted(numbers, key=lambda one: (parts[one].owner, parts[one].order)):
        by_owner.setdefault(parts[number].owner, []).append(number)
    start = max(by_owner, key=lambda owner: len(by_owner[owner]))
    layers: list[list[int]] = [[number] for number in by_owner[start]]
    for owner, mine in by_owner.items():
        if owner != start:
            _place(layers, mine, parts)
    for mine in by_owner.values():  # once more, now that every layer has all its members
        if len(layers) > 1 and len(by_owner) > 2:
            layers = [[number for number in layer if number not in mine] for layer in layers]
            _place(layers, mine, parts)
    return [tuple(layer) for layer in layers]


def _place(layers: list[list[int]], mine: Sequence[int], parts: Sequence[Part]) -> None:
    usual = [_usual([parts[number] for number in layer]) if layer else None for layer in layers]
    taken = [{parts[number].place for number in layer} - {None} for layer in layers]

    def worth(number: int, at: int) -> Score:
        other = usual[at]
        agreed = _agreement(parts[number], other) if other is not None else (0.0, 0.0, 0.0)
        clash = -1000.0 if parts[number].place in taken[at] else 0.0
        return (clash + agreed[0], agreed[1], agreed[2], -float(abs(parts[number].order - at)))

    places: Sequence[int]
    if len(layers) <= _MOST_TRIED:
        places = max(
            permutations(range(len(layers)), len(mine)),
            key=lambda chosen: _sum([worth(number, at) for number, at in zip(mine, chosen, strict=True)]),
        )
    else:
        places = _greedy(mine, len(layers), worth)
    for number, at in zip(mine, places, strict=True):
        layers[at].append(number)


def _sum(scores: Sequence[Score]) -> Score:
    return tuple(round(sum(column), _DIGITS) for column in zip(*scores, strict=True))


def _greedy(mine: Sequence[int], count: int, worth: "object") -> list[int]:
    assert callable(worth)
    pairs = sorted(((worth(number, at), -i, -at) for i, number in enumerate(mine) for at in range(count)), reverse=True)
    found: dict[int, int] = {}
    for _, i, at in pairs:
        if -i not in found and -at not in found.values():
            found[-i] = -at
    return [found[i] for i in range(len(mine))]


def _strided(parts: Sequence[Part], layer: Block, size: int) -> list[list[Block]]:
    """Neighbouring ranks together, then every second one, and so on: the layouts that launchers make."""
    ranks = len({parts[number].rank for number in layer})
    highest = max(max(parts[number].rank for number in layer) + 1, ranks)
    fewest = -(-ranks // size)
    options = []
    for stride in range(1, -(-highest // size) + 1):
        groups: dict[tuple[int, int], list[int]] = {}
        for number in layer:
            rank = parts[number].rank
            groups.setdefault((rank // (size * stride), rank % stride), []).append(number)
        if len(groups) == fewest or stride == 1:
            options.append([tuple(group) for group in groups.values()])
    return options


def _clustered(parts: Sequence[Part], size: int) -> list[Block] | None:
    """Parts with the same calls together; a part that is alone joins the block it agrees with best."""
    groups: list[list[int]] = []
    for number in sorted(range(len(parts)), key=lambda one: (parts[one].rank, parts[one].order)):
        for group in groups:
            if parts[group[0]].calls == parts[number].calls and _fits((*group, number), parts, size):
                group.append(number)
                break
        else:
            groups.append([number])
    lone = [group[0] for group in groups if len(group) == 1]
    full = [group for group in groups if len(group) > 1]
    if len(lone) > len(parts) // 4 + 1:
        return None
    for number in lone:
        open_ = [group for group in full if _fits((*group, number), parts, size)]
        if open_:
            max(open_, key=lambda group: _agreement(parts[number], parts[group[0]])).append(number)
        else:
            full.append([number])
    return [tuple(group) for group in full]
