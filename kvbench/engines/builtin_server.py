"""The built-in engine as an arm: `kvbench serve` with the arm's tiers, one process per arm."""

import shlex
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvbench.core.errors import UsageError
from kvbench.core.units import parse_bytes
from kvbench.engines.base import Arm, Endpoint, EngineOptions, ResetReport, Setting
from kvbench.engines.http_calls import call
from kvbench.engines.server_process import ServerProcess
from kvbench.engines.url import detect, reset_caches, server_counters, server_settings
from kvbench.results.tier_counters import TierCounters
from kvbench.tiers.spec import parse_tier_spec

_DEFAULT_MODEL = "demo"
_DEFAULT_SIZES = {"hbm": "64MiB", "dram": "dram:1GiB"}


def open_builtin_adapter(options: EngineOptions) -> "BuiltinAdapter":
    """The adapter of `kvbench serve`."""
    return BuiltinAdapter(options)


class BuiltinAdapter:
    """Starts `kvbench serve MODEL --l1 SIZE --tier SPEC…` on a free port of the loopback interface."""

    name = "builtin"

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._servers: dict[str, ServerProcess] = {}
        self._arms: dict[str, Arm] = {}  # as started, by address
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def command(self, arm: Arm) -> tuple[tuple[str, ...], ...]:
        """The command line of the arm."""
        return ((*self._kvbench(), *self._arguments(arm)),)

    def start(self, arm: Arm) -> Endpoint:
        """A running server for the arm."""
        work = self._work_dir()
        number = len(list(work.glob("server-*.log")))
        ready = work / f"server-{number}.url"
        process = ServerProcess(
            (*self._kvbench(), *self._arguments(arm), "--ready-file", str(ready)),
            log=work / f"server-{number}.log",
            environment=self._options.environment,
        )
        try:
            process.wait_until(
                lambda: ready.is_file() and ready.stat().st_size > 0, timeout_s=self._options.start_timeout_s
            )
            url = ready.read_text(encoding="utf-8").strip()
            endpoint = detect(url, pid=process.pid, timeout_s=self._options.call_timeout_s)
        except BaseException:
            process.stop()
            raise
        self._servers[endpoint.url] = process
        self._arms[endpoint.url] = arm
        return endpoint

    def switch(self, endpoint: Endpoint, arm: Arm) -> Endpoint | None:
        """Turns lower tiers on and off where the server was started with all tiers of the arm; else None."""
        started = self._arms.get(endpoint.url)
        if started is None or arm.url is not None or arm.tier("hbm") != started.tier("hbm"):
            return None
        if not all(tier in started.tiers for tier in arm.tiers):
            return None
        reply = call(endpoint.url, "/tiers", timeout_s=self._options.call_timeout_s)
        served = [tier["name"] for tier in required_list(reply.json(), "tiers")]
        # The server names a second tier of a kind differently, and keeps the order of its command line.
        wanted = {
            name: tier in arm.tiers for name, tier in zip(served, started.tiers, strict=False) if tier.name != "hbm"
        }
        if len(served) != len(started.tiers):
            return None
        if wanted:
            reply = call(endpoint.url, "/tiers", method="POST", body=wanted, timeout_s=self._options.call_timeout_s)
        return endpoint if reply.ok else None

    def stop(self, endpoint: Endpoint | None = None) -> None:
        """Stops one server, or all of them and their scratch folder."""
        if endpoint is not None:
            process = self._servers.pop(endpoint.url, None)
            if process is not None:
                process.stop()
            return
        while self._servers:
            _, process = self._servers.popitem()
            process.stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def death(self, endpoint: Endpoint) -> str | None:
        """Why the server ended."""
        process = self._servers.get(endpoint.url)
        return None if process is None else process.death()

    def reset(self, endpoint: Endpoint) -> ResetReport:
        """Clears every tier."""
        return reset_caches(endpoint, timeout_s=self._options.call_timeout_s)

    def settings(self, endpoint: Endpoint) -> Mapping[str, Setting]:
        """Resolved settings."""
        return server_settings(endpoint, timeout_s=self._options.call_timeout_s)

    def counters(self, endpoint: Endpoint) -> TierCounters:
        """Counters now."""
        return server_counters(endpoint, timeout_s=self._options.call_timeout_s)

    def _kvbench(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "kvbench")

    def _arguments(self, arm: Arm) -> tuple[str, ...]:
        if arm.url is not None:
            raise UsageError(f"arm {arm.name!r} is an address; leave out --engine builtin, or name tiers: l1+l2=1GiB")
        model = self._options.model or _DEFAULT_MODEL
        arguments = ["serve", "--null" if model == "null" else model, "--host", "127.0.0.1", "--port", "0"]
        hbm = arm.tier("hbm")
        if hbm is None:
            arguments += ["--l1", "0"]
        else:
            size = hbm.value or _DEFAULT_SIZES["hbm"]
            parse_bytes(size)
            arguments += ["--l1", size]
        for tier in arm.tiers:
            if tier.name != "hbm":
                spec = self._spec(tier.name, tier.value, arm)
                parse_tier_spec(spec)
                arguments += ["--tier", spec]
        return (*arguments, *self._options.arguments)

    def _spec(self, name: str, value: str | None, arm: Arm) -> str:
        """`1GiB` as `dram:1GiB`, `/mnt/kv` as `file:/mnt/kv`; a whole tier spec stays as it is."""
        if value is not None and ":" in value:
            return value
        if name == "dram":
            return f"dram:{value}" if value else _DEFAULT_SIZES["dram"]
        if name == "file":
            return f"file:{value or self._work_dir() / 'file-tier'}"
        raise UsageError(
            f"arm {arm.name!r}: the built-in engine needs an address for {name!r}; "
            "write it like l4=s3://bucket/prefix?endpoint=http://127.0.0.1:8333"
        )

    def _work_dir(self) -> Path:
        if self._options.work_dir is not None:
            return self._options.work_dir
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="kvbench-replay-")
        return Path(self._folder.name)


def required_list(body: object, name: str) -> list[dict[str, str]]:
    """The list of that name in an answer; empty where there is none."""
    found = body.get(name) if isinstance(body, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def shell_lines(commands: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Commands as one can paste them into a shell."""
    return tuple(shlex.join(command) for command in commands)
