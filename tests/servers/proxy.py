"""A TCP proxy between a client and a real server that does wrong what the test says."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.servers.processes import Server

Kind = Literal["pass", "hang", "reset", "end", "delay", "503"]
_CHUNK = 16384


@dataclass(frozen=True)
class Fault:
    """What happens to a connection: `hang` says nothing more, `reset` and `end` break it, each once the server has sent
    `after_bytes` through it; `delay` holds every piece of an answer for `seconds`; `503` answers instead of the server.
    """

    kind: Kind = "pass"
    after_bytes: int = 0
    seconds: float = 0.0


class Proxy:
    """Listens on a port of its own; `fault` may be changed at any time, and `refuse` closes the port."""

    def __init__(self, target: Server) -> None:
        self._target = target
        self.fault = Fault()
        self._stop = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.port = 0
        self.accept()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def accept(self) -> None:
        """Takes connections, on the same port as before."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        self.port, self._listener = listener.getsockname()[1], listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def refuse(self) -> None:
        """Takes none any more, and breaks those there are."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        self.break_all()

    def break_all(self) -> None:
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stop.set()
        self.refuse()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket()
        with self._lock:
            self._open |= {client, server}
        try:
            server.connect((self._target.host, self._target.port))
            up = threading.Thread(target=self._up, args=(client, server), daemon=True)
            up.start()
            self._down(server, client)
            up.join(5)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open -= {client, server}
            for one in (client, server):
                one.close()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        """From the client to the server."""
        with contextlib.suppress(OSError):
            while data := client.recv(_CHUNK):
                if self.fault.kind == "503":
                    self._answer_503(client)
                    break
                if self.fault.kind == "hang" and self.fault.after_bytes == 0:
                    continue
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        """From the server to the client, where things go wrong."""
        fault, sent = self.fault, 0
        while data := server.recv(_CHUNK):
            if self.fault != fault:
                fault, sent = self.fault, 0
            if fault.kind in ("hang", "reset", "end"):
                left = max(0, fault.after_bytes - sent)
                if len(data) > left:
                    client.sendall(data[:left])
                    self._break(client, fault)
                    return
            elif fault.kind == "delay":
                self._stop.wait(fault.seconds)
            client.sendall(data)
            sent += len(data)

    def _break(self, client: socket.socket, fault: Fault) -> None:
        if fault.kind == "hang":
            while self.fault == fault and not self._stop.wait(0.05):
                pass
            return
        if fault.kind == "reset":  # closing with no time to linger sends a reset
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return
        client.shutdown(socket.SHUT_RDWR)

    def _answer_503(self, client: socket.socket) -> None:
        client.settimeout(0.2)
        until_s = time.monotonic() + 2
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < until_s and client.recv(_CHUNK):
                pass
        body = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
        head = f"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
        client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied(target: Server) -> Iterator[Proxy]:
    """A proxy while it is wanted."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
