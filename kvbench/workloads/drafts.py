"""Requests before they have a time: pieces of text, answers, and who waits for whom within a session."""

from array import array
from collections.abc import Generator
from dataclasses import dataclass, field

from kvbench.workloads.prompts import scope_base, text_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Lengths as planned instead of as written: `scale` times as long, answers of at most `max_output_tokens`.

    A text keeps one length wherever it occurs, so prompts share the same pieces as before.
    """

    scale: float = 1.0
    max_output_tokens: int | None = None

    def text(self, tokens: float) -> int:
        """Tokens of a part of a prompt; nothing stays nothing, and something stays at least one token."""
        return max(1, round(tokens * self.scale)) if tokens >= 1 else 0

    def answer(self, tokens: float) -> int:
        """Tokens of an answer, at least one."""
        return max(1, min(round(tokens * self.scale), self.max_output_tokens or 1 << 31))


@dataclass(slots=True, kw_only=True)
class Draft:
    """One request of a session. `after` and `answers` count within the session.

    `start_s` is for requests that wait for none: seconds after the session's start.
    """

    keys: "array[int]"
    lengths: "array[int]"
    answers: list[tuple[int, int]] = field(default_factory=list)  # (piece, request of the session)
    answer_key: int = 0
    max_tokens: int
    after: tuple[int, ...] = ()
    start_s: float = 0.0
    think_s: float = 0.0
    session: str | None = None
    turn: int = 0
    group: str | None = None
    source: str = ""


Session = list[Draft]
Sessions = Generator[Session, None, None]


class Texts:
    """Names for pieces of text: those that are asked for again by number, and fresh ones."""

    def __init__(self, seed: int, workload: str) -> None:
        self._seed, self._workload = seed, workload
        self._bases: dict[str, int] = {}
        self._fresh: dict[str, int] = {}

    def named(self, scope: str, number: int) -> int:
        """The text of that number, the same on every call."""
        base = self._bases.get(scope)
        if base is None:
            base = self._bases[scope] = scope_base(self._seed, f"{self._workload}/{scope}")
        return text_key(base, number)

    def fresh(self, scope: str) -> int:
        """A text that nobody had before."""
        number = self._fresh[scope] = self._fresh.get(scope, 0) + 1
        return self.named(scope, number)


class Context:
    """A prompt that grows: what was said so far."""

    def __init__(self) -> None:
        self.keys: array[int] = array("Q")
        self.lengths: array[int] = array("I")
        self.answers: list[tuple[int, int]] = []

    def say(self, key: int, tokens: int) -> None:
        """Adds a text."""
        if tokens:
            self.keys.append(key)
            self.lengths.append(tokens)

    def answered(self, draft: Draft, number: int) -> None:
        """Adds the answer to request `number` of the session."""
        self.answers.append((len(self.keys), number))
        self.say(draft.answer_key, draft.max_tokens)

    def copy(self) -> "Context":
        other = Context()
        other.keys, other.lengths, other.answers = self.keys[:], self.lengths[:], list(self.answers)
        return other

    def ask(self, **settings: object) -> Draft:
        """A request with all that was said so far as its prompt."""
        return Draft(
            keys=self.keys[:],
            lengths=self.lengths[:],
            answers=list(self.answers),
            **settings,  # type: ignore[arg-type]
        )
