"""Azure's public LLM traces: times and lengths, nothing about reuse.

Times have seven fractional digits, which `strptime` refuses and `fromisoformat` cuts off silently; here they count.
Later releases add a column `NumImages` and an offset to the time.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:17:03.9799600,4808,10
"""

import re
from datetime import UTC, datetime
from pathlib import Path

from kvbench.workloads.traces.base import (
    MOST_TOKENS,
    Reader,
    Row,
    TraceFormat,
    TraceNotes,
    TraceOptions,
    TraceRequest,
    shown,
)
from kvbench.workloads.traces.lines import csv_rows, csv_whole

FORMAT = TraceFormat(
    name="azure",
    block_tokens=None,
    hash_kind="none",
    hash_scope="none",
    partial_tail="none",
    timing="recorded",
    reader="kvbench.workloads.traces.azure:read",
    not_carried=("reuse (the trace has no block ids: every prompt is unique, so no tier below can help)",),
)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,12}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII)


def read(path: Path, options: TraceOptions, notes: TraceNotes) -> Reader:
    """Every row as one request of a unique prompt."""
    for ordinal, row in enumerate(csv_rows(path, "azure")):
        if row.values.get("NumImages") not in (None, "", "0"):
            notes.count("requests with images (only their text tokens are replayed)")
        yield TraceRequest(
            ordinal=ordinal,
            at_s=_time_s(row, "TIMESTAMP"),
            input_tokens=csv_whole(row, "ContextTokens", most=MOST_TOKENS),
            output_tokens=csv_whole(row, "GeneratedTokens", most=MOST_TOKENS),
            line=row.line,
        )


def _time_s(row: Row, key: str) -> float:
    text = str(row.get(key))
    return iso_time_s(row, key, text)


def iso_time_s(row: Row, key: str, text: str) -> float:
    """Seconds since 1970 of an ISO time with any number of fractional digits; without an offset it is UTC."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise row.refuse(f"{key!r} is {shown(text)}, not a time such as 2023-11-16 18:17:03.9799600")
    try:
        whole = datetime.fromisoformat(match[1] + (match[3] or ""))
    except ValueError:
        raise row.refuse(f"{key!r} is {shown(text)}, which is no date", "correct or remove the row") from None
    if whole.tzinfo is None:
        whole = whole.replace(tzinfo=UTC)
    fraction = int(match[2]) / 10 ** len(match[2]) if match[2] else 0.0
    return row.number_of_seconds(key, whole.timestamp() + fraction)
