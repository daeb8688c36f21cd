"""Inputs that are cut, that hold no places, or that contradict one another lead to no invented fact."""

import os
import time
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import Graph
from kvbench.results.topology import TopologyResult
from kvbench.topo.discover import Sources, discover
from tests.topo.fake_sysfs import BRIDGE, GPU, NIC, FakeSys
from tests.topo.shared_texts import DATA, shared
from tests.topo.test_findings import found, rules, written

TAILS = ("\t0-27\t0\tN/A\n", "\t0-27\t0\tN/A\n", "\t28-55\t1\tN/A\n", "\t56-83\t2\tN/A\n")
HEAD = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"


def nv18(*tails: str) -> str:
    rows = ("\t".join(" X " if a == b else "NV18" for b in range(4)) for a in range(4))
    return HEAD + "".join(f"GPU{at}\t{row}{tail}" for at, (row, tail) in enumerate(zip(rows, tails, strict=False)))


def of_file(*names: str) -> TopologyResult:
    return discover(Sources(files=tuple(shared(name) for name in names)))


def test_rows_that_were_cut_are_no_blank_cells(tmp_path: Path) -> None:
    whole = nv18(*TAILS)
    told = rules(written(tmp_path, whole))
    assert {"nps-spread", "unbalanced-sockets"} <= told
    untold = {"cpu-affinity-missing", "numa-unknown", "unbalanced-sockets", "nps-spread"}
    row = whole.rindex("GPU3")
    for end in (
        row,
        row + len("GPU3\tNV18\tNV"),
        len(whole) - len("\t56-83\t2\tN/A\n"),
        len(whole) - len("\t2\tN/A\n"),
    ):
        assert not rules(written(tmp_path, whole[:end])) & untold, whole[row:end]
    blank = nv18(*TAILS[:3], "\t\t2\tN/A\n")
    assert found(written(tmp_path, blank), "cpu-affinity-missing").subjects == ("gpu3",)


def test_a_cut_matrix_hides_nothing_that_addresses_tell(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-27", distance="10 21")
    fake.numa(1, "28-55", distance="21 10")
    for at, numa in enumerate((0, 0, 0, 1)):
        fake.pci(f"0000:0{at}:01.0", f"pci0000:0{at}", BRIDGE, numa=numa)
        fake.pci(f"0000:1{at}:00.0", f"0000:0{at}:01.0", GPU, numa=numa)
    text = nv18("\t0-27\t0\tN/A\n", "\t0-27\t0\tN/A\n", "\t0-27\t0\tN/A\n", "\t28-55\t1\tN/A\n")
    (tmp_path / "m.txt").write_text(text[: text.rindex("GPU3")])
    told = rules(discover(Sources(root=tmp_path / "sys", files=(tmp_path / "m.txt",))))
    assert "unbalanced-sockets" in told
    assert "cpu-affinity-missing" not in told


def test_the_truncated_texts_of_real_machines_have_only_their_own_findings() -> None:
    assert rules(of_file("b200-8gpu-9nic-truncated.txt")) == set()
    assert rules(of_file("b200-8gpu-one-gpu-off-nvlink-noheader-truncated.txt")) == {"gpu-off-fabric"}


def test_peer_access_alone_tells_no_distances() -> None:
    result = discover(Sources(files=(DATA / "peers-refused.txt",)))
    assert {cell.cell for row in result.matrix.rows for cell in row} == {"X", "?"}
    assert not rules(result) & {"numa-unknown", "paths-hidden"}
    assert any("add nvidia-smi topo -m" in absent.reason for absent in result.absent)


def test_addresses_alone_tell_no_distances() -> None:
    graph = Graph(discover(Sources(files=(DATA / "dgx-8gpu.csv",))).machine)
    assert graph.pair_cell("gpu0", "gpu1") == "?"


def test_a_desktop_with_one_host_bridge_hides_nothing(tmp_path: Path) -> None:
    rows = ("\t".join(" X " if a == b else "PHB" for b in range(4)) + "\t0-15\t0\tN/A\n" for a in range(4))
    desktop = HEAD + "".join(f"GPU{at}\t{row}" for at, row in enumerate(rows))
    assert "paths-hidden" not in rules(written(tmp_path, desktop))
    assert "paths-hidden" in rules(of_file("h100-4gpu-vm-all-phb-8nic.txt"))


def test_gpus_with_the_same_cpus_are_on_one_node_unless_they_are_sys_apart(tmp_path: Path) -> None:
    def text(cell: str) -> str:
        head = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
        return head + f"GPU0\t X \t{cell}\t0-23\tN/A\nGPU1\t{cell}\t X \t0-23\tN/A\n"

    def nodes(cell: str) -> list[str]:
        return [node.name for node in Graph(written(tmp_path, text(cell)).machine).of_kind("numa")]

    assert nodes("NV2") == ["NUMA node 0 (inferred)"]
    assert nodes("SYS") == ["NUMA node 0 (inferred)", "NUMA node 1 (inferred)"]


def test_a_link_whose_port_is_not_read_is_no_proven_fault(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    fake.pci("0000:01:00.0", "pci0000:01", NIC, now=("16.0 GT/s PCIe", 8))
    result = discover(Sources(root=tmp_path))
    for rule in ("link-width-downgraded", "link-generation-downgraded"):
        finding = found(result, rule)
        assert finding.severity == "warning"
        assert finding.evidence.endswith("the port is not in the input and may be the lesser end")
        assert "both ends" not in finding.evidence


def test_a_device_of_unknown_class_may_be_an_idle_gpu(tmp_path: Path) -> None:
    text = "31:00.0\n\tLnkCap: Port #0, Speed 16GT/s, Width x16\n\tLnkSta: Speed 2.5GT/s (downgraded), Width x16\n"
    finding = found(written(tmp_path, text), "link-generation-idle")
    assert "perhaps a GPU" in finding.evidence


def test_matrices_that_contradict_each_other_are_refused_and_equal_ones_count_once(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    paths[0].write_text(nv18(*TAILS))
    for other, message in (
        (nv18(*TAILS).replace("NV18", "NV12"), r"b.txt: GPU0 to GPU1 is NV12, but a.txt says NV18"),
        (nv18(*TAILS[:3], "\t56-83\t3\tN/A\n"), r"b.txt: the NUMA affinity of GPU3 is 3, but a.txt says 2"),
    ):
        paths[1].write_text(other)
        with pytest.raises(KvbenchError, match=message) as refused:
            discover(Sources(files=tuple(paths)))
        assert "\n" not in str(refused.value)
    paths[1].write_text(nv18(*TAILS))
    assert len(discover(Sources(files=tuple(paths))).machine.reported) == 6


def test_cells_of_nics_whose_node_is_inferred_are_compared_too() -> None:
    finding = found(of_file("h200-8gpu-slurm-blank-cpu-affinity-10nic.txt"), "matrix-contradicts-numa")
    assert "are NODE apart, but on NUMA nodes 0 and 1" in finding.evidence


def test_nics_without_a_numa_home_are_not_called_far() -> None:
    finding = found(discover(Sources(files=(DATA / "grace-4gpu.txt",))), "gpu-far-from-nic")
    assert finding.severity == "info"
    assert finding.evidence.startswith("NIC placement not reported")


def test_a_matrix_of_30_mb_is_refused_quickly(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("GPU0\t X \tNV18\n" * 2_000_000)
    started = time.perf_counter()
    with pytest.raises(KvbenchError, match="is too large for a matrix"):
        discover(Sources(files=(path,)))
    assert time.perf_counter() - started < 3


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(KvbenchError, match="neither a regular file nor a folder"):
        discover(Sources(files=(pipe,)))
    with pytest.raises(KvbenchError, match="no regular file"):
        discover(Sources(files=(DATA / "dgx-8gpu.txt",), imports=(pipe,)))
