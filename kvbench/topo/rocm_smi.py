"""Reads `rocm-smi --showtopo` text: weights, hops, link types between GPUs, and their NUMA nodes.

============================ Link Type between two GPUs ============================
       GPU0         GPU1
GPU0   0            XGMI
GPU[0]          : (Topology) Numa Node: 0
"""

import re
from collections.abc import Sequence

from kvbench.core.errors import KvbenchError
from kvbench.topo.facts import Affinity, Facts, MatrixFact

_SECTION = re.compile(r"=+ *(.{1,60}?) *=+")
_NUMA = re.compile(r"GPU\[(\d{1,4})\]\s*:\s*\(Topology\) Numa Node: (-?\d{1,4})")
_LABELS = re.compile(r"\s*GPU\d{1,4}(?:\s+GPU\d{1,4})*\s*")
_MOST_GPUS = 256


def looks_like_rocm(text: str) -> bool:
    """Whether the text has a section of --showtopo near its start."""
    head = text[:20000]
    return "between two GPUs" in head or "(Topology) Numa Node" in head


def read_rocm(text: str, source: str) -> Facts:
    """The link types as a matrix with the cells `XGMI` and `PCIE`, and the NUMA node of each GPU."""
    sections = _sections(text)
    labels, cells, cut = _matrix(sections.get("Link Type between two GPUs", ()), source)
    numa = {int(match[1]): match[2] for match in map(_NUMA.match, text.splitlines()) if match}
    if not labels:
        labels = tuple(f"GPU{index}" for index in sorted(numa)[:_MOST_GPUS])
        cells = tuple(tuple("X" if row == column else None for column in labels) for row in labels)
        cut = True
    if not labels:
        raise KvbenchError(f"{source}: no GPU in the rocm-smi text; give the output of rocm-smi --showtopo")
    missing = [label for label in labels if int(label[3:]) not in numa]
    notes = ["the section of link types is incomplete"] if cut else []
    notes += [f"no NUMA node for {', '.join(missing[:4])}; the text ends early"] if missing else []
    return Facts(
        format="rocm-smi --showtopo",
        source=source,
        matrix=MatrixFact(
            labels=labels,
            cells=cells,
            affinity=tuple(
                Affinity(
                    label=label, cpus=None, numa=_known(numa.get(int(label[3:]))), gpu_numa=None, cut=label in missing
                )
                for label in labels
            ),
        ),
        truncated=cut or bool(missing),
        notes=tuple(notes),
    )


def _known(numa: str | None) -> str | None:
    return None if numa is None or numa.startswith("-") else numa


def _sections(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        match = _SECTION.fullmatch(line.strip()[:200])
        if match:
            current = found.setdefault(match[1], [])
        else:
            current.append(line[:16384])
    return found


def _matrix(lines: Sequence[str], source: str) -> tuple[tuple[str, ...], tuple[tuple[str | None, ...], ...], bool]:
    header = next((line for line in lines if _LABELS.fullmatch(line)), None)
    if header is None:
        return (), (), True
    labels = tuple(dict.fromkeys(header.split()))
    if len(labels) > _MOST_GPUS:
        raise KvbenchError(f"{source}: {len(labels)} GPUs; at most {_MOST_GPUS} are read, is this rocm-smi text?")
    body = [line.split() for line in lines if line is not header]
    rows = {words[0]: words[1:] for words in body if words and words[0] in labels}
    matrix: list[list[str | None]] = [[None] * len(labels) for _ in labels]
    for at, label in enumerate(labels):
        for column, cell in enumerate(rows.get(label, ())[: len(labels)]):
            matrix[at][column] = "X" if at == column else None if cell == "N/A" else cell
        matrix[at][at] = "X"
    cut = any(len(rows.get(label, ())) < len(labels) for label in labels)
    for at in range(len(labels)):
        for column in range(at):
            matrix[at][column] = matrix[column][at] = matrix[at][column] or matrix[column][at]
    return labels, tuple(tuple(row) for row in matrix), cut
