from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.catalogue.truncated_model import truncated_model
from kvbench.core.errors import KvbenchError
from kvbench.probes import prefill
from kvbench.probes.measure import measure_host
from kvbench.probes.plan import load_measure_plan
from kvbench.probes.prefill_fit import prefill_result
from kvbench.probes.runner import ChildRun
from kvbench.results.prefill import LayerKindTiming, PrefillCost, PrefillMeasurement, PrefillSample

torch = pytest.importorskip("torch", reason="prefill needs torch: pip install 'kvbench[torch]'")
pytest.importorskip("transformers", reason="prefill needs transformers: pip install 'kvbench[torch]'")

DENSE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 500,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
# name: (config, layers of each kind that the full model has, in order of appearance)
MODELS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "qwen3": ({"model_type": "qwen3", **DENSE, "architectures": ["Qwen3ForCausalLM"]}, [6]),
    "llama": ({"model_type": "llama", **DENSE}, [6]),
    "qwen2": ({"model_type": "qwen2", **DENSE}, [6]),
    "mixtral": ({"model_type": "mixtral", **DENSE, "num_local_experts": 4}, [6]),
    "qwen3_moe": ({"model_type": "qwen3_moe", **DENSE, **EXPERTS, "mlp_only_layers": [0, 3]}, [2, 4]),
    "gemma3": ({"model_type": "gemma3_text", **DENSE, "sliding_window": 32, "sliding_window_pattern": 6}, [5, 1]),
    "gpt_oss": ({"model_type": "gpt_oss", **DENSE, "num_local_experts": 4, "sliding_window": 32}, [3, 3]),
    "deepseek_v3": ({"model_type": "deepseek_v3", **DENSE, **LATENT}, [2, 4]),
    "qwen3_next": (
        {"model_type": "qwen3_next", **DENSE, **EXPERTS, **LINEAR, "full_attention_interval": 3},
        [4, 2],
    ),
    "jamba": (
        {
            "model_type": "jamba",
            **DENSE,
            "num_experts": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
        },
        [2, 1, 2, 1],
    ),
}


def case(hf_config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "hf_config": hf_config,
        "device": "cpu",
        "dtype": "float32",
        "tokens": {"cpu": [16, 32, 64]},
        "check_tokens": {"cpu": 96},
        "repeats": 2,
        "max_layers_per_kind": 1,
        "memory_bytes": 2**30,
        "time_s": 60.0,
    } | changes


def records_of(hf_config: Mapping[str, Any], **changes: Any) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    prefill.measure(case(hf_config, **changes), records.append)
    return records


def fitted(records: list[dict[str, Any]], *, interrupted: bool = False) -> PrefillMeasurement | None:
    run = ChildRun(
        status="failed" if interrupted else "ok",
        reason="interrupted" if interrupted else None,
        records=tuple(records),
        elapsed_s=1.0,
        interrupted=interrupted,
    )
    return prefill_result("prefill", run)[0]


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_layer_is_timed_and_stands_for_all_like_it(name: str) -> None:
    config, num_layers = MODELS[name]
    measurement = fitted(records_of(config))
    assert measurement is not None
    assert [kind.num_layers for kind in measurement.layers] == num_layers
    assert sorted(index for kind in measurement.layers for index in kind.layer_indices) == list(range(6))
    assert measurement.held_out is not None
    assert measurement.held_out.tokens == 96
    assert measurement.max_measured_tokens == 96
    for cost in (*(kind.cost for kind in measurement.layers), measurement.overhead):
        assert min(cost.c0_s, cost.c1_s, cost.c2_s) >= 0
        assert cost.samples
    times = [measurement.seconds(tokens) for tokens in (0, 1, 16, 100, 1000, 100_000)]
    assert times == sorted(times)
    assert times[0] == 0 < times[1]


def test_a_config_of_a_whole_multimodal_model_is_measured_by_its_text_part() -> None:
    text = {**MODELS["gemma3"][0], "model_type": "gemma3_text"}
    records = records_of({"model_type": "gemma3", "text_config": text, "architectures": ["Gemma3ForCausalLM"]})
    facts = next(record for record in records if record["record"] == "facts")
    assert facts["model_type"] == "gemma3_text"


def test_a_model_type_of_its_own_is_built_as_its_architecture() -> None:
    config = {**MODELS["deepseek_v3"][0], "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    facts = next(record for record in records_of(config) if record["record"] == "facts")
    assert facts["model_type"] == "deepseek_v3"


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "qwen3_next"])
def test_bfloat16_runs_through_the_same_layers(name: str) -> None:
    measurement = fitted(records_of(MODELS[name][0], dtype="bfloat16", repeats=1))
    assert measurement is not None
    assert measurement.dtype == "bfloat16"


def test_so_many_layers_stay_that_their_weights_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    layer_bytes = truncated_model(MODELS["qwen3"][0], layers_per_kind=1, dtype="float32").kinds[0].bytes_per_layer
    monkeypatch.setattr(prefill, "last_level_cache_bytes", lambda: layer_bytes)
    for most, kept in ((4, [0, 1]), (1, [0])):
        records = records_of(MODELS["qwen3"][0], max_layers_per_kind=most)
        facts = next(record for record in records if record["record"] == "facts")
        assert list(facts["kinds"][0]["measured_layers"]) == kept


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({}, "neither the model_type None nor the architecture None"),
        ({"model_type": 3, "architectures": "x"}, "neither the model_type 3"),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "qwen3", **DENSE, "num_attention_heads": "many"}, "qwen3"),
        ({"model_type": "llama", **DENSE, "hidden_size": 65, "head_dim": None}, "llama"),
    ],
)
def test_what_transformers_cannot_build_is_skipped_with_the_reason(config: dict[str, Any], part: str) -> None:
    (record,) = [record for record in records_of(config) if record["record"] != "stage"]
    assert record["record"] == "skipped"
    assert part in record["reason"]
    assert "\n" not in record["reason"]


def test_a_model_that_does_not_fit_is_skipped_with_the_numbers() -> None:
    records = records_of(MODELS["qwen3"][0], memory_bytes=100_000)
    assert records[-1]["record"] == "skipped"
    assert "KiB" in records[-1]["reason"]
    assert "97.66 KiB of cpu memory may be used" in records[-1]["reason"]


def test_a_missing_gpu_is_a_reason_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    records = records_of(MODELS["qwen3"][0], device="cuda")
    assert records[-1]["record"] == "skipped"
    assert "no GPU on this host" in records[-1]["reason"]


def test_a_model_without_a_kv_cache_is_refused() -> None:
    config = {"model_type": "bert", **DENSE, "num_key_value_heads": 4}
    with pytest.raises(KvbenchError, match="fills no KV cache"):
        records_of(config)


def test_token_counts_beyond_the_context_are_left_out_with_a_warning() -> None:
    records = records_of({**MODELS["qwen3"][0], "max_position_embeddings": 40})
    assert {record["tokens"] for record in records if record["record"] == "sample"} == {16, 32}
    assert "tokens-dropped" in {record.get("code") for record in records}
    assert fitted(records) is None


def test_a_window_that_transformers_computes_in_full_is_a_warning() -> None:
    measurement = fitted(records_of(MODELS["gemma3"][0]))
    assert measurement is not None
    assert "window-computed-in-full" in {warning.code for warning in measurement.warnings}


def test_a_short_time_still_gives_the_smallest_count_and_says_what_is_missing() -> None:
    run = ChildRun(status="ok", reason=None, records=tuple(records_of(MODELS["qwen3"][0], time_s=1e-9)), elapsed_s=1.0)
    measurement, outcome = prefill_result("prefill", run)
    assert measurement is None
    assert outcome.status == "failed"
    assert outcome.reason is not None
    assert "1 token count(s) were done in time" in outcome.reason
    assert [sample.tokens for sample in outcome.prefill_samples] == [16]


def test_the_child_process_measures_the_same() -> None:
    plan = load_measure_plan()
    tokens = (16, 32, 64, 128)
    quick = replace(
        plan.prefill, tokens={"cpu": tokens, "cuda": tokens}, check_tokens={"cpu": 256, "cuda": 256}, repeats=2
    )
    result = measure_host(tiers=[], hf_config=MODELS["qwen3"][0], plan=replace(plan, prefill=quick))
    (outcome,) = result.outcomes
    assert (outcome.status, outcome.reason) == ("ok", None)
    assert result.prefill is not None
    assert result.prefill.num_layers == 6
    assert result.prefill.torch_version == torch.__version__
    assert result.prefill.threads >= 1


def synthetic(c0: float, c1: float, c2: float, *, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    def seconds(count: int) -> float:
        return c0 + c1 * count + c2 * count**2

    kind = {"kind": "layer", "layer_indices": [0, 1, 2, 3], "measured_layers": [0, 1], "is_windowed": False}
    names = ("model_type", "device", "device_name", "dtype", "attention", "torch_version", "transformers_version")
    facts = {"record": "facts", "threads": 1, "kinds": [kind], **dict.fromkeys(names, "made up")}
    samples = [
        {"record": "sample", "tokens": count, "seconds": 2.5 * seconds(count), "layers": [seconds(count)] * 2}
        for count in tokens
    ]
    return [facts, *samples]


@given(c0=st.floats(1e-4, 1e-1), c1=st.floats(1e-6, 1e-3), c2=st.floats(1e-9, 1e-6))
def test_known_constants_come_back_and_predict_the_held_out_count(c0: float, c1: float, c2: float) -> None:
    measurement = fitted(synthetic(c0, c1, c2, tokens=(128, 256, 512, 1024, 4096)))
    assert measurement is not None
    assert measurement.held_out is not None
    assert measurement.held_out.predicted_over_measured == pytest.approx(1, rel=1e-3)
    assert {sample.tokens for sample in measurement.layers[0].cost.samples} == {128, 256, 512, 1024}
    assert measurement.seconds(2048) == pytest.approx(4.5 * (c0 + c1 * 2048 + c2 * 2048**2), rel=1e-3)
    assert measurement.residual_ratio < 1e-3


def test_three_counts_are_fitted_and_nothing_checks_them() -> None:
    measurement = fitted(synthetic(1e-3, 1e-5, 1e-8, tokens=(128, 256, 512)))
    assert measurement is not None
    assert measurement.held_out is None
    assert "fit-not-checked" in {warning.code for warning in measurement.warnings}


def test_a_fit_that_saw_no_attention_says_so() -> None:
    unseen = fitted(synthetic(1e-3, 1e-5, 0.0, tokens=(128, 256, 512, 1024)))
    seen = fitted(synthetic(1e-3, 1e-5, 1e-8, tokens=(128, 256, 512, 1024)))
    assert unseen is not None
    assert seen is not None
    assert "attention-not-seen" not in {warning.code for warning in seen.warnings}
    assert "attention-not-seen" in {warning.code for warning in unseen.warnings}


def test_an_interrupted_prefill_keeps_its_fit_and_says_so() -> None:
    measurement = fitted(synthetic(1e-3, 1e-5, 1e-8, tokens=(128, 256, 512)), interrupted=True)
    assert measurement is not None
    assert "interrupted" in {warning.code for warning in measurement.warnings}


costs = st.builds(
    PrefillCost,
    c0_s=st.floats(0, 1),
    c1_s=st.floats(0, 1e-2),
    c2_s=st.floats(0, 1e-5),
    residual_ratio=st.just(0.0),
    samples=st.just((PrefillSample(tokens=1024, seconds=1.0),)),
)


@given(layer=costs, overhead=costs, tokens=st.integers(0, 10**7), more=st.integers(0, 10**6))
def test_more_tokens_never_take_less_time(layer: PrefillCost, overhead: PrefillCost, tokens: int, more: int) -> None:
    kind = LayerKindTiming(kind="layer", layer_indices=(0, 1, 2), measured_layers=(0,), cost=layer)
    measurement = PrefillMeasurement(
        model_type="made up",
        device="cpu",
        device_name="made up",
        dtype="float32",
        threads=1,
        attention="sdpa",
        torch_version="0",
        transformers_version="0",
        layers=(kind,),
        overhead=overhead,
        held_out=None,
    )
    assert measurement.seconds(tokens) <= measurement.seconds(tokens + more)
    assert measurement.seconds(tokens) >= 3 * layer.seconds(tokens)
    assert (measurement.extrapolation_warning(tokens) is None) == (tokens <= 4 * 1024)
