"""Puts what people already measured on the links: nvbandwidth -j, nccl-tests -J, fio JSON, perftest JSON, gdsio lines.

A gdsio line:

    IoType: READ XferType: GPUD Threads: 8 DataSetSize: 8388608/8388608(KiB) IOSize: 1024(KiB) Throughput: 5.51 GiB/sec,
    Avg_Latency: 1417.62 usecs ops: 8192 total_time 1.45 secs
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import Direction, Graph, Link, Rate
from kvbench.core.provenance import Origin
from kvbench.core.units import GIB, MIB, format_bytes
from kvbench.results.topology import Absent, GroupMeasurement, LinkMeasurement

Found = LinkMeasurement | GroupMeasurement | Absent
_MOST_BYTES = 32 * MIB
_GIGA = 1e9
_GBIT = 1e9 / 8
_UNIT_TOLERANCE = 0.05
_KNOWN = "nvbandwidth -j, nccl-tests -J, fio --output-format=json, perftest --out_json, or gdsio lines"


def read_measurements(
    paths: Sequence[Path], graph: Graph
) -> tuple[tuple[LinkMeasurement, ...], tuple[GroupMeasurement, ...], tuple[Absent, ...]]:
    """Figures on links, figures of whole groups, and what had no link to go to, with the reason."""
    found = [item for path in paths for item in _read(path, graph)]
    return (
        tuple(item for item in found if isinstance(item, LinkMeasurement)),
        tuple(item for item in found if isinstance(item, GroupMeasurement)),
        tuple(item for item in found if isinstance(item, Absent)),
    )


def _read(path: Path, graph: Graph) -> Iterator[Found]:
    text = _text(path)
    if not text.lstrip().startswith("{"):
        if "IoType:" in text:
            yield from _gdsio(text, path.name, graph)
            return
        raise KvbenchError(f"{path}: is none of the measurements that --import reads ({_KNOWN})")
    body = _json(text, path)
    readers: tuple[tuple[bool, Callable[[Any, str, Graph], Iterator[Found]]], ...] = (
        ("nvbandwidth" in body, _nvbandwidth),
        ("jobs" in body and "fio version" in body, _fio),
        ("test_info" in body and "results" in body, _perftest),
        ("nccl_version" in body or "average_bus_bandwidth" in body, _nccl),
    )
    for matches, reader in readers:
        if matches:
            try:
                yield from reader(body, path.name, graph)
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise KvbenchError(
                    f"{path}: not laid out as its tool writes it ({type(error).__name__}: {error}); give the "
                    "unchanged file"
                ) from error
            return
    raise KvbenchError(f"{path}: JSON of none of the tools that --import reads ({_KNOWN})")


def _text(path: Path) -> str:
    try:
        if not path.is_dir() and path.exists() and not path.is_file():
            raise KvbenchError(f"{path}: is no regular file, and reading it might never end; save it in a file")
        if path.stat().st_size > _MOST_BYTES:
            raise KvbenchError(f"{path}: larger than {format_bytes(_MOST_BYTES)}; that is no measurement summary")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise KvbenchError(
            f"{path}: cannot be read ({error.strerror or error}); name a file a benchmark wrote"
        ) from error


_UNQUOTED = re.compile(r'(:\s*)([A-Za-z][^",{}\[\]\n]*?)(\s*[,}\n])')
_WORDS = frozenset({"true", "false", "null", "NaN", "Infinity"})


def _json(text: str, path: Path) -> dict[str, Any]:
    """The object; some perftest versions leave strings unquoted, and that is repaired."""
    error: ValueError | RecursionError | None = None
    for attempt in (text, _UNQUOTED.sub(_quoted, text)):
        try:
            body = json.loads(attempt)
        except (ValueError, RecursionError) as failed:
            error = error or failed
            continue
        if isinstance(body, dict):
            return body
    where = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
    raise KvbenchError(f"{path}{where}: not readable as JSON ({error or 'not an object'}); give the whole file")


def _quoted(match: re.Match[str]) -> str:
    word = match[2]
    return match[0] if word in _WORDS else f"{match[1]}{json.dumps(word)}{match[3]}"


def _rate(bytes_per_s: float, source: str) -> Rate:
    if not math.isfinite(bytes_per_s) or bytes_per_s <= 0:
        raise ValueError(f"bandwidth {bytes_per_s} is not above zero")
    return Rate(bytes_per_s=bytes_per_s, origin=Origin(provenance="measured", source=source))


# -- nvbandwidth ------------------------------------------------------------------------------------------------------

_HOST = re.compile(r"(host_to_device|device_to_host)_memcpy_(ce|sm)")
_PEER = re.compile(r"device_to_device_memcpy_(read|write)_(ce|sm)")


def _nvbandwidth(body: Any, source: str, graph: Graph) -> Iterator[Found]:
    """Host copies go on each GPU's own host link, GPU copies on the pair's NVLink; cells are strings in GB/s."""
    run = body["nvbandwidth"]
    version = run.get("version", "unknown version")
    for case in run["testcases"]:
        name, status = case["name"], case.get("status", "Passed")
        what = f"nvbandwidth {version} {name}"
        if status != "Passed":
            yield Absent(what=f"{source} {name}", reason=f"nvbandwidth says {status}")
            continue
        matrix = case.get("bandwidth_matrix", [])
        if _HOST.fullmatch(name):
            yield from _host_copies(matrix, name.startswith("host"), what, source, graph)
        elif _PEER.fullmatch(name):
            yield from _peer_copies(matrix, "_read_" in name, what, source, graph)
        else:
            values = [value for row in matrix for cell in row if (value := _cell(cell)) is not None]
            if values and "latency" not in name:
                rate = _rate(max(values) * _GIGA, f"{source}: {what}")
                yield GroupMeasurement(
                    what=f"{what}, best cell of {len(values)}", bytes_per_s=rate.bytes_per_s, origin=rate.origin
                )


def _cell(cell: Any) -> float | None:
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) and value > 0 else None


def _host_copies(matrix: Any, load: bool, what: str, source: str, graph: Graph) -> Iterator[Found]:
    for index, cell in enumerate(matrix[0] if matrix else ()):
        value = _cell(cell)
        link = graph.host_link(f"gpu{index}") if f"gpu{index}" in graph.nodes else None
        if value is None:
            continue
        if link is None:
            yield Absent(what=f"{source} {what} GPU{index}", reason=f"this machine has no GPU{index}")
            continue
        yield LinkMeasurement(
            link=link.id,
            direction=_toward(link, f"gpu{index}") if load else _from(link, f"gpu{index}"),
            rate=_rate(value * _GIGA, f"{source}: {what}"),
            what=what,
        )


def _toward(link: Link, node: str) -> Direction:
    return "backward" if link.a == node else "forward"


def _from(link: Link, node: str) -> Direction:
    return "forward" if link.a == node else "backward"


def _peer_copies(matrix: Any, read: bool, what: str, source: str, graph: Graph) -> Iterator[Found]:
    """Row and column are devices; the bytes of a read run from column to row, those of a write from row to column."""
    for row, cells in enumerate(matrix):
        for column, cell in enumerate(cells):
            value = _cell(cell)
            giver, taker = (column, row) if read else (row, column)
            if value is None or row == column:
                continue
            for link in graph.between(f"gpu{giver}", f"gpu{taker}", "nvlink", "xgmi"):
                yield LinkMeasurement(
                    link=link.id,
                    direction=_from(link, f"gpu{giver}"),
                    rate=_rate(value * _GIGA, f"{source}: {what}"),
                    what=what,
                )
            yield from _into_fabric(graph, f"gpu{giver}", value, what, source)


def _into_fabric(graph: Graph, gpu: str, value: float, what: str, source: str) -> Iterator[Found]:
    links = (
        [link for link in graph.across(gpu, "nvlink") if graph.nodes[link.b].kind == "nvswitch"]
        if gpu in graph.nodes
        else []
    )
    if len(links) == 1:  # one node stands for the whole fabric; several NVSwitches would need a share each
        rate = _rate(value * _GIGA, f"{source}: {what}")
        yield LinkMeasurement(link=links[0].id, direction="forward", rate=rate, what=what)
        yield LinkMeasurement(link=links[0].id, direction="backward", rate=rate, what=what)


# -- nccl-tests -------------------------------------------------------------------------------------------------------


def _nccl(body: Any, source: str, _graph: Graph) -> Iterator[Found]:
    """The best bus bandwidth over all sizes; the average over sizes that the tool prints says nothing about a link."""
    arguments = [str(word) for word in body.get("args", [])]
    name = next((found[0] for word in arguments if (found := re.search(r"[a-z_]+_perf", word))), "collective")
    best: tuple[float, int] | None = None
    for result in body["results"]:
        for place in ("out_of_place", "in_place"):
            value = _cell(result.get(place, {}).get("bus_bw"))
            if value is not None and (best is None or value > best[0]):
                best = (value, int(result["size"]))
    if best is None:
        yield Absent(what=source, reason="nccl-tests recorded no bus bandwidth")
        return
    ranks = len(body.get("devices", [])) or "?"
    yield GroupMeasurement(
        what=f"nccl-tests {name}, {ranks} ranks, bus bandwidth at {format_bytes(best[1])}",
        bytes_per_s=best[0] * _GIGA,
        origin=Origin(provenance="measured", source=f"{source}: nccl-tests -J, best of all sizes"),
    )


# -- fio --------------------------------------------------------------------------------------------------------------


def _fio(body: Any, source: str, graph: Graph) -> Iterator[Found]:
    """Reads and writes of all jobs together, on the disk that fio names in disk_util or in the file name."""
    names = [str(disk.get("name", "")) for disk in body.get("disk_util", [])]
    for job in body["jobs"]:
        names += re.findall(r"/dev/([\w-]+)", str(job.get("job options", {}).get("filename", "")))
    names += re.findall(r"/dev/([\w-]+)", str(body.get("global options", {}).get("filename", "")))
    disk = next((found for name in names if (found := _disk_named(graph, name)) is not None), None)
    directions: tuple[tuple[str, Direction], ...] = (("read", "forward"), ("write", "backward"))
    for operation, direction in directions:
        total = sum(float(job[operation]["bw_bytes"]) for job in body["jobs"] if operation in job)
        if total <= 0:
            continue
        what = f"{body['fio version']} {operation}, {len(body['jobs'])} job{'s' if len(body['jobs']) > 1 else ''}"
        rate = _rate(total, f"{source}: {what}")
        if disk is None:
            reason = f"fio names {', '.join(names) or 'no disk'}, which is no disk of this machine"
            yield Absent(what=f"{source} {operation}", reason=reason)
        else:
            yield LinkMeasurement(link=disk.id, direction=direction, rate=rate, what=what)


def _disk_named(graph: Graph, name: str) -> Link | None:
    base = re.sub(r"(?<=\d)p\d+$", "", name)  # nvme0n1p2 is a part of nvme0n1
    for disk in graph.of_kind("disk"):
        names = disk.name.split(", ")
        if name in names or base in names or re.sub(r"\d+$", "", name) in names:
            return graph.uplink(disk.id)
    return None


# -- perftest ---------------------------------------------------------------------------------------------------------


def _perftest(body: Any, source: str, graph: Graph) -> Iterator[Found]:
    """The average bandwidth on the port of the device. Messages per second tell MiB/s and Gb/s apart."""
    results, info = body["results"], body["test_info"]
    size, average = float(results["MsgSize"]), float(results["BW_average"])
    messages = float(results.get("MsgRate") or 0) * 1e6 * size
    units = {"Gb/s": average * _GBIT, "MiB/s": average * MIB}
    unit = min(units, key=lambda name: abs(units[name] - messages))
    if messages <= 0 or abs(units[unit] - messages) > _UNIT_TOLERANCE * units[unit]:
        raise ValueError(f"BW_average {average:g} fits MsgRate {results.get('MsgRate')} in neither Gb/s nor MiB/s")
    device = str(info.get("Device", ""))
    what = f"perftest {info.get('test', '')} on {device}, {format_bytes(size)} messages (read as {unit})"
    nic = next((node for node in graph.of_kind("nic") if node.name == device), None)
    links = graph.across(nic.id, "network") or (graph.uplink(nic.id),) if nic is not None else ()
    if not links:
        yield Absent(what=f"{source} {device}", reason=f"{device or 'the device'} is no NIC of this machine")
    for link in links:
        if link is not None:
            yield LinkMeasurement(
                link=link.id,
                direction="backward" if link.kind == "network" else "forward",
                rate=_rate(units[unit], f"{source}: {what}"),
                what=what,
            )


# -- gdsio ------------------------------------------------------------------------------------------------------------

_GDSIO = re.compile(
    r"IoType: (\w+) XferType: (\w+) Threads: (\d+) .{0,120}?Throughput: ([\d.]+) GiB/sec, Avg_Latency: ([\d.]+)"
)


def _gdsio(text: str, source: str, graph: Graph) -> Iterator[Found]:
    """Each line; the disk is not named in it, so a figure goes on a link only where the machine has one disk."""
    disks = [disk for disk in graph.of_kind("disk") if disk.medium == "NVMe"]
    found = False
    for number, line in enumerate(text.splitlines(), start=1):
        match = _GDSIO.search(line[:1000])
        if match is None:
            continue
        found = True
        what = f"gdsio {match[1]} {match[2]}, {match[3]} thread{'s' if match[3] != '1' else ''}"
        rate = _rate(float(match[4]) * GIB, f"{source}:{number}: {what}")
        link = graph.uplink(disks[0].id) if len(disks) == 1 else None
        if link is not None:
            way: Direction = "forward" if match[1].upper().endswith("READ") else "backward"
            yield LinkMeasurement(link=link.id, direction=way, rate=rate, what=what)
        else:
            yield GroupMeasurement(what=what, bytes_per_s=rate.bytes_per_s, origin=rate.origin)
    if not found:
        raise KvbenchError(
            f"{source}: no gdsio result line (IoType: … Throughput: … GiB/sec); give gdsio's whole output"
        )
