"""Start to ready of `kvbench serve` for every shipped shape: wall time and CPU time, which other work disturbs less.

python tests/live/bench_serve_start.py [--rounds 3]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvbench.engines.builtin.models import SHAPES

ROOT = Path(__file__).parents[2]


def start(shape: str, folder: Path) -> tuple[float, float]:
    """Seconds from the command to its ready file, and the CPU seconds spent until then."""
    ready = folder / "ready"
    command = [sys.executable, "-m", "kvbench", "serve", shape, "--port", "0", "--quiet", "--ready-file", str(ready)]
    command += ["--tier", "dram:256MiB", "--tier", f"file:{folder / 'kv'}?size=256MiB"]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        while not ready.exists():
            if process.poll() is not None or time.monotonic() - began > 120:
                raise SystemExit(f"{shape} did not get ready")
            time.sleep(0.005)
        wall_s = time.monotonic() - began
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return wall_s, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    """Prints one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, median of {rounds}")
    with tempfile.TemporaryDirectory() as folder:
        start("demo", Path(folder))  # fills the page cache
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            times = [start(shape, Path(folder)) for _ in range(rounds)]
        wall_s, cpu_s = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{shape:12} {wall_s:5.1f} s wall {cpu_s:5.1f} s CPU")


if __name__ == "__main__":
    main()
