"""`--measure` on this host, for real: copies from memory and a file, and prefill of a small model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.main import main
from kvbench.results.codec import read_document
from kvbench.results.document import numbers_without_origin

PLAN = Path(__file__).parent.parent / "data" / "load-vs-recompute" / "quick-measure.yaml"
SMALL_QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 12,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small-qwen")
    (folder / "config.json").write_text(json.dumps(SMALL_QWEN))
    return folder


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A measured answer, taken once."""
    folder = tmp_path_factory.mktemp("measured")
    out = folder / "answer.json"
    arguments = [
        "load-vs-recompute", str(model), "--measure", f"--plan={PLAN}", "--tier=dram:16MiB",
        f"--tier=file:{folder}?size=8MiB", "--tier=wishful=1GB/s", "--tokens=64,1024", f"--out={out}", "--quiet",
    ]  # fmt: skip
    assert main(arguments) == 0
    return out


def test_measured_tiers_and_prefill_replace_every_prior(measured: Path) -> None:
    document = read_document(measured)
    result = document.result
    assert result.efficiency == "measured"
    assert {path.tier for path in result.measured_paths} == {"dram", "file"}
    by_tier = {path.tier: path for path in result.measured_paths}
    for point in result.points:
        if point.tier in by_tier:
            assert point.tier_bytes_per_s == by_tier[point.tier].bytes_per_s
            assert point.t_load_fixed_s == by_tier[point.tier].fixed_s
        assert point.i_hardware is None
        assert point.t_recompute_floor_s is None
        assert point.t_recompute_s == pytest.approx(result.measured_prefill.seconds(point.tokens))
    assert numbers_without_origin(document) == ()
    assert document.provenance["t_recompute_s"].provenance == "measured"


def test_the_prefill_stands_for_all_layers_and_prints_its_residual(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = read_document(measured).result.measured_prefill
    assert prefill.num_layers == SMALL_QWEN["num_hidden_layers"]
    assert prefill.device == "cpu" or prefill.device.startswith("cuda")
    assert main(["report", str(measured)]) == 0
    text = capsys.readouterr().out
    assert "residual" in text
    assert "predicted / measured" in text
    assert "torch cpu tensor" in text or "cuda" in text


def test_a_modelled_tier_beside_measured_ones_stays_labelled_modelled(measured: Path) -> None:
    document = read_document(measured)
    (wishful,) = [item for item in document.result.inputs if item.name == "tier_wishful"]
    assert wishful.origin.provenance == "modelled"
    # Load times rest on it too, so they are not all measured.
    assert document.provenance["t_load_s"].provenance == "modelled"


def test_a_tier_that_could_not_be_measured_is_on_the_first_screen(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = ("--tier=dram:16MiB", f"--tier=file:{tmp_path}/nowhere?size=8MiB")
    code = main(["load-vs-recompute", str(model), "--measure", f"--plan={PLAN}", *tiers, "--tokens=64", "--quiet"])
    out = capsys.readouterr().out
    assert code == 0
    first_screen = out.partition("┌")[0]
    assert f"skipped load from file:{tmp_path}/nowhere" in first_screen


def test_no_file_is_left_behind(measured: Path) -> None:
    assert [path.name for path in measured.parent.iterdir()] == [measured.name]


def test_a_model_too_large_for_this_host_is_refused_with_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.read_text().replace("  time: 30s", "  time: 30s\n  memory: 1MiB"))
    code = main(["load-vs-recompute", "qwen3-8b", "--measure", f"--plan={plan}", "--tier=dram:16MiB", "--quiet"])
    err = capsys.readouterr().err
    assert code == 1
    assert err.count("\n") == 1
    assert "qwen3-8b could not be compared on this host" in err
    assert "1.00 MiB" in err


def test_ctrl_c_while_measuring_saves_what_was_measured(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "partial.json"
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.read_text().replace("  time: 30s", "  time: 60s").replace("repeats: 3", "repeats: 100000"))
    command = [
        sys.executable, "-m", "kvbench", "load-vs-recompute", str(model), "--measure", f"--plan={plan}",
        "--tier=dram:16MiB", f"--out={out}",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    assert process.stderr is not None
    seen = ""
    while "timing prefills" not in seen and time.monotonic() < deadline:
        seen += process.stderr.readline()
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    document = read_document(out)
    assert document.interrupted
    assert {path.tier for path in document.result.measured_paths} == {"dram"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--plan=nowhere.yaml"], "add --measure"),
        (["--measure", "--plan=nowhere.yaml"], "nowhere.yaml"),
        (["--measure", "--tier=redis://localhost"], "redis"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    arguments: list[str], part: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan: list[Any] = [] if any("--plan" in argument for argument in arguments) else [f"--plan={PLAN}"]
    code = main(["load-vs-recompute", str(model), *arguments, *plan, "--quiet"])
    err = capsys.readouterr().err
    assert code in (1, 2)
    assert err.count("\n") == 1
    assert part in err
