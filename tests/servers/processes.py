"""Start real servers for tests: free ports, one data folder each, ended by process id."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

START_S = 30.0


@dataclass(frozen=True)
class Server:
    """A server of this machine, listening on loopback or inside a network namespace."""

    name: str
    host: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def unavailable(reason: str) -> NoReturn:
    """Skips with `reason`; where CI is set, what cannot start is a failure."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def program(name: str, package: str) -> str:
    """The path of a program in this environment or on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        unavailable(f"{name} is not installed; it comes with {package}")
    return found


def free_ports(count: int, *, apart: int = 0) -> list[int]:
    """Ports of 127.0.0.1 that are free now, below the ones given to outgoing connections; with `apart`, each has a free
    port that far above it.
    """
    found: list[int] = []
    start = 12000 + (os.getpid() * 37 + len(_handed_out) * 11) % 8000
    for port in range(start, start + 10000):
        wanted = (port, port + apart) if apart else (port,)
        if not _handed_out.intersection(wanted) and all(_is_free(one) for one in wanted):
            found.append(port)
            _handed_out.update(wanted)
            if len(found) == count:
                return found
    unavailable(f"no {count} free ports on 127.0.0.1")


_handed_out: set[int] = set()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def running(
    name: str,
    command: Sequence[str],
    log: Path,
    ready: Callable[[], bool],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    start_s: float = START_S,
) -> Iterator[Server]:
    """The server while it runs; it has answered `ready` before it is handed out, and is gone afterwards."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, start_new_session=True, cwd=log.parent
        )
    try:
        deadline_s = time.monotonic() + start_s
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline_s:
                tail = log.read_text(errors="replace")[-2000:]
                unavailable(f"{name} did not start within {start_s:g} s (status {process.poll()}): {tail}")
            time.sleep(0.05)
        yield Server(name, host, port, process)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that this module started, and what it started in its session; no test needs its data after it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something takes connections there."""
    try:
        with socket.create_connection((host, port), timeout=0.5):
            return True
    except OSError:
        return False


def http_answers(url: str, below: int = 500) -> bool:
    """Whether an HTTP server answers with a status below `below`."""
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=1) as answer:
            return int(answer.status) < below
    except urllib.error.HTTPError as error:
        return error.code < below
    except OSError:
        return False
