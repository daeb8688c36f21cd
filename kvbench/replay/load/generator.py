"""Splits a plan over worker processes, starts them on one time anchor, and merges what they report."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Event, Thread

from kvbench.core.errors import KvbenchError
from kvbench.core.units import ns_from_seconds, seconds_from_ns
from kvbench.replay.load.plan import Finished, Limits, LoadRequest, Progress, WorkerPlan, WorkerSummary
from kvbench.replay.load.worker import receive, send

_READY_S = 120.0
_LEAD_S = 0.15  # from the last worker's "ready" to the anchor
_STOP_S = 20.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What all workers together saw. Times of requests are relative to `anchor_ns` by the same clock."""

    anchor_ns: int
    finished: tuple[Finished, ...]
    not_sent: int
    held_back: int
    loop_lag_s: tuple[float, ...]
    cpu_s: float
    run_cpu_s: float
    run_s: float
    max_rss_bytes: int
    checked_chunks: int
    bad_chunks: int
    workers: int
    stopped: str | None = None
    lost_workers: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Live:
    """The state of a run while it goes on, for progress."""

    sent: int = 0
    in_flight: int = 0
    fresh: tuple[Finished, ...] = ()


Watch = Callable[[Live], str | None]
"""Called several times a second; a text stops the run and says why."""


def split(requests: Sequence[LoadRequest], workers: int) -> list[tuple[LoadRequest, ...]]:
    """The requests by worker: what waits for another request stays with it, and the rest goes round by due time."""
    parent = {request.index: request.index for request in requests}

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for request in requests:
        for other in (*request.after, request.root, *_answered(request)):
            if other in parent:
                parent[root(request.index)] = root(other)
    groups: dict[int, list[LoadRequest]] = {}
    for request in requests:
        groups.setdefault(root(request.index), []).append(request)
    shares: list[list[LoadRequest]] = [[] for _ in range(max(1, min(workers, len(groups))))]
    for number, group in enumerate(groups.values()):
        shares[number % len(shares)].extend(group)
    return [tuple(sorted(share, key=lambda request: request.index)) for share in shares]


def _answered(request: LoadRequest) -> tuple[int, ...]:
    answers = getattr(request.prompt, "answers", ())
    return tuple(index for _, index in answers)


def run_load(
    plan: WorkerPlan, *, workers: int = 1, watch: Watch = lambda _live: None, watch_every_s: float = _POLL_S
) -> LoadResult:
    """Sends the whole plan; returns when it is done, stopped by `watch`, or interrupted, always with what was finished.

    KeyboardInterrupt is turned into `stopped="interrupted"`, once; a second one while workers wind down is raised.
    """
    shares = split(plan.requests, workers if plan.slots is None else min(workers, plan.slots))
    if not plan.requests:
        raise KvbenchError("the plan holds no request; raise --limit or choose another workload")
    slots = [None] * len(shares) if plan.slots is None else _divided(plan.slots, len(shares))
    plans = [
        replace(plan, requests=share, slots=slot, limits=_share(plan, len(shares)))
        for share, slot in zip(shares, slots, strict=True)
    ]
    processes = [_WorkerProcess(one, number) for number, one in enumerate(plans)]
    try:
        return _run(processes, plan, watch, watch_every_s)
    finally:
        for process in processes:
            process.end()


def _run(processes: Sequence["_WorkerProcess"], plan: WorkerPlan, watch: Watch, every_s: float) -> LoadResult:
    deadline = time.monotonic() + _READY_S
    for process in processes:
        process.wait_ready(deadline)
    anchor_ns = time.monotonic_ns() + ns_from_seconds(_LEAD_S)
    for process in processes:
        process.order(f"go {anchor_ns}\n")
    stopped: str | None = None
    try:
        while not all(process.over.wait(0) for process in processes):
            _first_over(processes, every_s)
            stopped = watch(_live(processes))
            if stopped is not None:
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    if stopped is not None:
        for process in processes:
            process.order("stop\n")
    last = time.monotonic() + (_STOP_S if stopped is not None else 60.0)
    for process in processes:
        process.over.wait(max(0.0, last - time.monotonic()))
    return _merged(processes, plan, anchor_ns, stopped)


def _first_over(processes: Sequence["_WorkerProcess"], timeout_s: float) -> None:
    running = next((process for process in processes if not process.over.is_set()), None)
    if running is not None:
        running.over.wait(timeout_s)


def _live(processes: Sequence["_WorkerProcess"]) -> Live:
    return Live(
        sent=sum(process.sent for process in processes),
        in_flight=sum(process.in_flight for process in processes),
        fresh=tuple(one for process in processes for one in process.take()),
    )


def _merged(processes: Sequence["_WorkerProcess"], plan: WorkerPlan, anchor_ns: int, stopped: str | None) -> LoadResult:
    finished = [one for process in processes for one in process.finished]
    summaries = [process.summary for process in processes if process.summary is not None]
    lost = tuple(process.fate() for process in processes if process.summary is None)
    return LoadResult(
        anchor_ns=anchor_ns,
        finished=tuple(sorted(finished, key=lambda one: one.number)),
        not_sent=len(plan.requests) - len(finished),
        held_back=sum(summary.held_back for summary in summaries),
        loop_lag_s=tuple(lag for summary in summaries for lag in summary.loop_lag_s),
        cpu_s=sum(summary.cpu_s for summary in summaries),
        run_cpu_s=sum(summary.run_cpu_s for summary in summaries),
        run_s=max((summary.run_s for summary in summaries), default=seconds_from_ns(time.monotonic_ns() - anchor_ns)),
        max_rss_bytes=sum(summary.max_rss_bytes for summary in summaries),
        checked_chunks=sum(summary.checked_chunks for summary in summaries),
        bad_chunks=sum(summary.bad_chunks for summary in summaries),
        workers=len(processes),
        stopped=stopped,
        lost_workers=lost,
    )


def _divided(total: int, parts: int) -> list[int]:
    return [total // parts + (number < total % parts) for number in range(parts)]


def _share(plan: WorkerPlan, parts: int) -> Limits:
    return replace(plan.limits, max_in_flight=max(1, plan.limits.max_in_flight // parts))


class _WorkerProcess:
    """One started worker; a thread reads what it says, so that a full pipe never holds it up."""

    def __init__(self, plan: WorkerPlan, number: int) -> None:
        self._number = number
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbench.replay.load.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,  # a signal to our group is for us; a worker stops when we say so, or at our end
        )
        self.finished: list[Finished] = []
        self._taken = 0
        self.sent = self.in_flight = 0
        self.summary: WorkerSummary | None = None
        self._ready, self.over = Event(), Event()
        self._plan = plan
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            send(stdin, self._plan)
            while (message := receive(stdout)) is not None:
                if isinstance(message, Progress):
                    self.finished.extend(message.finished)
                    self.sent, self.in_flight = message.sent, message.in_flight
                elif isinstance(message, WorkerSummary):
                    self.finished.extend(message.finished)
                    self.summary = message
                    self.sent, self.in_flight = len(self.finished), 0
                else:
                    self._ready.set()
        except OSError:
            pass  # the worker is gone; `fate` says how
        finally:
            self._ready.set()
            self.over.set()

    def take(self) -> list[Finished]:
        """What was finished since the last call."""
        fresh = self.finished[self._taken :]
        self._taken += len(fresh)
        return fresh

    def wait_ready(self, deadline: float) -> None:
        """Returns when the worker can begin."""
        if not self._ready.wait(max(0.0, deadline - time.monotonic())) or self.over.is_set():
            raise KvbenchError(f"load worker {self._number} did not start: {self.fate()}")

    def order(self, text: str) -> None:
        """Sends one line; a worker that is gone is noticed elsewhere."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(text.encode())
            self._process.stdin.flush()
        except OSError:
            self.over.wait(1.0)

    def fate(self) -> str:
        """How a worker ended that gave no summary, with the end of what it wrote to stderr."""
        code = self._process.poll()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        how = "still running" if code is None else f"exit code {code}"
        return f"worker {self._number}: {how}; {lines[-1] if lines else 'it wrote nothing'}"

    def end(self) -> None:
        """Makes sure that the process is gone."""
        if self._process.poll() is None and not self.over.is_set():
            self._process.kill()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()
