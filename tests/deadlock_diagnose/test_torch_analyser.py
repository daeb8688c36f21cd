"""The same dumps through PyTorch's own flight-recorder analyser. Where the answers differ, the test says why.

Theirs takes the first rank with entries as the reference and steps over all other groups, so it can neither see two
groups that are entered in different orders nor a wrong first rank.
"""

import argparse
import copy
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvbench.deadlock_diagnose.diagnose import diagnose
from kvbench.results.deadlock_diagnosis import DeadlockDiagnosis
from tests.deadlock_diagnose.programs import Op, World, flight_recorder_dump, random_world, write_flight_recorder
from tests.deadlock_diagnose.test_programs import invert, mutate

builder = pytest.importorskip(
    "torch.distributed.flight_recorder.components.builder", reason="torch has no flight-recorder analyser"
)
REDUCE, GATHER = Op(comm=0), Op(comm=0, op="AllGather")


class Complaint(NamedTuple):
    """One thing that PyTorch's analyser finds wrong."""

    group: str
    seq_id: int
    ranks: frozenset[int]


def theirs(world: World) -> list[Complaint]:
    """What PyTorch's analyser reports, in its order. A missing rank is only in its log, so that is listened to."""
    found: list[Complaint] = []

    def listen(entry: Any, _logger: Any, _message: str, _frames: Any, **details: Any) -> None:
        ranks = frozenset(details.get("missing_ranks") or ()) | {rank for rank, _ in details.get("errors") or ()}
        found.append(Complaint(entry.pg_desc, entry.collective_seq_id, frozenset(ranks)))

    details = {str(rank): flight_recorder_dump(world, rank) | {"rank": rank} for rank in range(world.size)}
    options = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10, pg_filters=None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder.EntryState, "log", listen)
        builder.build_db(copy.deepcopy(details), options, "2.7")
    return found


def ours(world: World, folder: Path) -> DeadlockDiagnosis:
    write_flight_recorder(world, folder)
    return diagnose([folder], jobs=1).diagnosis


def world_of(seed: int) -> tuple[World, random.Random]:
    rng = random.Random(seed)
    # No groups: their analyser reads a group of collectives only with the coalesced end marker that NCCL's group adds.
    world = random_world(rng, ranks=4, comms=3, calls=12, one_stream=False, p2p=False)
    for program in world.programs:
        program[:] = [
            Op(comm=one.comm, op=one.op, count=one.count, dtype=one.dtype, stream=one.stream) for one in program
        ]
    return world, rng


@pytest.mark.parametrize("seed", range(10))
def test_both_find_nothing_in_a_valid_program(tmp_path: Path, seed: int) -> None:
    world, _ = world_of(seed)
    assert not theirs(world)
    assert ours(world, tmp_path).status == "no-divergence"


@pytest.mark.parametrize("what", ["drop", "insert", "change", "swap"])
@pytest.mark.parametrize("seed", range(10))
def test_both_find_one_mutation_in_the_same_group_and_ours_names_one_rank(tmp_path: Path, seed: int, what: str) -> None:
    world, rng = world_of(seed)
    mutation = mutate(world, rng, what)
    if mutation is None:
        pytest.skip("this program has no room for the mutation")
    mutated, rank, comm = mutation
    found, wrong = ours(mutated, tmp_path), theirs(mutated)
    assert found.status == "divergence"
    assert found.causes[0].communicator.split(":")[0] == str(comm)
    assert wrong, "theirs sees it too"
    first = next(one for one in wrong if one.group == f"{comm}:{'default_pg' if comm == 0 else f'group_{comm}'}")
    # Ours may place it earlier: it sees a dropped call among equal ones by what stands between them on other groups.
    assert found.causes[0].index is not None
    assert found.causes[0].index <= first.seq_id
    if len(world.comms[comm]) > 2:
        assert [one.rank for one in found.causes[0].suspects] == [f"rank {rank}"]


def test_theirs_blames_everyone_else_when_rank_0_is_wrong(tmp_path: Path) -> None:
    usual = [REDUCE, GATHER, REDUCE]
    world = World(comms=[(0, 1, 2, 3)], programs=[[REDUCE, REDUCE, REDUCE], usual, usual, usual])
    found = ours(world, tmp_path)
    assert theirs(world)[0].ranks == {1, 2, 3}, "the majority"
    assert [one.rank for one in found.causes[0].suspects] == ["rank 0"], "the minority"


@pytest.mark.parametrize("seed", range(12))
def test_theirs_sees_nothing_in_two_groups_entered_in_different_orders(tmp_path: Path, seed: int) -> None:
    world, rng = world_of(seed)
    inversion = invert(world, rng)
    if inversion is None:
        pytest.skip("no two communicators of this program share two ranks side by side")
    assert not theirs(inversion[0]), "every group's own sequence agrees"
    assert ours(inversion[0], tmp_path).causes[0].kind == "order-cycle"
