"""Programs of collective calls, and how each tool would have printed them. The ground truth of the tests."""

import json
import pickle
import random
import sqlite3
import struct
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

DTYPES = ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16"]
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int64": 8, "int8": 1}
TORCH_DTYPES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "int64": "Long", "int8": "Char"}
TORCH_NAMES = {
    "AllReduce": "all_reduce",
    "AllGather": "_all_gather_base",
    "ReduceScatter": "_reduce_scatter_base",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
}


@dataclass(frozen=True, kw_only=True)
class Op:
    """One call of one rank. `peer` makes it a Send or a Recv; calls with one nonzero `group` are issued together."""

    comm: int
    op: str = "AllReduce"
    count: int = 1024
    dtype: str = "bfloat16"
    root: int = 0
    peer: int | None = None
    stream: str = "default"
    group: int = 0
    thread: int = 0


@dataclass(kw_only=True)
class World:
    """Communicators as tuples of global ranks, the world first; programs by rank; `split` marks children."""

    comms: list[tuple[int, ...]]
    programs: list[list[Op]]
    split: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # comm -> (parent, ordinal, colour)

    @property
    def size(self) -> int:
        return len(self.programs)

    def copy(self) -> "World":
        return World(comms=list(self.comms), programs=[list(one) for one in self.programs], split=dict(self.split))


def random_world(rng: random.Random, *, ranks: int, comms: int, calls: int, one_stream: bool, p2p: bool) -> World:
    """A valid program: one global order of meetings, each issued by all members of its communicator in that order."""
    members: list[tuple[int, ...]] = [tuple(range(ranks))]
    split: dict[int, tuple[int, int, int]] = {}
    ordinal = 0
    while len(members) < comms:
        parts = rng.choice([1, 2, 2, 4])
        if ranks // parts < 2:
            parts = 1
        for colour in range(parts):
            if len(members) < comms:
                split[len(members)] = (0, ordinal, colour)
                members.append(tuple(rank for rank in range(ranks) if rank * parts // ranks == colour))
        ordinal += 1
    world = World(comms=members, programs=[[] for _ in range(ranks)], split=split)
    group = 0
    while sum(map(len, world.programs)) < calls * ranks:
        comm = rng.randrange(len(members))
        stream = "default" if one_stream else f"s{comm}"
        if p2p and rng.random() < 0.1:
            source, target = rng.sample(range(len(members[comm])), 2)
            group += 1
            for mine, other, op in ((source, target, "Send"), (target, source, "Recv")):
                world.programs[members[comm][mine]].append(
                    Op(comm=comm, op=op, peer=other, count=rng.choice([256, 512]), stream=stream, group=group)
                )
                last = world.programs[members[comm][mine]]
                last[-1] = replace(last[-1], count=256)
            continue
        together = rng.choice([1, 1, 1, 2, 3])
        group += 1
        for _ in range(together):
            one = random_op(rng, comm, stream)
            for rank in members[comm]:
                world.programs[rank].append(replace(one, group=group if together > 1 else 0))
    return world


def random_op(rng: random.Random, comm: int, stream: str) -> Op:
    op = rng.choice(["AllReduce", "AllReduce", "AllGather", "ReduceScatter", "Broadcast"])
    return Op(
        comm=comm, op=op, count=rng.choice([1024, 2048, 4096]), dtype=rng.choice(["bfloat16", "float32"]), stream=stream
    )


# ---- text


def pointer(rank: int, comm: int) -> str:
    return f"0x55{rank:04x}{comm:04x}0"


def stream_pointer(rank: int, stream: str) -> str:
    return "(nil)" if stream == "default" else f"0x7a{rank:04x}{sum(map(ord, stream)):04x}"


def init_lines(world: World, rank: int, *, version: str = "2.27") -> list[str]:
    """INIT lines as a version of NCCL prints them."""
    head = head_of(rank)
    lines = []
    for comm, members in enumerate(world.comms):
        if rank not in members:
            continue
        where = f"comm {pointer(rank, comm)} rank {members.index(rank)} nranks {len(members)} cudaDev {rank % 8}"
        if version == "2.14":
            lines.append(f"{head} INFO {where} busId 1b000 - Init COMPLETE")
            continue
        where += f" nvmlDev {rank % 8} busId 1b000"
        for step in ("START", "COMPLETE"):
            if comm in world.split and version in {"2.23", "2.27"}:
                parent, ordinal, colour = world.split[comm]
                count = f"splitCount {ordinal} " if version == "2.27" else ""
                lines.append(
                    f"{head} INFO ncclCommSplit {where} parent {pointer(rank, parent)} {count}color {colour} key {rank}"
                    f"{' ' if step == 'COMPLETE' or version == '2.27' else ''}- Init {step}"
                )
            else:
                api = "" if version == "2.18" else "ncclCommInitRankConfig "
                lines.append(f"{head} INFO {api}{where} commId 0x{0xABC000 + comm:x} - Init {step}")
    return lines


def head_of(rank: int, thread: int = 0, *, dev: bool = True) -> str:
    return f"node{rank // 8}:{1000 + rank}:{2000 + rank + 100 * thread}{f' [{rank % 8}]' if dev else ''} NCCL"


def coll_line(world: World, rank: int, number: int, one: Op) -> str:
    members = world.comms[one.comm]
    root = one.peer if one.peer is not None else one.root
    return (
        f"{head_of(rank, one.thread)} INFO {one.op}: opCount {number:x} "
        f"sendbuff 0x7f{number * 512:010x} recvbuff 0x7e{number * 512:010x} "
        f"count {one.count} datatype {DTYPES.index(one.dtype)} op 0 root {root} comm {pointer(rank, one.comm)} "
        f"[nranks={len(members)}] stream {stream_pointer(rank, one.stream)}"
    )


def call_line(rank: int, number: int, one: Op) -> str:
    root = one.peer if one.peer is not None else one.root
    return (
        f"{head_of(rank, one.thread, dev=False)} CALL "
        f"nccl{one.op}({0x7F000000 + number * 512:x},{0x7E000000 + number * 512:x},{one.count},"
        f"{DTYPES.index(one.dtype)},0,{root},{pointer(rank, one.comm)},{stream_pointer(rank, one.stream)})"
    )


def coll_lines(world: World, rank: int, *, version: str = "2.27") -> list[str]:
    lines = init_lines(world, rank, version=version)
    return lines + [coll_line(world, rank, number, one) for number, one in enumerate(world.programs[rank])]


def call_lines(world: World, rank: int, *, version: str = "2.27") -> list[str]:
    lines = init_lines(world, rank, version=version)
    head, group = head_of(rank, dev=False), 0
    for number, one in enumerate(world.programs[rank]):
        if one.group != group and group:
            lines.append(f"{head} CALL ncclGroupEnd()")
        if one.group != group and one.group:
            lines.append(f"{head} CALL ncclGroupStart()")
        group = one.group
        lines.append(call_line(rank, number, one))
    if group:
        lines.append(f"{head} CALL ncclGroupEnd()")
    return lines


def write_logs(world: World, folder: Path, lines: Any = coll_lines, **options: Any) -> Path:
    for rank in range(world.size):
        (folder / f"nccl.node{rank // 8}.{1000 + rank}.log").write_text("\n".join(lines(world, rank, **options)) + "\n")
    return folder


# ---- flight recorder


def flight_recorder_dump(world: World, rank: int, *, first: int = 0, frames: bool = False) -> dict[str, Any]:
    """A dump of version 2.7 as torch writes it. `first` drops older entries, as the ring does."""
    sequence: dict[int, int] = defaultdict(int)
    p2p_sequence: dict[int, int] = defaultdict(int)
    entries = []
    for number, one in enumerate(world.programs[rank]):
        name = TORCH_NAMES.get(one.op, one.op.lower())
        members = world.comms[one.comm]
        size = len(members)
        mine = members.index(rank)
        if one.peer is None:
            sequence[one.comm] += 1
            profiling = f"nccl:{name}"
        else:
            p2p_sequence[one.comm] += 1
            profiling = f"nccl:send {mine}->{one.peer}" if one.op == "Send" else f"nccl:recv {mine}<-{one.peer}"
        elements_in = one.count * size if one.op == "ReduceScatter" else one.count
        elements_out = one.count * size if one.op == "AllGather" else one.count
        entries.append(
            {
                "record_id": number,
                "pg_id": one.comm,
                "process_group": [str(one.comm), "default_pg" if one.comm == 0 else f"group_{one.comm}"],
                "collective_seq_id": sequence[one.comm],
                "p2p_seq_id": p2p_sequence[one.comm],
                "op_id": number + 1,
                "profiling_name": profiling,
                "time_created_ns": 1_700_000_000_000_000_000 + number * 1_000_000,
                "input_sizes": [[elements_in]],
                "output_sizes": [[elements_out]],
                "input_dtypes": [TORCH_DTYPES[one.dtype]],
                "output_dtypes": [TORCH_DTYPES[one.dtype]],
                "state": "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": False,
                "timeout_ms": 600000,
                "is_p2p": one.peer is not None,
                "frames": [{"name": "load_back", "filename": "/app/cache.py", "line": 40 + number}] if frames else [],
            }
        )
    return {
        "version": "2.7",
        "pg_config": {
            str(comm): {
                "name": str(comm),
                "desc": "default_pg" if comm == 0 else f"group_{comm}",
                "ranks": str(list(members)),
            }
            for comm, members in enumerate(world.comms)
            if rank in members
        },
        "pg_status": {
            str(comm): {
                "last_enqueued_collective": sequence[comm] or -1,
                "last_started_collective": -1,
                "last_completed_collective": -1,
            }
            for comm, members in enumerate(world.comms)
            if rank in members
        },
        "entries": entries[first:],
        "nccl_version": "2.27.5",
    }


def write_flight_recorder(world: World, folder: Path, *, as_json: bool = False, **options: Any) -> Path:
    for rank in range(world.size):
        dump = flight_recorder_dump(world, rank, **options)
        if as_json:
            (folder / f"trace_rank_{rank}.json").write_text(json.dumps(dump))
        else:
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
    return folder


# ---- Nsight Systems


SIDS = {"AllGather": 4, "AllReduce": 5, "Broadcast": 6, "ReduceScatter": 7, "Reduce": 8, "Send": 9, "Recv": 10}
_FIELDS = {
    4: (("NCCL communicator ID", 18), ("Message size [bytes]", 22)),
    5: (("NCCL communicator ID", 18), ("Message size [bytes]", 22), ("Reduction operation", 18)),
    6: (("NCCL communicator ID", 18), ("Message size [bytes]", 22), ("Root", 18)),
    7: (("NCCL communicator ID", 18), ("Message size [bytes]", 22), ("Reduction operation", 18)),
    8: (("NCCL communicator ID", 18), ("Message size [bytes]", 22), ("Root", 18), ("Reduction operation", 18)),
    9: (("NCCL communicator ID", 18), ("Message size [bytes]", 22), ("Peer rank", 18)),
    10: (("NCCL communicator ID", 18), ("Message size [bytes]", 22), ("Peer rank", 18)),
    0: (("NCCL communicator ID", 18), ("No. of ranks", 5), ("Rank", 5), ("CUDA device", 5)),
}
_BASE = 0x1000000
_SIZES = {5: ("<i", 4), 18: ("<Q", 8), 22: ("<Q", 8)}


def payload(sid: int, values: tuple[int, ...]) -> bytes:
    body = b"".join(struct.pack(_SIZES[kind][0], value) for (_, kind), value in zip(_FIELDS[sid], values, strict=True))
    return struct.pack("<QQQQ", 1, _BASE + sid, len(body), 32 + len(body)) + body


def write_nsys(
    world: World,
    folder: Path,
    *,
    blobs: bool = True,
    hang_from: dict[int, int] | None = None,
    copies: bool = False,
    event_between: bool = False,
    without: tuple[str, ...] = (),
) -> Path:
    """One export per rank. Calls from `hang_from[rank]` on have a launch and no kernel, as a hung GPU leaves them."""
    for rank in range(world.size):
        path = folder / f"rank{rank}.sqlite"
        database = NsysFile(path, pid=1000 + rank, without=without, blobs=blobs)
        database.rank(world, rank, (hang_from or {}).get(rank, len(world.programs[rank])), copies, event_between)
        database.close()
    return folder


class NsysFile:
    """Builds a small export by the schema of 2026.2: lazily created tables, no indexes."""

    def __init__(self, path: Path, *, pid: int, without: tuple[str, ...] = (), blobs: bool = True) -> None:
        path.unlink(missing_ok=True)
        self.connection = sqlite3.connect(path)
        self.pid, self.blobs, self.without = pid, blobs, without
        self.tid = (1 << 48) | (pid << 24) | pid
        self.strings: dict[str, int] = {}
        self.correlation = 100
        self.waiting: list[tuple[Op, int, bool]] = []
        tables = {
            "META_DATA_EXPORT": "name TEXT, value TEXT",
            "NVTX_EVENTS": (
                "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, "
                "globalTid INTEGER, textId INTEGER, domainId INTEGER, binaryData TEXT"
            ),
            "NVTX_PAYLOAD_SCHEMA_ENTRIES": (
                "domainId INTEGER, schemaId INTEGER, idx INTEGER, type INTEGER, name TEXT, offset INTEGER"
            ),
            "CUPTI_ACTIVITY_KIND_KERNEL": (
                "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId "
                "INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER"
            ),
            "CUPTI_ACTIVITY_KIND_RUNTIME": (
                "start INTEGER, end INTEGER, eventClass INTEGER, globalTid "
                "INTEGER, correlationId INTEGER, nameId INTEGER, returnValue INTEGER"
            ),
            "CUPTI_ACTIVITY_KIND_MEMCPY": (
                "start INTEGER, end INTEGER, streamId INTEGER, correlationId "
                "INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER"
            ),
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": (
                "start INTEGER, end INTEGER, streamId INTEGER, correlationId "
                "INTEGER, globalPid INTEGER, syncType INTEGER, eventId INTEGER"
            ),
            "TARGET_INFO_CUDA_CONTEXT_INFO": (
                "nullStreamId INTEGER, processId INTEGER, deviceId INTEGER, contextId INTEGER"
            ),
            "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER, utcTime TEXT",
            "TARGET_INFO_SYSTEM_ENV": "name TEXT, value TEXT",
        }
        self.connection.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        for name, columns in tables.items():
            if name not in without:
                self.connection.execute(f"CREATE TABLE {name} ({columns})")
        self.insert("META_DATA_EXPORT", "EXPORT_SCHEMA_VERSION", "3.25.0")
        self.insert("META_DATA_EXPORT", "EXPORT_PARAM_INCLUDE_BLOBS", str(blobs).lower())
        self.insert("TARGET_INFO_CUDA_CONTEXT_INFO", 7, pid, 0, 1)
        self.insert("TARGET_INFO_SESSION_START_TIME", 1_700_000_000_000_000_000, "")
        self.insert("TARGET_INFO_SYSTEM_ENV", "Hostname", "node0")
        self.insert("NVTX_EVENTS", 0, None, 75, None, self.tid, self.string("NCCL"), 1, None)
        for sid, fields in _FIELDS.items():
            offset = 0
            for index, (name, kind) in enumerate(fields):
                self.insert("NVTX_PAYLOAD_SCHEMA_ENTRIES", 1, _BASE + sid, index, kind, name, offset or None)
                offset += _SIZES[kind][1]

    def insert(self, table: str, *values: Any) -> None:
        if table not in self.without:
            self.connection.execute(f"INSERT INTO {table} VALUES ({','.join('?' * len(values))})", values)

    def string(self, text: str) -> int:
        if text not in self.strings:
            self.strings[text] = len(self.strings) + 1
            self.connection.execute("INSERT INTO StringIds VALUES (?, ?)", (self.strings[text], text))
        return self.strings[text]

    def range(self, start: int, end: int | None, name: str, blob: bytes | None) -> None:
        self.insert("NVTX_EVENTS", start, end, 59, None, self.tid, self.string(name), 1, blob if self.blobs else None)

    def rank(self, world: World, rank: int, hang_from: int, copies: bool, event_between: bool) -> None:
        at = 1000
        for comm, members in enumerate(world.comms):
            if rank in members:
                self.range(
                    at,
                    at + 50,
                    "ncclCommInitRankConfig",
                    payload(0, (0xC0FFEE00 + comm, len(members), members.index(rank), rank % 8)),
                )
                at += 100
        group = 0
        for number, one in enumerate(world.programs[rank]):
            if group and one.group != group:
                at = self._group_end(at)
            if one.group and one.group != group:
                self.range(at, at + 5, "ncclGroupStart", None)
                at += 10
            group = one.group
            stream = 7 if one.stream == "default" else 20 + sum(map(ord, one.stream)) % 50
            if copies and one.op == "Broadcast":
                self.insert(
                    "CUPTI_ACTIVITY_KIND_MEMCPY", at, at + 50, 21, self.correlation, self.tid - self.pid, 1 << 20, 1
                )
                self.correlation += 1
                if event_between:
                    self.insert(
                        "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
                        at + 55,
                        at + 56,
                        stream,
                        self.correlation,
                        self.tid - self.pid,
                        2,
                        1,
                    )
                at += 60
            size = one.count * DTYPE_BYTES[one.dtype]
            value = one.peer if one.peer is not None else one.root if one.op == "Broadcast" else 0
            values = (0xC0FFEE00 + one.comm, size) if one.op == "AllGather" else (0xC0FFEE00 + one.comm, size, value)
            self.range(at, at + 20, f"nccl{one.op}", payload(SIDS[one.op], values))
            if one.group:
                self.waiting.append((one, stream, number < hang_from))
            else:
                self._launch(at + 5, one, stream, number < hang_from)
            at += 100
        if group:
            self._group_end(at)

    def _launch(self, at: int, one: Op, stream: int, ran: bool) -> None:
        self.correlation += 1
        name_id = self.string("cudaLaunchKernelExC_v11060")
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", at, at + 4, 0, self.tid, self.correlation, name_id, 0)
        if ran:
            name = "ncclDevKernel_SendRecv" if one.peer is not None else f"ncclDevKernel_{one.op}_RING_LL"
            shown = self.string(f"{name}(ncclDevKernelArgsStorage<4096ul>)")
            process = self.tid - self.pid
            self.insert(
                "CUPTI_ACTIVITY_KIND_KERNEL",
                at + 9,
                at + 60,
                0,
                stream,
                self.correlation,
                process,
                shown,
                self.string(name),
            )

    def _group_end(self, at: int) -> int:
        """Grouped calls are launched inside ncclGroupEnd."""
        for number, (one, stream, ran) in enumerate(self.waiting):
            self._launch(at + 2 + number, one, stream, ran)
        self.range(at, at + 5 + len(self.waiting), "ncclGroupEnd", None)
        at += 20 + len(self.waiting)
        self.waiting = []
        return at

    def close(self) -> None:
        self.connection.commit()
        self.connection.close()


# ---- Kineto


KINETO_NAMES = {
    "AllReduce": "allreduce",
    "AllGather": "_allgather_base",
    "ReduceScatter": "_reduce_scatter_base",
    "Broadcast": "broadcast",
}


def write_kineto(world: World, folder: Path) -> Path:
    for rank in range(world.size):
        events: list[dict[str, Any]] = []
        for number, one in enumerate(world.programs[rank]):
            members = world.comms[one.comm]
            args = {
                "External id": number + 1,
                "Collective name": KINETO_NAMES.get(one.op, one.op.lower()),
                "In msg nelems": one.count * (len(members) if one.op == "ReduceScatter" else 1),
                "Out msg nelems": one.count * (len(members) if one.op == "AllGather" else 1),
                "dtype": TORCH_DTYPES[one.dtype],
                "Group size": len(members),
                "Process Group Name": str(one.comm),
                "Process Group Description": f"group_{one.comm}",
                "Process Group Ranks": str(list(members)),
            }
            if one.peer is not None:
                args["Dst Rank" if one.op == "Send" else "Src Rank"] = one.peer
            events.append(
                {
                    "ph": "X",
                    "cat": "cpu_op",
                    "name": "record_param_comms",
                    "ts": 1000.0 + number,
                    "dur": 5,
                    "pid": 1000 + rank,
                    "tid": 1000 + rank,
                    "args": args,
                }
            )
            kernel = {
                "External id": number + 1,
                "stream": 7 if one.stream == "default" else 20 + sum(map(ord, one.stream)) % 50,
                "device": rank % 8,
            }
            events.append(
                {
                    "ph": "X",
                    "cat": "kernel",
                    "name": f"ncclDevKernel_{one.op}_RING_LL",
                    "ts": 1002.0 + number,
                    "dur": 5,
                    "pid": rank,
                    "tid": 7,
                    "args": kernel,
                }
            )
        body = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world.size}, "traceEvents": events}
        (folder / f"trace{rank}.json").write_text(json.dumps(body))
    return folder


FORMATS: dict[str, Any] = {
    "coll": lambda world, folder: write_logs(world, folder, coll_lines),
    "call": lambda world, folder: write_logs(world, folder, call_lines),
    "fr": write_flight_recorder,
    "fr-json": lambda world, folder: write_flight_recorder(world, folder, as_json=True),
    "nsys": write_nsys,
    "kineto": write_kineto,
}


# ---- the seed's case


def seed_case() -> World:
    """Cache broadcast on one communicator, forward all-reduce on another; on rank 1 the forward overtakes."""
    broadcast = Op(comm=1, op="Broadcast", count=262144)
    forward = Op(comm=0, op="AllReduce", count=8192)
    rounds = [broadcast, forward, forward] * 3
    return World(comms=[(0, 1), (0, 1)], programs=[[*rounds, broadcast, forward], [*rounds, forward, broadcast]])
