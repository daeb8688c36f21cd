"""Alibaba's Qwen-Bailian traces: chats of complete prompts, ids of 16 tokens.

`timestamp` in seconds; `parent_chat_id` is -1 for the first turn; `hash_ids` are chained and valid in the whole file. The
last block, if partly filled, may or may not have an id; both are read.

    {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 33, "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090, 1091]}
"""  # noqa: E501

from pathlib import Path

from kvbench.workloads.traces.base import Reader, TraceFormat, TraceNotes, TraceOptions, TraceRequest, checked_blocks
from kvbench.workloads.traces.lines import json_rows

FORMAT = TraceFormat(
    name="bailian",
    block_tokens=16,
    hash_kind="chained",
    hash_scope="global",
    partial_tail="either",
    timing="recorded",
    reader="kvbench.workloads.traces.bailian:read",
    not_carried=("how long a user thought (turns start at their recorded times, even when an answer is late)",),
)


def read(path: Path, options: TraceOptions, notes: TraceNotes) -> Reader:
    """Every line as one request; turns of one chat share a session."""
    block_tokens = options.block_tokens or 16
    roots: dict[str, str] = {}
    for ordinal, row in enumerate(json_rows(path, "bailian")):
        tokens = row.tokens("input_length")
        ids = row.ids("hash_ids")
        checked_blocks(row, ids, tokens, block_tokens, "either")
        chat, parent = row.text("chat_id"), row.text("parent_chat_id")
        if parent not in ("-1", chat) and parent not in roots:
            notes.count("turns whose parent chat is not in the file (taken as first turns)")
        roots[chat] = roots.get(parent, chat)
        yield TraceRequest(
            ordinal=ordinal,
            at_s=row.seconds("timestamp"),
            input_tokens=tokens,
            output_tokens=row.tokens("output_length"),
            ids=ids,
            session=roots[chat],
            turn=max(0, row.whole("turn", row.get("turn"), least=0, most=1 << 20) - 1) if "turn" in row.values else 0,
            group=row.text("type") if "type" in row.values else None,
            line=row.line,
        )
