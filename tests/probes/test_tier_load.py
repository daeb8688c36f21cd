import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.errors import UsageError
from kvbench.core.units import MIB
from kvbench.probes import tier_load
from kvbench.probes.measure import measure_host
from kvbench.probes.plan import MeasurePlan, load_measure_plan
from kvbench.probes.runner import ChildRun
from kvbench.results.host_measurement import HostMeasurement

KIB64 = 64 * 1024


def small_plan(**load: Any) -> MeasurePlan:
    plan = load_measure_plan()
    quick: dict[str, Any] = {
        "sizes_bytes": (KIB64, 4 * KIB64, MIB),
        "repeats": 3,
        "pool_bytes": 8 * MIB,
        "file_bytes": 8 * MIB,
    }
    return replace(plan, load=replace(plan.load, **(quick | load)))


def measure(*tiers: str, **load: Any) -> HostMeasurement:
    return measure_host(tiers=tiers, hf_config=None, plan=small_plan(**load))


def run_in_process(case: dict[str, Any]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    tier_load.measure(case, records.append)
    return records


def case(tmp_path: Path, tier: str, **changes: Any) -> dict[str, Any]:
    return {
        "tier": tier,
        "file": str(tmp_path / "probe.tmp") if tier == "file" else "",
        "io": "psync",
        "direct": True,
        "device": "cpu",
        "sizes_bytes": [KIB64, MIB],
        "warmups": 1,
        "repeats": 2,
        "concurrency": 1,
        "pool_bytes": 8 * MIB,
        "file_bytes": 8 * MIB,
        "time_s": 20.0,
    } | changes


def codes(records: list[dict[str, Any]]) -> set[str]:
    return {record["code"] for record in records if record["record"] == "warning"}


def test_dram_and_file_become_paths_with_fit_samples_and_evidence(tmp_path: Path) -> None:
    result = measure("dram:1GiB", f"file:{tmp_path}")
    assert [outcome.status for outcome in result.outcomes] == ["ok", "ok"]
    dram, file = result.paths
    assert (dram.tier, file.tier) == ("dram", "file")
    assert dram.destination in ("torch cpu tensor", "cuda:0")
    for path in result.paths:
        assert path.bytes_per_s > 0
        assert path.fixed_s >= 0
        assert len(path.samples) == 9
        assert {sample.bytes for sample in path.samples} == {KIB64, 4 * KIB64, MIB}
        assert path.cold_evidence
    assert "few-samples" in {warning.code for warning in file.warnings}
    assert list(tmp_path.iterdir()) == []


def test_several_readers_load_their_bytes_together(tmp_path: Path) -> None:
    for tier in ("dram", "file"):
        records = run_in_process(case(tmp_path, tier, concurrency=3))
        samples = [record["bytes"] for record in records if record["record"] == "sample"]
        assert samples == [3 * KIB64, 3 * MIB] * 2


@pytest.mark.parametrize(("io", "direct"), [("psync", False), ("mmap", False)])
def test_a_buffered_file_says_how_much_of_it_was_cached(tmp_path: Path, io: str, direct: bool) -> None:
    records = run_in_process(case(tmp_path, "file", io=io, direct=direct))
    facts = [record for record in records if record["record"] == "facts"][-1]
    assert "mincore saw at most" in facts["cold_evidence"] or "memory" in facts["cold_evidence"]
    assert facts["cold"] in (True, False)
    assert "direct-refused" not in codes(records)


def test_a_filesystem_in_memory_is_never_called_cold() -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("/dev/shm is not writable here")
    records = run_in_process(case(shared, "file", file=str(shared / f"kvbench-test-{os.getpid()}.tmp")))
    assert "file-in-memory" in codes(records)
    assert [record for record in records if record["record"] == "facts"][-1]["cold"] is False


def test_a_refused_direct_read_falls_back_with_a_loud_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    records = run_in_process(case(tmp_path, "file"))
    assert "direct-refused" in codes(records)
    assert "buffered" in [record for record in records if record["record"] == "facts"][-1]["source"]


def test_without_torch_the_pool_is_a_numpy_buffer_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for tier, io in (("dram", "psync"), ("file", "psync"), ("file", "mmap")):
        records = run_in_process(case(tmp_path, tier, io=io))
        assert [record for record in records if record["record"] == "facts"][-1]["destination"] == "numpy buffer"


def test_bytes_that_arrive_changed_end_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def flipped(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        done = real(descriptor, buffers, offset)
        if isinstance(buffers[0], memoryview):  # the probe for O_DIRECT reads into an mmap
            buffers[0][done - 1] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", flipped)
    with pytest.raises(Exception, match="arrived in device memory with other bytes"):
        run_in_process(case(tmp_path, "file"))


def test_a_size_that_does_not_fit_is_named_and_left_out(tmp_path: Path) -> None:
    records = run_in_process(case(tmp_path, "dram", sizes_bytes=[KIB64, MIB, 64 * MIB]))
    assert "sizes-dropped" in codes(records)
    assert {record["bytes"] for record in records if record["record"] == "sample"} == {KIB64, MIB}


def test_a_directory_that_cannot_be_used_costs_that_case_only(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("not a directory")
    missing, not_one, done = measure(f"file:{tmp_path}/missing", f"file:{tmp_path}/file.txt", "dram:8MiB").outcomes
    for outcome, reason in ((missing, "missing: No such file or directory"), (not_one, "file.txt: Not a directory")):
        assert outcome.status == "failed"
        assert outcome.reason is not None
        assert outcome.reason.startswith(f"{tmp_path}/{reason}; name a directory that exists")
    assert done.status == "ok"


def test_a_read_only_directory_is_a_reason(tmp_path: Path) -> None:
    directory = Path("/sys") if os.geteuid() == 0 else tmp_path  # root may write anywhere but in such a filesystem
    if directory == tmp_path:
        tmp_path.chmod(0o500)
    (outcome,) = measure(f"file:{directory}").outcomes
    assert outcome.status == "failed"
    assert outcome.reason is not None
    assert outcome.reason.startswith(f"{directory}: ") or "fewer than two sizes" in outcome.reason


def test_a_disk_that_fills_up_while_writing_is_a_reason_and_leaves_nothing(tmp_path: Path) -> None:
    limited = textwrap.dedent(f"""
        import resource
        from tests.probes.test_tier_load import case, run_in_process
        from pathlib import Path
        resource.setrlimit(resource.RLIMIT_FSIZE, ({MIB}, {MIB}))
        run_in_process(case(Path({str(tmp_path)!r}), "file"))
    """)
    result = subprocess.run(
        [sys.executable, "-c", limited],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert f"{tmp_path}: File too large after 1.00 MiB of 8.00 MiB; free some space or give a smaller size" in last
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != MIB


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small filesystem needs root")
    try:
        (outcome,) = measure(f"file:{tmp_path}").outcomes
        assert outcome.status == "failed"
        assert outcome.reason is not None
        assert "fewer than two sizes of the plan fit twice into 128.00 KiB" in outcome.reason
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_child_killed_in_the_middle_leaves_no_file(tmp_path: Path) -> None:
    plan = small_plan(repeats=100_000, time_s=60.0, timeout_s=3.0)
    result = measure_host(tiers=[f"file:{tmp_path}"], hf_config=None, plan=plan)
    (outcome,) = result.outcomes
    assert outcome.status == "failed"
    assert outcome.reason is not None
    assert "no end after 3 s" in outcome.reason
    assert result.paths == ()
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_keeps_a_path_of_the_samples_so_far_and_begins_nothing_else(tmp_path: Path) -> None:
    program = textwrap.dedent(f"""
        import json
        from tests.probes.test_tier_load import small_plan
        from kvbench.probes.measure import measure_host
        result = measure_host(
            tiers=["file:{tmp_path}", "dram:8MiB"], hf_config={{"model_type": "qwen3"}},
            plan=small_plan(repeats=100_000, time_s=60.0), progress=lambda stage: print(stage, flush=True),
        )
        print(json.dumps([
            result.interrupted, len(result.paths), result.paths[0].warnings[0].code,
            [[outcome.status, outcome.reason] for outcome in result.outcomes],
        ]))
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )
    assert process.stdout is not None
    while "timing loads" not in process.stdout.readline():
        pass
    assert list(tmp_path.iterdir()) == []  # the name is gone while the file is being read
    wait_for_samples(process.pid)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    never = ["skipped", "interrupted before it began"]
    expected = '[true, 1, "interrupted", [["failed", "interrupted"], {0}, {0}]]'
    assert out.strip() == expected.format(str(never).replace("'", '"'))


def wait_for_samples(pid: int) -> None:
    """Returns once the process has read a few kilobytes more, which is what its child writes as samples."""
    first = None
    for _ in range(2000):
        read = int(Path(f"/proc/{pid}/io").read_text().split()[1])
        first = first or read
        if read > first + 4096:
            return
        time.sleep(0.005)
    pytest.fail("no sample arrived")


def test_the_total_time_bounds_which_cases_begin() -> None:
    plan = replace(small_plan(), total_s=0.001)
    result = measure_host(tiers=["dram:8MiB", "dram:16MiB"], hf_config={"model_type": "qwen3"}, plan=plan)
    assert [outcome.status for outcome in result.outcomes] == ["failed", "skipped", "skipped"]
    assert result.prefill is None
    assert not result.interrupted


def test_tiers_are_refused_before_anything_runs() -> None:
    def never(*_: object, **__: object) -> ChildRun:
        raise AssertionError("a case ran")

    for tiers, part in ((["dram:1GiB", "s3://bucket"], "measures dram and file"), (["dram:8MiB"] * 2, "named twice")):
        with pytest.raises(UsageError, match=part):
            measure_host(tiers=tiers, hf_config=None, plan=small_plan(), run=never)


def test_times_that_do_not_grow_with_the_size_hold_no_bandwidth() -> None:
    facts = {"record": "facts", "source": "a", "destination": "b", "cold": True, "cold_evidence": "c"}
    records: list[dict[str, Any]] = [
        facts,
        *({"record": "sample", "bytes": size, "seconds": 1 / size} for size in (1, 2, 4)),
    ]

    def backwards(*_: object, **__: object) -> ChildRun:
        return ChildRun(status="ok", reason=None, records=tuple(records), elapsed_s=1.0)

    result = measure_host(tiers=["dram:8MiB"], hf_config=None, plan=small_plan(), run=backwards)
    (outcome,) = result.outcomes
    assert (outcome.status, len(outcome.transfer_samples), result.paths) == ("failed", 3, ())
