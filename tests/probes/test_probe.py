"""Plans run for real: constants recovered, faults that cost one case, and what a host without a GPU answers."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.units import KIB, MIB
from kvbench.probes import file_case, remote_case
from kvbench.probes.affinity import cpu_list, disk_numa_node, stay_on_node
from kvbench.probes.probe import probe, provenance
from kvbench.probes.runner import CHILD, ChildRun, run_child
from kvbench.probes.transfer_plan import load_transfer_plan
from kvbench.results.document import new_document, numbers_without_origin
from kvbench.results.host import Host
from kvbench.results.probe import ProbeCase, ProbeResult
from kvbench.tiers.cuda_runtime import no_gpu_reason, pci_numa_node

ROOT = Path(__file__).parents[2]
QUICK = ("sizes=256KiB,1MiB", "segments=64KiB", "repeats=3", "time=1s", "pool=4MiB")
NO_GPU = "no GPU on this host (made up)"


def run_plan(name: str, *settings: str, run: Any = run_child, no_gpu: str | None = NO_GPU) -> ProbeResult:
    return probe(load_transfer_plan(name, settings), run=run, why_no_gpu=lambda: no_gpu)


def file_settings(directory: Path, *more: str) -> tuple[str, ...]:
    return (
        f"paths=file:{directory}", "file=2MiB", "sizes=512KiB,1MiB", "segments=64KiB", "repeats=3", "time=1s",
        "concurrency=2", "fsync=none", "timeout=30s", *more,
    )  # fmt: skip


def by_name(result: ProbeResult) -> dict[str, ProbeCase]:
    return {case.name: case for case in result.cases}


def test_the_fit_recovers_the_constants_of_a_throttled_path_and_null_shows_the_harness() -> None:
    result = run_plan("harness", "repeats=9")
    null, throttled = result.cases
    assert throttled.fit is not None
    assert throttled.fit.fixed_s == pytest.approx(500e-6, rel=0.05)
    assert throttled.fit.per_segment_s == pytest.approx(5e-6, rel=0.05)
    assert throttled.fit.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert null.fit is not None
    assert null.fit.per_segment_s is not None
    assert 0 < null.fit.per_segment_s < 5e-6
    assert null.setup_s is not None
    assert result.paths == (), "a path of nothing must not become a rate of this host"


def test_host_copies_stand_in_for_a_gpu_and_every_cuda_case_is_skipped() -> None:
    result = run_plan("h2d", *QUICK)
    cuda = [case for case in result.cases if case.method.startswith("cuda")]
    assert len(cuda) == 7
    assert {(case.status, case.reason) for case in cuda} == {("skipped", NO_GPU)}
    host = [case for case in result.cases if case.method.startswith("host")]
    assert {(case.status, case.stands_in_for, case.direction) for case in host} == {("ok", "h2d", "h2h")}
    assert [warning.code for warning in result.warnings if warning.code == "no-gpu"]
    (path,) = result.paths
    assert (path.tier, path.direction, path.destination) == ("dram", "load", "host memory")
    (anchor,) = result.anchors
    assert "not on this host" in anchor.name


@pytest.mark.skipif(no_gpu_reason() is None, reason="this host has a GPU")
@pytest.mark.parametrize("name", ["h2d", "d2h", "duplex", "contention", "gds"])
def test_without_a_gpu_cuda_cases_end_at_once_and_without_torch(name: str, tmp_path: Path) -> None:
    settings = ["stand_ins=[]", *([f"paths=file:{tmp_path}"] if name == "gds" else [])]
    program = textwrap.dedent(f"""
        import sys, time
        from kvbench.probes.probe import probe
        from kvbench.probes.transfer_plan import load_transfer_plan
        plan = load_transfer_plan({name!r}, {settings!r})
        begin = time.perf_counter()
        result = probe(plan)
        took = time.perf_counter() - begin
        assert took < 1, took
        assert result.cases
        assert all(case.status == "skipped" and case.reason.startswith("no GPU") for case in result.cases)
        assert "torch" not in sys.modules and "cuda" not in sys.modules
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_a_gpu_case_also_skips_inside_the_child() -> None:
    if no_gpu_reason() is None:
        pytest.skip("this host has a GPU")
    result = run_plan("h2d", *QUICK, "executions=cuda-batch", no_gpu=None)
    (case,) = result.cases
    assert case.status == "skipped"
    assert case.reason is not None
    assert case.reason.startswith("no GPU")


def test_a_file_is_measured_by_every_engine_and_nothing_is_left(tmp_path: Path) -> None:
    result = run_plan("file", *file_settings(tmp_path, "concurrency=1,4", "fsync=none,fdatasync,batch"))
    assert {case.status for case in result.cases} <= {"ok", "skipped"}
    ok = [case for case in result.cases if case.status == "ok"]
    assert {case.method for case in ok} >= {"psync", "mmap"}
    assert all(len(case.samples) == 6 for case in ok)
    assert {case.fsync for case in ok if case.direction == "store"} == {"none", "fdatasync", "batch"}
    assert {path.direction for path in result.paths} == {"load", "store"}
    assert list(tmp_path.iterdir()) == []


def test_duplex_overlap_and_contention_run_on_the_host(tmp_path: Path) -> None:
    overlap = run_plan("overlap", *QUICK)
    beside = [case for case in overlap.cases if case.beside == "compute" and case.samples]
    assert all(case.beside_slowdown_ratio is not None for case in beside)
    assert len(beside) == 2
    contention = by_name(run_plan("contention", *QUICK))
    assert contention["host-block h2h, ×2"].points[-1].bytes == 2 * MIB


def test_layouts_of_a_real_model_run_and_are_checked() -> None:
    result = run_plan("layouts", "sizes=4MiB", "repeats=2", "pool=16MiB", "page_tokens=16", "stand_ins=host-gather")
    measured = {case.layout: case for case in result.cases if case.samples}
    assert set(measured) == {"layer-first", "page-first", "page-first-direct"}
    assert measured["page-first"].points[0].segment_bytes == 256
    assert measured["layer-first"].points[0].segment_bytes == 16 * 256


def substituted(victim: str, code: str) -> Any:
    """Runs the case of that name by other code, and all others for real."""

    def run(case: dict[str, Any], **settings: Any) -> ChildRun:
        name = case.get("execution") or case.get("engine")
        command: Sequence[str] = CHILD
        if name == victim:
            command = (sys.executable, "-c", f"import json, os, signal, sys, time\ncase = json.load(sys.stdin)\n{code}")
            settings["timeout_s"] = 1.5
        return run_child(case, command=command, **settings)

    return run


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        ("time.sleep(600)", "no end after 1.5 s"),
        ("os.kill(os.getpid(), signal.SIGBUS)", "ended by SIGBUS"),
        ("raise MemoryError", "MemoryError"),
    ],
)
def test_a_child_that_dies_or_hangs_costs_its_case_only(code: str, part: str) -> None:
    result = run_plan("dram", *QUICK, "concurrency=1", run=substituted("host-loop", code))
    block, loop, gather = result.cases
    assert (block.status, gather.status) == ("ok", "ok")
    assert loop.status == "failed"
    assert loop.reason is not None
    assert part in loop.reason


def test_a_child_killed_while_it_writes_its_file_leaves_nothing(tmp_path: Path) -> None:
    code = "open(case['file'], 'wb').write(b'x' * 4096)\nos.kill(os.getpid(), signal.SIGKILL)"
    settings = file_settings(tmp_path, "directions=load", "engines=psync,mmap", "direct=0")
    result = run_plan("file", *settings, run=substituted("psync", code))
    assert [case.status for case in result.cases] == ["failed", "ok"]
    assert list(tmp_path.iterdir()) == []


def test_a_missing_and_a_read_only_directory_are_reasons(tmp_path: Path) -> None:
    for directory, part in ((tmp_path / "missing", "No such file"), (Path("/proc"), "")):
        result = run_plan("file", *file_settings(directory, "directions=load", "engines=psync", "direct=1"))
        (case,) = result.cases
        assert case.status == "failed"
        assert case.reason is not None
        assert part in case.reason
        assert "\n" not in case.reason


def test_a_disk_that_fills_up_is_a_reason_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, runpy, io\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "sys.stdin = io.StringIO(json.dumps(case))\n"
        "runpy.run_module('kvbench.probes.child', run_name='__main__')"
    )
    settings = file_settings(tmp_path, "directions=load", "engines=psync,mmap", "direct=0")
    result = run_plan("file", *settings, run=substituted("psync", code))
    full, other = result.cases
    assert full.reason is not None
    assert "File too large after 64.00 KiB of 2.00 MiB; free some space" in full.reason
    assert other.status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_misaligned_direct_blocks_cost_their_case_only(tmp_path: Path) -> None:
    settings = file_settings(tmp_path, "directions=load", "engines=psync", "direct=1,0", "segments=1000B")
    direct, buffered = run_plan("file", *settings).cases
    if any(warning.code == "direct-refused" for warning in direct.warnings):
        pytest.skip("this filesystem has no O_DIRECT")
    assert direct.status == "failed"
    assert direct.reason is not None
    assert "O_DIRECT refused it" in direct.reason
    assert buffered.status == "ok"


def test_a_filesystem_without_direct_io_falls_back_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT")
    records = file_records(tmp_path, direct=True)
    assert "direct-refused" in {record.get("code") for record in records}
    facts = [record for record in records if record["record"] == "facts"][-1]
    assert "buffered" in facts["source"]


def file_records(tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    case: dict[str, Any] = {
        "file": str(tmp_path / "probe.tmp"), "engine": "psync", "direction": "load", "direct": True, "fsync": "none",
        "depth": 2, "huge_pages": False, "points": [(256 * KIB, 64 * KIB)], "repeats": 2, "warmups": 1,
        "file_bytes": MIB, "time_s": 5.0,
    }  # fmt: skip
    records: list[dict[str, Any]] = []
    file_case.measure(case | changes, records.append)
    return records


def test_buffered_stores_without_fsync_are_called_warm_and_become_no_path(tmp_path: Path) -> None:
    settings = file_settings(tmp_path, "directions=store", "engines=psync", "direct=0")
    result = run_plan("file", *settings)
    assert result.cases[0].cold is False
    assert result.paths == ()


def test_changed_bytes_end_a_file_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def flipped(descriptor: int, buffers: list[Any], offset: int) -> int:
        done = real(descriptor, buffers, offset)
        if isinstance(buffers[0], memoryview):
            buffers[0][0] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", flipped)
    with pytest.raises(Exception, match="arrived in memory with other bytes"):
        file_records(tmp_path)


def test_ctrl_c_saves_what_was_measured_and_leaves_no_file(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    work = tmp_path / "disk"
    work.mkdir()
    settings = file_settings(work, "directions=load", "engines=psync,mmap", "direct=0", "repeats=1000000", "time=60s")
    command = [sys.executable, "-m", "kvbench", "probe", "file", "--out", str(out)]
    for setting in (*settings, "total=100s", "timeout=90s"):
        command += ["--set", setting]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    time.sleep(6)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 1, complaints
    saved = json.loads(out.read_text())
    assert saved["interrupted"] is True
    first, second = saved["result"]["cases"]
    assert first["reason"] == "interrupted"
    assert len(first["samples"]) > 2
    assert (second["status"], second["reason"]) == ("skipped", "interrupted before it began")
    assert list(work.iterdir()) == []


def test_the_total_time_bounds_which_cases_begin() -> None:
    result = run_plan("dram", *QUICK, "total=1ms")
    assert {case.status for case in result.cases} <= {"failed", "skipped"}
    assert any("was used up before it began" in (case.reason or "") for case in result.cases)


def test_every_number_of_a_result_has_an_origin(host: Host, tmp_path: Path) -> None:
    for result in (run_plan("overlap", *QUICK), run_plan("file", *file_settings(tmp_path, "engines=psync"))):
        document = new_document(result, command_line=("kvbench", "probe"), provenance=provenance(), host=host)
        assert numbers_without_origin(document) == ()


class Shelf:
    """A store in memory that counts how many requests were in flight."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.now = self.most = 0

    async def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    async def get(self, key: str) -> bytes:
        import asyncio

        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return self.values[key]

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.values.pop(key, None)

    async def close(self) -> None: ...


def remote_records(shelf: Shelf, direction: str, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    async def opened(*_: Any) -> Any:
        return shelf

    monkeypatch.setitem(remote_case._STORES, "redis", opened)
    records: list[dict[str, Any]] = []
    remote_case.measure(
        {
            "spec": "redis://127.0.0.1:6379/0", "direction": direction, "depth": 3,
            "points": [(64 * KIB, 16 * KIB), (256 * KIB, 16 * KIB)], "repeats": 2, "warmups": 1, "time_s": 5.0,
        },
        records.append,
    )  # fmt: skip
    return records


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_remote_store_is_timed_at_its_depth_and_left_empty(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    records = remote_records(shelf, direction, monkeypatch)
    samples = [(record["bytes"], record["segments"]) for record in records if record["record"] == "sample"]
    assert samples == [(64 * KIB, 4), (256 * KIB, 16)] * 2
    assert shelf.values == {}
    assert shelf.most == (3 if direction == "load" else 1)


def test_a_remote_store_that_does_not_answer_is_a_reason() -> None:
    pytest.importorskip("redis", reason="needs the redis extra")
    result = run_plan("remote", "paths=redis://127.0.0.1:9/0", "concurrency=1", "directions=load")
    (case,) = result.cases
    assert case.status == "failed"
    assert case.reason is not None
    assert "does not answer" in case.reason


def test_a_missing_client_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(Exception, match=r"pip install 'kvbench\[redis\]'"):
        remote_case.measure(
            {
                "spec": "redis://127.0.0.1:6379/0", "direction": "load", "depth": 1, "points": [(4096, 4096)],
                "repeats": 1, "warmups": 1, "time_s": 1.0,
            },
            lambda _: None,
        )  # fmt: skip


def test_numa_nodes_are_read_from_sysfs(tmp_path: Path) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:18:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert pci_numa_node("00000000:18:00.0", root=tmp_path) == 1
    assert pci_numa_node("0000:19:00.0", root=tmp_path) is None
    assert cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert cpu_list("") == set()
    for node in (0, 1):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text("4096-4100\n")
    assert stay_on_node(None, root=tmp_path).startswith("not bound: 2 NUMA nodes")
    assert stay_on_node(1, root=tmp_path) == "not bound: none of NUMA node 1's CPUs may be used by this process"
    assert disk_numa_node(tmp_path / "missing") is None
