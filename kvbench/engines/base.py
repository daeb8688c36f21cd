"""What `kvbench replay` asks of a serving engine: start an arm, reset it, tell settings and counters, stop."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from kvbench.results.tier_counters import TierCounters

__all__ = [
    "Arm", "ArmTier", "Dialect", "Endpoint", "EngineAdapter", "EngineOptions", "ResetReport", "ResetStep", "Setting",
    "TierCounters",
]  # fmt: skip

Dialect = Literal["kvbench", "vllm", "sglang", "unknown"]
"""Whose names a server's metrics and control endpoints use."""

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmTier:
    """One tier of an arm: `hbm`, `dram`, `file`, `remote`, or a product such as `lmcache`; `value` as written."""

    name: str
    value: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One side of the experiment: no tier at all recomputes every prefix; `url` is a server that is up already."""

    name: str
    tiers: tuple[ArmTier, ...] = ()
    url: str | None = None

    def tier(self, name: str) -> ArmTier | None:
        """The tier of that name, or None where the arm has none."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    @property
    def lower_tiers(self) -> tuple[str, ...]:
        """Names of the tiers below L1."""
        return tuple(tier.name for tier in self.tiers if tier.name != "hbm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server that answers. `takes_ids` says whether /v1/completions accepts token ids as prompt.

    Fields that the server does not tell are None: `kv_bytes_per_token` is needed for the check of moved bytes.
    """

    url: str
    model: str
    dialect: Dialect
    version: str | None = None
    takes_ids: bool = True
    vocab_size: int | None = None
    page_tokens: int | None = None
    kv_bytes_per_token: float | None = None
    max_model_tokens: int | None = None
    pid: int | None = None
    metrics_urls: tuple[str, ...] = ()
    """Further Prometheus pages of the arm, such as an LMCache server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetStep:
    """One call of a reset, whether it did what it should, and the server's own words."""

    what: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetReport:
    """What was called to empty the caches. Whether they are empty is for a probe request to show."""

    steps: tuple[ResetStep, ...]

    @property
    def ok(self) -> bool:
        return bool(self.steps) and all(step.ok for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an adapter needs to start servers; an adapter for servers that are up ignores most of it.

    `executable` is the engine's program in an environment of its own (`/opt/vllm/bin/vllm`, `/opt/sglang/bin/python`).

    `arguments` are passed on to every server as they are. `work_dir` is for logs and, where an arm names no place, for
    its file tier.
    """

    model: str | None = None
    executable: str | None = None
    work_dir: Path | None = None
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    call_timeout_s: float = 30.0


class EngineAdapter(Protocol):
    """One engine. It may run several servers at a time: one for each arm that was started and not stopped."""

    name: str

    def command(self, arm: Arm) -> tuple[tuple[str, ...], ...]:
        """The command lines that `start` would run for the arm, in order; empty for a server that is up already."""

    def start(self, arm: Arm) -> Endpoint:
        """A server for the arm that answers requests; raises KvbenchError with the end of its log if it does not."""

    def switch(self, endpoint: Endpoint, arm: Arm) -> Endpoint | None:
        """The running server, changed to the arm without a restart; None where it cannot."""

    def stop(self, endpoint: Endpoint | None = None) -> None:
        """Stops the server (all of them without an argument) that this adapter started, and waits until it is gone."""

    def death(self, endpoint: Endpoint) -> str | None:
        """Why a server that this adapter started no longer runs; None while it does, or where it is not ours."""

    def reset(self, endpoint: Endpoint) -> ResetReport:
        """Empties every tier of the server by its own endpoints; an engine that cannot says so in a failed step."""

    def settings(self, endpoint: Endpoint) -> Mapping[str, Setting]:
        """Resolved settings as the server tells them, flat; never the flags that were passed."""

    def counters(self, endpoint: Endpoint) -> TierCounters:
        """The counters now; empty where the server has no metrics page."""
