"""Reads one file, or a range of a text file, by its content. Plan in, summary out: both picklable."""

from dataclasses import dataclass
from pathlib import Path

from kvbench.collectives.detect import Content
from kvbench.collectives.summary import FileSummary
from kvbench.core.errors import KvbenchError

# What reading a value of an unexpected type raises. Files come from strangers, and each must get an answer.
_FOREIGN = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """One piece of work for a worker: `shown` is the name that people know the file by."""

    path: Path
    shown: str
    content: Content
    start: int = 0
    stop: int | None = None


def read_part(plan: ReadPlan) -> FileSummary:
    """The summary of one plan. A file that cannot be read comes back with the reason in `refused`."""
    try:
        return _read(plan)
    except KvbenchError as error:
        return FileSummary(path=plan.shown, format=None, refused=str(error))
    except _FOREIGN as error:
        reason = f"{plan.shown}: its layout is not understood ({error!r:.80}); which tool and version wrote it?"
        return FileSummary(path=plan.shown, format=None, refused=reason)
    except OSError as error:
        return FileSummary(
            path=plan.shown, format=None, refused=f"{plan.shown}: cannot be read ({error.strerror or error})"
        )


def _read(plan: ReadPlan) -> FileSummary:
    if plan.content == "text":
        from kvbench.collectives.nccl_log import read_nccl_log

        return read_nccl_log(plan.path, start=plan.start, stop=plan.stop, name=plan.shown)
    if plan.content == "flight-recorder":
        from kvbench.collectives.flight_recorder import read_pickle

        return read_pickle(plan.path, name=plan.shown)
    if plan.content == "nsys":
        from kvbench.collectives.nsys_sqlite import read_nsys

        return read_nsys(plan.path, name=plan.shown)
    if plan.content == "json":
        from kvbench.collectives.json_files import read_json

        return read_json(plan.path, name=plan.shown)
    reasons = {
        "empty": "the file is empty",
        "binary": "a binary file of no known kind",
        "archive": "an archive in an archive",
    }
    return FileSummary(path=plan.shown, format=None, refused=f"{plan.shown}: {reasons[plan.content]}")
