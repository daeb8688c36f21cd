"""How many streamed requests per second does `kvbench serve --null` answer on one core, with the client on another?

    python tests/live/bench_serve_null.py [--seconds 5] [--connections 32] [--tokens 8] [--rounds 3]

The client is as lean as it gets: prepared bytes out, and of what comes back only the end of the stream is looked for;
the first answer of every connection is parsed and checked. Every round prints requests/s, and requests per CPU
second of the server, which holds on a machine that others use too.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import uvloop

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection that always has one request under way."""

    def __init__(self, request: bytes, tokens: int, done: asyncio.Event) -> None:
        self.request = request
        self.tokens = tokens
        self.done = done
        self.completed = 0
        self.failure = ""
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self._transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._buffer.endswith(END):
            return
        if not self.completed:
            self.failure = check(self._buffer, self.tokens)
        self._buffer = b""
        self.completed += 1
        if self._transport is not None:
            if self.done.is_set():
                self._transport.close()
            else:
                self._transport.write(self.request)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.is_set():
            self.failure = f"the server closed the connection: {exc}"


def check(answer: bytes, tokens: int) -> str:
    """What is wrong with an answer; empty if nothing."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        return f"status {head[:40]!r}"
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    parsed = [json.loads(event) for event in events[:-1]]
    if sum(bool(event["choices"]) for event in parsed) != tokens or parsed[-1]["usage"]["completion_tokens"] != tokens:
        return f"not {tokens} tokens and a usage: {events}"
    return ""


async def load(host: str, port: int, *, connections: int, tokens: int, prompt_tokens: int, seconds: float) -> int:
    body = json.dumps(
        {
            "prompt": list(range(prompt_tokens)),
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    done = asyncio.Event()
    clients = [Client(request, tokens, done) for _ in range(connections)]
    loop = asyncio.get_running_loop()
    for client in clients:
        await loop.create_connection(lambda client=client: client, host, port)  # type: ignore[misc]
    await asyncio.sleep(seconds)
    done.set()
    await asyncio.sleep(0.05)
    failures = [client.failure for client in clients if client.failure]
    if failures:
        raise SystemExit(f"{len(failures)} of {connections} connections failed: {failures[0]}")
    return sum(client.completed for client in clients)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(cores: list[int], *options: str) -> tuple[subprocess.Popen[bytes], str]:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "kvbench", "serve", "--null", "--port", "0", "--ready-file", str(ready), "-q"]
        server = subprocess.Popen([*command, *options])
        os.sched_setaffinity(server.pid, cores[:1])
        deadline = time.monotonic() + 20
        while not ready.exists():
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.02)
        return server, ready.read_text().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--at-least", type=float, default=0.0, help="Exit with 1 if the median is below.")
    settings = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("this needs two cores: one for the server, one for the client")
    server, url = start(cores)
    os.sched_setaffinity(0, cores[1:2])
    host, _, port = url.removeprefix("http://").rpartition(":")
    rates = []
    try:
        for number in range(settings.rounds):
            before, own, began = cpu_seconds(server.pid), resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
            completed = uvloop.run(
                load(
                    host,
                    int(port),
                    connections=settings.connections,
                    tokens=settings.tokens,
                    prompt_tokens=settings.prompt_tokens,
                    seconds=settings.seconds,
                )
            )
            elapsed = time.monotonic() - began
            after = resource.getrusage(resource.RUSAGE_SELF)
            client_s = after.ru_utime + after.ru_stime - own.ru_utime - own.ru_stime
            rates.append(completed / elapsed)
            server_s = cpu_seconds(server.pid) - before
            print(
                f"round {number + 1}: {rates[-1]:,.0f} streamed requests/s, "
                f"{completed / max(server_s, 0.01):,.0f} per CPU second of the server "
                f"({server_s / elapsed:.0%} of its core; client {client_s / elapsed:.0%})",
                flush=True,
            )
    finally:
        server.terminate()
        server.wait(timeout=20)
    median = sorted(rates)[len(rates) // 2]
    print(f"median {median:,.0f} requests/s of {settings.tokens} tokens, {settings.connections} connections")
    if median < settings.at_least:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
