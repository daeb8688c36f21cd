"""Reads one streamed answer as it arrives: a time stamp per chunk, JSON only where a number is in it."""

import json
from array import array
from typing import Any

_USAGE = b'"usage":'
_TIERS = b"cached_tokens_details"
_SGLANG_TIERS = {"device": "hbm", "host": "dram", "storage": "file"}
MOST_DETAIL = 300


class Stream:
    """The events of one answer. Feed it body bytes with the time at which they came."""

    __slots__ = (
        "cached_by_tier", "cached_tokens", "chunks", "done", "error", "first_choice_ns",
        "first_text_ns", "invalid", "kept", "loaded_bytes", "output_tokens", "prompt_tokens", "rest", "room",
        "tier_details", "token_ids", "usage_seen", "wants_ids",
    )  # fmt: skip

    def __init__(self, *, tier_details: bool = False, wants_ids: bool = False, room: int = 0) -> None:
        self.chunks = array("q")
        self.first_choice_ns = self.first_text_ns = 0
        self.rest = b""
        self.done = self.usage_seen = False
        self.error: str | None = None
        self.invalid = 0
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.cached_by_tier: dict[str, int] | None = None
        self.loaded_bytes: int | None = None
        self.tier_details, self.wants_ids = tier_details, wants_ids
        self.token_ids: list[int] = []
        self.room = room
        self.kept: list[bytes] = []

    def feed(self, data: bytes, now_ns: int) -> None:
        """Takes the next bytes; an event counts at the arrival of its last byte."""
        if self.rest:
            data = self.rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self.rest = events.pop()
        for event in events:
            payload = event[6:] if event[:6] == b"data: " else self._slow_payload(event)
            if not payload:
                continue
            if payload[:1] != b"{" or payload[-1:] != b"}":
                if payload.strip() == b"[DONE]":
                    self.done = True
                else:
                    self._bad(payload)
                continue
            if self.first_text_ns and not self.wants_ids and not self._has_news(payload):
                self.chunks.append(now_ns)
                if self.room > 0:
                    self.room -= len(payload)
                    self.kept.append(payload)
            else:
                self._read(payload, now_ns)

    def end(self) -> None:
        """No more bytes come; half an event that is left counts as invalid."""
        if self.rest.strip():
            self.feed(b"\n\n", 0)
        self.rest = b""

    def _has_news(self, payload: bytes) -> bool:
        at = payload.find(_USAGE)
        if at >= 0 and payload[at + 8 : at + 10].lstrip()[:1] == b"{":
            return True
        if payload.startswith((b'{"error"', b'{"object":"error"', b'{"object": "error"')):
            return True
        return self.tier_details and _TIERS in payload

    def _slow_payload(self, event: bytes) -> bytes:
        """The data of an event with other fields, comments or several lines; empty where there is none."""
        data = []
        for line in event.split(b"\n"):
            name, colon, value = line.partition(b":")
            if not line or (colon and name in (b"", b"event", b"id", b"retry")):
                continue
            if name != b"data":
                self._bad(event)
                return b""
            data.append(value.removeprefix(b" "))
        return b"\n".join(data)

    def _bad(self, text: bytes) -> None:
        self.invalid += 1
        if self.error is None and self.invalid == 1:
            self.error = f"an event is no JSON object: {text[:80].decode('utf-8', 'replace')!r}"

    def _read(self, payload: bytes, now_ns: int) -> None:
        try:
            body = json.loads(payload)
        except ValueError:
            self._bad(payload)
            return
        if "error" in body or body.get("object") == "error":
            self.error = f"error in the stream: {_error_text(body)}"
            return
        choices = body.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], dict):
            self._choice(choices[0], now_ns)
        usage = body.get("usage")
        if isinstance(usage, dict):
            self._usage(usage)
        if self.tier_details:
            self._sglang_tiers(body)

    def _choice(self, choice: dict[str, Any], now_ns: int) -> None:
        if not self.first_choice_ns:
            self.first_choice_ns = now_ns
        self.chunks.append(now_ns)
        delta = choice.get("delta")
        text = choice.get("text") or (delta.get("content") if isinstance(delta, dict) else None)
        if text and not self.first_text_ns:
            self.first_text_ns = now_ns
        ids = choice.get("token_ids")
        if self.wants_ids and isinstance(ids, list):
            self.token_ids.extend(ids)

    def _usage(self, usage: dict[str, Any]) -> None:
        self.usage_seen = True
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.output_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if not isinstance(details, dict):  # null is not 0: the server does not say
            return
        self.cached_tokens = _count(details.get("cached_tokens"))
        self.loaded_bytes = _count(details.get("loaded_bytes"))
        tiers = details.get("cached_tokens_by_tier")
        if isinstance(tiers, dict):
            self.cached_by_tier = {str(name): count for name, value in tiers.items() if (count := _count(value))}

    def _sglang_tiers(self, body: dict[str, Any]) -> None:
        choices = body.get("choices")
        holders = [body, *(choice for choice in choices or () if isinstance(choice, dict))]
        for holder in holders:
            for extension in (holder.get("sglext"), holder.get("SglExt"), holder.get("meta_info")):
                details = extension.get("cached_tokens_details") if isinstance(extension, dict) else None
                if isinstance(details, dict):
                    self.cached_by_tier = {
                        _SGLANG_TIERS[name]: count
                        for name, value in details.items()
                        if name in _SGLANG_TIERS and (count := _count(value))
                    }

    def check_kept(self) -> tuple[int, int]:
        """Reads the kept chunks after the run: how many there are, and how many are no JSON."""
        bad = 0
        for payload in self.kept:
            try:
                json.loads(payload)
            except ValueError:
                bad += 1
        checked = len(self.kept)
        self.kept = []
        return checked, bad


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _error_text(body: dict[str, Any]) -> str:
    error = body.get("error", body.get("message", ""))
    if isinstance(error, dict):
        error = error.get("message", error)
    return " ".join(str(error).split())[:MOST_DETAIL]
