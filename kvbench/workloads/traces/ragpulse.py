"""RAGPulse: a week of a RAG service, with ids of contents instead of chained hashes.

`timestamp` is a string of seconds; `hash_ids` names the parts of the prompt by category, in the order in which they were
put together; an id means the same text wherever it stands, and the categories have no ids in common. A part's size is
not in this file (only in side files), so each category gets a nominal size; the user's input takes the rest, and the
prompt has exactly `input_length` tokens.

    {"timestamp": "82", "input_length": 3112, "output_length": 192, "hash_ids": {"sys_prompt": [8302, 14332, 15199], "passages_ids": [7398, 7370], "history": [15200], "web_search": [], "user_input": [26923]}, "session_id": "1757476916095-afhwfadnh5ew"}
"""  # noqa: E501

from pathlib import Path

from kvbench.workloads.traces.base import Reader, Row, TraceFormat, TraceNotes, TraceOptions, TraceRequest, shown
from kvbench.workloads.traces.lines import json_rows

# Nominal sizes, chosen so that most prompts need neither cutting nor much filling; the file does not hold the real
# ones.
NOMINAL_TOKENS = {"sys_prompt": 128, "passages_ids": 400, "history": 64, "web_search": 400, "user_input": 0}
LEAST_INPUT_TOKENS = 32  # kept for the user's input, so that two questions about the same passages stay two

FORMAT = TraceFormat(
    name="ragpulse",
    block_tokens=None,
    hash_kind="content",
    hash_scope="category",
    partial_tail="none",
    timing="recorded",
    reader="kvbench.workloads.traces.ragpulse:read",
    not_carried=(
        "the sizes of the parts (nominal: "
        + ", ".join(f"{name} {tokens}" for name, tokens in NOMINAL_TOKENS.items() if tokens)
        + " tokens; the user's input fills the prompt up to its recorded length)",
    ),
)


def read(path: Path, options: TraceOptions, notes: TraceNotes) -> Reader:
    """Every line as one request whose ids are `category:id`."""
    for ordinal, row in enumerate(json_rows(path, "ragpulse")):
        tokens = row.tokens("input_length")
        ids, sizes = _parts(row, tokens, notes)
        yield TraceRequest(
            ordinal=ordinal,
            at_s=_time_s(row),
            input_tokens=tokens,
            output_tokens=row.tokens("output_length"),
            ids=ids,
            id_tokens=sizes,
            session=row.text("session_id") if "session_id" in row.values else None,
            line=row.line,
        )


def _parts(row: Row, tokens: int, notes: TraceNotes) -> tuple[tuple[int | str, ...], tuple[int, ...]]:
    categories = row.get("hash_ids")
    if not isinstance(categories, dict):
        raise row.refuse(f"'hash_ids' is {shown(categories)}, not an object of categories")
    names: list[int | str] = []
    sizes: list[int] = []
    left = tokens - min(tokens, LEAST_INPUT_TOKENS)
    for category, members in categories.items():
        nominal = NOMINAL_TOKENS.get(category)
        if nominal is None:
            raise row.refuse(f"'hash_ids' has the unknown category {shown(category)}")
        if category == "user_input":
            left += min(tokens, LEAST_INPUT_TOKENS)
        for one in row.id_list(f"hash_ids.{category}", members):
            size = min(nominal or left, left)
            if size < nominal:
                notes.count("parts cut or left out because their nominal sizes exceed the recorded prompt length")
            if size:
                names.append(f"{category}:{one}")
                sizes.append(size)
                left -= size
    return tuple(names), tuple(sizes)


def _time_s(row: Row) -> float:
    value = row.get("timestamp")
    if isinstance(value, str):
        try:
            return row.number_of_seconds("timestamp", float(value))
        except ValueError:
            raise row.refuse(f"'timestamp' is {shown(value)}, not a number of seconds") from None
    return row.seconds("timestamp")
