"""Parameter totals and layer kinds against what transformers itself builds from the same keys, without weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvbench.catalogue.huggingface import model_from_config
from kvbench.catalogue.models import catalogue_names, find_model

torch = pytest.importorskip("torch", reason="the [torch] extra is not installed")
transformers = pytest.importorskip("transformers", reason="the [torch] extra is not installed")

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "pad_token_id": 0,
}
WIDE = {**SMALL, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
ROUTED = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2}
LATENT = {
    **SMALL,
    **ROUTED,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
}
INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
DELTA = {
    **WIDE,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}
DELTA_EXPERTS = {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 40}
PLAIN = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
N_EMBD = {"vocab_size": 1000, "n_embd": 64, "n_layer": 2, "n_head": 8}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 12}

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", WIDE),
    ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", SMALL),
    ("mixtral", {**SMALL, "num_local_experts": 8}),
    ("qwen2", {**SMALL, "use_sliding_window": True, "max_window_layers": 1}),
    ("qwen2_moe", {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    ("qwen3", WIDE),
    ("qwen3", {**WIDE, "attention_bias": True}),
    ("qwen3_moe", {**WIDE, **EXPERTS, "mlp_only_layers": [1]}),
    ("qwen3_next", DELTA_EXPERTS),
    ("qwen3_5_text", DELTA),
    ("qwen3_5_moe_text", DELTA_EXPERTS),
    ("phi3", SMALL),
    ("gemma", WIDE),
    ("gemma2", WIDE),
    ("gemma3_text", {**WIDE, "num_hidden_layers": 7}),
    (
        "gemma3n_text",
        {
            **WIDE,
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 900,
            "laurel_rank": 6,
        },
    ),
    (
        "gemma4_text",
        {
            **WIDE,
            "num_hidden_layers": 6,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    (
        "gemma4_text",
        {
            **WIDE,
            "num_hidden_layers": 12,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 900,
            "num_kv_shared_layers": 6,
            "use_double_wide_mlp": True,
        },
    ),
    (
        "gemma4_text",
        {
            **WIDE,
            "num_hidden_layers": 6,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", {**LATENT, "attention_bias": True}),
    ("deepseek_v32", {**LATENT, **INDEX}),
    ("glm_moe_dsa", {**LATENT, **INDEX}),
    ("glm4_moe", {**WIDE, **ROUTED, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe_lite", LATENT),
    ("gpt_oss", {**WIDE, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ("minimax", {**WIDE, "num_local_experts": 8}),
    ("minimax_m2", {**WIDE, "num_local_experts": 8}),
    ("llama4_text", {**WIDE, "intermediate_size_mlp": 128, "num_local_experts": 8, "interleave_moe_layer_step": 2}),
    ("jamba", {**SMALL, "num_hidden_layers": 8, "num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2}),
    (
        "nemotron_h",
        {
            **WIDE,
            **ROUTED,
            "n_shared_experts": 1,
            "hybrid_override_pattern": "ME*-",
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 20,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 12,
        },
    ),
    (
        "kimi_linear",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_experts": 8,
            "linear_attn_config": {
                "head_dim": 16,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
                "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
            },
        },
    ),
    ("mimo_v2_flash", {**WIDE, **ROUTED, "n_shared_experts": None, "v_head_dim": 12}),
    ("falcon", PLAIN),
    ("falcon", {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    ("falcon", {**PLAIN, "multi_query": False, "parallel_attn": False}),
    ("gpt_bigcode", N_EMBD),
    ("gpt_bigcode", {**N_EMBD, "multi_query": False}),
    ("gpt2", N_EMBD),
    ("gpt_neox", SMALL),
    ("opt", {**PLAIN, "ffn_dim": 96}),
    ("opt", {**PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 32}),
    ("mamba", {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}),
    ("mamba2", {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, **MAMBA2}),
    ("falcon_mamba", {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}),
    ("bamba", {**SMALL, "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2, "attn_layer_indices": [1]}),
    ("olmo2", SMALL),
    ("cohere2", SMALL),
]


def counted(configuration: Any) -> int:
    """Parameters of the model transformers builds, and the routing biases that it keeps as buffers."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(configuration)
    biases = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(int(weights.numel()) for weights in (*model.parameters(), *biases))


def configuration_of(config: Mapping[str, object]) -> Any:
    keys = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    return transformers.AutoConfig.for_model(config["model_type"], **keys)


def family_ids() -> Iterator[str]:
    for i, (model_type, _) in enumerate(FAMILIES):
        yield f"{model_type}-{i}"


@pytest.mark.parametrize(("model_type", "keys"), FAMILIES, ids=list(family_ids()))
def test_a_small_model_of_each_family_has_the_parameters_that_transformers_builds(
    model_type: str, keys: dict[str, Any]
) -> None:
    configuration = transformers.AutoConfig.for_model(model_type, **keys)
    model = model_from_config(configuration.to_dict(), name=model_type)
    assert model.total_params() == counted(configuration)


@pytest.mark.parametrize("name", catalogue_names())
def test_a_catalogue_model_has_the_parameters_that_transformers_builds_from_its_keys(name: str) -> None:
    entry = find_model(name)
    assert entry.model.total_params() == counted(configuration_of(entry.config))


@pytest.mark.parametrize("name", catalogue_names())
def test_the_keys_of_a_catalogue_model_survive_the_round_trip_through_transformers(name: str) -> None:
    entry = find_model(name)
    returned = model_from_config(configuration_of(entry.config).to_dict(), name=name)
    assert returned.layers == entry.model.layers
    assert returned.total_params() == entry.model.total_params()


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_next", "qwen3-next-80b-a3b"),
        ("qwen3_5_moe_text", "qwen3.5-35b-a3b"),
        ("jamba", "jamba-v0.1"),
        ("deepseek_v3", "deepseek-v3"),
        ("deepseek_v32", "deepseek-v3.2"),
        ("glm_moe_dsa", "glm-5"),
        ("gpt_oss", "gpt-oss-120b"),
        ("gemma3n_text", "gemma-3n-e4b"),
        ("mamba2", "mamba-codestral-7b"),
        ("minimax_m2", "minimax-m2"),
        ("llama4_text", "llama-4-scout"),
    ],
)
def test_the_defaults_of_a_configuration_class_are_the_published_model(model_type: str, name: str) -> None:
    defaults = transformers.AutoConfig.for_model(model_type).to_dict()
    assert model_from_config(defaults, name=name).layers == find_model(name).model.layers
