"""CUDA through cuda-bindings, never torch: checked calls, kernels compiled at run time, and where a GPU sits."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.core.errors import KvbenchError, MissingDependencyError
from kvbench.results.host import discover_gpus


def no_gpu_reason() -> str | None:
    """Why there is no GPU to copy to, beginning with `no GPU`, or None. Asks NVML, which takes milliseconds."""
    found = discover_gpus()
    if not isinstance(found, str):
        return None
    return found if found.startswith("no GPU") else f"no GPU that can be used ({found})"


def cuda_runtime() -> Any:
    """`cuda.bindings.runtime`."""
    return _binding("runtime")


def cuda_driver() -> Any:
    """`cuda.bindings.driver`, for what the runtime API lacks: loading and launching compiled kernels."""
    return _binding("driver")


def _binding(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise MissingDependencyError("cuda-bindings", "nvidia", "a copy to or from a GPU") from error


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a cuda-bindings call, which returns `(error, value…)`; raises where the error is not success."""
    error, *values = result
    if int(error) != 0:
        raise KvbenchError(
            f"{what}: {getattr(error, 'name', error)}; look at nvidia-smi and the kernel's log, or use a smaller size"
        )
    return values[0] if len(values) == 1 else tuple(values)


def num_devices() -> int:
    """How many GPUs CUDA sees."""
    return int(checked(cuda_runtime().cudaGetDeviceCount(), "counting GPUs"))


def device_numa_node(device: int, *, root: Path = Path("/")) -> int | None:
    """The NUMA node that a GPU hangs on, by its PCI address, or None where the system does not say."""
    bus_id = checked(cuda_runtime().cudaDeviceGetPCIBusId(32, device), f"address of GPU {device}")
    text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
    return pci_numa_node(text.rstrip("\0"), root=root)


def pci_numa_node(bus_id: str, *, root: Path = Path("/")) -> int | None:
    """NUMA node in sysfs of a PCI device such as `00000000:18:00.0`; CUDA and NVML print eight digits of domain."""
    domain, _, rest = bus_id.strip().lower().partition(":")
    path = root / f"sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


KERNELS = r"""
// One warp moves units of at most UNIT bytes, 16 bytes per lane and step where the addresses allow it. Bandwidth over
// a link is bytes in flight over the round trip: four loads are issued before the first store.
#define UNIT 16384
__device__ void copy_unit(char* to, const char* from, int bytes, int lane) {
  int done = 0;
  if ((((unsigned long long)to | (unsigned long long)from) & 15) == 0) {
    int quads = bytes / 16;
    const uint4* source = (const uint4*)from;
    uint4* target = (uint4*)to;
    int at = lane;
    for (; at + 96 < quads; at += 128) {
      uint4 a = source[at], b = source[at + 32], c = source[at + 64], d = source[at + 96];
      target[at] = a; target[at + 32] = b; target[at + 64] = c; target[at + 96] = d;
    }
    for (; at < quads; at += 32) target[at] = source[at];
    done = quads * 16;
  }
  for (int at = done + lane; at < bytes; at += 32) to[at] = from[at];
}

extern "C" __global__ void gather(char* target, const char* source, const long long* targets, const long long* sources,
                                  long long segments, long long segment_bytes) {
  long long units = (segment_bytes + UNIT - 1) / UNIT;
  long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  long long warps = (long long)gridDim.x * blockDim.x / 32;
  int lane = threadIdx.x % 32;
  for (long long work = warp; work < segments * units; work += warps) {
    long long segment = work / units, start = work % units * UNIT;
    long long left = segment_bytes - start;
    int bytes = left < UNIT ? (int)left : UNIT;
    copy_unit(target + targets[segment] + start, source + sources[segment] + start, bytes, lane);
  }
}

// Reads everything and keeps only the sum of all bytes: nothing but reading is timed, and the sum can be checked.
extern "C" __global__ void read_only(unsigned long long* sum, const char* source, const long long* sources,
                                     long long segments, long long segment_bytes) {
  long long warp = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
  long long warps = (long long)gridDim.x * blockDim.x / 32;
  int lane = threadIdx.x % 32;
  long long units = (segment_bytes + UNIT - 1) / UNIT;
  unsigned long long mine = 0;
  for (long long work = warp; work < segments * units; work += warps) {
    long long start = work % units * UNIT, left = segment_bytes - start;
    const char* from = source + sources[work / units] + start;
    int bytes = left < UNIT ? (int)left : UNIT, done = 0;
    if (((unsigned long long)from & 15) == 0) {
      const uint4* quads = (const uint4*)from;
      for (int at = lane; at < bytes / 16; at += 32) {
        uint4 four = quads[at];
        unsigned int words[4] = {four.x, four.y, four.z, four.w};
        for (int word = 0; word < 4; word++) mine += __vsadu4(words[word], 0);
      }
      done = bytes / 16 * 16;
    }
    for (int at = done + lane; at < bytes; at += 32) mine += (unsigned char)from[at];
  }
  for (int offset = 16; offset; offset /= 2) mine += __shfl_down_sync(0xffffffffu, mine, offset);
  if (lane == 0 && mine) atomicAdd(sum, mine);
}

// Holds a stream until the host opens the gate, so that the copies behind it are all enqueued before the first runs.
// It gives up after about ten seconds of clock: a gate that nobody opens must not hang the GPU.
extern "C" __global__ void hold(volatile int* gate) {
  long long begin = clock64();
  while (*gate == 0 && clock64() - begin < 20000000000LL) {}
}

extern "C" __global__ void burn(float* sink, int rounds) {
  float a = threadIdx.x * 1e-3f, b = 1.0001f;
  for (int round = 0; round < rounds; round++) a = a * b + 0.5f;
  if (a == -1.0f) *sink = a;
}
"""


def compiled_kernels(architecture: str) -> bytes:
    """`KERNELS` as machine code for an architecture such as `sm_90`; needs NVRTC but no GPU."""
    nvrtc = _binding("nvrtc")
    program = checked(nvrtc.nvrtcCreateProgram(KERNELS.encode(), b"kvbench.cu", 0, [], []), "NVRTC")
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    outcome = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(outcome[0]) != 0:
        size = checked(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC log")
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        first = log.decode(errors="replace").strip().splitlines()[:1]
        raise KvbenchError(f"the kernels do not compile for {architecture}: {''.join(first)}; please report this")
    size = int(checked(nvrtc.nvrtcGetCUBINSize(program), "NVRTC"))
    code: bytes = b" " * size
    checked(nvrtc.nvrtcGetCUBIN(program, code), "NVRTC")
    return code


class Kernels:
    """The compiled kernels of one device."""

    def __init__(self, device: int) -> None:
        runtime, driver = cuda_runtime(), cuda_driver()
        properties = {
            name: checked(runtime.cudaDeviceGetAttribute(getattr(runtime.cudaDeviceAttr, key), device), name)
            for name, key in (
                ("major", "cudaDevAttrComputeCapabilityMajor"),
                ("minor", "cudaDevAttrComputeCapabilityMinor"),
                ("processors", "cudaDevAttrMultiProcessorCount"),
            )
        }
        self.blocks = 2 * int(properties["processors"])
        code = compiled_kernels(f"sm_{properties['major']}{properties['minor']}")
        self._module = checked(driver.cuModuleLoadData(code), "loading the kernels")
        self._driver = driver

    def launch(
        self, name: str, stream: Any, *arguments: tuple[int, Any], blocks: int | None = None, threads: int = 512
    ) -> None:
        """Puts a kernel on a stream; every argument is a value and its ctypes type."""
        function = _function(self._module, name)
        values = tuple(value for value, _ in arguments)
        kinds = tuple(kind for _, kind in arguments)
        grid = self.blocks if blocks is None else blocks
        checked(
            self._driver.cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0, int(stream), (values, kinds), 0),
            f"launching {name}",
        )


@cache
def _function(module: Any, name: str) -> Any:
    return checked(cuda_driver().cuModuleGetFunction(module, name.encode()), f"kernel {name}")


def pointer(address: int) -> tuple[int, Any]:
    """An address as a kernel argument."""
    return address, ctypes.c_void_p


def number(value: int) -> tuple[int, Any]:
    """A 64-bit count as a kernel argument."""
    return value, ctypes.c_longlong
