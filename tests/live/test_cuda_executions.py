"""Every CUDA execution on a real GPU: the same transfers that the conformance suite sends through host memory."""

import pytest

from kvbench.probes.executions.registry import EXECUTIONS, open_execution
from kvbench.results.host import Gpu
from tests.conformance.test_executions import CUDA, POOL, TRANSFERS, arrives

pytestmark = pytest.mark.live

DIRECTIONS = ("h2d", "d2h", "duplex")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", CUDA)
def test_bytes_arrive_exactly_on_a_gpu(name: str, direction: str, gpus: tuple[Gpu, ...]) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    if name == "cuda-zero-copy" and direction != "h2d":
        pytest.skip("it only reads host memory")
    assert EXECUTIONS[name].runs_on == "cuda"
    execution = open_execution(name, direction=direction, pool_bytes=POOL)  # type: ignore[arg-type]  # one of three
    try:
        for segments in TRANSFERS.values():
            arrives(execution, segments)
            execution.wire_s(execution.prepare(segments))
            assert execution.differs(segments) is None
    finally:
        execution.close()
