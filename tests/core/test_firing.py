import random

from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.collectives import Communicator, Instance, Program, Signature, number_calls
from kvbench.core.deadlock import analyse
from kvbench.core.firing import Residue, cycles, fire

REDUCE = Signature("AllReduce", 8)


def program(number: int, comms: list[Communicator], calls: list[tuple[int, str | None]]) -> Program:
    rows = [(comm, REDUCE, stream, 0, at, "", None) for at, (comm, stream) in enumerate(calls)]
    return number_calls(rows, program=number, communicators=comms, first_index={})


def comms_of(*members: tuple[int, ...]) -> list[Communicator]:
    return [
        Communicator(name=str(number), size=len(one), ranks={program: rank for rank, program in enumerate(one)})
        for number, one in enumerate(members)
    ]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Communicator], list[Program]]:
    """Any programs at all, valid or not."""
    ranks = draw(st.integers(2, 4))
    comms = comms_of(*(tuple(range(ranks)) for _ in range(draw(st.integers(1, 3)))))
    call = st.tuples(st.integers(0, len(comms) - 1), st.sampled_from(["default", "load", None]))
    calls = draw(st.lists(st.lists(call, max_size=8), min_size=ranks, max_size=ranks))
    return comms, [program(number, comms, one) for number, one in enumerate(calls)]


def renumbered(
    comms: list[Communicator], programs: list[Program], order: list[int]
) -> tuple[list[Communicator], list[Program]]:
    at = {old: new for new, old in enumerate(order)}
    moved = [
        Communicator(name=one.name, size=one.size, ranks={at[old]: rank for old, rank in one.ranks.items()})
        for one in comms
    ]
    return moved, [programs[old] for old in order]


def shape(residue: Residue) -> tuple[int, frozenset[Instance]]:
    return residue.num_fired, frozenset(residue.blocked)


@given(cases(), st.randoms())
def test_what_is_left_does_not_depend_on_the_order_of_ranks(
    case: tuple[list[Communicator], list[Program]], rng: random.Random
) -> None:
    comms, programs = case
    order = list(range(len(programs)))
    rng.shuffle(order)
    for queues in ("streams", "program"):
        left = fire(programs, comms, queues=queues)
        other = fire(*reversed(renumbered(comms, programs, order)), queues=queues)  # type: ignore[arg-type]
        assert shape(left) == shape(other)


@given(cases())
def test_host_order_lets_nothing_run_that_stream_order_blocks(case: tuple[list[Communicator], list[Program]]) -> None:
    comms, programs = case
    by_streams, by_program = fire(programs, comms, queues="streams"), fire(programs, comms, queues="program")
    assert set(by_streams.blocked) <= set(by_program.blocked)


@given(cases())
def test_every_cycle_is_closed_and_each_of_its_calls_is_blocked(case: tuple[list[Communicator], list[Program]]) -> None:
    comms, programs = case
    residue = fire(programs, comms, queues="program")
    for cycle in cycles(residue.waits, issued=True):
        for wait, following in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            assert wait.behind == following.instance
            assert wait.instance in residue.blocked


@given(cases())
def test_calls_that_all_meet_leave_no_cause(case: tuple[list[Communicator], list[Program]]) -> None:
    comms, programs = case
    longest = max(programs, key=len)
    same = [
        program(number, comms, [(call.instance.comm, call.stream) for call in longest])
        for number in range(len(programs))
    ]
    assert not analyse(same, comms, streams_known=True).causes


def test_unseen_members_do_not_hold_a_call() -> None:
    comms = [Communicator(name="A", size=8, ranks={0: 0, 1: 5})]
    programs = [program(number, comms, [(0, "default")] * 2) for number in range(2)]
    assert not fire(programs, comms, queues="streams").blocked
    assert comms[0].unseen == 6


def test_a_wait_of_a_wait_is_followed_to_the_missing_call() -> None:
    comms = comms_of((0, 1), (1, 2))
    programs = [program(0, comms, [(0, "s")]), program(1, comms, [(1, "s"), (0, "s")]), program(2, comms, [])]
    found = analyse(programs, comms, streams_known=True)
    assert [(cause.kind, cause.place.comm) for cause in found.causes] == [("not-entered", 1)]
    assert [one.comm for one in found.consequences] == [0]
