"""Starts the real `kvbench serve` for a test, and ends it by its pid."""

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        lines = [line for line in self.body.decode().split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines), lines
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@dataclass(slots=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def call(self, path: str, body: object = None, *, method: str | None = None, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data=data, headers=named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Reply(answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, {k.lower(): v for k, v in error.headers.items()}, error.read())

    def complete(self, **fields: object) -> Reply:
        return self.call("/v1/completions", {"temperature": 0, **fields})

    def metrics(self, path: str = "/metrics") -> dict[str, float]:
        return samples(self.call(path).body.decode())

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout=20)


def samples(text: str) -> dict[str, float]:
    """`name{labels}` to value, of a page in Prometheus' text format."""
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


@contextmanager
def serving(*options: str, timeout_s: float = 60.0) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="kvbench-serve-") as folder:
        ready, log = Path(folder) / "ready", Path(folder) / "log"
        command = [sys.executable, "-m", "kvbench", "serve", "--port", "0", "--ready-file", str(ready), *options]
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, cwd=Path(__file__).parents[3])
        try:
            deadline = time.monotonic() + timeout_s
            while not ready.exists():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, "the server was not ready in time"
                time.sleep(0.02)
            yield Served(ready.read_text().strip(), process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(timeout=10)
