"""Mooncake's FAST'25 and arXiv traces, and files in their form.

One request per line; `timestamp` in milliseconds; chained ids of 512 tokens, valid in the whole file, and the partly
filled last block has one too:

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
"""  # noqa: E501

from pathlib import Path

from kvbench.workloads.traces.base import Reader, TraceFormat, TraceNotes, TraceOptions, TraceRequest, checked_blocks
from kvbench.workloads.traces.lines import json_rows

FORMAT = TraceFormat(
    name="mooncake",
    block_tokens=512,
    hash_kind="chained",
    hash_scope="global",
    partial_tail="hashed",
    timing="recorded",
    reader="kvbench.workloads.traces.mooncake:read",
    not_carried=("sessions (the trace has none, so a request never waits for an earlier answer)",),
)


def read(path: Path, options: TraceOptions, notes: TraceNotes) -> Reader:
    """Every line as one request."""
    block_tokens = options.block_tokens or 512
    for ordinal, row in enumerate(json_rows(path, "mooncake")):
        tokens = row.tokens("input_length")
        ids = row.ids("hash_ids")
        checked_blocks(row, ids, tokens, block_tokens, "hashed")
        if "session_id" in row.values:
            notes.count("rows with a session_id (read as a complete prompt each, not as what a session adds)")
        yield TraceRequest(
            ordinal=ordinal,
            at_s=row.seconds("timestamp", per_second=1000),
            input_tokens=tokens,
            output_tokens=row.tokens("output_length"),
            ids=ids,
            session=row.text("session_id") if "session_id" in row.values else None,
            line=row.line,
        )
