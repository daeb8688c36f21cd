"""Logs whose lines do not say which communicator is which: what agrees belongs together, and no guess is certain."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.deadlock_diagnose.diagnose import diagnose
from kvbench.results.deadlock_diagnosis import DeadlockDiagnosis
from tests.deadlock_diagnose.programs import (
    Op,
    World,
    call_line,
    coll_line,
    coll_lines,
    random_world,
    seed_case,
    write_logs,
)

REDUCE = Op(comm=0)
A, B, C = (Op(comm=comm, count=100 * (comm + 1)) for comm in range(3))
BROADCAST = Op(comm=0, op="Broadcast", count=4096, dtype="int8")


def read(folder: Path, *, tail_bytes: int | None = None) -> DeadlockDiagnosis:
    return diagnose([folder], jobs=1, tail_bytes=tail_bytes).diagnosis


def without_creation(world: World, rank: int) -> list[str]:
    return [coll_line(world, rank, number, one) for number, one in enumerate(world.programs[rank])]


def calls_without_creation(world: World, rank: int) -> list[str]:
    return [call_line(rank, number, one) for number, one in enumerate(world.programs[rank])]


FORMS = {"coll": without_creation, "call": calls_without_creation}


@pytest.mark.parametrize("form", FORMS)
def test_two_communicators_in_opposite_order_are_a_possible_cycle_without_creation_lines(
    tmp_path: Path, form: str
) -> None:
    other = Op(comm=1)
    world = World(comms=[(0, 1), (0, 1)], programs=[[BROADCAST, other], [other, BROADCAST]])
    write_logs(world, tmp_path, FORMS[form])
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].strength) == ("order-cycle", "possible")
    assert found.causes[0].doubts == ("communicators matched by guess",)
    assert "(communicators matched by guess)" in found.verdict[1]


def test_communicators_of_one_operation_are_told_apart_by_their_counts(tmp_path: Path) -> None:
    write_logs(World(comms=[(0, 1)] * 2, programs=[[A, B, A, B], [B, A, B, A]]), tmp_path, without_creation)
    assert read(tmp_path).causes[0].kind == "order-cycle"


def test_the_rank_that_enters_them_the_other_way_is_named_among_four(tmp_path: Path) -> None:
    usual, odd = [BROADCAST, B] * 5, [B, BROADCAST] * 5
    write_logs(World(comms=[(0, 1, 2, 3)] * 2, programs=[usual, usual, odd, usual]), tmp_path, without_creation)
    found = read(tmp_path).causes[0]
    assert (found.kind, [one.rank for one in found.suspects]) == ("order-cycle", ["rank 2"])


def test_a_ring_of_three_pairs_is_put_together_by_its_counts(tmp_path: Path) -> None:
    world = World(comms=[(0, 1), (1, 2), (0, 2)], programs=[[A, C], [B, A], [C, B]])
    write_logs(world, tmp_path, without_creation)
    found = read(tmp_path).causes[0]
    assert (found.kind, len(found.cycle)) == ("order-cycle", 3)


def test_a_process_that_never_uses_a_communicator_of_all_processes_is_its_member(tmp_path: Path) -> None:
    write_logs(World(comms=[(0, 1)] * 2, programs=[[A, B, B], [B, B]]), tmp_path, without_creation)
    found = read(tmp_path)
    assert found.status == "divergence"
    assert "rank 1 left out AllReduce #1" in found.verdict[0]


def strided_world() -> World:
    """Tensor-parallel pairs of neighbours, data-parallel fours of every second rank, each with its own counts."""
    comms: list[tuple[int, ...]] = [(rank, rank + 1) for rank in range(0, 8, 2)]
    comms += [tuple(range(first, 8, 2)) for first in (0, 1)]
    programs = []
    for rank in range(8):
        pair, four = Op(comm=rank // 2, count=100 + rank // 2), Op(comm=4 + rank % 2, count=500 + rank % 2)
        programs.append([pair, four] * 4)
    return World(comms=comms, programs=programs)


@pytest.mark.parametrize("form", FORMS)
def test_neighbours_and_strides_are_found_and_no_divergence_is_invented(tmp_path: Path, form: str) -> None:
    if form == "call":
        world = World(comms=strided_world().comms, programs=[one[:1] * 3 for one in strided_world().programs])
    else:
        world = strided_world()
    write_logs(world, tmp_path, FORMS[form])
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert "(communicators matched by guess)" in found.verdict[1]


def test_a_wrong_count_in_a_strided_group_is_still_found(tmp_path: Path) -> None:
    world = strided_world()
    world.programs[5][5] = replace(world.programs[5][5], count=777)
    write_logs(world, tmp_path, without_creation)
    found = read(tmp_path).causes[0]
    assert (found.kind, [one.rank for one in found.suspects]) == ("field-mismatch", ["rank 5"])
    assert found.strength == "possible"


def test_creation_in_another_order_is_no_mismatch_of_the_calls(tmp_path: Path) -> None:
    world = World(comms=[(0, 1), (0, 1)], programs=[[BROADCAST, B] * 3] * 2)

    def lines(world: World, rank: int) -> list[str]:
        found = coll_lines(world, rank, version="2.14")
        return found if rank == 0 else [found[1], found[0], *found[2:]]

    write_logs(world, tmp_path, lines)
    assert read(tmp_path).status == "no-divergence"


def test_calls_without_creation_lines_are_not_said_to_be_absent(tmp_path: Path) -> None:
    world = seed_case()
    write_logs(world, tmp_path, calls_without_creation)
    found = read(tmp_path)
    assert found.num_calls == sum(map(len, world.programs))
    assert (found.status, found.causes[0].kind) == ("divergence", "order-cycle")
    assert "perhaps 2 ranks" in found.communicators[0].name


# ---- lost beginnings


def varied(calls: int) -> list[Op]:
    return [replace(REDUCE, count=1000 + number % 7) for number in range(calls)]


def test_the_end_of_files_of_different_lengths_invents_no_missing_rank(tmp_path: Path) -> None:
    write_logs(World(comms=[(0, 1, 2)], programs=[varied(200)] * 3), tmp_path)
    first = tmp_path / "nccl.node0.1001.log"
    first.write_text(first.read_text().replace("[1] NCCL", "[1] /long/name/of/a/source/file.cc:100 NCCL"))
    found = read(tmp_path, tail_bytes=8192)
    assert found.status == "no-divergence"
    assert "Only the ends of some logs were compared" in found.verdict[1]


def test_numbers_of_an_end_count_from_the_first_call_that_all_hold(tmp_path: Path) -> None:
    program = varied(200)
    other = [*program[:195], replace(REDUCE, count=5), *program[196:]]
    write_logs(World(comms=[(0, 1, 2)], programs=[program, other, program]), tmp_path)
    found = read(tmp_path, tail_bytes=8192).causes[0]
    assert (found.kind, [one.rank for one in found.suspects]) == ("field-mismatch", ["rank 1"])
    assert found.index is not None
    assert found.index < 200


def test_a_log_whose_beginning_was_rotated_away_takes_the_free_place(tmp_path: Path) -> None:
    program = varied(30)
    ends = {"same": program, "differs": [*program[:20], replace(REDUCE, count=5), *program[21:]]}
    for name, other in ends.items():
        (tmp_path / name).mkdir()
        world = World(comms=[(0, 1)], programs=[program, other])
        write_logs(world, tmp_path / name)
        rotated = tmp_path / name / "nccl.node0.1001.log"
        rotated.write_text("".join(rotated.read_text().splitlines(keepends=True)[10:]))
    assert read(tmp_path / "same").status == "no-divergence"
    found = read(tmp_path / "differs").causes[0]
    assert (found.kind, found.index, found.strength) == ("field-mismatch", 21, "possible")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("form", FORMS)
def test_valid_programs_without_creation_lines_give_no_divergence(tmp_path: Path, form: str, seed: int) -> None:
    rng = random.Random(seed)
    comms = 4 if form == "coll" else 1
    world = random_world(rng, ranks=rng.choice([2, 4, 8]), comms=comms, calls=40, one_stream=bool(seed % 2), p2p=False)
    write_logs(world, tmp_path, FORMS[form])
    found = read(tmp_path)
    assert found.status == "no-divergence", found.verdict[0]


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_call_without_creation_lines_is_found_in_its_place(tmp_path: Path, seed: int) -> None:
    rng = random.Random(100 + seed)
    world = random_world(rng, ranks=8, comms=3, calls=40, one_stream=True, p2p=False)
    rank, at = rng.randrange(8), rng.randrange(5, 35)
    world.programs[rank][at] = replace(world.programs[rank][at], count=31337)
    write_logs(world, tmp_path, without_creation)
    found = read(tmp_path).causes[0]
    assert (found.kind, found.strength) == ("field-mismatch", "possible")
    assert f"rank {rank}" in {one for camp in found.camps if "31337" in camp.did for one in camp.ranks}
