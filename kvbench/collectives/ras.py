"""Reads NCCL RAS snapshots as JSON (`ncclras -f json`, NCCL 2.28.7 and newer).

{"nccl_version": "2.28.7", "communicators": [{"hash": "0xa1", "size": 8, "ranks": [
  {"rank": 0, "host": "node1", "pid": 814, "collective_counts": {"AllReduce": 641}}], "missing_ranks": []}]}
"""

from collections.abc import Mapping
from typing import Any

from kvbench.collectives.summary import FileSummary, Progress, Remark
from kvbench.core.errors import KvbenchError


def is_ras(body: Any) -> bool:
    """Whether a parsed JSON file is a RAS snapshot."""
    return isinstance(body, Mapping) and isinstance(body.get("communicators"), list) and "traceEvents" not in body


def from_ras(body: Mapping[str, Any], *, name: str, num_bytes: int) -> FileSummary:
    """Counts of launches per communicator, rank and operation."""
    progress: list[Progress] = []
    remarks: list[Remark] = []
    try:
        for number, comm in enumerate(body["communicators"]):
            place = f"{name}: communicators[{number}]"
            label = f"comm {comm.get('hash', number)}"
            for rank in comm.get("ranks", []):
                for op, count in (rank.get("collective_counts") or {}).items():
                    progress.append(
                        Progress(comm=label, rank=int(rank["rank"]), op=op, enqueued=int(count), place=place)
                    )
                remarks += _status(rank, label, place)
            for rank in comm.get("missing_ranks", []):
                status = rank.get("status") or {}
                dead = "considered dead" if status.get("considered_dead") else "unresponsive"
                text = (
                    f"{label}: rank {rank.get('rank', '?')} (pid "
                    f"{rank.get('pid', '?')} on {rank.get('host', '?')}) is {dead}"
                )
                remarks.append(Remark("ras-missing-rank", text, place))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise KvbenchError(
            f"{name}: a RAS snapshot of an unknown layout ({error!r}); write it with: ncclras -f json"
        ) from error
    timeouts = (body.get("ras") or {}).get("timeouts_count") if isinstance(body.get("ras"), Mapping) else None
    if timeouts:
        remarks.append(Remark("ras-timeouts", f"{timeouts} RAS peers did not answer in time", name))
    return FileSummary(
        path=name,
        format="ras",
        progress=progress,
        remarks=remarks,
        versions=(str(body.get("nccl_version", "")),),
        num_lines=len(progress),
        num_bytes=num_bytes,
    )


def _status(rank: Mapping[str, Any], label: str, place: str) -> list[Remark]:
    status = rank.get("status") or {}
    flags = [flag for flag in ("finalize_called", "destroy_flag", "abort_flag") if status.get(flag)]
    found = [Remark("ras-ending", f"{label}: rank {rank['rank']} has {', '.join(flags)} set", place)] if flags else []
    error = status.get("async_error")
    if error:
        found.append(Remark("ras-async-error", f"{label}: rank {rank['rank']} reports async error {error}", place))
    return found
