"""Traces of agent sessions in the form of kv-cache-tester (WEKA): one JSON object per conversation.

`t`, `api_time` and `think_time` in seconds from the conversation's start; ids of 64 tokens that are valid in their own
conversation only, always floor(in / 64) of them, so the last `in mod 64` tokens have none; an entry of type `subagent`
holds the requests of an agent that ran beside its parent, with times from its own start:

    {"id": "trace_0011", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "type": "n", "in": 140, "out": 147, "hash_ids": [1, 2], "api_time": 4.1, "think_time": 0.0}, {"t": 9.5, "type": "subagent", "agent_id": "agent_001", "duration_ms": 14148, "requests": [{"t": 0.0, "in": 128, "out": 3, "hash_ids": [7, 8]}]}]}

A file may be one such object, or one per line; a folder of files is read in the order of their names.
"""  # noqa: E501

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.core.units import seconds_from_ms
from kvbench.workloads.traces.base import (
    Reader,
    Row,
    TraceFormat,
    TraceNotes,
    TraceOptions,
    TraceRequest,
    checked_blocks,
    shown,
)
from kvbench.workloads.traces.lines import json_documents

FORMAT = TraceFormat(
    name="weka",
    block_tokens=64,
    hash_kind="chained",
    hash_scope="file",
    partial_tail="unhashed",
    timing="think",
    reader="kvbench.workloads.traces.weka:read",
    not_carried=(
        "when a conversation began (each starts at its own zero; the workload's arrivals start them)",
        "sharing between conversations (ids are local to one)",
        "the recorded latencies of the provider (api_time, ttft)",
        "which model answered",
    ),
)


@dataclass(slots=True)
class _Entry:
    """A request of a conversation, with when it was recorded to end."""

    row: Row
    at_s: float
    end_s: float
    agent: str
    turn: int
    after: tuple[int, ...]  # how many entries back
    think_s: float


def read(path: Path, options: TraceOptions, notes: TraceNotes) -> Reader:
    """The requests of one conversation after those of another; sub-agents between the turns of their parent."""
    ordinal = 0
    for document in json_documents(path, "weka"):
        requests = document.get("requests")
        if not isinstance(requests, list):
            raise document.refuse(f"'requests' is {shown(requests)}, not a list")
        block_tokens = options.block_tokens or document.whole(
            "block_size", document.values.get("block_size", 64), least=1, most=1 << 16
        )
        name = document.text("id") if "id" in document.values else f"{path.name}:{document.line}"
        scope = name if document.values.get("hash_id_scope", "local") == "local" else "global"
        entries = list(_entries(document, requests, notes))
        for entry in entries:
            tokens = entry.row.tokens("in")
            ids = entry.row.ids("hash_ids")
            checked_blocks(entry.row, ids, tokens, block_tokens, "unhashed")
            yield TraceRequest(
                ordinal=ordinal,
                at_s=entry.at_s,
                input_tokens=tokens,
                output_tokens=entry.row.tokens("out"),
                ids=ids,
                scope=scope,
                conversation=f"{name}:{document.path}:{document.line}",
                session=f"{name}/{entry.agent}" if entry.agent else name,
                turn=entry.turn,
                think_s=entry.think_s,
                after=tuple(ordinal - back for back in entry.after),
                group="subagent" if entry.agent else "agent",
                line=document.line,
            )
            ordinal += 1


def _entries(document: Row, requests: list[Any], notes: TraceNotes) -> Iterator[_Entry]:
    """The entries in their recorded order. `after` counts back: 1 is the entry before this one in the output."""
    position = 0
    turn = 0
    main: tuple[int, float] | None = None  # position and end of the main agent's last request
    running: list[tuple[int, float]] = []  # last position and end of each sub-agent that runs
    for number, value in enumerate(requests):
        row = _row(document, value, f"requests[{number}]")
        at_s = row.seconds("t")
        if row.values.get("type") == "subagent":
            nested = row.get("requests")
            if not isinstance(nested, list):
                raise row.refuse(f"'requests' is {shown(nested)}, not a list")
            agent = str(row.values.get("agent_id", f"agent-{number}"))
            last: tuple[int, float] | None = None
            for step, inner in enumerate(nested):
                one = _row(document, inner, f"requests[{number}].requests[{step}]")
                start_s = at_s + one.seconds("t")
                entry = _entry(one, start_s, agent, step, [last or main], position, recorded_think=step > 0)
                last = (position, entry.end_s)
                position += 1
                yield entry
            if last is not None:
                duration = row.values.get("duration_ms", 0)
                end_s = at_s + seconds_from_ms(row.number_of_seconds("duration_ms", duration, per_second=1.0))
                running.append((last[0], max(end_s, last[1])))
            else:
                notes.count("sub-agents without a request")
            continue
        joined = [one for one in running if one[1] <= at_s]
        running = [one for one in running if one[1] > at_s]
        entry = _entry(row, at_s, "", turn, [main, *joined], position, recorded_think=not joined)
        main = (position, entry.end_s)
        position, turn = position + 1, turn + 1
        yield entry
    if running:
        notes.count("sub-agents that no later turn waited for", len(running))


def _entry(
    row: Row,
    at_s: float,
    agent: str,
    turn: int,
    before: list[tuple[int, float] | None],
    position: int,
    *,
    recorded_think: bool,
) -> _Entry:
    waits = [one for one in before if one is not None]
    pause_s = max(0.0, at_s - max(end_s for _, end_s in waits)) if waits else 0.0
    if waits and recorded_think and row.values.get("think_time") is not None:
        pause_s = row.seconds("think_time")
    took_s = row.seconds("api_time") if row.values.get("api_time") is not None else 0.0
    return _Entry(
        row=row,
        at_s=at_s,
        end_s=at_s + took_s,
        agent=agent,
        turn=turn,
        after=tuple(position - one for one, _ in waits),
        think_s=pause_s,
    )


def _row(document: Row, value: object, where: str) -> Row:
    if not isinstance(value, Mapping):
        raise document.refuse(f"{where} is {shown(value)}, not an object")
    return Row(value, document.path, document.line, "weka")
