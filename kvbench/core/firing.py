"""Which calls can run: a simulation over queues, and who waits for whom in what is left.

Every rank has first-in-first-out queues. A node (one call, or one group of calls) is *ready* when it heads all of its
queues; an instance *fires* when the nodes of all members with data are ready and their signatures agree. There is no
choice anywhere, so what is left does not depend on the order of firing. A cycle in what is left is a proof of deadlock.

`streams`: one queue per stream and per communicator. What it blocks, the GPU blocks.
`program`: one queue per rank, its host order. What only this blocks hangs if kernels cannot run side by side, or if a
host waits in between: possible, not certain.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbench.core.collectives import Call, Communicator, Instance, Program, conflict

Queues = Literal["streams", "program"]


@dataclass(slots=True)
class _Node:
    program: int
    calls: list[Call]
    open_calls: dict[Hashable, int] = field(default_factory=dict)
    not_head: int = 0
    next_in_chain: dict[Call, Call] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """`instance` cannot run because `program` has not reached it: `behind` is ahead of it on that program.

    `issued` is False where the program never issued `instance` and its last call is `behind`.
    """

    instance: Instance
    program: int
    behind: Instance
    issued: bool
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """An instance that cannot run: who is ready, who has it further back, who never issued it, what conflicts."""

    instance: Instance
    calls: Mapping[int, Call]
    ready: tuple[int, ...]
    queued: tuple[int, ...]
    absent: tuple[int, ...]
    conflict: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residue:
    """What is left when nothing can fire any more; empty when every call ran."""

    blocked: Mapping[Instance, Blocked]
    waits: tuple[Wait, ...]
    num_fired: int


def fire(programs: Sequence[Program], communicators: Sequence[Communicator], *, queues: Queues) -> Residue:
    """Runs the programs as far as they go."""
    simulation = _Simulation(programs, communicators, queues)
    simulation.run()
    return simulation.residue()


class _Simulation:
    def __init__(self, programs: Sequence[Program], communicators: Sequence[Communicator], queues: Queues) -> None:
        self.programs = programs
        self.communicators = communicators
        self.program_of = [{rank: program for program, rank in one.ranks.items()} for one in communicators]
        self.by_streams = queues == "streams"
        self.queues: dict[Hashable, deque[_Node]] = {}
        self.node_of: dict[tuple[int, Instance], _Node] = {}
        self.calls: dict[Instance, dict[int, Call]] = defaultdict(dict)
        self.ready: dict[Instance, set[int]] = defaultdict(set)
        self.fired: set[Instance] = set()
        self.firable: list[Instance] = []
        for program, calls in enumerate(programs):
            for node in _nodes(program, calls):
                self._enqueue(node)

    def run(self) -> None:
        for queue in self.queues.values():
            self._reached(queue[0])
        while self.firable:
            self._fire(self.firable.pop())

    def _keys(self, program: int, call: Call) -> tuple[Hashable, ...]:
        if not self.by_streams:
            return ((program, "program"),)
        comm = (program, "comm", call.instance.comm)
        return (comm,) if call.stream is None else (comm, (program, "stream", call.stream))

    def _enqueue(self, node: _Node) -> None:
        last: dict[Hashable, Call] = {}
        for call in node.calls:
            self.node_of[node.program, call.instance] = node
            self.calls[call.instance][node.program] = call
            for key in self._keys(node.program, call):
                node.open_calls[key] = node.open_calls.get(key, 0) + 1
            if len(node.calls) == 1:
                continue
            chain = (call.instance.comm, call.instance.source, call.instance.target)
            if chain in last:
                node.next_in_chain[last[chain]] = call
            last[chain] = call
        for key in node.open_calls:
            self.queues.setdefault(key, deque()).append(node)
        node.not_head = len(node.open_calls)

    def _reached(self, node: _Node) -> None:
        node.not_head -= 1
        if node.not_head == 0:
            later = set(node.next_in_chain.values()) if node.next_in_chain else ()
            for call in node.calls:
                if call not in later:
                    self._call_ready(node.program, call)

    def _call_ready(self, program: int, call: Call) -> None:
        instance = call.instance
        ready = self.ready[instance]
        ready.add(program)
        if len(ready) == self._needed(instance) and not self._conflict(instance):
            self.firable.append(instance)

    def _conflict(self, instance: Instance) -> tuple[str, ...]:
        calls = list(self.calls[instance].values())
        first = calls[0].signature
        if all(call.signature is first or call.signature == first for call in calls):
            return ()
        return conflict({program: call.signature for program, call in self.calls[instance].items()})

    def _fire(self, instance: Instance) -> None:
        self.fired.add(instance)
        for program, call in self.calls[instance].items():
            node = self.node_of[program, instance]
            following = node.next_in_chain.get(call) if node.next_in_chain else None
            if following is not None:
                self._call_ready(program, following)
            for key in self._keys(program, call):
                node.open_calls[key] -= 1
                if node.open_calls[key] == 0:
                    queue = self.queues[key]
                    queue.popleft()
                    if queue:
                        self._reached(queue[0])

    def _needed(self, instance: Instance) -> int:
        ranks = self.communicators[instance.comm].ranks
        return len(self.members(instance)) if instance.is_p2p else len(ranks)

    def members(self, instance: Instance) -> tuple[int, ...]:
        """Programs with data that take part."""
        ranks = self.communicators[instance.comm].ranks
        if instance.is_p2p:
            ends = dict.fromkeys((instance.source, instance.target))
            found = (self.program_of[instance.comm].get(rank) for rank in ends)
            return tuple(program for program in found if program is not None)
        return tuple(ranks)

    def residue(self) -> Residue:
        """Blocked instances and the waits between them."""
        blocked = {}
        for instance in self.calls:
            if instance in self.fired:
                continue
            calls, ready = self.calls[instance], self.ready[instance]
            blocked[instance] = Blocked(
                instance=instance,
                calls=calls,
                ready=tuple(sorted(ready)),
                queued=tuple(sorted(set(calls) - ready)),
                absent=tuple(sorted(set(self.members(instance)) - set(calls))),
                conflict=self._conflict(instance),
            )
        waits = self._waits(blocked) + self._never_issued(blocked)
        return Residue(blocked=blocked, waits=tuple(waits), num_fired=len(self.fired))

    def _waits(self, blocked: Mapping[Instance, Blocked]) -> list[Wait]:
        """Waits of the instances that someone is ready for, and of those that hold these up; the rest only follows."""
        waits: list[Wait] = []
        line = [instance for instance, one in blocked.items() if one.ready]
        seen = set(line)
        for instance in line:  # grows while it is read
            for program in blocked[instance].queued:
                for wait in self._behind(instance, program):
                    waits.append(wait)
                    if wait.behind not in seen:
                        seen.add(wait.behind)
                        line.append(wait.behind)
        return waits

    def _behind(self, instance: Instance, program: int) -> Iterator[Wait]:
        """The calls at the heads of the queues in which `program` has `instance` further back."""
        node = self.node_of[program, instance]
        for key in self._keys(program, self.calls[instance][program]):
            head = self.queues[key][0]
            if head is node:
                continue
            for call in head.calls:
                if call.instance not in self.fired and key in self._keys(program, call):
                    yield Wait(
                        instance=instance, program=program, behind=call.instance, issued=True, queue=_queue_name(key)
                    )
        before = [call for call in node.calls if node.next_in_chain.get(call) == self.calls[instance][program]]
        for call in before:  # an earlier call of the same group and communicator
            if call.instance not in self.fired:
                yield Wait(instance=instance, program=program, behind=call.instance, issued=True, queue="its group")

    def _never_issued(self, blocked: Mapping[Instance, Blocked]) -> list[Wait]:
        """A program whose last call is blocked may wait there, and that is why it never issued what others wait for."""
        waits = []
        for instance, one in blocked.items():
            for program in one.absent if one.ready else ():
                last = self.programs[program][-1].instance if self.programs[program] else None
                if last is not None and last in blocked and program in blocked[last].ready:
                    waits.append(Wait(instance=instance, program=program, behind=last, issued=False, queue="its host"))
        return waits


def _queue_name(key: Hashable) -> str:
    if not isinstance(key, tuple):
        return str(key)
    return {"program": "its program order", "comm": "the same communicator"}.get(key[1], f"stream {key[-1]}")


def _nodes(program: int, calls: Program) -> Iterator[_Node]:
    node: _Node | None = None
    for call in calls:
        if node is not None and call.group and call.group == node.calls[0].group:
            node.calls.append(call)
            continue
        if node is not None:
            yield node
        node = _Node(program, [call])
    if node is not None:
        yield node


def cycles(waits: Sequence[Wait], *, issued: bool) -> tuple[tuple[Wait, ...], ...]:
    """One shortest cycle per strongly connected set of instances, over waits with this `issued`."""
    following: dict[Instance, list[Wait]] = defaultdict(list)
    for wait in waits:
        if wait.issued == issued:
            following[wait.instance].append(wait)
    found = [
        _shortest(following, component)
        for component in _components(following)
        if len(component) > 1 or any(wait.behind == wait.instance for wait in following[component[0]])
    ]
    return tuple(sorted(found, key=lambda cycle: (len(cycle), cycle[0].instance)))


def _components(following: Mapping[Instance, Sequence[Wait]]) -> list[list[Instance]]:
    """Strongly connected components (Tarjan, 1972), without recursion."""
    index: dict[Instance, int] = {}
    low: dict[Instance, int] = {}
    stack: list[Instance] = []
    on_stack: set[Instance] = set()
    found: list[list[Instance]] = []
    for root in list(following):
        if root in index:
            continue
        work = [(root, iter(following.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, edges = work[-1]
            for wait in edges:
                after = wait.behind
                if after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    on_stack.add(after)
                    work.append((after, iter(following.get(after, ()))))
                    break
                if after in on_stack:
                    low[node] = min(low[node], index[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    found.append(component)
    return found


def _shortest(following: Mapping[Instance, Sequence[Wait]], component: Sequence[Instance]) -> tuple[Wait, ...]:
    """A shortest cycle through the component, from its earliest instances (at most 64 starting points are tried)."""
    inside = set(component)
    best: tuple[Wait, ...] = ()
    for start in sorted(component, key=lambda one: (one.index, one))[:64]:
        came: dict[Instance, Wait] = {}
        line = deque([start])
        closing: Wait | None = None
        while line and closing is None:
            for wait in following.get(line.popleft(), ()):
                if wait.behind == start:
                    closing = wait
                    break
                if wait.behind in inside and wait.behind not in came:
                    came[wait.behind] = wait
                    line.append(wait.behind)
        if closing is None:
            continue
        path = [closing]
        while path[0].instance != start:
            path.insert(0, came[path[0].instance])
        if not best or len(path) < len(best):
            best = tuple(path)
        if len(best) <= 2:
            break
    return best
