from itertools import pairwise
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import Graph
from kvbench.topo.build import build_machine
from kvbench.topo.discover import Sources, discover
from kvbench.topo.facts import Facts
from kvbench.topo.sysfs import read_root
from tests.topo.fake_sysfs import BRIDGE, GPU, FakeSys, switched_machine


def graph_of(root: Path) -> Graph:
    machine, _ = build_machine([read_root(root)])
    return Graph(machine)


def test_a_switched_machine_comes_back_as_it_was_written(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    graph = graph_of(tmp_path)
    assert [node.bus_id for node in graph.of_kind("gpu")] == ["0000:19:00.0", "0000:99:00.0"]
    assert [node.name for node in graph.of_kind("nic")] == ["mlx5_0", "mlx5_1"]
    assert [node.name for node in graph.of_kind("disk")] == ["nvme0n1", "nvme1n1"]
    assert [node.bus_id for node in graph.of_kind("switch")] == ["0000:17:00.0", "0000:97:00.0"]
    assert [node.bus_id for node in graph.of_kind("root_port")] == ["0000:16:01.0", "0000:96:01.0"]
    assert {node.id for node in graph.of_kind("socket")} == {"socket0", "socket1"}
    assert graph.path_class("gpu0", "nic0") == "PIX"
    assert graph.path_class("gpu0", "disk0") == "PIX"
    assert graph.path_class("gpu0", "nic1") == "SYS"
    assert graph.nodes["numa1"].cpus == "48-95,144-191"
    assert graph.nodes["numa0"].memory_bytes == 527_000_000 * 1024
    nic = graph.nodes["nic0"].line_rate
    assert nic is not None
    assert nic.bytes_per_s == 50e9


def test_sys_itself_and_the_folder_that_holds_it_are_both_roots(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    assert read_root(tmp_path).pci == read_root(tmp_path / "sys").pci


def test_a_folder_without_sys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match="holds no /sys tree"):
        read_root(tmp_path)


def test_a_virtual_function_is_left_out(tmp_path: Path) -> None:
    fake = switched_machine(tmp_path)
    path = fake.pci("0000:1a:00.1", "0000:18:04.0", "0x020700")
    (path / "physfn").symlink_to("../0000:1a:00.0")
    assert len(graph_of(tmp_path).of_kind("nic")) == 2


def test_an_unknown_speed_and_width_255_are_not_figures(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    fake.pci("0000:01:00.0", "pci0000:00", GPU, now=("Unknown", 0), most=("16.0 GT/s PCIe", 255))
    fact = next(fact for fact in read_root(tmp_path).pci)
    assert fact.state is not None
    assert (fact.state.lane_gt_per_s, fact.state.width, fact.state.max_width) == (None, None, None)


def test_the_firmwares_memory_bandwidth_is_a_typical_rate(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    table = fake.sys / "devices/system/node/node0/access0/initiators"
    table.mkdir(parents=True)
    (table / "read_bandwidth").write_text("250000\n")
    (table / "write_bandwidth").write_text("0\n")
    graph = graph_of(tmp_path)
    link = graph.uplink("dram0")
    assert link is not None
    assert link.forward.typical is not None
    assert link.forward.typical.bytes_per_s == 250e9
    assert link.backward.typical is None


def test_two_chained_switches_are_two_switches(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    chain = ["pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"]
    for below, address in pairwise(chain):
        fake.pci(address, below, BRIDGE)
    fake.pci("0000:05:00.0", chain[-1], GPU)
    graph = graph_of(tmp_path)
    kinds = [node.kind for node in graph.ancestors("gpu0")]
    assert kinds == ["gpu", "switch", "switch", "root_port", "host_bridge", "numa", "socket", "machine"]


def test_live_this_machine_reports_what_its_kernel_reports() -> None:
    """Compares with /sys read here in another way; nothing may be invented."""
    if not Path("/sys/devices/system/node").is_dir():
        pytest.skip("this kernel has no /sys/devices/system/node")
    result = discover(driver=lambda: Facts(format="NVML", source="driver", gpu_absent="not asked"))
    graph = Graph(result.machine)
    nodes = sorted(path.name.removeprefix("node") for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    assert sorted(str(node.numa) for node in graph.of_kind("numa") if not node.inferred) == nodes
    for node in graph.of_kind("numa"):
        if not node.inferred:
            assert node.cpus == (Path(f"/sys/devices/system/node/node{node.numa}/cpulist").read_text().strip() or None)
    addresses = {path.name for path in Path("/sys/bus/pci/devices").glob("*")}
    devices = graph.of_kind("gpu", "nic", "disk")
    assert {node.bus_id for node in devices if node.bus_id} <= addresses
    classes = [Path(f"/sys/bus/pci/devices/{address}/class").read_text()[:6] for address in addresses]
    assert len(graph.of_kind("gpu")) <= sum(kind in {"0x0302", "0x0300", "0x1200"} for kind in classes)
    if not graph.of_kind("gpu"):
        absent = {gap.what: gap.reason for gap in result.absent}
        assert absent["GPUs"] == "no GPU on this host (not asked; no PCI device of a GPU class)"
        assert not any(limit.name in {"pcie", "uplink", "collective"} for limit in result.limits)


def test_root_takes_a_captured_tree(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    result = discover(Sources(root=tmp_path))
    assert [found.format for found in result.inputs] == ["sysfs"]
    assert result.findings == () or all(finding.severity == "info" for finding in result.findings)
