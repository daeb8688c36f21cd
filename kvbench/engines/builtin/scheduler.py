"""One compute thread for many requests: admission, chunked prefill between decode steps, cancelling, end."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvbench.core.errors import UsageError
from kvbench.engines.builtin.generation import (
    ApiError,
    Cancel,
    Cleared,
    FinishReason,
    Generation,
    Listener,
    PromptUse,
    ServedModel,
    TierCounts,
    TierSetting,
    Tokenizer,
    Usage,
)
from kvbench.engines.builtin.stop_text import StopText
from kvbench.engines.builtin.tier_store import ServedTiers

_IDLE_S = 1.0  # the longest sleep of a thread that has nothing to do
_LOADING_S = 0.0005  # between two looks at loads when nothing else is to do


class Sequence_(Protocol):
    """A running request of a runner."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int]
    loaded_bytes: int
    output_ids: list[int]
    computed: int
    finish_reason: str | None

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def is_loading(self) -> bool: ...


S = TypeVar("S", bound=Sequence_)


class Runner(Protocol[S]):
    """A model, as the scheduler drives it from its one thread; `ModelRunner` and `NullRunner` are some."""

    @property
    def served(self) -> ServedModel: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def begin(self, generation: Generation) -> S:
        """Looks the prompt's prefix up and begins to load it."""
        ...

    def prefill_step(self, sequence: S, max_tokens: int) -> bool:
        """Computes up to `max_tokens` more of the prompt; True when the first token is there."""
        ...

    def decode_step(self, sequences: Sequence[S]) -> None:
        """One more token for each."""
        ...

    def finish(self, sequence: S, *, cancelled: bool) -> None:
        """Frees a sequence; unless cancelled, its last full pages are stored."""
        ...

    def settle(self) -> None:
        """Hands over what is due to be stored: there will be no step for a while."""
        ...

    def close(self) -> None:
        """Frees the model."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """How much a scheduler takes on."""

    max_running: int = 16
    max_waiting: int = 256
    prefill_tokens: int = 512
    """Prompt tokens computed between two decode steps, of all prompts together."""


class _Job(Generic[S]):
    """A request from submission to its end."""

    __slots__ = (
        "cancelled",
        "generation",
        "listener",
        "prefill_s",
        "queue_s",
        "sent",
        "sequence",
        "stop",
        "submitted_s",
        "text",
    )

    def __init__(self, generation: Generation, listener: Listener, tokenizer: Tokenizer) -> None:
        self.generation = generation
        self.listener = listener
        self.submitted_s = time.monotonic()
        self.queue_s = 0.0
        self.prefill_s = 0.0
        self.sequence: S | None = None
        self.cancelled = False
        self.sent = 0
        self.text = tokenizer.stream()
        self.stop = StopText(generation.stop)

    def prompt_use(self, sequence: S) -> PromptUse:
        return PromptUse(
            prompt_tokens=sequence.prompt_tokens,
            cached_tokens=sequence.cached_tokens,
            cached_tokens_by_tier=dict(sequence.cached_tokens_by_tier),
            loaded_bytes=sequence.loaded_bytes,
            queue_s=self.queue_s,
            prefill_s=self.prefill_s,
        )


class Scheduler(Generic[S]):
    """The engine over a runner. Requests start in the order they came; steps take turns among those that run.

    A prompt takes at most half of a step's prefill tokens while others wait for theirs, so that a short one is not
    stuck behind a long one; every step ends with one token for every request that has its first.
    """

    def __init__(
        self,
        runner: Runner[S],
        tiers: ServedTiers,
        *,
        limits: SchedulerLimits,
        loop: asyncio.AbstractEventLoop,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        self.model = runner.served
        self.tokenizer: Tokenizer = runner.tokenizer
        self.on_death = on_death
        self._runner = runner
        self._eos = frozenset(runner.eos_ids)
        self._tiers = tiers
        self._limits = limits
        self._loop = loop
        self._wake = threading.Condition()
        self._waiting: deque[_Job[S]] = deque()
        self._running: list[_Job[S]] = []
        self._starting = 0
        self._closing = False
        self._dead = False
        self._idle = threading.Event()
        self._out: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="kvbench-compute", daemon=True)
        self._thread.start()

    # called on the event loop

    def submit(self, generation: Generation, listener: Listener) -> Cancel:
        """Puts a request into the queue, or refuses it because the queue is full."""
        job: _Job[S] = _Job(generation, listener, self.tokenizer)
        with self._wake:
            if self._dead or self._closing:
                raise ApiError("the engine has stopped", status=503, kind="service_unavailable")
            free = max(0, self._limits.max_running - self.num_running)  # those it will take as soon as it looks
            if len(self._waiting) >= self._limits.max_waiting + free:
                raise ApiError(
                    f"{len(self._waiting)} requests are waiting already; try again later",
                    status=429,
                    kind="rate_limit_exceeded",
                    retry_after_s=1,
                )
            self._waiting.append(job)
            self._idle.clear()
            self._wake.notify()

        def cancel() -> None:
            with self._wake:
                job.cancelled = True
                if job.sequence is None and job in self._waiting:
                    self._waiting.remove(job)
                self._wake.notify()

        return cancel

    @property
    def num_running(self) -> int:
        return len(self._running) + self._starting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def tiers(self) -> tuple[TierSetting, ...]:
        """The tiers as configured now."""
        return self._tiers.settings()

    def counts(self) -> tuple[TierCounts, ...]:
        """The counters of every tier."""
        return self._tiers.counts()

    def set_enabled(self, tier: str, enabled: bool) -> None:
        """Turns a tier on or off."""
        self._tiers.set_enabled(tier, enabled)

    # called on a control thread

    def clear(self, tiers: Sequence[str] | None) -> dict[str, Cleared]:
        """Empties tiers and says what was there."""
        return self._tiers.clear(tiers)

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing runs and every store is done."""
        deadline = time.monotonic() + timeout_s
        if not self._idle.wait(timeout_s):
            return False
        return self._tiers.flush(max(0.0, deadline - time.monotonic()))

    def close(self, timeout_s: float) -> None:
        """Ends the thread, then the tiers."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s + _IDLE_S)
        if not self._thread.is_alive():
            self._runner.close()
            self._tiers.close(timeout_s)

    # the compute thread

    def _run(self) -> None:
        try:
            while self._await_work():
                self._step()
                self._deliver()
            self._end_all("the server was stopped", 503)
        except BaseException:
            self._dead = True
            self._end_all("the engine failed; its log has the reason", 500)
            if self.on_death is not None:
                self._loop.call_soon_threadsafe(self.on_death)
            raise
        finally:
            self._idle.set()

    def _await_work(self) -> bool:
        """Sleeps while there is nothing to do; admits what may run; False at the end."""
        settled = False
        while True:
            with self._wake:
                if self._closing:
                    return False
                if self._waiting or self._running:
                    break
                if settled:
                    self._idle.set()
                    self._wake.wait(_IDLE_S)
            if not settled:
                self._runner.settle()
                settled = True
        return True

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        prefilling = [job for job in self._running if not _sequence(job).output_ids]
        decoding = [job for job in self._running if _sequence(job).output_ids]
        self._prefill(prefilling, busy=bool(decoding))
        if decoding:
            self._runner.decode_step([_sequence(job) for job in decoding])
            for job in decoding:
                self._collect(job)

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running if job.cancelled]:
            self._running.remove(job)
            self._runner.finish(_sequence(job), cancelled=True)

    def _admit(self) -> None:
        while len(self._running) < self._limits.max_running:
            with self._wake:
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._starting = 1
            if not job.cancelled:
                self._start(job)
            self._starting = 0

    def _start(self, job: _Job[S]) -> None:
        job.queue_s = time.monotonic() - job.submitted_s
        try:
            job.sequence = self._runner.begin(job.generation)
        except UsageError as error:
            refusal = ApiError(str(error))
            self._out.append(partial(job.listener.failed, refusal))
        else:
            self._running.append(job)

    def _prefill(self, jobs: list[_Job[S]], *, busy: bool) -> None:
        ready = [job for job in jobs if not _sequence(job).is_loading]
        if not ready and jobs:
            if busy:
                return  # tokens for the others, while the tiers deliver
            with self._wake:
                if not self._waiting or len(self._running) >= self._limits.max_running:
                    self._wake.wait(_LOADING_S)
            return  # whoever comes now need not wait for a tier that others wait for
        left = self._limits.prefill_tokens
        for position, job in enumerate(ready):
            if left <= 0:
                return
            sequence = _sequence(job)
            others = len(ready) - position - 1
            before, begin_s = sequence.computed, time.monotonic()
            done = self._runner.prefill_step(sequence, left if not others else max(1, left // 2))
            job.prefill_s += time.monotonic() - begin_s
            left -= max(1, sequence.computed - max(before, sequence.cached_tokens))
            if done:
                self._out.append(partial(job.listener.prompt_ready, job.prompt_use(sequence)))
                self._collect(job)

    def _collect(self, job: _Job[S]) -> None:
        """Turns new ids into text, sees whether the request is done, and puts what is to tell into the outbox."""
        sequence = _sequence(job)
        ids = sequence.output_ids[job.sent :]
        if not ids:
            return
        job.sent += len(ids)
        reason: FinishReason | None = None
        if sequence.finish_reason is not None:
            reason = "stop" if sequence.finish_reason == "stop" else "length"
        visible = ids[:-1] if reason == "stop" and ids[-1] in self._eos else ids
        texts = [job.stop.push(job.text.push((token,))) for token in visible]
        texts += [""] * (len(ids) - len(visible))
        if job.stop.found:
            reason = "stop"
        elif reason is not None:
            texts[-1] += job.stop.push(job.text.finish()) + job.stop.rest()
        self._out.append(partial(job.listener.tokens, ids, texts, reason))
        if reason is not None:
            self._running.remove(job)
            usage = Usage(prompt=job.prompt_use(sequence), completion_tokens=len(sequence.output_ids))
            self._runner.finish(sequence, cancelled=False)
            self._out.append(partial(job.listener.finished, usage))

    def _deliver(self) -> None:
        if self._out:
            out, self._out = self._out, []
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_tell_all, out)

    def _end_all(self, message: str, status: int) -> None:
        with self._wake:
            jobs = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
        error = ApiError(message, status=status, kind="internal_error" if status == 500 else "service_unavailable")
        self._out = [partial(job.listener.failed, error) for job in jobs]
        self._deliver()


def _tell_all(out: Sequence[Callable[[], None]]) -> None:
    for tell in out:
        tell()


def _sequence(job: _Job[S]) -> S:
    if job.sequence is None:
        raise AssertionError("a job that runs has a sequence")
    return job.sequence
