"""Ceilings of DGX-style machines, each figure worked out by hand from link rates in the comments."""

import pytest

from kvbench.core.load_ceilings import Basis, Ceiling
from kvbench.results.topology import TopologyResult
from kvbench.topo.discover import Sources, discover
from tests.topo.shared_texts import DATA, shared

GEN3_X16, GEN4_X16, GEN5_X16 = 15.7538e9, 31.5077e9, 63.0154e9  # lanes · GT/s · 128/130 / 8


def ceiling(result: TopologyResult, scenario: str, basis: Basis = "theory") -> Ceiling:
    return next(c for c in result.ceilings if c.scenario == scenario and c.basis == basis)


def each(found: Ceiling) -> list[float]:
    assert all(share.bytes_per_s is not None for share in found.shares)
    return [share.bytes_per_s or 0.0 for share in found.shares]


def approx(value: float) -> object:
    return pytest.approx(value, rel=1e-4)


def dgx(dram: str | None = None, gpu: str = "h100") -> TopologyResult:
    """8 GPUs and 8 NICs, two of each per switch tree, four trees, two NUMA nodes."""
    return discover(Sources(files=(DATA / "dgx-8gpu.txt",)), gpu=gpu, dram=dram)


def test_one_gpu_alone_gets_its_gen5_x16_link() -> None:
    found = ceiling(dgx(), "one:gpu0")
    assert found.total_bytes_per_s == approx(GEN5_X16)
    assert found.limits == ("gpu0-sw0.0.0",)


def test_eight_gpus_from_both_sockets_share_four_uplinks() -> None:
    """2 GPUs per x16 uplink: 63.02 / 2 = 31.51 each, 4 uplinks · 63.02 = 252.06 together."""
    found = ceiling(dgx(), "all-near")
    assert each(found) == [approx(GEN5_X16 / 2)] * 8
    assert found.total_bytes_per_s == approx(4 * GEN5_X16)
    assert set(found.limits) == {f"sw{at}.0-bridge{at}" for at in range(4)}


def test_eight_gpus_from_one_sockets_dram_are_stopped_by_it() -> None:
    """4 channels of DDR5-4800 carry 4 · 4.8e9 · 8 = 153.6 GB/s; 8 GPUs get 19.2 each, below their 31.51."""
    found = ceiling(dgx("4xDDR5-4800"), "from:dram0")
    assert each(found) == [approx(19.2e9)] * 8
    assert found.total_bytes_per_s == approx(153.6e9)
    assert found.limits == ("dram0-numa0",)


def test_eight_gpus_from_both_sockets_with_that_dram() -> None:
    """Each socket's 4 GPUs could take 126.03 through two uplinks, its DRAM has 153.6: the uplinks stay the limit."""
    found = ceiling(dgx("4xDDR5-4800"), "all-near")
    assert found.total_bytes_per_s == approx(4 * GEN5_X16)
    """With 2 channels (76.8 GB/s) the DRAM is: 76.8 / 4 = 19.2 each."""
    found = ceiling(dgx("2xDDR5-4800"), "all-near")
    assert each(found) == [approx(19.2e9)] * 8
    assert set(found.limits) == {"dram0-numa0", "dram1-numa1"}


def test_one_socket_only_has_half_of_the_machine() -> None:
    found = ceiling(dgx(), "socket:dram1")
    assert [share.gpu for share in found.shares] == ["gpu4", "gpu5", "gpu6", "gpu7"]
    assert found.total_bytes_per_s == approx(2 * GEN5_X16)


def test_both_directions_at_once_double_pcie_but_not_dram() -> None:
    """PCIe is full duplex: 252.06 each way. DRAM is not: loads and stores together get 2 · 153.6."""
    assert ceiling(dgx(), "both-ways").total_bytes_per_s == approx(8 * GEN5_X16)
    found = ceiling(dgx("4xDDR5-4800"), "both-ways")
    assert found.total_bytes_per_s == approx(2 * 153.6e9)
    assert each(found) == [approx(2 * 19.2e9)] * 8


def test_typical_rates_use_the_measured_copies_of_the_generation() -> None:
    """55.43 GB/s per Gen5 x16 (8x H200): 4 · 55.43 = 221.72 through the uplinks."""
    assert ceiling(dgx(), "one:gpu0", "expected").total_bytes_per_s == approx(55.43e9)
    assert ceiling(dgx(), "all-near", "expected").total_bytes_per_s == approx(4 * 55.43e9)


def test_an_a100_loads_at_half_speed_while_it_stores() -> None:
    """Several A100 hosts keep 12.5 GB/s of H2D and 24 of D2H when both run; per uplink: 2 GPUs, so 6.25 + 12 each."""
    found = ceiling(dgx(gpu="a100"), "both-ways", "expected")
    assert each(found) == [approx(6.25e9 + 12e9)] * 8


def test_limits_for_load_vs_recompute_are_the_single_and_the_node_ceiling() -> None:
    limits = {limit.name: limit.value for limit in dgx().limits}
    assert limits["pcie"] == approx(55.43e9)
    assert limits["uplink"] == approx(55.43e9)
    assert limits["ranks_per_uplink"] == 2
    assert limits["host_total"] == approx(4 * 55.43e9)
    assert limits["sockets"] == 2
    assert limits["collective"] == approx(18 * 20.6e9)
    assert "home_socket" not in limits  # no input tells the DRAM's rate
    with_dram = {limit.name: limit.value for limit in dgx("4xDDR5-4800").limits}
    assert with_dram["home_socket"] == approx(153.6e9)


def test_the_collected_a100_text_shares_four_gen4_uplinks() -> None:
    """a100-8gpu-nv12-10nic-8numa: pairs of GPUs are PXB from the same two NICs, so two GPUs share one Gen4 x16 uplink:
    31.51 / 2 = 15.75 each, 126.03 together; from one NUMA node, which has 2 of its socket's 8
    channels DDR4-3200 (204.8 / 4 = 51.2): 6.4."""
    file = shared("a100-8gpu-nv12-10nic-8numa-tabs.txt")
    result = discover(Sources(files=(file,)), gpu="a100", dram="8xDDR4-3200/4")
    assert each(ceiling(result, "all-near")) == [approx(GEN4_X16 / 2)] * 8
    assert ceiling(result, "all-near").total_bytes_per_s == approx(4 * GEN4_X16)
    found = ceiling(result, "from:dram3")
    assert each(found) == [approx(51.2e9 / 8)] * 8
    assert found.limits == ("dram3-numa3",)


def test_the_collected_h100_text_shares_four_gen5_uplinks() -> None:
    file = shared("h100-8gpu-13nic-ib-and-eth-noindent-header.txt")
    result = discover(Sources(files=(file,)), gpu="h100", dram="8xDDR5-4800")
    assert ceiling(result, "one:gpu0").total_bytes_per_s == approx(GEN5_X16)
    assert ceiling(result, "all-near").total_bytes_per_s == approx(4 * GEN5_X16)
    # One socket's 8 channels carry 307.2, above the 252.06 of all uplinks: the uplinks stay the limit.
    assert ceiling(result, "from:dram0").total_bytes_per_s == approx(4 * GEN5_X16)


def test_the_collected_h100_text_without_shared_switches_gives_every_gpu_its_own_link() -> None:
    """h100-8gpu-nv18-8nic: each GPU has its own path, so 8 · 63.02 = 504.12; one socket of 307.2 is less than that."""
    result = discover(Sources(files=(shared("h100-8gpu-nv18-8nic.txt"),)), gpu="h100", dram="8xDDR5-4800")
    assert ceiling(result, "all-near").total_bytes_per_s == approx(8 * GEN5_X16)
    found = ceiling(result, "from:dram0")
    assert found.total_bytes_per_s == approx(307.2e9)
    assert each(found) == [approx(38.4e9)] * 8


def test_the_dgx2_puts_four_gpus_on_one_gen3_uplink() -> None:
    """hwloc prints 15.753846 GB/s for every link; 16 GPUs share 4 uplinks: 15.75 / 4 = 3.94 each, 63.02 together."""
    result = discover(Sources(files=(shared("hwloc-nvidiaDGX2.xml"),)))
    found = ceiling(result, "all-near")
    assert each(found) == [approx(GEN3_X16 / 4)] * 16
    assert found.total_bytes_per_s == approx(4 * GEN3_X16)
    limits = {limit.name: limit.value for limit in result.limits}
    assert limits["ranks_per_uplink"] == 4
    # Measured copies over Gen3 x16 reach 12.15 GB/s: 12.15 / 4 each. Half of the GPUs cross UPI, for which no rate is
    # known: NCCL's planning constant of 10 GB/s is below the wire, so it is no ceiling.
    far = ceiling(result, "from:dram0", "expected")
    assert each(far) == [approx(12.15e9 / 4)] * 16
    assert "socket0=socket1" in far.unknown
    assert "inter_socket" not in limits


def test_grace_gpus_load_over_c2c() -> None:
    result = discover(Sources(files=(shared("gb200-4gpu-8nic-numa-lists.txt"),)), gpu="gb200")
    assert ceiling(result, "one:gpu0").total_bytes_per_s == approx(450e9)
    assert ceiling(result, "all-near").limits[0].startswith("gpu0=c2c")


def test_disks_and_nics_behind_one_switch() -> None:
    """lspci: 2 GPUs (one x8), a NIC without a rate and one NVMe Gen4 x4 below one Gen5 switch.

    Wire rates: directly, the disk gives 7.88 to both, 3.94 each. Staged, the same bytes go up and down the uplink.
    """
    result = discover(Sources(files=(DATA / "lspci-vv.txt",)))
    found = ceiling(result, "disks-direct")
    assert found.total_bytes_per_s == approx(GEN4_X16 / 4)
    assert each(found) == [approx(GEN4_X16 / 8)] * 2
    assert found.limits == ("disk0-sw-0000:17:00.0",)
    assert ceiling(result, "disks-direct", "expected").total_bytes_per_s == approx(7.0e9)


def test_nics_feed_the_gpus_next_to_them() -> None:
    """NCCL dump: per socket one 400 Gbit/s NIC and two GPUs below one switch: 50 GB/s for two GPUs, 25 each."""
    result = discover(Sources(files=(DATA / "nccl.xml",)))
    found = ceiling(result, "nics")
    assert each(found) == [approx(25e9)] * 4
    assert set(found.limits) == {"nic0-network", "nic1-network"}
