"""Speed and memory of `kvbench deadlock-diagnose`, beside `grep -c` over the same files in the same run.

    python tests/live/bench_deadlock_diagnose.py --lines 10000000 --ranks 8
    python tests/live/bench_deadlock_diagnose.py --kernels 1000000

The logs hold four communicators with a random order of calls (the same on all ranks), and one rank that skips a call
near the end; the answer is checked. Memory is the parent's peak plus the largest worker's peak times the workers.
"""

import argparse
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OPS = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast")
COUNTS = (8192, 4096, 1024, 53, 100000)
COMMS = 4

MEASURE = """
import json, os, resource, sys, time
from pathlib import Path
from kvbench.deadlock_diagnose.diagnose import diagnose
started = time.perf_counter()
found = diagnose([Path(sys.argv[1])]).diagnosis
seconds = time.perf_counter() - started
own, workers = (resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({"seconds": seconds, "cpu": sum(os.times()[:4]),
  "peak_bytes": own + workers * len(os.sched_getaffinity(0)),
  "lines": sum(one.num_lines for one in found.files), "verdict": found.verdict[0], "kind": found.kind}))
"""


def write_logs(folder: Path, lines: int, ranks: int) -> None:
    """One COLL log per rank. The last rank leaves out one call, a thousand calls before the end."""
    per_rank = lines // ranks
    for rank in range(ranks):
        rng = random.Random(7)
        comms = [f"0x55d0c0de{rank:02x}{comm:02x}" for comm in range(COMMS)]
        head = f"node1:{100 + rank}:{200 + rank} [{rank}] NCCL INFO "
        with (folder / f"nccl.node1.{100 + rank}.log").open("w") as file:
            for number, comm in enumerate(comms):
                file.write(
                    f"{head}ncclCommInitRankConfig comm {comm} rank {rank} nranks {ranks} cudaDev {rank} "
                    f"nvmlDev {rank} busId 1b000 commId 0x12345678abc{number} - Init COMPLETE\n"
                )
            for start in range(0, per_rank, 20_000):
                block = []
                for number in range(start, min(start + 20_000, per_rank)):
                    which = rng.randrange(COMMS)
                    op, count = rng.choice(OPS), rng.choice(COUNTS)
                    if rank == ranks - 1 and number == per_rank - 1000:
                        continue
                    block.append(
                        f"{head}{op}: opCount {number:x} sendbuff 0x7f2e{number * 4096 & 0xFFFFFFFF:08x} "
                        f"recvbuff 0x7f2f{number * 8192 & 0xFFFFFFFF:08x} count {count} datatype 9 op 0 root 0 "
                        f"comm {comms[which]} [nranks={ranks}] stream 0x56a0deadbe{which:02x}\n"
                    )
                file.write("".join(block))


def write_nsys(folder: Path, kernels: int) -> None:
    """Two exports that hold `kernels` kernels, a tenth of them NCCL's; the second ends in another operation."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.deadlock_diagnose.programs import SIDS, NsysFile, payload

    for rank in range(2):
        file = NsysFile(folder / f"rank{rank}.sqlite", pid=1000 + rank)
        file.range(0, 50, "ncclCommInitRankConfig", payload(0, (0xC0FFEE, 2, rank, rank)))
        launch, process = file.string("cudaLaunchKernelExC_v11060"), file.tid - file.pid
        names = {op: file.string(f"ncclDevKernel_{op}_RING_LL") for op in ("AllReduce", "Broadcast")}
        ranges = {op: file.string(f"nccl{op}") for op in names}
        gemm = file.string("gemm_kernel")
        runtime, kernel, nvtx = [], [], []
        for number in range(kernels // 2):
            at = 1000 + number * 100
            name = gemm
            if number % 10 == 0:
                op = "Broadcast" if rank == 1 and number == kernels // 2 - 10 else "AllReduce"
                name = names[op]
                nvtx.append((at, at + 20, 59, None, file.tid, ranges[op], 1, payload(SIDS[op], (0xC0FFEE, 16384, 0))))
            runtime.append((at + 5, at + 9, 0, file.tid, number, launch, 0))
            kernel.append((at + 30, at + 60, 0, 20, number, process, name, name))
        connection: sqlite3.Connection = file.connection
        connection.executemany(f"INSERT INTO NVTX_EVENTS VALUES ({','.join('?' * 8)})", nvtx)
        connection.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({','.join('?' * 7)})", runtime)
        connection.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 8)})", kernel)
        file.close()


def measure(folder: Path) -> dict[str, object]:
    """Runs the diagnosis in a process of its own, so that the peak is its own."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def main() -> int:
    """Writes the input, measures, and fails when the answer is wrong."""
    parser = argparse.ArgumentParser(description="speed of kvbench deadlock-diagnose")
    parser.add_argument("--lines", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if options.lines:
            write_logs(folder, options.lines, options.ranks)
            expected = "missing-call"
        else:
            write_nsys(folder, options.kernels or 1_000_000)
            expected = "field-mismatch"
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{size / 1e9:.2f} GB, {len(os.sched_getaffinity(0))} CPUs, load {os.getloadavg()[0]:.1f}")
        for _ in range(options.repeat):
            if options.lines:
                started = time.perf_counter()
                subprocess.run(
                    ["grep", "-c", "opCount", *map(str, folder.iterdir())], stdout=subprocess.PIPE, check=True
                )
                grep = time.perf_counter() - started
                print(f"grep -c:  {grep:6.2f} s, {options.lines / grep / 1e6:6.2f} M lines/s")
            found = measure(folder)
            seconds, peak = float(str(found["seconds"])), float(str(found["peak_bytes"]))
            amount = (
                f"{options.lines / seconds / 1e6:6.2f} M lines/s" if options.lines else f"{options.kernels} kernels"
            )
            cpu = f"{float(str(found['cpu'])):.2f} CPU s"
            print(
                f"diagnose: {seconds:6.2f} s, {amount}, {cpu}, load {os.getloadavg()[0]:.1f}, "
                f"peak {peak / 2**20:.0f} MiB; {found['verdict']}"
            )
            if found["kind"] != expected:
                print(f"wrong answer: {found['kind']}, expected {expected}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
