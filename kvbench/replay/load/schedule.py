"""Sends the requests of one worker at their times, on one event loop, and collects what became of them."""

import asyncio
import heapq
import json
import ssl
from array import array
from collections import deque
from time import monotonic_ns

from kvbench.core.units import ns_from_seconds, seconds_from_ns
from kvbench.replay.load.connection import Connection, Exchange
from kvbench.replay.load.plan import Finished, LoadRequest, Progress, WorkerPlan
from kvbench.replay.load.stream import Stream

_SWEEP_S, _LAG_S = 0.1, 0.05
_EARLY_NS = 50_000  # sent now rather than after one more turn of the loop, whose own timers tick in milliseconds
_CHECK_BYTES = 8 * 1024 * 1024  # of stream chunks kept for a second reading after the run


class Schedule:
    """One run of one worker. `start` begins it, `finished` grows, `ended` is set when nothing is left to do."""

    def __init__(self, plan: WorkerPlan, loop: asyncio.AbstractEventLoop) -> None:
        self._plan, self._loop = plan, loop
        self._requests = {request.index: request for request in plan.requests}
        self._bodies: dict[int, bytes] = {}
        self._due: list[tuple[int, int]] = []
        self._held: deque[tuple[int, int]] = deque()
        self._waiting_for: dict[int, int] = {}
        self._followers: dict[int, list[int]] = {}
        self._roots: dict[int, int] = {}
        self._free: deque[LoadRequest] = deque()
        self._idle: list[Connection] = []
        self._active: set[Exchange] = set()
        self._connections: set[Connection] = set()
        self._answers: dict[int, list[int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._lag_at = 0.0
        self._ssl = ssl.create_default_context() if plan.secure else None
        self._connects: set[asyncio.Task[None]] = set()
        self._room = _CHECK_BYTES
        self._kept: list[Stream] = []
        self._reported = 0
        self._stopped = False
        self.sent = 0
        self.held_back = 0
        self.finished: list[Finished] = []
        self.lags_s: list[float] = []
        self.ended = asyncio.Event()
        self._index_the_plan()

    def prepare(self, budget_bytes: int = 256 * 1024 * 1024) -> None:
        """Makes request bodies ahead of time, as many as fit; the rest is made just before it is sent."""
        for request in self._plan.requests:
            if budget_bytes <= 0:
                return
            if not (not isinstance(request.prompt, str | array) and request.prompt.answers):
                self._bodies[request.index] = body = self._http(request)
                budget_bytes -= len(body)

    def start(self, anchor_ns: int) -> None:
        """Begins: times of the plan count from `anchor_ns` on the monotonic clock."""
        for request in self._plan.requests:
            if request.at_s is not None and not request.after:
                heapq.heappush(self._due, (anchor_ns + ns_from_seconds(request.at_s), request.index))
        delay_s = max(0.0, seconds_from_ns(anchor_ns - monotonic_ns()))
        if self._plan.slots is not None:
            self._loop.call_later(delay_s, self._fill_slots)
        self._arm_timer()
        self._lag_at = self._loop.time() + _LAG_S
        self._pulse = self._loop.call_later(_LAG_S, self._beat)
        self._loop.call_later(_SWEEP_S, self._sweep)
        self._maybe_end()

    def cancel(self) -> None:
        """Gives up on what is on its way and sends nothing more; finished requests stay."""
        self._stopped = True
        self._due.clear()
        self._held.clear()
        self._free.clear()
        for exchange in list(self._active):
            self._give_up(exchange, "cancelled", "the run was stopped")
        self.ended.set()

    def news(self) -> Progress:
        """What was finished since the last call."""
        fresh = tuple(self.finished[self._reported :])
        self._reported += len(fresh)
        return Progress(finished=fresh, in_flight=len(self._active), sent=self.sent)

    def check_chunks(self) -> tuple[int, int]:
        """Reads kept chunks again, after the run: how many, and how many were no JSON."""
        checked = bad = 0
        for stream in self._kept:
            one, wrong = stream.check_kept()
            checked, bad = checked + one, bad + wrong
        return checked, bad

    @property
    def not_sent(self) -> int:
        return len(self._plan.requests) - len(self.finished)

    def close(self) -> None:
        """Closes the idle connections."""
        for connection in list(self._connections):
            connection.abort()

    def _index_the_plan(self) -> None:
        for request in self._plan.requests:
            self._roots[request.root] = self._roots.get(request.root, 0) + 1
            if request.after:
                self._waiting_for[request.index] = len(request.after)
                for earlier in request.after:
                    self._followers.setdefault(earlier, []).append(request.index)
            elif request.at_s is None:
                self._free.append(request)

    # When to send

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            wait_s = seconds_from_ns(self._due[0][0] - _EARLY_NS - monotonic_ns())
            self._timer = self._loop.call_later(max(0.0, wait_s), self._send_due)

    def _send_due(self) -> None:
        self._timer = None
        now = monotonic_ns() + _EARLY_NS
        while self._due and self._due[0][0] <= now:
            due_ns, index = heapq.heappop(self._due)
            self._send_or_hold(index, due_ns)
        self._arm_timer()

    def _send_or_hold(self, index: int, due_ns: int) -> None:
        if len(self._active) >= self._plan.limits.max_in_flight:
            self.held_back += 1
            self._held.append((index, due_ns))
        else:
            self._send(index, due_ns)

    def _fill_slots(self) -> None:
        for _ in range(min(self._plan.slots or 0, len(self._free))):
            self._send(self._free.popleft().index, monotonic_ns())

    # Sending

    def _send(self, index: int, due_ns: int) -> None:
        request = self._requests[index]
        stream = Stream(
            tier_details=self._plan.tier_details, wants_ids=index in self._plan.answers_needed, room=max(0, self._room)
        )
        exchange = Exchange(index, self._bodies.pop(index, b"") or self._http(request), due_ns, stream, self._end)
        exchange.started_ns = monotonic_ns()
        self._active.add(exchange)
        self.sent += 1
        self._dispatch(exchange)

    def _dispatch(self, exchange: Exchange) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.send(exchange)
                return
        task = self._loop.create_task(self._connect(exchange))
        self._connects.add(task)
        task.add_done_callback(self._connects.discard)

    async def _connect(self, exchange: Exchange) -> None:
        plan = self._plan
        try:
            async with asyncio.timeout(plan.limits.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._is_idle, self._is_lost), plan.host, plan.port, ssl=self._ssl
                )
        except TimeoutError:
            exchange.finish("connect-timeout", f"no connection within {plan.limits.connect_s:g} s")
            return
        except OSError as error:
            exchange.finish("refused", f"no connection to {plan.host}:{plan.port}: {error.strerror or error}")
            return
        self._connections.add(connection)
        if exchange.status:  # given up meanwhile
            connection.abort()
        else:
            connection.send(exchange)

    def _is_idle(self, connection: Connection) -> None:
        self._idle.append(connection)

    def _is_lost(self, connection: Connection, exchange: Exchange | None) -> None:
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        # A server may close an idle connection at the moment it is used; then nothing was read, and once more is safe.
        if exchange and exchange.reused and not exchange.resent and not exchange.http_status and not exchange.status:
            exchange.resent = True
            exchange.reused = False
            exchange.connection = None
            self._loop.call_soon(self._again, exchange)

    def _again(self, exchange: Exchange) -> None:
        if not exchange.status:
            self._dispatch(exchange)

    def _http(self, request: LoadRequest) -> bytes:
        plan = self._plan
        body = json.dumps({"prompt": "\0", "max_tokens": request.max_tokens, **plan.fields}, separators=(",", ":"))
        before, _, after = body.partition('"\\u0000"')
        text = f"{before}{self._prompt(request)}{after}".encode()
        lines = [
            f"POST {plan.path} HTTP/1.1",
            f"Host: {f'[{plan.host}]' if ':' in plan.host else plan.host}:{plan.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(text)}",
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + text

    def _prompt(self, request: LoadRequest) -> str:
        prompt = request.prompt
        if isinstance(prompt, str):
            return json.dumps(prompt)
        ids = prompt if isinstance(prompt, array) else prompt.token_ids(self._answers)
        if (words := self._plan.words) is not None:
            return json.dumps("".join(words[one] for one in ids))
        return "[" + ",".join(map(str, ids)) + "]"

    # Ends

    def _end(self, exchange: Exchange) -> None:
        self._active.discard(exchange)
        stream = exchange.stream
        if stream.kept:
            self._room = stream.room
            self._kept.append(stream)
        if stream.token_ids:
            self._answers[exchange.index] = stream.token_ids
        self.finished.append(_finished(exchange))
        exchange.stream = stream
        if self._stopped:
            return
        self._release(exchange)
        while self._held and len(self._active) < self._plan.limits.max_in_flight:
            index, due_ns = self._held.popleft()
            self._send(index, due_ns)
        self._maybe_end()

    def _release(self, exchange: Exchange) -> None:
        """Later turns of a session are due a think time after its end; a finished tree frees its slot."""
        armed = False
        for index in self._followers.pop(exchange.index, ()):
            self._waiting_for[index] -= 1
            if self._waiting_for[index] == 0:
                heapq.heappush(self._due, (exchange.end_ns + ns_from_seconds(self._requests[index].think_s), index))
                armed = True
        if armed:
            self._arm_timer()
        root = self._requests[exchange.index].root
        self._roots[root] -= 1
        if self._plan.slots is not None and self._roots[root] == 0 and self._free:
            self._loop.call_soon(self._take_slot)

    def _take_slot(self) -> None:
        if self._free and not self._stopped:
            self._send(self._free.popleft().index, monotonic_ns())

    def _maybe_end(self) -> None:
        if len(self.finished) == len(self._plan.requests):
            self.ended.set()

    def _give_up(self, exchange: Exchange, status: str, detail: str) -> None:
        connection = exchange.connection
        if connection is not None:
            connection.exchange = None
            connection.abort()
        exchange.finish(status, detail)

    # Watching

    def _sweep(self) -> None:
        limits, now = self._plan.limits, monotonic_ns()
        read_ns, total_ns = ns_from_seconds(limits.read_s), ns_from_seconds(limits.total_s)
        for exchange in [one for one in self._active if now - one.started_ns > min(read_ns, total_ns)]:
            if now - exchange.started_ns > total_ns:
                self._give_up(exchange, "total-timeout", f"no end within {limits.total_s:g} s")
            elif exchange.last_byte_ns and now - exchange.last_byte_ns > read_ns:
                self._give_up(exchange, "read-timeout", f"no byte for {limits.read_s:g} s")
        if not self.ended.is_set():
            self._loop.call_later(_SWEEP_S, self._sweep)

    def _beat(self) -> None:
        now = self._loop.time()
        self.lags_s.append(max(0.0, now - self._lag_at))
        self._lag_at = now + _LAG_S
        if not self.ended.is_set():
            self._pulse = self._loop.call_later(_LAG_S, self._beat)


def _finished(exchange: Exchange) -> Finished:
    stream = exchange.stream
    return Finished(
        number=exchange.index,
        status=exchange.status,
        detail=exchange.detail,
        http_status=exchange.http_status,
        due_ns=exchange.due_ns,
        sent_ns=exchange.sent_ns,
        first_choice_ns=stream.first_choice_ns,
        first_text_ns=stream.first_text_ns,
        last_choice_ns=stream.chunks[-1] if stream.chunks else 0,
        end_ns=exchange.end_ns,
        chunk_ns=stream.chunks,
        invalid_events=stream.invalid,
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.output_tokens,
        cached_tokens=stream.cached_tokens,
        cached_by_tier=stream.cached_by_tier,
        loaded_bytes=stream.loaded_bytes,
        reused_connection=exchange.reused,
        resent=exchange.resent,
    )
