"""Catalogue entries add up to the numbers worked out apart from kvbench, and are found under every usual name."""

import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import yaml

from kvbench.catalogue import models as catalogue
from kvbench.catalogue.models import catalogue_names, find_model
from kvbench.catalogue.yaml_file import read_yaml
from kvbench.core.errors import UsageError
from kvbench.core.layers import Attention, LatentAttention, RecurrentState
from kvbench.core.model import Model

DATA = Path(__file__).parents[1] / "data"
EXPECTED = cast(
    "dict[str, dict[str, object]]", yaml.safe_load((DATA / "models" / "expected.yaml").read_text(encoding="utf-8"))
)


def bf16_sums(model: Model) -> dict[str, object]:
    """Bytes and state elements from the descriptors, by the shortest possible arithmetic."""
    sums = dict.fromkeys(
        (
            "kv_bytes_per_token",
            "index_bytes_per_token",
            "window_bytes_per_resident_token",
            "state_elements",
            "conv_elements",
        ),
        0,
    )
    for mixer in model.mixers():
        if isinstance(mixer, RecurrentState):
            sums["state_elements"] += mixer.state_elements
            sums["conv_elements"] += mixer.conv_elements
        elif isinstance(mixer, LatentAttention):
            sums["kv_bytes_per_token"] += 2 * (mixer.kv_rank + mixer.rope_dim)
            sums["index_bytes_per_token"] += 132 if mixer.indexer and mixer.indexer.owned else 0
        elif mixer.stores_kv:
            bounded = mixer.window_tokens or mixer.chunk_tokens
            key = "window_bytes_per_resident_token" if bounded else "kv_bytes_per_token"
            sums[key] += 2 * mixer.kv_heads * (mixer.qk_dim + mixer.v_dim)
    return dict(sums)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_catalogue_model_adds_up_to_the_numbers_worked_out_apart(name: str) -> None:
    model = find_model(name).model
    found = {
        "layers": model.layer_kinds(),
        "total_params": model.total_params(),
        "matmul_params_per_token": model.matmul_params_per_token(),
        **bf16_sums(model),
    }
    assert found == EXPECTED[name]


def test_the_models_of_the_worked_table_are_all_in_the_catalogue() -> None:
    assert len(EXPECTED) == 29
    assert set(EXPECTED) <= set(catalogue_names())


@pytest.mark.parametrize("name", catalogue_names())
def test_a_total_is_within_one_per_cent_of_the_published_one_or_says_why_not(name: str) -> None:
    entry = find_model(name)
    assert entry.published_total_params is not None
    deviation = abs(entry.model.total_params() / entry.published_total_params - 1)
    assert (deviation <= 0.01) == (entry.total_note is None)
    assert entry.source


@pytest.mark.parametrize("name", catalogue_names())
def test_matmul_parameters_are_never_more_than_all_parameters(name: str) -> None:
    entry = find_model(name)
    assert 0 < entry.model.matmul_params_per_token() < entry.model.total_params()
    assert (
        entry.published_active_params is None
        or entry.published_total_params is None
        or (entry.published_active_params <= entry.published_total_params)
    )


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3-235b-a22b"),
        ("deepseek-r1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("GLM-4.6", "glm-4.5"),
        ("zai-org/glm-5.1", "glm-5"),
        ("Kimi-K2-Instruct", "kimi-k2"),
        ("OPENAI/GPT-OSS-120B", "gpt-oss-120b"),
        ("  qwen3-8b ", "qwen3-8b"),
        ("Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
    ],
)
def test_a_model_is_found_by_id_hub_name_and_alias_in_any_case(spelling: str, name: str) -> None:
    assert find_model(spelling).model.name == name


def test_no_two_models_answer_to_the_same_name() -> None:
    owners: dict[str, str] = {}
    for name, model_id in catalogue._names():
        assert owners.setdefault(name, model_id) == model_id, name


def test_an_unknown_model_is_refused_with_the_nearest_names_and_another_way() -> None:
    with pytest.raises(UsageError, match=r"'qwen3-9b' is not in the catalogue; did you mean .*qwen3-8b.*config\.json"):
        find_model("qwen3-9b")
    with pytest.raises(UsageError, match=r"'zzzz' is not in the catalogue; .*config\.json"):
        find_model("zzzz")


@pytest.mark.parametrize(
    "text", ["", "\0", "../../etc/passwd", "a" * 5000, "~nobody-here/x", "qwen3-8b.yaml", "*", "org/"]
)
def test_an_odd_model_name_gets_one_line_and_never_a_traceback(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_model(text)
    assert "\n" not in str(caught.value)


def test_a_path_is_taken_as_a_file_or_as_the_directory_around_it(tmp_path: Path) -> None:
    text = (DATA / "configs" / "qwen3-8b.json").read_text(encoding="utf-8")
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text(text, encoding="utf-8")
    (tmp_path / "renamed.json").write_text(text, encoding="utf-8")
    entry = find_model(str(tmp_path / "my-model"))
    assert entry.model.name == "my-model"
    assert entry.hf is None
    assert entry.config["model_type"] == "qwen3"
    assert find_model(str(tmp_path / "my-model" / "config.json")).model == entry.model
    assert find_model(str(tmp_path / "renamed.json")).model.name == "renamed"
    assert entry.model.layers == find_model("qwen3-8b").model.layers


def test_one_model_is_read_from_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []

    def read(path: Path) -> object:
        files.append(path.name)
        return read_yaml(path)

    monkeypatch.setattr(catalogue, "read_yaml", read)
    monkeypatch.setattr(catalogue, "parse_yaml", lambda text: pytest.fail("the heads of all files were read"))
    find_model("qwen3-8b")
    assert files == ["qwen3-8b.yaml"]


def test_finding_a_model_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kvbench.catalogue.models import find_model; find_model('deepseek-r1');"
        "sys.exit(','.join({'torch', 'transformers', 'pydantic', 'numpy', 'pandas'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("deepseek-v3", "fp8_block"),
        ("deepseek-v3.2", "fp8_block"),
        ("kimi-k2", "fp8_block"),
        ("minimax-m2", "fp8_block"),
        ("glm-5", "bf16"),
        ("gpt-oss-120b", "mxfp4"),
        ("llama-2-7b", "fp16"),
        ("qwen3-8b", "bf16"),
    ],
)
def test_the_dtype_of_the_linear_layers_is_that_of_the_checkpoint(name: str, dtype: str) -> None:
    assert find_model(name).model.weight_dtype == dtype


def test_shared_layers_of_gemma_3n_project_and_store_no_keys() -> None:
    layers = find_model("gemma-3n-e4b").model.layers
    shared = [layer for layer in layers if isinstance(layer.mixer, Attention) and not layer.mixer.stores_kv]
    assert len(shared) == 15
    assert layers[-15:] == tuple(shared)
    assert all(layer.kv_params() == 0 for layer in shared)


def test_sliding_layers_of_mimo_have_their_own_heads_and_keys_wider_than_values() -> None:
    mixers = find_model("mimo-v2-flash").model.mixers()
    shapes = {(m.kv_heads, m.qk_dim, m.v_dim, m.window_tokens) for m in mixers if isinstance(m, Attention)}
    assert shapes == {(4, 192, 128, None), (8, 192, 128, 128)}


def test_full_layers_of_gemma_4_project_keys_only_but_store_both() -> None:
    full = [m for m in find_model("gemma-4-31b").model.mixers() if isinstance(m, Attention) and not m.window_tokens]
    assert len(full) == 10
    assert {(m.kv_heads, m.qk_dim, m.v_dim, m.kv_params(5376)) for m in full} == {(4, 512, 512, 5376 * 4 * 512)}
