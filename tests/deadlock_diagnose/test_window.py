import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.collectives.reader import ReadPlan, read_part
from kvbench.deadlock_diagnose import gather, window
from kvbench.deadlock_diagnose.diagnose import diagnose, reduce_summaries
from kvbench.results.deadlock_diagnosis import DeadlockDiagnosis
from tests.deadlock_diagnose.programs import Op, World, coll_lines, random_world, write_logs
from tests.deadlock_diagnose.test_programs import SETTINGS, invert, mutate


def answer(found: DeadlockDiagnosis) -> tuple[object, ...]:
    cause = found.causes[0] if found.causes else None
    return found.status, found.kind, cause and (cause.index, cause.suspects, cause.camps)


@SETTINGS
@given(seed=st.integers(0, 2**32), what=st.sampled_from(["none", "drop", "insert", "change", "swap", "invert"]))
def test_skipping_what_all_ranks_did_alike_changes_no_answer(tmp_path: Path, seed: int, what: str) -> None:
    rng = random.Random(seed)
    world = random_world(rng, ranks=4, comms=3, calls=150, one_stream=rng.random() < 0.5, p2p=rng.random() < 0.3)
    made = invert(world, rng) if what == "invert" else None if what == "none" else mutate(world, rng, what)
    write_logs(made[0] if made else world, tmp_path)
    whole = diagnose([tmp_path], jobs=1).diagnosis
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "CHUNK", 32)
        patch.setattr(window, "PIECE", 8)
        short = diagnose([tmp_path], jobs=1).diagnosis
        patch.setattr(window, "FIRST_WINDOW", 64)
        windowed = diagnose([tmp_path], jobs=1, order_window=100).diagnosis
    assert answer(whole) == answer(short)
    assert short.num_calls == whole.num_calls
    if what not in {"invert", "none"}:  # an inversion may lie before the window, and the report says so
        assert windowed.status == whole.status


def test_calls_that_are_alike_are_skipped_and_numbered_on(tmp_path: Path) -> None:
    program = [Op(comm=0, count=1 + number % 7) for number in range(20_000)]
    write_logs(World(comms=[(0, 1, 2)], programs=[program, program, [*program[:19_000], *program[19_001:]]]), tmp_path)
    found = diagnose([tmp_path], jobs=1).diagnosis
    assert found.num_skipped_calls > 3 * 18_000
    assert (found.causes[0].kind, found.causes[0].index) == ("missing-call", 19_001)
    assert any(":19003" in one.place for one in found.causes[0].evidence), "two creation lines, then the call"


def test_plans_and_summaries_travel_between_processes(tmp_path: Path) -> None:
    write_logs(World(comms=[(0, 1)], programs=[[Op(comm=0)] * 3, [Op(comm=0)] * 2]), tmp_path)
    paths = {str(path): path for path in tmp_path.iterdir()}
    plans = [ReadPlan(path=path, shown=shown, content="text") for shown, path in sorted(paths.items())]
    summaries = [pickle.loads(pickle.dumps(read_part(pickle.loads(pickle.dumps(plan))))) for plan in plans]
    found = reduce_summaries(summaries, paths)
    assert found.diagnosis.causes[0].index == 3


def test_ctrl_c_keeps_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(comms=[(0, 1, 2)], programs=[[Op(comm=0)], [Op(comm=0, count=2)], [Op(comm=0)]])
    for rank in range(3):
        (tmp_path / f"rank{rank}.log").write_text("\n".join(coll_lines(world, rank)) + "\n")

    def read_two(plan: ReadPlan) -> object:
        if "rank2" in plan.shown:
            raise KeyboardInterrupt
        return read_part(plan)

    monkeypatch.setattr(gather, "read_part", read_two)
    found = diagnose([tmp_path], jobs=1)
    assert found.interrupted
    assert found.diagnosis.causes[0].kind == "field-mismatch"
    assert found.diagnosis.communicators[0].num_unseen == 1
