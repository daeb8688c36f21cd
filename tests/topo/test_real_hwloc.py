"""The five collected hwloc files: their graphs against values read by hand, and against the XML's own tree."""

from collections.abc import Iterator
from itertools import combinations
from xml.etree import ElementTree

import pytest

from kvbench.core.graph import Graph, Node
from kvbench.topo.build import build_machine
from kvbench.topo.facts import bus_id
from kvbench.topo.read import read_text
from tests.topo.shared_texts import shared

DGX2 = "hwloc-nvidiaDGX2.xml"
POWER8 = "hwloc-power8gpudistances.xml"
CUDA = "hwloc-32em64t-2n8c2t-pci-wholeio-cuda.xml"
NVME = "hwloc-32em64t-2n8c+dax+nvme+mic+dimms.xml"
LOCALITY = "hwloc-40intel64-2g2n4c+pcilocality.xml"
FILES = (DGX2, POWER8, CUDA, NVME, LOCALITY)


def graph_of(name: str) -> Graph:
    machine, _ = build_machine([read_text(shared(name).read_text(), name)])
    return Graph(machine)


def numa_in_xml(name: str) -> dict[str, set[int]]:
    """The NUMA nodes that the XML puts each PCI address near: the nodeset of the closest object above that has one."""
    found: dict[str, set[int]] = {}

    def visit(element: ElementTree.Element, nodeset: set[int]) -> None:
        mask = element.get("nodeset")
        if mask:
            nodeset = {bit for bit in range(64) if int(mask.split(",")[-1], 16) >> bit & 1}
        address = bus_id(element.get("pci_busid") or "")
        if element.get("pci_busid") and address is not None:
            while address in found:
                address += "#"  # one file has an address twice
            found[address] = nodeset
        for child in element:
            visit(child, nodeset)

    visit(ElementTree.parse(shared(name)).getroot(), set())
    return found


def near(graph: Graph, node: Node) -> set[int]:
    """The NUMA nodes that the graph puts a device near."""
    for above in graph.ancestors(node.id):
        if above.kind == "numa" and above.numa is not None:
            return {above.numa}
        if above.kind in {"group", "machine"}:
            return {below.numa for _, below in graph.walk(above.id) if below.kind == "numa" and below.numa is not None}
    return set()


def devices(graph: Graph) -> Iterator[Node]:
    for node in graph.of_kind("gpu", "nic", "disk", "nvswitch"):
        if node.bus_id is not None:
            yield node


@pytest.mark.parametrize("name", FILES)
def test_every_device_is_near_the_numa_nodes_that_the_xml_says(name: str) -> None:
    graph, expected = graph_of(name), numa_in_xml(name)
    checked = 0
    for node in devices(graph):
        assert node.bus_id is not None
        assert near(graph, node) == expected[node.bus_id], node.name
        checked += 1
    assert checked == {DGX2: 28, POWER8: 4, CUDA: 8, NVME: 5, LOCALITY: 6}[name]


@pytest.mark.parametrize("name", FILES)
def test_two_devices_are_sys_apart_exactly_where_the_xml_puts_them_on_different_nodes(name: str) -> None:
    graph, numa = graph_of(name), numa_in_xml(name)
    for a, b in combinations(devices(graph), 2):
        assert a.bus_id is not None
        assert b.bus_id is not None
        same = bool(numa[a.bus_id] & numa[b.bus_id])
        assert (graph.path_class(a.id, b.id) != "SYS") == same, (a.name, b.name)


def test_the_dgx2_has_sixteen_v100_in_pairs_below_two_levels_of_switches() -> None:
    graph = graph_of(DGX2)
    assert len(graph.of_kind("gpu")) == 16
    assert all("V100" in gpu.name for gpu in graph.of_kind("gpu"))
    assert len(graph.of_kind("nvswitch")) == 12
    assert graph.path_class("gpu0", "gpu1") == "PIX"  # 34:00.0 and 36:00.0 below switch 32:00.0
    assert graph.path_class("gpu0", "gpu2") == "PXB"  # 39:00.0 below switch 37:00.0, both below 2c:00.0
    assert graph.path_class("gpu0", "gpu4") == "NODE"  # 57:00.0 below the other host bridge of the socket
    assert graph.path_class("gpu0", "gpu8") == "SYS"  # b7:00.0 on the other socket
    assert graph.nodes["gpu0"].bus_id == "0000:34:00.0"
    assert graph.nodes["gpu8"].bus_id == "0000:b7:00.0"


def test_each_dgx2_gpu_has_six_nvlinks_of_25_gb_per_s_into_switches() -> None:
    graph = graph_of(DGX2)
    for gpu in graph.of_kind("gpu"):
        links = graph.across(gpu.id, "nvlink")
        assert len(links) == 6
        assert all(link.count == 1 and link.forward.theory is not None for link in links)
        assert {link.forward.theory.bytes_per_s for link in links if link.forward.theory} == {25e9}
        assert all(graph.nodes[link.b].kind == "nvswitch" for link in links)
    assert graph.pair_cell("gpu0", "gpu8") == "NV6"


def test_the_power8_gpus_reach_their_socket_over_two_nvlinks() -> None:
    graph = graph_of(POWER8)
    assert [gpu.bus_id for gpu in graph.of_kind("gpu")] == [
        "0002:01:00.0",
        "0003:01:00.0",
        "000a:01:00.0",
        "000b:01:00.0",
    ]
    to_cpu = {link.a: link.b for link in graph.machine.links if link.kind == "nvlink" and link.b.startswith("socket")}
    assert to_cpu == {"gpu0": "socket0", "gpu1": "socket0", "gpu2": "socket1", "gpu3": "socket1"}
    assert graph.pair_cell("gpu0", "gpu1") == "NV2"  # 40 GB/s of NVLink 1 at 20 GB/s each
    assert graph.pair_cell("gpu0", "gpu2") == "SYS"
    assert [hop.link for hop in graph.path("dram0", "gpu0")][-1] == "gpu0=socket0"


def test_the_cuda_file_has_its_cards_its_nic_and_its_duplicated_address() -> None:
    name = CUDA
    facts = read_text(shared(name).read_text(), name)
    assert facts.notes == ("PCI address 0000:04:00.0 occurs twice; the second is 0000:04:00.0#",)
    graph = graph_of(name)
    assert {gpu.bus_id for gpu in graph.of_kind("gpu")} == {
        "0000:03:00.0",
        "0000:83:00.0",
        "0000:84:00.0",
        "0000:84:00.1",
    }
    assert {nic.name for nic in graph.of_kind("nic")} == {"eth0", "eth1", "mlx5_0"}
    assert [disk.name for disk in graph.of_kind("disk")] == ["sda"]


def test_the_nvme_file_has_its_disks_and_persistent_memory() -> None:
    graph = graph_of(NVME)
    names = {disk.name: disk for disk in graph.of_kind("disk")}
    assert {"nvme0n1", "sda", "pmem0.1", "dax1.3"} <= set(names)
    assert near(graph, names["dax1.3"]) == {1}
    assert {node.memory_bytes for node in graph.of_kind("numa")} == {17149054976, 17179869184}


def test_devices_close_to_two_of_four_nodes_stand_in_their_group() -> None:
    graph = graph_of(LOCALITY)
    assert len(graph.of_kind("numa")) == 4
    eth0 = next(nic for nic in graph.of_kind("nic") if nic.name == "eth0")
    qib0 = next(nic for nic in graph.of_kind("nic") if "qib0" in nic.name)
    assert near(graph, eth0) == {0, 2}
    assert near(graph, qib0) == {1, 3}
