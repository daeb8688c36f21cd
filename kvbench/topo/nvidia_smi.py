"""Reads `nvidia-smi topo -m`, `topo -p2p`, `-L` and `--query-gpu` as drivers print them and people paste them.

A row of `topo -m`, columns apart by tabs, or by blanks once pasted:

    GPU0     X      NV18    PIX     NODE    0-47,96-143     0               N/A
"""

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import PcieState
from kvbench.core.provenance import Origin
from kvbench.core.units import MIB, format_bytes
from kvbench.topo.facts import Affinity, Facts, MatrixFact, PciFact, bus_id
from kvbench.topo.numbers import generation_rate

MOST_LABELS = 512
_MOST_LINE = 16384
_LOOKED_AT = 1 << 20
MOST_MATRIX_BYTES = 2 * MIB  # 512 devices print less
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_FUSED_LABELS = re.compile(r"(?:(?:GPU|NIC)\d{1,4}){2,}")
_LABEL = re.compile(r"(?:GPU|NIC)\d{1,4}")
_ROW = re.compile(r"\s*([A-Za-z][\w.\-:]{0,63})(\s.*)")
_TAIL_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_CELL = re.compile(r"\s*(X(?![A-Za-z0-9])|NV\d{1,2}(?![0-9])|PIX|PXB|PHB|NODE|SYS|SOC)")
_PEER_CELL = re.compile(r"\s*(X(?![A-Za-z0-9])|OK|CNS|GNS|TNS|NS|DR|U(?![A-Za-z0-9]))")
_NIC_NAME = re.compile(r"\s*(NIC\d{1,4}):\s*(\S{1,64})\s*")
_GPU_TABLE = re.compile(
    r"\|\s{1,4}(\d{1,4})  (\S.{1,40}?)\s{2,30}(?:On|Off|N/A)\s{0,4}\|\s{1,4}[0-9A-Fa-f:.]{7,16}\s.{0,80}"
)
_GPU_REPORT = re.compile(r"\s*GPU (\d{1,4}(?:,\d{1,4}){0,63}): (NVIDIA .{1,60})")
_GPU_LINE = re.compile(r"\s*GPU (\d{1,4}): (.{1,80}?) \(UUID: ?[^)]{0,80}\)?\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    line: int
    label: str
    cells: tuple[str, ...]
    tail: str
    tabs: bool


def looks_like_matrix(text: str) -> bool:
    """Whether some line of the text starts like a matrix row or header."""
    return any(_row(line, 0, _CELL) or _header(line) for line in _lines(text[:_LOOKED_AT])[:400])


def looks_like_gpu_list(text: str) -> bool:
    """Whether the text starts with lines of `nvidia-smi -L`."""
    return any(_GPU_LINE.fullmatch(line) for line in _lines(text[:_LOOKED_AT])[:64])


def looks_like_query(text: str) -> bool:
    """A CSV of `nvidia-smi --query-gpu` that names index and bus id."""
    head = text.lstrip("\ufeff \r\n").split("\n", 1)[0].lower()
    return "pci.bus_id" in head and "index" in head and "," in head


def read_gpu_list(text: str, source: str) -> Facts:
    """The names of `nvidia-smi -L`: `GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-…)`."""
    return Facts(format="nvidia-smi -L", source=source, gpu_names=_gpu_names(_lines(text)))


def read_matrix(text: str, source: str) -> Facts:
    """A `topo -m` or `topo -p2p` matrix; what a cut text still holds is kept, and `truncated` says so."""
    if len(text) > MOST_MATRIX_BYTES:
        raise KvbenchError(
            f"{source}: {format_bytes(len(text))} is too large for a matrix (at most {format_bytes(MOST_MATRIX_BYTES)} "
            "is read); give only the output of nvidia-smi topo -m"
        )
    lines = _lines(text)
    header = next((found for found in (_header(line) for line in lines) if found), None)
    rows = _rows(lines, _CELL)
    if any(cell != "X" for row in rows for cell in row.cells) or not _rows(lines, _PEER_CELL):
        if not rows:
            raise KvbenchError(
                f"{source}: a matrix header, but no row with PIX, PXB, PHB, NODE, SYS or NV# cells; "
                "give the whole output of nvidia-smi topo -m"
            )
        return _topo(rows, header, lines, source)
    peer_rows = _rows(lines, _PEER_CELL)
    if all(set(row.cells) <= {"X"} for row in peer_rows):  # one GPU: a lone X means the same in both matrices
        return _topo(rows, header, lines, source)
    labels, cells, notes, cut = _square(peer_rows, header.labels if header else None, source)
    return Facts(
        format="nvidia-smi topo -p2p",
        source=source,
        peers=MatrixFact(labels=labels, cells=cells),
        truncated=cut,
        notes=notes,
    )


def _topo(rows: Sequence[_Row], header: "_Header | None", lines: Sequence[str], source: str) -> Facts:
    labels, cells, notes, cut = _square(rows, header.labels if header else None, source)
    affinity = _affinities(rows, labels, header.tail if header else None, last=len(lines))
    names = tuple(
        (match[1], match[2]) for match in (_NIC_NAME.fullmatch(line) for line in lines) if match and match[1] in labels
    )
    return Facts(
        format="nvidia-smi topo -m",
        source=source,
        matrix=MatrixFact(
            labels=labels,
            cells=cells,
            affinity=affinity,
            nic_names=names,
            has_cpu_column=header is None or "CPU Affinity" in header.tail,
        ),
        gpu_names=_gpu_names(lines),
        truncated=cut,
        notes=notes,
    )


def _lines(text: str) -> list[str]:
    return [_ESCAPE.sub("", line.rstrip("\r"))[:_MOST_LINE] for line in text.split("\n")]


def _gpu_names(lines: Sequence[str]) -> tuple[tuple[int, str], ...]:
    """Products by number, from what people paste around a matrix: `-L`, the table of nvidia-smi, or an engine's
    environment report (`GPU 0,1: NVIDIA H20`).
    """
    found: dict[int, str] = {}
    for line in lines:
        for pattern in (_GPU_LINE, _GPU_TABLE, _GPU_REPORT):
            if match := pattern.fullmatch(line):
                for index in match[1].split(","):
                    found.setdefault(int(index), match[2])
                break
    return tuple(sorted(found.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    labels: tuple[str, ...]
    tail: tuple[str, ...]


def _header(line: str) -> _Header | None:
    """Labels and tail columns of a header line; it may have lost its indent and holds no cell."""
    body, tail = line, []
    for column in _TAIL_COLUMNS:
        at = body.find(column)
        if at >= 0:
            tail.append((at, column))
    if tail:
        body = body[: min(at for at, _ in tail)]
    words: list[str] = []
    for word in body.split():
        words += _LABEL.findall(word) if _FUSED_LABELS.fullmatch(word) else [word]
    if not words or not words[0].startswith("GPU") or not _LABEL.fullmatch(words[0]):
        return None
    if any(not re.fullmatch(r"[A-Za-z](?=.*[\d_])[\w.\-:]{0,63}", word) or _CELL.fullmatch(word) for word in words):
        return None
    if any(_PEER_CELL.fullmatch(word) for word in words) or (len(words) == 1 and not tail):
        return None
    return _Header(labels=tuple(dict.fromkeys(words)), tail=tuple(column for _, column in sorted(tail)))


def _rows(lines: Sequence[str], cell: re.Pattern[str]) -> tuple[_Row, ...]:
    found: dict[str, _Row] = {}
    for number, line in enumerate(lines, start=1):
        row = _row(line, number, cell)
        if row is not None:
            found.setdefault(row.label, row)
    return tuple(found.values())


def _row(line: str, number: int, cell: re.Pattern[str]) -> _Row | None:
    match = _ROW.fullmatch(line)
    if match is None or match[1] in {"X", "Legend"}:
        return None
    rest, at = match[2], 0
    cells: list[str] = []
    while len(cells) <= MOST_LABELS and (token := cell.match(rest, at)):
        cells.append(token[1])
        at = token.end()
    if not cells or (at < len(rest) and rest[at : at + 1] not in {" ", "\t"} and not rest[at].isdigit()):
        return None
    return _Row(line=number, label=match[1], cells=tuple(cells), tail=rest[at:], tabs="\t" in line.strip())


def _square(
    rows: Sequence[_Row], header: tuple[str, ...] | None, source: str
) -> tuple[tuple[str, ...], tuple[tuple[str | None, ...], ...], tuple[str, ...], bool]:
    """Labels, the symmetric matrix, remarks, and whether something is missing."""
    notes: list[str] = []
    labels = header or _labels_without_header(rows)
    if header is None:
        notes.append("no header line: columns are named by the diagonal and by position, GPUs first")
    if len(labels) > MOST_LABELS:
        raise KvbenchError(f"{source}: {len(labels)} matrix columns; at most {MOST_LABELS} are read, is this a matrix?")
    by_label = {row.label: row for row in rows if row.label in labels}
    matrix: list[list[str | None]] = [[None] * len(labels) for _ in labels]
    for row_at, label in enumerate(labels):
        row = by_label.get(label)
        for column, cell in enumerate(_whole_cells(row, len(labels)) if row else ()):
            matrix[row_at][column] = "SYS" if cell == "SOC" else cell
    short = [row.label for row in by_label.values() if len(row.cells) < len(labels)]
    missing = [label for label in labels if label not in by_label]
    _check_cells(matrix, labels, by_label, source)
    for row_at in range(len(labels)):
        matrix[row_at][row_at] = "X"
        for column in range(row_at):
            here, there = matrix[row_at][column], matrix[column][row_at]
            matrix[row_at][column] = matrix[column][row_at] = here or there
    if short:
        notes.append(f"row {', '.join(short)} is cut short")
    if missing:
        notes.append(f"{len(missing)} of {len(labels)} rows are missing ({_few(missing)}); taken from the other rows")
    return labels, tuple(tuple(row) for row in matrix), tuple(notes), bool(short or missing)


def _whole_cells(row: _Row, width: int) -> tuple[str, ...]:
    """The row's cells; where it is cut right behind NV1, that may have been NV18, so the cell is left out."""
    if len(row.cells) < width and not row.tail and row.cells[-1].startswith("NV"):
        return row.cells[:-1]
    return row.cells[:width]


def _check_cells(
    matrix: Sequence[Sequence[str | None]], labels: Sequence[str], rows: dict[str, _Row], source: str
) -> None:
    for row_at, label in enumerate(labels):
        if label in rows and matrix[row_at][row_at] not in {"X", None}:
            raise KvbenchError(
                f"{source}:{rows[label].line}: row {label} has {matrix[row_at][row_at]} on its own column instead "
                "of X; was a column lost while pasting? give the raw output"
            )
        for column, other in enumerate(labels[:row_at]):
            here, there = matrix[row_at][column], matrix[column][row_at]
            if here and there and here != there:
                raise KvbenchError(
                    f"{source}:{rows[label].line}: {label} to {other} is {here}, but {other} to {label} is {there}; "
                    "the matrix must be symmetric, give the raw output"
                )


def _labels_without_header(rows: Sequence[_Row]) -> tuple[str, ...]:
    """Column names from the diagonal (`X` in the row of GPU3 names that column GPU3) and from position."""
    width = max(len(row.cells) for row in rows)
    names: list[str | None] = [None] * width
    for row in rows:
        if "X" in row.cells:
            names[row.cells.index("X")] = row.label
    gpu_columns = {
        column for row in rows for column, cell in enumerate(row.cells) if row.label.startswith("GPU") and "NV" in cell
    }
    for column in range(width):
        if names[column] is None:
            gpus = sum(1 for name in names[:column] if name and name.startswith("GPU"))
            nics = sum(1 for name in names[:column] if name and name.startswith("NIC"))
            names[column] = f"GPU{gpus}" if column in gpu_columns else f"NIC{nics}"
    return tuple(dict.fromkeys(name for name in names if name))


def _affinities(
    rows: Sequence[_Row], labels: Sequence[str], header: tuple[str, ...] | None, *, last: int
) -> tuple[Affinity, ...]:
    """The tail of every GPU's row. A row that is missing or short is cut, and so is one that ends the text (no line
    break behind it) with less in its tail than the others have.
    """
    by_label = {row.label: row for row in rows}
    most = max((len(row.tail.split()) for row in rows), default=0)
    found = []
    for label in labels:
        row = by_label.get(label)
        if not label.startswith("GPU"):
            continue
        if row is None or len(row.cells) < len(labels):
            found.append(Affinity(label=label, cpus=None, numa=None, gpu_numa=None, cut=True))
        else:
            short = row.line == last and len(row.tail.split()) < most
            found.append(replace(_affinity(row, header), cut=short))
    return tuple(found)


def _affinity(row: _Row, header: tuple[str, ...] | None) -> Affinity:
    """CPU, NUMA and GPU NUMA columns. With tabs they stand in their place; otherwise read from the right, where a
    missing token is the CPU column (a cpuset leaves it blank).
    """
    if row.tabs:
        words = [word.strip() for word in row.tail.split("\t")][1:]
        if len(words) > 3 and not words[2]:  # nvidia-smi prints an empty column before GPU NUMA ID
            del words[2]
        return _affinity_of(row.label, [*words, "", "", ""][:3])
    words = row.tail.split()
    columns = len(header) if header is not None else len(words)
    if len(words) < columns and columns > 1:
        words = [""] * (columns - len(words)) + words
    return _affinity_of(row.label, [*words, "", "", ""][:3])


def _affinity_of(label: str, words: Sequence[str]) -> Affinity:
    return Affinity(label=label, cpus=words[0] or None, numa=words[1] or None, gpu_numa=words[2] or None)


def _few(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")


_QUERY_ORIGIN = Origin(provenance="measured", source="nvidia-smi --query-gpu")


def read_query(text: str, source: str) -> Facts:
    """GPUs of `nvidia-smi --query-gpu=index,pci.bus_id,name,… --format=csv`. Its header names the columns.

    index, pci.bus_id, name, memory.total [MiB], pcie.link.gen.current, pcie.link.width.current
    0, 00000000:18:00.0, NVIDIA H100 80GB HBM3, 81559 MiB, 5, 16
    """
    rows = list(csv.reader(text.lstrip("\ufeff").splitlines(), skipinitialspace=True))
    columns = [re.sub(r" \[.*\]$", "", column.strip().lower()) for column in rows[0]]
    found = []
    for number, row in enumerate(rows[1:], start=2):
        if not any(cell.strip() for cell in row):
            continue
        values = dict(zip(columns, (cell.strip() for cell in row), strict=False))
        address = bus_id(values.get("pci.bus_id", ""))
        if address is None:
            raise KvbenchError(
                f"{source}:{number}: pci.bus_id is {values.get('pci.bus_id')!r}, not like 00000000:18:00.0; "
                "give the raw output of nvidia-smi --query-gpu"
            )
        found.append(_queried_gpu(address, values))
    return Facts(format="nvidia-smi --query-gpu", source=source, pci=tuple(found))


def _queried_gpu(address: str, values: dict[str, str]) -> PciFact:
    memory = _number(values.get("memory.total"))
    most_lane = generation_rate(_number(values.get("pcie.link.gen.max")))
    most_width = _number(values.get("pcie.link.width.max"))
    state = PcieState(
        lane_gt_per_s=generation_rate(_number(values.get("pcie.link.gen.current"))),
        width=_number(values.get("pcie.link.width.current")),
        max_lane_gt_per_s=most_lane,
        max_width=most_width,
        port_max_lane_gt_per_s=most_lane,  # "possible with this GPU and system configuration": of both ends
        port_max_width=most_width,
        origin=_QUERY_ORIGIN,
    )
    known = any(value is not None for value in (state.lane_gt_per_s, state.width))
    busy = _number(values.get("utilization.gpu"))
    return replace(
        PciFact(bus_id=address, name=values.get("name", ""), is_gpu=True),
        tool_index=_number(values.get("index")),
        memory_bytes=memory * MIB if memory is not None else None,
        state=state if known else None,
        busy=None if busy is None else busy > 0,
    )


def _number(text: str | None) -> int | None:
    match = re.match(r"\d{1,12}", text or "")
    return int(match[0]) if match else None
