"""Every execution must move exactly the bytes it was asked to; CUDA ones run on a runtime that copies host memory."""

import ctypes
import shutil
import subprocess
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.probes.executions import cuda_pools
from kvbench.probes.executions.base import Execution, ExecutionUnavailableError
from kvbench.probes.executions.cuda_copy import equal_strides
from kvbench.probes.executions.registry import EXECUTIONS, open_execution
from kvbench.probes.executions.throttled import Throttled
from kvbench.probes.segments import LAYOUTS, Segments, kv_shape, paged, scattered
from kvbench.tiers import cuda_runtime
from tests.conformance.fake_cuda import FakeCuda, FakeKernels

POOL = 64 * 1024
HOST = [name for name, kind in EXECUTIONS.items() if kind.runs_on == "host" and name != "null"]
CUDA = [name for name, kind in EXECUTIONS.items() if kind.runs_on == "cuda"]
WHOLE = ("host-block", "cuda-block")

TRANSFERS = {
    "one byte": Segments(1, [12345], [6789]),
    "an odd size": Segments(777, [777 * 3, 0, 777 * 9], [0, 777, 777 * 2]),
    "unaligned tails": Segments(4097, [1, 9001, 20003], [3, 5003, 30011]),
    "no segments": Segments(16, [], []),
    "overlapping sources": Segments(256, [0, 128, 128, 300], [0, 256, 512, 768]),
    "one source for many targets": Segments(64, [640] * 5, [0, 64, 128, 4096, 8192]),
    "the same target twice": Segments(64, [640, 640], [128, 128]),
    "equal strides": Segments(512, [index * 1024 for index in range(20)], [index * 512 for index in range(20)]),
    "the whole pool": Segments(POOL, [0], [0]),
    "backwards": Segments(128, list(range(12800, 0, -128)), list(range(0, 12800, 128))),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return install(monkeypatch, FakeCuda())


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeCuda) -> FakeCuda:
    monkeypatch.setattr(cuda_pools, "no_gpu_reason", lambda: None)
    monkeypatch.setattr(cuda_pools, "cuda_runtime", lambda: fake)
    monkeypatch.setattr(cuda_pools, "Kernels", FakeKernels)
    return fake


def opened(name: str, direction: Any = None) -> Execution:
    default: Any = "h2d" if EXECUTIONS[name].runs_on == "cuda" else "h2h"
    return open_execution(name, direction=direction or default, pool_bytes=POOL)


def arrives(execution: Execution, segments: Segments) -> None:
    prepared = execution.prepare(segments)
    for _ in range(2):
        execution.clear_target()
        execution.copy(prepared)
        assert execution.differs(segments) is None


@pytest.mark.parametrize("name", [*HOST, *CUDA])
@pytest.mark.parametrize("what", TRANSFERS)
def test_bytes_arrive_exactly(name: str, what: str, cuda: FakeCuda) -> None:
    execution = opened(name)
    arrives(execution, TRANSFERS[what])
    execution.close()


@pytest.mark.parametrize("name", [name for name in (*HOST, *CUDA) if name not in (*WHOLE, "cuda-zero-copy")])
def test_bytes_that_did_not_arrive_are_noticed(name: str, cuda: FakeCuda) -> None:
    execution = opened(name)
    segments = TRANSFERS["an odd size"]
    execution.copy(execution.prepare(Segments(777, segments.sources[:2], segments.targets[:2])))
    assert execution.differs(segments) == 2


@pytest.mark.parametrize("name", [name for name in CUDA if name != "cuda-zero-copy"])
@pytest.mark.parametrize("direction", ["d2h", "duplex"])
def test_bytes_arrive_in_the_other_directions(name: str, direction: str, cuda: FakeCuda) -> None:
    execution = opened(name, direction)
    arrives(execution, TRANSFERS["unaligned tails"])


@pytest.mark.parametrize("name", [name for name in (*HOST, *CUDA) if name != "cuda-zero-copy"])
@given(
    size=st.integers(1, 900),
    pairs=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=30, unique_by=lambda pair: pair[1]),
)
@settings(max_examples=20, deadline=None)
def test_any_list_of_segments_arrives(name: str, size: int, pairs: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install(patch, FakeCuda())
        segments = Segments(size, [size * source for source, _ in pairs], [size * target for _, target in pairs])
        arrives(opened(name), segments)


@pytest.mark.parametrize("abi", [12, 13])
def test_a_batch_is_one_call_in_both_versions_of_the_bindings(abi: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeCuda(abi))
    execution = opened("cuda-batch")
    prepared = execution.prepare(TRANSFERS["unaligned tails"])
    fake.calls.clear()
    execution.copy(prepared)
    assert fake.calls.count("cudaMemcpyBatchAsync") == 1
    assert "cudaMemcpyAsync" not in fake.calls


@pytest.mark.parametrize("abi", [12, 13])
def test_a_refused_batch_is_one_line_with_the_copy_that_failed(abi: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeCuda(abi))
    error = SimpleError()
    answer = (error,) if abi == 13 else (error, 7)
    monkeypatch.setattr(fake, "cudaMemcpyBatchAsync", lambda *_: answer)
    execution = opened("cuda-batch")
    where = "" if abi == 13 else " at copy 7"
    with pytest.raises(Exception, match=f"of 3 copies{where}: cudaErrorNotSupported"):
        execution.copy(execution.prepare(TRANSFERS["unaligned tails"]))


class SimpleError:
    name = "cudaErrorNotSupported"

    def __int__(self) -> int:
        return 801


def test_wire_time_comes_from_events_behind_a_gate(cuda: FakeCuda) -> None:
    execution = opened("cuda-batch")
    cuda.calls.clear()
    assert execution.wire_s(execution.prepare(TRANSFERS["unaligned tails"])) == 2.5e-3
    assert execution.kernels.launched == ["hold"]  # type: ignore[attr-defined]
    gated = cuda.calls[cuda.calls.index("cudaEventRecord") :]
    assert gated[:3] == ["cudaEventRecord", "cudaMemcpyBatchAsync", "cudaEventRecord"]


def test_a_gate_is_never_closed_over_more_launches_than_the_queue_holds(cuda: FakeCuda) -> None:
    execution = opened("cuda-per-segment")
    many = Segments(1, list(range(2000)), list(range(2000)))
    assert execution.wire_s(execution.prepare(many)) is None
    assert opened("cuda-pageable").wire_s([]) is None


def test_close_frees_every_pool(cuda: FakeCuda) -> None:
    execution = opened("cuda-gather", "duplex")
    execution.prepare(TRANSFERS["an odd size"])
    execution.close()
    assert set(cuda.memory) <= set(cuda.freed)


@pytest.mark.parametrize("name", CUDA)
def test_without_a_gpu_a_cuda_execution_says_no_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pools, "no_gpu_reason", lambda: "no GPU on this host")
    with pytest.raises(ExecutionUnavailableError, match="no GPU"):
        opened(name)


def test_equal_strides_join_what_lies_at_one_distance_on_both_sides() -> None:
    rows = Segments(16, [0, 64, 128, 500, 564], [0, 16, 32, 100, 116])
    assert equal_strides(rows) == [(0, 0, 64, 16, 3), (500, 100, 64, 16, 2)]
    assert equal_strides(Segments(16, [32, 0], [0, 16])) == [(32, 0, 16, 16, 1), (0, 16, 16, 16, 1)]


def test_a_throttled_execution_takes_as_long_as_its_constants_say() -> None:
    now = [0]

    def sleep(seconds: float) -> None:
        now[0] += round(seconds * 1e9)

    def clock() -> int:
        now[0] += 1000
        return now[0]

    inner = opened("host-loop")
    execution = Throttled(inner, fixed_s=1e-3, per_segment_s=1e-4, bytes_per_s=1e6, clock_ns=clock, sleep=sleep)
    segments = TRANSFERS["an odd size"]
    before = now[0]
    arrives(execution, segments)
    expected = 2 * (1e-3 + 3e-4 + 3 * 777 / 1e6)
    assert (now[0] - before) / 1e9 == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("model", ["Qwen3-235B-A22B", "deepseek-v3"])
def test_layouts_move_every_byte_of_whole_pages_once(layout: Any, model: str) -> None:
    shape = kv_shape(model, tp=8, page_tokens=2)
    pool = 5 * shape.page_bytes
    segments = paged(3 * shape.page_bytes, shape, layout, pool_bytes=pool, seed=1)
    assert segments.total_bytes == 3 * shape.page_bytes
    for ends in (segments.sources, segments.targets):
        assert len(set(ends)) == len(segments)
        assert all(0 <= start <= pool - segments.segment_bytes for start in ends)
        assert all(start % segments.segment_bytes == 0 for start in ends)
    tokens = 1 if layout == "page-first" else 2
    assert segments.segment_bytes == shape.row_bytes * tokens


def test_the_shape_of_qwen3_235b_on_eight_ranks_is_the_published_one() -> None:
    shape = kv_shape("Qwen3-235B-A22B", tp=8, page_tokens=64)
    # 94 layers, K and V, one KV head of 128 bf16 elements per rank
    assert (shape.layers, shape.planes, shape.row_bytes) == (94, 2, 256)
    assert shape.page_bytes == 94 * 2 * 256 * 64


def test_page_first_direct_keeps_the_layers_of_a_page_together_on_the_host() -> None:
    shape = kv_shape("Qwen3-235B-A22B", tp=8, page_tokens=4)
    segments = paged(shape.page_bytes, shape, "page-first-direct", pool_bytes=4 * shape.page_bytes, seed=3)
    keys = segments.sources[: shape.layers]
    assert [b - a for a, b in pairwise(keys)] == [segments.segment_bytes] * (shape.layers - 1)


def test_a_pool_that_is_too_small_is_refused() -> None:
    with pytest.raises(Exception, match="do not fit a pool"):
        scattered(1024, 256, pool_bytes=512, seed=1)


ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile_with_nvrtc(architecture: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings and the NVRTC library, but no GPU")
    try:
        code = cuda_runtime.compiled_kernels(architecture)
    except RuntimeError as error:  # the bindings are there, the library is not
        pytest.skip(f"no NVRTC library: {error}")
    assert code.startswith(b"\x7fELF")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kernels_compile_with_nvcc(architecture: str, tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this host")
    source = tmp_path / "kernels.cu"
    source.write_text(cuda_runtime.KERNELS)
    command = ["nvcc", "-cubin", f"-arch={architecture}", "-Werror", "all-warnings", str(source), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "Value 'sm_" in done.stderr or "Unsupported gpu architecture" in done.stderr:
        pytest.skip(f"this nvcc does not know {architecture}")
    assert done.returncode == 0, done.stderr


SHIM = """
#include <cstring>
#define __device__
#define __global__
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } threadIdx, blockIdx, blockDim, gridDim;
static long long clock64() { return 0; }
static unsigned __vsadu4(unsigned a, unsigned) { return (a & 255) + (a >> 8 & 255) + (a >> 16 & 255) + (a >> 24); }
static unsigned long long __shfl_down_sync(unsigned, unsigned long long, int) { return 0; }
static void atomicAdd(unsigned long long* sum, unsigned long long value) { *sum += value; }
"""
DRIVER = """
extern "C" void run(char* target, const char* source, const long long* targets, const long long* sources,
                    long long segments, long long size, unsigned blocks, unsigned threads) {
  gridDim.x = blocks; blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
      gather(target, source, targets, sources, segments, size);
}
"""


@pytest.fixture(scope="module")
def gather_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The gather kernel's own source, compiled for the CPU and run thread by thread."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this host")
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "kernel.cpp").write_text(SHIM + textwrap.dedent(cuda_runtime.KERNELS) + DRIVER)
    command = ["g++", "-O1", "-shared", "-fPIC", "-w", str(folder / "kernel.cpp"), "-o", str(folder / "kernel.so")]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "kernel.so")).run


@pytest.mark.parametrize("what", TRANSFERS)
@pytest.mark.parametrize(("blocks", "threads"), [(1, 32), (3, 128)])
def test_the_gather_kernel_moves_exactly_the_segments(gather_on_cpu: Any, what: str, blocks: int, threads: int) -> None:
    segments = TRANSFERS[what]
    execution: Any = opened("host-loop")
    count = len(segments)
    lists = [(ctypes.c_longlong * max(count, 1))(*offsets) for offsets in (segments.targets, segments.sources)]
    gather_on_cpu(
        ctypes.c_void_p(execution.to_address), ctypes.c_void_p(execution.from_address), *lists,
        ctypes.c_longlong(count), ctypes.c_longlong(segments.segment_bytes), blocks, threads,
    )  # fmt: skip
    assert execution.differs(segments) is None
    written = sum(byte != 0 for byte in execution.to_pool)
    assert written <= len(set(segments.targets)) * segments.segment_bytes
