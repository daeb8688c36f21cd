"""Models the built-in engine runs: shipped shapes, catalogue shapes with random weights, directories with real ones."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.catalogue.huggingface import read_config
from kvbench.catalogue.models import catalogue_names, find_model
from kvbench.catalogue.truncated_model import CannotBuildError, causal_model, decoder_layers
from kvbench.core.errors import KvbenchError, MissingDependencyError, UsageError
from kvbench.core.units import MIB
from kvbench.engines.builtin.tokenizer import EOS_ID, Tokenizer, load_tokenizer

if TYPE_CHECKING:
    import torch

DTYPES = ("auto", "float32", "bfloat16", "float16")
INITIALISATION = "fan-in-1"  # changes whenever the same seed would give other weights

_SMALL: Mapping[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "intermediate_size": 1024,
    "vocab_size": 320,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1_000_000.0}
# About 10 M parameters each: a prefill of 2,048 tokens is 50 GFLOP, which two cores do in about a second.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "demo": {
        **_SMALL,
        "model_type": "llama",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rope_parameters": _ROPE,
    },
    "demo-mla": {
        **_SMALL,
        "model_type": "deepseek_v3",
        "num_key_value_heads": 6,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "first_k_dense_replace": 6,
        "rope_parameters": _ROPE,
    },
    "demo-window": {
        **_SMALL,
        "model_type": "gemma3_text",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 256,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "demo-hybrid": {
        **_SMALL,
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "num_experts": 0,
        "mlp_only_layers": [0, 1, 2, 3, 4, 5],
        "rope_parameters": _ROPE,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its weights on a device. `version` names configuration and weights: equal versions, equal KV."""

    name: str
    module: "torch.nn.Module"
    layers: "tuple[torch.nn.Module, ...]"
    config: Any
    tokenizer: Tokenizer
    version: str
    device: str
    dtype: str
    weights: str
    architecture: str
    num_parameters: int
    vocab_size: int
    max_tokens: int
    eos_ids: tuple[int, ...]


def load_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    layers_per_kind: int | None = None,
    seed: int = 0,
    name: str | None = None,
) -> LoadedModel:
    """The model of that name with random weights (a shipped or a catalogue shape), or of a directory with its own.

    A directory without weights gets random ones. `layers_per_kind` keeps so many layers of each kind.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not known; use one of {', '.join(DTYPES)}")
    config, directory, has_weights = _source(model)
    if has_weights and layers_per_kind is not None:
        raise UsageError(f"{model} has weights of its own, which cannot be shortened to {layers_per_kind} per kind")
    where = resolve_device(device)
    _quiet_transformers()
    resolved = _dtype(dtype, where, config if has_weights else None)
    if has_weights and directory is not None:
        module, layers, attention, version, weights = _with_weights(directory, where, resolved)
    else:
        module, layers, attention, version, weights = _with_random_weights(
            config, where, resolved, layers_per_kind, seed
        )
    text: Any = module.config.get_text_config(decoder=True)
    vocab_size = int(text.vocab_size)
    return LoadedModel(
        name=name or (directory.resolve().name if directory is not None else model),
        module=module,
        layers=layers,
        config=text,
        tokenizer=load_tokenizer(directory, vocab_size),
        version=version,
        device=where,
        dtype=resolved,
        weights=weights,
        architecture=f"{type(module).__name__} ({attention})",
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        vocab_size=vocab_size,
        max_tokens=_max_tokens(text),
        eos_ids=_eos_ids(module, vocab_size),
    )


def resolve_device(device: str) -> str:
    """`cpu` or `cuda:N`; `auto` is the first GPU. NVML is asked before torch, which takes a second to import."""
    from kvbench.tiers.cuda_runtime import no_gpu_reason

    if device == "cpu":
        return "cpu"
    if device != "auto" and device.partition(":")[0] != "cuda":
        raise UsageError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:0")
    reason = no_gpu_reason()
    if reason is None:
        torch = _torch()
        if torch.cuda.is_available():
            return "cuda:0" if device in ("auto", "cuda") else device
        reason = "no GPU that torch can use; it may be a CPU build of torch"
    if device == "auto":
        return "cpu"
    raise UsageError(f"{reason} for device {device!r}; use device auto or cpu")


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "torch", "the built-in engine") from error
    return torch


def _quiet_transformers() -> None:
    """No bars and no advice on kernels between the lines of a server; errors still reach us as exceptions."""
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependencyError("transformers", "torch", "the built-in engine") from error

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _source(model: str) -> tuple[Mapping[str, Any], Path | None, bool]:
    """Configuration, directory, and whether weights lie in it."""
    if model in SHAPES:
        return SHAPES[model], None, False
    path = Path(model).expanduser()
    if not model.startswith((".", "/", "~")) and (model in catalogue_names() or not path.exists()):
        try:
            return find_model(model).config, None, False
        except UsageError as error:
            raise UsageError(f"{error}; shipped shapes are {', '.join(SHAPES)}") from error
    file, config = read_config(path)  # any architecture that transformers knows, in the catalogue or not
    return config, file.parent, file.name == "config.json" and bool(_weight_files(file.parent))


def _weight_files(directory: Path) -> list[Path]:
    files = sorted(directory.glob("*.safetensors"))
    return files or sorted(directory.glob("pytorch_model*.bin"))


def _dtype(name: str, device: str, config: Mapping[str, Any] | None) -> str:
    """`auto` on a GPU: the weights' own, else bfloat16; on a CPU float32, because it emulates what is narrower."""
    if name != "auto":
        return name
    if device == "cpu":
        return "float32"
    own = None if config is None else config.get("dtype") or config.get("torch_dtype")
    return own if own in DTYPES[1:] else "bfloat16"


def _with_weights(
    directory: Path, device: str, dtype: str
) -> "tuple[torch.nn.Module, tuple[torch.nn.Module, ...], str, str, str]":
    torch = _torch()
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise KvbenchError(f"{directory}: transformers cannot load this model: {reason}; check its files") from error
    module = module.to(device).eval()
    digest = hashlib.sha256((directory / "config.json").read_bytes() + _transformers_version().encode())
    for file in _weight_files(directory):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    version = digest.hexdigest()[:32]
    return module, _layers(module), module.config._attn_implementation, version, f"from {directory}"


def _with_random_weights(
    config: Mapping[str, Any], device: str, dtype: str, layers_per_kind: int | None, seed: int
) -> "tuple[torch.nn.Module, tuple[torch.nn.Module, ...], str, str, str]":
    built = causal_model(config, layers_per_kind=layers_per_kind, dtype=dtype)
    random_weights(built.module, device=device, seed=seed)
    named = json.dumps(
        [INITIALISATION, _transformers_version(), layers_per_kind, seed, config], sort_keys=True, default=str
    )
    version = hashlib.sha256(named.encode()).hexdigest()[:32]
    return built.module, built.layers, built.attention, version, f"random (seed {seed})"


def _transformers_version() -> str:
    """Part of a version: another transformers may start small tensors from other values or lay out its cache anew."""
    import transformers

    return str(transformers.__version__)


def _layers(module: Any) -> "tuple[torch.nn.Module, ...]":
    try:
        return decoder_layers(module)
    except CannotBuildError:
        return ()


def random_weights(module: Any, *, device: str, seed: int) -> None:
    """Storage on `device` and weights from `seed`: matrices with σ = gain/√inputs, the architecture's own for the rest.

    With σ = 0.02 a small model hardly changes its input and repeats one token; unit variance through every layer makes
    the output depend on the whole prefix. Queries and keys get twice that, so that attention chooses. The numbers are
    drawn once (a block of odd length, read from another place for each matrix): drawing every weight takes minutes.
    """
    torch = _torch()
    module.to_empty(device=device)
    generator = torch.Generator().manual_seed(seed)
    block = torch.empty(MIB + 7, dtype=torch.float32).normal_(generator=generator)
    with torch.no_grad():
        for position, (name, parameter) in enumerate(module.named_parameters()):
            if parameter.ndim >= 2:
                start = (position * 7_919_993) % block.numel()
                values = torch.cat([block[start:], block[:start]]) * _sigma(name, parameter)
                _fill(parameter.view(-1), values.to(device=parameter.device, dtype=parameter.dtype))
                parameter._is_hf_initialized = True
    for part in module.modules():
        part._is_hf_initialized = False
    torch.manual_seed(seed)  # the architecture's own starting values may be random
    module.initialize_weights()
    module.tie_weights()


def _sigma(name: str, parameter: Any) -> float:
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if "embed" in leaf or leaf == "wte":
        return 1.0
    inputs = max(1, parameter[0].numel() if parameter.ndim == 2 or "conv" in leaf else parameter.shape[-1])
    gain = 2.0 if leaf in ("q_proj", "k_proj", "q_b_proj") else 1.0
    return gain / math.sqrt(inputs)


def _fill(flat: "torch.Tensor", block: "torch.Tensor") -> None:
    whole = flat.numel() // block.numel() * block.numel()
    if whole:
        flat[:whole].view(-1, block.numel()).copy_(block.expand(whole // block.numel(), -1))
    flat[whole:].copy_(block[: flat.numel() - whole])


def _max_tokens(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 1 << 20


def _eos_ids(module: Any, vocab_size: int) -> tuple[int, ...]:
    found: set[int] = set()
    for config in (getattr(module, "generation_config", None), module.config):
        value = getattr(config, "eos_token_id", None)
        values = value if isinstance(value, list | tuple) else [value]
        found |= {token for token in values if isinstance(token, int) and 0 <= token < vocab_size}
    return tuple(sorted(found))
