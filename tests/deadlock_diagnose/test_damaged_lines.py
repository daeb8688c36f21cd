"""Launcher labels, colour codes, and lines that are damaged or cut off: what is lost is never said to be missing."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.deadlock_diagnose.diagnose import diagnose
from kvbench.results.deadlock_diagnosis import DeadlockDiagnosis
from tests.deadlock_diagnose.programs import Op, World, coll_line, coll_lines, write_logs

REDUCE = Op(comm=0)
USUAL = [replace(REDUCE, count=1000 + number) for number in range(6)]


def read(folder: Path) -> DeadlockDiagnosis:
    return diagnose([folder], jobs=1).diagnosis


def one_comm(*programs: list[Op]) -> World:
    return World(comms=[tuple(range(len(programs)))], programs=list(programs))


LABELS = {
    "srun": "{rank}: ",
    "rank": "rank{rank}: ",
    "torchrun": "[rank{rank}]: ",
    "torchrun, local": "[default{rank}]:",
    "mpirun": "[1,{rank}]<stdout>:",
    "mpirun in Kubernetes": "2026-03-01T12:00:00.123456789Z [1,{rank}]<stdout>:",
    "mpirun in colour": "\x1b[32m[1,{rank}]<stdout>:\x1b[0m",
}


@pytest.mark.parametrize("label", LABELS)
def test_a_launchers_label_names_the_rank_where_no_creation_line_does(tmp_path: Path, label: str) -> None:
    odd = [*USUAL[:3], replace(USUAL[3], count=7777), *USUAL[4:]]
    world = one_comm(USUAL, USUAL, USUAL, odd)
    lines = []
    for number in range(len(USUAL)):
        for rank in range(4):
            line = coll_line(world, rank, number, world.programs[rank][number])
            lines.append(LABELS[label].format(rank=rank) + line.replace(f":{1000 + rank}:", f":{2000 - rank}:"))
    (tmp_path / "all.log").write_text("\n".join(lines) + "\n")
    found = read(tmp_path)
    assert [one.rank for one in found.causes[0].suspects] == ["rank 3"]
    assert {one.process for one in found.ranks} == {f"node0:{2000 - rank}" for rank in range(4)}
    assert found.causes[0].evidence[0].place.endswith("all.log:16")
    assert "label" in found.how_ranks


def test_a_line_inside_the_head_of_another_loses_neither(tmp_path: Path) -> None:
    world = one_comm(USUAL, USUAL)
    rows = [coll_lines(world, rank) for rank in range(2)]
    lines = [line for pair in zip(*rows, strict=True) for line in pair]
    outer, inner = rows[0][5], rows[1][5]
    at = outer.index("NCCL INFO")
    lines[10:12] = [outer[:at] + inner + outer[at:]]
    (tmp_path / "all.log").write_text("\n".join(lines) + "\n")
    found = read(tmp_path)
    assert (found.status, found.num_calls) == ("no-divergence", 12)


def test_a_call_that_a_damaged_line_may_have_held_is_not_certainly_missing(tmp_path: Path) -> None:
    world = one_comm(USUAL, USUAL, USUAL)
    write_logs(world, tmp_path)
    path = tmp_path / "nccl.node0.1001.log"
    lines = path.read_text().splitlines()
    lines[4] = lines[4].replace(" count ", " co\x00nt ")
    path.write_text("\n".join(lines) + "\n")
    cause = read(tmp_path).causes[0]
    assert (cause.kind, cause.index, cause.strength) == ("missing-call", 3, "possible")
    assert any("nccl.node0.1001.log:5 is damaged" in one for one in cause.doubts)


@pytest.mark.parametrize("keep", [40, 90, 120])
def test_a_log_that_ends_inside_a_line_says_so(tmp_path: Path, keep: int) -> None:
    write_logs(one_comm(USUAL, USUAL), tmp_path)
    path = tmp_path / "nccl.node0.1001.log"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, last[:keep]]))
    found = read(tmp_path)
    assert found.causes[0].strength == "possible"
    assert "rank 1's log ends inside a line (" in found.verdict[1]
    assert f"nccl.node0.1001.log:{len(lines) + 1})" in found.verdict[1]


def test_a_log_without_a_last_line_end_is_whole(tmp_path: Path) -> None:
    write_logs(one_comm(USUAL, USUAL), tmp_path)
    path = tmp_path / "nccl.node0.1001.log"
    path.write_text(path.read_text().rstrip("\n"))
    assert read(tmp_path).status == "no-divergence"
