"""Runs fio and `kvbench probe file` in turn with the same engine, block, depth and O_DIRECT, and compares bandwidths.

    python tests/live/compare_with_fio.py DIRECTORY [ROUNDS]

Both move random blocks of a file of their own in the same directory, with one buffer per request in flight. fio has no
depth for psync, so its jobs stand for it, as threads do here. Exit code 1: a median of paired ratios is off by more
than ten per cent.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median

ENGINES = {"psync": "psync", "aio": "libaio", "io_uring": "io_uring"}
BLOCKS_KIB = (128, 1024, 4096)
DEPTHS = (1, 16)
DIRECTIONS = {"load": "randread", "store": "randwrite"}
FILE_MIB = 256
MOST_DIFFERENT = 0.10

Ratios = dict[tuple[str, str, int, int], list[float]]


def fio_bytes_per_s(file: Path, *, engine: str, direction: str, depth: int, block_kib: int, seed: int) -> float:
    """Bandwidth of one fio run over the whole file, laid out and warmed up before."""
    jobs = depth if engine == "psync" else 1
    command = [
        "fio", "--name=compare", f"--filename={file}", f"--size={FILE_MIB}M", f"--io_size={2 * FILE_MIB // jobs}M",
        f"--rw={DIRECTIONS[direction]}", f"--bs={block_kib}k", "--direct=1", f"--ioengine={ENGINES[engine]}",
        f"--iodepth={1 if engine == 'psync' else depth}", f"--numjobs={jobs}", "--thread", "--group_reporting",
        f"--randseed={seed}", "--refill_buffers=0", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read" if direction == "load" else "write"]
    return float(job["io_bytes"]) / (float(job["runtime"]) / 1000)


def probe_bytes_per_s(directory: Path, *, engine: str, direction: str, depth: int) -> dict[int, float]:
    """Bandwidth of one probe by block size in KiB."""
    settings = {
        "paths": f"file:{directory}", "engines": engine, "directions": direction, "direct": 1, "fsync": "none",
        "concurrency": depth, "sizes": f"{FILE_MIB}MiB", "file": f"{FILE_MIB}MiB", "repeats": 2, "time": "30s",
        "segments": ",".join(f"{block}KiB" for block in BLOCKS_KIB),
    }  # fmt: skip
    command = [sys.executable, "-m", "kvbench", "probe", "file", "--json", "--quiet"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (case,) = json.loads(done.stdout)["result"]["cases"]
    if case["status"] != "ok" or not case["direct"]:
        raise SystemExit(f"{case['name']}: {case['status']} {case['reason']}")
    moved: dict[int, list[float]] = {}
    for sample in case["samples"]:
        moved.setdefault(sample["bytes"] // sample["segments"] // 1024, []).append(sample["seconds"])
    return {block: FILE_MIB * 1024**2 / fmean(seconds) for block, seconds in moved.items()}


def compared(directory: Path, rounds: int) -> Iterator[tuple[tuple[str, str, int, int], list[float]]]:
    """Paired ratios, kvbench over fio, of each engine, direction, depth and block."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        file = Path(folder) / "fio.dat"
        for engine, depth, direction in itertools.product(ENGINES, DEPTHS, DIRECTIONS):
            ratios: Ratios = {}
            for turn in range(-1, rounds):
                # the first round lays out fio's file and warms up; then they take turns in going first
                rates: dict[str, dict[int, float]] = {}
                for who in ("fio", "kvbench") if turn % 2 else ("kvbench", "fio"):
                    os.sync()  # the file that kvbench removed must not be given back to the disk under fio's clock
                    time.sleep(0.5)
                    rates[who] = (
                        {
                            block: fio_bytes_per_s(
                                file, engine=engine, direction=direction, depth=depth, block_kib=block, seed=turn + 7
                            )
                            for block in BLOCKS_KIB
                        }
                        if who == "fio"
                        else probe_bytes_per_s(Path(folder), engine=engine, direction=direction, depth=depth)
                    )
                if turn < 0:
                    continue
                for block in BLOCKS_KIB:
                    ratio = rates["kvbench"][block] / rates["fio"][block]
                    ratios.setdefault((engine, direction, depth, block), []).append(ratio)
            yield from ratios.items()


def main(arguments: Sequence[str]) -> int:
    """Prints one line per configuration."""
    directory = Path(arguments[0] if arguments else ".")
    rounds = int(arguments[1]) if len(arguments) > 1 else 7
    print(f"kvbench / fio, median of {rounds} paired ratios (lowest to highest)")
    off = total = 0
    for (engine, direction, depth, block), ratios in compared(directory, rounds):
        middle = median(ratios)
        total += 1
        wrong = abs(middle - 1) > MOST_DIFFERENT
        off += wrong
        mark = "  OFF" if wrong else ""
        print(
            f"{engine:9} {direction:6} depth {depth:2}  {block:5} KiB  {middle:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}){mark}",
            flush=True,
        )
    print(f"{total - off} of {total} within {MOST_DIFFERENT:.0%}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
