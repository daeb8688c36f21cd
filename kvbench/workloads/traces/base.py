"""What every trace reader yields, and the checks they share: a refusal names file, line, value and what to do."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbench.core.errors import KvbenchError

HashKind = Literal["chained", "content", "none"]
HashScope = Literal["global", "file", "category", "none"]
PartialTail = Literal["hashed", "unhashed", "either", "none"]

MOST_TOKENS = 1 << 24
MOST_IDS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """What a format says about reuse, and what it leaves out.

    `hash_kind`: `chained` ids name a block and all before it, `content` ids name a block wherever it stands.
    `hash_scope`: where equal ids mean equal blocks. `partial_tail`: whether the last, partly filled block has an id.
    `block_tokens` is None where blocks have no fixed size or there are no ids. `timing` is how the recorded times are
    meant: `recorded` start times, or `think`, a pause after the request before. `not_carried` goes into the plan's
    warnings.
    """

    name: str
    block_tokens: int | None
    hash_kind: HashKind
    hash_scope: HashScope
    partial_tail: PartialTail
    timing: Literal["recorded", "think"]
    reader: str
    not_carried: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace. `after` are ordinals (0, 1, …) of earlier requests of the same trace.

    `conversation` is set where times count from the start of a conversation, whose requests then stand together. `ids`
    cover the prompt from its start; `id_tokens` is given for content ids, whose sizes differ. Tokens past the last id
    belong to this request alone.
    """

    ordinal: int
    at_s: float | None
    input_tokens: int
    output_tokens: int
    ids: tuple[int | str, ...] = ()
    id_tokens: tuple[int, ...] | None = None
    scope: str = ""
    conversation: str | None = None
    session: str | None = None
    turn: int = 0
    think_s: float | None = None
    after: tuple[int, ...] = ()
    group: str | None = None
    line: int


@dataclass(slots=True)
class TraceNotes:
    """What a reader noticed while it went along: how often, by what happened."""

    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What a reader may be told: another block size, output tokens where the file has none."""

    block_tokens: int | None = None
    output_tokens: int | None = None


class Row:
    """One JSON object or CSV row with its place; every access checks type and range."""

    def __init__(self, values: Mapping[str, Any], path: str, line: int, format_name: str) -> None:
        self.values, self.path, self.line, self.format_name = values, path, line, format_name

    def refuse(self, problem: str, remedy: str | None = None) -> KvbenchError:
        hint = remedy or f"is this a {self.format_name} trace? name the format with --format"
        return KvbenchError(f"{self.path}:{self.line}: {problem}; {hint}")

    def get(self, key: str) -> Any:
        if key not in self.values:
            known = ", ".join(str(one) for one in list(self.values)[:8])
            raise self.refuse(f"{key!r} is missing (the row has {shown(known)})")
        return self.values[key]

    def tokens(self, key: str, *, least: int = 0) -> int:
        return self.whole(key, self.get(key), least=least, most=MOST_TOKENS)

    def whole(self, key: str, value: Any, *, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(f"{key!r} is {shown(value)}, not a whole number")
        if not least <= value <= most:
            raise self.refuse(f"{key!r} is {shown(value)}, not from {least} to {most}", "correct or remove the row")
        return value

    def seconds(self, key: str, *, per_second: float = 1.0) -> float:
        return self.number_of_seconds(key, self.get(key), per_second=per_second)

    def number_of_seconds(self, key: str, value: Any, *, per_second: float = 1.0) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"{key!r} is {shown(value)}, not a number")
        try:
            seconds = value / per_second
        except OverflowError:
            seconds = math.inf
        if not math.isfinite(seconds) or not 0 <= seconds < 1e12:
            raise self.refuse(f"{key!r} is {shown(value)}, not a time from 0 on", "correct or remove the row")
        return seconds

    def text(self, key: str) -> str:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise self.refuse(f"{key!r} is {shown(value)}, not a name")
        return str(value)

    def ids(self, key: str) -> tuple[int | str, ...]:
        return self.id_list(key, self.get(key))

    def id_list(self, key: str, value: Any) -> tuple[int | str, ...]:
        if not isinstance(value, list):
            raise self.refuse(f"{key!r} is {shown(value)}, not a list of block ids")
        if len(value) > MOST_IDS:
            raise self.refuse(f"{key!r} has {len(value)} ids, more than {MOST_IDS}", "correct or remove the row")
        for one in value:
            if isinstance(one, bool) or not isinstance(one, int | str):
                raise self.refuse(f"{key!r} holds {shown(one)}, which is not a block id (a whole number or a string)")
        return tuple(value)


def checked_blocks(row: Row, ids: tuple[int | str, ...], tokens: int, block_tokens: int, tail: PartialTail) -> None:
    """Refuses a row whose ids do not cover its prompt in blocks of that size."""
    full, rest = divmod(tokens, block_tokens)
    allowed = {
        "hashed": {full + (rest > 0)},
        "unhashed": {full},
        "either": {full, full + (rest > 0)},
        "none": {len(ids)},
    }[tail]
    if len(ids) not in allowed:
        wanted = " or ".join(str(one) for one in sorted(allowed))
        raise row.refuse(
            f"{len(ids)} block ids for {tokens} prompt tokens, where blocks of {block_tokens} tokens make {wanted}",
            "if its blocks have another size, give block_tokens (in a workload file, under trace)",
        )


def shown(value: object) -> str:
    """A value as an error shows it: on one line, cut short."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 64:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


Reader = Iterator[TraceRequest]
