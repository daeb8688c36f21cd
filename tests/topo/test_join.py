"""Several inputs become one machine, joined on the PCI bus id."""

from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import Graph
from kvbench.topo.build import build_machine
from kvbench.topo.facts import bus_id
from kvbench.topo.read import read_inputs, read_text
from tests.topo.fake_sysfs import switched_machine
from tests.topo.shared_texts import DATA


def graph_of(*names: str | Path) -> Graph:
    paths = [name if isinstance(name, Path) else DATA / name for name in names]
    machine, _ = build_machine(read_inputs(paths))
    return Graph(machine)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:18:00.0", "0000:18:00.0"),
        ("18:00.0", "0000:18:00.0"),
        ("0002:01:00.0", "0002:01:00.0"),
        ("10000:E1:00.0", "10000:e1:00.0"),
        ("GPU0", None),
        ("18:00.8", None),
    ],
)
def test_bus_ids_of_every_spelling_are_one(text: str, expected: str | None) -> None:
    assert bus_id(text) == expected


def test_the_query_gives_the_matrix_its_addresses_names_and_link_states() -> None:
    graph = graph_of("dgx-8gpu.txt", "dgx-8gpu.csv")
    gpus = graph.of_kind("gpu")
    assert len(gpus) == 8
    assert {gpu.bus_id for gpu in gpus} >= {"0000:17:00.0", "0000:bc:00.0"}
    link = graph.uplink("gpu5")
    assert link is not None
    assert link.pcie is not None
    assert (link.pcie.lane_gt_per_s, link.pcie.width, link.pcie.max_width) == (32.0, 8, 16)
    assert graph.pair_cell("gpu0", "gpu7") == "NV18"
    assert graph.pair_cell("gpu0", "nic0") == "PIX"


def test_a_matrix_lands_on_the_devices_of_a_captured_sys(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    matrix = (
        "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
        "GPU0\t X \tNV18\tPIX\tSYS\t0-47\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\tPIX\t48-95\t1\t\tN/A\n"
        "NIC0\tPIX\tSYS\t X \tSYS\nNIC1\tSYS\tPIX\tSYS\t X \n\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
    )
    (tmp_path / "m.txt").write_text(matrix)
    graph = graph_of(tmp_path / "sys", tmp_path / "m.txt")
    assert graph.pair_cell("gpu0", "gpu1") == "NV18"
    assert graph.nodes["gpu1"].cpus == "48-95"
    assert graph.path_class("gpu0", "nic0") == "PIX"
    assert len(graph.of_kind("gpu")) == 2
    assert not any(node.inferred and node.kind == "switch" for node in graph.machine.nodes)


def test_two_machines_do_not_join(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    with pytest.raises(KvbenchError, match="the matrix has 8 GPUs and the other inputs have 2"):
        graph_of(tmp_path, "dgx-8gpu.txt")


def test_lspci_t_and_vv_of_one_machine_are_one_tree() -> None:
    graph = graph_of("lspci-t.txt", "lspci-vv.txt")
    assert [gpu.bus_id for gpu in graph.of_kind("gpu")] == ["0000:19:00.0", "0000:1a:00.0"]
    assert [node.kind for node in graph.ancestors("gpu0")][:4] == ["gpu", "switch", "root_port", "host_bridge"]
    assert graph.path_class("gpu0", "disk0") == "PIX"
    assert len(graph.of_kind("nic")) == 2
    assert graph.nodes["sw-0000:17:00.0"].acs_redirect is True


def test_lspci_t_alone_shows_devices_without_naming_them() -> None:
    graph = graph_of("lspci-t.txt")
    assert [node.kind for node in graph.of_kind("device")] == ["device"] * 5
    assert graph.path_class("device0", "device1") == "PIX"
    assert graph.machine.links


def test_nccl_draws_switch_nic_and_fabric() -> None:
    graph = graph_of("nccl.xml")
    assert [gpu.bus_id for gpu in graph.of_kind("gpu")] == [
        "0000:18:00.0",
        "0000:19:00.0",
        "0000:88:00.0",
        "0000:89:00.0",
    ]
    assert {node.id: node.cpus for node in graph.of_kind("numa")} == {"numa0": "0-15", "numa1": "16-31"}
    assert [nic.name for nic in graph.of_kind("nic")] == ["mlx5_0", "mlx5_1"]
    assert graph.path_class("gpu0", "nic0") == "PIX"
    assert graph.path_class("gpu0", "gpu2") == "SYS"
    assert graph.pair_cell("gpu0", "gpu2") == "NV18"  # 9 links to each of two switches
    links = [link for link in graph.machine.links if link.kind == "socket"]
    assert links[0].forward.expected is None
    assert "NCCL plans with 22.00 GB/s" in links[0].forward.absent  # familyid 6, modelid 143: Sapphire Rapids


def test_nccl_tells_the_nvlink_generation_and_two_inputs_do_not_count_links_twice(tmp_path: Path) -> None:
    again = tmp_path / "again.xml"
    again.write_bytes((DATA / "nccl.xml").read_bytes())
    for graph in (graph_of("nccl.xml"), graph_of("nccl.xml", again)):
        (link,) = graph.across("gpu0", "nvlink")
        assert link.count == 18
        assert link.forward.theory is not None
        assert link.forward.theory.bytes_per_s == 18 * 25e9  # sm 90: NVLink 4


def test_nccl_reads_c2c_and_a_width_of_zero() -> None:
    text = (
        '<system version="1"><cpu numaid="0" affinity="ff" arch="arm64" vendor="ARM">'
        '<pci busid="0009:01:00.0" class="0x030200" link_speed="32.0 GT/s PCIe" link_width="0">'
        '<gpu dev="0" sm="100" rank="0" gdr="1"><nvlink target="fffffff:ff:ff.0" count="18" tclass="0x068000"/>'
        '<c2c bw="44712" count="5"/></gpu></pci></cpu></system>'
    )
    graph = Graph(build_machine([read_text(text, "n.xml")])[0])
    link = next(link for link in graph.machine.links if link.kind == "c2c")
    assert link.forward.theory is not None
    assert link.forward.theory.bytes_per_s == 5 * 44712e6
    assert [hop.link for hop in graph.path("dram0", "gpu0")] == ["dram0-numa0", link.id]
    pcie = graph.uplink("gpu0")
    assert pcie is not None
    assert pcie.forward.theory is None


def test_hwloc_2_has_its_nvlink_its_disk_and_its_memory() -> None:
    graph = graph_of("hwloc.xml")
    assert graph.pair_cell("gpu0", "gpu1") == "NV4"  # 100 GB/s of NVLink 3 at 25 GB/s each
    assert [disk.name for disk in graph.of_kind("disk")] == ["nvme0n1"]
    assert graph.nodes["disk0"].memory_bytes == 1953514584 * 1024
    assert graph.nodes["numa1"].memory_bytes == 540000000000
    assert {gpu.name for gpu in graph.of_kind("gpu")} == {"GPU0 NVIDIA A100-SXM4-80GB", "GPU1 NVIDIA A100-SXM4-80GB"}


def test_rocm_gpus_are_joined_by_xgmi() -> None:
    machine, _ = build_machine(read_inputs([DATA / "rocm.txt"]))
    graph = Graph(machine)
    assert graph.pair_cell("gpu0", "gpu3") == "XGMI"
    assert len([link for link in machine.links if link.kind == "xgmi"]) == 6
    assert [graph.numa_of(f"gpu{at}") == graph.nodes[f"numa{at // 2}"] for at in range(4)] == [True] * 4


def test_a_folder_of_captures_is_read_as_one_machine(tmp_path: Path) -> None:
    for name in ("dgx-8gpu.txt", "dgx-8gpu.csv"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    assert len(read_inputs([tmp_path])) == 2
    (tmp_path / "x").mkdir()
    with pytest.raises(KvbenchError, match="holds no captured file and no sys tree"):
        read_inputs([tmp_path / "x"])


def test_the_graph_of_any_sample_is_a_tree_with_links_that_end_at_nodes() -> None:
    for path in sorted(DATA.iterdir()):
        if path.suffix in {".txt", ".xml", ".csv"} and path.name != "gdsio.txt":
            machine, _ = build_machine(read_inputs([path]))
            ids = [node.id for node in machine.nodes]
            assert len(ids) == len(set(ids))
            assert len({link.id for link in machine.links}) == len(machine.links)
            for link in machine.links:
                assert {link.a, link.b} <= set(ids), (path.name, link.id)
            graph = Graph(machine)
            for node in machine.nodes:
                assert graph.ancestors(node.id)[-1].kind in {"machine", "network"}


def test_a_graphics_unit_of_another_vendor_does_not_count_as_a_gpu_of_the_matrix(tmp_path: Path) -> None:
    fake = switched_machine(tmp_path)
    fake.pci("0000:c6:00.0", "pci0000:c6", "0x030000", vendor="0x1002", now=None, most=None)
    matrix = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-47\t0\nGPU1\tNV4\t X \t48-95\t1\n"
    (tmp_path / "m.txt").write_text(matrix)
    graph = graph_of(tmp_path / "sys", tmp_path / "m.txt")
    assert len(graph.of_kind("gpu")) == 3
    assert graph.pair_cell("gpu0", "gpu1") == "NV4"


def test_hwloc_gpus_without_an_address_and_gpu_memory_nodes() -> None:
    text = (
        '<topology version="3.0"><object type="Machine" nodeset="0x00000003">'
        '<object type="Package" os_index="0" cpuset="0x0f" nodeset="0x00000003">'
        '<object type="NUMANode" os_index="0" cpuset="0x0f" nodeset="0x1" local_memory="500000000000"/>'
        '<object type="NUMANode" subtype="GPUMemory" os_index="1" cpuset="0x0" nodeset="0x2" local_memory="96000000"/>'
        '<object type="OSDev" gp_index="7" name="cuda0" subtype="CUDA" osdev_type="12">'
        '<info name="GPUModel" value="NVIDIA GH200 480GB"/></object>'
        '<object type="OSDev" gp_index="8" name="nvml0" subtype="NVML" osdev_type="12"/>'
        "</object></object></topology>"
    )
    graph = Graph(build_machine([read_text(text, "h.xml")])[0])
    (gpu,) = graph.of_kind("gpu")
    assert gpu.name == "GPU0 NVIDIA GH200 480GB"
    assert [dram.id for dram in graph.of_kind("dram")] == ["dram0"]
    assert graph.nodes["numa1"].name == "NUMA node 1 (GPU memory)"
    assert graph.numa_of("gpu0") == graph.nodes["numa0"]
    assert [hop.link for hop in graph.path("dram0", "gpu0")] == ["dram0-numa0", "gpu0=c2c=numa0"]
