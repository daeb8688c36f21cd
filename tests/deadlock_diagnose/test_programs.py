import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.deadlock_diagnose.diagnose import diagnose
from kvbench.results.deadlock_diagnosis import DeadlockDiagnosis
from tests.deadlock_diagnose.programs import DTYPE_BYTES, FORMATS, Op, World, random_op, random_world

SETTINGS = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def diagnosed(world: World, form: str, folder: Path) -> DeadlockDiagnosis:
    import shutil

    inside = folder / form
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir()
    FORMATS[form](world, inside)
    return diagnose([inside], jobs=1).diagnosis


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, random.Random]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    ranks = draw(st.sampled_from([2, 3, 4, 8, 8, 16, 64]))
    world = random_world(
        rng,
        ranks=ranks,
        comms=draw(st.integers(1, 6)),
        calls=draw(st.sampled_from([4, 12, 30])) if ranks <= 16 else 8,
        one_stream=draw(st.booleans()),
        p2p=draw(st.booleans()),
    )
    return world, rng


@pytest.mark.parametrize("form", FORMATS)
@SETTINGS
@given(made=worlds())
def test_a_valid_program_shows_no_divergence_in_any_format(
    tmp_path: Path, form: str, made: tuple[World, random.Random]
) -> None:
    found = diagnosed(made[0], form, tmp_path)
    assert found.status == "no-divergence", found.verdict


Item = tuple[int, str, int, str]


def shared_items(world: World, rank: int, comm: int, form: str) -> list[Item]:
    """A rank's collectives on the communicators that all members of `comm` share, as far as the format shows them."""
    members = set(world.comms[comm])
    shared = {number for number, one in enumerate(world.comms) if members <= set(one)}
    return [shown(one, form) for one in world.programs[rank] if one.comm in shared and one.peer is None]


def shown(one: Op, form: str) -> Item:
    if form == "nsys":  # its payload holds bytes, no type
        return one.comm, one.op, one.count * DTYPE_BYTES[one.dtype], ""
    return one.comm, one.op, one.count, one.dtype


def place_of(items: list[Item], at: int) -> tuple[int, int]:
    return items[at][0], 1 + sum(one[0] == items[at][0] for one in items[:at])


def first_visible(original: World, mutated: World, rank: int, comm: int, form: str) -> tuple[int, int]:
    """Communicator and index at which the mutated rank first differs from what it should have done."""
    right, wrong = shared_items(original, rank, comm, form), shared_items(mutated, rank, comm, form)
    at = next(
        (number for number, (one, other) in enumerate(zip(right, wrong, strict=False)) if one != other),
        min(len(right), len(wrong)),
    )
    return place_of(right if len(right) > at and (len(right) >= len(wrong)) else wrong, at)


def mutate(world: World, rng: random.Random, what: str) -> tuple[World, int, int] | None:
    """The mutated world, the rank, and the communicator; None where the world has no room for it."""
    places = [
        (rank, number)
        for rank, program in enumerate(world.programs)
        for number, one in enumerate(program)
        if one.peer is None and one.group == 0 and len(world.comms[one.comm]) > 1
    ]
    rng.shuffle(places)
    for rank, number in places:
        one = world.programs[rank][number]
        mutated = world.copy()
        program = mutated.programs[rank]
        if what == "drop":
            del program[number]
        elif what == "insert":
            program.insert(number, replace(random_op(rng, one.comm, one.stream), dtype=one.dtype))
        elif what == "change":
            program[number] = replace(one, count=one.count + 1)
        elif what == "swap":
            following = program[number + 1] if number + 1 < len(program) else None
            if following is None or following.comm != one.comm or following.group or following.peer is not None:
                continue
            if any(shown(following, form) == shown(one, form) for form in ("coll", "nsys")):
                continue
            program[number], program[number + 1] = following, one
        return mutated, rank, one.comm
    return None


@pytest.mark.parametrize("what", ["drop", "insert", "change", "swap"])
@pytest.mark.parametrize("form", FORMATS)
@SETTINGS
@given(made=worlds())
def test_one_mutation_is_found_at_exactly_its_place(
    tmp_path: Path, form: str, what: str, made: tuple[World, random.Random]
) -> None:
    world, rng = made
    mutation = mutate(world, rng, what)
    if mutation is None:
        return
    mutated, rank, comm = mutation
    found = diagnosed(mutated, form, tmp_path)
    assert found.status == "divergence", found.verdict
    cause = found.causes[0]
    expected_comm, expected_index = first_visible(world, mutated, rank, comm, form)
    assert cause.index == expected_index, (cause, expected_comm, expected_index)
    assert expected_comm == comm
    members = world.comms[comm]
    blamed = {one.rank for one in cause.suspects}
    if len(members) > 2:
        assert blamed == {f"rank {rank}"}, cause
    else:
        assert blamed <= {f"rank {rank}"}, cause
    kinds = {
        "drop": {"missing-call", "not-entered"},
        "insert": {"extra-call"},
        "change": {"field-mismatch"},
        "swap": {"swapped-calls"},
    }
    if len(members) == 2:  # a missing call here is an extra one there
        kinds["drop"].add("extra-call")
        kinds["insert"] |= {"missing-call", "not-entered"}
    assert cause.kind in kinds[what], cause


def invert(world: World, rng: random.Random) -> tuple[World, int, Op, Op] | None:
    """Swaps two neighbouring calls of different communicators that share another rank with this order."""
    places = [(rank, number) for rank, program in enumerate(world.programs) for number in range(len(program) - 1)]
    rng.shuffle(places)
    for rank, number in places:
        one, other = world.programs[rank][number : number + 2]
        if one.comm == other.comm or one.group or other.group or one.peer is not None or other.peer is not None:
            continue
        if len(set(world.comms[one.comm]) & set(world.comms[other.comm])) < 2:
            continue
        mutated = world.copy()
        mutated.programs[rank][number : number + 2] = [other, one]
        return mutated, rank, one, other
    return None


@pytest.mark.parametrize("form", FORMATS)
@SETTINGS
@given(made=worlds())
def test_two_communicators_inverted_on_one_rank_are_a_cycle(
    tmp_path: Path, form: str, made: tuple[World, random.Random]
) -> None:
    world, rng = made
    inversion = invert(world, rng)
    if inversion is None:
        return
    mutated, rank, one, other = inversion
    found = diagnosed(mutated, form, tmp_path)
    assert found.status == "divergence", found.verdict
    cause = found.causes[0]
    assert cause.kind == "order-cycle", cause
    assert len(cause.cycle) == 2, cause
    same_stream = one.stream == other.stream
    certain = same_stream and form in {"coll", "call", "nsys", "kineto"}
    assert cause.strength == ("certain" if certain else "possible"), cause
    sharing = set(world.comms[one.comm]) & set(world.comms[other.comm])
    if len(sharing) > 2:
        assert {suspect.rank for suspect in cause.suspects} == {f"rank {rank}"}, cause


@SETTINGS
@given(made=worlds(), what=st.sampled_from(["none", "drop", "insert", "change", "swap"]))
def test_the_same_program_gets_the_same_verdict_from_every_format(
    tmp_path: Path, made: tuple[World, random.Random], what: str
) -> None:
    world, rng = made
    for program in world.programs:
        program[:] = [replace(one, dtype="bfloat16") for one in program]
    mutation = None if what == "none" else mutate(world, rng, what)
    changed = world if mutation is None else mutation[0]
    verdicts = {form: diagnosed(changed, form, tmp_path) for form in FORMATS}
    assert (
        len({(one.status, one.kind, one.causes[0].index if one.causes else None) for one in verdicts.values()}) == 1
    ), {form: one.verdict for form, one in verdicts.items()}
