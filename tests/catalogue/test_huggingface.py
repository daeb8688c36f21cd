"""Published `config.json` layouts become the catalogue's models; what is missing, absurd or unknown is refused."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.catalogue.huggingface import ARCHITECTURES, MODEL_TYPES, SAME_AS, model_from_config, model_from_path
from kvbench.catalogue.models import find_model
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.layers import Attention, LatentAttention, MoeFeedForward, RecurrentState

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))

Config = dict[str, object]


def config(name: str, **changes: object) -> Config:
    """A published config with keys changed; None removes one."""
    values: Config = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    values.update(changes)
    return {key: value for key, value in values.items() if key not in changes or changes[key] is not None}


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_is_the_catalogue_model(name: str) -> None:
    assert model_from_path(CONFIGS / f"{name}.json", name=name) == find_model(name).model


def test_at_least_fourteen_architectures_are_compared() -> None:
    assert len({find_model(name).model.architecture for name in NAMES}) >= 14


def test_every_other_name_leads_to_a_known_architecture() -> None:
    assert set(SAME_AS.values()) <= set(ARCHITECTURES)
    assert set(MODEL_TYPES.values()) <= set(ARCHITECTURES)
    assert not set(SAME_AS) & set(ARCHITECTURES)


# Traps: keys that look like a cache width or a pattern and are not.


def test_head_dim_of_gpt_oss_is_not_hidden_over_heads() -> None:
    mixer = model_from_config(config("gpt-oss-20b"), name="m").mixers()[0]
    assert isinstance(mixer, Attention)
    assert mixer.qk_dim == 64


def test_gpt_oss_without_head_dim_is_refused_rather_than_guessed() -> None:
    with pytest.raises(UsageError, match=r"config\.json: head_dim is missing, and GptOssForCausalLM"):
        model_from_config(config("gpt-oss-20b", head_dim=None), name="m")


def test_kv_heads_and_head_dim_of_latent_models_are_not_cache_widths() -> None:
    for name, changes in (("deepseek-v3", {"num_key_value_heads": 7}), ("glm-5.2", {"head_dim": 64})):
        assert model_from_config(config(name, **changes), name=name) == find_model(name).model


def test_mtp_layers_are_left_out() -> None:
    model = model_from_config(config("deepseek-v3", num_nextn_predict_layers=3), name="deepseek-v3")
    assert model == find_model("deepseek-v3").model


def test_max_window_layers_counts_only_where_sliding_is_on() -> None:
    off = config("qwen2.5-7b", max_window_layers=5, sliding_window=4096)
    assert model_from_config(off, name="m").layer_kinds() == {"full": 28}
    on = config("qwen2.5-7b", max_window_layers=5, sliding_window=4096, use_sliding_window=True)
    assert model_from_config(on, name="m").layer_kinds() == {"full": 5, "window": 23}


def test_absent_kv_heads_mean_one_per_query_head() -> None:
    assert model_from_config(config("llama-2-7b"), name="m").kv_heads() == 32


def test_llama_4_routes_one_expert_beside_one_shared() -> None:
    block = model_from_config(config("llama-4-scout"), name="m").layers[0].feed_forward
    assert isinstance(block, MoeFeedForward)
    assert (block.experts_per_token, block.shared_size) == (1, 8192)


def test_gemma_3_pattern_makes_every_sixth_layer_global_and_layer_types_override_it() -> None:
    nested = copy.deepcopy(config("gemma-3-27b"))
    text = nested["text_config"]
    assert isinstance(text, dict)
    kinds = [m.window_tokens for m in model_from_config(nested, name="m").mixers() if isinstance(m, Attention)]
    assert [i for i, window in enumerate(kinds) if window is None] == list(range(5, 62, 6))
    text["layer_types"] = ["full_attention"] * 62
    assert model_from_config(nested, name="m").layer_kinds() == {"full": 62}


def test_layer_lists_of_kimi_linear_count_from_one() -> None:
    mixers = model_from_config(config("kimi-linear-48b-a3b"), name="m").mixers()
    assert [i + 1 for i, m in enumerate(mixers) if isinstance(m, LatentAttention)] == [4, 8, 12, 16, 20, 24, 27]


def owned(model_config: Config) -> list[int]:
    mixers = model_from_config(model_config, name="m").mixers()
    return [i for i, m in enumerate(mixers) if isinstance(m, LatentAttention) and m.indexer and m.indexer.owned]


def test_indexer_types_go_before_the_pattern_and_the_pattern_before_frequency_and_offset() -> None:
    by_list = [0, 1, 2, *range(6, 78, 4)]
    listed = config("glm-5.2", index_topk_pattern="F" * 78, index_topk_freq=2, index_skip_topk_offset=0)
    assert owned(listed) == by_list
    patterned = config("glm-5.2", indexer_types=None, index_topk_pattern="FS" * 39, index_topk_freq=4)
    assert owned(patterned) == list(range(0, 78, 2))
    counted = config("glm-5.2", indexer_types=None, index_topk_pattern=None)
    assert owned({**counted, "index_topk_freq": 4, "index_skip_topk_offset": 3}) == by_list
    assert owned(counted) == list(range(78))


def test_a_layer_without_an_own_indexer_stores_no_index_row() -> None:
    mixers = model_from_config(config("glm-5.2"), name="m").mixers()
    rows = [m.indexer.row_bytes() for m in mixers if isinstance(m, LatentAttention) and m.indexer]
    assert sum(rows) == 21 * 132


def test_a_fixed_interval_and_a_list_of_layer_types_are_the_same_model() -> None:
    interval = config("qwen3-next-80b-a3b")
    types = (["linear_attention"] * 3 + ["full_attention"]) * 12
    listed = config("qwen3-next-80b-a3b", full_attention_interval=None, layer_types=types)
    assert model_from_config(interval, name="m") == model_from_config(listed, name="m")


def test_nemotron_pattern_and_list_of_blocks_are_the_same_model() -> None:
    pattern = config("nemotron-3-nano-30b-a3b")
    letters = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    blocks = [letters[letter] for letter in str(pattern["hybrid_override_pattern"])]
    listed = config("nemotron-3-nano-30b-a3b", hybrid_override_pattern=None, layers_block_type=blocks)
    assert model_from_config(pattern, name="m") == model_from_config(listed, name="m")


def test_latent_experts_of_nemotron_super_work_in_the_narrow_space() -> None:
    wide = model_from_config(config("nemotron-3-nano-30b-a3b"), name="m")
    narrow = model_from_config(config("nemotron-3-nano-30b-a3b", moe_latent_size=1024), name="m")
    wide_block, block = wide.layers[1].feed_forward, narrow.layers[1].feed_forward
    assert isinstance(wide_block, MoeFeedForward)
    assert isinstance(block, MoeFeedForward)
    assert block.routed_params(2688) * 2688 == wide_block.routed_params(2688) * 1024
    assert block.router_params(2688) == 2688 * (128 + 2 * 1024)


def test_a_small_gemma_3_takes_the_defaults_that_its_file_leaves_out() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    model = model_from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**text, "sliding_window": 1024}},
        name="gemma-3-4b",
    )
    assert model.layer_kinds() == {"window": 29, "full": 5}
    assert model.total_params() == 3_880_263_168


def test_state_dtype_is_read_where_the_checkpoint_asks_for_one() -> None:
    for name, dtype in (("qwen3.5-35b-a3b", "fp32"), ("nemotron-3-nano-30b-a3b", "fp32"), ("jamba-v0.1", None)):
        assert model_from_config(config(name), name=name).state_dtype == dtype


def test_a_recurrent_state_is_divided_only_as_far_as_its_groups_go() -> None:
    mixer = next(m for m in find_model("mamba-codestral-7b").model.mixers() if isinstance(m, RecurrentState))
    assert mixer.rank_conv_elements(1) == mixer.conv_elements == (8192 + 2 * 8 * 128) * 3
    assert mixer.rank_conv_elements(16) == (8192 // 16 + 2 * 128) * 3


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8_block"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "awq", "bits": 4}, "bf16"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "format": "mxfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}}}}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "block"}}}}, "fp8_block"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "input_activations": {"num_bits": 8}, "weights": {"num_bits": 8, "type": "int"}}}}, "int8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": 4, "type": "int"}}}}, "bf16"),
    ],
)  # fmt: skip
def test_the_quantisation_of_a_checkpoint_says_what_it_computes_in(quantization: Config, dtype: str) -> None:
    assert model_from_config(config("qwen3-8b", quantization_config=quantization), name="m").weight_dtype == dtype


# Refusals: file, key and remedy in one line.


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3-8b", {"num_hidden_layers": None}, r"num_hidden_layers is missing, so this is not a decoder"),
        ("qwen3-8b", {"hidden_size": None}, r"hidden_size is missing, and Qwen3ForCausalLM cannot be built without it"),
        ("qwen3-8b", {"vocab_size": "many"}, r"vocab_size must be a whole number \(got 'many'\); correct the value"),
        ("qwen3-8b", {"num_hidden_layers": 36.0}, r"num_hidden_layers must be a whole number \(got 36\.0\)"),
        ("qwen3-8b", {"num_hidden_layers": True}, r"num_hidden_layers must be a whole number \(got True\)"),
        ("qwen3-8b", {"num_hidden_layers": -1}, r"num_hidden_layers must be between 1 and 2048 \(got -1\)"),
        ("qwen3-8b", {"num_hidden_layers": 10**30}, r"num_hidden_layers must be between .*over 20 digits"),
        ("qwen3-8b", {"num_key_value_heads": 7}, r"num_key_value_heads 7 does not divide num_attention_heads 32"),
        ("qwen3-8b", {"attention_bias": "no"}, r"attention_bias must be true or false \(got 'no'\)"),
        ("qwen3-8b", {"torch_dtype": "float8"}, r"torch_dtype is not a known dtype"),
        ("qwen3-8b", {"quantization_config": {"quant_method": "magic"}}, r"quantization_config\.quant_method is 'mag"),
        ("llama-3.1-8b", {"num_attention_heads": 24}, r"head_dim is missing and hidden_size 4096 is no multiple"),
        ("gpt-oss-20b", {"layer_types": ["full_attention"]}, r"layer_types has 1 entries for num_hidden_layers 24"),
        ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, r"layer_types\[0\] is 'linear_attention', which"),
        ("gpt-oss-20b", {"sliding_window": None}, r"sliding_window is missing"),
        ("gpt-oss-20b", {"num_experts_per_tok": 64}, r"num_experts_per_tok is 64 of 32 experts"),
        ("mixtral-8x7b", {"num_local_experts": None}, r"n_routed_experts is missing"),
        ("deepseek-v3", {"kv_lora_rank": None}, r"kv_lora_rank is missing"),
        ("deepseek-v3.2", {"index_n_heads": None}, r"index_n_heads is missing"),
        ("glm-5.2", {"indexer_types": ["shared"] * 78}, r"indexer_types\[0\] is shared, but no earlier layer"),
        ("kimi-linear-48b-a3b", {"linear_attn_config": None}, r"linear_attn_config must list full_attn_layers"),
        ("kimi-linear-48b-a3b", {"num_hidden_layers": 28}, r"does not name each of the layers 1 to 28 once"),
        ("kimi-linear-48b-a3b", {"routed_expert_hidden_size": 3584}, r"routed_expert_hidden_size is a variant"),
        ("nemotron-3-nano-30b-a3b", {"hybrid_override_pattern": "MX"}, r"hybrid_override_pattern has \['X'\]"),
        ("nemotron-3-nano-30b-a3b", {"num_hidden_layers": 51}, r"hybrid_override_pattern has 52 entries"),
        ("llama-4-scout", {"text_config": []}, r"text_config must be an object"),
        ("mamba-codestral-7b", {"head_dim": 32}, r"num_heads times head_dim is not expand·hidden_size 8192"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [0, 1]}, r"hybrid_layer_pattern has 2 entries for num_hidden"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_refused_by_file_and_key(name: str, changes: Config, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        model_from_config(config(name, **changes), name="m", source="x/config.json")
    assert str(caught.value).startswith("x/config.json: ")
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_inside_text_config_is_named_with_its_place() -> None:
    nested = copy.deepcopy(config("llama-4-scout"))
    text = nested["text_config"]
    assert isinstance(text, dict)
    text["hidden_size"] = 0
    with pytest.raises(UsageError, match=r"text_config\.hidden_size must be between 1"):
        model_from_config(nested, name="m")


def test_an_unknown_architecture_is_refused_by_name_with_the_nearest_one_and_a_way_out() -> None:
    closest = r"the closest known one is Qwen\dForCausalLM; .*--assume gqa"
    expected = rf"config\.json: architecture 'Qwen4ForCausalLM' is not known; {closest}"
    with pytest.raises(UsageError, match=expected):
        model_from_config(config("qwen3-8b", architectures=["Qwen4ForCausalLM"]), name="m")
    latent = config("deepseek-v3", architectures=["SomethingNew"])
    with pytest.raises(UsageError, match=r"'SomethingNew' is not known; .*--assume mla"):
        model_from_config(latent, name="m")


def test_an_assumption_builds_full_attention_from_the_generic_keys() -> None:
    unknown = config("llama-3.1-8b", architectures=["NewForCausalLM"])
    known = find_model("llama-3.1-8b").model
    assumed = model_from_config(unknown, name="llama-3.1-8b", assume="gqa")
    assert assumed == replace(known, architecture="NewForCausalLM")
    assert model_from_config(unknown, name="m", assume="mqa").kv_heads() == 1
    assert model_from_config(unknown, name="m", assume="mha").kv_heads() == 32
    experts = model_from_config(config("mixtral-8x7b", architectures=["New"]), name="m", assume="gqa")
    assert experts.total_params() == find_model("mixtral-8x7b").model.total_params()
    latent = model_from_config(config("deepseek-v3", architectures=["New"]), name="m", assume="mla")
    assert latent.layers == find_model("deepseek-v3").model.layers


@pytest.mark.parametrize("name", ["kimi-linear-48b-a3b", "jamba-v0.1", "nemotron-3-nano-30b-a3b", "minimax-m1"])
def test_no_assumption_covers_recurrent_layers(name: str) -> None:
    for kind in ("gqa", "mla"):
        with pytest.raises(UsageError, match=f"says that not every layer has {kind} attention"):
            model_from_config(config(name, architectures=["New"]), name="m", assume=kind)


def test_an_assumption_without_kv_heads_asks_which_one_was_meant() -> None:
    unknown = config("llama-2-7b", architectures=["New"])
    with pytest.raises(UsageError, match="num_key_value_heads is missing; add it, or say --assume mha"):
        model_from_config(unknown, name="m", assume="gqa")
    with pytest.raises(UsageError, match="--assume 'full' is not known; use one of mha, gqa, mqa, mla"):
        model_from_config(unknown, name="m", assume="full")


@pytest.mark.parametrize("values", [{}, {"architectures": []}, {"architectures": None, "vocab_size": 5}])
def test_json_that_is_no_model_config_is_refused(values: Config) -> None:
    with pytest.raises(UsageError, match="architectures is missing, and so is model_type"):
        model_from_config(values, name="m")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n  "a": 1,\n  b\n}', r"config\.json:3:3: not JSON, expecting property name"),
        (b"", r"config\.json:1:1: not JSON, expecting value"),
        (b"\xff\xfe\x00\x01binary", r"is not text \(byte 0\)"),
        (b"[1, 2]", r"holds a list where a model's config is an object"),
        (b"[" * 100_000, r"not usable JSON \(RecursionError\)"),
        (b'{"num_hidden_layers": ' + b"9" * 5000 + b"}", r"not usable JSON \(ValueError\)"),
    ],
)
def test_an_unreadable_file_is_refused_with_line_and_column(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        model_from_path(tmp_path)


def test_a_directory_without_a_config_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json; pass the directory of a Hugging Face checkpoint"):
        model_from_path(tmp_path)
    with pytest.raises(UsageError, match=r"nothing\.json is not a file; pass"):
        model_from_path(tmp_path / "nothing.json")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_config_is_built_or_refused_but_never_crashes(data: st.DataObject) -> None:
    values = config(data.draw(st.sampled_from(NAMES)))
    target = (
        values["text_config"] if isinstance(values.get("text_config"), dict) and data.draw(st.booleans()) else values
    )
    assert isinstance(target, dict)
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(target)))
        match data.draw(st.sampled_from(["drop", "junk", "number", "list"])):
            case "drop":
                target.pop(key)
            case "number":
                target[key] = data.draw(st.integers(-3, 300))
            case "list":
                target[key] = data.draw(st.lists(st.integers(-1, 3) | st.text(max_size=3), max_size=5))
            case _:
                target[key] = data.draw(JUNK)
        if not target:
            break
    assume = data.draw(st.sampled_from([None, "gqa", "mha", "mqa", "mla"]))
    try:
        model = model_from_config(values, name="m", assume=assume)
    except KvbenchError as error:
        assert "\n" not in str(error)
    else:
        assert model.total_params() > 0
        assert model.matmul_params_per_token() > 0
        assert sum(model.layer_kinds().values()) == len(model.layers)
