"""`kvbench serve`: routes, life cycle and settings around one engine."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kvbench import __version__
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.engines.builtin.api import Answer, FormatUsage, parse_ask, parse_object, request_id, send_error
from kvbench.engines.builtin.dialect_native import Native
from kvbench.engines.builtin.dialects import Dialect, dialect_named, reset_trap
from kvbench.engines.builtin.faults import Faults, FaultyExchange, refuse
from kvbench.engines.builtin.generation import ApiError, Cancel, Cleared, Engine
from kvbench.engines.builtin.http import Exchange, HttpLimits, HttpServer, http_server
from kvbench.engines.builtin.metrics import Counters, Observed, exposition

Route = Callable[[Exchange], None]
_DRAIN_S = 10.0  # for stores that are on their way when the server ends; a tier that hangs gets no more
_LOOK_S = 0.2  # between two looks at whether a second signal came
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where a server listens and how it behaves, whatever computes behind it."""

    host: str = "127.0.0.1"
    port: int = 0
    ready_file: Path | None = None
    dialect: str = "native"
    traps: tuple[str, ...] = ()
    faults: Faults | None = None
    admin_key: str | None = None
    grace_s: float = 5.0
    quiet: bool = False
    limits: HttpLimits = field(default_factory=HttpLimits)


class Server:
    """The HTTP surface of one engine."""

    def __init__(self, engine: Engine, settings: ServerSettings, dialect: Dialect) -> None:
        self.engine = engine
        self.dialect = dialect
        self.started_s = time.time()
        self.counters = Counters(dialect.buckets)
        self.draining = False
        self._settings = settings
        self._number = 0
        self._prefix = os.urandom(6).hex()
        self._open: dict[Observed, Cancel] = {}
        self._control = ThreadPoolExecutor(1, "kvbench-control")
        self._loop = asyncio.get_running_loop()
        self._http: HttpServer | None = None
        self._faults = settings.faults or Faults()
        self._reset_trap = reset_trap(settings.traps) or self._faults.reset
        self._routes: dict[str, dict[str, Route]] = {
            "/v1/completions": {"POST": partial(self._generate, chat=False)},
            "/v1/chat/completions": {"POST": partial(self._generate, chat=True)},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._metrics},
            "/version": {"GET": self._version},
        }
        own: dict[str, dict[str, Route]] = {
            "/server_info": {"GET": self._server_info},
            "/tiers": {"GET": self._tiers, "POST": self._set_tiers},
            "/cache/clear": {"POST": self._clear},
            "/drain": {"POST": self._drain},
        }
        if dialect.own_routes:
            self._routes |= own
        self._routes |= dialect.routes(self)
        # What is behind another engine's face, for a test that wants to know the truth.
        self._routes |= {f"/kvbench{path}": methods for path, methods in own.items()}
        self._routes["/kvbench/metrics"] = {"GET": partial(self._metrics, dialect=Native())}
        if self._reset_trap == "missing":
            for path in ("/reset_prefix_cache", "/flush_cache", "/hicache/storage-backend/clear", "/cache/clear"):
                self._routes.pop(path, None)

    # HTTP

    async def listen(self) -> str:
        """Accepts connections; the URL."""
        self._http = http_server(self.handle, self._settings.limits, self._loop)
        try:
            host, port = await self._http.listen(self._settings.host, self._settings.port)
        except OSError as error:
            raise KvbenchError(
                f"cannot listen on {self._settings.host}:{self._settings.port}: {error.strerror or error}; "
                "choose another --port, or 0 for any"
            ) from None
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def handle(self, exchange: Exchange) -> None:
        """Answers one request, or starts to."""
        request = exchange.request
        methods = self._routes.get(request.path)
        try:
            if methods is None:
                raise ApiError(f"there is nothing at {unquote(request.path)[:200]}", status=404, kind="not_found_error")
            route = methods.get(request.method)
            if route is None:
                allowed = ", ".join(methods)
                error = ApiError(f"{request.path} takes {allowed}", status=405, kind="method_not_allowed")
                send_error(exchange, error, headers=(("allow", allowed),))
                return
            route(exchange)
        except ApiError as error:
            send_error(exchange, error)
        except UsageError as error:
            send_error(exchange, ApiError(str(error)))

    def _generate(self, exchange: Exchange, *, chat: bool) -> None:
        if self.draining:
            raise ApiError("this server is shutting down", status=503, kind="service_unavailable", retry_after_s=5)
        engine, dialect = self.engine, self.dialect
        fault = self._faults.of(self._number)
        self._number += 1
        refuse(fault)
        ask = parse_ask(
            exchange.request.body,
            chat=chat,
            request_id=request_id(exchange, self._number, self._prefix),
            model=engine.model,
            tokenizer=engine.tokenizer,
        )
        kind = None if fault is None else fault.fault
        answer = Answer(
            exchange if fault is None else FaultyExchange(exchange, fault, self._loop),
            ask,
            model=engine.model.name,
            format_usage=_without_details(dialect.format_usage)
            if kind == "null-cached-tokens"
            else dialect.format_usage,
            extension=dialect.extension,
            null_usage=dialect.null_usage,
            tokens_per_event=2 if kind == "two-tokens" else dialect.tokens_per_event,
            echo_request_id=dialect.echo_request_id,
            leave_usage_out=kind == "missing-usage",
        )
        watched = Observed(answer, self.counters)
        try:
            cancel = engine.submit(ask.generation, watched)
        except ApiError as error:
            self.counters.rejected += error.status == 429
            raise
        if watched.over:
            return
        self._open[watched] = cancel

        def over(gone: bool) -> None:
            self._open.pop(watched, None)
            if gone:
                cancel()
                watched.aborted()

        watched.on_over = partial(over, False)
        exchange.on_disconnect = partial(over, True)
        answer.begin()

    def _models(self, exchange: Exchange) -> None:
        model = self.engine.model
        entry = {
            "id": model.name,
            "object": "model",
            "created": int(self.started_s),
            "owned_by": self.dialect.owner,
            "max_model_len": model.max_context_tokens,
        }
        send_json(exchange, {"object": "list", "data": [entry]})

    def _health(self, exchange: Exchange) -> None:
        if self.draining:
            raise ApiError("this server is shutting down", status=503, kind="service_unavailable")
        exchange.send(200, b"", content_type="text/plain")

    def _version(self, exchange: Exchange) -> None:
        send_json(exchange, {"version": self.dialect.version or __version__})

    def _metrics(self, exchange: Exchange, dialect: Dialect | None = None) -> None:
        text = exposition((dialect or self.dialect).families(self))
        exchange.send(200, text.encode(), content_type=_METRICS_TYPE)

    def _server_info(self, exchange: Exchange) -> None:
        model = self.engine.model
        send_json(
            exchange,
            {
                "version": __version__,
                "engine": "kvbench",
                "dialect": self.dialect.name,
                "traps": list(self._settings.traps),
                "model": model.name,
                "architecture": model.architecture,
                "weights": model.weights,
                "device": model.device,
                "dtype": model.dtype,
                "num_parameters": model.num_parameters,
                "vocab_size": model.vocab_size,
                "max_context_tokens": model.max_context_tokens,
                "page_tokens": model.page_tokens,
                "kv_bytes_per_token": model.kv_bytes_per_token,
                "kv_bytes_per_token_by_kind": dict(model.kv_bytes_per_token_by_kind),
                "state_bytes": model.state_bytes,
                "block_bytes": model.block_bytes,
                "tiers": self.tier_settings(),
            },
        )

    def tier_settings(self) -> list[dict[str, Any]]:
        """The tiers, nearest first, as they are now."""
        return [
            {
                "name": tier.name,
                "spec": tier.spec,
                "size_bytes": tier.capacity_bytes,
                "policy": tier.policy,
                "eviction": tier.eviction,
                "cooldown_s": tier.cooldown_s,
                "ttl_s": tier.ttl_s,
                "load_timeout_s": tier.load_timeout_s,
                "shared": tier.shared,
                "enabled": tier.enabled,
            }
            for tier in self.engine.tiers()
        ]

    def _tiers(self, exchange: Exchange) -> None:
        send_json(exchange, {"tiers": self.tier_settings()})

    def _set_tiers(self, exchange: Exchange) -> None:
        wanted = parse_object(exchange.request.body)
        self._check_tiers(wanted)
        if not all(isinstance(enabled, bool) for enabled in wanted.values()):
            raise ApiError('the body names tiers with true or false: {"dram": false}')
        for name, enabled in wanted.items():
            self.engine.set_enabled(name, enabled)
        self._tiers(exchange)

    def _check_tiers(self, names: Any) -> None:
        known = [tier.name for tier in self.engine.tiers()]
        for name in names:
            if name not in known:
                raise ApiError(
                    f"there is no tier {name!r}; this server has {', '.join(known) or 'none'}", param="tiers"
                )

    def _clear(self, exchange: Exchange) -> None:
        fields = parse_object(exchange.request.body) if exchange.request.body else {}
        names = fields.get("tiers")
        if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
            raise ApiError('tiers is a list of names, such as ["dram"]', param="tiers")
        self._check_tiers(names or ())
        if self.busy:
            raise ApiError(
                f"{self.engine.num_running + self.engine.num_waiting} requests are running: their blocks would come "
                "back; try again when they are done",
                status=409,
                kind="conflict",
                retry_after_s=1,
            )
        self.clear_then(exchange, names, lambda cleared: send_json(exchange, {"cleared": cleared_json(cleared)}))

    @property
    def admin_key(self) -> str | None:
        """The key that control calls of another engine's face ask for."""
        return self._settings.admin_key

    @property
    def busy(self) -> bool:
        """Whether a request is running or waiting, or a reset is told to say so."""
        return self._reset_trap == "refused" or bool(self.engine.num_running or self.engine.num_waiting)

    def when_idle(self, timeout_s: float, answer: Callable[[bool], None]) -> None:
        """Says whether nothing runs any more, at once if so and after `timeout_s` at the latest."""
        deadline = self._loop.time() + timeout_s

        def look() -> None:
            if not self.busy or self._loop.time() >= deadline:
                answer(not self.busy)
            else:
                self._loop.call_later(0.02, look)

        look()

    def clear_then(
        self, exchange: Exchange, tiers: Sequence[str] | None, answer: Callable[[dict[str, Cleared]], None]
    ) -> None:
        """Waits for pending stores, which would come back otherwise, clears on a thread, then answers."""

        def work() -> dict[str, Cleared]:
            if self._reset_trap == "lies":
                asked = [count for count in self.engine.counts() if tiers is None or count.name in tiers]
                return {count.name: Cleared(blocks=count.blocks, bytes=count.used_bytes) for count in asked}
            self.engine.drain(self._settings.grace_s)
            return self.engine.clear(tiers)

        self._on_thread(exchange, work, answer)

    def reset_in_our_words(self, exchange: Exchange) -> None:
        """vLLM's reset: L1 alone, or every tier with `reset_external=true`; and what was really cleared."""  # noqa: D403
        if self.busy:
            send_json(exchange, {"success": False, "message": "requests are running; try again when they are done"})
            return
        everything = exchange.request.query().get("reset_external", "").lower() in ("true", "1")
        nearest = [tier.name for tier in self.engine.tiers() if tier.name == "hbm"]

        def answer(cleared: dict[str, Cleared]) -> None:
            send_json(exchange, {"success": True, "cleared": cleared_json(cleared)})

        self.clear_then(exchange, None if everything else nearest, answer)

    def send_json(self, exchange: Exchange, value: object) -> None:
        """A JSON response."""
        send_json(exchange, value)

    def _on_thread(self, exchange: Exchange, work: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """Runs `work` off the loop and answers with what it returns, or that it failed."""

        def done(future: "asyncio.Future[Any]") -> None:
            if future.cancelled():
                return
            error = future.exception()
            if error is None:
                answer(future.result())
                return
            send_error(exchange, ApiError(str(error) or type(error).__name__, status=500, kind="internal_error"))
            if not isinstance(error, KvbenchError):
                raise error  # a bug of ours: the log gets its traceback

        self._loop.run_in_executor(self._control, work).add_done_callback(done)

    def _drain(self, exchange: Exchange) -> None:
        seconds = 30.0
        started = time.monotonic()

        def answer(done: bool) -> None:
            send_json(exchange, {"drained": done, "seconds": time.monotonic() - started}, status=200 if done else 503)

        def work() -> bool:
            while not self.engine.drain(_LOOK_S):
                if self.draining or time.monotonic() - started >= seconds:
                    return False
            return True

        self._on_thread(exchange, work, answer)

    async def shut_down(self, grace_s: float) -> int:
        """Refuses new work, lets running answers end for `grace_s`, cuts the rest with an error; how many were cut."""
        self.draining = True
        if self._http is not None:
            await self._http.close()
        deadline = time.monotonic() + grace_s
        while self._open and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        cut = dict(self._open)
        for watched, cancel in cut.items():
            cancel()
            watched.failed(ApiError("the server was stopped", status=503, kind="service_unavailable"))
        await asyncio.sleep(0.05 if cut else 0)
        return len(cut)

    async def close(self, hurry: asyncio.Event) -> None:
        """Drains the tiers unless there is a hurry, closes the engine, ends connections."""
        deadline = time.monotonic() + _DRAIN_S
        drained = False
        while not drained and not hurry.is_set() and time.monotonic() < deadline:
            drained = await self._loop.run_in_executor(self._control, partial(self.engine.drain, _LOOK_S))
        await self._loop.run_in_executor(self._control, partial(self.engine.close, _DRAIN_S if drained else _LOOK_S))
        if self._http is not None:
            self._http.close_connections()
        self._control.shutdown(wait=False, cancel_futures=True)


def _without_details(format_usage: FormatUsage) -> FormatUsage:
    return lambda usage: {**format_usage(usage), "prompt_tokens_details": None}


def cleared_json(cleared: dict[str, Cleared]) -> dict[str, dict[str, int]]:
    """What was cleared, by tier."""
    return {name: {"blocks": what.blocks, "bytes": what.bytes} for name, what in cleared.items()}


def send_json(exchange: Exchange, value: object, *, status: int = 200) -> None:
    """A JSON response."""
    exchange.send(status, json.dumps(value).encode())


MakeEngine = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Engine]
"""An engine for a loop; the second argument is to be called on the loop if the engine dies."""


def serve(make_engine: MakeEngine, settings: ServerSettings) -> None:
    """Serves until SIGTERM or SIGINT; a second signal does not wait any longer."""
    import uvloop

    dialect = dialect_named(settings.dialect, settings.traps)
    if settings.admin_key is not None and settings.dialect != "sglang":
        raise UsageError(f"--admin-key goes with --dialect sglang alone, not with {settings.dialect}; leave it out")
    if settings.ready_file is not None and not settings.ready_file.parent.is_dir():
        raise UsageError(f"{settings.ready_file}: there is no folder {settings.ready_file.parent}; make it first")
    if settings.ready_file is not None:
        settings.ready_file.unlink(missing_ok=True)  # of a server before
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(make_engine, settings, dialect))


async def _serve(make_engine: MakeEngine, settings: ServerSettings, dialect: Dialect) -> None:
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    died = False

    def dead() -> None:
        nonlocal died
        died = True
        stop.set()

    engine = make_engine(loop, dead)  # may load for long; until it is there, a signal ends the process as usual
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    server = Server(engine, settings, dialect)
    try:
        url = await server.listen()
        _say_ready(url, engine.model.name, time.monotonic() - started, settings)
        await stop.wait()
        shutting_down = asyncio.ensure_future(server.shut_down(settings.grace_s))
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait((shutting_down, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not shutting_down.done():
            shutting_down.cancel()
            await server.shut_down(0.0)
        hurried.cancel()
    finally:
        await server.close(hurry)
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)
    if died:
        raise KvbenchError("the thread that computes has failed; the traceback above says why")


def _say_ready(url: str, model: str, seconds: float, settings: ServerSettings) -> None:
    if settings.ready_file is not None:
        partial_file = settings.ready_file.with_name(f"{settings.ready_file.name}.{os.getpid()}")
        partial_file.write_text(url + "\n")
        partial_file.replace(settings.ready_file)  # a reader sees the whole address or none
    if not settings.quiet:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.write(f"ready: {url} ({model}, {seconds:.1f} s)\n")
            sys.stderr.flush()
