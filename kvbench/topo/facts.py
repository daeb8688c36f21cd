"""What one input says about a machine, before it is joined with the others."""

import re
from dataclasses import dataclass

from kvbench.core.graph import PcieState

MATRIX_CELLS = ("X", "PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciFact:
    """One PCI function. `parent` is the bridge above it, or the host bridge `pciDDDD:BB`; None where unknown.

    `os_names` are what drivers call it (`mlx5_0`, `nvme0`, `cuda0`). `tool_index` is its number in a vendor's tool.
    `link_bytes_per_s` stands in where a tool prints only a rate. `is_switch` marks a bridge that the tool had already
    drawn together with its downstream ports. `near_numa` lists the nodes it is close to where there are several.
    """

    bus_id: str
    parent: str | None = None
    class_code: int | None = None
    vendor: int | None = None
    device: int | None = None
    name: str = ""
    numa: int | None = None
    numa_unknown: bool = False
    state: PcieState | None = None
    os_names: tuple[str, ...] = ()
    acs_redirect: bool | None = None
    tool_index: int | None = None
    memory_bytes: int | None = None
    busy: bool | None = None
    copy_engines: int | None = None
    gpu_numa_id: int | None = None
    is_gpu: bool = False
    port_rate_bit_per_s: float | None = None
    line_rate_bit_per_s: float | None = None
    nic_state: str | None = None
    medium: str | None = None
    link_bytes_per_s: float | None = None
    is_switch: bool = False
    near_numa: tuple[int, ...] = ()
    cpus: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaFact:
    """One NUMA node; `distances` maps other nodes to the kernel's relative distance.

    `gpu_memory`: it is the memory of a GPU that the CPUs can address, as on a Grace board. The firmware's rates are
    those of its HMAT table, for the nearest CPUs.
    """

    index: int
    cpus: str | None = None
    memory_bytes: int | None = None
    package: int | None = None
    distances: tuple[tuple[int, int], ...] = ()
    has_cpus: bool = True
    gpu_memory: bool = False
    firmware_read_bytes_per_s: float | None = None
    firmware_write_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkFact:
    """Bonded NVLinks from one device to another; ends are bus ids, `package:N`, `numa:N`, `near-numa` or `nvswitch`.

    `version` is the NVLink generation, where the input tells the GPU's architecture.
    """

    a: str
    b: str
    count: int | None = None
    bytes_per_s: float | None = None
    kind: str = "nvlink"
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Affinity:
    """The tail of a matrix row: CPUs, near NUMA nodes and the GPU's own memory node, as printed; None where blank.

    `cut`: the text ends before this tail, so a missing value is not a blank one.
    """

    label: str
    cpus: str | None
    numa: str | None
    gpu_numa: str | None
    cut: bool = False

    @property
    def numa_node(self) -> int | None:
        """The first near node: on Grace the list names the CPU node first, then the GPUs' own memory nodes."""
        match = re.match(r"\d+", self.numa or "")
        return int(match[0]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFact:
    """A square matrix by label; None marks a cell that the text does not hold. `has_cpu_column`: it had that header."""

    labels: tuple[str, ...]
    cells: tuple[tuple[str | None, ...], ...]
    affinity: tuple[Affinity, ...] = ()
    nic_names: tuple[tuple[str, str], ...] = ()
    has_cpu_column: bool = False

    def row(self, label: str) -> tuple[str | None, ...]:
        return self.cells[self.labels.index(label)]

    def cell(self, a: str, b: str) -> str | None:
        return self.row(a)[self.labels.index(b)]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(label for label in self.labels if label.startswith("GPU"))

    @property
    def nics(self) -> tuple[str, ...]:
        return tuple(label for label in self.labels if not label.startswith("GPU"))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFact:
    """A block device; `bus_id` is the PCI function it sits on, if any."""

    name: str
    bus_id: str | None
    model: str = ""
    size_bytes: int | None = None
    rotational: bool | None = None
    numa: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that one input says. `notes` are one-line remarks for people; `truncated` says that the input ends early.

    `port_rates` are a network device's rate now and its port's highest, in bits per second.
    """

    format: str
    source: str
    pci: tuple[PciFact, ...] = ()
    numa: tuple[NumaFact, ...] = ()
    packages: tuple[tuple[int, str], ...] = ()
    nvlinks: tuple[NvlinkFact, ...] = ()
    matrix: MatrixFact | None = None
    peers: MatrixFact | None = None
    gpu_names: tuple[tuple[int, str], ...] = ()
    disks: tuple[DiskFact, ...] = ()
    cpu_model: str | None = None
    iommu: str | None = None
    truncated: bool = False
    notes: tuple[str, ...] = ()
    gpu_absent: str | None = None
    port_rates: tuple[tuple[str, float | None, float | None], ...] = ()


_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})\.([0-7])")


def bus_id(text: str) -> str | None:
    """`0000:18:00.0` for `00000000:18:00.0` (NVML), `18:00.0` (lspci) and the like; None for anything else."""
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{int(match[2], 16):02x}:{int(match[3], 16):02x}.{match[4]}"
