"""The page cache under a file tier: made cold before loads, or watched after them."""

from contextlib import ExitStack
from typing import Any

from kvbench.probes.machine import filesystem_kind, runs_in_a_virtual_machine
from kvbench.probes.scratch_file import MEMORY_FILESYSTEMS
from kvbench.tiers.base import Tier
from kvbench.tiers.file.tier import FileTier
from kvbench.tiers.page_cache import PageCache
from kvbench.tiers.spec import TierSpec

_LOOKS_AT_CACHE_EVERY = 32  # a look at a large file takes milliseconds
_MOST_CACHED_RATIO = 0.02  # headers of blocks go through the cache


def file_tier(tier: Tier) -> FileTier | None:
    """The file tier inside every wrapper, if it is one."""
    while hasattr(tier, "inner"):
        tier = tier.inner
    return tier if isinstance(tier, FileTier) else None


class TierCache:
    """The page cache of a file tier, if the tier is one: dropped before loads, or looked at after direct ones."""

    def __init__(self, tier: Tier, innermost: TierSpec) -> None:
        file = file_tier(tier)
        self._scheme = innermost.scheme
        self._directory = file.directory if file is not None else None
        self.direct = file is not None and file.direct
        self._stack = ExitStack()
        self._cache: PageCache | None = None
        self._num_bytes = self._looks = 0

    def __enter__(self) -> "TierCache":
        if self._directory is not None:
            from kvbench.tiers.file.directory import FILE_NAME

            file = self._stack.enter_context((self._directory / FILE_NAME).open("r+b"))
            self._num_bytes = file.seek(0, 2)
            self._cache = PageCache(file.fileno(), self._num_bytes)
            self._cache.drop()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def buffered(self) -> bool:
        """Whether it is a file tier whose blocks go through the page cache."""
        return self._directory is not None and not self.direct

    def before_load(self) -> None:
        """Makes a buffered load cold."""
        if self._cache is not None and self.buffered:
            self._cache.drop_and_note(0, self._num_bytes)

    def after_load(self) -> None:
        """Sees now and then whether direct loads went through the cache after all."""
        if self._cache is not None and self.direct:
            if self._looks % _LOOKS_AT_CACHE_EVERY == 0:
                self._cache.note(0, self._num_bytes)
            self._looks += 1

    def coldness(self) -> dict[str, Any]:
        """Whether loads were cold, and how that was seen."""
        if self._cache is None or self._directory is None:
            memory = self._scheme in ("hbm", "dram", "null")
            why = "memory has no cold state" if memory else "what the store keeps in memory cannot be seen from here"
            return {"cold": None, "cold_evidence": why}
        kind = filesystem_kind(self._directory)
        if kind in MEMORY_FILESYSTEMS:
            return {"cold": False, "cold_evidence": f"{kind} keeps its files in memory"}
        how = "O_DIRECT bypasses the page cache" if self.direct else "the page cache was dropped before every load"
        ratio = self._cache.most_resident_ratio
        if ratio is None:
            return {"cold": None, "cold_evidence": f"{how}; not seen, this system cannot tell (no mincore)"}
        when = "after" if self.direct else "before"
        evidence = f"{how}; mincore saw at most {ratio:.1%} of the file cached {when} a load, headers included"
        if runs_in_a_virtual_machine():
            evidence += "; caches of the hypervisor below cannot be seen"
        return {"cold": ratio < _MOST_CACHED_RATIO, "cold_evidence": evidence}
