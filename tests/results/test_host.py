import builtins
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbench.results.host import Gpu, describe_host, discover_gpus


def captured(root: Path) -> Path:
    for name, text in {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Platinum 8468\ncache size\t: 1 KB\n",
        "proc/meminfo": "MemTotal:       32602788 kB\nMemFree:         1000 kB\n",
        "etc/os-release": 'NAME="Debian GNU/Linux"\nPRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\n',
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_captured_tree_is_described(tmp_path: Path) -> None:
    host = describe_host(root=captured(tmp_path), gpus=lambda: "no GPU on this host")
    assert host.cpu == "Intel(R) Xeon(R) Platinum 8468"
    assert host.memory_bytes == 32602788 * 1024
    assert host.os.startswith("Debian GNU/Linux 12 (bookworm), ")
    assert (host.gpus, host.no_gpu_reason) == ((), "no GPU on this host")


def test_an_empty_tree_still_describes_a_host(tmp_path: Path) -> None:
    host = describe_host(root=tmp_path, gpus=lambda: (Gpu(name="H200", memory_bytes=1, driver="570"),))
    assert host.memory_bytes is None
    assert host.no_gpu_reason is None
    assert host.os.startswith("unknown distribution")


def test_the_description_does_not_name_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    monkeypatch.setattr(platform, "node", lambda: "secret-host-name")
    assert "secret-host-name" not in repr(describe_host(root=captured(tmp_path), gpus=lambda: ""))


class FakeNvml(SimpleNamespace):
    class NVMLError(Exception):
        pass


def with_nvml(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    real = builtins.__import__

    def fake(name: str, *args: Any, **kwargs: Any) -> Any:
        return nvml if name == "pynvml" else real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_a_host_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise FakeNvml.NVMLError("NVML Shared Library Not Found")

    with_nvml(monkeypatch, FakeNvml(nvmlInit=missing))
    assert discover_gpus() == "no GPU on this host (NVML: NVML Shared Library Not Found)"


def test_the_gpus_of_the_driver_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.1",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetMemoryInfo=lambda _handle: SimpleNamespace(total=80 * 2**30),
    )
    with_nvml(monkeypatch, nvml)
    assert discover_gpus() == tuple(
        Gpu(name=f"GPU {index}", memory_bytes=80 * 2**30, driver="570.1") for index in range(2)
    )
    nvml.nvmlDeviceGetCount = lambda: 0
    assert discover_gpus() == "no GPU on this host (the NVIDIA driver lists none)"
