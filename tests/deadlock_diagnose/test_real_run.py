"""Real ranks under torchrun, made to diverge, and the dumps they leave."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.deadlock_diagnose.diagnose import diagnose
from kvbench.results.deadlock_diagnosis import DeadlockDiagnosis

pytest.importorskip("torch", reason="torch is not installed")
PROGRAM = Path(__file__).with_name("gloo_program.py")


def run(folder: Path, case: str, ranks: int) -> DeadlockDiagnosis:
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "1000", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(PROGRAM), str(folder), case]
    subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True)
    return diagnose([folder], jobs=1).diagnosis


def test_ranks_that_enter_cache_broadcast_and_forward_in_different_order_are_diagnosed(tmp_path: Path) -> None:
    found = run(tmp_path, "inverted", 2)
    assert found.status == "divergence"
    assert found.causes[0].kind == "host-cycle", found.verdict
    assert "waits in Broadcast #1 of comm 1:cache" in found.verdict[0]
    assert "waits in AllReduce #4 of comm 0:default_pg" in found.verdict[0]
    assert any("gloo_program.py" in one.place for one in found.causes[0].evidence)


def test_a_rank_that_skips_a_call_is_found_in_a_real_run(tmp_path: Path) -> None:
    found = run(tmp_path, "skipped", 3)
    assert found.status == "divergence"
    assert found.causes[0].index == 4, found.verdict
    assert [one.rank for one in found.causes[0].suspects] == ["rank 1"]


def test_a_real_run_that_ends_well_shows_no_divergence(tmp_path: Path) -> None:
    found = run(tmp_path, "good", 2)
    assert found.status == "no-divergence", found.verdict
    assert found.num_calls == 14
