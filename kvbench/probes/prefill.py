"""Case "prefill of a few layers": time real forwards of a shortened model; runs in the child."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvbench.catalogue.truncated_model import CannotBuildError, TruncatedModel, materialize, truncated_model
from kvbench.core.errors import KvbenchError, MissingDependencyError
from kvbench.core.units import format_bytes, seconds_from_ms, seconds_from_ns
from kvbench.probes.machine import available_memory_bytes, last_level_cache_bytes
from kvbench.results.host import describe_host

Emit = Callable[[dict[str, Any]], None]

_SHARE_OF_FREE_MEMORY = 0.5
_WARM_UP_SHARE = 0.05  # of the time budget: an untimed pass is worth it only where it is cheap
_FIRST_CHECK_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCase:
    """What to run: token counts for each kind of device, one larger count to check the fit with, and the bounds.

    `device` and `dtype` may be `auto`. `memory_bytes` of None means half of what is free.
    """

    hf_config: Mapping[str, Any]
    device: str
    dtype: str
    tokens: Mapping[Literal["cpu", "cuda"], Sequence[int]]
    check_tokens: Mapping[Literal["cpu", "cuda"], int]
    repeats: int
    max_layers_per_kind: int
    memory_bytes: int | None
    time_s: float


def measure(case: dict[str, Any], emit: Emit) -> None:
    """Runs the prefills that a `PrefillCase` describes and emits one sample per forward."""
    plan = PrefillCase(**case)
    emit({"record": "stage", "text": "loading torch and transformers"})
    try:
        device = _device(plan.device)
        dtype = _dtype(plan.dtype, device)
        emit({"record": "stage", "text": "building the shortened model"})
        model = _fitting_model(plan, device, dtype)
    except (CannotBuildError, MissingDependencyError) as error:
        emit({"record": "skipped", "reason": str(error)})
        return
    materialize(model, device=device)
    emit(_facts(model, device, dtype))
    clock = _CpuClock(model) if device == "cpu" else _CudaClock(device, model)
    with contextlib.closing(clock), _tiny_numbers_as_zero():
        _run_forwards(plan, model, device, clock, emit)


@contextlib.contextmanager
def _tiny_numbers_as_zero() -> Iterator[None]:
    """Random decay rates make numbers so small that a CPU slows down on them; trained ones do not."""
    import torch

    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _run_forwards(plan: PrefillCase, model: TruncatedModel, device: str, clock: "_Clock", emit: Emit) -> None:
    kind: Literal["cpu", "cuda"] = "cpu" if device == "cpu" else "cuda"
    limit = min(model.max_tokens, _tokens_that_fit(plan, model, device))
    tokens = [count for count in sorted(plan.tokens[kind]) if count <= limit]
    check = plan.check_tokens[kind]
    if len(tokens) < len(plan.tokens[kind]) or check > limit:
        _warn(
            emit,
            "tokens-dropped",
            f"prefills of more than {limit} tokens were left out: the model's context or the memory ends there",
            "give more memory, or read predictions for longer prefixes as extrapolated",
        )
    if not tokens:
        raise KvbenchError(f"no token count of the plan is within {limit} tokens; give smaller token counts")
    schedule = _Schedule(plan.time_s)
    emit({"record": "stage", "text": f"timing prefills of {tokens[0]} to {tokens[-1]} tokens"})

    def forward(count: int, record: bool) -> None:
        seconds, layer_seconds, finite = _forward(model, device, clock, count)
        schedule.took(count, seconds)
        if not finite:
            raise KvbenchError(f"a prefill of {count} tokens with random weights gave numbers that are not finite")
        if record:
            emit({"record": "sample", "tokens": count, "seconds": seconds, "layers": layer_seconds})

    forward(tokens[0], record=False)
    for count in tokens[1:]:
        if schedule.expected_s(count) < _WARM_UP_SHARE * plan.time_s:
            forward(count, record=False)
    for repeat in range(plan.repeats):
        for count in tokens:
            if (repeat == 0 and count == tokens[0]) or schedule.fits(count, check):
                forward(count, record=True)
        if repeat % 2 == 0 and check <= limit and schedule.worth_checking(check):
            forward(check, record=True)


class _Schedule:
    """Decides what still fits into the time, from what forwards of the same or a smaller size took."""

    def __init__(self, time_s: float) -> None:
        self._deadline = time.monotonic() + time_s
        self._seconds: dict[int, float] = {}

    def took(self, tokens: int, seconds: float) -> None:
        self._seconds[tokens] = seconds

    def expected_s(self, tokens: int) -> float:
        """The last time for this count, or the nearest smaller one's, as if all of it were attention (∝ tokens²)."""
        nearest = max(count for count in self._seconds if count <= tokens)
        return self._seconds[nearest] * (tokens / nearest) ** 2

    def fits(self, tokens: int, check: int) -> bool:
        """Whether there is time for these tokens, and after them for another check where one was made before."""
        reserved_s = self._seconds.get(check, 0.0)
        return self.expected_s(tokens) + reserved_s <= self._deadline - time.monotonic()

    def worth_checking(self, check: int) -> bool:
        """Whether a check fits; the first one only where it leaves time for more of the points it is to check."""
        share = 1.0 if check in self._seconds else _FIRST_CHECK_SHARE
        return self.expected_s(check) <= share * (self._deadline - time.monotonic())


def _forward(model: TruncatedModel, device: str, clock: "_Clock", tokens: int) -> tuple[float, list[float], bool]:
    """Seconds of a causal prefill that fills the KV cache, seconds of each kept layer, and whether all is finite."""
    import torch

    ids = torch.randint(0, model.vocabulary, (1, tokens), device=device)
    with torch.inference_mode():
        clock.start()
        try:
            output: Any = model.module(input_ids=ids, use_cache=True)
        except torch.OutOfMemoryError as error:
            raise KvbenchError(
                f"a prefill of {tokens} tokens ran out of device memory; give smaller token counts"
            ) from error
        seconds, layer_seconds = clock.stop()
        finite = bool(torch.isfinite(output.last_hidden_state).all())
    # transformers has renamed the field; a model that fills no cache is not doing what an engine does
    if all(getattr(output, name, None) is None for name in ("cache", "past_key_values", "cache_params")):
        raise KvbenchError(f"{model.model_type!r} fills no KV cache; only decoder-only language models are measured")
    return seconds, layer_seconds, finite


class _Clock(ABC):
    """Times a forward and each of its layers through hooks on the layers."""

    def __init__(self, model: TruncatedModel) -> None:
        self._marks: list[Any] = []
        self._hooks: list[Any] = []
        for layer in model.layers:
            self._hooks.append(layer.register_forward_pre_hook(lambda *_: self._marks.append(self._now())))
            self._hooks.append(layer.register_forward_hook(lambda *_: self._marks.append(self._now())))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def start(self) -> None:
        self._marks = []
        self._settle()
        self._marks.append(self._now())

    def stop(self) -> tuple[float, list[float]]:
        """Seconds since `start`, and of each layer in between."""
        self._marks.append(self._now())
        self._settle()
        inner = self._marks[1:-1]
        layers = [self._between(begin, end) for begin, end in zip(inner[::2], inner[1::2], strict=True)]
        return self._between(self._marks[0], self._marks[-1]), layers

    @abstractmethod
    def _now(self) -> Any: ...

    @abstractmethod
    def _between(self, begin: Any, end: Any) -> float: ...

    @abstractmethod
    def _settle(self) -> None: ...


class _CpuClock(_Clock):
    def _now(self) -> Any:
        return time.perf_counter_ns()

    def _between(self, begin: Any, end: Any) -> float:
        seconds: float = seconds_from_ns(end - begin)
        return seconds

    def _settle(self) -> None:
        """The CPU is done when the call returns."""


class _CudaClock(_Clock):
    """CUDA events: the GPU notes when it reaches each mark, while the CPU runs ahead as it does in an engine."""

    def __init__(self, device: str, model: TruncatedModel) -> None:
        self._device = device
        super().__init__(model)

    def _now(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return seconds_from_ms(float(begin.elapsed_time(end)))

    def _settle(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)


def _device(name: str) -> str:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("torch", "torch", "measuring prefill") from error
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise CannotBuildError(f"no GPU on this host for device {name!r}; use device auto or cpu")
    return "cuda:0" if name == "cuda" else name


def _dtype(name: str, device: str) -> str:
    """`auto`: bfloat16 where the chip multiplies it, else float32, because emulated bfloat16 is far slower."""
    import torch

    if name == "auto":
        fast = device != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bfloat16" if fast else "float32"
    return name


def _fitting_model(plan: PrefillCase, device: str, dtype: str) -> TruncatedModel:
    """The model with so many layers of each kind that their weights exceed the cache, as the whole model's do."""
    import torch

    model = truncated_model(plan.hf_config, layers_per_kind=1, dtype=dtype)
    largest_layer_bytes = max(kind.bytes_per_layer for kind in model.kinds)
    if device == "cpu":
        cache_bytes = last_level_cache_bytes() or 0
    else:
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    budget = _memory_budget(plan, device)
    wanted = min(max(-(-2 * cache_bytes // max(largest_layer_bytes, 1)), 1), plan.max_layers_per_kind)
    if model.weight_bytes > budget:
        raise CannotBuildError(
            f"one layer of each of the {len(model.kinds)} kind(s) and the embedding need "
            f"{format_bytes(model.weight_bytes)} in {dtype}, and {format_bytes(budget)} of {device} memory "
            "may be used; measure on a larger device or give --gpu instead"
        )
    one_of_each_bytes = sum(kind.bytes_per_layer for kind in model.kinds)
    layers_per_kind = min(wanted, 1 + (budget - model.weight_bytes) // max(one_of_each_bytes, 1))
    if layers_per_kind == 1:
        return model
    return truncated_model(plan.hf_config, layers_per_kind=layers_per_kind, dtype=dtype)


def _memory_budget(plan: PrefillCase, device: str) -> int:
    import torch

    free = available_memory_bytes() if device == "cpu" else int(torch.cuda.mem_get_info(device)[0])
    share = None if free is None else int(free * _SHARE_OF_FREE_MEMORY)
    bounds = [bound for bound in (plan.memory_bytes, share) if bound is not None]
    if not bounds:
        raise KvbenchError("this system does not say how much memory is free; give memory_bytes in the plan")
    return min(bounds)


def _tokens_that_fit(plan: PrefillCase, model: TruncatedModel, device: str) -> int:
    """Largest token count whose activations fit into the memory budget beside the weights already there.

    Estimate: 16 rows of the widest matrix per token, and for attention that writes its scores out (`eager`, or an
    indexer) three float32 copies of heads · tokens². Fused attention writes none.
    """
    budget = _memory_budget(plan, device)
    linear = 16 * 4 * model.widest_row
    square = 3 * 4 * model.score_heads
    if square == 0:
        return budget // linear
    return int((-linear + (linear**2 + 4 * square * budget) ** 0.5) / (2 * square))


def _warn(emit: Emit, code: str, message: str, remedy: str) -> None:
    emit({"record": "warning", "code": code, "message": message, "remedy": remedy})


def _facts(model: TruncatedModel, device: str, dtype: str) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "record": "facts",
        "model_type": model.model_type,
        "device": device,
        "device_name": describe_host(gpus=lambda: "").cpu if device == "cpu" else torch.cuda.get_device_name(device),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "attention": model.attention,
        "torch_version": torch.__version__,
        "transformers_version": transformers.__version__,
        "kinds": [
            {
                "kind": kind.name,
                "layer_indices": kind.layer_indices,
                "measured_layers": kind.kept_indices,
                "is_windowed": kind.is_windowed,
            }
            for kind in model.kinds
        ],
    }
