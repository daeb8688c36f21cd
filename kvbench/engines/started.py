"""An adapter that runs the programs of a `ServerPlan` and empties their tiers."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.core.errors import KvbenchError
from kvbench.engines.base import Arm, Endpoint, EngineOptions, ResetReport, ResetStep, Setting
from kvbench.engines.http_calls import call
from kvbench.engines.server_plan import Program, ServerPlan, read_only_folder_error
from kvbench.engines.server_process import ServerProcess
from kvbench.engines.url import detect, reset_caches, server_counters, server_settings
from kvbench.results.tier_counters import TierCounters

Planner = Callable[[Arm, EngineOptions, Path], ServerPlan]


@dataclass(frozen=True, slots=True)
class _Running:
    plan: ServerPlan
    processes: tuple[ServerProcess, ...]


class StartedEngine:
    """Starts what a planner says, one group of programs per arm, on free ports of the loopback interface.

    `key` opens the control calls of a server that guards them.
    """

    def __init__(self, name: str, planner: Planner, options: EngineOptions, *, key: str | None = None) -> None:
        self.name = name
        self._key = key
        self._planner = planner
        self._options = options
        self._running: dict[str, _Running] = {}
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def command(self, arm: Arm) -> tuple[tuple[str, ...], ...]:
        """The command lines of the arm, companions first."""
        return self._planner(arm, self._options, Path("WORK_DIR")).commands

    def start(self, arm: Arm) -> Endpoint:
        """A server for the arm that has answered a first request."""
        work = self._work_dir()
        plan = self._planner(arm, self._options, work)
        for folder in plan.folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise read_only_folder_error(folder, error) from error
            _empty(folder)
        for path, text in plan.files.items():
            path.write_text(text, encoding="utf-8")
        processes: list[ServerProcess] = []
        try:
            for program in plan.programs:
                process = self._launch(program, work)
                processes.append(process)
            endpoint = detect(plan.url, model=None, pid=processes[-1].pid, timeout_s=self._options.call_timeout_s)
        except BaseException:
            for process in reversed(processes):
                process.stop()
            raise
        endpoint = replace(
            endpoint,
            kv_bytes_per_token=plan.kv_bytes_per_token,
            vocab_size=endpoint.vocab_size or plan.vocab_size,
            metrics_urls=plan.metrics_urls,
        )
        self._running[endpoint.url] = _Running(plan, tuple(processes))
        return endpoint

    def switch(self, endpoint: Endpoint, arm: Arm) -> Endpoint | None:
        """None: these engines fix their tiers at start."""
        return None

    def stop(self, endpoint: Endpoint | None = None) -> None:
        """Stops the programs of one server (or of all), engine first, and removes its folders."""
        urls = list(self._running) if endpoint is None else [endpoint.url]
        for url in urls:
            running = self._running.pop(url, None)
            if running is None:
                continue
            for process in reversed(running.processes):
                process.stop()
            for folder in running.plan.folders:
                shutil.rmtree(folder, ignore_errors=True)
        if endpoint is None and self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def death(self, endpoint: Endpoint) -> str | None:
        """Why the engine or one of its companions ended."""
        running = self._running.get(endpoint.url)
        if running is None:
            return None
        return next((reason for process in running.processes if (reason := process.death()) is not None), None)

    def reset(self, endpoint: Endpoint) -> ResetReport:
        """The engine's own reset, then its companions', then the files that engines keep on purpose."""
        steps = list(reset_caches(endpoint, timeout_s=self._options.call_timeout_s, key=self._key).steps)
        running = self._running.get(endpoint.url)
        if running is None:
            return ResetReport(steps=tuple(steps))
        for address in running.plan.clears:
            base, slash, path = address.partition("/cache")
            reply = call(base, slash + path, method="POST", timeout_s=self._options.call_timeout_s)
            steps.append(ResetStep(what=f"POST {address}", ok=reply.ok, detail=" ".join(reply.text.split())[:160]))
        for folder in running.plan.folders:
            removed = _empty(folder)
            steps.append(ResetStep(what=f"emptied {folder}", ok=True, detail=f"{removed} files"))
        return ResetReport(steps=tuple(steps))

    def settings(self, endpoint: Endpoint) -> Mapping[str, Setting]:
        """Resolved settings, and what the plan knows that the server does not tell."""
        running = self._running.get(endpoint.url)
        notes = dict(running.plan.notes) if running else {}
        return {**server_settings(endpoint, timeout_s=self._options.call_timeout_s), **notes}

    def counters(self, endpoint: Endpoint) -> TierCounters:
        """Counters now."""
        return server_counters(endpoint, timeout_s=self._options.call_timeout_s)

    def _launch(self, program: Program, work: Path) -> ServerProcess:
        number = len(list(work.glob(f"{program.name}-*.log")))
        process = ServerProcess(
            program.command, log=work / f"{program.name}-{number}.log", environment=program.environment
        )
        try:
            process.wait_until(lambda: _ready(program), timeout_s=self._options.start_timeout_s)
        except BaseException:
            process.stop()
            raise
        return process

    def _work_dir(self) -> Path:
        if self._options.work_dir is not None:
            self._options.work_dir.mkdir(parents=True, exist_ok=True)
            return self._options.work_dir
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="kvbench-replay-")
        return Path(self._scratch.name)


def _ready(program: Program) -> bool:
    if program.health is not None:
        base, _, path = program.health.rpartition("/")
        return call(base, f"/{path}", timeout_s=2.0).ok
    if program.port is None:
        return True
    import socket

    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", program.port), timeout=1.0):
        return True
    return False


def _empty(folder: Path) -> int:
    """Removes every file below the folder and leaves the folders, which a running engine may hold open."""
    removed = 0
    deadline = time.monotonic() + 60.0
    for path in folder.rglob("*"):
        if time.monotonic() > deadline:
            raise KvbenchError(f"{folder} was not empty after a minute; remove its files by hand")
        if not path.is_dir():
            path.unlink(missing_ok=True)
            removed += 1
    return removed
