"""What `kvbench deadlock-diagnose` found: the verdict, its proof, the suspects, and what the input cannot show."""

from dataclasses import dataclass
from typing import ClassVar, Literal

Status = Literal["divergence", "no-divergence", "insufficient-input"]
Strength = Literal["certain", "possible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One line or record of the input. `place` is `file:line`, or the file and the row or entry in it."""

    place: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Camp:
    """Ranks that did the same at one call; `did` says what, or that they did not enter it."""

    did: str
    ranks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleStep:
    """`rank` waits in `waits_in`, for `for_rank`, which is held by `held_by` on `queue`."""

    rank: str
    waits_in: str
    for_rank: str
    held_by: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectRank:
    """A rank that stands against the majority, and why."""

    rank: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One root of the hang. `model` names the queues that show it: of streams, of host order, or one communicator's.

    `doubts` says why it is possible and not certain, where more than the queues decide that.
    """

    kind: str
    strength: Strength
    model: str
    headline: str
    communicator: str
    index: int | None
    camps: tuple[Camp, ...]
    fields: tuple[str, ...]
    suspects: tuple[SuspectRank, ...]
    no_suspect_reason: str
    cycle: tuple[CycleStep, ...]
    evidence: tuple[Evidence, ...]
    fix: str
    source: str
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something beside the verdict that a reader should see, such as a collective on the default stream."""

    code: str
    message: str
    remedy: str
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineCall:
    """One call near the divergence. `state` says whether it could run; `cause` is the number of its cause, if any."""

    rank: str
    stream: str
    position: int
    communicator: str
    index: int
    operation: str
    state: Literal["ran", "waits", "queued", "conflict"]
    cause: int | None
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInput:
    """One rank's process: where its records are, and how its rank became known."""

    rank: str
    process: str
    path: str
    num_calls: int
    rank_source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorInput:
    """One communicator. `num_unseen` members left no record in the input: they are neither present nor missing."""

    name: str
    size: int
    ranks: tuple[str, ...]
    num_unseen: int
    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInput:
    """One file that was read or refused."""

    path: str
    format: str | None
    num_bytes: int
    num_lines: int
    num_recovered: int
    num_damaged: int
    refused: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """What a rank says about its own progress in one communicator."""

    rank: str
    communicator: str
    operation: str
    enqueued: int | None
    completed: int | None
    timed_out_at: int | None
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlockDiagnosis:
    """The answer. `verdict` holds three lines: what, where with proof, and what to do."""

    KIND: ClassVar[str] = "deadlock-diagnosis"
    SCHEMA_VERSION: ClassVar[int] = 1

    status: Status
    kind: str
    strength: Strength | None
    verdict: tuple[str, str, str]
    causes: tuple[Cause, ...]
    findings: tuple[Finding, ...]
    timeline: tuple[TimelineCall, ...]
    consequences: tuple[str, ...]
    cannot_show: tuple[str, ...]
    capture_next: tuple[str, ...]
    also: tuple[str, ...]
    ranks: tuple[RankInput, ...]
    communicators: tuple[CommunicatorInput, ...]
    progress: tuple[RankProgress, ...]
    files: tuple[FileInput, ...]
    how_ranks: str
    how_communicators: tuple[str, ...]
    num_calls: int
    num_skipped_calls: int
