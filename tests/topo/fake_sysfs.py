"""Writes a small /sys tree with real symbolic links, so that a test can say what the kernel would report."""

import struct
from dataclasses import dataclass, field
from pathlib import Path

NVIDIA, MELLANOX = "0x10de", "0x15b3"
GPU, NIC, NVME, BRIDGE, VGA = "0x030200", "0x020700", "0x010802", "0x060400", "0x030000"


@dataclass
class FakeSys:
    """A machine under `root/sys`; call the methods in any order."""

    root: Path
    paths: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.sys / "bus/pci/devices").mkdir(parents=True)
        (self.sys / "devices/system/node").mkdir(parents=True)
        (self.sys / "kernel/iommu_groups").mkdir(parents=True)

    @property
    def sys(self) -> Path:
        return self.root / "sys"

    def numa(
        self, index: int, cpus: str, *, package: int | None = None, kib: int = 527_000_000, distance: str = "10"
    ) -> None:
        node = self.sys / f"devices/system/node/node{index}"
        node.mkdir()
        (node / "cpulist").write_text(cpus + "\n")
        (node / "meminfo").write_text(f"Node {index} MemTotal:       {kib} kB\n")
        (node / "distance").write_text(distance + "\n")
        first = cpus.split("-", maxsplit=1)[0].split(",", maxsplit=1)[0]
        topology = self.sys / f"devices/system/cpu/cpu{first}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{index if package is None else package}\n")

    def pci(
        self,
        address: str,
        below: str,
        kind: str,
        *,
        numa: int = 0,
        now: tuple[str, int] | None = ("32.0 GT/s PCIe", 16),
        most: tuple[str, int] | None = ("32.0 GT/s PCIe", 16),
        vendor: str = NVIDIA,
        acs: bool | None = None,
    ) -> Path:
        """One function; `below` is a bridge's address or a host bridge such as `pci0000:16`."""
        parent = self.paths.get(below) or self.sys / "devices" / below
        path = self.paths[address] = parent / address
        path.mkdir(parents=True)
        files = {"class": kind, "vendor": vendor, "device": "0x2330", "numa_node": str(numa)}
        if now is not None:
            files |= {"current_link_speed": now[0], "current_link_width": str(now[1])}
        if most is not None:
            files |= {"max_link_speed": most[0], "max_link_width": str(most[1])}
        for name, text in files.items():
            (path / name).write_text(text + "\n")
        if acs is not None:
            (path / "config").write_bytes(config_space(acs))
        link = self.sys / "bus/pci/devices" / address
        link.symlink_to(Path("../../..") / path.relative_to(self.sys))
        return path

    def infiniband(self, name: str, address: str, rate: str, *, state: str = "4: ACTIVE") -> None:
        port = self.paths[address] / "infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate + "\n")
        (port / "state").write_text(state + "\n")
        device = port.parents[1] / "device"
        device.symlink_to(Path("../.."))
        self._class("infiniband", name, port.parents[1])

    def disk(self, name: str, address: str, *, sectors: int = 7_501_476_528) -> None:
        block = self.paths[address] / "nvme" / name.partition("n1")[0] / name
        (block / "queue").mkdir(parents=True)
        (block / "size").write_text(f"{sectors}\n")
        (block / "queue/rotational").write_text("0\n")
        (self.sys / "block").mkdir(exist_ok=True)
        (self.sys / "block" / name).symlink_to(Path("..") / block.relative_to(self.sys))

    def iommu(self, kind: str, *addresses: str) -> None:
        for at, address in enumerate(addresses):
            group = self.sys / f"kernel/iommu_groups/{at}"
            group.mkdir()
            (group / "type").write_text(kind + "\n")
            up = Path(*[".."] * len(self.paths[address].relative_to(self.sys).parts))
            (self.paths[address] / "iommu_group").symlink_to(up / group.relative_to(self.sys))

    def _class(self, kind: str, name: str, target: Path) -> None:
        folder = self.sys / "class" / kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(Path("../..") / target.relative_to(self.sys))


def config_space(redirect: bool) -> bytes:
    """4096 bytes whose second extended capability is ACS, with or without request and completion redirection."""
    data = bytearray(4096)
    struct.pack_into("<I", data, 0x100, 0x0001 | 1 << 16 | 0x148 << 20)  # AER, next at 0x148
    struct.pack_into("<I", data, 0x148, 0x000D | 1 << 16)
    struct.pack_into("<H", data, 0x148 + 6, 0b1100 if redirect else 0)
    return bytes(data)


def switched_machine(root: Path) -> FakeSys:
    """2 sockets. Socket 0: a switch with GPU 19:00.0, NIC 1a:00.0, NVMe 1b:00.0. Socket 1: the same at 99, 9a, 9b."""
    fake = FakeSys(root)
    fake.numa(0, "0-47,96-143", distance="10 21")
    fake.numa(1, "48-95,144-191", distance="21 10")
    for numa, bus in ((0, 0x16), (1, 0x96)):
        host, port, up = f"pci0000:{bus:02x}", f"0000:{bus:02x}:01.0", f"0000:{bus + 1:02x}:00.0"
        fake.pci(port, host, BRIDGE, numa=numa, vendor="0x8086")
        fake.pci(up, port, BRIDGE, numa=numa, vendor="0x1000")
        for at, kind in enumerate((GPU, NIC, NVME)):
            down, leaf = f"0000:{bus + 2:02x}:{4 * at:02x}.0", f"0000:{bus + 3 + at:02x}:00.0"
            width = 4 if kind == NVME else 16
            fake.pci(down, up, BRIDGE, numa=numa, vendor="0x1000", acs=False, most=("32.0 GT/s PCIe", width))
            fake.pci(
                leaf,
                down,
                kind,
                numa=numa,
                now=("32.0 GT/s PCIe", width),
                most=("32.0 GT/s PCIe", width),
                vendor=MELLANOX if kind == NIC else NVIDIA,
            )
        fake.infiniband(f"mlx5_{numa}", f"0000:{bus + 4:02x}:00.0", "400 Gb/sec (4X NDR)")
        fake.disk(f"nvme{numa}n1", f"0000:{bus + 5:02x}:00.0")
    return fake
