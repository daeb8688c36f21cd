"""Map over files: finds the input files, reads them in worker processes, and returns their summaries in order."""

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.collectives.archive import unpack
from kvbench.collectives.detect import detect
from kvbench.collectives.reader import ReadPlan, read_part
from kvbench.collectives.summary import FileSummary
from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB

RANGE_BYTES = 64 * MIB
_ALONE_BELOW = 16 * MIB

Report = Callable[[str, float | None], None]


@dataclass(slots=True, kw_only=True)
class Gathered:
    """Summaries in input order, and where each shown file really is (for reading lines again)."""

    summaries: list[FileSummary]
    paths: dict[str, Path] = field(default_factory=dict)
    interrupted: bool = False


@contextmanager
def gather(
    paths: Sequence[Path],
    *,
    jobs: int | None = None,
    tail_bytes: int | None = None,
    report: Report = lambda _s, _r: None,
) -> Iterator[Gathered]:
    """Reads all files under `paths`. What archives held exists until the context ends."""
    with tempfile.TemporaryDirectory(prefix="kvbench-") as folder:
        files = list(_files(paths, Path(folder)))
        if not files:
            raise KvbenchError(
                f"{', '.join(map(str, paths))}: holds no file; give a "
                "folder of NCCL logs, flight-recorder dumps or nsys exports"
            )
        plans = [plan for path, shown in files for plan in _plans(path, shown, tail_bytes)]
        gathered = Gathered(summaries=[], paths={shown: path for path, shown in files})
        _read_all(plans, gathered, jobs, report)
        yield gathered


def _files(paths: Sequence[Path], folder: Path) -> Iterator[tuple[Path, str]]:
    for path in paths:
        if not path.exists():
            raise KvbenchError(f"{path}: there is no such file or folder; name what the ranks wrote")
        inside = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        for one in inside:
            if one.is_file() and os.access(one, os.R_OK) and detect(one) == "archive":
                target = folder / str(len(list(folder.iterdir())))
                for unpacked, name in unpack(one, target):
                    yield unpacked, f"{one}!{name}"
            else:
                yield one, str(one)


def _plans(path: Path, shown: str, tail_bytes: int | None) -> Iterator[ReadPlan]:
    if not path.is_file() or not os.access(path, os.R_OK):
        yield ReadPlan(path=path, shown=shown, content="text")  # to be refused with the system's reason
        return
    content, size = detect(path), path.stat().st_size
    if content != "text":
        yield ReadPlan(path=path, shown=shown, content=content)
        return
    start = max(size - tail_bytes, 0) if tail_bytes is not None else 0
    for begin in range(start, size, RANGE_BYTES):
        yield ReadPlan(path=path, shown=shown, content=content, start=begin, stop=min(begin + RANGE_BYTES, size))


def _read_all(plans: Sequence[ReadPlan], gathered: Gathered, jobs: int | None, report: Report) -> None:
    workers = min(jobs or len(os.sched_getaffinity(0)), len(plans))
    total = sum(
        plan.stop - plan.start if plan.stop else plan.path.stat().st_size for plan in plans if plan.path.is_file()
    )
    found: dict[int, FileSummary] = {}
    try:
        if workers <= 1 or total < _ALONE_BELOW:
            for number, plan in enumerate(plans):
                report(f"reading {plan.shown}", number / len(plans))
                found[number] = read_part(plan)
        else:
            with ProcessPoolExecutor(workers) as pool:
                _collect(pool, plans, found, report)
    except KeyboardInterrupt:
        gathered.interrupted = True
    gathered.summaries = [found[number] for number in sorted(found)]
    _number_lines(gathered.summaries)


def _collect(pool: Executor, plans: Sequence[ReadPlan], found: dict[int, FileSummary], report: Report) -> None:
    futures = {pool.submit(read_part, plan): number for number, plan in enumerate(plans)}
    try:
        for future in as_completed(futures):
            number = futures[future]
            found[number] = future.result()
            report(f"read {plans[number].shown}", len(found) / len(plans))
    except KeyboardInterrupt:
        for future in futures:
            future.cancel()
        raise


def _number_lines(summaries: Sequence[FileSummary]) -> None:
    """Makes the line numbers of a file's later ranges count from its first line."""
    lines: dict[str, int] = {}
    for summary in summaries:
        before = lines.get(summary.path, 0)
        if before:
            for log in summary.processes:
                log.checkpoints = [one._replace(line=one.line + before) for one in log.checkpoints]
            summary.progress = [one._replace(place=_later(one.place, before)) for one in summary.progress]
            summary.doubtful = tuple(one + before for one in summary.doubtful)
            summary.ends_inside += before if summary.ends_inside else 0
            summary.remarks = [one._replace(place=_later(one.place, before)) for one in summary.remarks]
        lines[summary.path] = before + summary.num_lines


def _later(place: str, lines: int) -> str:
    file, _, line = place.rpartition(":")
    return f"{file}:{int(line) + lines}" if line.isdigit() else place
