"""How an engine looks from outside: our own metrics, usage and resets, vLLM's, or SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.core.errors import UsageError
from kvbench.engines.builtin.dialect_native import Native
from kvbench.engines.builtin.dialect_sglang import Sglang
from kvbench.engines.builtin.dialect_vllm import Vllm
from kvbench.engines.builtin.generation import Usage
from kvbench.engines.builtin.metrics import Buckets, Family

if TYPE_CHECKING:
    from kvbench.engines.builtin.http import Exchange
    from kvbench.engines.builtin.server import Server

Routes = dict[str, dict[str, "Callable[[Exchange], None]"]]
_RESET_TRAPS = {
    "reset-lies": "a reset says that it has cleared and keeps everything",
    "reset-refused": 'a reset answers 200 with {"success": false}, or 400',
    "reset-missing": "there is no reset: 404",
}


class Dialect(Protocol):
    """What differs between engines on the outside."""

    name: str
    version: str | None
    owner: str
    buckets: Buckets
    null_usage: bool
    echo_request_id: bool
    tokens_per_event: int
    own_routes: bool

    def format_usage(self, usage: Usage) -> dict[str, Any]:
        """The usage object."""
        ...

    @property
    def extension(self) -> Callable[[Usage], dict[str, Any]] | None:
        """What the answer to a request with `return_cached_tokens_details` has besides; None where nothing does."""
        ...

    def families(self, server: Server) -> Iterable[Family]:
        """The metrics."""
        ...

    def routes(self, server: Server) -> Routes:
        """Routes that only this engine has."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectEntry:
    """How a dialect is made, and the traps it can be told to set."""

    make: Callable[[frozenset[str]], Dialect]
    traps: Mapping[str, str]


DIALECTS: dict[str, DialectEntry] = {
    "native": DialectEntry(make=Native, traps=_RESET_TRAPS),
    "vllm": DialectEntry(make=Vllm, traps={**_RESET_TRAPS, **Vllm.traps}),
    "sglang": DialectEntry(make=Sglang, traps={**_RESET_TRAPS, **Sglang.traps}),
}


def dialect_named(name: str, traps: tuple[str, ...]) -> Dialect:
    """The dialect of that name with those traps set."""
    entry = DIALECTS.get(name)
    if entry is None:
        raise UsageError(f"there is no dialect {name!r}; choose one of {', '.join(DIALECTS)}")
    for trap in traps:
        if trap not in entry.traps:
            raise UsageError(f"dialect {name} has no trap {trap!r}; it has {', '.join(entry.traps)}")
    return entry.make(frozenset(traps))


def reset_trap(traps: tuple[str, ...]) -> str | None:
    """How resets misbehave, if a trap says so."""
    return next((trap.removeprefix("reset-") for trap in traps if trap in _RESET_TRAPS), None)
