"""One keep-alive HTTP/1.1 connection: writes a request, hands the answer's bytes to its exchange as they arrive."""

import asyncio
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, cast

from kvbench.replay.load.stream import MOST_DETAIL, Stream


class Exchange:
    """One request on its way, from its due time to its end."""

    __slots__ = (
        "connected_ns",
        "connection",
        "detail",
        "due_ns",
        "end_ns",
        "error_body",
        "head",
        "http_status",
        "index",
        "last_byte_ns",
        "on_end",
        "request",
        "resent",
        "reused",
        "sent_ns",
        "started_ns",
        "status",
        "stream",
    )  # fmt: skip

    def __init__(self, index: int, request: bytes, due_ns: int, stream: Stream, on_end: "EndCallback") -> None:
        self.index, self.request, self.due_ns, self.stream, self.on_end = index, request, due_ns, stream, on_end
        self.started_ns = self.connected_ns = self.sent_ns = self.last_byte_ns = self.end_ns = 0
        self.http_status = 0
        self.error_body = b""
        self.head = False
        self.reused = self.resent = False
        self.status = self.detail = ""
        self.connection: Connection | None = None

    def finish(self, status: str, detail: str = "") -> None:
        """Ends the exchange once; later ends are ignored."""
        if self.status:
            return
        self.status, self.detail = status, detail[:MOST_DETAIL]
        self.end_ns = monotonic_ns()
        self.connection = None
        self.on_end(self)


EndCallback = Callable[[Exchange], None]


class Connection(asyncio.Protocol):
    """The protocol of one connection. It is idle, or carries exactly one exchange."""

    __slots__ = ("_on_idle", "_on_lost", "_parser", "_parser_error", "_transport", "exchange", "now_ns", "uses")

    def __init__(
        self, on_idle: Callable[["Connection"], None], on_lost: Callable[["Connection", Exchange | None], None]
    ) -> None:
        import httptools

        self._parser: Any = httptools.HttpResponseParser(self)
        self._parser_error: type[Exception] = httptools.HttpParserError
        self._transport: asyncio.Transport | None = None
        self._on_idle, self._on_lost = on_idle, on_lost
        self.exchange: Exchange | None = None
        self.now_ns = 0
        self.uses = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast("asyncio.Transport", transport)

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, exchange: Exchange) -> None:
        """Writes the request; the answer ends the exchange."""
        assert self._transport is not None
        exchange.reused = self.uses > 0
        self.uses += 1
        exchange.connection = self
        self.exchange = exchange
        exchange.sent_ns = exchange.last_byte_ns = monotonic_ns()
        self._transport.write(exchange.request)

    def data_received(self, data: bytes) -> None:
        """Takes the time first, then parses."""
        self.now_ns = monotonic_ns()
        exchange = self.exchange
        if exchange is None:  # bytes nobody asked for
            self.abort()
            return
        exchange.last_byte_ns = self.now_ns
        try:
            self._parser.feed_data(data)
        except self._parser_error as error:
            self.exchange = None
            self.abort()
            exchange.finish("invalid", f"the answer is no HTTP: {error}")

    def on_headers_complete(self) -> None:
        """The status is known."""
        if self.exchange is not None:
            self.exchange.http_status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Bytes of the answer."""
        exchange = self.exchange
        if exchange is None:
            return
        if exchange.http_status == 200:
            exchange.stream.feed(body, self.now_ns)
        elif len(exchange.error_body) < MOST_DETAIL:
            exchange.error_body += body[:MOST_DETAIL]

    def on_message_complete(self) -> None:
        """The answer is complete; the connection is free unless the server closes it."""
        exchange, self.exchange = self.exchange, None
        if exchange is None or exchange.http_status < 200:  # 100 Continue
            self.exchange = exchange
            return
        keep = self._parser.should_keep_alive()
        complete(exchange)
        if keep and self.usable:
            self._on_idle(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Closes without waiting."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """The server, or we, closed it."""
        exchange, self.exchange = self.exchange, None
        self._transport = None
        self._on_lost(self, exchange)
        if exchange is None or exchange.status:
            return
        why = f": {error}" if error else ""
        if exchange.http_status == 200 and exchange.stream.done and error is None:
            complete(exchange)  # an answer without a length ends with its connection
        elif exchange.http_status or exchange.stream.chunks:
            chunks = len(exchange.stream.chunks)
            exchange.finish("cut", f"the connection was closed in the middle of the answer, after {chunks} chunks{why}")
        else:
            exchange.finish("error", f"the connection was closed before an answer came{why}")


def complete(exchange: Exchange) -> None:
    """Judges an answer that came to its end."""
    stream = exchange.stream
    stream.end()
    if exchange.http_status != 200:
        text = " ".join(exchange.error_body.decode("utf-8", "replace").split())
        exchange.finish("http", f"status {exchange.http_status}: {text}")
    elif stream.error is not None and not stream.invalid:
        exchange.finish("error", stream.error)
    elif stream.invalid:
        exchange.finish("invalid", stream.error or "")
    elif not stream.chunks:
        exchange.finish("invalid", "the answer holds no choice")
    elif not stream.done:
        exchange.finish("cut", f"the stream ended without [DONE], after {len(stream.chunks)} chunks")
    else:
        exchange.finish("ok")
