"""Where models come from: shipped and catalogue shapes with random weights, directories with real ones."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.engines.builtin.models import SHAPES, load_model
from kvbench.engines.builtin.runner import Sampling, load_runner, make_runner
from tests.engines.builtin.tiny import CONFIGS, generate, tiny

# bytes per token by hand: layers x (K and V, or the latent and the rotary key) x width x 4 bytes
SHIPPED = {
    "demo": ({"gqa": 6 * 2 * 2 * 64 * 4}, 0),
    "demo-mla": ({"mla-latent": 6 * (128 + 32) * 4}, 0),
    "demo-window": ({"gqa": 2 * 2 * 2 * 64 * 4, "window": 4 * 2 * 2 * 64 * 4}, 0),
    # 4 layers: the last 4 inputs of a convolution over 2x4x32 + 4x64 channels, and 4 heads of 32 x 64
    "demo-hybrid": ({"gqa": 2 * 2 * 2 * 64 * 4}, 4 * ((2 * 4 * 32 + 4 * 64) * 4 + 4 * 32 * 64) * 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shipped_shape_moves_the_bytes_it_states(name: str) -> None:
    runner = load_runner(name, open_store=lambda _: None, device="cpu")
    bytes_per_token, state_bytes = SHIPPED[name]
    assert dict(runner.info.kv_bytes_per_token) == bytes_per_token
    assert runner.info.state_bytes == state_bytes
    assert 9e6 < runner.info.num_parameters < 11e6
    assert runner.tokenizer.decode(runner.tokenizer.encode("ü")) == "ü"
    runner.close()


@pytest.mark.parametrize("family", ["gqa", "mla", "window", "hybrid"])
def test_random_weights_give_an_output_that_depends_on_the_whole_prompt(family: str) -> None:
    prompt = random.Random(1).choices(range(256), k=60)
    runner = make_runner(tiny(family), open_store=lambda _: None)
    one = generate(runner, prompt, tokens=40)
    other = generate(runner, [prompt[0] ^ 1, *prompt[1:]], tokens=40)
    runner.close()
    assert len(set(one.output_ids)) > 8
    assert (
        one.output_ids == generate(make_runner(tiny(family), open_store=lambda _: None), prompt, tokens=40).output_ids
    )
    assert any(float((a - b).abs().max()) > 0.01 for a, b in zip(one.logits, other.logits, strict=True))


def test_a_catalogue_model_runs_with_a_layer_of_each_kind() -> None:
    model = load_model("qwen2.5-0.5b", device="cpu", layers_per_kind=1)
    runner = make_runner(model, open_store=lambda _: None)
    assert dict(runner.info.kv_bytes_per_token) == {"gqa": 1 * 2 * 2 * 64 * 4}  # one layer of 2 KV heads of 64
    assert len(generate(runner, [1, 2, 3], tokens=2).output_ids) == 2
    runner.close()


def test_a_directory_is_served_with_its_own_weights(tmp_path: Path) -> None:
    original = tiny("gqa", seed=5)
    original.module.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    prompt = random.Random(1).choices(range(256), k=40)
    outputs = [generate(make_runner(m, open_store=lambda _: None), prompt).output_ids for m in (original, loaded)]
    assert outputs[0] == outputs[1]
    assert loaded.weights == f"from {tmp_path}"
    weights = next(tmp_path.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # one bit of one weight
    weights.write_bytes(data)
    assert load_model(str(tmp_path), device="cpu").version != loaded.version


def test_a_directory_that_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gqa"]), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(KvbenchError, match="transformers cannot load this model") as caught:
        load_model(str(tmp_path), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dtype": "float8"}, "dtype 'float8' is not known"),
        ({"device": "tpu"}, "device 'tpu' is not known"),
        ({"model": "demo-xl"}, "is not in the catalogue"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        load_model(
            options.get("model", "demo"), device=options.get("device", "cpu"), dtype=options.get("dtype", "auto")
        )


def test_requests_that_cannot_run_are_refused() -> None:
    runner = make_runner(tiny("gqa"), open_store=lambda _: None)
    for prompt, tokens, problem in (
        ([], 1, "empty"),
        ([320], 1, "320"),
        ([1], 0, "max_tokens"),
        ([1] * 4096, 1, "4096"),
    ):
        with pytest.raises(UsageError, match=problem):
            runner.start(prompt, max_tokens=tokens)
    runner.close()


def test_sampling_with_a_seed_repeats_and_a_narrow_one_is_greedy() -> None:
    runner = make_runner(tiny("gqa"), open_store=lambda _: None)
    prompt = [1, 2, 3]

    def ids(sampling: Sampling) -> list[int]:
        return generate(runner, prompt, tokens=20, sampling=sampling).output_ids

    assert ids(Sampling(temperature=1, seed=1)) == ids(Sampling(temperature=1, seed=1))
    assert ids(Sampling(temperature=1, seed=1)) != ids(Sampling(temperature=1, seed=2))
    assert ids(Sampling(temperature=1, top_k=1)) == ids(Sampling()) == ids(Sampling(temperature=1, top_p=1e-6))
    runner.close()


def test_an_end_token_ends_the_request_unless_it_is_ignored() -> None:
    model = tiny("gqa")
    runner = make_runner(model, open_store=lambda _: None)
    greedy = generate(runner, [1, 2, 3], tokens=12).output_ids
    last = greedy[3]
    from dataclasses import replace

    ending = make_runner(replace(model, eos_ids=(last,)), open_store=lambda _: None)
    sequence = ending.start([1, 2, 3], max_tokens=12)
    while not ending.prefill_step(sequence):
        pass
    while not sequence.finished:
        ending.decode_step([sequence])
    assert sequence.output_ids == greedy[: greedy.index(last) + 1]
    assert sequence.finish_reason == "stop"
    assert generate(ending, [1, 2, 3], tokens=12).finish_reason == "length"
    runner.close()
    ending.close()


def test_a_model_module_imports_no_torch_until_it_loads_one() -> None:
    program = "import sys, kvbench.engines.builtin.runner; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
