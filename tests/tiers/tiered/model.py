"""The tiered store as a person would do it on paper: one thing after the other, blocks of one size, LRU."""

from dataclasses import dataclass, field


@dataclass
class ModelTier:
    """`ready` maps a block to the time it became so; `damage` are blocks whose next load fails as the value says."""

    name: str
    room: int
    write: str
    threshold: int = 2
    ttl_s: float | None = None
    promote: bool = True
    persistent: bool = False
    enabled: bool = True
    ready: dict[int, float] = field(default_factory=dict)
    queue: list[int] = field(default_factory=list)
    damage: dict[int, str] = field(default_factory=dict)
    store_fault: str | None = None
    load_fault: str | None = None

    def has(self, block: int) -> bool:
        return block in self.ready or block in self.queue

    def drop(self, block: int) -> None:
        self.ready.pop(block, None)
        self.damage.pop(block, None)

    def read(self, block: int) -> str:
        """The result of loading a ready block; what is found damaged is gone."""
        result = self.load_fault or self.damage.get(block, "ok")
        if result in ("corrupt", "miss"):
            self.drop(block)
        return result


@dataclass
class Model:
    tiers: list[ModelTier]
    now_s: float = 0.0
    ticks: int = 0
    last: dict[int, int] = field(default_factory=dict)
    accesses: dict[int, int] = field(default_factory=dict)

    def expire(self) -> None:
        for tier in self.tiers:
            if tier.enabled and tier.ttl_s is not None:
                for block in [b for b, since in tier.ready.items() if since + tier.ttl_s <= self.now_s]:
                    tier.drop(block)

    def where(self, block: int) -> str | None:
        return next((tier.name for tier in self.tiers if tier.enabled and block in tier.ready), None)

    def access(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.ticks += 1
            self.last[block] = self.ticks
            self.accesses[block] = self.accesses.get(block, 0) + 1

    def store(self, blocks: list[int]) -> None:
        self.expire()
        self.access(blocks)
        self.spread(dict.fromkeys(blocks, -1))

    def load(self, blocks: list[int]) -> list[tuple[str, str | None]]:
        self.expire()
        results: dict[int, tuple[str, str | None]] = {}
        found: dict[int, int] = {}
        for number, tier in enumerate(self.tiers):
            if not tier.enabled:
                continue
            for block in [b for b in blocks if b not in results and b in tier.ready]:
                result = tier.read(block)
                if result == "ok":
                    results[block] = ("ok", tier.name)
                    found[block] = number
                elif result == "timeout":
                    results[block] = ("timeout", None)
        self.access([block for block in blocks if block in found])
        self.spread({block: found[block] for block in blocks if block in found})
        return [results.get(block, ("miss", None)) for block in blocks]

    def spread(self, sources: dict[int, int]) -> None:
        """Who wants which block is decided before anything moves."""
        first = next((n for n, tier in enumerate(self.tiers) if tier.enabled), None)
        plan = {
            n: [block for block, source in sources.items() if self.wants(n, tier, block, source, n == first)]
            for n, tier in enumerate(self.tiers)
        }
        for n, blocks in plan.items():
            if n > 0:
                self.tiers[n].queue += blocks
        if plan[0]:
            waiting = {n: self.tiers[n].queue[len(self.tiers[n].queue) - len(plan[n]) :] for n in plan if n and plan[n]}
            for n, blocks in waiting.items():  # they are pending already, but queue up after what leaves the first tier
                del self.tiers[n].queue[len(self.tiers[n].queue) - len(blocks) :]
            self.write(0, plan[0], {n: set(blocks) for n, blocks in waiting.items()})
            for n, blocks in waiting.items():
                self.tiers[n].queue += blocks

    def wants(self, number: int, tier: ModelTier, block: int, source: int, first: bool) -> bool:
        if not tier.enabled or tier.has(block) or (number < source and not tier.promote):
            return False
        if first or tier.write == "write-through":
            return True
        return tier.write == "write-through-selective" and self.accesses[block] >= tier.threshold

    def write(self, number: int, blocks: list[int], also_pending: dict[int, set[int]] | None = None) -> None:
        tier = self.tiers[number]
        if not tier.enabled:
            return
        accepted: list[int] = []
        leaving: list[int] = []
        for block in blocks:
            if len(tier.ready) - len(leaving) + len(accepted) >= tier.room:
                older = [b for b in tier.ready if b not in leaving and self.last[b] < self.last[block]]
                if not older:
                    continue
                leaving.append(min(older, key=lambda b: self.last[b]))
            accepted.append(block)
        below = next((n for n in range(number + 1, len(self.tiers)) if self.tiers[n].enabled), None)
        written: list[int] = []
        for block in leaving:
            if below is not None and self.tiers[below].write == "write-back":
                pending = (also_pending or {}).get(below, set())
                if not self.tiers[below].has(block) and block not in pending and tier.read(block) == "ok":
                    written.append(block)
            tier.drop(block)
        if below is not None:
            self.tiers[below].queue += written
        if tier.store_fault is None:
            for block in accepted:
                tier.ready[block] = self.now_s

    def step(self, number: int, batch: int) -> None:
        tier = self.tiers[number]
        blocks, tier.queue = tier.queue[:batch], tier.queue[batch:]
        # They stay pending while they are written; nothing else looks at them meanwhile.
        self.write(number, blocks)

    def clear(self, number: int | None) -> int:
        removed = 0
        for tier in self.tiers if number is None else [self.tiers[number]]:
            removed += sum(tier.damage.get(block) != "miss" for block in tier.ready)
            tier.ready.clear()
            tier.queue.clear()
            tier.damage.clear()
        if number is None:
            self.accesses.clear()
        return removed

    def restart(self, *, clean: bool, batch: int) -> None:
        if clean:
            while any(tier.queue for tier in self.tiers):
                self.step(next(n for n, tier in enumerate(self.tiers) if tier.queue), batch)
        for tier in self.tiers:
            tier.queue.clear()
            for block in [b for b, how in tier.damage.items() if how == "miss"]:
                tier.drop(block)  # what is not there is not found at start
            if not tier.persistent:
                tier.ready.clear()
                tier.damage.clear()
        self.accesses.clear()
        self.last.clear()
