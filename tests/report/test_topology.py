import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from kvbench.core.graph import Graph
from kvbench.report import topology_export
from kvbench.report.topology import html, terminal
from kvbench.report.topology_picture import machine_svg
from kvbench.results.document import Document, new_document
from kvbench.results.host import Host
from kvbench.results.topology import TopologyResult
from kvbench.topo.discover import PROVENANCE, Sources, discover, doubts
from tests.topo.shared_texts import DATA

Draw = Callable[..., Document[TopologyResult]]


@pytest.fixture
def topology(host: Host) -> Draw:
    def made(*names: str, **options: str) -> Document[TopologyResult]:
        result = discover(Sources(files=tuple(DATA / name for name in names)), **options)  # type: ignore[arg-type]
        return new_document(
            result, command_line=("kvbench", "topo"), provenance=PROVENANCE, warnings=doubts(result), host=host
        )

    return made


def printed(document: Document[TopologyResult], width: int) -> str:
    out = StringIO()
    terminal(document, Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "name", sorted(p.name for p in DATA.iterdir() if p.suffix in {".txt", ".xml"} and p.name != "gdsio.txt")
)
def test_no_line_is_wider_than_the_terminal(topology: Draw, name: str, width: int) -> None:
    assert all(len(line) <= width for line in printed(topology(name), width).splitlines())


def test_the_matrix_has_the_familiar_words_with_rates_beside(topology: Draw) -> None:
    text = printed(topology("lspci-vv.txt"), 100)
    assert re.search(r"^GPU0 +X +PIX 28 +PIX 55", text, flags=re.MULTILINE)
    text = printed(topology("dgx-8gpu.txt", gpu="h100"), 160)
    row = next(line for line in text.splitlines() if line.startswith("GPU0  "))
    assert row.split()[:4] == ["GPU0", "X", "NV18", "371"]
    assert "PIX ≤55" in row


def test_without_any_rate_the_ceilings_are_one_line(topology: Draw) -> None:
    text = " ".join(printed(topology("dgx-8gpu.txt"), 160).split())
    assert "every load ? ? ? neither link speed nor GPU model is in the input" in text
    assert text.count("alone, from near DRAM") == 0


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (("dgx-8gpu.txt",), {"gpu": "h100"}, "One GPU loads at most 55.43 GB/s"),
        (("dgx-8gpu.txt",), {"gpu": "h100", "dram": "8xDDR5-4800"}, "One GPU loads about 55.43 GB/s"),
        (("dgx-8gpu.txt",), {"gpu": "h100", "dram": "1xDDR5-4800"}, "One GPU loads at most 38.40 GB/s"),
    ],
)
def test_the_answer_says_whether_it_is_a_bound(
    topology: Draw, names: tuple[str, ...], options: dict[str, str], words: str
) -> None:
    assert printed(topology(*names, **options), 160).startswith(words)


def test_one_gpu_is_not_each(tmp_path: Path, host: Host) -> None:
    path = tmp_path / "m.txt"
    path.write_text("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-7\t0\n")
    result = discover(Sources(files=(path,)), gpu="h100")
    document = new_document(result, command_line=("kvbench",), provenance=PROVENANCE, host=host)
    assert "the GPU, from its near DRAM" in printed(document, 160)
    assert "the GPU, each" not in printed(document, 160)


def test_the_tree_shows_what_hangs_where(topology: Draw) -> None:
    lines = printed(topology("lspci-t.txt", "lspci-vv.txt"), 120).splitlines()
    start = lines.index("The machine")
    tree = lines[start + 1 : start + 10]
    assert tree[0] == "machine"
    assert tree[1] == "└─ NUMA node 0"
    assert any("root port 16:01.0" in line for line in tree)
    assert any("GPU1" in line and "Gen5 x8" in line for line in tree)


def test_the_picture_is_well_formed_and_marks_the_bottleneck(topology: Draw) -> None:
    for names, options in (
        (("dgx-8gpu.txt",), {"gpu": "h100"}),
        (("off-fabric.txt",), {}),
        (("hwloc.xml",), {}),
        (("rocm.txt",), {}),
        (("lspci-vv.txt",), {}),
        (("peers-refused.txt",), {}),
    ):
        document = topology(*names, **options)
        graph = Graph(document.result.machine)
        limits = next(
            (c.limits for c in document.result.ceilings if c.scenario == "all-near" and c.basis == "expected"), ()
        )
        svg = machine_svg(graph, limits, "t")
        root = ElementTree.fromstring(svg)
        texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
        assert {f"GPU{at}" for at in range(len(graph.of_kind("gpu")))} <= texts
        drawn = [link for link in limits if not link.endswith(tuple(f"numa{at}" for at in range(9)))]
        assert svg.count('stroke="var(--bad, #b3261e)"') >= len(drawn) + 1  # and the one in the legend


def test_a_gpu_without_nvlink_is_marked_in_the_picture(topology: Draw) -> None:
    assert "no NVLink" in machine_svg(Graph(topology("off-fabric.txt").result.machine), (), "t")


def test_boxes_of_one_picture_do_not_overlap(topology: Draw) -> None:
    svg = machine_svg(Graph(topology("dgx-8gpu.txt", gpu="h100").result.machine), (), "t")
    root = ElementTree.fromstring(svg)
    boxes = [
        tuple(float(element.get(name) or 0) for name in ("x", "y", "width", "height"))
        for element in root.iter("{http://www.w3.org/2000/svg}rect")
        if element.get("rx") == "6"
    ]
    assert len(boxes) == 8 + 8 + 12  # GPUs, NICs and the switches of four trees
    for at, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, other_width, other_height in boxes[at + 1 :]:
            apart = (
                x + width <= other_x
                or other_x + other_width <= x
                or y + height <= other_y
                or other_y + other_height <= y
            )
            assert apart


def test_the_page_shows_findings_matrix_and_limits(topology: Draw) -> None:
    page = html(topology("off-fabric.txt", gpu="h100"))
    assert "gpu-off-fabric" in page
    assert "What load-vs-recompute --topo takes from here" in page
    assert page.count("<svg") == 1


def test_a_name_with_markup_stays_text(tmp_path: Path, host: Host) -> None:
    path = tmp_path / "m.txt"
    path.write_text(
        "\tGPU0\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPIX\t0-7\t0\nNIC0\tPIX\t X \n\nNIC Legend:\n\n"
        '  NIC0: <script>alert("x")</script>\n'
    )
    result = discover(Sources(files=(path,)))
    document = new_document(result, command_line=("kvbench",), provenance=PROVENANCE, host=host)
    assert "<script>alert" not in html(document)
    assert "<script>" not in topology_export.mermaid(result)


def test_exports_have_one_edge_per_link(topology: Draw) -> None:
    result = topology("dgx-8gpu.txt", gpu="h100").result
    mermaid, dot = topology_export.mermaid(result), topology_export.dot(result)
    edges = [line for line in mermaid.splitlines() if " --- " in line or " ---|" in line]
    assert len(edges) == len(result.machine.links)
    assert "linkStyle" in mermaid
    assert sum(" -- " in line for line in dot.splitlines()) == len(result.machine.links)
    ids = re.findall(r"^    (n_\w+)\[", mermaid, flags=re.MULTILINE)
    assert len(ids) == len(set(ids)) == len(result.machine.nodes)
