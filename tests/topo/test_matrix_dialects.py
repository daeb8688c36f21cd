"""A random machine, written in each dialect of `nvidia-smi topo -m`, reads back as itself."""

import re
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import KvbenchError
from kvbench.topo.facts import MatrixFact
from kvbench.topo.lspci import read_lspci, read_tree
from kvbench.topo.nvidia_smi import read_matrix
from kvbench.topo.read import read_text
from kvbench.topo.rocm_smi import read_rocm

CELLS = ("PIX", "PXB", "PHB", "NODE", "SYS", "NV1", "NV12", "NV18")
LEGEND = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
"""


@dataclass(frozen=True)
class Machine:
    """What a matrix says: labels, cells of the upper triangle by pair, and the tail of each GPU's row."""

    labels: tuple[str, ...]
    pairs: dict[tuple[str, str], str]
    cpus: tuple[str | None, ...]
    numa: tuple[str, ...]
    gpu_numa: tuple[str, ...]

    def cell(self, a: str, b: str) -> str:
        return "X" if a == b else self.pairs.get((a, b)) or self.pairs[(b, a)]

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(label for label in self.labels if label.startswith("GPU"))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    gpus, nics = draw(st.integers(1, 10)), draw(st.integers(0, 6))
    names = draw(st.sampled_from(["NIC{}", "mlx5_{}"]))
    labels = tuple([f"GPU{at}" for at in range(gpus)] + [names.format(at) for at in range(nics)])
    # Without any cell that tells the two kinds of matrix apart, a lone X reads as a topo matrix.
    pairs = {
        pair: draw(st.sampled_from(CELLS if pair[0][0] == pair[1][0] == "G" else CELLS[:5]))
        for pair in combinations(labels, 2)
    }
    cpus = st.sampled_from(["0-31", "0-47,96-143", "0,2,4,6", "56"])
    numas = st.sampled_from(["0", "1", "3", "0,3-9,11-17"])
    return Machine(
        labels=labels,
        pairs=pairs,
        cpus=tuple(draw(cpus) for _ in range(gpus)),
        numa=tuple(draw(numas) for _ in range(gpus)),
        gpu_numa=tuple(draw(st.sampled_from(["N/A", "2"])) for _ in range(gpus)),
    )


def tabs(machine: Machine, *, escape: str = "none", soc: bool = False, legend: bool = True) -> str:
    """As the driver prints it: tabs, an empty column before GPU NUMA ID, underlined header."""
    head = "\t" + "\t".join(machine.labels) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    if escape != "none":
        head = f"\x1b[4m{head}\x1b[0m" if escape == "before" else "\t\x1b[4m" + head[1:] + "\x1b[0m"
    lines = [head]
    for a in machine.labels:
        cells = [f" {machine.cell(a, b)} " if a == b else machine.cell(a, b) for b in machine.labels]
        tail = ""
        if a in machine.gpus:
            at = machine.gpus.index(a)
            tail = f"\t{machine.cpus[at] or ''}\t{machine.numa[at]}\t\t{machine.gpu_numa[at]}"
        lines.append(a + "\t" + "\t".join(cells) + tail)
    text = "\n".join(lines) + "\n" + (LEGEND if legend else "")
    return re.sub(r"\bSYS\b(?!  =)", "SOC", text) if soc else text


def blanks(machine: Machine, *, indent: bool = True, width: int = 8, crlf: bool = False) -> str:
    """As people paste it: tabs expanded; the header may lose its indent."""
    text = tabs(machine).replace("\t\t", "\t").expandtabs(width)
    lines = text.split("\n")
    lines[0] = lines[0] if indent else lines[0].lstrip()
    return ("\r\n" if crlf else "\n").join(lines)


def expect(machine: Machine, matrix: MatrixFact | None) -> None:
    assert matrix is not None
    assert matrix.labels == machine.labels
    assert all(matrix.cell(a, b) == machine.cell(a, b) for a in machine.labels for b in machine.labels)
    assert [row.cpus for row in matrix.affinity] == list(machine.cpus)
    assert [row.numa for row in matrix.affinity] == list(machine.numa)


@given(machines(), st.sampled_from(["none", "before", "after"]), st.booleans())
def test_the_drivers_own_form(machine: Machine, escape: str, legend: bool) -> None:
    facts = read_matrix(tabs(machine, escape=escape, legend=legend), "m")
    expect(machine, facts.matrix)
    assert facts.matrix is not None
    assert [row.gpu_numa for row in facts.matrix.affinity] == list(machine.gpu_numa)
    assert not facts.truncated


@given(machines(), st.booleans(), st.sampled_from([8, 16]), st.booleans())
def test_the_pasted_form(machine: Machine, indent: bool, width: int, crlf: bool) -> None:
    expect(machine, read_matrix(blanks(machine, indent=indent, width=width, crlf=crlf), "m").matrix)


@given(machines())
def test_the_form_of_2017_with_soc(machine: Machine) -> None:
    expect(machine, read_matrix(tabs(machine, soc=True), "m").matrix)


@given(machines(), st.data())
def test_cells_that_ran_together(machine: Machine, data: st.DataObject) -> None:
    """`NODE    NODE` pasted as `NODENODE`; NV# cells never do, because their number would be unreadable."""
    lines = blanks(machine).split("\n")
    at = data.draw(st.integers(1, len(machine.labels)))
    lines[at] = re.sub(r"(NODE|SYS|PIX|PXB|PHB) +(?=NODE|SYS|PIX|PXB|PHB)", r"\1", lines[at])
    expect(machine, read_matrix("\n".join(lines), "m").matrix)


@given(machines(), st.data())
def test_a_blank_cpu_column(machine: Machine, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(machine.gpus) - 1))
    blank = Machine(
        labels=machine.labels,
        pairs=machine.pairs,
        cpus=tuple(None if other == at else cpus for other, cpus in enumerate(machine.cpus)),
        numa=machine.numa,
        gpu_numa=machine.gpu_numa,
    )
    expect(blank, read_matrix(tabs(blank), "m").matrix)
    expect(blank, read_matrix(blanks(blank), "m").matrix)


@given(machines(), st.data())
def test_a_cut_text_keeps_what_it_holds_and_says_so(machine: Machine, data: st.DataObject) -> None:
    text = tabs(machine, legend=False)
    start = text.index("\n") + 1
    first = text.index(" X ", start) + 3
    cut = data.draw(st.integers(first, max(first, len(text) - 30)))
    facts = read_matrix(text[:cut], "m")
    assert facts.matrix is not None
    for a, b in combinations(machine.labels, 2):
        assert facts.matrix.cell(a, b) in {None, machine.cell(a, b)}
    rows = text[start:cut].count("\n")
    assert facts.truncated or rows >= len(machine.labels) - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-7\nGPU1\tNODE\t X \t0-7\n", "m:3: GPU1 to GPU0 is NODE"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\tSYS\t X \t0-7\nGPU1\tSYS\t X \t0-7\n", "m:2: row GPU0 has SYS on its own"),
        ("\tGPU0\tGPU1\tCPU Affinity\nnothing else\n", "a matrix header, but no row"),
    ],
)
def test_a_matrix_that_cannot_be_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(KvbenchError, match=message):
        read_matrix(text, "m")


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[str, str, bool]]:
    """(address, parent, is a bridge) of a random PCI tree, in the order of lspci -t."""
    found: list[tuple[str, str, bool]] = []
    buses = iter(range(1, 200))

    def bus(number: int, parent: str, depth: int) -> None:
        for device in range(draw(st.integers(1, 3))):
            address = f"0000:{number:02x}:{device:02x}.0"
            bridge = depth < 4 and draw(st.booleans())
            found.append((address, parent, bridge))
            if bridge:
                bus(next(buses), address, depth + 1)

    bus(0, "pci0000:00", 0)
    return found


def drawn(tree: list[tuple[str, str, bool]]) -> str:
    """The tree as lspci -t draws it."""
    below: dict[str, list[tuple[str, str, bool]]] = {}
    for item in tree:
        below.setdefault(item[1], []).append(item)

    def last_bus(address: str) -> int:
        inside = [last_bus(item[0]) for item in below.get(address, []) if item[2]]
        return max([int(below[address][0][0][5:7], 16), *inside])

    def lines(parent: str) -> list[str]:
        items, out = below[parent], []
        for at, (address, _, bridge) in enumerate(items):
            last = at == len(items) - 1
            head = "-" if len(items) == 1 else "+" if at == 0 else "\\" if last else "+"
            text = address[8:]
            inner: list[str] = []
            if bridge and address in below:
                first, final = int(below[address][0][0][5:7], 16), last_bus(address)
                text += f"-[{first:02x}]" if first == final else f"-[{first:02x}-{final:02x}]"
                inner = lines(address)
                text += "--" + inner[0]
            out.append(f"{'-' if at == 0 else ''}{head}-{text}")
            pad = len(f"{head}-{address[8:]}") + (len(text) - len(address[8:]) - len(inner[0]) if inner else 0)
            bar = " " if last else "|"
            out += [f"{bar}{' ' * (pad - 1)}{line}" for line in inner[1:]]
        return [out[0].removeprefix("-"), *out[1:]]

    head, *rest = lines("pci0000:00")
    return "\n".join([f"-[0000:00]-{head}", *(" " * 11 + line for line in rest)]) + "\n"


@given(trees())
def test_a_random_lspci_tree_reads_back(tree: list[tuple[str, str, bool]]) -> None:
    tree = [
        (address, parent, bridge and any(other[1] == address for other in tree)) for address, parent, bridge in tree
    ]
    facts = read_tree(drawn(tree), "t")
    assert {fact.bus_id: fact.parent for fact in facts.pci} == {address: parent for address, parent, _ in tree}


@given(trees())
def test_the_same_tree_from_the_bus_numbers_of_lspci_vv(tree: list[tuple[str, str, bool]]) -> None:
    tree = [
        (address, parent, bridge and any(other[1] == address for other in tree)) for address, parent, bridge in tree
    ]
    blocks = []
    for address, _, bridge in tree:
        title = "PCI bridge [0604]: Example" if bridge else "3D controller [0302]: NVIDIA Corporation Example"
        blocks.append(f"{address} {title}")
        if bridge:
            first = next(other for other, parent, _ in tree if parent == address)[5:7]
            blocks.append(f"\tBus: primary={address[5:7]}, secondary={first}, subordinate=ff, sec-latency=0")
    facts = read_lspci("\n".join(blocks) + "\n", "t")
    expected = {address: parent for address, parent, _ in tree} if any(bridge for *_, bridge in tree) else {}
    assert {fact.bus_id: fact.parent for fact in facts.pci if fact.parent} == expected


@given(st.integers(1, 12), st.data())
def test_a_random_rocm_text_reads_back(gpus: int, data: st.DataObject) -> None:
    cells = {pair: data.draw(st.sampled_from(["XGMI", "PCIE"])) for pair in combinations(range(gpus), 2)}
    numa = [data.draw(st.integers(0, 3)) for _ in range(gpus)]
    head = "       " + "".join(f"{f'GPU{at}':<13}" for at in range(gpus))
    rows = [
        f"GPU{a:<3} " + "".join(f"{'0' if a == b else cells[min(a, b), max(a, b)]:<13}" for b in range(gpus))
        for a in range(gpus)
    ]
    text = "\n".join(
        ["===== Weight between two GPUs =====", head, *(f"GPU{a} " + "0 " * gpus for a in range(gpus)), ""]
        + ["===== Link Type between two GPUs =====", head, *rows, "", "===== Numa Nodes ====="]
        + [f"GPU[{at}]\t\t: (Topology) Numa Node: {node}" for at, node in enumerate(numa)]
    )
    facts = read_rocm(text, "r")
    assert facts.matrix is not None
    assert all(facts.matrix.cell(f"GPU{a}", f"GPU{b}") == cell for (a, b), cell in cells.items())
    assert [row.numa for row in facts.matrix.affinity] == [str(node) for node in numa]
    assert not facts.truncated


def test_names_of_nvidia_smi_l_join_the_matrix() -> None:
    facts = read_text("GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-x)\nGPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-y)\n", "l")
    assert facts.gpu_names == ((0, "NVIDIA A100-SXM4-80GB"), (1, "NVIDIA A100-SXM4-80GB"))


@pytest.mark.parametrize(
    "around",
    [
        "GPU 0: NVIDIA H20 (UUID: GPU-x)\nGPU 1: NVIDIA H20 (UUID: GPU-y)\n",
        "GPU 0,1: NVIDIA H20\nGPU 0,1 Compute Capability: 9.0\n",
        (
            "| GPU  Name                 Persistence-M | Bus-Id        Disp.A | Volatile Uncorr. ECC |\n"
            "|   0  NVIDIA H20                     On  | 00000000:0A:00.0 Off |                    0 |\n"
            "|   1  NVIDIA H20                     On  | 00000000:18:00.0 Off |                    0 |\n"
        ),
    ],
)
def test_products_are_read_from_what_people_paste_around_a_matrix(around: str) -> None:
    matrix = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\t0-47\t0\nGPU1\tNV18\t X \t0-47\t0\n"
    facts = read_text(f"{around}NVIDIA Topology:\n{matrix}", "m")
    assert facts.format == "nvidia-smi topo -m"
    assert facts.gpu_names == ((0, "NVIDIA H20"), (1, "NVIDIA H20"))
