"""Build the real architecture of a model with a few of its layers and random weights, from its config alone.

transformers builds the whole model on the meta device, where parameters have shapes and no storage: 61 layers of
DeepSeek-V3 take a quarter of a second. Layers whose modules, shapes and settings are equal are one kind. A few layers
of each kind stay, get storage and weights, and run as the model. So the kinds are those transformers really builds,
whatever spells them in the config (`layer_types`, `first_k_dense_replace`, `decoder_sparse_step`, hybrid patterns).
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.core.errors import KvbenchError, MissingDependencyError

if TYPE_CHECKING:
    import torch

# Settings that name weights, files or code to download; none of them changes the layers.
_NOT_THE_ARCHITECTURE = frozenset(
    {"architectures", "auto_map", "dtype", "model_type", "quantization_config", "torch_dtype", "transformers_version"}
)
# What constructors of third-party models raise on settings they were not written for; a bug of ours shows up as one of
# these too, and the reason printed with the skipped case says so.
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index", "block_idx")
_INDEX_NAME = re.compile(r"(^|_)(idx|id|index)$")


class CannotBuildError(KvbenchError):
    """transformers has no such architecture, or cannot build or run a shortened one; the reason is the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """A set of layers of the full model that are built alike, and which of them the shortened model keeps."""

    name: str
    layer_indices: tuple[int, ...]
    kept_indices: tuple[int, ...]
    bytes_per_layer: int
    is_windowed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncatedModel:
    """A shortened model on the meta device, not yet given storage.

    `max_tokens` is the context it was made for. `widest_row` (values per token) and `score_heads` (heads whose scores
    are written out, tokens² values each) are what its activations need.
    """

    module: "torch.nn.Module"
    layers: "tuple[torch.nn.Module, ...]"
    kinds: tuple[LayerKind, ...]
    attention: str
    vocabulary: int
    model_type: str
    weight_bytes: int
    max_tokens: int
    widest_row: int
    score_heads: int


def truncated_model(hf_config: Mapping[str, Any], *, layers_per_kind: int, dtype: str) -> TruncatedModel:
    """The base model (no LM head) of a Hugging Face config, shortened to `layers_per_kind` layers of each kind."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "torch", "measuring prefill") from error
    config = _text_config(hf_config)
    with torch.device("meta"):
        model, attention = _base_model(config, getattr(torch, dtype))
    layers, kinds = _shortened(model, layers_per_kind)
    config = model.config
    return TruncatedModel(
        module=model.eval(),
        layers=layers,
        kinds=kinds,
        attention=attention,
        vocabulary=int(config.vocab_size),
        model_type=str(config.model_type),
        weight_bytes=_weight_bytes(model),
        max_tokens=_setting(config, "max_position_embeddings", "n_positions", "max_seq_len", otherwise=1 << 30),
        widest_row=_widest_row(layers, config),
        # fused attention writes no scores, but a window is a mask of tokens² values
        score_heads=(_setting(config, "num_attention_heads", "n_head", otherwise=1) if attention == "eager" else 1)
        + _setting(config, "index_n_heads", otherwise=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalModel:
    """A language model with its LM head on the meta device, perhaps shortened; `layers` are its decoder layers."""

    module: "torch.nn.Module"
    layers: "tuple[torch.nn.Module, ...]"
    config: Any
    attention: str


def causal_model(hf_config: Mapping[str, Any], *, layers_per_kind: int | None, dtype: str) -> CausalModel:
    """The language model of a Hugging Face config, of all its layers or of `layers_per_kind` of each kind."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "torch", "running a model") from error
    config = _text_config(hf_config)
    with torch.device("meta"):
        model, attention = _built(config, getattr(torch, dtype), ("AutoModelForCausalLM",))
    if layers_per_kind is None:
        layers = decoder_layers(model)
    else:
        layers, _ = _shortened(model, layers_per_kind)
    return CausalModel(module=model.eval(), layers=layers, config=model.config, attention=attention)


def decoder_layers(model: Any) -> "tuple[torch.nn.Module, ...]":
    """The decoder layers of a built model, in order."""
    parent, name = _layer_list(model, model.config)
    return tuple(getattr(parent, name))


def materialize(model: TruncatedModel, *, device: str, seed: int = 0) -> None:
    """Give the model storage on `device`: matrices of random numbers (σ = 0.02), and its own values for the rest.

    Matrices repeat one random block of odd length, so that rows differ: drawing every element would take minutes for an
    expert layer. Random rather than zero, because zeros let a chip draw less power
    and clock higher. Small tensors (norms, biases, decay rates, rotary tables) get what the architecture starts from.
    """
    import torch

    module: Any = model.module
    module.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(seed)
    block = torch.empty((1 << 20) + 7, device=device, dtype=torch.float32).normal_(0.0, 0.02, generator=generator)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim >= 2:
                _fill(parameter.view(-1), block.to(parameter.dtype))
                parameter._is_hf_initialized = True
    for part in module.modules():
        part._is_hf_initialized = False
    module.initialize_weights()


def _fill(flat: "torch.Tensor", block: "torch.Tensor") -> None:
    whole = flat.numel() // block.numel() * block.numel()
    if whole:
        flat[:whole].view(-1, block.numel()).copy_(block.expand(whole // block.numel(), -1))
    flat[whole:].copy_(block[: flat.numel() - whole])


def _text_config(hf_config: Mapping[str, Any]) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise MissingDependencyError("transformers", "torch", "measuring prefill") from error
    model_type = _known_model_type(hf_config)
    settings = {key: copy.deepcopy(value) for key, value in hf_config.items() if key not in _NOT_THE_ARCHITECTURE}
    try:
        config = AutoConfig.for_model(model_type, **settings)
    except _BUILD_ERRORS as error:
        raise CannotBuildError(f"transformers cannot read a {model_type!r} config: {_first_line(error)}") from error
    except Exception as error:
        if (
            type(error).__module__.partition(".")[0] != "huggingface_hub"
        ):  # its config validation errors have no common base
            raise
        raise CannotBuildError(f"transformers refuses this {model_type!r} config: {_first_line(error)}") from error
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False):
        raise CannotBuildError(f"{model_type!r} is an encoder-decoder; only decoder-only language models are measured")
    return text


def _known_model_type(hf_config: Mapping[str, Any]) -> str:
    """The config's own model_type, or that of its architecture: Kimi-K2 says `kimi_k2` and `DeepseekV3ForCausalLM`."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = hf_config.get("model_type")
    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return model_type
    architectures = hf_config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    for name in names:
        found = getattr(getattr(getattr(transformers, name, None), "config_class", None), "model_type", None)
        if isinstance(found, str) and found in CONFIG_MAPPING:
            return found
    raise CannotBuildError(
        f"transformers {transformers.__version__} knows neither the model_type {model_type!r} "
        f"nor the architecture {', '.join(names) or None!r}; a newer transformers may"
    )


def _weight_bytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _base_model(config: Any, dtype: "torch.dtype") -> tuple[Any, str]:
    model, attention = _built(config, dtype, ("AutoModel", "AutoModelForCausalLM"))
    return model.base_model, attention


def _built(config: Any, dtype: "torch.dtype", families: Sequence[str]) -> tuple[Any, str]:
    import transformers

    reason: Exception | None = None
    for attention in ("sdpa", "eager"):
        for family in families:
            try:
                model = getattr(transformers, family).from_config(
                    copy.deepcopy(config), attn_implementation=attention, dtype=dtype
                )
            except _BUILD_ERRORS as error:
                reason = reason or error
                continue
            return model, attention
    raise CannotBuildError(f"transformers cannot build {config.model_type!r}: {_first_line(reason)}") from reason


def _shortened(model: Any, layers_per_kind: int) -> "tuple[tuple[torch.nn.Module, ...], tuple[LayerKind, ...]]":
    """Take all but some layers of each kind out of a model on the meta device; what stays, and the kinds there were."""
    import torch

    config = model.config
    parent, name = _layer_list(model, config)
    all_layers = list(getattr(parent, name))
    kinds = _kinds(all_layers, config, layers_per_kind)
    kept = sorted(index for kind in kinds for index in kind.kept_indices)
    layers = tuple(all_layers[index] for index in kept)
    setattr(parent, name, torch.nn.ModuleList(layers))
    _renumber(layers, kept)
    configs = {id(part.config): part.config for part in model.modules() if getattr(part, "config", None) is not None}
    for part_config in configs.values():
        _shorten(part_config, kept, len(all_layers))
    return layers, kinds


def _layer_list(model: Any, config: Any) -> tuple[Any, str]:
    """The module that holds the decoder layers, and its attribute: the shallowest list as long as the model is deep."""
    import torch

    candidates = [
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not candidates:
        raise CannotBuildError(
            f"{config.model_type!r} keeps its {config.num_hidden_layers} layers in no list that can be shortened"
        )
    parent, _, name = min(candidates, key=lambda path: path.count(".")).rpartition(".")
    return model.get_submodule(parent), name


def _kinds(layers: list[Any], config: Any, layers_per_kind: int) -> tuple[LayerKind, ...]:
    per_layer = _per_layer_lists(config, len(layers))
    groups: dict[Any, list[int]] = {}
    for index, layer in enumerate(layers):
        settings = tuple((key, _plain(values[index])) for key, values in sorted(per_layer.items()))
        groups.setdefault((_signature(layer), settings), []).append(index)
    types = per_layer.get("layer_types", [""] * len(layers))
    names = [_kind_name(layers[members[0]], types[members[0]]) for members in groups.values()]
    return tuple(
        LayerKind(
            name=name if names.count(name) == 1 else f"{name} #{names[:position].count(name) + 1}",
            layer_indices=tuple(members),
            kept_indices=tuple(members[:layers_per_kind]),
            bytes_per_layer=_weight_bytes(layers[members[0]]),
            is_windowed=_is_windowed(layers[members[0]], types[members[0]]),
        )
        for position, (name, members) in enumerate(zip(names, groups.values(), strict=True))
    )


def _signature(layer: Any) -> tuple[Any, ...]:
    """Everything about a layer that changes its work: module classes, parameter shapes and plain settings."""
    parts: list[Any] = []
    for path, module in layer.named_modules():
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters(recurse=False))
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, bool | int | str) and not key.startswith("_") and not _INDEX_NAME.search(key)
        )
        parts.append((path, type(module).__name__, shapes, settings))
    return tuple(parts)


def _kind_name(layer: Any, layer_type: Any) -> str:
    """`Qwen3Attention + Qwen3MLP (full_attention)`: classes of the parts that do the work, and the config's word."""
    parts = [type(child).__name__ for child in layer.children() if _does_work(child)]
    return (" + ".join(parts) or type(layer).__name__) + (f" ({layer_type})" if layer_type else "")


def _does_work(module: Any) -> bool:
    return any(parameter.ndim >= 2 for parameter in module.parameters())


def _is_windowed(layer: Any, layer_type: Any) -> bool:
    if re.search("sliding|chunked|window", str(layer_type)):
        return True
    return any(type(vars(module).get("sliding_window")) is int for module in layer.modules())


def _per_layer_lists(config: Any, num_layers: int) -> dict[str, list[Any]]:
    """Config settings with one entry per layer. A list of distinct numbers lists layers and is no such setting."""
    return {
        key: list(value)
        for key, value in vars(config).items()
        if isinstance(value, list | tuple)
        and len(value) == num_layers
        and not (num_layers > 1 and all(type(item) is int for item in value) and len(set(value)) == num_layers)
    }


def _setting(config: Any, *names: str, otherwise: int) -> int:
    return next((value for name in names if type(value := getattr(config, name, None)) is int and value > 0), otherwise)


def _widest_row(layers: tuple[Any, ...], config: Any) -> int:
    """Values per token of the widest activation; an expert layer (a stack of matrices) widens it by its top-k."""
    top_k = _setting(config, "num_experts_per_tok", "top_k_experts", "moe_topk", otherwise=1)
    widest = 1
    for parameter in (parameter for layer in layers for parameter in layer.parameters() if parameter.ndim >= 2):
        widest = max(widest, (top_k if parameter.ndim == 3 else 1) * max(parameter.shape[-2:]))
    return widest


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _renumber(layers: tuple[Any, ...], kept: list[int]) -> None:
    """Number the kept layers from zero: each writes its keys and values into the cache slot of its own number."""
    for position, (layer, index) in enumerate(zip(layers, kept, strict=True)):
        for module in layer.modules():
            for key in _LAYER_NUMBERS:
                if vars(module).get(key) == index:
                    setattr(module, key, position)


def _shorten(config: Any, kept: list[int], num_layers: int) -> None:
    """Make the config of the built model describe the kept layers: forward and cache read it at run time."""
    overrides: dict[str, Any] = {}
    for name in dir(type(config)):
        # other properties include deprecated ones that complain when read
        if "layer" in name and isinstance(getattr(type(config), name, None), property):
            value = getattr(config, name, None)
            if isinstance(value, list) and len(value) == num_layers:
                overrides[name] = [value[index] for index in kept]
    per_layer = _per_layer_lists(config, num_layers)
    if overrides:
        # Jamba and Bamba compute the list of layer kinds from a period, which a shortened model no longer follows
        config.__class__ = type(type(config).__name__, (type(config),), overrides)
    for key, values in per_layer.items():
        setattr(config, key, [values[index] for index in kept])
    config.num_hidden_layers = len(kept)


def _first_line(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return (text[:200] + "…" if len(text) > 200 else text) or type(error).__name__
