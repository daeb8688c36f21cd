"""A server that we started: its log, the wait until it answers, and its end, by process group."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvbench.core.errors import KvbenchError

_POLL_S = 0.05
_TERM_S, _KILL_S = 10.0, 10.0
_TAIL_LINES, _TAIL_BYTES = 6, 8192


class ServerProcess:
    """One started server in its own process group, so that its children end with it and Ctrl-C does not reach it."""

    def __init__(self, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.command = tuple(command)
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
            except OSError as error:
                raise KvbenchError(
                    f"{self.command[0]} cannot be started ({error.strerror or error}); is it installed?"
                ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def death(self) -> str | None:
        """How the server ended and the end of its log; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{Path(self.command[0]).name} ended ({how}); its log ends with: {self.log_tail()}"

    def log_tail(self) -> str:
        """The last lines of the log in one."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                text = stream.read().decode("utf-8", "replace")
        except OSError:
            return "(no log)"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-_TAIL_LINES:])[-800:] or "(empty log)"

    def wait_until(self, ready: Callable[[], bool], *, timeout_s: float) -> None:
        """Returns when `ready` is true; raises when the server ended or the time is over (and then stops it)."""
        deadline = time.monotonic() + timeout_s
        while not ready():
            if (reason := self.death()) is not None:
                raise KvbenchError(f"the server did not start: {reason}")
            if time.monotonic() > deadline:
                self.stop()
                raise KvbenchError(
                    f"the server was not ready after {timeout_s:.0f} s; its log {self.log} ends with: {self.log_tail()}"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL where that is not enough; returns when the server is gone."""
        for number, wait_s in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            except PermissionError:
                self._process.send_signal(number)
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
            break
        self._process.poll()
