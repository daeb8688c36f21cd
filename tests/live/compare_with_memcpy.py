"""Times `host-block` and a bare memcpy in C in turn, on the same memory, and compares their medians.

    python tests/live/compare_with_memcpy.py [PAIRS]

Exit code 1: a median of paired ratios is off by more than five per cent.
"""

import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvbench.core.units import MIB, seconds_from_ns
from kvbench.probes.executions.registry import open_execution
from kvbench.probes.segments import Segments

SIZES_MIB = (8, 64, 256)  # below, a call from Python is not negligible any more
MOST_DIFFERENT = 0.05
SOURCE = """
#include <string.h>
#include <time.h>
double seconds_of_memcpy(char *target, const char *source, long size) {
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  memcpy(target, source, size);
  __asm__ volatile("" ::: "memory");
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9;
}
"""


def bare_memcpy(folder: Path) -> Any:
    """The C function, compiled here."""
    (folder / "bare.c").write_text(SOURCE)
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "bare.c", "-o", "bare.so"], cwd=folder, check=True)
    function = ctypes.CDLL(str(folder / "bare.so")).seconds_of_memcpy
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    return function


def main(arguments: Sequence[str]) -> int:
    """Prints one line per size."""
    pairs = int(arguments[0]) if arguments else 101
    off = 0
    with tempfile.TemporaryDirectory() as folder:
        bare = bare_memcpy(Path(folder))
        execution: Any = open_execution("host-block", direction="h2h", pool_bytes=max(SIZES_MIB) * MIB)
        for size_mib in SIZES_MIB:
            size = size_mib * MIB
            prepared = execution.prepare(Segments(size, [0], [0]))
            ratios, rates = [], []
            for turn in range(pairs):
                seconds = {}
                for who in ("ours", "theirs") if turn % 2 else ("theirs", "ours"):
                    if who == "theirs":
                        seconds[who] = bare(execution.to_address, execution.from_address, size)
                        continue
                    begin_ns = time.perf_counter_ns()
                    execution.copy(prepared)
                    seconds[who] = seconds_from_ns(time.perf_counter_ns() - begin_ns)
                ratios.append(seconds["theirs"] / seconds["ours"])
                rates.append(size / seconds["ours"])
            wrong = abs(median(ratios) - 1) > MOST_DIFFERENT
            off += wrong
            mark = "  OFF" if wrong else ""
            print(f"{size_mib:3} MiB  {median(rates) / 1e9:6.2f} GB/s  host-block / memcpy {median(ratios):.3f}{mark}")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
