"""The executions by name, with what each is for: one list to read, nothing imported until chosen."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from kvbench.probes.executions.base import Direction, Execution


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionKind:
    """Where an execution runs, what it does, and its `module:Class`."""

    runs_on: Literal["host", "cuda"]
    what: str
    target: str


EXECUTIONS = {
    "host-block": ExecutionKind(
        runs_on="host", what="one contiguous memcpy", target="kvbench.probes.executions.host:BlockCopy"
    ),
    "host-loop": ExecutionKind(
        runs_on="host", what="one memcpy per segment", target="kvbench.probes.executions.host:SegmentLoop"
    ),
    "host-gather": ExecutionKind(
        runs_on="host", what="one native gather over all segments", target="kvbench.probes.executions.host:Gather"
    ),
    "null": ExecutionKind(
        runs_on="host", what="no copy: what the harness itself costs", target="kvbench.probes.executions.host:Null"
    ),
    "cuda-block": ExecutionKind(
        runs_on="cuda", what="one contiguous cudaMemcpyAsync", target="kvbench.probes.executions.cuda_copy:BlockCopy"
    ),
    "cuda-per-segment": ExecutionKind(
        runs_on="cuda", what="one cudaMemcpyAsync per segment", target="kvbench.probes.executions.cuda_copy:PerSegment"
    ),
    "cuda-batch": ExecutionKind(
        runs_on="cuda", what="one cudaMemcpyBatchAsync", target="kvbench.probes.executions.cuda_copy:Batch"
    ),
    "cuda-2d": ExecutionKind(
        runs_on="cuda", what="cudaMemcpy2DAsync over equal strides", target="kvbench.probes.executions.cuda_copy:Rows"
    ),
    "cuda-pageable": ExecutionKind(
        runs_on="cuda",
        what="cudaMemcpyAsync per segment with memory that is not pinned",
        target="kvbench.probes.executions.cuda_copy:Pageable",
    ),
    "cuda-gather": ExecutionKind(
        runs_on="cuda",
        what="a kernel that copies by an index list over mapped pinned memory",
        target="kvbench.probes.executions.cuda_kernel:GatherKernel",
    ),
    "cuda-zero-copy": ExecutionKind(
        runs_on="cuda",
        what="a kernel that only reads mapped pinned memory",
        target="kvbench.probes.executions.cuda_kernel:ZeroCopyRead",
    ),
}


def open_execution(name: str, *, direction: Direction, pool_bytes: int, device: int = 0) -> Execution:
    """The execution of that name with its pools; raises `ExecutionUnavailableError` where it cannot run."""
    module, _, attribute = EXECUTIONS[name].target.partition(":")
    made: Any = getattr(import_module(module), attribute)
    execution: Execution = made(direction=direction, pool_bytes=pool_bytes, device=device)
    return execution
