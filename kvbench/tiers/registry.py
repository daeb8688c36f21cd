"""The tiers by scheme: one list to read, nothing imported until chosen."""

from collections.abc import Callable
from importlib import import_module

from kvbench.core.errors import UsageError
from kvbench.tiers.base import Tier
from kvbench.tiers.spec import TierSpec, parse_tier_spec

TIERS = {
    "hbm": "kvbench.tiers.device:open_device",
    "dram": "kvbench.tiers.dram:open_dram",
    "file": "kvbench.tiers.file.tier:open_file",
    "null": "kvbench.tiers.null:open_null",
    "throttled": "kvbench.tiers.throttled:open_throttled",
    "faulty": "kvbench.tiers.faulty:open_faulty",
}


def open_tier(spec: TierSpec | str, *, block_bytes: int, name: str | None = None) -> Tier:
    """The tier of any spelling, for blocks of at most `block_bytes`.

    `name` is what tables and metrics call it: by default its scheme, and for a wrapper that of the tier inside.
    """
    found = parse_tier_spec(spec) if isinstance(spec, str) else spec
    if block_bytes < 1:
        raise UsageError(f"tier {found}: a block of {block_bytes} bytes cannot be stored; give a size above zero")
    place = TIERS.get(found.scheme)
    if place is None:
        raise UsageError(f"tier {found}: {found.scheme} cannot be opened by this version; use {', '.join(TIERS)}")
    module, _, attribute = place.partition(":")
    open_it: Callable[..., Tier] = getattr(import_module(module), attribute)
    return open_it(found, block_bytes=block_bytes, name=name or default_name(found))


def default_name(spec: TierSpec) -> str:
    """The scheme of the innermost tier."""
    while spec.inner is not None:
        spec = spec.inner
    return spec.scheme
