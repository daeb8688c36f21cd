"""`load-vs-recompute --measure` on a GPU: pinned copies into device memory and prefill on CUDA."""

import json
from pathlib import Path

import pytest

from kvbench.cli.main import main
from kvbench.results.codec import read_document
from kvbench.results.host import Gpu

pytestmark = pytest.mark.live


def test_a_measured_answer_comes_from_the_gpu_and_not_from_host_memory(
    gpus: tuple[Gpu, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answer.json"
    tiers = ("--tier=dram:2GiB", f"--tier=file:{tmp_path}?size=1GiB")
    assert main(["load-vs-recompute", "qwen3-0.6b", "--measure", *tiers, "--tokens=4096,32768", f"--out={out}"]) == 0
    text = capsys.readouterr().out
    result = read_document(out).result
    assert gpus
    assert all(path.destination.startswith("cuda:") for path in result.measured_paths)
    assert result.measured_prefill.device.startswith("cuda")
    assert "torch cpu tensor" not in text
    (dram,) = [path for path in result.measured_paths if path.tier == "dram"]
    # Pinned memory over any PCIe x16 generation since 3 carries more than 6 GB/s; pageable memory would not double it.
    assert dram.bytes_per_s > 6e9
    assert not [warning for warning in dram.warnings if warning.code == "pageable-memory"]


def test_the_gpu_predicts_a_prefill_it_has_not_seen(
    gpus: tuple[Gpu, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpus
    out = tmp_path / "answer.json"
    assert main(["load-vs-recompute", "qwen3-0.6b", "--measure", "--tier=dram:1GiB", "--json", f"--out={out}"]) == 0
    (check,) = json.loads(capsys.readouterr().out)["result"]["checks"]
    assert check["predicted_s"] == pytest.approx(check["measured_s"], rel=0.25)
