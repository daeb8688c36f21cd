"""Run one case in a child process: a hang, a crash or a memory kill costs that case and nothing else."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import kvbench

CHILD = (sys.executable, "-m", "kvbench.probes.child")
_END = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRun:
    """How a child ended, and every record it wrote before that."""

    status: Literal["ok", "skipped", "failed"]
    reason: str | None
    records: tuple[Mapping[str, Any], ...]
    elapsed_s: float
    interrupted: bool = False

    def of_kind(self, kind: str) -> tuple[Mapping[str, Any], ...]:
        """The records of one kind: `facts`, `sample` or `warning`."""
        return tuple(record for record in self.records if record["record"] == kind)


def not_begun(reason: str) -> ChildRun:
    """What stands for a child that was never started."""
    return ChildRun(status="skipped", reason=reason, records=(), elapsed_s=0.0)


def run_child(
    case: Mapping[str, Any],
    *,
    timeout_s: float,
    on_stage: Callable[[str], None] = lambda _: None,
    command: Sequence[str] = CHILD,
) -> ChildRun:
    """Runs `command` with the case as JSON on its stdin and collects one JSON record per line of its stdout.

    The child leads its own process group, so Ctrl-C reaches only the parent, which ends the group and keeps the
    records so far.
    """
    started = time.monotonic()
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        start_new_session=True,
    )
    conversation = _Conversation(child, json.dumps(case).encode())
    records: list[Mapping[str, Any]] = []
    status: Literal["ok", "skipped", "failed"] = "failed"
    reason: str | None = None
    interrupted = False
    try:
        status, reason = _listen(conversation, records, started + timeout_s, on_stage)
        if status == "failed" and reason is None:
            reason = _death(child, conversation)
    except TimeoutError:
        stage = next((record["text"] for record in reversed(records) if record["record"] == "stage"), "starting")
        reason = f"no end after {timeout_s:g} s, while {stage}; give it more time in the plan, or less to do"
    except KeyboardInterrupt:
        interrupted, reason = True, "interrupted"
    finally:
        _end(child)
    return ChildRun(
        status=status,
        reason=reason,
        records=tuple(records),
        elapsed_s=time.monotonic() - started,
        interrupted=interrupted,
    )


class _Conversation:
    """Three threads move bytes, so that neither side ever waits for a full pipe."""

    def __init__(self, child: subprocess.Popen[bytes], case: bytes) -> None:
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        self.complaints: deque[str] = deque(maxlen=50)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        self._hearing = threading.Thread(target=self._hear, args=(child.stderr,), daemon=True)
        for thread in (
            threading.Thread(target=self._tell, args=(child.stdin, case), daemon=True),
            threading.Thread(target=self._read, args=(child.stdout,), daemon=True),
            self._hearing,
        ):
            thread.start()

    def last_complaint(self) -> str:
        """The last line of the child's stderr that says anything, once the child has closed it."""
        self._hearing.join(timeout=2)
        return next((line for line in reversed(self.complaints) if line), "")

    @staticmethod
    def _tell(stdin: IO[bytes], case: bytes) -> None:
        with contextlib.suppress(BrokenPipeError), stdin:
            stdin.write(case)

    def _read(self, stdout: IO[bytes]) -> None:
        for line in stdout:
            self.lines.put(line)
        self.lines.put(_END)

    def _hear(self, stderr: IO[bytes]) -> None:
        for line in stderr:
            self.complaints.append(line.decode(errors="replace").strip())


def _listen(
    conversation: _Conversation,
    records: list[Mapping[str, Any]],
    deadline: float,
    on_stage: Callable[[str], None],
) -> tuple[Literal["ok", "skipped", "failed"], str | None]:
    """Collects records until the child says how it ended; (failed, None) when it stopped without a word."""
    while True:
        try:
            line = conversation.lines.get(timeout=max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise TimeoutError from None
        if line is _END:
            return "failed", None
        record = _record(line)
        if record is None:
            return (
                "failed",
                f"the child wrote {_short(line)!r}, which is no record of a measurement; please report this",
            )
        if record["record"] == "done":
            return "ok", None
        if record["record"] == "skipped":
            return "skipped", str(record.get("reason"))
        records.append(record)
        if record["record"] == "stage":
            on_stage(str(record["text"]))


_KEYS: dict[str, dict[str, type]] = {
    "stage": {"text": str},
    "facts": {},
    "sample": {"seconds": float},
    "warning": {"code": str, "message": str, "remedy": str},
    "skipped": {"reason": str},
    "done": {},
}


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    expected = _KEYS.get(str(record.get("record"))) if isinstance(record, dict) else None
    if expected is None or any(type(record.get(key)) is not kind for key, kind in expected.items()):
        return None
    return record  # type: ignore[no-any-return]  # json.loads returns Any; it is a dict here


def _death(child: subprocess.Popen[bytes], conversation: _Conversation) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=5)
    code = child.returncode
    complaint = conversation.last_complaint()
    if code is not None and code < 0:
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        return f"the child was ended by {name}{memory}" + (f"; its last line: {complaint}" if complaint else "")
    return complaint or f"the child ended with exit code {code} and said nothing"


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a read from a dead network mount cannot be killed
        child.wait(timeout=5)


def _environment() -> dict[str, str]:
    package = str(Path(kvbench.__file__).parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": f"{package}{os.pathsep}{inherited}" if inherited else package,
        # a config that names files or kernels on a hub must not start a download
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "PYTHONUNBUFFERED": "1",
    }


def _short(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return text if len(text) <= 60 else text[:60] + "…"
