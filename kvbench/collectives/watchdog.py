"""Reads what PyTorch's NCCL watchdog and DETAIL mode print, from the 1.9 wording to the current one.

[rank3]:[E626 16:48:25.440243908 ProcessGroupNCCL.cpp:670] [Rank 3] Watchdog caught collective operation timeout:
    WorkNCCL(SeqNum=96120, OpType=ALLREDUCE, NumelIn=268298, NumelOut=268298, Timeout(ms)=600000) ran for 600029
    milliseconds before timing out.                                                            (one line)
"""

import re
from dataclasses import dataclass, field

from kvbench.collectives.summary import Progress, Remark, TimedOut

CONTINUES = b"Collectives differ in"

_RANK = re.compile(r"\[rank(\d+)\]")
_RANK_IN_GROUP = re.compile(r"\[(?:PG (?:ID )?(?P<pg>\d+) (?:PG GUID (?P<guid>[^\]\s]+) )?)?Rank (?P<rank>\d+)\]")
_WORK = re.compile(
    r"WorkNCCL\((?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+), (?:TensorShape=\[(?P<shape>[\d, ]*)\], )?"
    r"(?:NumelIn=(?P<numel_in>\d+), NumelOut=(?P<numel_out>\d+), )?Timeout\(ms\)=\d+\)"
    r"(?: ran for (?P<ran>\d+) milliseconds)?"
)
_STATUS = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"
)
_FAILED_AT = re.compile(r"(?:work sequence id|watchdog at work): (\d+)")
_FINGERPRINT = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (?P<rank>\d+) is running collective: .*"
)
_SEQUENCE = re.compile(r"SequenceNumber=(\d+)")
_CLUES = (
    ("dump-signal", re.compile(r"Received a dump signal due to a collective timeout from.*")),
    ("dump-signal", re.compile(r"Observed flight recorder dump signal from another rank.*")),
    ("watchdog-stuck", re.compile(r"watchdog got stuck for \d+ seconds.*")),
    ("gil-held", re.compile(r"Could not acquire GIL within \d+ ms on exit.*")),
    ("remote-error", re.compile(r"remote error detected from rank: \d+")),
)
_UNKNOWN_FROM = 2**40  # some versions print an uninitialised number


@dataclass(slots=True)
class WatchdogText:
    """What was found so far; `read` takes one line and says whether it was one of ours."""

    progress: list[Progress] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)

    def read(self, line: str, place: str) -> bool:
        """Reads one line; `place` is its file and number."""
        global_rank = _RANK.search(line)
        group = _RANK_IN_GROUP.search(line)
        rank = int(global_rank[1]) if global_rank else int(group["rank"]) if group else None
        comm = _group_name(group)
        work, status = _WORK.search(line), _STATUS.search(line)
        timed_out = None
        if work is not None and ("timeout" in line or "timed out" in line or "timing out" in line):
            timed_out = _timed_out(work)
        if timed_out is not None or status is not None:
            self.progress.append(
                Progress(
                    comm=comm,
                    rank=rank,
                    enqueued=_known(status["enqueued"]) if status else None,
                    completed=_known(status["completed"]) if status else None,
                    timed_out=timed_out,
                    place=place,
                    failed_at=int(failed[1]) if status and (failed := _FAILED_AT.search(line)) else None,
                )
            )
            return True
        return self._clue(line, place, rank)

    def _clue(self, line: str, place: str, rank: int | None) -> bool:
        fingerprint = _FINGERPRINT.search(line)
        if fingerprint is not None:
            self.remarks.append(Remark("fingerprint-mismatch", fingerprint[0][:600], place, int(fingerprint["rank"])))
            return True
        for code, pattern in _CLUES:
            match = pattern.search(line)
            if match is not None:
                self.remarks.append(Remark(code, match[0][:300], place, rank))
                return True
        return False


def sequence_number(fingerprint: str) -> int | None:
    """The position that a fingerprint mismatch names."""
    match = _SEQUENCE.search(fingerprint)
    return int(match[1]) if match else None


def _group_name(group: re.Match[str] | None) -> str:
    if group is None or group["pg"] is None:
        return ""
    return group["guid"] or f"PG {group['pg']}"


def _known(text: str) -> int | None:
    value = int(text)
    return value if value < _UNKNOWN_FROM else None


def _timed_out(work: re.Match[str]) -> TimedOut:
    shape = work["shape"]
    elements = None
    if shape is not None:
        elements = 1
        for size in shape.split(","):
            elements *= int(size) if size.strip() else 1
    numel_in = work["numel_in"]
    return TimedOut(
        seq_id=int(work["seq"]) if work["seq"] else -1,
        op=work["op"],
        elements_in=int(numel_in) if numel_in is not None else elements,
        elements_out=int(work["numel_out"]) if work["numel_out"] is not None else None,
        ran_ms=int(work["ran"]) if work["ran"] else None,
    )
