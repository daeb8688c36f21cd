"""HTTP/1.1 on one event loop: whole requests in, whole or streamed responses out, with limits for clients."""

import asyncio
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl

from kvbench.core.units import KIB, MIB

_PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    414: "URI Too Long",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_JSON = "application/json"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n"
)
_STREAM_HEAD_1_0 = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n"
_SWEEP_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one client may use of the server."""

    head_bytes: int = 32 * KIB
    url_bytes: int = 8 * KIB
    body_bytes: int = 32 * MIB
    receive_s: float = 30.0
    """For a whole request to arrive, once its first byte is there."""
    idle_s: float = 120.0
    """Between two requests of a connection."""
    send_s: float = 60.0
    """For a client to read something while more than the buffer waits for it."""
    pipelined: int = 16
    """Requests of one connection that wait for the one before; more are left in the socket."""
    connections: int = 4096


class Request:
    """One request: method, decoded path, query, headers (names in lower case) and body."""

    __slots__ = ("body", "headers", "http_1_0", "keep_alive", "method", "path", "raw_query")

    def __init__(self, method: str, url: bytes, headers: dict[bytes, bytes], body: bytes) -> None:
        path, _, query = url.partition(b"?")
        self.method = method
        self.path = path.decode("latin-1")
        self.raw_query = query
        self.headers = headers
        self.body = body
        self.keep_alive = True
        self.http_1_0 = False

    def query(self) -> dict[str, str]:
        """The query's pairs; the last one of a name wins."""
        return dict(parse_qsl(self.raw_query.decode("latin-1"), keep_blank_values=True))

    def header(self, name: bytes) -> str:
        """A header's value, empty if it is not there."""
        return self.headers.get(name, b"").decode("latin-1")


class Exchange:
    """The answer to one request: `send` a whole one, or `start_stream`, `event`s and `end_stream`.

    `on_disconnect` is called once if the client goes away before the answer is complete. After that, and after the
    end, every method does nothing.
    """

    __slots__ = ("_connection", "_http_1_0", "_keep_alive", "done", "on_disconnect", "request", "streaming")

    def __init__(self, connection: "HttpConnection", request: Request) -> None:
        self._connection = connection
        self._http_1_0 = request.http_1_0
        self._keep_alive = request.keep_alive
        self.request = request
        self.streaming = False
        self.done = False
        self.on_disconnect: Callable[[], None] | None = None

    def send(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = _JSON,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """A whole response."""
        if self.done or self.streaming:
            return
        extra = "".join(f"{name}: {value}\r\n" for name, value in headers)
        if not self._keep_alive:
            extra += "connection: close\r\n"
        head = (
            f"HTTP/1.1 {status} {_PHRASES.get(status, 'Unknown')}\r\ncontent-type: {content_type}\r\n"
            f"content-length: {len(body)}\r\n{extra}\r\n"
        )
        self._connection.write(head.encode("latin-1", "replace") + body)
        self._finish()

    def start_stream(self, headers: bytes = b"") -> None:
        """The head of a stream of server-sent events; `headers` are whole lines."""
        if self.done or self.streaming:
            return
        self.streaming = True
        if self._http_1_0:
            self._keep_alive = False
            self._connection.write(_STREAM_HEAD_1_0 + headers + b"\r\n")
        elif self._keep_alive:
            self._connection.write(_STREAM_HEAD + headers + b"\r\n")
        else:
            self._connection.write(_STREAM_HEAD + headers + b"connection: close\r\n\r\n")

    def event(self, data: bytes) -> None:
        """One server-sent event, as one chunk."""
        self.write(b"data: " + data + b"\n\n")

    def write(self, chunk: bytes) -> None:
        """Bytes of the stream as one chunk, whatever they are."""
        if self.done or not self.streaming:
            return
        self._connection.write(chunk if self._http_1_0 else b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def end_stream(self) -> None:
        """The end of the stream."""
        if self.done or not self.streaming:
            return
        if not self._http_1_0:
            self._connection.write(b"0\r\n\r\n")
        self._finish()

    def raw(self, data: bytes) -> None:
        """Bytes on the wire as they are: only for faults."""
        if not self.done:
            self._connection.write(data)

    def cut(self) -> None:
        """Breaks the connection so that the client sees a reset."""
        if not self.done:
            self._connection.reset()

    def _finish(self) -> None:
        self.done = True
        self._connection.finished(self, self._keep_alive)

    def disconnected(self) -> None:
        """The client is gone; called by the connection."""
        if self.done:
            return
        self.done = True
        if self.on_disconnect is not None:
            self.on_disconnect()


class Outlet(Protocol):
    """Where an answer goes: an exchange, or one that spoils it."""

    @property
    def streaming(self) -> bool: ...

    def send(
        self, status: int, body: bytes, *, content_type: str = _JSON, headers: Sequence[tuple[str, str]] = ()
    ) -> None:
        """A whole response."""
        ...

    def start_stream(self, headers: bytes = b"") -> None:
        """The head of a stream."""
        ...

    def event(self, data: bytes) -> None:
        """One event."""
        ...

    def end_stream(self) -> None:
        """The end of the stream."""
        ...


Handler = Callable[[Exchange], None]


def error_body(message: str, kind: str, *, param: str | None = None, code: str | int | None = None) -> bytes:
    """An error in the form of OpenAI's API."""
    return json.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}}).encode()


@dataclass(slots=True, eq=False)
class HttpServer:
    """Accepts connections for `handler`; `close` stops accepting, `close_connections` ends those that are open."""

    handler: Handler
    limits: HttpLimits
    new_parser: Callable[[Any], Any]
    parser_error: type[Exception]
    callback_error: type[Exception]
    upgrade: type[Exception]
    loop: asyncio.AbstractEventLoop
    connections: set["HttpConnection"] = field(default_factory=set)
    draining: bool = False
    rejected_requests: int = 0
    _server: asyncio.Server | None = None
    _sweep: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Starts to accept; the address that was really bound."""
        self._server = await self.loop.create_server(lambda: HttpConnection(self), host, port, backlog=1024)
        self._sweep = self.loop.call_later(_SWEEP_S, self._end_overdue)
        address = self._server.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def close(self) -> None:
        """Stops accepting; open connections end after the answer they are at."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.close_when_idle()
        await asyncio.sleep(0)

    def close_connections(self) -> None:
        """Ends every connection at once."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self.connections):
            connection.abort()

    def _end_overdue(self) -> None:
        now = self.loop.time()
        for connection in tuple(self.connections):
            if connection.deadline is not None and connection.deadline <= now:
                connection.overdue()
        self._sweep = self.loop.call_later(_SWEEP_S, self._end_overdue)


def http_server(handler: Handler, limits: HttpLimits, loop: asyncio.AbstractEventLoop) -> HttpServer:
    """A server on `loop` that parses with llhttp."""
    import httptools

    return HttpServer(
        handler=handler,
        limits=limits,
        new_parser=httptools.HttpRequestParser,
        parser_error=httptools.HttpParserError,
        callback_error=httptools.HttpParserCallbackError,
        upgrade=httptools.HttpParserUpgrade,
        loop=loop,
    )


class HttpConnection(asyncio.Protocol):
    """One client: parses what it sends, answers its requests one after the other, keeps it within the limits."""

    __slots__ = (
        "_behind_another",
        "_body",
        "_body_bytes",
        "_closing",
        "_current",
        "_head_bytes",
        "_headers",
        "_in_head",
        "_in_request",
        "_parser",
        "_paused",
        "_rejected",
        "_server",
        "_transport",
        "_unfinished_head_bytes",
        "_url",
        "_waiting",
        "deadline",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = server.new_parser(self)
        self._current: Exchange | None = None
        self._waiting: deque[Request | bytes] = deque()  # bytes: the refusal that ends the connection
        self._closing = False
        self._paused = False
        self._behind_another = False  # whether these bytes began with another request
        self._rejected = False
        self.deadline: float | None = None
        self._reset_request()
        self._in_request = False

    def _reset_request(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._head_bytes = 0
        self._unfinished_head_bytes = 0
        self._in_head = True

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the connection, or ends it if there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        if len(self._server.connections) > self._server.limits.connections or self._server.draining:
            self._refuse(503, "this server has no room for another connection")
            self._next()
        else:
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells whoever answers that nobody listens any more."""
        self._server.connections.discard(self)
        self._waiting.clear()
        self._transport = None
        self.deadline = None
        if self._current is not None:
            exchange, self._current = self._current, None
            exchange.disconnected()

    def eof_received(self) -> bool | None:
        """A client that closed its side has gone: nobody half-closes a connection that it still reads from."""
        return False

    def data_received(self, data: bytes) -> None:
        """Parses; complete requests are answered from within."""
        if self._closing or self._rejected:
            return
        while data:
            rest = b""
            self._behind_another = False
            try:
                self._parser.feed_data(data)
            except self._server.upgrade as upgrade:  # we speak only HTTP/1.1: the request counts, the offer does not
                rest = data[int(upgrade.args[0]) :]
                self._parser = self._server.new_parser(self)
            except self._server.parser_error as error:
                if isinstance(error, self._server.callback_error):
                    raise  # a bug of ours, not the client's
                self._refuse(400, "this is not a request in HTTP/1.1")
                break
            if self._in_request and self._in_head:  # llhttp hands over whole headers only
                self._unfinished_head_bytes += 0 if self._behind_another else len(data)
                self._check_head(self._unfinished_head_bytes)
            data = rest
        if self._current is None and self._waiting:
            self._next()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write: it has `send_s` to catch up."""
        self.deadline = self._server.loop.time() + self._server.limits.send_s

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.deadline = None
        if self._current is None:
            self._wait_for_request()

    # httptools

    def on_message_begin(self) -> None:
        """A request's first byte."""
        self._reset_request()
        self._in_request = True
        if self._current is None:
            self.deadline = self._server.loop.time() + self._server.limits.receive_s

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._url += url
        if len(self._url) > self._server.limits.url_bytes:
            self._refuse(414, f"the target of a request may have {self._server.limits.url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """One header; of several with one name the last counts."""
        self._head_bytes += len(name) + len(value or b"") + 4
        self._check_head(self._head_bytes)
        if not self._rejected:
            self._headers[name.lower()] = value or b""

    def _check_head(self, head_bytes: int) -> None:
        if head_bytes > self._server.limits.head_bytes:
            self._refuse(431, f"the head of a request may have {self._server.limits.head_bytes} bytes")

    def on_headers_complete(self) -> None:
        """The head is there: refuses a body that is announced as too large, and lets a careful client go on."""
        self._in_head = False
        length = self._headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self._server.limits.body_bytes:
            self._refuse(413, f"the body of a request may have {self._server.limits.body_bytes} bytes")
        elif self._headers.get(b"expect", b"").lower() == b"100-continue" and self._current is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if self._rejected:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._server.limits.body_bytes:
            self._refuse(413, f"the body of a request may have {self._server.limits.body_bytes} bytes")
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """A whole request: answered now, or after those before it."""
        self._in_request = False
        self._behind_another = True
        if self._rejected:
            return
        parser = self._parser
        request = Request(parser.get_method().decode("latin-1"), self._url, self._headers, b"".join(self._body))
        request.keep_alive = bool(parser.should_keep_alive())
        request.http_1_0 = parser.get_http_version() == "1.0"
        self._waiting.append(request)
        if len(self._waiting) > self._server.limits.pipelined and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    # answering

    def _next(self) -> None:
        """Answers waiting requests until one takes its time; a loop, since answers may complete at once."""
        while self._idle() and self._waiting:
            request = self._waiting.popleft()
            if isinstance(request, bytes):
                self._end_with(request)
                return
            self.deadline = None
            exchange = self._current = Exchange(self, request)
            self._server.handler(exchange)
            if not exchange.done:
                return
        if self._idle():
            if self._paused and self._transport is not None:
                self._paused = False
                self._transport.resume_reading()
            self._wait_for_request()

    def _idle(self) -> bool:
        return self._current is None and self._transport is not None and not self._closing

    def finished(self, exchange: Exchange, keep_alive: bool) -> None:
        """An answer is complete."""
        if self._current is not exchange:
            return
        self._current = None
        if not keep_alive or self._server.draining:
            self._close()
        elif self._waiting:
            self._server.loop.call_soon(self._next)
        else:
            self._wait_for_request()

    def _wait_for_request(self) -> None:
        limits = self._server.limits
        self.deadline = self._server.loop.time() + (limits.receive_s if self._in_request else limits.idle_s)

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection with an error after the answers that are due before it."""
        if self._rejected:
            return
        self._rejected = True
        self._server.rejected_requests += 1
        body = error_body(message, "invalid_request_error", code=status)
        head = (
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: {_JSON}\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self._waiting.append(head.encode() + body)

    def _end_with(self, refusal: bytes) -> None:
        """Writes the refusal and closes a little later: closing on unread data would reset it away."""
        self.write(refusal)
        self._closing = True
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        self.deadline = self._server.loop.time() + _SWEEP_S

    def overdue(self) -> None:
        """A deadline has passed: a silent client is let go, a slow one is told why."""
        slow_to_send = self._in_request and self._current is None and not self._rejected
        if slow_to_send:
            self._refuse(408, f"the request did not arrive within {self._server.limits.receive_s:g} s")
            self._next()
        else:
            self.abort()

    def write(self, data: bytes) -> None:
        """Bytes to the client, if it is still there."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close_when_idle(self) -> None:
        """Closes unless an answer is under way."""
        if self._current is None:
            self._close()

    def _close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Ends the connection without another word."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort()

    def reset(self) -> None:
        """Ends the connection with a TCP reset instead of an orderly end."""
        if self._transport is not None:
            peer = self._transport.get_extra_info("socket")
            with socket.socket(fileno=os.dup(peer.fileno())) as duplicate:
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()
