"""What a worker process gets and what it gives back; both picklable, both without a reference to anything else."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbench.workloads.base import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request of a worker. When it is sent: `at_s` after the anchor, or `think_s` after all of `after` ended, or,
    with neither, when one of the worker's slots is free.
    """

    index: int
    at_s: float | None
    think_s: float
    after: tuple[int, ...]
    root: int
    prompt: "Prompt | array[int] | str"
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to give up on a request, and how many may be on their way at a time in one worker."""

    connect_s: float = 10.0
    read_s: float = 120.0
    total_s: float = 600.0
    max_in_flight: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """Everything one worker sends. `slots` is its share of a closed loop's concurrency; None in an open loop.

    `fields` go into every request's body. With `words` a prompt is sent as text, each id as the word of that number, to
    servers that take no ids. `answers_needed` are the requests whose output ids later prompts contain.
    """

    host: str
    port: int
    secure: bool = False
    path: str = "/v1/completions"
    fields: Mapping[str, object] = field(default_factory=dict)
    requests: tuple[LoadRequest, ...]
    slots: int | None = None
    limits: Limits = field(default_factory=Limits)
    words: tuple[str, ...] | None = None
    tier_details: bool = False
    answers_needed: frozenset[int] = frozenset()


class Finished(NamedTuple):
    """One request as it went. Times are `time.monotonic_ns()`; 0 where the moment never came.

    `status` is one of ok, http, refused, connect-timeout, read-timeout, total-timeout, cut, invalid, error, cancelled.
    `invalid_events` counts stream events that are no JSON object, `chunk_ns` holds the arrival of
    each chunk with choices, `number` is the index of the request in the plan.
    """

    number: int
    status: str
    detail: str
    http_status: int
    due_ns: int
    sent_ns: int
    first_choice_ns: int
    first_text_ns: int
    last_choice_ns: int
    end_ns: int
    chunk_ns: "array[int]"
    invalid_events: int
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    cached_by_tier: dict[str, int] | None
    loaded_bytes: int | None
    reused_connection: bool
    resent: bool


class Progress(NamedTuple):
    """A worker's news since the last time."""

    finished: tuple[Finished, ...]
    in_flight: int
    sent: int


class WorkerSummary(NamedTuple):
    """A worker's last words."""

    finished: tuple[Finished, ...]
    not_sent: int
    held_back: int
    """Requests that were due but waited because `max_in_flight` were on their way."""
    loop_lag_s: tuple[float, ...]
    cpu_s: float
    run_cpu_s: float
    run_s: float
    max_rss_bytes: int
    checked_chunks: int
    bad_chunks: int
    """Of the chunks read again after the run: how many were no JSON."""
