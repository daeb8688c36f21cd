"""Turn a Hugging Face `config.json` into a `core` model, or refuse it with the key that is wrong and what to do.

A line of the format: `{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, …}`.
Multimodal files nest the language model under `text_config`; only that part is read. Layers for multi-token
prediction (`num_nextn_predict_layers`) are left out: their cache exists only while speculation is on.
"""

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import cast

from kvbench.catalogue.config_fields import ConfigFields
from kvbench.catalogue.shape import Shape
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.model import Model

ASSUMPTIONS = ("mha", "gqa", "mqa", "mla")
MAX_CONFIG_BYTES = 16 * 2**20

_FAMILIES = "kvbench.catalogue.families"
ARCHITECTURES = {
    "BambaForCausalLM": "hybrid:bamba",
    "Cohere2ForCausalLM": "dense:cohere2",
    "DeepseekV2ForCausalLM": "latent:deepseek",
    "DeepseekV32ForCausalLM": "latent:deepseek",
    "DeepseekV3ForCausalLM": "latent:deepseek",
    "FalconForCausalLM": "classic:falcon",
    "FalconMambaForCausalLM": "hybrid:mamba",
    "GPT2LMHeadModel": "classic:gpt2",
    "GPTBigCodeForCausalLM": "classic:gpt_bigcode",
    "GPTNeoXForCausalLM": "classic:gpt_neox",
    "Gemma2ForCausalLM": "gemma:gemma2",
    "Gemma3ForCausalLM": "gemma:gemma3",
    "Gemma3nForCausalLM": "gemma:gemma3n",
    "Gemma4ForCausalLM": "gemma:gemma4",
    "GemmaForCausalLM": "gemma:gemma",
    "Glm4MoeForCausalLM": "experts:glm4_moe",
    "Glm4MoeLiteForCausalLM": "latent:glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "latent:glm_moe_dsa",
    "GptOssForCausalLM": "experts:gpt_oss",
    "JambaForCausalLM": "hybrid:jamba",
    "KimiLinearForCausalLM": "latent:kimi_linear",
    "Llama4ForCausalLM": "experts:llama4",
    "LlamaForCausalLM": "dense:llama",
    "Mamba2ForCausalLM": "hybrid:mamba2",
    "MambaForCausalLM": "hybrid:mamba",
    "MiMoV2FlashForCausalLM": "experts:mimo_v2_flash",
    "MiniMaxForCausalLM": "hybrid:minimax",
    "MiniMaxM2ForCausalLM": "experts:minimax_m2",
    "MistralForCausalLM": "dense:mistral",
    "MixtralForCausalLM": "experts:mixtral",
    "NemotronHForCausalLM": "hybrid:nemotron_h",
    "OPTForCausalLM": "classic:opt",
    "Olmo2ForCausalLM": "dense:olmo2",
    "Phi3ForCausalLM": "dense:phi3",
    "Qwen2ForCausalLM": "dense:qwen2",
    "Qwen2MoeForCausalLM": "experts:qwen2_moe",
    "Qwen3ForCausalLM": "dense:qwen3",
    "Qwen3MoeForCausalLM": "experts:qwen3_moe",
    "Qwen3NextForCausalLM": "hybrid:qwen3_next",
    "Qwen3_5ForCausalLM": "hybrid:qwen3_5",
    "Qwen3_5MoeForCausalLM": "hybrid:qwen3_next",
}

# Other names under which files and configuration classes ask for the same language model.
SAME_AS = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
    "MiniMaxM1ForCausalLM": "MiniMaxForCausalLM",
    "MiniMaxText01ForCausalLM": "MiniMaxForCausalLM",
    "Mistral3ForConditionalGeneration": "MistralForCausalLM",
    "Phi4ForCausalLM": "Phi3ForCausalLM",
    "Qwen2VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2ForCausalLM",
    "Qwen3VLForConditionalGeneration": "Qwen3ForCausalLM",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}

# A `text_config` and a bare configuration object often carry only a model_type.
MODEL_TYPES = {
    "bamba": "BambaForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_bigcode": "GPTBigCodeForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "minimax_m1": "MiniMaxForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "minimax_text_01": "MiniMaxForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}

_INHERITED = ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype")


def model_from_path(path: Path, *, name: str | None = None, assume: str | None = None) -> Model:
    """The model that `path` describes: a `config.json`, or a directory that holds one."""
    file, config = read_config(path)
    return model_from_config(config, name=name or _name_of(file), source=str(file), assume=assume)


def read_config(path: Path) -> tuple[Path, dict[str, object]]:
    """The file and the JSON object in it."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        remedy = "pass the directory of a Hugging Face checkpoint, or its config.json"
        what = f"{path} has no config.json" if path.is_dir() else f"{path} is not a file"
        raise UsageError(f"{what}; {remedy}")
    try:
        size = file.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise UsageError(f"{file} has {size} bytes, which no config.json has; pass the config.json of the model")
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text (byte {error.start}); pass the config.json of the model") from error
    except OSError as error:
        raise KvbenchError(f"{file} cannot be read: {error.strerror}; check the path and its permissions") from error
    return file, _parsed(file, text)


def _parsed(file: Path, text: str) -> dict[str, object]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{file}:{error.lineno}:{error.colno}"
        raise UsageError(f"{where}: not JSON, {error.msg[:1].lower()}{error.msg[1:]}; correct that line") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not usable JSON ({type(error).__name__}); pass a model's config.json") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file}: holds a {type(values).__name__} where a model's config is an object; pass that")
    return cast("dict[str, object]", values)


def _name_of(file: Path) -> str:
    """The directory of a `config.json`, or the name of any other file."""
    resolved = file.resolve()
    return resolved.parent.name or resolved.stem if resolved.name == "config.json" else resolved.stem


def is_known(architecture: str) -> bool:
    """Whether layers of this architecture are built as published, not as `--assume` says."""
    return architecture in ARCHITECTURES


def model_from_config(
    config: Mapping[str, object], *, name: str, source: str = "config.json", assume: str | None = None
) -> Model:
    """The model that the keys of one `config.json` describe; `source` is the file that errors name.

    `assume` (mha, gqa, mqa or mla) says what to build when the architecture is not known; a known one ignores it.
    """
    if assume is not None and assume not in ASSUMPTIONS:
        raise UsageError(f"--assume {assume!r} is not known; use one of {', '.join(ASSUMPTIONS)}")
    values, prefix = _language_model(config, source)
    architecture = _architecture(values, config, source)
    fields = ConfigFields(values=values, source=source, architecture=architecture, prefix=prefix)
    shape = _shape(fields, architecture, assume)
    return Model(
        name=name,
        architecture=architecture,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        tied_embeddings=shape.tied_embeddings,
        layers=shape.layers,
        extra_params=shape.extra_params,
        state_dtype=shape.state_dtype,
        weight_dtype=weight_dtype(fields),
        max_context_tokens=_max_context(fields),
    )


def _max_context(fields: ConfigFields) -> int | None:
    return fields.optional_count("max_position_embeddings", "n_positions", "model_max_length", maximum=2**40)


def _shape(fields: ConfigFields, architecture: str, assume: str | None) -> Shape:
    if architecture in ARCHITECTURES:
        module, function = ARCHITECTURES[architecture].split(":")
        build = cast("Callable[[ConfigFields], Shape]", getattr(import_module(f"{_FAMILIES}.{module}"), function))
        return build(fields)
    if assume is None:
        raise UsageError(_unknown(fields, architecture))
    from kvbench.catalogue.families.assumed import assumed

    return assumed(fields, assume)


def _unknown(fields: ConfigFields, architecture: str) -> str:
    close = get_close_matches(architecture, [*ARCHITECTURES, *SAME_AS], n=1)
    meant = f"; the closest known one is {close[0]}" if close else ""
    kind = "mla" if fields.has("kv_lora_rank") else "gqa"
    return (
        f"{fields.source}: architecture {architecture[:80]!r} is not known{meant}; "
        f"if its layers all have full attention, say so with --assume {kind}"
    )


def _language_model(config: Mapping[str, object], source: str) -> tuple[Mapping[str, object], str]:
    """The keys of the language model, and the prefix under which they sit in the file."""
    nested = config.get("text_config")
    if nested is None:
        return config, ""
    if not isinstance(nested, Mapping):
        raise UsageError(f"{source}: text_config must be an object (got {type(nested).__name__}); correct it")
    inherited = {key: config[key] for key in _INHERITED if config.get(key) is not None}
    return {**inherited, **cast("Mapping[str, object]", nested)}, "text_config."


def _architecture(values: Mapping[str, object], config: Mapping[str, object], source: str) -> str:
    """The class of the language model: `architectures` of the file, else of its text_config, else the model_type."""
    inner = values.get("model_type") if values is not config else None
    for keys in (config, values):
        named = keys.get("architectures")
        if named is None or named == []:
            continue
        if not isinstance(named, (list, tuple)) or not isinstance(named[0], str):
            raise UsageError(f"{source}: architectures must be a list of names; copy the model's own config.json")
        known = SAME_AS.get(named[0], named[0])
        if known not in ARCHITECTURES and isinstance(inner, str) and inner in MODEL_TYPES:
            return MODEL_TYPES[inner]  # a wrapper nobody listed around a language model that is known
        return known
    for keys in (values, config):
        model_type = keys.get("model_type")
        if isinstance(model_type, str):
            return MODEL_TYPES.get(model_type, model_type)
    raise UsageError(
        f"{source}: architectures is missing, and so is model_type, so this is not a model's config.json; "
        "pass the config.json of a Hugging Face checkpoint"
    )


_COMPUTE_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "bf16", "auto": "bf16"}  # engines cast fp32
# Weights stored narrow and widened before they are multiplied: the product runs in the model's own dtype.
_WEIGHT_ONLY = ("awq", "gptq", "bitsandbytes", "bitsandbytes_4bit", "auto-round", "hqq", "aqlm", "gguf")


def weight_dtype(fields: ConfigFields) -> str:
    """What the linear layers compute in: the model's dtype, or what `quantization_config` says."""
    dtype = _COMPUTE_DTYPES.get(
        (fields.text("dtype") or fields.text("torch_dtype") or "bfloat16").removeprefix("torch.")
    )
    if dtype is None:
        raise fields.refuse("torch_dtype", "is not a known dtype", f"use one of {', '.join(_COMPUTE_DTYPES)}")
    quantization = fields.mapping("quantization_config")
    if quantization is None:
        return dtype
    method = quantization.text("quant_method") or ("modelopt" if quantization.has("quant_algo") else None)
    if method == "fp8":
        return "fp8_block" if quantization.has("weight_block_size") else "fp8"
    if method == "mxfp4":
        return "mxfp4"
    if method in ("modelopt", "modelopt_fp4"):
        return _modelopt_dtype(quantization)
    if method == "compressed-tensors":
        return _compressed_dtype(quantization, dtype)
    if method in _WEIGHT_ONLY:
        return dtype
    raise quantization.refuse(
        "quant_method", f"is {str(method)[:40]!r}, which is not known", "delete quantization_config to model the dtype"
    )


def _modelopt_dtype(quantization: ConfigFields) -> str:
    algorithm = (quantization.text("quant_algo") or "").upper()
    known = {"FP8": "fp8", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4", "MXFP8": "fp8_block"}
    if algorithm not in known:
        raise quantization.refuse("quant_algo", f"is {algorithm[:40]!r}", f"use one of {', '.join(known)}")
    return known[algorithm]


def _compressed_dtype(quantization: ConfigFields, dtype: str) -> str:
    """compressed-tensors: `config_groups.*.weights` say bits and type; without input_activations it is weight-only."""
    groups = quantization.mapping("config_groups")
    names = list(groups.values) if groups else []
    group = groups.mapping(names[0]) if groups and names else None
    weights = group.mapping("weights") if group else None
    if group is None or weights is None:
        raise quantization.refuse("config_groups", "names no weights", "copy the model's own config.json")
    bits, kind = weights.count("num_bits", maximum=16), weights.text("type")
    if kind == "float" and bits == 4:
        return "mxfp4" if "mxfp4" in (group.text("format") or quantization.text("format") or "") else "nvfp4"
    if kind == "float" and bits == 8:
        return "fp8_block" if weights.text("strategy") == "block" else "fp8"
    if kind == "int" and bits == 8 and group.has("input_activations"):
        return "int8"
    return dtype
