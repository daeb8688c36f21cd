"""Runs fio between the samples of `kvbench probe file`, with the same engine, block, depth and O_DIRECT.

    python tests/live/compare_with_fio.py DIRECTORY [PAIRS]

Both move all blocks of a file of their own, in random order, with one buffer per request in flight. The case is the one
that the command's child runs; after every sample it emits, fio moves the same blocks, so that the two of a pair are a
moment apart and a busy neighbour disturbs both alike. fio has no depth for psync: its jobs stand for it, as threads do
here. Exit code 1: a median of paired ratios is off by more than ten per cent.
"""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from kvbench.core.units import KIB, MIB
from kvbench.probes import file_case
from kvbench.probes.file_case import FileCase

ENGINES = {"psync": "psync", "aio": "libaio", "io_uring": "io_uring"}
BLOCKS_KIB = (128, 1024, 4096)
DEPTHS = (1, 16)
DIRECTIONS = {"load": "randread", "store": "randwrite"}
FILE_MIB = 256
MOST_DIFFERENT = 0.10


def fio_bytes_per_s(file: Path, *, engine: str, direction: str, depth: int, block_kib: int, seed: int) -> float:
    """Bandwidth of one fio run over the whole file."""
    jobs = depth if engine == "psync" else 1
    command = [
        "fio", "--name=compare", f"--filename={file}", f"--size={FILE_MIB}M", f"--io_size={FILE_MIB // jobs}M",
        f"--rw={DIRECTIONS[direction]}", f"--bs={block_kib}k", "--direct=1", f"--ioengine={ENGINES[engine]}",
        f"--iodepth={1 if engine == 'psync' else depth}", f"--numjobs={jobs}", "--thread", "--group_reporting",
        f"--randseed={seed}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read" if direction == "load" else "write"]
    return float(job["io_bytes"]) / (float(job["runtime"]) / 1000)


def paired_ratios(folder: Path, *, engine: str, direction: Any, depth: int, block_kib: int, pairs: int) -> list[float]:
    """kvbench's bandwidth over fio's, of every pair."""
    theirs = folder / "fio.dat"
    ratios: list[float] = []
    refusals: list[str] = []

    def fio(seed: int) -> float:
        return fio_bytes_per_s(theirs, engine=engine, direction=direction, depth=depth, block_kib=block_kib, seed=seed)

    def emit(record: dict[str, Any]) -> None:
        if record["record"] == "sample":
            ratios.append(record["bytes"] / record["seconds"] / fio(len(ratios) + 1))
        elif record["record"] == "stage" and record["text"].startswith("timing"):
            fio(0)  # the first run lays out the file
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
        points=[(FILE_MIB * MIB, block_kib * KIB)],
        repeats=pairs,
        warmups=1,
        file_bytes=FILE_MIB * MIB,
        time_s=600.0,
    )
    file_case.measure(asdict(case), emit)
    if refusals:
        raise SystemExit("; ".join(refusals))
    return ratios


def main(arguments: Sequence[str]) -> int:
    """Prints one line per configuration."""
    directory = Path(arguments[0] if arguments else ".")
    pairs = int(arguments[1]) if len(arguments) > 1 else 21
    print(f"bandwidth of kvbench / fio, median of {pairs} paired ratios (middle half), O_DIRECT, {FILE_MIB} MiB")
    off = total = 0
    combinations = itertools.product(ENGINES, DIRECTIONS, DEPTHS, BLOCKS_KIB)
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
