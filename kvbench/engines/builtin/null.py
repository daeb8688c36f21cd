"""An engine that computes nothing: it answers at once, or after delays that were asked for. It measures clients."""

import codecs
import time
from collections.abc import Mapping, Sequence

from kvbench.core.units import ns_from_seconds
from kvbench.engines.builtin.generation import (
    Cancel,
    Cleared,
    Generation,
    Listener,
    PromptUse,
    ServedModel,
    TierCounts,
    TierSetting,
    Usage,
)
from kvbench.engines.builtin.timers import Timers

_TEXTS = tuple(f" t{number}" for number in range(256))
NULL_MODEL = ServedModel(
    name="null",
    vocab_size=2**31,
    max_context_tokens=2**20,
    page_tokens=16,
    kv_bytes_per_token=0.0,
    block_bytes=0,
    architecture="none",
    num_parameters=0,
)


class Utf8Tokenizer:
    """One id per byte of UTF-8; ids from 256 on have no text."""

    def encode(self, text: str) -> list[int]:
        """The bytes of the text."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the bytes among the ids."""
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def stream(self) -> "Utf8Stream":
        """Holds back bytes of an unfinished character."""
        return Utf8Stream()

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """One line per message."""
        return self.encode("".join(f"{message['role']}: {message['content']}\n" for message in messages))


class Utf8Stream:
    """Bytes to characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The characters that are complete."""
        return self._decoder.decode(bytes(token for token in ids if token < 256))

    def finish(self) -> str:
        """U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class NullEngine:
    """Answers `max_tokens` tokens: the first after `ttft_s`, each other `itl_s` after the one before."""

    def __init__(self, *, ttft_s: float, itl_s: float, timers: Timers) -> None:
        self.model = NULL_MODEL
        self.tokenizer = Utf8Tokenizer()
        self._ttft_ns = ns_from_seconds(ttft_s)
        self._itl_ns = ns_from_seconds(itl_s)
        self._timers = timers
        self._running: set[_Timed] = set()

    def submit(self, generation: Generation, listener: Listener) -> Cancel:
        """Answers now, or puts the first token on the clock."""
        if not self._ttft_ns and not self._itl_ns:
            ids = range(generation.max_tokens)
            listener.prompt_ready(_prompt(generation))
            listener.tokens(ids, [_TEXTS[number & 255] for number in ids], "length")
            listener.finished(_usage(generation))
            return _nothing
        timed = _Timed(generation, listener, time.monotonic_ns() + self._ttft_ns, self._itl_ns, self._timers)
        timed.running = self._running
        self._running.add(timed)
        self._timers.at(timed.next_ns, timed.step)
        return timed.cancel

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return 0

    def tiers(self) -> tuple[TierSetting, ...]:
        """None."""
        return ()

    def counts(self) -> tuple[TierCounts, ...]:
        """None."""
        return ()

    def clear(self, tiers: Sequence[str] | None) -> dict[str, Cleared]:
        """Nothing to clear."""
        return {}

    def set_enabled(self, tier: str, enabled: bool) -> None:
        """There is no tier to turn on or off: the server has refused the name."""

    def drain(self, timeout_s: float) -> bool:
        """Nothing is stored."""
        return True

    def close(self, timeout_s: float) -> None:
        """Forgets what it still had to answer."""
        self._timers.close()
        self._running.clear()


class _Timed:
    """One generation on the clock: times are absolute, so that a late token does not delay the next."""

    __slots__ = ("_count", "_generation", "_itl_ns", "_listener", "_timers", "next_ns", "running")

    def __init__(self, generation: Generation, listener: Listener, first_ns: int, itl_ns: int, timers: Timers) -> None:
        self._generation = generation
        self._listener: Listener | None = listener
        self._timers = timers
        self._itl_ns = itl_ns
        self._count = 0
        self.next_ns = first_ns
        self.running: set[_Timed] = set()

    def step(self) -> None:
        listener = self._listener
        if listener is None:
            return
        number = self._count
        if not number:
            listener.prompt_ready(_prompt(self._generation))
        self._count += 1
        last = self._count == self._generation.max_tokens
        listener.tokens((number,), (_TEXTS[number & 255],), "length" if last else None)
        if last:
            self.cancel()
            listener.finished(_usage(self._generation))
        else:
            self.next_ns += self._itl_ns
            self._timers.at(self.next_ns, self.step)

    def cancel(self) -> None:
        self._listener = None
        self.running.discard(self)


def _prompt(generation: Generation) -> PromptUse:
    return PromptUse(prompt_tokens=len(generation.prompt_ids))


def _usage(generation: Generation) -> Usage:
    return Usage(prompt=_prompt(generation), completion_tokens=generation.max_tokens)


def _nothing() -> None: ...
