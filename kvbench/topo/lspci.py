r"""Reads `lspci -vv` (also `-vvv`, `-nn`, `-D`) blocks and the `lspci -t`, `-tv` tree.

31:00.0 3D controller: NVIDIA Corporation GA100 [A100 SXM4 80GB] (rev a1)
        LnkCap: Port #0, Speed 16GT/s, Width x16, ASPM L1, Exit Latency L1 <64us
        LnkSta: Speed 8GT/s (downgraded), Width x8 (downgraded)

-[0000:00]-+-00.0
           \-01.0-[01-05]----00.0-[02-05]--+-00.0-[03]----00.0
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import PcieState
from kvbench.core.provenance import Origin
from kvbench.topo.facts import Facts, PciFact, bus_id

_BLOCK = re.compile(r"((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])(?: (.{0,300}))?", re.IGNORECASE)
_LINK = re.compile(r"\s*(LnkCap|LnkSta):.{0,40}?Speed ([\d.]{1,5}|unknown)\s?(?:GT/s)?.{0,20}?, Width x(\d{1,2})")
_BUSES = re.compile(r"\s*Bus: primary=([0-9a-f]{2}), secondary=([0-9a-f]{2}), subordinate=([0-9a-f]{2})")
_NUMA = re.compile(r"\s*NUMA node: (-?\d{1,4})")
_IOMMU = re.compile(r"\s*IOMMU group: (\d{1,6})")
_ACS = re.compile(r"\s*ACSCtl:(.{0,200})")
_NUMBERS = re.compile(r"\[([0-9a-f]{4})\](?=:)")
_IDS = re.compile(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]")
_ORIGIN = Origin(provenance="measured", source="lspci -vv: LnkSta, LnkCap")

# The words lspci prints for the classes that matter here, from pci.ids.
_CLASSES = {
    "vga compatible controller": 0x0300,
    "3d controller": 0x0302,
    "display controller": 0x0380,
    "processing accelerators": 0x1200,
    "ethernet controller": 0x0200,
    "infiniband controller": 0x0207,
    "network controller": 0x0280,
    "non-volatile memory controller": 0x0108,
    "pci bridge": 0x0604,
    "bridge": 0x0680,
    "host bridge": 0x0600,
    "sata controller": 0x0106,
    "scsi storage controller": 0x0100,
}
_VENDORS = {"nvidia": 0x10DE, "advanced micro devices": 0x1002, "mellanox": 0x15B3, "intel": 0x8086}


def looks_like_lspci(text: str) -> bool:
    """Whether the text has link lines or starts with device titles."""
    head = text[:200_000]
    return (
        "LnkSta:" in head
        or "LnkCap:" in head
        or any(
            (match := _BLOCK.fullmatch(line)) is not None and match[2] is not None and ":" in match[2]
            for line in head.splitlines()[:50]
        )
    )


def looks_like_tree(text: str) -> bool:
    """Whether the text starts with a root bus such as `-[0000:00]-`."""
    return re.match(r"\s*-(?:\+-)?\[(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}\]-", text, re.IGNORECASE) is not None


def read_lspci(text: str, source: str) -> Facts:
    """Every device block, with its link state, NUMA node, ACS and, for bridges, the buses below it."""
    found: list[PciFact] = []
    secondary: list[tuple[str, int, int, int]] = []
    iommu: str | None = None
    for address, title, lines in _blocks(text):
        fact = _described(address, title)
        caps: dict[str, tuple[float | None, int]] = {}
        for line in lines:
            if match := _LINK.match(line):
                caps[match[1]] = (None if match[2] == "unknown" else float(match[2]), int(match[3]))
            elif match := _BUSES.match(line):
                domain = int(address.split(":")[0], 16)
                secondary.append((address, domain, int(match[2], 16), int(match[3], 16)))
                fact = replace(fact, class_code=fact.class_code or 0x0604)
            elif match := _NUMA.match(line):
                fact = replace(fact, numa=int(match[1]) if int(match[1]) >= 0 else None)
            elif _IOMMU.match(line):
                iommu = "groups"
            elif match := _ACS.match(line):
                fact = replace(fact, acs_redirect="ReqRedir+" in match[1] or "CmpltRedir+" in match[1])
        found.append(replace(fact, state=_state(caps)))
    if not found:
        raise KvbenchError(
            f"{source}: no device block such as `31:00.0 3D controller: …`; give the output of lspci -vv"
        )
    return Facts(format="lspci -vv", source=source, pci=_with_parents(found, secondary), iommu=iommu)


def _blocks(text: str) -> Iterator[tuple[str, str, list[str]]]:
    current: tuple[str, str, list[str]] | None = None
    for line in text.splitlines():
        match = _BLOCK.fullmatch(line.rstrip()[:340])
        if match and (address := bus_id(match[1])):
            if current is not None:
                yield current
            current = (address, match[2] or "", [])
        elif current is not None and line[:1] in {" ", "\t"}:
            current[2].append(line[:400])
    if current is not None:
        yield current


def _described(address: str, title: str) -> PciFact:
    kind, _, name = title.partition(": ")
    number = _NUMBERS.search(title)
    ids = _IDS.search(title)
    plain = re.sub(r"\s*\[[0-9a-f]{4}\]", "", kind).strip().lower()
    vendor = next((code for word, code in _VENDORS.items() if name.lower().startswith(word)), None)
    name = re.sub(r"\s*(\[[0-9a-f]{4}:[0-9a-f]{4}\]|\(rev [0-9a-f]+\)|\(prog-if .*?\))", "", name).strip()
    product = re.fullmatch(r"NVIDIA Corporation .{0,40}\[(.{1,60})\]", name)
    return PciFact(
        bus_id=address,
        class_code=int(number[1], 16) if number else _CLASSES.get(plain),
        vendor=int(ids[1], 16) if ids else vendor,
        device=int(ids[2], 16) if ids else None,
        name=f"NVIDIA {product[1]}" if product else name,
    )


def _state(caps: dict[str, tuple[float | None, int]]) -> PcieState | None:
    if not caps:
        return None
    now, most = caps.get("LnkSta"), caps.get("LnkCap")
    return PcieState(
        lane_gt_per_s=now[0] if now else None,
        width=now[1] if now else None,
        max_lane_gt_per_s=most[0] if most else None,
        max_width=most[1] if most else None,
        origin=_ORIGIN,
    )


def _with_parents(found: list[PciFact], secondary: list[tuple[str, int, int, int]]) -> tuple[PciFact, ...]:
    """Names the bridge whose secondary bus is the device's bus. Without any bridge block the parent stays unknown."""
    above = {(domain, first): address for address, domain, first, _ in secondary}
    placed = []
    for fact in found:
        domain, bus = (int(part, 16) for part in fact.bus_id.split(":")[:2])
        parent = above.get((domain, bus))
        placed.append(replace(fact, parent=parent or (f"pci{domain:04x}:{bus:02x}" if above else None)))
    return tuple(placed)


@dataclass(slots=True)
class _Level:
    column: int
    parent: str
    domain: int
    bus: int


_ROOT = re.compile(r"\[(?:([0-9a-f]{4,8}):)?([0-9a-f]{2})\]", re.IGNORECASE)
_DEVICE = re.compile(r"([0-9a-f]{2})\.([0-7])(?![0-9a-f])", re.IGNORECASE)
_BELOW = re.compile(r"-\[([0-9a-f]{2})(?:-([0-9a-f]{2}))?\]", re.IGNORECASE)
_MOST_LINES = 20_000


def read_tree(text: str, source: str) -> Facts:
    r"""The devices of an `lspci -t` drawing with the bridge above each; `-tv` adds names.

    Each `-+-`, `+-` or `\-` opens or continues a level; `[02-05]` after a device makes it the bridge of bus 02.
    """
    found: dict[str, PciFact] = {}
    levels: list[_Level] = []
    for number, line in enumerate(text.splitlines()[:_MOST_LINES], start=1):
        if not line.strip() or set(line.strip()) <= {"|"}:
            continue
        _read_tree_line(line[:4096], levels, found, f"{source}:{number}")
    if not found:
        raise KvbenchError(f"{source}: no device in the tree; give the output of lspci -t or lspci -tv")
    return Facts(format="lspci -t", source=source, pci=tuple(found.values()))


def _read_tree_line(line: str, levels: list[_Level], found: dict[str, PciFact], where: str) -> None:
    at = len(line) - len(line.lstrip(" |\\+-"))
    root = _ROOT.match(line, at)
    if root:
        domain, bus = int(root[1] or "0", 16), int(root[2], 16)
        at = root.end()
        at += len(line[at:]) - len(line[at:].lstrip("-+"))
        levels[:] = [_Level(at, f"pci{domain:04x}:{bus:02x}", domain, bus)]
    while (device := _DEVICE.match(line, at)) is not None:
        while levels and levels[-1].column > at:
            levels.pop()
        if not levels or levels[-1].column != at:
            raise KvbenchError(
                f"{where}: {device[0]} stands below no bus; was the drawing's indent lost? give raw text"
            )
        level = levels[-1]
        address = f"{level.domain:04x}:{level.bus:02x}:{device[1].lower()}.{device[2]}"
        below = _BELOW.match(line, device.end())
        name = "" if below else line[device.end() :].strip()
        found[address] = PciFact(
            bus_id=address, parent=level.parent, class_code=0x0604 if below else None, name=name[:200]
        )
        if below is None:
            return
        at = below.end()
        at += len(line[at:]) - len(line[at:].lstrip("-+"))
        if len(levels) > 256:
            raise KvbenchError(f"{where}: more than 256 bridges in one another; that is no lspci -t drawing")
        levels.append(_Level(at, address, level.domain, int(below[1], 16)))
