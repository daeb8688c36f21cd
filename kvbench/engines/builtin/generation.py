"""What is asked of an engine and what comes back: the interface between the HTTP API and whatever computes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

FinishReason = Literal["stop", "length"]


class ApiError(Exception):
    """A request that gets an error instead of tokens: status, message, and what OpenAI's form carries besides."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request to generate, checked."""

    request_id: str
    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    stream: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUse:
    """Where a prompt's KV came from: `cached_tokens_by_tier` sums to `cached_tokens`, nearest tier first.

    `queue_s` passed before its first step, `prefill_s` in its steps, waiting for loads included.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    cached_tokens_by_tier: Mapping[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt: PromptUse
    completion_tokens: int


class Listener(Protocol):
    """Who waits for a generation. Every method is called on the event loop; after `finished` or `failed`, none is."""

    def prompt_ready(self, prompt: PromptUse) -> None:
        """The prompt is done; its first token follows."""
        ...

    def tokens(self, ids: Sequence[int], texts: Sequence[str], reason: FinishReason | None) -> None:
        """New tokens with the text that each completes; a text may be empty. With a reason they are the last."""
        ...

    def finished(self, usage: Usage) -> None:
        """The generation is complete, after the last tokens."""
        ...

    def failed(self, error: ApiError) -> None:
        """There will be no more tokens."""
        ...


Cancel = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What a reset has removed from one tier."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSetting:
    """One tier as it is configured, nearest first in a list; `spec` is its spelling."""

    name: str
    spec: str
    capacity_bytes: int | None
    policy: str
    eviction: str
    cooldown_s: float
    ttl_s: float | None
    load_timeout_s: float | None
    shared: bool
    enabled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """Everything one tier has done since the start, and what it holds."""

    name: str
    query_blocks: int = 0
    hit_blocks: int = 0
    load_blocks: int = 0
    load_bytes: int = 0
    load_s: float = 0.0
    store_blocks: int = 0
    store_bytes: int = 0
    store_s: float = 0.0
    evicted: int = 0
    dropped: int = 0
    lost: int = 0
    timeouts: int = 0
    corrupt: int = 0
    failures: int = 0
    pending: int = 0
    blocks: int = 0
    used_bytes: int = 0
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What a client may want to know about the model."""

    name: str
    vocab_size: int
    max_context_tokens: int
    page_tokens: int
    kv_bytes_per_token: float
    block_bytes: int
    architecture: str
    num_parameters: int
    kv_bytes_per_token_by_kind: Mapping[str, int] = field(default_factory=dict)
    state_bytes: int = 0
    dtype: str = ""
    device: str = ""
    weights: str = ""


class TextStream(Protocol):
    """Turns ids into text as they come; the pieces joined are the text of all ids."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these ids."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def stream(self) -> TextStream:
        """A decoder for one growing output."""
        ...

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The ids of a conversation, up to where the assistant's answer begins."""
        ...


class Engine(Protocol):
    """Something that generates: the scheduler over a model, or one that only pretends. Called on the event loop."""

    @property
    def model(self) -> ServedModel: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def submit(self, generation: Generation, listener: Listener) -> Cancel:
        """Takes a request, or raises `ApiError`. The listener may be called before this returns."""
        ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def tiers(self) -> tuple[TierSetting, ...]:
        """The tiers as configured now."""
        ...

    def counts(self) -> tuple[TierCounts, ...]:
        """The counters of every tier."""
        ...

    def clear(self, tiers: Sequence[str] | None) -> dict[str, Cleared]:
        """Empties tiers (None: all) and says what was there."""
        ...

    def set_enabled(self, tier: str, enabled: bool) -> None:
        """Turns a tier on or off; it keeps its blocks."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Waits until every store is done; False if it took too long. Called on a thread of its own."""
        ...

    def close(self, timeout_s: float) -> None:
        """Ends everything that is running and frees what it holds."""
        ...
