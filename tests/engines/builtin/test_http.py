import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.engines.builtin.http import Exchange, HttpLimits, HttpServer, http_server

LIMITS = HttpLimits(
    head_bytes=2000, url_bytes=300, body_bytes=1000, receive_s=0.4, idle_s=3.0, pipelined=4, connections=32
)
GET = b"GET /%b HTTP/1.1\r\nhost: t\r\n\r\n"


class Echo:
    """Answers each path in its own way, and remembers which clients left."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.open: list[Exchange] = []

    def __call__(self, exchange: Exchange) -> None:
        path = exchange.request.path
        exchange.on_disconnect = lambda: self.gone.append(path)
        if path == "/later":
            asyncio.get_running_loop().call_later(0.05, exchange.send, 200, path.encode())
        elif path == "/stream":
            exchange.start_stream()
            for number in range(3):
                exchange.event(b"%d" % number)
            exchange.end_stream()
        elif path == "/flood":
            exchange.start_stream()
            for _ in range(64):
                exchange.event(b"x" * 2**18)
        elif path == "/never":
            self.open.append(exchange)
        else:
            request = exchange.request
            answer = [request.method, path, request.query(), request.body.decode("latin-1")]
            exchange.send(200, json.dumps(answer).encode())


@contextmanager
def running(limits: HttpLimits = LIMITS) -> Iterator[tuple[int, Echo, HttpServer]]:
    """A server on a loop of its own thread."""
    loop = uvloop.new_event_loop()
    echo, problems = Echo(), list[object]()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    server = http_server(echo, limits, loop)
    _, port = loop.run_until_complete(server.listen("127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield port, echo, server
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(5)
        loop.call_soon_threadsafe(server.close_connections)
        loop.call_soon_threadsafe(lambda: loop.call_later(0.05, loop.stop))
        thread.join(5)
        loop.close()
    assert problems == []


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, Echo, HttpServer]]:
    with running() as found:
        yield found


def talk(port: int, *sent: bytes, half_close: bool = True, pause_s: float = 0.0) -> bytes:
    """Everything that the server answers to these bytes until it or the time-out ends it."""
    with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
        for part in sent:
            try:
                connection.sendall(part)
            except OSError:
                break
            time.sleep(pause_s)
        connection.settimeout(0.3 if half_close else 3)
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except (TimeoutError, ConnectionResetError):
            pass
        return received


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def bodies(received: bytes) -> list[bytes]:
    return [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 ")[1:]]


def test_a_connection_is_kept_for_the_next_request(server: tuple[int, Echo, HttpServer]) -> None:
    received = talk(server[0], GET % b"a", GET % b"b?x=1&y=%20", pause_s=0.02)
    assert statuses(received) == [200, 200]
    assert [json.loads(body)[1:3] for body in bodies(received)] == [["/a", {}], ["/b", {"x": "1", "y": " "}]]


def test_pipelined_requests_are_answered_in_their_order_however_many(server: tuple[int, Echo, HttpServer]) -> None:
    paths = [b"later" if number % 3 == 0 else b"%d" % number for number in range(20)]  # far above `pipelined`
    last = b"GET /last HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
    received = talk(server[0], b"".join(GET % path for path in paths) + last, half_close=False)
    answered = [json.loads(body)[1] if body.startswith(b"[") else body.decode() for body in bodies(received)]
    assert answered == [f"/{path.decode()}" for path in [*paths, b"last"]]


def test_a_stream_is_chunked_and_ends(server: tuple[int, Echo, HttpServer]) -> None:
    body = bodies(talk(server[0], GET % b"stream"))[0]
    assert body == b"9\r\ndata: 0\n\n\r\n9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n"


def test_http_1_0_gets_no_chunks_and_a_closed_connection(server: tuple[int, Echo, HttpServer]) -> None:
    received = talk(server[0], b"GET /stream HTTP/1.0\r\n\r\n", half_close=False)
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert b"connection: close" in head
    assert body == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


def test_a_body_may_come_in_chunks_and_in_pieces(server: tuple[int, Echo, HttpServer]) -> None:
    head = b"POST /p HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
    received = talk(server[0], head[:20], head[20:], b"3\r\nabc\r\n", b"2\r\nde\r\n0\r\n\r\n", pause_s=0.02)
    assert json.loads(bodies(received)[0]) == ["POST", "/p", {}, "abcde"]


def test_a_client_that_waits_for_100_continue_gets_it(server: tuple[int, Echo, HttpServer]) -> None:
    head = b"POST /p HTTP/1.1\r\nhost: t\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    assert statuses(talk(server[0], head, b"ab", pause_s=0.05)) == [100, 200]


def test_an_offer_to_upgrade_is_passed_over(server: tuple[int, Echo, HttpServer]) -> None:
    offer = b"GET /u HTTP/1.1\r\nhost: t\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\n"
    assert statuses(talk(server[0], offer + GET % b"next")) == [200, 200]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"rubbish\r\n\r\n", 400),
        (b"GET / HTTP/7.7\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /%b HTTP/1.1\r\nhost: a\r\n\r\n" % (b"x" * 400), 414),
        (b"GET / HTTP/1.1\r\nlong: %b\r\n\r\n" % (b"x" * 3000), 431),
        (b"GET / HTTP/1.1\r\nlong: %b" % (b"x" * 3000), 431),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: v\r\n" % number for number in range(400)), 431),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n7d0\r\n" + b"x" * 2000, 413),
        (b"GET / HTTP/1.1\r\nhos", 408),
        (b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nabc", 408),
    ],
)
def test_what_is_wrong_too_large_or_too_slow_is_told_and_closed(
    sent: bytes, status: int, server: tuple[int, Echo, HttpServer]
) -> None:
    # the head and the url arrive in two pieces, so that what is unfinished is looked at as well
    received = talk(server[0], sent[: len(sent) // 2], sent[len(sent) // 2 :], half_close=False, pause_s=0.02)
    assert statuses(received) == [status]
    error = json.loads(bodies(received)[0])["error"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}


def test_a_request_behind_a_large_body_is_not_taken_for_a_long_head(server: tuple[int, Echo, HttpServer]) -> None:
    first = b"POST /p HTTP/1.1\r\nhost: t\r\ncontent-length: 900\r\n\r\n" + b"x" * 900
    received = talk(server[0], first + first + first + b"GET /b HT", b"TP/1.1\r\nhost: t\r\n\r\n", pause_s=0.05)
    assert statuses(received) == [200] * 4


def test_a_client_that_leaves_is_noticed(server: tuple[int, Echo, HttpServer]) -> None:
    port, echo, _ = server
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(GET % b"never")
        time.sleep(0.05)
    deadline = time.monotonic() + 2
    while "/never" not in echo.gone and time.monotonic() < deadline:
        time.sleep(0.01)
    assert echo.gone.count("/never") == 1


def test_a_silent_client_is_let_go() -> None:
    limits = HttpLimits(idle_s=0.3)
    with running(limits) as (port, _, server), socket.create_connection(("127.0.0.1", port), timeout=5) as silent:
        assert silent.recv(10) == b""
        assert not server.connections


def test_a_client_that_reads_nothing_is_let_go() -> None:
    with running(HttpLimits(send_s=0.3)) as (port, echo, _server):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as deaf:
            deaf.sendall(GET % b"flood")
            deadline = time.monotonic() + 5
            while "/flood" not in echo.gone and time.monotonic() < deadline:
                time.sleep(0.02)
        assert echo.gone == ["/flood"]


def test_connections_beyond_the_limit_get_a_503() -> None:
    with running(HttpLimits(connections=2)) as (port, _, _server):
        keep = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        time.sleep(0.05)
        assert statuses(talk(port, b"")) == [503]
        for connection in keep:
            connection.close()


PIECES = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", b"POST /p HTTP/1.1\r\n", b"content-length: 5\r\n", b"\r\n", b"hello",
        b"transfer-encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"connection: close\r\n", b"\x00", b"HTTP/1.1",
        b"content-length: -1\r\n", b"expect: 100-continue\r\n", b"upgrade: x\r\nconnection: upgrade\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b": no name\r\n", b"a:" + b"b" * 500 + b"\r\n",
    ]
)  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.one_of(PIECES, st.binary(max_size=40)), min_size=1, max_size=12), st.booleans())
def test_whatever_bytes_come_the_server_answers_http_or_nothing_and_goes_on(
    server: tuple[int, Echo, HttpServer], parts: list[bytes], at_once: bool
) -> None:
    port = server[0]
    with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
        for part in [b"".join(parts)] if at_once else parts:
            try:
                connection.sendall(part)
            except OSError:
                break
        connection.settimeout(0.02)
        received = b""
        try:
            while more := connection.recv(65536):
                received += more
        except (TimeoutError, ConnectionResetError):
            pass
    assert received == b"" or received.startswith(b"HTTP/1.1 ")
    assert set(statuses(received)) <= {100, 200, 400, 408, 413, 414, 431}
    assert statuses(talk_once(port)) == [200]


def talk_once(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
        connection.sendall(b"GET /alive HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        received = b""
        while part := connection.recv(65536):
            received += part
        return received
