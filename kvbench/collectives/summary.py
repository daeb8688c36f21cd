"""What a reader returns for one file: per process, the calls in host order as numbers of a small table of kinds.

A log of ten million calls has a few hundred distinct ones (operation, count, communicator, stream, …). So a call is
four bytes, and 65536 of them are compressed together: `map over files -> ProcessLog -> reduce` stays small.
"""

import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CHUNK_CALLS = 65536

Format = Literal["nccl-log", "watchdog", "flight-recorder", "nsys", "kineto", "ras"]

FORMAT_NAMES: dict[Format, str] = {
    "nccl-log": "NCCL log",
    "watchdog": "PyTorch watchdog text",
    "flight-recorder": "PyTorch flight recorder dump",
    "nsys": "Nsight Systems sqlite export",
    "kineto": "torch profiler trace",
    "ras": "NCCL RAS snapshot",
}


class Kind(NamedTuple):
    """One distinct record of a process. `what` is `call`, or a step in a communicator's or a group's life.

    `comm` is the process's own name of the communicator (a pointer, a process group name); `detail` holds what only
    this step has. `source` is the spelling it came from: `COLL`, `CALL`, `INIT`, …
    """

    what: str
    source: str
    thread: str = ""
    comm: str = ""
    op: str = ""
    count: int | None = None  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    dtype: str | None = None
    redop: str | None = None
    root: int | None = None
    stream: str | None = None
    num_ranks: int | None = None
    detail: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str | None:
        """A value of `detail`, or None."""
        return dict(self.detail).get(name)


class Checkpoint(NamedTuple):
    """Where block number `n` of a text file starts, and how many records of this process came before it."""

    offset: int
    line: int
    records: int


@dataclass(slots=True, kw_only=True)
class ProcessLog:
    """All records of one process in one file, in host order.

    `seq_ids`, `times_ns` and `places` run parallel to the records where a format has them: the position in its process
    group, the time of the call, and the row or entry it was read from. A text log has `checkpoints` instead, from which
    the line of a record is found again.
    """

    path: str
    format: Format
    host: str = ""
    pid: str = ""
    rank: int | None = None
    rank_source: str = ""
    kinds: list[Kind] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    num_records: int = 0
    seq_ids: "array[int] | None" = None
    times_ns: "array[int] | None" = None
    states: tuple[str, ...] | None = None
    places: tuple[str, ...] | None = None
    stacks: tuple[str, ...] | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)
    partial: bool = False
    members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    default_streams: tuple[str, ...] = ("default",)

    @property
    def name(self) -> str:
        return f"{self.host}:{self.pid}" if self.host or self.pid else self.path

    def append(self, ids: "array[int]") -> None:
        """Adds records, compressed; the first byte of a chunk says how many bytes a number takes."""
        import numpy as np

        numbers = np.frombuffer(ids, dtype=np.uint32)
        for start in range(0, len(numbers), CHUNK_CALLS):
            part = numbers[start : start + CHUNK_CALLS]
            width = 1 if int(part.max()) < 2**8 else 2 if int(part.max()) < 2**16 else 4
            self.chunks.append(bytes([width]) + zlib.compress(part.astype(f"u{width}").tobytes(), 1))
        self.num_records += len(ids)

    def records(self) -> "Iterator[npt.NDArray[np.uint32]]":
        """The kinds' numbers, chunk by chunk."""
        import numpy as np

        for chunk in self.chunks:
            yield np.frombuffer(zlib.decompress(chunk[1:]), dtype=f"u{chunk[0]}").astype(np.uint32)


class Progress(NamedTuple):
    """What one rank says about its own progress in one communicator: watchdog text, RAS, a dump's status.

    `op` is empty where the count is over all collectives; `timed_out` is the call that this rank gave up on, and
    `failed_at` its number where a status line, which names the group, repeats it.
    """

    comm: str
    rank: int | None
    op: str = ""
    enqueued: int | None = None
    completed: int | None = None
    timed_out: "TimedOut | None" = None
    place: str = ""
    failed_at: int | None = None


class TimedOut(NamedTuple):
    """The call that a watchdog gave up on."""

    seq_id: int
    op: str
    elements_in: int | None
    elements_out: int | None
    ran_ms: int | None = None


class Remark(NamedTuple):
    """A line that is evidence by itself: a transport's size mismatch, a revoked communicator, a fingerprint."""

    code: str
    text: str
    place: str
    rank: int | None = None


@dataclass(slots=True, kw_only=True)
class FileSummary:
    """Everything one file told. `damaged` counts records that could not be recovered, `recovered` those that could.

    `doubtful` are the numbers of their lines; `ends_inside` is the number of a last line that was cut off, else 0.
    """

    path: str
    format: Format | None
    processes: list[ProcessLog] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)
    comm_sizes: dict[str, int] = field(default_factory=dict)
    comm_members: dict[str, tuple[int, ...]] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    notes: list[tuple[str, str, str]] = field(default_factory=list)
    versions: tuple[str, ...] = ()
    num_lines: int = 0
    num_bytes: int = 0
    damaged: int = 0
    recovered: int = 0
    doubtful: tuple[int, ...] = ()
    ends_inside: int = 0
    stream_facts: list[Remark] = field(default_factory=list)
    refused: str = ""
