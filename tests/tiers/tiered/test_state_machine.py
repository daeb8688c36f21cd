"""The store against the model: any order of operations, faults, restarts and time, and never a difference."""

import os
import random
from collections import Counter
from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvbench.tiers.tiered import TieredStore, TierSettings, WritePolicy
from tests.tiers.tiered.model import Model, ModelTier
from tests.tiers.tiered.tiers import BLOCK_BYTES, DictTier, HandClock, buffers, content, key_of, views

EXAMPLES = int(os.environ.get("KVBENCH_STATE_MACHINE_EXAMPLES", "60"))
WALKS = int(os.environ.get("KVBENCH_STATE_MACHINE_WALKS", "12"))
STEPS = 40
NUM_BLOCKS = 12
BATCH = 2
KEYS = [key_of(n) for n in range(NUM_BLOCKS)]
NAMES = ("hbm", "dram", "file")
POLICIES = st.sampled_from(["write-through", "write-through-selective", "write-back"])
EVENTS = (
    "evicted_blocks",
    "dirty_evicted_blocks",
    "lost_blocks",
    "expired_blocks",
    "full_blocks",
    "promoted_blocks",
    "recovered_blocks",
    "corrupt",
    "vanished",
    "timeouts",
    "failures",
)
RUNS = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=5, unique=True)
steps_taken = 0
events: Counter[tuple[str, str]] = Counter()


def seldom(rare: bool, common: bool) -> st.SearchStrategy[bool]:
    """`rare` once in five times: what ends or stops everything must leave time for something to happen."""
    return st.sampled_from([common] * 4 + [rare])


class StoreAgainstModel(RuleBasedStateMachine):
    """Three tiers of 3, 5 and 8 blocks (of 12 in use); the last survives restarts, the second has a TTL."""

    @initialize(dram=POLICIES, file=POLICIES, promote=st.booleans(), ttl=st.booleans())
    def open(self, dram: WritePolicy, file: WritePolicy, promote: bool, ttl: bool) -> None:
        self.clock = HandClock()
        self.model = Model(
            [
                ModelTier("hbm", 3, "write-through"),
                ModelTier("dram", 5, dram, promote=promote, ttl_s=10.0 if ttl else None),
                ModelTier("file", 8, file, persistent=True),
            ],
            now_s=self.clock.now_s,
        )
        self.places = [DictTier(name) for name in NAMES]
        self.reopen()

    def reopen(self) -> None:
        self.store = TieredStore(
            [
                TierSettings(
                    tier=place,
                    capacity_bytes=tier.room * BLOCK_BYTES,
                    write=tier.write,  # type: ignore[arg-type]
                    promote=tier.promote,
                    ttl_s=tier.ttl_s,
                    high_watermark=1,
                    low_watermark=1,
                    verify=tier.name == "hbm",
                    enabled=tier.enabled,
                )
                for tier, place in zip(self.model.tiers, self.places, strict=True)
            ],
            workers=0,
            batch_bytes=BATCH * BLOCK_BYTES,
            clock=self.clock,
        )

    @rule(blocks=RUNS)
    def store_blocks(self, blocks: list[int]) -> None:
        keys = [KEYS[b] for b in blocks]
        self.store.store(keys, views(keys))
        self.model.store(blocks)

    @rule(blocks=RUNS)
    def load_blocks(self, blocks: list[int]) -> None:
        keys = [KEYS[b] for b in blocks]
        into = buffers(len(keys))
        result = self.store.load(keys, into)
        seen = [(outcome.result, tier) for outcome, tier in zip(result.outcomes, result.tiers, strict=True)]
        assert seen == self.model.load(blocks)
        for key, view, outcome in zip(keys, into, result.outcomes, strict=True):
            assert outcome.result != "ok" or view == content(key)

    @rule(tier=st.integers(0, 2))
    def step(self, tier: int) -> None:
        assert self.store.step(NAMES[tier]) == bool(self.model.tiers[tier].queue)
        self.model.step(tier, BATCH)

    @rule()
    def flush(self) -> None:
        assert self.store.flush(60)
        while any(tier.queue for tier in self.model.tiers):
            self.model.step(next(n for n, tier in enumerate(self.model.tiers) if tier.queue), BATCH)

    @rule(start=st.integers(0, NUM_BLOCKS - 1), length=st.integers(2, 6))
    def serve(self, start: int, length: int) -> None:
        """A request as an engine serves it."""
        blocks = [(start + n) % NUM_BLOCKS for n in range(length)]
        self.load_blocks(blocks)
        self.store_blocks(blocks)
        self.flush()

    @rule(tier=st.integers(0, 2), enabled=seldom(False, True))
    def set_enabled(self, tier: int, enabled: bool) -> None:
        self.store.set_enabled(NAMES[tier], enabled)
        self.model.tiers[tier].enabled = enabled

    @rule(tier=st.sampled_from([None, 0, 1, 2]), really=seldom(True, False))
    def clear(self, tier: int | None, really: bool) -> None:
        if not really:
            return
        cleared = self.store.clear(None if tier is None else NAMES[tier])
        assert sum(each.blocks for each in cleared.values()) == self.model.clear(tier)

    @rule(tier=st.integers(0, 2), fault=st.sampled_from([None, None, None, None, "failed", "timeout"]))
    def break_stores(self, tier: int, fault: str | None) -> None:
        self.places[tier].store_result = fault  # type: ignore[assignment]
        self.model.tiers[tier].store_fault = fault

    @rule(tier=st.integers(0, 2), fault=st.sampled_from([None, None, None, None, "failed", "timeout"]))
    def break_loads(self, tier: int, fault: str | None) -> None:
        self.places[tier].load_result = fault  # type: ignore[assignment]
        self.model.tiers[tier].load_fault = fault

    @rule(
        tier=st.integers(0, 2),
        pick=st.integers(0, 7),
        how=st.sampled_from(["corrupt", "miss", "flip"]),
        load=st.booleans(),
    )
    def damage(self, tier: int, pick: int, how: str, load: bool) -> None:
        place, model = self.places[tier], self.model.tiers[tier]
        whole = sorted(block for block in model.ready if model.damage.get(block) != "miss")
        if not whole:
            return
        block = whole[pick % len(whole)]
        key = KEYS[block]
        if how == "miss":
            del place.blocks[key]
            place.corrupt.discard(key)
            model.damage[block] = "miss"
        elif how == "corrupt":
            place.corrupt.add(key)
            model.damage[block] = "corrupt"
        elif tier == 0:  # a silent bit flip, found by the store itself
            data = bytearray(content(key))
            data[7] ^= 16
            place.blocks[key] = bytes(data)
            model.damage[block] = "corrupt"
        if load:
            self.load_blocks([block])

    @rule(seconds=st.sampled_from([0.5, 3.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.model.now_s += seconds

    @rule()
    def maintain(self) -> None:
        self.store.maintain()
        self.model.expire()

    @rule(clean=st.booleans(), really=seldom(True, False))
    def restart(self, clean: bool, really: bool) -> None:
        if not really:
            return
        self.count_events()
        if clean:
            assert self.store.close()
        self.model.restart(clean=clean, batch=BATCH)
        order = [KEYS.index(key) for key in self.places[2].blocks]
        file = self.model.tiers[2]
        assert set(order) == set(file.ready)
        self.model.ticks = len(order)
        self.model.last = {block: tick for tick, block in enumerate(order, 1)}
        file.ready = dict.fromkeys(order, self.clock.now_s)
        for place in self.places[:2]:
            place.blocks.clear()
            place.corrupt.clear()
        self.reopen()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.count_events()

    def count_events(self) -> None:
        for name, figures in self.store.stats().tiers.items():
            for event in EVENTS:
                events[name, event] += getattr(figures, event)

    @invariant()
    def same(self) -> None:
        global steps_taken  # noqa: PLW0603 - the test below counts what was really done
        steps_taken += 1
        if not hasattr(self, "store"):
            return
        self.model.expire()
        found = self.store.lookup(KEYS)
        expected = [self.model.where(block) for block in range(NUM_BLOCKS)]
        assert list(found.tiers) == expected
        assert found.ready_prefix == (expected.index(None) if None in expected else NUM_BLOCKS)
        self.store.maintain()
        stats = self.store.stats().tiers
        for tier, place in zip(self.model.tiers, self.places, strict=True):
            figures = stats[tier.name]
            assert figures.ready_blocks == len(tier.ready) <= tier.room
            assert figures.pending_blocks == len(tier.queue)
            present = {block for block in tier.ready if tier.damage.get(block) != "miss"}
            assert {KEYS.index(key) for key in place.blocks} == present


def test_no_order_of_operations_tells_the_store_from_the_model() -> None:
    before = steps_taken
    run_state_machine_as_test(
        StoreAgainstModel,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert steps_taken - before >= 2000


def test_a_long_walk_of_every_operation_meets_every_event_and_no_difference() -> None:
    """Hypothesis favours few kinds of operations per example; a walk mixes them all, and shows that all happened."""
    events.clear()
    for seed in range(WALKS):
        walk = random.Random(seed)
        machine = StoreAgainstModel()
        policy: list[WritePolicy] = ["write-through", "write-through-selective", "write-back"]
        machine.open(walk.choice(policy), walk.choice(policy), promote=seed % 2 == 0, ttl=seed % 3 > 0)
        for _ in range(300):
            one_step(machine, walk)
            machine.same()
        machine.teardown()
    kinds = {kind for (_, kind), count in events.items() if count}
    assert kinds == set(EVENTS)


def one_step(machine: StoreAgainstModel, walk: random.Random) -> None:
    tier, likely = walk.randrange(3), walk.random()
    blocks = walk.sample(range(NUM_BLOCKS), walk.randint(1, 5))
    operations: list[Callable[[], None]] = [
        lambda: machine.serve(walk.randrange(NUM_BLOCKS), walk.randint(2, 6)),
        lambda: machine.store_blocks(blocks),
        lambda: machine.load_blocks(blocks),
        lambda: machine.step(tier),
        machine.flush,
        lambda: machine.set_enabled(tier, likely < 0.8),
        lambda: machine.clear(walk.choice([None, 0, 1, 2]), likely < 0.2),
        lambda: machine.break_stores(tier, walk.choice(["failed", "timeout"]) if likely < 0.3 else None),
        lambda: machine.break_loads(tier, walk.choice(["failed", "timeout"]) if likely < 0.3 else None),
        lambda: machine.damage(tier, walk.randrange(8), walk.choice(["corrupt", "miss", "flip"]), likely < 0.7),
        lambda: machine.wait(walk.choice([0.5, 3.0, 12.0])),
        machine.maintain,
        lambda: machine.restart(likely < 0.1, likely < 0.2),
    ]
    walk.choice(operations)()
