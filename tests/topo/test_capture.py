"""probes/capture/topology.sh: what it packs on this machine and on a captured one is what --from reads."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvbench.core.graph import Graph
from kvbench.topo.build import build_machine
from kvbench.topo.read import read_inputs
from kvbench.topo.sysfs import read_root
from tests.topo.fake_sysfs import switched_machine
from tests.topo.shared_texts import DATA

SCRIPT = Path(__file__).parents[2] / "probes/capture/topology.sh"


def capture(folder: Path, **environment: str) -> tuple[Path, str]:
    archive = folder / "capture.tar.gz"
    done = subprocess.run(
        ["bash", str(SCRIPT), str(archive)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    assert done.stdout == f"{archive}\n"
    return archive, done.stderr


def tool(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_a_captured_sys_reads_like_the_original(tmp_path: Path) -> None:
    fake = switched_machine(tmp_path / "host")
    fake.iommu("identity", "0000:19:00.0")
    archive, _ = capture(tmp_path, SYSFS_ROOT=str(fake.sys), PROC_ROOT="/nowhere")
    (facts, *_) = read_inputs([archive])
    original = read_root(tmp_path / "host")
    assert facts.pci == original.pci
    assert facts.numa == original.numa
    assert facts.disks == original.disks
    assert facts.iommu == "passthrough"
    assert facts.source == "capture.tar.gz"


def test_missing_tools_are_listed_and_do_not_stop_it(tmp_path: Path) -> None:
    few = tmp_path / "bin"
    few.mkdir()
    for name in (
        "bash",
        "uname",
        "date",
        "mktemp",
        "rm",
        "mkdir",
        "cat",
        "readlink",
        "dirname",
        "basename",
        "cp",
        "grep",
        "sort",
        "tar",
        "gzip",
        "sed",
        "head",
        "tr",
        "timeout",
        "env",
    ):
        found = shutil.which(name)
        if found is None:
            pytest.skip(f"this system has no {name}")
        (few / name).symlink_to(found)
    fake = switched_machine(tmp_path / "host")
    archive, errors = capture(tmp_path, PATH=str(few), SYSFS_ROOT=str(fake.sys))
    assert "nvidia-smi: not installed (nvidia-smi-topo-m.txt)" in errors
    assert "lspci: not installed (lspci-t.txt)" in errors
    assert [facts.format for facts in read_inputs([archive])] == ["sysfs"]


def test_the_output_of_tools_is_packed_and_a_failing_one_is_named(tmp_path: Path) -> None:
    few = tmp_path / "bin"
    few.mkdir()
    tool(
        few,
        "lspci",
        f'if [ "$1" = -t ]; then cat {DATA}/lspci-t.txt; exit; fi\n'
        f'cat {DATA}/lspci-vv.txt; echo "\tDevice Serial Number 00-11"',
    )
    tool(few, "nvidia-smi", 'echo "no devices were found" >&2; exit 6')
    (tmp_path / "sys").mkdir()
    archive, errors = capture(
        tmp_path,
        PATH=f"{few}:{os.environ['PATH']}",
        SYSFS_ROOT=str(tmp_path / "sys"),
        NCCL_TOPO_FILE=str(DATA / "nccl.xml"),
    )
    assert "nvidia-smi topo -m: no devices were found (nvidia-smi-topo-m.txt)" in errors
    listed = subprocess.run(
        ["tar", "xzOf", str(archive), "topology/lspci-vv.txt"], capture_output=True, text=True, check=True
    )
    assert "Serial Number" not in listed.stdout
    formats = {facts.format for facts in read_inputs([archive])}
    assert {"lspci -t", "lspci -vv", "NCCL topology XML"} <= formats


def test_this_machine_captured_and_read_again(tmp_path: Path) -> None:
    archive, _ = capture(tmp_path)
    captured = next(facts for facts in read_inputs([archive]) if facts.format == "sysfs")
    here = read_root(Path("/"))
    assert [fact.bus_id for fact in captured.pci] == [fact.bus_id for fact in here.pci]
    assert [(disk.name, disk.bus_id) for disk in captured.disks] == [(disk.name, disk.bus_id) for disk in here.disks]
    assert [(numa.index, numa.cpus) for numa in captured.numa] == [(numa.index, numa.cpus) for numa in here.numa]
    assert Graph(build_machine([captured])[0]).of_kind("numa")


def test_shellcheck_has_nothing_to_say() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
