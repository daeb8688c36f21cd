"""Asks the NVIDIA driver, through NVML, for what /sys does not tell: names, NVLinks, peer access, C2C, load."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from kvbench.core.graph import PcieState
from kvbench.core.provenance import Origin
from kvbench.topo.facts import Facts, MatrixFact, NvlinkFact, PciFact, bus_id
from kvbench.topo.numbers import generation_rate

_ORIGIN = Origin(provenance="measured", source="NVML: current and maximum PCIe link")
_PEER = ("OK", "CNS", "GNS", "TNS", "DR", "NS", "U")
_READ = 0  # NVML_P2P_CAPS_INDEX_READ is a tuple by mistake in nvidia-ml-py 13
_SWITCH = 2
_C2C_COUNT, _C2C_MEGABYTES_PER_S = 170, 172
_MEGA = 1e6


def read_nvml(nvml: Any = None) -> Facts:
    """Facts about every GPU the driver lists; without a driver, facts that only say why there is none."""
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Facts(format="NVML", source="driver", gpu_absent=f"NVML: {error}")
    try:
        return _facts(nvml)
    except nvml.NVMLError as error:
        return Facts(
            format="NVML", source="driver", gpu_absent=f"the driver does not describe its GPUs (NVML: {error})"
        )
    finally:
        nvml.nvmlShutdown()


def _facts(nvml: Any) -> Facts:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    addresses = [
        bus_id(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)) or f"gpu-{at}" for at, handle in enumerate(handles)
    ]
    ask = _asker(nvml)
    pci = [_gpu(nvml, ask, at, handle, addresses[at]) for at, handle in enumerate(handles)]
    links = [
        link for handle, address in zip(handles, addresses, strict=True) for link in _links(nvml, ask, handle, address)
    ]
    labels = tuple(f"GPU{at}" for at in range(len(handles)))
    return Facts(
        format="NVML",
        source=f"driver {ask(nvml.nvmlSystemGetDriverVersion) or 'unknown'}",
        pci=tuple(pci),
        nvlinks=tuple(dict.fromkeys(links)),
        peers=_peers(nvml, ask, handles, labels) if len(handles) > 1 else None,
        gpu_absent=None if handles else "the NVIDIA driver lists no GPU",
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _asker(nvml: Any) -> Callable[..., Any]:
    """Calls NVML and returns None where this GPU or driver does not support the question."""

    def ask(call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except nvml.NVMLError:
            return None

    return ask


def _gpu(nvml: Any, ask: Callable[..., Any], index: int, handle: Any, address: str) -> PciFact:
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    load = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    most_lane = generation_rate(ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle))
    most_width = ask(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle) or None
    state = PcieState(
        lane_gt_per_s=generation_rate(ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)),
        width=ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle) or None,
        max_lane_gt_per_s=most_lane,
        max_width=most_width,
        port_max_lane_gt_per_s=most_lane,  # NVML's maxima are those "possible with this device and system"
        port_max_width=most_width,
        origin=_ORIGIN,
    )
    return PciFact(
        bus_id=address,
        is_gpu=True,
        name=_text(ask(nvml.nvmlDeviceGetName, handle) or ""),
        tool_index=index,
        memory_bytes=None if memory is None else int(memory.total),
        busy=None if load is None else load.gpu > 0,
        state=state if state.lane_gt_per_s is not None else None,
        gpu_numa_id=_own_numa(nvml, ask, handle),
    )


def _own_numa(nvml: Any, ask: Callable[..., Any], handle: Any) -> int | None:
    """The GPU's own memory node (Grace); elsewhere the driver has none."""
    call = getattr(nvml, "nvmlDeviceGetNumaNodeId", None)
    found = ask(call, handle) if call is not None else None
    return found if isinstance(found, int) and 0 <= found < 1 << 16 else None


def _links(nvml: Any, ask: Callable[..., Any], handle: Any, address: str) -> Iterator[NvlinkFact]:
    """Active NVLinks, counted per far end; each pair of GPUs once."""
    ends: Counter[str] = Counter()
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        if ask(nvml.nvmlDeviceGetNvLinkState, handle, link) != 1:
            continue
        kind = ask(getattr(nvml, "nvmlDeviceGetNvLinkRemoteDeviceType", lambda *_: None), handle, link)
        remote = ask(
            getattr(nvml, "nvmlDeviceGetNvLinkRemotePciInfo_v2", nvml.nvmlDeviceGetNvLinkRemotePciInfo), handle, link
        )
        far = bus_id(_text(remote.busId)) if remote is not None else None
        ends["nvswitch" if kind == _SWITCH or far is None else far] += 1
    for far, count in ends.items():
        if far == "nvswitch" or far > address:
            yield NvlinkFact(a=address, b=far, count=count)
    yield from _c2c(nvml, ask, handle, address)


def _c2c(nvml: Any, ask: Callable[..., Any], handle: Any, address: str) -> Iterator[NvlinkFact]:
    fields = ask(nvml.nvmlDeviceGetFieldValues, handle, [_C2C_COUNT, _C2C_MEGABYTES_PER_S])
    if not fields or len(fields) < 2 or any(field.nvmlReturn != 0 for field in fields):
        return
    count, each = int(fields[0].value.uiVal), int(fields[1].value.uiVal)
    if count > 0:
        rate = each * count * _MEGA if each else None
        yield NvlinkFact(a=address, b="near-numa", count=count, bytes_per_s=rate, kind="c2c")


def _peers(nvml: Any, ask: Callable[..., Any], handles: list[Any], labels: tuple[str, ...]) -> MatrixFact:
    cells: list[list[str | None]] = [["X" if row == column else None for column in labels] for row in labels]
    for a, b in combinations(range(len(handles)), 2):
        status = ask(nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], _READ)
        if status is not None:
            cells[a][b] = cells[b][a] = _PEER[status] if 0 <= status < len(_PEER) else "U"
    return MatrixFact(labels=labels, cells=tuple(tuple(row) for row in cells))
