"""Runs fio between the samples of `kvbench probe file`, with the same engine, block, depth and O_DIRECT.

    python tests/live/compare_with_fio.py DIRECTORY [PAIRS] [ENGINE or DIRECTION…]

The case is the one that the command's child runs. fio runs between its samples, in the order kvbench, fio, fio,
kvbench, so that the two of a pair are a moment apart, each goes first as often as the other, and a busy neighbour
disturbs both alike. Both do the same work:

- The same file: fio opens the descriptor that kvbench made. With a file each, small stores stood at
  0.69 to 0.82 of fio here; fio's own file is laid out by its first stores, whose extents the filesystem has to convert.
- All of its blocks once, in random order. fio has no depth for psync: its jobs stand for it, as threads do here, and
  each has a part of the file of its own; else two jobs would move the same blocks. Of jobs with equal shares the last
  took up to 1.8 times as long as the mean, with half of the disk's queue empty, and that would count as fio's
  bandwidth. So several jobs run for as long as kvbench took, all of them, and again through their part if it is over.
- The same memory, files in /dev/shm: how the pages of a buffer lie in physical memory changes a direct transfer by up
  to a factor of two. kvbench has touched it; fio touches it at the first store or load into it, which is why 1 GiB is
  moved through at most 64 MiB.
- Neither writes into a block before it is stored (`scramble_buffers=0`), and each waits for the disk (fdatasync) after
  a store, outside its time.

Both take the time of a whole run: kvbench by one clock around all requests, fio by the longest of its jobs.

Exit code 1: a median of paired ratios is off by more than ten per cent.
"""

import contextlib
import ctypes
import itertools
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kvbench.core.units import KIB, MIB
from kvbench.probes import file_case
from kvbench.probes.file_case import FileCase
from kvbench.probes.scratch_file import ScratchFile, scratch_file

ENGINES = {"psync": "psync", "aio": "libaio", "io_uring": "io_uring"}
BLOCKS_KIB = (128, 1024, 4096)
DEPTHS = (1, 16)
DIRECTIONS = {"load": "randread", "store": "randwrite"}
FILE_MIB = 1024  # stores end in the disk's cache: fewer bytes would be over before fio's jobs all run
MOST_DIFFERENT = 0.10


@contextlib.contextmanager
def shared_buffer(files: int, file_bytes: int) -> Iterator[tuple[list[Path], memoryview]]:
    """Files that fio's jobs can map, and one buffer here that is all of them in a row."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    whole = mmap.mmap(-1, files * file_bytes)
    view = memoryview(whole)
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    map_fixed = 0x10
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        paths = [Path(folder) / f"buffer{index}" for index in range(files)]
        for index, path in enumerate(paths):
            path.write_bytes(bytes(file_bytes))
            path.with_suffix(".kept").hardlink_to(path)  # should fio remove the name it was given
            with path.open("r+b") as file:
                place = start + index * file_bytes
                access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | map_fixed
                assert libc.mmap(place, file_bytes, access, flags, file.fileno(), 0) == place
        yield paths, view


def fio_bytes_per_s(
    file: str,
    *,
    engine: str,
    direction: str,
    depth: int,
    block_kib: int,
    seed: int,
    seconds: float,
    buffers: Sequence[Path],
) -> float:
    """Bandwidth of one fio run: one job once over the whole file, or one per buffer for `seconds`, each in its part."""
    jobs = len(buffers)
    part_mib = FILE_MIB // jobs
    command = [
        "fio", f"--filename={file}", f"--size={part_mib}M", f"--rw={DIRECTIONS[direction]}", f"--bs={block_kib}k",
        "--direct=1", f"--ioengine={ENGINES[engine]}", f"--iodepth={depth // jobs}", "--thread", "--group_reporting",
        f"--randseed={seed}", "--output-format=json", "--scramble_buffers=0",
    ]  # fmt: skip
    if jobs > 1:
        command += ["--time_based", f"--runtime={max(round(seconds * 1000), 1)}ms"]
    for index, buffer in enumerate(buffers):
        command += [f"--name=job{index}", f"--offset={index * part_mib}M", f"--iomem=mmapshared:{buffer}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with Path(file).open("r+b") as stored:
        os.fdatasync(stored)  # as kvbench does after a store: what one left in the disk's cache must not slow the other
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read" if direction == "load" else "write"]
    if jobs == 1 and job["io_bytes"] != FILE_MIB * MIB:
        raise SystemExit(f"fio moved {job['io_bytes']} bytes and not {FILE_MIB * MIB}: {' '.join(command)}")
    return float(job["io_bytes"]) / (float(job["runtime"]) / 1000)


class Pairs:
    """Takes the samples of a case as they are emitted and runs fio between them: kvbench, fio, fio, kvbench."""

    def __init__(self, run_fio: Callable[..., float]) -> None:
        self._run_fio = run_fio
        self._runs = 0
        self._seconds = 1.0  # of kvbench's last sample
        self._ahead: float | None = None  # fio's run that the next sample is held against
        self.ratios: list[float] = []
        self.refusals: list[str] = []
        self.file = ""

    def fio(self) -> float:
        self._runs += 1
        return self._run_fio(self.file, seed=self._runs, seconds=self._seconds)

    def emit(self, record: dict[str, Any]) -> None:
        if record["record"] == "sample":
            self._seconds = record["seconds"]
            kvbench = record["bytes"] / self._seconds
            if self._ahead is not None:
                self.ratios.append(kvbench / self._ahead)
                self._ahead = None
            else:
                self.ratios.append(kvbench / self.fio())
                self._ahead = self.fio()
        elif record["record"] == "stage" and record["text"].startswith("timing"):
            self.fio()  # both warm up
        elif record["record"] in ("skipped", "warning"):
            self.refusals.append(str(record))

    @contextlib.contextmanager
    def scratch_file(self, *arguments: Any, **options: Any) -> Iterator[ScratchFile]:
        """The file of the case, and where fio finds it: its name is gone."""
        with scratch_file(*arguments, **options) as file:
            self.file = f"/proc/{os.getpid()}/fd/{file.descriptor}"
            yield file


def paired_ratios(folder: Path, *, engine: str, direction: Any, depth: int, block_kib: int, pairs: int) -> list[float]:
    """kvbench's bandwidth over fio's, of every pair."""
    case = FileCase(
        file=str(folder / "kvbench.dat"),
        engine=engine,
        direction=direction,
        direct=True,
        fsync="none",
        depth=depth,
        huge_pages=False,  # as fio's default memory
        points=[(FILE_MIB * MIB, block_kib * KIB)],
        repeats=pairs,
        warmups=1,
        file_bytes=FILE_MIB * MIB,
        time_s=600.0,
    )
    jobs = depth if engine == "psync" else 1
    with (
        shared_buffer(jobs, depth // jobs * block_kib * KIB) as (paths, view),
        pytest.MonkeyPatch.context() as patch,
    ):
        compared = Pairs(
            partial(
                fio_bytes_per_s, engine=engine, direction=direction, depth=depth, block_kib=block_kib, buffers=paths
            )
        )
        patch.setattr(file_case, "scratch_file", compared.scratch_file)
        file_case.measure(asdict(case), compared.emit, allocate=lambda *_, **__: view)
    if compared.refusals:
        raise SystemExit("; ".join(compared.refusals))
    return compared.ratios


def main(arguments: Sequence[str]) -> int:
    """Prints one line per configuration."""
    directory = Path(arguments[0] if arguments else ".")
    pairs = int(arguments[1]) if len(arguments) > 1 else 21
    print(f"bandwidth of kvbench / fio, median of {pairs} paired ratios (middle half), O_DIRECT")
    off = total = 0
    engines = [name for name in ENGINES if name in arguments[2:]] or list(ENGINES)
    directions = [name for name in DIRECTIONS if name in arguments[2:]] or list(DIRECTIONS)
    combinations = itertools.product(engines, directions, DEPTHS, BLOCKS_KIB)
    with tempfile.TemporaryDirectory(dir=directory) as folder, contextlib.suppress(KeyboardInterrupt):
        for engine, direction, depth, block_kib in combinations:
            ratios = paired_ratios(
                Path(folder), engine=engine, direction=direction, depth=depth, block_kib=block_kib, pairs=pairs
            )
            ranked = sorted(ratios)
            middle = median(ratios)
            total += 1
            wrong = abs(middle - 1) > MOST_DIFFERENT
            off += wrong
            print(
                f"{engine:9} {direction:6} depth {depth:2}  {block_kib:5} KiB  {middle:.2f} "
                f"({ranked[len(ranked) // 4]:.2f} to {ranked[-1 - len(ranked) // 4]:.2f}){'  OFF' if wrong else ''}",
                flush=True,
            )
    print(f"{total - off} of {total} within {MOST_DIFFERENT:.0%}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
