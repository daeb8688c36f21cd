"""Case "copy": time an execution over transfer and segment sizes, alone or beside other work; runs in the child."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier, Event, Thread
from typing import Any, Literal

from kvbench.core.errors import KvbenchError
from kvbench.core.units import format_bytes, seconds_from_ns
from kvbench.probes.affinity import stay_on_node
from kvbench.probes.executions.base import Direction, Execution, ExecutionUnavailableError
from kvbench.probes.executions.registry import EXECUTIONS, open_execution
from kvbench.probes.executions.throttled import Throttled
from kvbench.probes.machine import available_memory_bytes, last_level_cache_bytes
from kvbench.probes.segments import KvShape, Layout, Segments, paged, scattered
from kvbench.probes.turns import monotonic, turns

Emit = Callable[[dict[str, Any]], None]
_VARIANTS = 3  # lists of segments per point, so that no copy finds its own bytes in the cache
_MOST_VARIED_SEGMENTS = 4096  # preparing longer lists again would take longer than copying them
_ALONE_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCase:
    """What to copy, how often, and the bounds. A point is (bytes of the transfer, bytes of a segment).

    `copiers` 0 stands for every GPU. `throttle` holds the constants of a throttled path.
    """

    execution: str
    direction: Direction
    layout: Layout
    shape: dict[str, Any] | None
    throttle: dict[str, float] | None
    copiers: int
    beside: Literal["nothing", "compute"]
    points: Sequence[Sequence[int]]
    repeats: int
    warmups: int
    pool_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class _Point:
    """One transfer and segment size with its lists of segments, as every copier has prepared them."""

    total_bytes: int
    segments: int
    variants: list[Segments]
    prepared: list[list[Any]]


def measure(case: dict[str, Any], emit: Emit) -> None:
    """Times the copies of a `CopyCase` and emits one sample per copy; a copy that arrives changed ends the case."""
    plan = CopyCase(**case)
    on_gpu = EXECUTIONS[plan.execution].runs_on == "cuda"
    executions: list[Execution] = []
    try:
        emit({"record": "stage", "text": "preparing memory"})
        pool_bytes = _pool_bytes(plan, on_gpu)
        devices = _devices(plan) if on_gpu else [0] * plan.copiers
        placement = stay_on_node(_near_node(devices[0]) if on_gpu else None)
        executions = [_opened(plan, pool_bytes, device) for device in devices]
        points = [
            _point(plan, int(total), int(segment), pool_bytes, executions, index)
            for index, (total, segment) in enumerate(plan.points)
        ]
        facts = {
            "record": "facts",
            "source": executions[0].source,
            "destination": executions[0].target,
            "placement": placement,
            **_coldness(points, on_gpu, plan.execution == "null"),
        }
        emit(facts)
        emit({"record": "stage", "text": f"checking that bytes arrive by {plan.execution}"})
        for point in points:
            for _ in range(plan.warmups):
                _check(executions, point)
        _timed(plan, executions, points, emit, facts)
        for point in points:
            _check(executions, point)
    except ExecutionUnavailableError as error:
        emit({"record": "skipped", "reason": str(error)})
    finally:
        for execution in executions:
            execution.close()


def _opened(plan: CopyCase, pool_bytes: int, device: int) -> Execution:
    execution = open_execution(plan.execution, direction=plan.direction, pool_bytes=pool_bytes, device=device)
    if plan.throttle is None:
        return execution
    return Throttled(
        execution,
        fixed_s=plan.throttle.get("fixed_s", 0.0),
        per_segment_s=plan.throttle.get("per_segment_s", 0.0),
        bytes_per_s=plan.throttle.get("bytes_per_s"),
    )


def _devices(plan: CopyCase) -> list[int]:
    from kvbench.tiers.cuda_runtime import no_gpu_reason, num_devices

    reason = no_gpu_reason()
    if reason is not None:
        raise ExecutionUnavailableError(reason)
    found = num_devices()
    if plan.copiers > found:
        raise ExecutionUnavailableError(f"{plan.copiers} GPUs were asked for, and this host has {found}")
    return list(range(plan.copiers or found))


def _near_node(device: int) -> int | None:
    from kvbench.tiers.cuda_runtime import device_numa_node

    return device_numa_node(device)


def _pool_bytes(plan: CopyCase, on_gpu: bool) -> int:
    """Room for twice the largest transfer or four last-level caches, within the plan and a quarter of free memory."""
    largest = max((int(total) for total, _ in plan.points), default=1)
    wanted = max(2 * largest, 0 if on_gpu else 4 * (last_level_cache_bytes() or 0))
    free = available_memory_bytes()
    bound = plan.pool_bytes if free is None else min(plan.pool_bytes, free // (4 * max(plan.copiers, 1)))
    if largest > bound:
        raise KvbenchError(
            f"a transfer of {format_bytes(largest)} does not fit a pool of {format_bytes(bound)}; "
            "give smaller sizes, a larger pool in the plan, or free memory"
        )
    return min(wanted, bound)


def _point(
    plan: CopyCase, total: int, segment: int, pool_bytes: int, executions: Sequence[Execution], index: int
) -> _Point:
    shape = None if plan.shape is None else KvShape(**plan.shape)
    variants: list[Segments] = []
    while len(variants) < _VARIANTS and (not variants or len(variants[0]) <= _MOST_VARIED_SEGMENTS):
        variant = len(variants)
        seed = index * _VARIANTS + variant
        if shape is not None and plan.layout != "scattered":
            variants.append(paged(total, shape, plan.layout, pool_bytes=pool_bytes, seed=seed))
        else:
            variants.append(scattered(total, segment, pool_bytes=pool_bytes, seed=seed))
    first = variants[0]
    ways = 2 if plan.direction == "duplex" else 1
    return _Point(
        total_bytes=first.total_bytes * ways * len(executions),
        segments=len(first) * ways * len(executions),
        variants=variants,
        prepared=[[execution.prepare(segments) for execution in executions] for segments in variants],
    )


def _coldness(points: Sequence[_Point], on_gpu: bool, nothing: bool) -> dict[str, Any]:
    """Whether other copies push a point's bytes out of the CPU's caches before it is copied again."""
    if nothing:
        return {"cold": None, "cold_evidence": "no bytes are touched"}
    cache_bytes = last_level_cache_bytes()
    passed = sum(2 * point.total_bytes for point in points)  # a copy brings its source and its target through the cache
    turn = f"points take turns and touch {format_bytes(passed)} a round, from up to {_VARIANTS} lists of places each"
    if cache_bytes is None:
        return {"cold": None, "cold_evidence": f"{turn}; the size of the last-level cache is unknown here"}
    evidence = f"{turn}; the last-level cache holds {format_bytes(cache_bytes)}"
    if on_gpu:
        evidence += "; copy engines read host memory through it"
    return {"cold": passed >= 2 * cache_bytes, "cold_evidence": evidence}


def _check(executions: Sequence[Execution], point: _Point) -> None:
    for index, execution in enumerate(executions):
        execution.clear_target()
        execution.copy(point.prepared[0][index])
        wrong = execution.differs(point.variants[0])
        if wrong is not None:
            segments = point.variants[0]
            raise KvbenchError(
                f"segment {wrong} of {len(segments)} ({format_bytes(segments.segment_bytes)}) arrived changed; "
                "do not trust this path, and check memory for errors"
            )


def _timed(
    plan: CopyCase, executions: Sequence[Execution], points: Sequence[_Point], emit: Emit, facts: dict[str, Any]
) -> None:
    emit({"record": "stage", "text": f"timing {plan.execution} over {len(points)} sizes"})
    company = _Company(plan.execution) if plan.beside == "compute" else None
    alone = company.rate_alone(_ALONE_S) if company else None
    turn = 0
    with ThreadPoolExecutor(len(executions)) as copiers:
        if company:
            company.start()
        try:
            for point in turns(points, repeats=plan.repeats, time_s=plan.time_s, clock=monotonic):
                prepared = point.prepared[turn % len(point.prepared)]
                turn += 1
                seconds = _seconds(executions, prepared, copiers)
                wire_s = executions[0].wire_s(prepared[0]) if len(executions) == 1 else None
                emit(
                    {
                        "record": "sample",
                        "bytes": point.total_bytes,
                        "segments": point.segments,
                        "seconds": seconds,
                        "wire_s": wire_s,
                    }
                )
        finally:
            rate = company.stop() if company else None
    if company and alone and rate is not None:
        emit({**facts, "beside_slowdown_ratio": max(1 - rate / alone, 0.0)})


def _seconds(executions: Sequence[Execution], prepared: Sequence[Any], copiers: ThreadPoolExecutor) -> float:
    """Seconds from the first copier's start to the last one's end."""
    if len(executions) == 1:
        begin_ns = time.perf_counter_ns()
        executions[0].copy(prepared[0])
        return seconds_from_ns(time.perf_counter_ns() - begin_ns)
    barrier = Barrier(len(executions))

    def copy(index: int) -> tuple[int, int]:
        barrier.wait()
        begin_ns = time.perf_counter_ns()
        executions[index].copy(prepared[index])
        return begin_ns, time.perf_counter_ns()

    spans = list(copiers.map(copy, range(len(executions))))
    return seconds_from_ns(max(end for _, end in spans) - min(begin for begin, _ in spans))


class _Company:
    """Arithmetic that runs beside the copies, and how fast it goes: on the GPU for CUDA executions, else on a core."""

    def __init__(self, execution: str) -> None:
        self._ended, self._rounds, self._seconds = Event(), 0, 0.0
        self._thread = Thread(target=self._run, daemon=True)
        if EXECUTIONS[execution].runs_on == "cuda":
            from kvbench.probes.executions.cuda_pools import CudaCompute

            self._round: Callable[[], Any] = CudaCompute().one_round
        else:
            import numpy as np

            numbers = np.random.default_rng(1).random(100_000)
            self._round = lambda: np.sqrt(numbers * 1.5 + 2.0).sum()
        self._round()

    def rate_alone(self, seconds: float) -> float:
        """Rounds per second with nothing beside."""
        begin, rounds = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            self._round()
            rounds += 1
        return rounds / (time.perf_counter() - begin)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        begin = time.perf_counter()
        while not self._ended.is_set():
            self._round()
            self._rounds += 1
        self._seconds = time.perf_counter() - begin

    def stop(self) -> float | None:
        """Rounds per second beside the copies."""
        self._ended.set()
        self._thread.join()
        return self._rounds / self._seconds if self._seconds else None
