"""LMCache's look-up log: which chunks each request asked for.

Only full chunks have a hash, the tokens past them none. Answers are not in the log.

    {"timestamp": 1722000000.25, "request_id": "r1", "model_name": "m", "chunk_size": 256, "seq_len": 600, "dtypes": ["bfloat16"], "shapes": [[2, 32, 256, 1024]], "chunk_hashes": ["a1b2", "c3d4"]}
"""  # noqa: E501

from pathlib import Path

from kvbench.workloads.traces.azure import iso_time_s
from kvbench.workloads.traces.base import Reader, TraceFormat, TraceNotes, TraceOptions, TraceRequest, checked_blocks
from kvbench.workloads.traces.lines import json_rows

DEFAULT_OUTPUT_TOKENS = 32

FORMAT = TraceFormat(
    name="lmcache",
    block_tokens=256,
    hash_kind="chained",
    hash_scope="global",
    partial_tail="unhashed",
    timing="recorded",
    reader="kvbench.workloads.traces.lmcache:read",
    not_carried=(
        f"answers (every request asks for {DEFAULT_OUTPUT_TOKENS} tokens unless output_tokens says otherwise)",
        "sessions",
    ),
)


def read(path: Path, options: TraceOptions, notes: TraceNotes) -> Reader:
    """Every look-up as one request."""
    models: set[str] = set()
    for ordinal, row in enumerate(json_rows(path, "lmcache")):
        tokens = row.tokens("seq_len")
        block_tokens = options.block_tokens or row.whole("chunk_size", row.get("chunk_size"), least=1, most=1 << 20)
        ids = row.ids("chunk_hashes")
        checked_blocks(row, ids, tokens, block_tokens, "unhashed")
        model = str(row.values.get("model_name", ""))
        if models and model not in models:
            notes.count("changes of model (chunks of different models never meet)")
        if len(models) < 1000:
            models.add(model)
        time = row.get("timestamp")
        yield TraceRequest(
            ordinal=ordinal,
            at_s=iso_time_s(row, "timestamp", time) if isinstance(time, str) else row.seconds("timestamp"),
            input_tokens=tokens,
            output_tokens=options.output_tokens or DEFAULT_OUTPUT_TOKENS,
            ids=ids,
            id_tokens=(block_tokens,) * len(ids),
            scope=f"{model}/{block_tokens}",
            line=row.line,
        )
