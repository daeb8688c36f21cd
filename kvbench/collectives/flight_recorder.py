"""Reads PyTorch flight-recorder dumps, as pickle or JSON. The pickle is read by an unpickler that knows no classes.

{"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "entries": [
  {"record_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
   "input_sizes": [[8192]], "input_dtypes": ["BFloat16"], "state": "scheduled", …}]}
"""

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NoReturn

from kvbench.collectives.operations import calls_elements, operation
from kvbench.collectives.summary import FileSummary, Kind
from kvbench.collectives.table import LogBuilder
from kvbench.core.errors import KvbenchError

_RANK = re.compile(r"(\d+)(?:\.(?:pkl|pickle|json|bin|pt))?$")
_P2P = re.compile(r"(?:^|:)(send|recv) (\d+)(->|<-)(\d+)")
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int": "int32",
    "long": "int64",
    "char": "int8",
    "byte": "uint8",
    "bool": "bool",
}
_BROKEN = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    IndexError,
    KeyError,
    AttributeError,
    TypeError,
    MemoryError,
    RecursionError,
    OverflowError,
)


class _PlainUnpickler(pickle.Unpickler):
    """Builds dicts, lists, strings and numbers, and refuses everything that would import or call."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _ForbiddenError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _ForbiddenError(f"a persistent object {pid!r:.40}")


class _ForbiddenError(Exception):
    pass


def load_plain(file: BinaryIO, *, name: str) -> Any:
    """The object in a pickle that holds only plain data."""
    try:
        return _PlainUnpickler(file).load()
    except _ForbiddenError as error:
        raise KvbenchError(
            f"{name}: the pickle asks for {error}, which a flight-recorder "
            "dump never does; it was not run, do not load this file"
        ) from error
    except _BROKEN as error:
        raise KvbenchError(
            f"{name}: not a complete pickle ({str(error) or type(error).__name__}); "
            "was the rank killed while it wrote the dump?"
        ) from error


def read_pickle(path: Path, *, name: str) -> FileSummary:
    """The entries of a pickled dump."""
    with path.open("rb") as file:
        body = load_plain(file, name=name)
    return from_dump(body, name=name, num_bytes=path.stat().st_size)


def is_dump(body: Any) -> bool:
    """Whether a parsed file looks like a dump."""
    return (
        isinstance(body, dict)
        and ("pg_config" in body or "pg_status" in body or "entries" in body)
        and "traceEvents" not in body
    )


def from_dump(body: Any, *, name: str, num_bytes: int) -> FileSummary:
    """The summary of a parsed dump."""
    if not is_dump(body):
        raise KvbenchError(f"{name}: not a flight-recorder dump (no key pg_config or entries); which tool wrote it?")
    rank = body.get("rank")
    found = _RANK.search(PurePath(name).name)
    builder = LogBuilder(name, "flight-recorder")
    log = builder.log
    if isinstance(rank, int):
        log.rank, log.rank_source = rank, "the dump"
    elif found is not None:
        log.rank, log.rank_source = int(found[1]), "the file's name"
    members = _members(body.get("pg_config"))
    log.members = members
    entries = body.get("entries") or []
    if not isinstance(entries, list):
        raise KvbenchError(f"{name}: key entries is a {type(entries).__name__}, not a list; was the file edited?")
    damaged = 0
    for number, entry in enumerate(entries):
        try:
            kind, seq_id = _kind(entry, members)
            builder.add(
                kind,
                place=f"entry {number}{_frame(entry)}",
                time_ns=int(entry.get("time_created_ns") or 0),
                seq_id=seq_id,
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            damaged += 1
    log = builder.finish()
    return FileSummary(
        path=name,
        format="flight-recorder",
        processes=[log],
        versions=(str(body.get("version", "")),),
        num_lines=len(entries),
        num_bytes=num_bytes,
        damaged=damaged,
    )


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    for key, group in (config or {}).items() if isinstance(config, Mapping) else ():
        ranks = group.get("ranks") if isinstance(group, Mapping) else None
        try:
            listed: Any = json.loads(ranks) if isinstance(ranks, str) else ranks
            found[str(group.get("name", key))] = tuple(int(rank) for rank in listed)
        except (ValueError, TypeError):
            continue
    return found


def _kind(entry: Mapping[str, Any], members: Mapping[str, tuple[int, ...]]) -> tuple[Kind, int]:
    profiling = str(entry["profiling_name"])
    group = entry["process_group"]
    comm = str(group[0])
    p2p = _P2P.search(profiling)
    op = operation(p2p[1]) if p2p else operation(profiling)
    elements_in, elements_out = _elements(entry.get("input_sizes")), _elements(entry.get("output_sizes"))
    dtypes = entry.get("input_dtypes") or entry.get("output_dtypes") or []
    dtype = str(dtypes[0]).lower() if isinstance(dtypes, Sequence) and not isinstance(dtypes, str) and dtypes else None
    size = len(members[comm]) if comm in members else None
    is_p2p = p2p is not None or bool(entry.get("is_p2p"))
    kind = Kind(
        what="call",
        source="FR",
        thread=str(entry.get("thread_id") or entry.get("thread_name") or ""),
        comm=comm,
        op=op,
        count=elements_in
        if op == "Send" and elements_in is not None
        else calls_elements(op, elements_in, elements_out),
        dtype=_DTYPES.get(dtype, dtype) if dtype is not None else None,
        root=int(p2p[4]) if p2p else None,
        num_ranks=size,
        detail=(("desc", str(group[1] if len(group) > 1 else "")), ("state", str(entry.get("state", "")))),
    )
    return kind, int(entry.get("p2p_seq_id") or 0) if is_p2p else int(entry.get("collective_seq_id") or 0)


def _elements(sizes: Any) -> int | None:
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        return None
    total = 0
    for shape in sizes:
        count = 1
        for size in shape:
            count *= int(size)
        total += count
    return total


def _frame(entry: Mapping[str, Any]) -> str:
    """The innermost frame outside torch, which is where the program made the call."""
    frames = entry.get("frames")
    if not isinstance(frames, Sequence) or isinstance(frames, str):
        return ""
    for frame in frames:
        file = str(frame.get("filename", "")) if isinstance(frame, Mapping) else ""
        if file and "/torch/" not in file and file != "??":
            return f", {frame.get('name')} at {PurePath(file).name}:{frame.get('line')}"
    return ""
