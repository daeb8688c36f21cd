"""Tells the JSON formats apart, by their keys, and hands each to its reader."""

import json
from pathlib import Path

from kvbench.collectives import flight_recorder, kineto, ras
from kvbench.collectives.summary import FileSummary
from kvbench.core.errors import KvbenchError
from kvbench.core.units import GIB, format_bytes

MOST_BYTES = 8 * GIB


def read_json(path: Path, *, name: str) -> FileSummary:
    """The summary of a profiler trace, a RAS snapshot or a flight-recorder dump."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise KvbenchError(f"{name}: {format_bytes(size)} of JSON do not fit into memory; record a shorter trace")
    try:
        body = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise KvbenchError(
            f"{name}:{error.lineno}: not complete JSON ({error.msg}); was the process killed while it wrote?"
        ) from error
    except (ValueError, RecursionError) as error:
        raise KvbenchError(f"{name}: not readable as JSON ({error}); give the file that the tool wrote") from error
    if kineto.is_trace(body):
        return kineto.from_trace(body, name=name, num_bytes=size)
    if ras.is_ras(body):
        return ras.from_ras(body, name=name, num_bytes=size)
    if flight_recorder.is_dump(body):
        return flight_recorder.from_dump(body, name=name, num_bytes=size)
    raise KvbenchError(
        f"{name}: JSON of no known kind (expected traceEvents, communicators or pg_config); which tool wrote it?"
    )
