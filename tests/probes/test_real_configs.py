"""Configs of published models: what transformers builds from them has the layers that their model cards describe."""

import json
from pathlib import Path

import pytest

from kvbench.catalogue.truncated_model import truncated_model

pytest.importorskip("transformers", reason="prefill needs transformers: pip install 'kvbench[torch]'")

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        ("deepseek-v3", [3, 58]),
        ("glm-4.5", [3, 89]),
        ("gpt-oss-20b", [12, 12]),
        ("gemma-3-27b", [52, 10]),
        ("jamba-v0.1", [12, 16, 4]),
        ("kimi-k2", [1, 60]),
        ("kimi-linear-48b-a3b", [1, 19, 7]),
        ("llama-3.1-8b", [32]),
        ("nemotron-3-nano-30b-a3b", [23, 23, 6]),
        ("qwen3-235b-a22b", [94]),
        ("qwen3-next-80b-a3b", [36, 12]),
    ],
)
def test_the_layers_of_a_published_model_fall_into_the_kinds_of_its_card(name: str, num_layers: list[int]) -> None:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    model = truncated_model(config, layers_per_kind=1, dtype="bfloat16")
    assert [len(kind.layer_indices) for kind in model.kinds] == num_layers
    assert len(model.layers) == len(num_layers)
    assert all(parameter.is_meta for parameter in model.module.parameters())
    assert model.weight_bytes >= sum(kind.bytes_per_layer for kind in model.kinds)
