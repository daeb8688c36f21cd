"""The program of one worker process: plan in on stdin, news and a summary out on stdout, both as pickles.

After the plan, stdin carries orders, one a line: "go ANCHOR_NS", and "stop" (or the end of stdin) to stop. It imports
nothing that the run does not need: its memory and start-up are part of what the measurement costs.
"""

import asyncio
import contextlib
import gc
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from time import monotonic_ns, process_time
from typing import IO, Any

from kvbench.core.units import KIB, seconds_from_ns
from kvbench.replay.load.plan import Progress, WorkerPlan, WorkerSummary
from kvbench.replay.load.schedule import Schedule

_NEWS_S = 0.5
_PRIORITY = -10
_DRAIN_BYTES = 65536


def send(stream: IO[bytes], message: object) -> None:
    """One message: its length, then a pickle."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message; None at the end of the stream. Only ever reads what a kvbench process of ours wrote."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    (size,) = struct.unpack("<Q", head)
    data = stream.read(size)
    return pickle.loads(data) if len(data) == size else None


def main() -> None:
    """Runs one plan."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; it says stop
    with contextlib.suppress(OSError):  # a clock that waits for a CPU measures the CPU; it uses little itself
        os.setpriority(os.PRIO_PROCESS, 0, _PRIORITY)
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    plan: WorkerPlan | None = receive(stdin)
    if plan is None:
        return
    summary = run_loop(lambda loop: _run(plan, loop, stdin.fileno(), stdout))
    send(stdout, summary)


def run_loop(program: Callable[[asyncio.AbstractEventLoop], Any]) -> Any:
    """Runs a coroutine function on uvloop where it is installed, else on asyncio's own loop."""
    try:
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(program(loop))
    finally:
        loop.close()


async def _run(plan: WorkerPlan, loop: asyncio.AbstractEventLoop, control: int, out: IO[bytes]) -> WorkerSummary:
    schedule = Schedule(plan, loop)
    schedule.prepare()
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the middle would be a late send; the run makes hardly any cycles
    send(out, "ready")
    orders = bytearray()
    started = {"ns": 0, "cpu": 0.0}

    def read_orders() -> None:
        data = os.read(control, _DRAIN_BYTES)
        orders.extend(data)
        if not data or b"stop\n" in orders:
            loop.remove_reader(control)
            schedule.cancel()
        elif orders.startswith(b"go ") and b"\n" in orders and not started["ns"]:
            anchor_ns = int(orders[3 : orders.index(b"\n")])
            started["ns"], started["cpu"] = anchor_ns, process_time()
            schedule.start(anchor_ns)

    loop.add_reader(control, read_orders)
    while not schedule.ended.is_set():
        try:
            async with asyncio.timeout(_NEWS_S):
                await schedule.ended.wait()
        except TimeoutError:
            pass
        news: Progress = schedule.news()
        if started["ns"]:
            send(out, news)
    loop.remove_reader(control)
    run_s = seconds_from_ns(monotonic_ns() - started["ns"]) if started["ns"] else 0.0
    run_cpu_s = process_time() - started["cpu"] if started["ns"] else 0.0
    fresh = schedule.news()
    schedule.close()
    checked, bad = schedule.check_chunks()
    return WorkerSummary(
        finished=fresh.finished,
        not_sent=schedule.not_sent,
        held_back=schedule.held_back,
        loop_lag_s=tuple(schedule.lags_s),
        cpu_s=process_time(),
        run_cpu_s=run_cpu_s,
        run_s=run_s,
        max_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB,
        checked_chunks=checked,
        bad_chunks=bad,
    )


if __name__ == "__main__":
    main()
