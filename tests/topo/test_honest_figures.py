"""No figure claims more than its inputs tell: shares of a socket, bounds, assumed links, nominal rates."""

from pathlib import Path

import pytest

from kvbench.core.errors import UsageError
from kvbench.core.graph import Graph, Link
from kvbench.results.host_paths import Limit
from kvbench.results.topology import TopologyResult
from kvbench.topo.anchors import parse_dram
from kvbench.topo.discover import Sources, discover
from tests.topo.fake_sysfs import BRIDGE, GPU, NVIDIA, FakeSys
from tests.topo.shared_texts import DATA, shared
from tests.topo.test_ceilings_by_hand import approx, ceiling


def matrix_of(numa: list[int], cell: str = "SYS") -> str:
    gpus = range(len(numa))
    head = "".join(f"\tGPU{at}" for at in gpus) + "\tCPU Affinity\tNUMA Affinity\n"
    return head + "".join(
        f"GPU{a}\t" + "\t".join(" X " if a == b else cell for b in gpus) + f"\t{8 * numa[a]}-{8 * numa[a] + 7}\t"
        f"{numa[a]}\n"
        for a in gpus
    )


def read(tmp_path: Path, text: str, *, gpu: str | None = None, dram: str | None = None) -> TopologyResult:
    path = tmp_path / "capture.txt"
    path.write_text(text)
    return discover(Sources(files=(path,)), gpu=gpu, dram=dram)


def limits(result: TopologyResult) -> dict[str, Limit]:
    return {limit.name: limit for limit in result.limits}


def link_of(result: TopologyResult, node: str) -> Link:
    link = Graph(result.machine).uplink(node)
    assert link is not None
    return link


def test_dram_of_a_socket_is_refused_where_nodes_may_be_parts_of_one(tmp_path: Path) -> None:
    for numa in ([0, 1, 2, 3], [3, 7]):
        with pytest.raises(UsageError, match=r"--dram 8xDDR5-4800: .* names no socket; .* --dram 8xDDR5-4800/4"):
            read(tmp_path, matrix_of(numa), dram="8xDDR5-4800")
    assert len(read(tmp_path, matrix_of([0, 1]), dram="8xDDR5-4800").ceilings)


def test_dram_of_a_socket_is_split_over_the_nodes_that_a_person_names(tmp_path: Path) -> None:
    result = read(tmp_path, matrix_of([0, 1, 2, 3]), dram="8xDDR4-3200/4")
    rate = link_of(result, "dram2").forward.theory
    assert rate is not None
    assert rate.bytes_per_s == 8 * 3200e6 * 8 / 4
    assert limits(result)["home_socket"].value == approx(51.2e9)
    assert parse_dram("8xDDR4-3200/4").nodes == 4
    with pytest.raises(UsageError):
        parse_dram("8xDDR4-3200/0")


def test_the_nodes_of_a_socket_that_an_input_names_count(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    for node in range(4):
        fake.numa(node, f"{4 * node}-{4 * node + 3}", package=node // 2, distance="10 12 21 21")
    rate = link_of(discover(Sources(root=tmp_path), dram="8xDDR5-4800"), "dram3").forward.theory
    assert rate is not None
    assert rate.bytes_per_s == approx(307.2e9 / 2)
    with pytest.raises(UsageError, match=r"has 2 NUMA nodes with DRAM on socket0, not 4; leave out /4"):
        discover(Sources(root=tmp_path), dram="8xDDR5-4800/4")


def test_real_machines_with_four_nodes_per_socket_do_not_get_a_whole_socket_each() -> None:
    for name in ("rtx4090-8gpu-8numa-all-sys.txt", "a100-8gpu-nv12-10nic-8numa-tabs.txt"):
        with pytest.raises(UsageError, match="at least 8 NUMA nodes"):
            discover(Sources(files=(shared(name),)), dram="12xDDR5-4800")


def test_numa_homes_are_not_called_measured_sockets(tmp_path: Path) -> None:
    two = limits(read(tmp_path, matrix_of([0, 1]), dram="8xDDR5-4800"))
    assert two["sockets"].value == 2
    for name in ("sockets", "home_socket"):
        assert two[name].origin.provenance == "modelled"
        assert "no input names sockets" in two[name].origin.source
    many = limits(read(tmp_path, matrix_of([0, 1, 2, 3]), dram="8xDDR5-4800/2"))
    assert "sockets" not in many
    assert many["home_socket"].origin.provenance == "modelled"
    assert "sockets" not in limits(read(tmp_path, matrix_of([1])))
    assert limits(discover(Sources(files=(DATA / "hwloc.xml",))))["sockets"].origin.provenance == "measured"


def test_a_downgraded_link_counts_with_its_rate_now(tmp_path: Path) -> None:
    text = (
        "31:00.0\n\tLnkCap: Port #0, Speed 16GT/s, Width x16\n"
        "\tLnkSta: Speed 8GT/s (downgraded), Width x8 (downgraded)\n"
    )
    rate = link_of(read(tmp_path, text), "device0").forward.theory
    assert rate is not None
    assert rate.bytes_per_s == approx(15.7538e9 / 2)  # Gen3 x8, not Gen4 x8


def test_a_display_controller_of_a_gpu_vendor_is_a_gpu(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    for at, vendor in enumerate(("0x1002", NVIDIA, "0x1a03")):  # the last is a server's management controller
        fake.pci(f"0000:0{at}:01.0", f"pci0000:0{at}", BRIDGE)
        fake.pci(f"0000:1{at}:00.0", f"0000:0{at}:01.0", "0x038000", vendor=vendor)
    assert len(Graph(discover(Sources(root=tmp_path)).machine).of_kind("gpu")) == 2
    text = "0000:c1:00.0 Display controller: Advanced Micro Devices, Inc. [AMD/ATI] Aldebaran [Instinct MI250X]\n"
    (gpu,) = Graph(read(tmp_path, text).machine).of_kind("gpu")
    assert gpu.gpu is not None
    assert gpu.gpu.hbm is not None


def test_loading_and_storing_without_a_figure_for_both_is_a_bound_or_not_known() -> None:
    h100 = discover(Sources(files=(DATA / "dgx-8gpu.txt",)), gpu="h100", dram="12xDDR5-5600")
    both = ceiling(h100, "both-ways", "expected")
    assert both.is_bound
    assert both.at_most
    grace = discover(Sources(files=(DATA / "grace-4gpu.txt",)), gpu="gb200")
    both = ceiling(grace, "both-ways", "expected")
    assert both.total_bytes_per_s is None  # 346 typical one way, 450 on the wire the other: no sum of these
    assert both.reason.startswith("no figure for both directions at once on GPU0")
    gb300 = ceiling(discover(Sources(files=(DATA / "grace-4gpu.txt",)), gpu="gb300"), "both-ways", "expected")
    assert gb300.shares[0].bytes_per_s == approx(175e9 + 172e9)
    assert not gb300.at_most


def test_a_limit_of_which_only_the_wire_rate_is_known_is_a_bound() -> None:
    dram = ceiling(
        discover(Sources(files=(DATA / "dgx-8gpu.txt",)), gpu="h100", dram="2xDDR5-4800"), "all-near", "expected"
    )
    assert dram.unknown == ()
    assert set(dram.at_most) == {"dram0-numa0", "dram1-numa1"}
    links = ceiling(
        discover(Sources(files=(DATA / "dgx-8gpu.txt",)), gpu="h100", dram="8xDDR5-4800"), "all-near", "expected"
    )
    assert not links.is_bound


def test_hwloc_rates_are_nominal_and_have_the_typical_rate_of_their_shape() -> None:
    result = discover(Sources(files=(shared("hwloc-nvidiaDGX2.xml"),)))
    link = link_of(result, "gpu0")
    assert link.backward.theory is not None
    assert link.backward.theory.origin.provenance == "spec"
    assert link.backward.typical is not None
    assert link.backward.typical.bytes_per_s == 12.15e9  # Gen3 x16
    assert limits(result)["pcie"].origin.provenance == "spec"


def test_what_is_only_assumed_stays_modelled_up_to_the_limits() -> None:
    assumed = limits(discover(Sources(files=(DATA / "dgx-8gpu.txt",)), gpu="h100", dram="8xDDR5-4800"))
    for name in ("pcie", "uplink", "ranks_per_uplink", "host_total", "collective"):
        assert assumed[name].origin.provenance == "modelled", name
    read_links = limits(discover(Sources(files=(DATA / "nccl.xml",))))
    assert read_links["ranks_per_uplink"].origin.provenance == "measured"
    assert read_links["collective"].origin.provenance == "spec"


def test_a_wire_rate_of_a_link_that_was_read_is_not_called_measured(tmp_path: Path) -> None:
    fake = FakeSys(tmp_path)
    fake.numa(0, "0-3")
    fake.pci("0000:00:01.0", "pci0000:00", BRIDGE, most=("64.0 GT/s PCIe", 16))
    fake.pci("0000:01:00.0", "0000:00:01.0", GPU, now=("64.0 GT/s PCIe", 16), most=("64.0 GT/s PCIe", 16))
    result = discover(Sources(root=tmp_path))
    assert link_of(result, "gpu0").backward.typical is None  # no measurement of Gen6 was found
    assert limits(result)["pcie"].origin.provenance == "spec"
    assert "an upper bound" in limits(result)["pcie"].origin.source


def test_the_nccl_planning_constant_for_sockets_is_no_ceiling_and_no_limit() -> None:
    result = discover(Sources(files=(DATA / "nccl.xml",)), dram="8xDDR5-4800")
    assert "inter_socket" not in limits(result)
    assert not any("=numa" in limit for found in result.ceilings for limit in found.limits)
