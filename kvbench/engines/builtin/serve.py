"""From the options of `kvbench serve` to a running server."""

import asyncio
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.errors import UsageError
from kvbench.core.units import parse_bytes, parse_duration
from kvbench.engines.builtin.faults import load_faults
from kvbench.engines.builtin.generation import Engine
from kvbench.engines.builtin.http import HttpLimits
from kvbench.engines.builtin.scheduler import Scheduler, SchedulerLimits
from kvbench.engines.builtin.server import MakeEngine, ServerSettings, serve

if TYPE_CHECKING:
    from kvbench.engines.builtin.tier_store import TierOptions

_L1 = "64MiB"
_OF_A_MODEL = ("device", "dtype", "seed", "layers_per_kind", "layer_ranges", "split")
_OF_TIERS = ("policy", "load_timeout", "eviction", "cooldown", "ttl", "spans", "metadata", "page_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options as they were written."""

    model: str | None = None
    l1: str | None = None
    tiers: tuple[str, ...] = ()
    policy: str = "write-through"
    load_timeout: str = "10s"
    eviction: str = "lru"
    cooldown: str = "0s"
    ttl: str | None = None
    spans: Path | None = None
    metadata: str | None = None
    page_tokens: int = 16
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    layers_per_kind: int | None = None
    layer_ranges: int | None = None
    split: bool = False
    max_running: int = 16
    max_waiting: int = 256
    prefill_tokens: int = 512
    null: bool = False
    ttft: str = "0s"
    itl: str = "0s"
    faults: Path | None = None
    dialect: str = "native"
    traps: tuple[str, ...] = ()
    admin_key: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    ready_file: Path | None = None
    max_body: str = "32MiB"
    grace: str = "5s"
    quiet: bool = False


def run(options: ServeOptions) -> None:
    """Serves until it is told to stop."""
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        ready_file=options.ready_file,
        dialect=options.dialect,
        traps=options.traps,
        admin_key=options.admin_key,
        faults=load_faults(options.faults) if options.faults is not None else None,
        grace_s=parse_duration(options.grace),
        quiet=options.quiet,
        limits=HttpLimits(body_bytes=parse_bytes(options.max_body)),
    )
    serve(_engine_maker(options), settings)


def _engine_maker(options: ServeOptions) -> MakeEngine:
    """Checks everything that can be checked before the event loop runs."""
    ttft_s, itl_s = parse_duration(options.ttft), parse_duration(options.itl)
    if not options.null:
        if options.model is None:
            raise UsageError("name a model to serve, such as demo, or --null; kvbench serve --help shows an example")
        if ttft_s or itl_s:
            raise UsageError("--ttft and --itl go only with --null: a model takes the time it takes")
        return _model_engine(options, options.model)
    if options.model is not None:
        raise UsageError(f"--null serves no model, but {options.model!r} was named; leave one of them out")
    _refuse_what_has_no_effect(options, _OF_A_MODEL, "has no effect with --null: leave one of them out")
    if options.tiers or options.l1 is not None:
        return _null_with_tiers(options, ttft_s, itl_s)

    _refuse_what_has_no_effect(options, _OF_TIERS, "has no effect without tiers: add --l1 or --tier, or leave it out")

    def plain(loop: asyncio.AbstractEventLoop, _on_death: Callable[[], None]) -> Engine:
        from kvbench.engines.builtin.null import NullEngine
        from kvbench.engines.builtin.timers import Timers

        return NullEngine(ttft_s=ttft_s, itl_s=itl_s, timers=Timers(loop))

    return plain


def _limits(options: ServeOptions) -> SchedulerLimits:
    return SchedulerLimits(
        max_running=options.max_running, max_waiting=options.max_waiting, prefill_tokens=options.prefill_tokens
    )


def _tier_options(options: ServeOptions) -> "TierOptions":
    from kvbench.engines.builtin.tier_store import tier_options

    return tier_options(
        _L1 if options.l1 is None else options.l1,
        options.tiers,
        options.policy,
        options.load_timeout,
        eviction=options.eviction,
        cooldown=options.cooldown,
        ttl=options.ttl,
        spans=options.spans,
        metadata=options.metadata,
    )


def _refuse_what_has_no_effect(options: ServeOptions, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(options, name) != ServeOptions.__dataclass_fields__[name].default:
            raise UsageError(f"--{name.replace('_', '-')} {why}")


def _null_with_tiers(options: ServeOptions, ttft_s: float, itl_s: float) -> MakeEngine:
    from kvbench.engines.builtin.null_runner import NullRunner, null_block_bytes
    from kvbench.engines.builtin.tier_store import open_tiers

    asked = replace(_tier_options(options), l1_in_host_memory=True)

    def make(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Engine:
        tiers = open_tiers(asked, block_bytes=null_block_bytes(options.page_tokens))
        runner = NullRunner(tiers.for_runner, page_tokens=options.page_tokens, ttft_s=ttft_s, itl_s=itl_s)
        return Scheduler(runner, tiers, limits=_limits(options), loop=loop, on_death=on_death)

    return make


def _model_engine(options: ServeOptions, model: str) -> MakeEngine:
    from kvbench.engines.builtin.tier_store import ServedTiers, open_tiers

    asked = _tier_options(options)

    def make(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Engine:
        from kvbench.engines.builtin.runner import ModelInfo, PrefixStore, load_runner
        from kvbench.engines.builtin.served_model import ServedRunner

        tiers = ServedTiers(None)

        def open_store(info: ModelInfo) -> PrefixStore | None:
            nonlocal tiers
            tiers = open_tiers(asked, block_bytes=info.block_bytes)
            return tiers.for_runner

        with _without_collections():
            runner = load_runner(
                model,
                open_store=open_store,
                device=options.device,
                dtype=options.dtype,
                page_tokens=options.page_tokens,
                seed=options.seed,
                layers_per_kind=options.layers_per_kind,
                layer_ranges=options.layer_ranges,
                load_timeout_s=asked.load_timeout_s or 10.0,
                split=options.split,
            )
        return Scheduler(ServedRunner(runner), tiers, limits=_limits(options), loop=loop, on_death=on_death)

    return make


@contextmanager
def _without_collections() -> Iterator[None]:
    """Imports and builds without garbage collection, and never looks at what they made again.

    Torch and transformers make 350,000 objects that stay: looking through them takes a fifth of the start, and later
    would stop every stream for 0.2 s at a time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
