"""Reads Nsight Systems sqlite exports: NCCL's NVTX ranges give the calls, kernels their streams, copies the H2D side.

Tables and columns come and go with the version and with what was traced, so each is looked for before it is used. A
kernel that hangs has no row at all: its launch is a runtime row whose correlation id has no kernel.
"""

import re
import sqlite3
import struct
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from kvbench.collectives.nccl_lines import P2P, REDOPS, REDUCING, ROOTED
from kvbench.collectives.operations import OUTSIDE_NCCL, operation
from kvbench.collectives.summary import FileSummary, Kind, Remark
from kvbench.collectives.table import LogBuilder
from kvbench.core.errors import KvbenchError

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_SYNC = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_PUSH_POP, _START_END, _DOMAIN = 59, 60, 75
_HTOD = 1
_STREAM_WAIT = 2
_NULL_STREAM = 3
_PID_SHIFT = 0x1000000
_HEADER_BYTES = 32
_FORMATS = {5: ("<i", 4), 18: ("<Q", 8), 22: ("<Q", 8), 17: ("<q", 8), 6: ("<I", 4)}
_NCCL_KERNEL = re.compile(r"^nccl(Dev|Sym|Symk)?.*Kernel", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"rank[_\-.]?(\d+)", re.IGNORECASE)
_FUNCTION = re.compile(
    r"^nccl(AllReduce|AllGather|Broadcast|Bcast|Reduce|ReduceScatter|Send|Recv|AlltoAll|AllToAll|Gather|Scatter)$"
)


@dataclass(slots=True)
class _Range:
    start: int
    end: int | None
    name: str
    values: Mapping[str, int]
    row: int
    tid: int
    group: int = 0
    stream: str | None = None


@dataclass(slots=True)
class _Database:
    connection: sqlite3.Connection
    name: str
    strings: dict[int, str] = field(default_factory=dict)
    columns: dict[str, frozenset[str]] = field(default_factory=dict)

    def has(self, table: str, *columns: str) -> bool:
        return table in self.columns and set(columns) <= self.columns[table]

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        return iter(self.connection.execute(query, values))


def read_nsys(path: Path, *, name: str) -> FileSummary:
    """The NCCL calls of every process in an export."""
    try:
        connection = sqlite3.connect(f"file:{path.resolve()}?mode=ro&immutable=1", uri=True)
        try:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return _read(connection, path, name)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise KvbenchError(
            f"{name}: not a usable sqlite database ({error}); export "
            "it again: nsys export --type=sqlite --include-blobs=true"
        ) from error


def _read(connection: sqlite3.Connection, path: Path, name: str) -> FileSummary:
    database = _Database(connection, name)
    for (table,) in list(database.rows("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")):
        quoted = str(table).replace('"', '""')
        database.columns[str(table)] = frozenset(str(row[1]) for row in database.rows(f'PRAGMA table_info("{quoted}")'))
    if not any(table in database.columns for table in ("StringIds", "NVTX_EVENTS", _KERNEL, "META_DATA_EXPORT")):
        raise KvbenchError(
            f"{name}: an sqlite database, but none that nsys wrote; export with: nsys export --type=sqlite"
        )
    if database.has("StringIds", "id", "value"):
        database.strings = dict(database.rows("SELECT id, value FROM StringIds"))
    ranges = _ranges(database)
    summary = FileSummary(path=name, format="nsys", num_bytes=path.stat().st_size, versions=_versions(database))
    hung = _attach_streams(database, ranges)
    payload = any(one.values for calls in ranges.values() for one in calls)
    summary.num_lines = sum(len(calls) for calls in ranges.values())
    if ranges and not payload:
        summary.notes.append(
            (
                "no-payload",
                f"{name} holds {summary.num_lines} NCCL ranges without payload: communicators and sizes are unknown",
                "export again: nsys export --type=sqlite --include-blobs=true --force-overwrite=true "  # noqa: ISC004
                f"--output={PurePath(name).name} {PurePath(name).stem}.nsys-rep",
            )
        )
    if not ranges:
        summary.notes.append(
            (
                "no-nvtx",
                f"{name} holds no NVTX ranges of NCCL, so the order of calls is unknown",
                "record with: nsys profile --trace=cuda,nvtx",
            )
        )
    for pid, calls in sorted(ranges.items()):
        if payload:
            _process(database, summary, pid, calls)
    summary.stream_facts += hung + _copies(database, ranges) + _outside(database)
    return summary


def _versions(database: _Database) -> tuple[str, ...]:
    if not database.has("META_DATA_EXPORT", "name", "value"):
        return ()
    wanted = {"EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION"}
    return tuple(
        f"{key} {value}" for key, value in database.rows("SELECT name, value FROM META_DATA_EXPORT") if key in wanted
    )


def _ranges(database: _Database) -> dict[int, list[_Range]]:
    """NCCL's own NVTX ranges by process, in order of start."""
    if not database.has("NVTX_EVENTS", "start", "eventType", "globalTid", "domainId"):
        return {}
    domains = _nccl_domains(database)
    if not domains:
        return {}
    columns = database.columns["NVTX_EVENTS"]
    optional = [f'"{one}"' if one in columns else "NULL" for one in ("end", "text", "textId", "binaryData", "jsonText")]
    query = (
        f"SELECT rowid, start, globalTid, domainId, {', '.join(optional)} FROM NVTX_EVENTS "
        "WHERE eventType IN (?, ?) ORDER BY start, rowid"
    )
    schemas = _schemas(database)
    by_thread: dict[int, list[_Range]] = defaultdict(list)
    for row, start, tid, domain, end, text, text_id, blob, json_text in database.rows(query, (_PUSH_POP, _START_END)):
        if (_pid(tid), domain) not in domains:
            continue
        label = str(text if text is not None else database.strings.get(text_id, ""))
        if label.startswith("nccl"):
            by_thread[tid].append(_Range(start, end, label, _payload(blob, json_text, schemas), row, tid))
    by_pid: dict[int, list[_Range]] = defaultdict(list)
    for tid, calls in by_thread.items():
        _mark_groups(calls)
        by_pid[_pid(tid)] += calls
    for calls in by_pid.values():
        calls.sort(key=lambda one: (one.start, one.row))
    return dict(by_pid)


def _pid(global_id: int) -> int:
    """The process id in the target's namespace: hardware, VM, process and thread ids share one integer."""
    return global_id // _PID_SHIFT % _PID_SHIFT


def _nccl_domains(database: _Database) -> set[tuple[int, int]]:
    columns = database.columns["NVTX_EVENTS"]
    text = '"text"' if "text" in columns else "NULL"
    text_id = '"textId"' if "textId" in columns else "NULL"
    query = f"SELECT globalTid, domainId, {text}, {text_id} FROM NVTX_EVENTS WHERE eventType = ?"
    return {
        (_pid(tid), domain)
        for tid, domain, label, label_id in database.rows(query, (_DOMAIN,))
        if (label if label is not None else database.strings.get(label_id)) == "NCCL"
    }


def _schemas(database: _Database) -> dict[int, list[tuple[str, int, int]]]:
    """Payload layouts: schema id to (field, type, offset). Ids moved between versions, so fields go by name."""
    if not database.has("NVTX_PAYLOAD_SCHEMA_ENTRIES", "schemaId", "name", "type", "offset"):
        return {}
    found: dict[int, dict[str, tuple[str, int, int]]] = defaultdict(dict)
    for schema, field_name, kind, offset in database.rows(
        "SELECT schemaId, name, type, offset FROM NVTX_PAYLOAD_SCHEMA_ENTRIES"
    ):
        if field_name is not None and kind in _FORMATS:
            found[schema & 0xFFFFFFFF][field_name] = (field_name, kind, offset or 0)
    return {schema: list(fields.values()) for schema, fields in found.items()}


def _payload(blob: object, json_text: object, schemas: Mapping[int, list[tuple[str, int, int]]]) -> dict[str, int]:
    """Field names to values, from the blob or from its JSON form; empty where neither was exported."""
    if isinstance(json_text, str) and json_text.startswith("{"):
        import json

        try:
            body = json.loads(json_text)
        except ValueError:
            return {}
        return {key: value for key, value in body.items() if isinstance(value, int)}
    data = blob.encode("latin-1", "replace") if isinstance(blob, str) else blob
    if not isinstance(data, bytes) or len(data) < _HEADER_BYTES:
        return {}
    schema = int.from_bytes(data[8:12], "little")
    body_bytes = data[_HEADER_BYTES:]
    values = {}
    for field_name, kind, offset in schemas.get(schema, ()):
        layout, size = _FORMATS[kind]
        if offset + size <= len(body_bytes):
            values[field_name] = struct.unpack_from(layout, body_bytes, offset)[0]
    return values


def _mark_groups(calls: list[_Range]) -> None:
    """Numbers the calls between ncclGroupStart and ncclGroupEnd of one thread."""
    depth = number = 0
    for one in calls:
        if one.name == "ncclGroupStart":
            number += depth == 0
            depth += 1
        elif one.name == "ncclGroupEnd":
            one.group = number if depth else 0
            depth = max(depth - 1, 0)
        elif depth:
            one.group = number


def _attach_streams(database: _Database, ranges: Mapping[int, list[_Range]]) -> list[Remark]:
    """Gives each call the stream of its kernel; a launch without a kernel takes the last one of its communicator."""
    null_streams = _null_streams(database)
    kernels = _nccl_kernels(database)
    launches = _launches(database, set(ranges))
    hung: list[Remark] = []
    for pid, calls in ranges.items():
        nulls = null_streams.get(pid, null_streams.get(-1, {7}))
        by_tid: dict[int, list[tuple[int, int]]] = launches.get(pid, {})
        last: dict[tuple[int | None, int], str] = {}
        ends = {(one.tid, one.group): one for one in calls if one.name == "ncclGroupEnd" and one.group}
        for one in calls:
            if not _FUNCTION.match(one.name):
                continue
            home = ends.get((one.tid, one.group), one) if one.group else one
            found = _inside(by_tid.get(one.tid, []), home.start, home.end)
            streams = [kernels[pid, correlation] for correlation in found if (pid, correlation) in kernels]
            key = (one.values.get("NCCL communicator ID"), one.tid)
            if streams:
                one.stream = _stream_name(streams[0], nulls)
                last[key] = one.stream
            else:
                one.stream = last.get(key)
                if found:
                    where = f"stream {one.stream} judged by its earlier kernels" if one.stream else "an unknown stream"
                    hung.append(
                        Remark(
                            "hung-launch",
                            f"process {pid}: {one.name} was launched on {where} and its kernel never finished",
                            f"{database.name}: NVTX row {one.row}, correlation {found[0]}",
                        )
                    )
    return hung


def _stream_name(stream: int, nulls: "set[int]") -> str:
    return "default" if stream in nulls else str(stream)


def _inside(launches: list[tuple[int, int]], start: int, end: int | None) -> list[int]:
    low = bisect_left(launches, (start, -1))
    high = len(launches) if end is None else bisect_right(launches, (end, 2**62))
    return [correlation for _, correlation in launches[low:high]]


def _null_streams(database: _Database) -> dict[int, set[int]]:
    """The default stream's id by process; without a table that tells, 7 is what CUDA uses (key -1)."""
    found: dict[int, set[int]] = defaultdict(set)
    if database.has("TARGET_INFO_CUDA_CONTEXT_INFO", "nullStreamId", "processId"):
        for pid, stream in database.rows("SELECT processId, nullStreamId FROM TARGET_INFO_CUDA_CONTEXT_INFO"):
            if pid is not None and stream is not None:
                found[pid].add(stream)
    if database.has("TARGET_INFO_CUDA_STREAM", "streamId", "processId", "flag"):
        for pid, stream in database.rows(
            "SELECT processId, streamId FROM TARGET_INFO_CUDA_STREAM WHERE flag = ?", (_NULL_STREAM,)
        ):
            found[pid].add(stream)
    return dict(found)


def _nccl_kernels(database: _Database) -> dict[tuple[int, int], int]:
    """(process, correlation id) to stream, for NCCL's kernels."""
    names = [one for one in ("shortName", "demangledName") if database.has(_KERNEL, one)]
    if not names or not database.has(_KERNEL, "streamId", "correlationId"):
        return {}
    wanted = [number for number, text in database.strings.items() if _NCCL_KERNEL.match(text)]
    if not wanted:
        return {}
    process = "globalPid" if database.has(_KERNEL, "globalPid") else "0"
    database.connection.execute("CREATE TEMP TABLE IF NOT EXISTS wanted_names (id INTEGER PRIMARY KEY)")
    database.connection.execute("DELETE FROM wanted_names")
    database.connection.executemany("INSERT INTO wanted_names VALUES (?)", [(number,) for number in wanted])
    query = (
        f"SELECT {process}, correlationId, streamId FROM {_KERNEL} WHERE {names[0]} IN (SELECT id FROM wanted_names)"
    )
    return {(_pid(pid), correlation): stream for pid, correlation, stream in database.rows(query)}


def _launches(database: _Database, pids: set[int]) -> dict[int, dict[int, list[tuple[int, int]]]]:
    """Kernel launches by process and thread as (start, correlation id), in order."""
    if not database.has(_RUNTIME, "start", "globalTid", "correlationId", "nameId"):
        return {}
    wanted = [number for number, text in database.strings.items() if "LaunchKernel" in text]
    if not wanted:
        return {}
    database.connection.execute("CREATE TEMP TABLE IF NOT EXISTS launch_names (id INTEGER PRIMARY KEY)")
    database.connection.execute("DELETE FROM launch_names")
    database.connection.executemany("INSERT INTO launch_names VALUES (?)", [(number,) for number in wanted])
    query = (
        f"SELECT start, correlationId, globalTid FROM {_RUNTIME} "
        "WHERE nameId IN (SELECT id FROM launch_names) ORDER BY start"
    )
    found: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for start, correlation, tid in database.rows(query):
        pid = _pid(tid)
        if pid in pids:
            found[pid][tid].append((start, correlation))
    return found


def _process(database: _Database, summary: FileSummary, pid: int, calls: list[_Range]) -> None:
    """Adds one process's calls to the summary."""
    builder = LogBuilder(database.name, "nsys", host=_host(database), pid=str(pid))
    builder.log.default_streams = ("default",)
    epoch = _epoch_ns(database)
    threads = {one.tid: str(one.tid % _PID_SHIFT) for one in calls}
    largest = 0
    for one in calls:
        place = f"NVTX row {one.row}"
        thread = threads[one.tid]
        if one.name in {"ncclGroupStart", "ncclGroupEnd"}:
            if one.end is not None or one.name == "ncclGroupStart":
                what = "group-start" if one.name == "ncclGroupStart" else "group-end"
                builder.add(Kind(what=what, source="NVTX", thread=thread), place=place, time_ns=epoch + one.start)
            continue
        if one.name.startswith("ncclCommInit") and "NCCL communicator ID" in one.values:
            size = one.values.get("No. of ranks", 0)
            rank = one.values.get("Rank")
            builder.add(_init_kind(one, thread), place=place, time_ns=epoch + one.start)
            if rank is not None and size > largest:
                builder.log.rank, builder.log.rank_source, largest = (
                    rank,
                    f"its rank in the largest communicator ({size} ranks)",
                    size,
                )
            continue
        match = _FUNCTION.match(one.name)
        if match is not None and "NCCL communicator ID" in one.values:
            builder.add(_call_kind(one, operation(match[1]), thread), place=place, time_ns=epoch + one.start)
    if builder.log.rank is None:
        found = _RANK_IN_NAME.search(PurePath(database.name).name)
        if found is not None and not summary.processes:
            builder.log.rank, builder.log.rank_source = int(found[1]), "the file's name"
    summary.processes.append(builder.finish())


def _init_kind(one: _Range, thread: str) -> Kind:
    values = one.values
    detail = {"commId": _comm_name(values["NCCL communicator ID"])}
    if "Rank" in values:
        detail["rank"] = str(values["Rank"])
    if "CUDA device" in values:
        detail["dev"] = str(values["CUDA device"])
    return Kind(
        what="init-start" if one.end is None else "init-done",
        source="NVTX",
        thread=thread,
        comm=detail["commId"],
        num_ranks=values.get("No. of ranks"),
        detail=tuple(sorted(detail.items())),
    )


def _call_kind(one: _Range, op: str, thread: str) -> Kind:
    values = one.values
    redop = values.get("Reduction operation")
    size = values.get("Message size [bytes]")
    return Kind(
        what="call",
        source="NVTX",
        thread=thread,
        comm=_comm_name(values["NCCL communicator ID"]),
        op=op,
        redop=(
            REDOPS[redop]
            if redop is not None and 0 <= redop < len(REDOPS)
            else "dynamic"
            if redop is not None
            else None
        )
        if op in REDUCING
        else None,
        root=values.get("Root") if op in ROOTED else values.get("Peer rank") if op in P2P else None,
        stream=one.stream,
        detail=(("bytes", str(size)),) if size is not None else (),
    )


def _comm_name(identity: int) -> str:
    return f"0x{identity:x}"


def _host(database: _Database) -> str:
    if database.has("TARGET_INFO_SYSTEM_ENV", "name", "value"):
        for (value,) in database.rows("SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'"):
            return str(value)
    return ""


def _epoch_ns(database: _Database) -> int:
    if database.has("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
        for (value,) in database.rows("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME"):
            return int(value or 0)
    return 0


def _copies(database: _Database, ranges: Mapping[int, list[_Range]]) -> list[Remark]:
    """H2D copies on one stream, followed by a broadcast on another with no stream-wait-event between them."""
    if not database.has(_MEMCPY, "start", "end", "streamId", "copyKind"):
        return []
    process = "globalPid" if database.has(_MEMCPY, "globalPid") else "0"
    copies: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pid, start, stream in database.rows(
        f"SELECT {process}, start, streamId FROM {_MEMCPY} WHERE copyKind = ? ORDER BY start", (_HTOD,)
    ):
        copies[_pid(pid)].append((start, stream))
    waits = _stream_waits(database)
    nulls = _null_streams(database)
    found = []
    for pid, calls in ranges.items():
        mine = copies.get(pid, [])
        before = -1
        null = nulls.get(pid, nulls.get(-1, {7}))
        for one in calls:
            if operation(one.name) != "Broadcast" or not _FUNCTION.match(one.name):
                continue
            at = bisect_left(mine, (one.start, -1)) - 1
            if at >= 0 and mine[at][0] > before and one.stream is not None:
                copied, stream = mine[at]
                other = _stream_name(stream, null)
                synced = any(copied <= when <= (one.end or 2**62) for when in waits.get(pid, ()))
                if other != one.stream and not synced:
                    found.append(
                        Remark(
                            "copy-without-event",
                            (
                                f"process {pid}: the H2D copy runs on stream {other}, the "
                                f"broadcast after it on stream {one.stream}, and no event orders them"
                            ),
                            f"{database.name}: NVTX row {one.row}",
                        )
                    )
            before = one.start
    return found


def _stream_waits(database: _Database) -> dict[int, list[int]]:
    if not database.has(_SYNC, "start", "syncType"):
        return {}
    process = "globalPid" if database.has(_SYNC, "globalPid") else "0"
    found: dict[int, list[int]] = defaultdict(list)
    for pid, start in database.rows(
        f"SELECT {process}, start FROM {_SYNC} WHERE syncType = ? ORDER BY start", (_STREAM_WAIT,)
    ):
        found[_pid(pid)].append(start)
    return found


def _outside(database: _Database) -> list[Remark]:
    """Kernels that synchronise ranks without NCCL."""
    names = [number for number, text in database.strings.items() if any(one in text for one in OUTSIDE_NCCL)]
    column = next((one for one in ("shortName", "demangledName") if database.has(_KERNEL, one)), None)
    if not names or column is None:
        return []
    marks = ", ".join("?" * min(len(names), 100))
    ((count,),) = list(database.rows(f"SELECT count(*) FROM {_KERNEL} WHERE {column} IN ({marks})", names[:100]))
    if not count:
        return []
    text = (
        f"{count} kernels such as {database.strings[names[0]][:60]} synchronise ranks outside NCCL and are not covered"
    )
    return [Remark("outside-nccl", text, f"{database.name}: {_KERNEL}")]
