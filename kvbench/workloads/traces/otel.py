r"""OpenTelemetry spans of LLM calls (`gen_ai.*`): flat JSON as inference-perf writes it, or OTLP/JSON.

A message of `gen_ai.input.messages` is one part of the prompt, and equal messages in equal places are equal
prefixes. Only the structure is replayed, not the text: a message counts as one token per four characters, at least one, since the
recorded usage does not say how many tokens each message had.

    {"spans": [{"trace_id": "t", "span_id": "a", "start_time": "2026-02-25T10:00:00.0", "end_time": "2026-02-25T10:00:02.5", "attributes": {"gen_ai.operation.name": "chat", "gen_ai.input.messages": "[{\"role\": \"user\", \"content\": \"Hi\"}]", "gen_ai.usage.output_tokens": 20}}]}
"""  # noqa: E501

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.core.units import seconds_from_ns
from kvbench.workloads.traces.azure import iso_time_s
from kvbench.workloads.traces.base import Reader, Row, TraceFormat, TraceNotes, TraceOptions, TraceRequest, shown
from kvbench.workloads.traces.lines import json_documents, json_value

CHARACTERS_PER_TOKEN = 4
DEFAULT_OUTPUT_TOKENS = 32

FORMAT = TraceFormat(
    name="otel",
    block_tokens=None,
    hash_kind="content",
    hash_scope="global",
    partial_tail="none",
    timing="recorded",
    reader="kvbench.workloads.traces.otel:read",
    not_carried=(
        f"the text of the messages (each is synthetic, one token per {CHARACTERS_PER_TOKEN} characters)",
        "tool definitions, images and sampling settings",
        "the recorded latencies",
    ),
)
_INPUT_KEYS = ("gen_ai.input.messages", "gen_ai.prompt")
_INPUT_USAGE = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT_USAGE = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_OUTPUT_TEXT = ("gen_ai.output.text", "gen_ai.output.messages", "gen_ai.completion")
_SESSION_KEYS = ("gen_ai.conversation.id", "session.id", "exgentic.session.id")


def read(path: Path, options: TraceOptions, notes: TraceNotes) -> Reader:
    """Every span that holds an input message, as one request."""
    ordinal = 0
    for document in json_documents(path, "otel"):
        for span in _spans(document):
            messages = _messages(span, notes)
            if not messages:
                notes.count("spans without an input message (left out)")
                continue
            sizes = tuple(max(1, len(one) // CHARACTERS_PER_TOKEN) for one in messages)
            recorded = _first(span, _INPUT_USAGE)
            if isinstance(recorded, int) and recorded != sum(sizes):
                notes.count("spans whose recorded prompt tokens differ from the estimate")
            session = _first(span, _SESSION_KEYS) or span.values.get("trace_id") or span.values.get("traceId")
            yield TraceRequest(
                ordinal=ordinal,
                at_s=_start_s(span),
                input_tokens=span.whole("prompt tokens", sum(sizes), least=1, most=1 << 24),
                output_tokens=_output_tokens(span, options),
                ids=tuple(messages),
                id_tokens=sizes,
                session=None if session is None else str(session)[:200],
                line=span.line,
            )
            ordinal += 1


def _spans(document: Row) -> Iterator[Row]:
    """The spans of a document with their attributes as one mapping under `attributes`."""
    values: list[Any] = []
    if isinstance(document.values.get("spans"), list):
        values = document.values["spans"]
    elif isinstance(document.values.get("resourceSpans"), list):
        for resource in document.values["resourceSpans"]:
            for scope in _list(document, resource, "scopeSpans"):
                values.extend(_list(document, scope, "spans"))
    elif "attributes" in document.values:
        values = [document.values]
    else:
        raise document.refuse("has no 'spans', 'resourceSpans' or 'attributes'")
    for value in values:
        if not isinstance(value, Mapping):
            raise document.refuse(f"a span is {shown(value)}, not an object")
        attributes = value.get("attributes", {})
        if isinstance(attributes, list):
            attributes = {str(one.get("key")): _otlp_value(one) for one in attributes if isinstance(one, Mapping)}
        if not isinstance(attributes, Mapping):
            raise document.refuse(f"a span's attributes are {shown(attributes)}, not an object")
        yield Row({**value, "attributes": attributes}, document.path, document.line, "otel")


def _list(document: Row, value: object, key: str) -> list[Any]:
    found = value.get(key, []) if isinstance(value, Mapping) else None
    if not isinstance(found, list):
        raise document.refuse(f"{key!r} is {shown(found)}, not a list")
    return found


def _otlp_value(attribute: Mapping[str, Any]) -> Any:
    value = attribute.get("value")
    if not isinstance(value, Mapping):
        return value
    if "intValue" in value:
        text = str(value["intValue"])
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None
    return next(iter(value.values()), None)


def _first(span: Row, keys: tuple[str, ...]) -> Any:
    attributes: Mapping[str, Any] = span.values["attributes"]
    return next((attributes[key] for key in keys if attributes.get(key) not in (None, "")), None)


def _messages(span: Row, notes: TraceNotes) -> list[str]:
    """Each input message as canonical text."""
    value = _first(span, _INPUT_KEYS)
    if isinstance(value, str):
        if not value.lstrip().startswith(("[", "{")):
            return [value]
        value = json_value(value, span.path, span.line)
    if value is None:
        return []
    members = value if isinstance(value, list) else [value]
    return [json.dumps(one, sort_keys=True, ensure_ascii=False) for one in members]


def _output_tokens(span: Row, options: TraceOptions) -> int:
    recorded = _first(span, _OUTPUT_USAGE)
    if options.output_tokens:
        return options.output_tokens
    if recorded is not None:
        return span.whole("recorded output tokens", recorded, least=0, most=1 << 24)
    text = _first(span, _OUTPUT_TEXT)
    return max(1, len(text) // CHARACTERS_PER_TOKEN) if isinstance(text, str) else DEFAULT_OUTPUT_TOKENS


def _start_s(span: Row) -> float:
    for key in ("start_time", "startTime"):
        if key in span.values:
            return iso_time_s(span, key, span.text(key))
    value = span.get("startTimeUnixNano")
    text = str(value)
    if not text.isascii() or not text.isdecimal() or len(text) > 20:
        raise span.refuse(f"'startTimeUnixNano' is {shown(value)}, not nanoseconds")
    return seconds_from_ns(int(text))
