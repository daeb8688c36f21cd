"""The engines that replay can drive: one list to read, nothing imported until chosen."""

import difflib
from collections.abc import Callable
from importlib import import_module

from kvbench.core.errors import UsageError
from kvbench.engines.base import EngineAdapter, EngineOptions

# Each function takes EngineOptions and returns an adapter.
ENGINES = {
    "builtin": "kvbench.engines.builtin_server:open_builtin_adapter",
    "sglang": "kvbench.engines.sglang:open_sglang_adapter",
    "url": "kvbench.engines.url:open_url_adapter",
    "vllm": "kvbench.engines.vllm:open_vllm_adapter",
}


def open_engine(name: str, options: EngineOptions) -> EngineAdapter:
    """The adapter of that name; an unknown one is refused with the nearest known."""
    if name not in ENGINES:
        near = difflib.get_close_matches(name, ENGINES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"engine {name!r} is not one of {', '.join(ENGINES)} or an http:// address{hint}")
    module, _, function = ENGINES[name].partition(":")
    opened: Callable[[EngineOptions], EngineAdapter] = getattr(import_module(module), function)
    return opened(options)
