"""BurstGPT: times, sessions and lengths; a response of 0 tokens is a request that failed.

Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,1,3.2,ChatGPT,472,18,490,Conversation log
"""

from pathlib import Path

from kvbench.workloads.traces.base import MOST_TOKENS, Reader, TraceFormat, TraceNotes, TraceOptions, TraceRequest
from kvbench.workloads.traces.lines import csv_rows, csv_seconds, csv_whole

FORMAT = TraceFormat(
    name="burstgpt",
    block_tokens=None,
    hash_kind="none",
    hash_scope="none",
    partial_tail="none",
    timing="recorded",
    reader="kvbench.workloads.traces.burstgpt:read",
    not_carried=(
        "reuse (the trace has no block ids: every prompt is unique, also within a session)",
        "the recorded latency and the model",
    ),
)


def read(path: Path, options: TraceOptions, notes: TraceNotes) -> Reader:
    """Every row that was answered, as one request of a unique prompt."""
    ordinal = 0
    for row in csv_rows(path, "burstgpt"):
        at_s = csv_seconds(row, "Timestamp")
        prompt = csv_whole(row, "Request tokens", most=MOST_TOKENS)
        answer = csv_whole(row, "Response tokens", most=MOST_TOKENS)
        if answer == 0:
            notes.count("failed requests (a response of 0 tokens; left out)")
            continue
        session = str(row.values.get("Session ID", ""))
        yield TraceRequest(
            ordinal=ordinal,
            at_s=at_s,
            input_tokens=prompt,
            output_tokens=answer,
            session=session or None,
            group=str(row.values.get("Log Type", "")) or None,
            line=row.line,
        )
        ordinal += 1
