"""Reads torch profiler traces (Kineto JSON): the host's `record_param_comms` rows, and their kernels' streams.

{"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": 1.5, "tid": 814, "args": {"External id": 17,
  "Collective name": "allreduce", "In msg nelems": 8192, "dtype": "BFloat16", "Process Group Name": "0",
  "Process Group Ranks": "[0, 1]", "Group size": 2}}
"""

import json
from collections.abc import Mapping
from typing import Any

from kvbench.collectives.operations import OUTSIDE_NCCL, calls_elements, operation
from kvbench.collectives.summary import FileSummary, Kind, Remark
from kvbench.collectives.table import LogBuilder
from kvbench.core.errors import KvbenchError

_IGNORED = frozenset({"wait", "init", "", "monitoredbarrier", "coalesced", "startcoalescing", "endcoalescing"})
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "int": "int32",
    "long": "int64",
    "char": "int8",
    "byte": "uint8",
}
_NS_PER_US = 1000


def is_trace(body: Any) -> bool:
    """Whether a parsed JSON file is a profiler trace."""
    return isinstance(body, Mapping) and isinstance(body.get("traceEvents"), list)


def from_trace(body: Mapping[str, Any], *, name: str, num_bytes: int) -> FileSummary:
    """The collectives of a trace in host order. Kernel rows are used where a trace has no host rows."""
    info = body.get("distributedInfo")
    events = [
        event for event in body["traceEvents"] if isinstance(event, Mapping) and isinstance(event.get("args"), Mapping)
    ]
    host = [
        event for event in events if event.get("name") == "record_param_comms" and "Collective name" in event["args"]
    ]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    with_names = [event for event in kernels if "Collective name" in event["args"]]
    chosen = host or with_names
    streams = _streams(kernels)
    builder = LogBuilder(name, "kineto")
    builder.log.default_streams = ("default", "7")
    if isinstance(info, Mapping) and isinstance(info.get("rank"), int):
        builder.log.rank, builder.log.rank_source = info["rank"], "distributedInfo of the trace"
    members: dict[str, tuple[int, ...]] = {}
    damaged = 0
    for event in sorted(chosen, key=_start):
        try:
            kind = _kind(event, streams, members)
        except (KeyError, TypeError, ValueError) as error:
            damaged += 1
            if damaged > len(chosen) // 2 + 1:
                raise KvbenchError(
                    f"{name}: its collectives cannot be read ({error!r}); which profiler wrote it?"
                ) from error
            continue
        if kind is not None:
            builder.add(kind, place=f"event at ts {event.get('ts')}", time_ns=int(_start(event) * _NS_PER_US))
    builder.log.members = members
    return FileSummary(
        path=name,
        format="kineto",
        processes=[builder.finish()],
        stream_facts=_outside(kernels, name),
        num_lines=len(events),
        num_bytes=num_bytes,
        damaged=damaged,
        notes=[]
        if host or not with_names
        else [
            (
                "kernels-only",
                "the trace has no host rows, so calls are ordered by their kernels",
                "profile with activities=[CPU, CUDA]",
            )
        ],
    )


def _start(event: Mapping[str, Any]) -> float:
    value = event.get("ts", 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _streams(kernels: "list[Mapping[str, Any]]") -> dict[int, str]:
    """External id to stream, for NCCL's kernels."""
    found = {}
    for event in kernels:
        external, stream = event["args"].get("External id"), event["args"].get("stream")
        if "nccl" in str(event.get("name", "")).lower() and isinstance(external, int) and stream is not None:
            found[external] = str(stream)
    return found


def _kind(event: Mapping[str, Any], streams: Mapping[int, str], members: dict[str, tuple[int, ...]]) -> Kind | None:
    args = event["args"]
    spelled = str(args["Collective name"]).replace("_", "").lower()
    if spelled in _IGNORED:
        return None
    op = operation(str(args["Collective name"]))
    comm = str(args.get("Process Group Name", ""))
    listed = args.get("Process Group Ranks")
    try:
        ranks = json.loads(listed) if isinstance(listed, str) else listed
        if ranks:
            members[comm] = tuple(int(rank) for rank in ranks)
    except (ValueError, TypeError):
        pass  # long lists are cut off with "..."; the group's size is still there
    dtype = str(args["dtype"]).lower() if "dtype" in args else None
    stream = args.get("stream")
    external = args.get("External id")
    if stream is None and isinstance(external, int):
        stream = streams.get(external)
    peer = args.get("Dst Rank") if op == "Send" else args.get("Src Rank") if op == "Recv" else None
    return Kind(
        what="call",
        source="KINETO",
        thread=str(event.get("tid", "")),
        comm=comm,
        op=op,
        count=calls_elements(op, _integer(args.get("In msg nelems")), _integer(args.get("Out msg nelems"))),
        dtype=_DTYPES.get(dtype, dtype) if dtype is not None else None,
        root=int(peer) if peer is not None else None,
        stream=str(stream) if stream is not None else None,
        num_ranks=_integer(args.get("Group size")),
        detail=(("desc", str(args.get("Process Group Description", ""))),),
    )


def _integer(value: Any) -> int | None:
    return int(value) if value is not None else None


def _outside(kernels: "list[Mapping[str, Any]]", name: str) -> list[Remark]:
    found = [event for event in kernels if any(one in str(event.get("name", "")) for one in OUTSIDE_NCCL)]
    if not found:
        return []
    text = (
        f"{len(found)} kernels such as {str(found[0].get('name'))[:60]} "
        "synchronise ranks outside NCCL and are not covered"
    )
    return [Remark("outside-nccl", text, f"{name}: event at ts {found[0].get('ts')}")]
