"""NVML as a fake driver answers it: two GPUs with 12 NVLinks into a switch, one link down on the second."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.core.graph import Graph
from kvbench.topo.build import build_machine
from kvbench.topo.nvml import read_nvml


class Error(Exception):
    """What NVML raises."""


class Driver:
    """The calls that kvbench makes; a call that is not here raises, as an old driver's does."""

    NVMLError = Error
    NVML_NVLINK_MAX_LINKS = 12

    def __init__(self, *, peer: int = 0, c2c: bool = False) -> None:
        self.peer, self.c2c, self.open = peer, c2c, False

    def nvmlInit(self) -> None:
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{0x18 + handle:02X}:00.0".encode())

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA A100-SXM4-80GB"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return 0 if handle == 1 and link == 11 else 1

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return 2

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId="00000000:C4:00.0")

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:
        assert index == 0
        return self.peer

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[Any]:
        if not self.c2c:
            return [SimpleNamespace(nvmlReturn=3)] * 2
        values = (10, 44712)
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=value)) for value in values]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_gpus_links_and_peer_access_come_from_the_driver() -> None:
    driver = Driver()
    facts = read_nvml(driver)
    assert not driver.open
    assert facts.source == "driver 570.1"
    assert [fact.bus_id for fact in facts.pci] == ["0000:18:00.0", "0000:19:00.0"]
    assert [fact.memory_bytes for fact in facts.pci] == [80 * 2**30] * 2
    assert [(link.a, link.b, link.count) for link in facts.nvlinks] == [
        ("0000:18:00.0", "nvswitch", 12),
        ("0000:19:00.0", "nvswitch", 11),
    ]
    graph = Graph(build_machine([facts])[0])
    assert graph.pair_cell("gpu0", "gpu1") == "NV11"
    link = graph.uplink("gpu0")
    assert link is not None
    assert link.backward.theory is not None
    assert link.backward.theory.bytes_per_s == pytest.approx(31.508e9, rel=1e-4)  # idle at Gen1, counted as Gen4
    assert {peer.status for peer in graph.machine.peers} == {"OK"}


@pytest.mark.parametrize(
    ("status", "word"), [(0, "OK"), (1, "CNS"), (2, "GNS"), (3, "TNS"), (4, "DR"), (5, "NS"), (6, "U"), (99, "U")]
)
def test_peer_statuses_have_the_words_of_nvidia_smi(status: int, word: str) -> None:
    facts = read_nvml(Driver(peer=status))
    assert facts.peers is not None
    assert facts.peers.cell("GPU0", "GPU1") == word


def test_c2c_bandwidth_is_links_times_rate() -> None:
    facts = read_nvml(Driver(c2c=True))
    assert [link.bytes_per_s for link in facts.nvlinks if link.kind == "c2c"] == [447.12e9] * 2


def test_without_a_driver_there_is_a_reason_and_nothing_else() -> None:
    class Missing(Driver):
        def nvmlInit(self) -> None:
            raise Error("NVML Shared Library Not Found")

    facts = read_nvml(Missing())
    assert facts.gpu_absent == "NVML: NVML Shared Library Not Found"
    assert facts.pci == ()
