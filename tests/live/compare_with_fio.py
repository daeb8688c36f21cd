"""Runs fio between the samples of `kvbench probe file`, with the same engine, block, depth and O_DIRECT.

    python tests/live/compare_with_fio.py DIRECTORY [PAIRS] [ENGINE or DIRECTION…]

Both move all blocks of a file of their own, in random order, with one buffer per request in flight. The case is the one
that the command's child runs; after every sample it emits, fio moves the same blocks, so that the two of a pair are a
moment apart and a busy neighbour disturbs both alike. fio has no depth for psync: its jobs stand for it, as threads do
here. How the pages of a buffer lie in physical memory changes a direct transfer by up to a factor of two, so both use
the same buffer, files in /dev/shm.

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
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from kvbench.core.units import KIB, MIB
from kvbench.probes import file_case
from kvbench.probes.file_case import FileCase

ENGINES = {"psync": "psync", "aio": "libaio", "io_uring": "io_uring"}
BLOCKS_KIB = (128, 1024, 4096)
DEPTHS = (1, 16)
DIRECTIONS = {"load": "randread", "store": "randwrite"}
FILE_MIB = {"load": 256, "store": 1024}  # stores end in the disk's cache: fewer would be over before fio's jobs all run
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
    file: Path, *, engine: str, direction: str, depth: int, block_kib: int, seed: int, buffers: Sequence[Path]
) -> float:
    """Bandwidth of one fio run over the whole file; one job per buffer."""
    jobs, file_mib = len(buffers), FILE_MIB[direction]
    command = [
        "fio", f"--filename={file}", f"--size={file_mib}M", f"--io_size={file_mib // jobs}M",
        f"--rw={DIRECTIONS[direction]}", f"--bs={block_kib}k", "--direct=1", f"--ioengine={ENGINES[engine]}",
        f"--iodepth={depth // jobs}", "--thread", "--group_reporting", f"--randseed={seed}", "--output-format=json",
        "--scramble_buffers=0",  # else fio writes into every sector of a block before it stores it
    ]  # fmt: skip
    for index, buffer in enumerate(buffers):
        command += [f"--name=job{index}", f"--iomem=mmapshared:{buffer}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    with file.open("r+b") as stored:
        os.fdatasync(stored)  # as kvbench does after a store: what one left in the disk's cache must not slow the other
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read" if direction == "load" else "write"]
    return float(job["io_bytes"]) / (float(job["runtime"]) / 1000)


def paired_ratios(folder: Path, *, engine: str, direction: Any, depth: int, block_kib: int, pairs: int) -> list[float]:
    """kvbench's bandwidth over fio's, of every pair."""
    ratios: list[float] = []
    refusals: list[str] = []
    fio = partial(
        fio_bytes_per_s, folder / "fio.dat", engine=engine, direction=direction, depth=depth, block_kib=block_kib
    )

    def emit(buffers: Sequence[Path], record: dict[str, Any]) -> None:
        if record["record"] == "sample":
            ratios.append(record["bytes"] / record["seconds"] / fio(seed=len(ratios) + 1, buffers=buffers))
        elif record["record"] == "stage" and record["text"].startswith("timing"):
            fio(seed=0, buffers=buffers)  # the first run lays out the file
            os.sync()
        elif record["record"] in ("skipped", "warning"):
            refusals.append(str(record))

    case = FileCase(
        file=str(folder / "kvbench.dat"),
        engine=engine,
        direction=direction,
        direct=True,
        fsync="none",
        depth=depth,
        huge_pages=False,  # as fio's default memory
        points=[(FILE_MIB[direction] * MIB, block_kib * KIB)],
        repeats=pairs,
        warmups=1,
        file_bytes=FILE_MIB[direction] * MIB,
        time_s=600.0,
    )
    jobs = depth if engine == "psync" else 1
    with (
        shared_buffer(jobs, depth // jobs * block_kib * KIB) as (paths, view),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(file_case, "aligned_buffer", lambda *_, **__: view)
        file_case.measure(asdict(case), partial(emit, paths))
    if refusals:
        raise SystemExit("; ".join(refusals))
    return ratios


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
