"""Misbehaviour on request: a file says which requests meet which fault, and the same file always does the same."""

import asyncio
import difflib
import hashlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.units import parse_duration
from kvbench.engines.builtin.generation import ApiError
from kvbench.engines.builtin.http import Exchange, Request

# Each fault with the keys that it takes besides those that choose requests.
FAULTS: dict[str, tuple[str, ...]] = {
    "reset": ("after_tokens",),
    "die": ("after_tokens",),
    "end-early": ("after_tokens",),
    "stall": ("after_tokens", "delay"),
    "invalid-sse": ("after_tokens",),
    "status": ("status", "retry_after"),
    "slow-header": ("delay",),
    "slow-body": ("delay",),
    "missing-usage": (),
    "null-cached-tokens": (),
    "two-tokens": (),
}
RESETS = ("lies", "refused", "missing")
_SELECTORS = ("at", "every", "from", "until", "probability")
_EXAMPLE = "write it as docs/serve.md shows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One rule. Requests count from 0, in the order they come; a rule without a selector is for all of them."""

    fault: str
    number: int
    at: frozenset[int] | None = None
    every: int = 1
    first: int = 0
    until: int | None = None
    probability: float = 1.0
    after_tokens: int = 1
    delay_s: float = 1.0
    status: int = 500
    retry_after_s: int | None = None

    def applies(self, index: int, seed: int) -> bool:
        """Whether the rule is for this request; chance depends on nothing but seed, rule and index."""
        if self.at is not None and index not in self.at:
            return False
        if index < self.first or (self.until is not None and index >= self.until):
            return False
        if (index - self.first) % self.every:
            return False
        if self.probability >= 1:
            return True
        digest = hashlib.sha256(f"{seed} {self.number} {index}".encode()).digest()
        return int.from_bytes(digest[:8]) < self.probability * 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """All rules; of those that apply to a request the first counts. `reset` is how resets misbehave."""

    seed: int = 0
    rules: tuple[Fault, ...] = ()
    reset: str | None = None

    def of(self, index: int) -> Fault | None:
        """What happens to a request."""
        return next((rule for rule in self.rules if rule.applies(index, self.seed)), None)


def load_faults(path: Path) -> Faults:
    """The faults in a YAML file; a mistake is named with its rule and key."""
    import yaml

    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise KvbenchError(f"{path}: cannot be read ({error}); name a YAML file of faults") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{line}: is not YAML ({getattr(error, 'problem', None)}); {_EXAMPLE}") from error
    return parse_faults(written, str(path))


def parse_faults(written: object, source: str) -> Faults:
    """The faults in what a YAML file holds."""
    if not isinstance(written, Mapping):
        raise UsageError(f"{source}: holds no keys; {_EXAMPLE}")
    _known(written, ("seed", "requests", "reset"), source)
    rules = written.get("requests") or []
    if not isinstance(rules, list):
        raise UsageError(f"{source}: requests is a list of rules, got {rules!r}; {_EXAMPLE}")
    reset = written.get("reset")
    if reset is not None and reset not in RESETS:
        raise UsageError(f"{source}: reset is one of {', '.join(RESETS)}, got {reset!r}")
    return Faults(
        seed=_whole(written, "seed", 0, source, least=0),
        rules=tuple(_rule(rule, number, f"{source}: rule {number + 1}") for number, rule in enumerate(rules)),
        reset=reset,
    )


def _rule(rule: object, number: int, source: str) -> Fault:
    if not isinstance(rule, Mapping) or not isinstance(rule.get("fault"), str):
        raise UsageError(f"{source} names no fault; it is one of {', '.join(FAULTS)}")
    fault = rule["fault"]
    if fault not in FAULTS:
        raise UsageError(
            f"{source}: there is no fault {fault!r}{_hint(fault, FAULTS)}; it is one of {', '.join(FAULTS)}"
        )
    _known(rule, ("fault", *_SELECTORS, *FAULTS[fault]), source)
    at = rule.get("at")
    places = [at] if isinstance(at, int) else at
    if places is not None and not (isinstance(places, list) and all(type(place) is int for place in places)):
        raise UsageError(f"{source}: at is an index of a request or a list of them, got {at!r}")
    probability = rule.get("probability", 1.0)
    if type(probability) not in (int, float) or not 0 <= probability <= 1:
        raise UsageError(f"{source}: probability is a number from 0 to 1, got {probability!r}")
    retry_after = rule.get("retry_after")
    return Fault(
        fault=fault,
        number=number,
        at=None if places is None else frozenset(places),
        every=_whole(rule, "every", 1, source, least=1),
        first=_whole(rule, "from", 0, source, least=0),
        until=None if rule.get("until") is None else _whole(rule, "until", 0, source, least=0),
        probability=float(probability),
        after_tokens=_whole(rule, "after_tokens", 1, source, least=0),
        delay_s=_seconds(rule.get("delay", "1s"), "delay", source),
        status=_whole(rule, "status", 500, source, least=400, most=599),
        retry_after_s=None if retry_after is None else round(_seconds(retry_after, "retry_after", source)),
    )


def _known(written: Mapping[Any, Any], keys: Sequence[str], source: str) -> None:
    for key in written:
        if key not in keys:
            raise UsageError(f"{source} has the unknown key {key!r}{_hint(str(key), keys)}; it takes {', '.join(keys)}")


def _whole(written: Mapping[Any, Any], key: str, default: int, source: str, *, least: int, most: int = 2**31) -> int:
    value = written.get(key, default)
    if type(value) is not int or not least <= value <= most:
        raise UsageError(f"{source}: {key} is a whole number, at least {least}, got {value!r}")
    return value


def _seconds(value: object, key: str, source: str) -> float:
    if not isinstance(value, str):
        raise UsageError(f"{source}: {key} is a time such as 500ms, got {value!r}")
    try:
        return parse_duration(value)
    except UsageError as error:
        raise UsageError(f"{source}: {key}: {error}") from error


def _hint(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def refuse(fault: Fault | None) -> None:
    """Raises the status of a `status` fault."""
    if fault is not None and fault.fault == "status":
        kind = "rate_limit_exceeded" if fault.status == 429 else "internal_error"
        raise ApiError("a scripted fault", status=fault.status, kind=kind, retry_after_s=fault.retry_after_s)


class FaultyExchange:
    """An exchange that spoils what goes through it, once as many events have passed as the fault says."""

    def __init__(self, exchange: Exchange, fault: Fault, loop: asyncio.AbstractEventLoop) -> None:
        self._exchange = exchange
        self._fault = fault
        self._loop = loop
        self._events = 0
        self._struck = False
        self._held = False
        self._queue: deque[Callable[[], None]] = deque()
        self.streaming = False

    @property
    def request(self) -> Request:
        return self._exchange.request

    def send(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """A whole response, late or cut in its middle."""
        kind = self._fault.fault
        if kind in ("slow-header", "slow-body", "stall"):
            self._hold(self._fault.delay_s)
        elif kind in ("reset", "end-early"):
            head = f"HTTP/1.1 {status} OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
            self._exchange.raw(head.encode("latin-1") + body[: len(body) // 2])
            self._strike_later()
            return
        elif kind == "die":
            _die()
        elif kind == "invalid-sse":
            body = body[: len(body) // 2]
        self._do(lambda: self._exchange.send(status, body, content_type=content_type, headers=headers))

    def start_stream(self, headers: bytes = b"") -> None:
        """The head of a stream, late if it is to be."""
        if self.streaming:
            return
        self.streaming = True
        if self._fault.fault == "slow-header":
            self._hold(self._fault.delay_s)
        self._do(lambda: self._exchange.start_stream(headers))

    def event(self, data: bytes) -> None:
        """One event, if it is not this one that goes wrong."""
        self._do(lambda: self._event(data))

    def _event(self, data: bytes) -> None:
        kind = self._fault.fault
        due = self._events == self._fault.after_tokens and not self._struck
        self._events += 1
        if kind == "slow-body":
            self._exchange.event(data)
            self._hold(self._fault.delay_s)
        elif due and kind == "stall":
            self._struck = True
            self._hold(self._fault.delay_s)
            self._queue.appendleft(lambda: self._exchange.event(data))
        elif due and kind == "invalid-sse":
            self._struck = True
            self._exchange.event(data[: len(data) // 2])
        elif due and kind in ("reset", "die", "end-early"):
            self._struck = True
            if kind == "end-early":
                self._exchange.end_stream()
            else:
                self._strike_later()
        elif not (self._struck and kind in ("reset", "die", "end-early")):
            self._exchange.event(data)

    def _strike_later(self) -> None:
        """After what was written so far has left: a reset would take it back."""
        strike = _die if self._fault.fault == "die" else self._exchange.cut
        self._loop.call_later(0.02, strike)

    def end_stream(self) -> None:
        """The end, unless the stream is about to break."""
        self._do(self._end)

    def _end(self) -> None:
        if not (self._struck and self._fault.fault in ("reset", "die")):
            self._exchange.end_stream()

    def _do(self, what: Callable[[], None]) -> None:
        if self._held:
            self._queue.append(what)
        else:
            what()

    def _hold(self, seconds: float) -> None:
        self._held = True
        self._loop.call_later(seconds, self._release)

    def _release(self) -> None:
        self._held = False
        while self._queue and not self._held:
            self._queue.popleft()()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
