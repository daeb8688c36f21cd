"""Everything one call of a measurement on this host produced: paths, prefill, and what became of every case."""

from dataclasses import dataclass
from typing import Literal

from kvbench.core.provenance import Warning_
from kvbench.results.host_paths import MeasuredPath, TransferSample
from kvbench.results.prefill import PrefillMeasurement, PrefillSample


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseOutcome:
    """What became of one case; `reason` says why for anything but `ok`.

    The samples are those that no path and no prefill carries, because the case ended before a fit was possible.
    """

    case: str
    status: Literal["ok", "skipped", "failed"]
    reason: str | None
    elapsed_s: float
    transfer_samples: tuple[TransferSample, ...] = ()
    prefill_samples: tuple[PrefillSample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMeasurement:
    """Measured load paths and prefill of one host; a part that could not be measured has an outcome with the reason."""

    paths: tuple[MeasuredPath, ...]
    prefill: PrefillMeasurement | None
    outcomes: tuple[CaseOutcome, ...]
    interrupted: bool
    elapsed_s: float
    warnings: tuple[Warning_, ...] = ()
