"""The child of the small probe: reads one plan from stdin, times it, prints one JSON line per sample.

{"what": "memory", "cpus": "0-7", "bytes": 268435456, "repeats": 7} times copies between two buffers that were touched
before, one slice per CPU. {"what": "file", "folder": "/mnt", …} writes a file there, drops it from the page cache, and
times O_DIRECT reads of it.
"""

import json
import mmap
import os
import re
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

_BLOCK = 4 << 20
_THREADS = 4
_MOST_THREADS = 32


def main() -> int:
    """Runs the plan; a reason instead of samples where this host does not allow it."""
    plan = json.load(sys.stdin)
    try:
        (_memory if plan["what"] == "memory" else _file)(plan)
    except OSError as error:
        _emit(failed=f"{error.strerror or error}")
    except ValueError as error:
        _emit(failed=str(error))
    return 0


def _emit(**sample: Any) -> None:
    sys.stdout.write(json.dumps(sample) + "\n")
    sys.stdout.flush()


def _cpus(listed: str) -> set[int]:
    found: set[int] = set()
    for part in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match:
            found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found & os.sched_getaffinity(0)


def _memory(plan: dict[str, Any]) -> None:
    import numpy as np

    cpus = _cpus(plan["cpus"])
    if not cpus:
        raise ValueError("this process may not use any CPU of the node")
    os.sched_setaffinity(0, cpus)  # the first touch then places the pages on this node
    threads = min(len(cpus), _MOST_THREADS)
    source = np.ones(plan["bytes"], dtype=np.uint8)
    target = np.zeros(plan["bytes"], dtype=np.uint8)
    edges = [plan["bytes"] * part // threads for part in range(threads + 1)]
    slices = [slice(low, high) for low, high in pairwise(edges)]
    _emit(threads=threads)
    with ThreadPoolExecutor(threads) as pool:
        for repeat in range(plan["repeats"] + 1):
            started = time.perf_counter()
            list(pool.map(lambda part: np.copyto(target[part], source[part]), slices))
            if repeat:  # the first one warms up
                _emit(seconds=time.perf_counter() - started)


def _file(plan: dict[str, Any]) -> None:
    size = plan["bytes"]
    with tempfile.NamedTemporaryFile(dir=plan["folder"], prefix=".kvbench-topo-") as file:
        block = os.urandom(_BLOCK)
        for _ in range(size // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        try:
            _read_repeatedly(descriptor, size, plan["repeats"])
        finally:
            os.close(descriptor)


def _read_repeatedly(descriptor: int, size: int, repeats: int) -> None:
    buffers = [mmap.mmap(-1, _BLOCK) for _ in range(_THREADS)]

    def read(worker: int) -> None:
        for offset in range(worker * _BLOCK, size, _THREADS * _BLOCK):
            os.preadv(descriptor, [buffers[worker]], offset)

    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in range(repeats):
            started = time.perf_counter()
            list(pool.map(read, range(_THREADS)))
            _emit(seconds=time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
