"""The settings that all remote tiers share, from their spelling."""

from dataclasses import dataclass

from kvbench.core.units import parse_duration
from kvbench.tiers.spec import TierSpec

_TIMEOUT_S = 5.0
_CONCURRENCY = 8
# A batch is several calls after one another, and a store that hangs is noticed within the first few.
_DEADLINE_TIMEOUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """`timeout_s` bounds one call, `deadline_s` one batch; `concurrency` calls are under way at a time."""

    timeout_s: float
    deadline_s: float
    concurrency: int


def remote_settings(spec: TierSpec) -> RemoteSettings:
    """`timeout=`, `deadline=` and `concurrency=` of a spelling, or their defaults: 5 s, four timeouts, 8."""
    options = dict(spec.options)
    timeout_s = parse_duration(options["timeout"]) if "timeout" in options else _TIMEOUT_S
    return RemoteSettings(
        timeout_s=timeout_s,
        deadline_s=parse_duration(options["deadline"]) if "deadline" in options else _DEADLINE_TIMEOUTS * timeout_s,
        concurrency=int(options.get("concurrency", _CONCURRENCY)),
    )
