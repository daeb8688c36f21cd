"""Each rule on a machine that shows it, and none of them on a healthy one."""

import re
from pathlib import Path

import pytest

from kvbench.core.findings import RULES, Finding
from kvbench.results.topology import TopologyResult
from kvbench.topo.discover import Sources, discover
from tests.topo.fake_sysfs import BRIDGE, GPU, NIC, NVME, FakeSys, switched_machine
from tests.topo.shared_texts import DATA

ROOT = Path(__file__).parents[2]


def found(result: TopologyResult, rule: str) -> Finding:
    matching = [finding for finding in result.findings if finding.rule == rule]
    assert matching, f"no {rule} among {[finding.rule for finding in result.findings]}"
    return matching[0]


def rules(result: TopologyResult) -> set[str]:
    return {finding.rule for finding in result.findings}


def look(root: Path, *files: str, gpu: str | None = None) -> TopologyResult:
    return discover(Sources(root=root, files=tuple(DATA / name for name in files)), gpu=gpu)


def texts(*names: str, gpu: str | None = None) -> TopologyResult:
    return discover(Sources(files=tuple(DATA / name for name in names)), gpu=gpu)


def written(tmp_path: Path, text: str, *, gpu: str | None = None) -> TopologyResult:
    path = tmp_path / "capture.txt"
    path.write_text(text)
    return discover(Sources(files=(path,)), gpu=gpu)


def test_a_healthy_switched_machine_has_only_the_remark_on_gpudirect_storage(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    assert rules(look(tmp_path)) == {"gds-behind-switch"}


def test_a_downgraded_link_a_far_nic_and_acs_are_found_together(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-31", distance="10 21")
    fake.numa(1, "32-63", distance="21 10")
    fake.pci("0000:16:01.0", "pci0000:16", BRIDGE)
    fake.pci("0000:17:00.0", "0000:16:01.0", BRIDGE)
    for at in range(2):
        fake.pci(f"0000:18:{4 * at:02x}.0", "0000:17:00.0", BRIDGE, acs=True)
        fake.pci(f"0000:{0x19 + at:02x}:00.0", f"0000:18:{4 * at:02x}.0", GPU, now=("32.0 GT/s PCIe", 8 if at else 16))
    fake.pci("0000:96:01.0", "pci0000:96", BRIDGE, numa=1)
    fake.pci("0000:97:00.0", "0000:96:01.0", NIC, numa=1)
    fake.infiniband("mlx5_0", "0000:97:00.0", "400 Gb/sec (4X NDR)")
    result = look(tmp_path)
    assert {"link-width-downgraded", "gpu-far-from-nic", "acs-redirect"} <= rules(result)
    width = found(result, "link-width-downgraded")
    assert width.severity == "problem"
    assert width.evidence == "GPU1 to switch 17:00.0 uses x8, both ends have x16"
    assert found(result, "gpu-far-from-nic").subjects == ("gpu0", "gpu1")
    assert found(result, "acs-redirect").subjects == ("sw-0000:17:00.0",)


@pytest.mark.parametrize(
    ("kind", "rule", "severity"),
    [(GPU, "link-generation-idle", "info"), (NIC, "link-generation-downgraded", "problem")],
)
def test_a_lower_generation_is_a_fault_unless_a_gpu_may_idle(
    tmp_path: Path, kind: str, rule: str, severity: str
) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    fake.pci("0000:00:01.0", "pci0000:00", BRIDGE)
    fake.pci("0000:01:00.0", "0000:00:01.0", kind, now=("2.5 GT/s PCIe", 16))
    finding = found(look(tmp_path), rule)
    assert finding.severity == severity
    assert "runs at Gen1, both ends can do Gen5" in finding.evidence


def test_a_busy_gpu_on_a_slow_link_is_a_problem(tmp_path: Path) -> None:
    result = written(
        tmp_path,
        "index, pci.bus_id, name, pcie.link.gen.current, pcie.link.gen.max, pcie.link.width.current, "
        "pcie.link.width.max, utilization.gpu [%]\n0, 00000000:18:00.0, NVIDIA L40S, 3, 4, 16, 16, 97 %\n",
    )
    assert found(result, "link-slow-while-busy").severity == "problem"


def test_a_slot_that_is_narrower_than_its_card(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    fake.pci("0000:00:01.0", "pci0000:00", BRIDGE, most=("16.0 GT/s PCIe", 8))
    fake.pci("0000:01:00.0", "0000:00:01.0", GPU, now=("16.0 GT/s PCIe", 8))
    assert found(look(tmp_path), "slot-below-device").evidence.endswith("can do x16 Gen5, its slot x8 Gen4")


def test_far_nvme_disks(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3", distance="10 21")
    fake.numa(1, "4-7", distance="21 10")
    fake.pci("0000:01:00.0", "pci0000:01", GPU)
    fake.pci("0000:81:00.0", "pci0000:81", NVME, numa=1, now=("16.0 GT/s PCIe", 4), most=("16.0 GT/s PCIe", 4))
    fake.disk("nvme0n1", "0000:81:00.0")
    result = look(tmp_path)
    assert found(result, "gpu-far-from-nvme").subjects == ("gpu0",)
    assert found(result, "gds-through-root-complex").subjects == ("gpu0",)


@pytest.mark.parametrize(("nodes", "severity"), [(1, "info"), (2, "warning")])
def test_an_unknown_numa_node_matters_where_there_are_several(tmp_path: Path, nodes: int, severity: str) -> None:
    fake = FakeSys(tmp_path)
    for node in range(nodes):
        fake.numa(node, f"{4 * node}-{4 * node + 3}", distance="10 21")
    fake.pci("0000:01:00.0", "pci0000:01", GPU, numa=-1)
    finding = found(look(tmp_path), "numa-unknown")
    assert finding.severity == severity
    assert finding.subjects == ("gpu0",)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [("DMA-FQ", "iommu-translation"), ("DMA", "iommu-translation"), ("", "iommu-groups"), ("identity", None)],
)
def test_iommu_groups_by_their_type(tmp_path: Path, kind: str, rule: str | None) -> None:
    fake = switched_machine(tmp_path)
    fake.iommu(kind, "0000:19:00.0", "0000:99:00.0")
    assert {name for name in rules(look(tmp_path)) if name.startswith("iommu")} == ({rule} if rule else set())


def test_refused_peer_access_under_an_nvlink_is_a_problem_and_elsewhere_a_warning(tmp_path: Path) -> None:
    assert found(texts("peers-refused.txt"), "p2p-refused").severity == "warning"
    matrix = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV4\t0-7\t0\nGPU1\tNV4\t X \t0-7\t0\n"
    (tmp_path / "m.txt").write_text(matrix)
    result = discover(Sources(files=(tmp_path / "m.txt", DATA / "peers-refused.txt")))
    finding = found(result, "p2p-not-ok-under-nvlink")
    assert finding.severity == "problem"
    assert "GNS (GPU not supported) for 1 pair (GPU0-GPU1)" in finding.evidence


def test_a_gpu_off_the_fabric_and_a_blank_cpu_column() -> None:
    result = texts("off-fabric.txt")
    assert found(result, "gpu-off-fabric").subjects == ("gpu2",)
    assert found(result, "gpu-off-fabric").severity == "problem"
    assert found(result, "cpu-affinity-missing").subjects == ("gpu3",)
    # GPU3 is SYS from GPU2, and so is its NUMA node: no contradiction there, but GPU0 to GPU2 is NODE on one node.
    assert "matrix-contradicts-numa" not in rules(result)


def test_missing_and_absent_nvlinks(tmp_path: Path) -> None:
    def matrix(cell: str) -> str:
        head = "\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\n"
        rows = [[" X " if a == b else cell for b in range(3)] for a in range(3)]
        return head + "".join(f"GPU{a}\t" + "\t".join(row) + "\t0-7\t0\n" for a, row in enumerate(rows))

    missing = found(written(tmp_path, matrix("NV17"), gpu="h100"), "nvlink-links-missing")
    assert missing.evidence == "GPU0 has 17 NVLinks up, its product has 18"
    assert "nvlink-links-missing" not in rules(written(tmp_path, matrix("NV18"), gpu="h100"))
    assert found(written(tmp_path, matrix("NODE"), gpu="a100"), "nvlink-absent").severity == "warning"


def test_a_port_below_its_rate_below_its_peers_and_behind_a_slow_link(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    for at, (rate, speed) in enumerate((("400", "32.0"), ("400", "32.0"), ("200", "32.0"), ("400", "16.0"))):
        address = f"0000:{at + 1:02x}:00.0"
        fake.pci(address, f"pci0000:{at + 1:02x}", NIC, now=(f"{speed} GT/s PCIe", 16), most=(f"{speed} GT/s PCIe", 16))
        fake.infiniband(f"mlx5_{at}", address, f"{rate} Gb/sec (4X)", state="1: DOWN" if at == 1 else "4: ACTIVE")
    result = look(tmp_path)
    assert found(result, "nic-below-its-peers").subjects == ("nic2",)
    slow = found(result, "nic-pcie-below-port-rate")
    assert slow.evidence == "mlx5_3 has a 400 Gbit/s port (50.00 GB/s) behind a PCIe link of 31.51 GB/s"
    assert found(result, "nic-down").subjects == ("nic1",)


def test_a_port_that_ethtool_says_could_be_faster(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    path = fake.pci("0000:01:00.0", "pci0000:01", "0x020000")
    (path / "net/eth2").mkdir(parents=True)
    (path / "net/eth2/device").symlink_to("../..")
    fake._class("net", "eth2", path / "net/eth2")
    finding = found(look(tmp_path, "ethtool.txt"), "nic-below-port-rate")
    assert finding.evidence == "eth2 runs at 25 Gbit/s, its port can do 100 Gbit/s"
    assert finding.severity == "problem"


def test_several_numa_nodes_per_socket(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    for node in range(4):
        fake.numa(node, f"{4 * node}-{4 * node + 3}", package=0, distance="10 12 12 12")
        fake.pci(f"0000:{0x10 * (node + 1):02x}:00.0", f"pci0000:{0x10 * (node + 1):02x}", GPU, numa=node)
    finding = found(look(tmp_path), "nps-spread")
    assert finding.evidence.startswith("4 NUMA nodes on 1 socket; the GPUs are spread over 4 NUMA nodes")


def test_gpudirect_storage_below_and_across_the_root_complex(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    assert found(look(tmp_path), "gds-behind-switch").subjects == ("gpu0", "gpu1")
    assert found(texts("hwloc.xml"), "gds-through-root-complex").subjects == ("gpu0", "gpu1")


def test_uplinks_and_sockets_with_different_numbers_of_gpus() -> None:
    finding = found(texts("pcie-4gpu-2nic.txt"), "unbalanced-uplinks")
    assert "carries 2 GPUs, other uplinks 1" in finding.evidence


def test_sockets_with_different_numbers_of_gpus(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3", distance="10 21")
    fake.numa(1, "4-7", distance="21 10")
    for at, numa in enumerate((0, 0, 1)):
        fake.pci(f"0000:{at + 1:02x}:00.0", f"pci0000:{at + 1:02x}", GPU, numa=numa)
    assert found(look(tmp_path), "unbalanced-sockets").evidence.endswith("(NUMA node 0: 2, NUMA node 1: 1)")


def test_a_matrix_that_contradicts_its_numa_column(tmp_path: Path) -> None:
    result = written(
        tmp_path, "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-7\t0\nGPU1\tSYS\t X \t0-7\t0\n"
    )
    assert found(result, "matrix-contradicts-numa").subjects == ("gpu0", "gpu1")


def test_everything_phb_is_a_virtual_machine(tmp_path: Path) -> None:
    head = "\tGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\n"
    rows = [[" X " if a == b else "NV18" if a + b == 1 else "PHB" for b in range(4)] for a in range(4)]
    labels = ("GPU0", "GPU1", "NIC0", "NIC1")
    body = "".join(f"{label}\t" + "\t".join(row) + "\t0-7\t0\n" for label, row in zip(labels, rows, strict=True))
    assert found(written(tmp_path, head + body), "paths-hidden").severity == "info"


def test_measurements_below_what_is_usual_and_uneven_ones() -> None:
    files = (DATA / "dgx-8gpu.txt", DATA / "dgx-8gpu.csv")
    result = discover(Sources(files=files, imports=(DATA / "nvbandwidth.json",)))
    uneven = [finding for finding in result.findings if finding.rule == "measured-asymmetric"]
    assert [finding.subjects for finding in uneven] == [("gpu5-sw2.0.1",), ("gpu7-sw3.0.1",)]
    slow = discover(Sources(files=(DATA / "dgx-8gpu.txt",), imports=(DATA / "nvbandwidth.json",)), gpu="h100")
    assert found(slow, "measured-below-typical").subjects == ("gpu5-sw2.0.1",)


def test_the_worst_come_first() -> None:
    order = ["problem", "warning", "info"]
    severities = [order.index(finding.severity) for finding in texts("off-fabric.txt").findings]
    assert severities == sorted(severities)


def test_every_rule_id_is_documented_and_every_documented_one_exists() -> None:
    source = (ROOT / "kvbench/core/findings.py").read_text()
    ids = set(re.findall(r'"([a-z0-9]+(?:-[a-z0-9]+)+)"', source))
    documented = set(re.findall(r"^\| `([a-z0-9-]+)` \|", (ROOT / "docs/topo.md").read_text(), flags=re.MULTILINE))
    assert ids == documented
    assert len(RULES) >= 13
