"""A record of every event of the tiered store: as JSON lines, or as OpenTelemetry spans."""

import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol

from kvbench.tiers.tiered.results import EdgeFigures

SpanEvent = Literal["store", "load", "promote", "evict", "expire", "timeout", "mismatch", "drop", "drain", "clear"]

SEED_FIELDS = (
    "layer_id",
    "head_id",
    "token_range",
    "from_layer",
    "to_layer",
    "size_bytes",
    "latency_us",
    "prefix_hash",
    "hit_or_miss",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One event: the blocks of one request that took one edge in one call with one result.

    `prefix_hash` (hex) is that of the last block, whose hash covers those before it. `start_s` is the store's clock,
    which starts anywhere; `unix_s` is the time of day at the end.
    """

    event: SpanEvent
    from_tier: str
    to_tier: str
    request: str
    num_blocks: int
    num_bytes: int
    latency_s: float
    start_s: float
    unix_s: float
    prefix_hash: str
    identity: str
    result: str
    layers: tuple[int, int] | None = None
    token_range: tuple[int, int] | None = None


class SpanSink(Protocol):
    """Where spans go. With `per_block` the store hands over one span per block instead of one per call and result."""

    @property
    def per_block(self) -> bool: ...

    def add(self, span: Span) -> None:
        """Takes a span; called from several threads, without the store's lock."""
        ...

    def close(self) -> None:
        """Writes what is left."""
        ...


def seed_fields(span: Span) -> dict[str, object]:
    """The span under the field names of the production template. A block holds all heads: `head_id` is None."""
    return {
        "layer_id": None if span.layers is None else list(span.layers),
        "head_id": None,
        "token_range": None if span.token_range is None else list(span.token_range),
        "from_layer": span.from_tier,
        "to_layer": span.to_tier,
        "size_bytes": span.num_bytes,
        "latency_us": span.latency_s * 1e6,
        "prefix_hash": span.prefix_hash,
        "hit_or_miss": "hit" if span.result in ("ok", "exists") else "miss",
    }


def span_totals(spans: Iterable[Span]) -> dict[tuple[str, str, str, str], EdgeFigures]:
    """Sums per (request, event, from, to): what one request moved over each edge. Bytes are those of `ok` results."""
    totals: dict[tuple[str, str, str, str], EdgeFigures] = {}
    for span in spans:
        edge = totals.setdefault((span.request, span.event, span.from_tier, span.to_tier), EdgeFigures())
        edge.seconds += span.latency_s
        edge.results[span.result] = edge.results.get(span.result, 0) + span.num_blocks
        if span.result == "ok":
            edge.blocks += span.num_blocks
            edge.bytes += span.num_bytes
    return totals


class MemorySpans:
    """Keeps the last `limit` spans."""

    def __init__(self, *, limit: int = 100_000, per_block: bool = False) -> None:
        self.per_block = per_block
        self.spans: deque[Span] = deque(maxlen=limit)

    def add(self, span: Span) -> None:
        """Keeps a span."""
        self.spans.append(span)

    def close(self) -> None:
        """Nothing is left to write."""


class _Lines:
    """Whole lines at the end of a file. A disk that does not take them costs spans, counted, and never a caller."""

    def __init__(self, path: Path | str) -> None:
        self.file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - lives as long as the sink
        self.lost_spans = 0
        self._torn = False

    def write(self, text: str, spans: int) -> None:
        """Writes lines that tell of so many spans."""
        data = memoryview(("\n" * self._torn + text).encode())
        done = 0
        try:
            while done < len(data):
                done += self.file.write(data[done:]) or 0
            self._torn = False
        except (OSError, ValueError):  # ValueError: the file is closed
            self.lost_spans += spans
            self._torn = self._torn or done > 0

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


class JsonlSpans:
    """One JSON object per span and line; `seed_names` writes the production template's field names as well.

    Lines are written by the hundred. `lost_spans` counts those that the disk did not take.
    """

    def __init__(
        self, path: Path | str, *, per_block: bool = False, seed_names: bool = False, batch: int = 100
    ) -> None:
        self.per_block = per_block
        self._seed_names, self._batch = seed_names, batch
        self._lines = _Lines(path)
        self._lock = threading.Lock()
        self._waiting: list[str] = []

    @property
    def lost_spans(self) -> int:
        return self._lines.lost_spans

    def add(self, span: Span) -> None:
        """Queues a line."""
        fields: dict[str, object] = asdict(span)
        if self._seed_names:
            fields |= seed_fields(span)
        line = json.dumps(fields, separators=(",", ":")) + "\n"
        with self._lock:
            self._waiting.append(line)
            if len(self._waiting) >= self._batch:
                self._write()

    def close(self) -> None:
        """Writes what is left."""
        with self._lock:
            self._write()
            self._lines.close()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._lines.write("".join(waiting), len(waiting))


class OtlpJsonSpans:
    """OpenTelemetry spans in the OTLP JSON file format: one ExportTraceServiceRequest per line.

    The collector's `otlpjsonfile` receiver reads it. The format is a stable specification and needs no SDK. Spans of
    one request share a trace id; without a request every span is a trace of its own.
    """

    def __init__(
        self, path: Path | str, *, service: str = "kvbench", batch: int = 100, per_block: bool = False
    ) -> None:
        self.per_block = per_block
        self._resource = {"attributes": [_attribute("service.name", service)]}
        self._batch = batch
        self._lines = _Lines(path)
        self._lock = threading.Lock()
        self._waiting: list[dict[str, Any]] = []
        self._numbers = count(1)
        self._run = sha256(f"{time.time_ns()} {path}".encode()).digest()

    def add(self, span: Span) -> None:
        """Queues a span; every `batch` of them make a line."""
        number = next(self._numbers)
        whole = sha256(self._run + (span.request or f"#{number}").encode()).hexdigest()
        end_ns = int(span.unix_s * 1e9)
        failed = span.result not in ("ok", "exists", "miss")
        encoded = {
            "traceId": whole[:32],
            "spanId": sha256(self._run + number.to_bytes(8, "big")).hexdigest()[:16],
            "name": f"kv.{span.event}",
            "kind": 1,
            "startTimeUnixNano": str(end_ns - int(span.latency_s * 1e9)),
            "endTimeUnixNano": str(end_ns),
            "attributes": [
                _attribute(f"kvbench.{name}", value)
                for name, value in asdict(span).items()
                if name not in ("start_s", "unix_s") and value is not None
            ],
            "status": {"code": 2, "message": span.result} if failed else {"code": 1},
        }
        with self._lock:
            self._waiting.append(encoded)
            if len(self._waiting) >= self._batch:
                self._write()

    @property
    def lost_spans(self) -> int:
        """Spans that the disk did not take."""
        return self._lines.lost_spans

    def close(self) -> None:
        """Writes what is left."""
        with self._lock:
            self._write()
            self._lines.close()

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        scope = {"scope": {"name": "kvbench.tiers.tiered"}, "spans": waiting}
        line = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        self._lines.write(json.dumps(line, separators=(",", ":")) + "\n", len(waiting))


class TeeSpans:
    """Hands every span to several sinks."""

    def __init__(self, *sinks: SpanSink) -> None:
        self._sinks = sinks
        self.per_block = any(sink.per_block for sink in sinks)

    def add(self, span: Span) -> None:
        """Hands a span on."""
        for sink in self._sinks:
            sink.add(span)

    def close(self) -> None:
        """Closes every sink."""
        for sink in self._sinks:
            sink.close()


def _attribute(key: str, value: object) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"key": key, "value": {"boolValue": value}}
    if isinstance(value, int):
        return {"key": key, "value": {"intValue": str(value)}}
    if isinstance(value, float):
        return {"key": key, "value": {"doubleValue": value}}
    if isinstance(value, (tuple, list)):
        return {"key": key, "value": {"arrayValue": {"values": [_attribute("", each)["value"] for each in value]}}}
    return {"key": key, "value": {"stringValue": str(value)}}
