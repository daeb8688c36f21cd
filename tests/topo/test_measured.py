from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import Graph
from kvbench.results.topology import TopologyResult
from kvbench.topo.discover import Sources, discover
from tests.topo.fake_sysfs import switched_machine
from tests.topo.shared_texts import DATA


def dgx(*imports: str) -> TopologyResult:
    files = (DATA / "dgx-8gpu.txt", DATA / "dgx-8gpu.csv")
    return discover(Sources(files=files, imports=tuple(DATA / name for name in imports)))


def measured(result: TopologyResult, link: str) -> tuple[float | None, float | None]:
    found = Graph(result.machine).links[link]
    rates = (found.forward.measured, found.backward.measured)
    return rates[0].bytes_per_s if rates[0] else None, rates[1].bytes_per_s if rates[1] else None


def test_nvbandwidth_host_copies_go_on_each_gpus_own_link() -> None:
    result = dgx("nvbandwidth.json")
    assert measured(result, "gpu0-sw0.0.0") == (55.0e9, 55.4e9)  # up is device to host
    assert measured(result, "gpu7-sw3.0.1") == (40.1e9, 55.4e9)
    assert measured(result, "gpu0=nvswitch") == (390.5e9, 390.5e9)
    assert [group.what for group in result.groups] == ["nvbandwidth v0.8 host_to_all_memcpy_ce, best cell of 8"]
    assert any(gap.reason == "nvbandwidth says Waived" for gap in result.absent)


def test_a_measurement_replaces_the_typical_rate_in_the_ceiling() -> None:
    limits = {limit.name: limit for limit in dgx("nvbandwidth.json").limits}
    assert limits["pcie"].value == 27.9e9  # GPU5, the slowest
    assert limits["pcie"].origin.provenance == "measured"


def test_nccl_tests_give_the_best_bus_bandwidth_and_not_the_average() -> None:
    result = dgx("nccl-tests.json")
    (group,) = result.groups
    assert {limit.name: limit.value for limit in result.limits}["collective"] == 360e9
    assert group.what == "nccl-tests all_gather_perf, 8 ranks, bus bandwidth at 1.00 GiB"
    assert group.bytes_per_s == 360e9


def test_fio_goes_on_the_disk_it_names(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    result = discover(Sources(root=tmp_path, imports=(DATA / "fio.json",)))
    assert measured(result, "disk0-sw-0000:17:00.0") == (6.9e9, None)
    assert result.measurements[0].what == "fio-3.33 read, 2 jobs"
    elsewhere = dgx("fio.json")
    assert any("which is no disk of this machine" in gap.reason for gap in elsewhere.absent)


def test_perftest_is_read_in_the_unit_that_fits_its_message_rate(tmp_path: Path) -> None:
    switched_machine(tmp_path)
    result = discover(Sources(root=tmp_path, imports=(DATA / "perftest.json",)))
    assert measured(result, "nic1-network")[1] == pytest.approx(392.31e9 / 8)
    assert result.measurements[0].what.endswith("(read as Gb/s)")
    mib = tmp_path / "mib.json"
    mib.write_text(
        '{"test_info": {"test": "RDMA_Read BW Test", "Device": "mlx5_0"}, "results": {"MsgSize": 65536, '
        '"n_iterations": 5000, "BW_peak": 11500.0, "BW_average": 11000.0, "MsgRate": 0.176}}'
    )
    result = discover(Sources(root=tmp_path, imports=(mib,)))
    assert measured(result, "nic0-network")[1] == pytest.approx(11000 * 2**20)


def test_perftest_figures_that_fit_no_unit_are_refused(tmp_path: Path) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text(
        '{"test_info": {"Device": "mlx5_0"}, "results": {"MsgSize": 65536, "BW_average": 11000.0, "MsgRate": 9.0}}'
    )
    with pytest.raises(KvbenchError, match=r"fits MsgRate 9\.0 in neither Gb/s nor MiB/s"):
        discover(Sources(files=(DATA / "dgx-8gpu.txt",), imports=(odd,)))


def test_gdsio_goes_on_the_only_disk_and_else_into_a_group(tmp_path: Path) -> None:
    result = discover(Sources(files=(DATA / "hwloc.xml",), imports=(DATA / "gdsio.txt",)))
    assert [m.what for m in result.measurements] == ["gdsio READ GPUD, 8 threads", "gdsio READ CPUONLY, 8 threads"]
    assert measured(result, "disk0-port-0000:20:02.0")[0] == pytest.approx(6.4012 * 2**30)
    switched_machine(tmp_path)
    result = discover(Sources(root=tmp_path, imports=(DATA / "gdsio.txt",)))
    assert [group.what for group in result.groups] == ["gdsio READ GPUD, 8 threads", "gdsio READ CPUONLY, 8 threads"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "is none of the measurements"),
        ("{}", "JSON of none of the tools"),
        ('{"nvbandwidth": {}}', "not laid out as its tool writes it"),
        ("{", r":1: not readable as JSON"),
        ("IoType: READ nonsense", "no gdsio result line"),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "m"
    path.write_text(text)
    with pytest.raises(KvbenchError, match=message):
        discover(Sources(files=(DATA / "dgx-8gpu.txt",), imports=(path,)))
