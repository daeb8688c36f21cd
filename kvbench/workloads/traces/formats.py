"""Which formats there are, which one a file has, and a trace opened for reading."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.workloads.traces.base import Reader, TraceFormat, TraceNotes, TraceOptions, TraceRequest
from kvbench.workloads.traces.lines import json_documents, text_lines

FORMATS = {
    "mooncake": "kvbench.workloads.traces.mooncake:FORMAT",
    "bailian": "kvbench.workloads.traces.bailian:FORMAT",
    "weka": "kvbench.workloads.traces.weka:FORMAT",
    "azure": "kvbench.workloads.traces.azure:FORMAT",
    "burstgpt": "kvbench.workloads.traces.burstgpt:FORMAT",
    "ragpulse": "kvbench.workloads.traces.ragpulse:FORMAT",
    "lmcache": "kvbench.workloads.traces.lmcache:FORMAT",
    "otel": "kvbench.workloads.traces.otel:FORMAT",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace that can be read as often as wanted; each reading takes the memory of one request or conversation.

    `notes` holds what the latest reading noticed, as far as it came.
    """

    path: Path
    format: TraceFormat
    options: TraceOptions
    notes: TraceNotes = field(default_factory=TraceNotes)

    @property
    def block_tokens(self) -> int | None:
        """Tokens of one block, as told or as the format has it."""
        return self.options.block_tokens or self.format.block_tokens

    def requests(self) -> Iterator[TraceRequest]:
        """The requests in the order of the file."""
        self.notes.counts.clear()
        reader: Reader = _named(self.format.reader)(self.path, self.options, self.notes)
        yield from reader


def trace_format(name: str) -> TraceFormat:
    """The format of that name."""
    if name not in FORMATS:
        close = get_close_matches(name, FORMATS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(FORMATS)}"
        raise UsageError(f"trace format {name!r} is not known; {hint}")
    return cast("TraceFormat", _named(FORMATS[name]))


def open_trace(
    path: Path, *, format_name: str | None = None, block_tokens: int | None = None, output_tokens: int | None = None
) -> Trace:
    """A trace; without a format's name, the one that its first row looks like."""
    for what, value in (("block_tokens", block_tokens), ("output_tokens", output_tokens)):
        if value is not None and not 1 <= value <= 1 << 20:
            raise UsageError(f"{what} is {value}; give a number from 1 to {1 << 20}")
    chosen = trace_format(format_name) if format_name else detected_format(path)
    if block_tokens and chosen.block_tokens is None:
        raise UsageError(f"{path}: a {chosen.name} trace has no blocks of fixed size; leave block_tokens out")
    return Trace(path=path, format=chosen, options=TraceOptions(block_tokens=block_tokens, output_tokens=output_tokens))


def detected_format(path: Path) -> TraceFormat:
    """The format of a file or folder, by the keys of its first row."""
    name = _detected(path)
    if name is None:
        raise KvbenchError(f"{path}: is not one of the known traces ({', '.join(FORMATS)}); name it with --format")
    return trace_format(name)


def _detected(path: Path) -> str | None:
    if not path.is_dir():
        first = next((text for _, text in text_lines(path) if text.strip()), None)
        if first is None:
            raise KvbenchError(f"{path}: is empty; name a trace with at least one request")
        if not first.lstrip().startswith(("{", "[")):
            return _by_header({one.strip() for one in first.split(",")})
        keys = _keys(first)
        if keys is not None:
            return _by_keys(keys)
    row = next(json_documents(path, "known"), None)
    return _by_keys(row.values) if row else None


def _keys(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _by_header(columns: set[str]) -> str | None:
    if {"TIMESTAMP", "ContextTokens"} <= columns:
        return "azure"
    return "burstgpt" if {"Timestamp", "Request tokens"} <= columns else None


def _by_keys(row: Mapping[str, Any]) -> str | None:
    for name, wanted in (
        ("lmcache", {"chunk_hashes"}),
        ("bailian", {"chat_id", "hash_ids"}),
        ("weka", {"requests", "block_size"}),
        ("otel", {"spans"}),
        ("otel", {"resourceSpans"}),
        ("otel", {"span_id", "attributes"}),
    ):
        if wanted <= set(row):
            return name
    if "hash_ids" in row:
        return "ragpulse" if isinstance(row["hash_ids"], dict) else "mooncake"
    return None


def _named(spelled: str) -> Any:
    module, _, name = spelled.partition(":")
    return getattr(import_module(module), name)
