"""Describes the machine a result was made on: enough to judge the numbers, nothing that names it or its owner."""

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvbench.core.units import KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver reports it."""

    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine of a result. `num_cpus` are those this process may use; an empty `gpus` comes with its reason."""

    cpu: str
    num_cpus: int
    memory_bytes: int | None
    os: str
    python: str
    gpus: tuple[Gpu, ...]
    no_gpu_reason: str | None


def describe_host(*, root: Path = Path("/"), gpus: Callable[[], tuple[Gpu, ...] | str] | None = None) -> Host:
    """This machine, read from `root` (a captured tree works as well); `gpus` returns GPUs, or why there are none."""
    found = (gpus or discover_gpus)()
    return Host(
        cpu=_cpu(root),
        num_cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(root),
        os=f"{_distribution(root)}, {platform.system()} {platform.release().partition('-')[0]}",
        python=platform.python_version(),
        gpus=() if isinstance(found, str) else found,
        no_gpu_reason=found if isinstance(found, str) else None,
    )


def discover_gpus() -> tuple[Gpu, ...] | str:
    """The GPUs that NVML lists, or one sentence saying why it lists none. Needs no torch and no CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no GPU on this host (NVML: {error})"
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = tuple(
            Gpu(
                name=pynvml.nvmlDeviceGetName(handle),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                driver=driver,
            )
            for handle in handles
        )
    except pynvml.NVMLError as error:
        return f"the NVIDIA driver answers, but does not describe its GPUs (NVML: {error})"
    finally:
        pynvml.nvmlShutdown()
    return found or "no GPU on this host (the NVIDIA driver lists none)"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu(root: Path) -> str:
    # x86:  model name	: Intel(R) Xeon(R) Platinum 8468
    # Arm has no such line; its machine name (aarch64) is all that every kernel tells.
    match = re.search(r"^model name\s*:\s*(.+)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _memory_bytes(root: Path) -> int | None:
    # MemTotal:       32602788 kB      (the kernel's kB is 1024 bytes)
    match = re.search(r"^MemTotal:\s*(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * KIB if match else None


def _distribution(root: Path) -> str:
    # PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)"?$', _read(root / "etc/os-release"), re.MULTILINE)
    return match[1] if match else "unknown distribution"
