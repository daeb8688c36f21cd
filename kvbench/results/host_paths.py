"""Measured load paths of a host, and the ceilings under contention that go with them.

This is the seam of `--probe FILE` and `--topo FILE`: whoever reads such a file takes `paths` and `limits` and nothing
else. The result kinds of `kvbench probe` and `kvbench topo` will carry the same two fields, so a file of any of these
kinds replaces `spec` and `modelled` values by `measured` ones in the same way.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvbench.core.errors import KvbenchError
from kvbench.core.provenance import Origin, Warning_

LimitName = Literal[
    "pcie",
    "uplink",
    "ranks_per_uplink",
    "host_total",
    "home_socket",
    "inter_socket",
    "sockets",
    "collective",
    "alpha_h2d",
    "alpha_collective",
    "storage_total",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSample:
    """One timed transfer: the raw reading that a fit was made from."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPath:
    """One path that was timed, with its fit `t = fixed_s + bytes / bytes_per_s`.

    `tier` is the name of a tier (`dram`, `file`), `spec` the text that made it (`file:/mnt/nvme?size=1TiB`).
    `destination` says what received the bytes, such as `torch cpu tensor` or `cuda:0`: a path into host memory is never
    a GPU path. `concurrency` is the number of transfers in flight, `bytes_per_s` what they carried together.
    `residual_ratio` is the median of |measured - fitted| / measured over the samples. `cold` is None where nobody
    checked; `cold_evidence` says how it was checked, or why not.
    """

    tier: str
    spec: str
    direction: Literal["load", "store"]
    source: str
    destination: str
    fixed_s: float
    bytes_per_s: float
    residual_ratio: float
    concurrency: int
    samples: tuple[TransferSample, ...]
    cold: bool | None
    cold_evidence: str
    warnings: tuple[Warning_, ...] = ()

    def __post_init__(self) -> None:
        """Refuses what no path can be, so that nothing later divides by zero or waits a negative time."""
        for name, ok in (
            ("bytes_per_s", self.bytes_per_s > 0),
            ("fixed_s", self.fixed_s >= 0),
            ("concurrency", self.concurrency >= 1),
        ):
            if not ok:
                raise KvbenchError(
                    f"path of tier {self.tier!r}: {name} is {getattr(self, name)}, which cannot be; measure it again"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One ceiling in base units: bytes per second, seconds for `alpha_…`, a count for `ranks_per_uplink` and `sockets`.

    `pcie` is one device's own link and `uplink` the link it shares with `ranks_per_uplink` ranks; `host_total` and
    `home_socket` are what host memory carries for all ranks and from one socket; `inter_socket` joins `sockets`
    sockets; `storage_total` is all of a host's storage; `alpha_h2d` and `alpha_collective` are fixed times per call.
    """

    name: LimitName
    value: float
    origin: Origin

    def __post_init__(self) -> None:
        """Refuses a ceiling that is not above zero, except a fixed time, which may be zero."""
        if self.value < 0 or (self.value == 0 and not self.name.startswith("alpha_")):
            raise KvbenchError(f"limit {self.name!r} is {self.value}; it must be above zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPaths:
    """What one host's load paths were measured to carry."""

    KIND: ClassVar[str] = "host-paths"
    SCHEMA_VERSION: ClassVar[int] = 1

    paths: tuple[MeasuredPath, ...]
    limits: tuple[Limit, ...] = ()
