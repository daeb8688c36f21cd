"""Two stores over one shared tier, with real metadata in SQLite between them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvbench.core.block_key import BlockKey
from kvbench.tiers.metadata.base import Location, MetadataStats
from kvbench.tiers.metadata.registry import open_metadata
from kvbench.tiers.tiered import TieredStore, TierSettings
from tests.tiers.tiered.tiers import BLOCK_BYTES, DictTier, HandClock, buffers, content, key_of, views

KEYS = [key_of(n) for n in range(6)]


@pytest.fixture
def spec(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path / 'metadata.db'}?timeout=5s"


def a_store(blocks: dict[BlockKey, bytes], spec: str) -> TieredStore:
    return TieredStore(
        [
            TierSettings(tier=DictTier("hbm")),
            TierSettings(tier=DictTier("s3", blocks=blocks), shared=True, recover=False),
        ],
        workers=0,
        clock=HandClock(),
        metadata=open_metadata(spec),
    )


def test_a_store_finds_what_another_wrote_to_the_shared_tier(spec: str) -> None:
    blocks: dict[BlockKey, bytes] = {}
    one, two = a_store(blocks, spec), a_store(blocks, spec)
    one.store(KEYS[:4], views(KEYS[:4]))
    assert two.lookup(KEYS).ready_prefix == 0
    one.flush(1)
    assert two.lookup(KEYS).tiers == ("s3",) * 4 + (None, None)
    into = buffers(4)
    assert two.load(KEYS[:4], into).tiers == ("s3",) * 4
    assert into[3] == content(KEYS[3])
    assert two.lookup(KEYS[:4]).tiers == ("hbm",) * 4
    stats = two.stats()
    assert stats.tiers["s3"].found_blocks == 4
    assert stats.metadata is not None
    assert stats.metadata.hits == 4


def test_a_block_that_left_the_shared_tier_is_withdrawn_and_a_stale_hint_is_a_miss(spec: str) -> None:
    blocks: dict[BlockKey, bytes] = {}
    one, two, three = (a_store(blocks, spec) for _ in range(3))
    one.store(KEYS[:2], views(KEYS[:2]))
    one.flush(1)
    assert two.lookup(KEYS[:2]).ready_prefix == 2
    assert one.clear("s3")["s3"].blocks == 2
    assert three.lookup(KEYS[:2]).ready_prefix == 0
    assert [outcome.result for outcome in two.load(KEYS[:2], buffers(2)).outcomes] == ["miss", "miss"]
    assert two.lookup(KEYS[:2]).ready_prefix == 0


def test_clearing_a_shared_tier_leaves_what_only_others_know(spec: str) -> None:
    blocks: dict[BlockKey, bytes] = {}
    one, two = a_store(blocks, spec), a_store(blocks, spec)
    one.store(KEYS[:2], views(KEYS[:2]))
    one.flush(1)
    two.store(KEYS[2:3], views(KEYS[2:3]))
    two.flush(1)
    assert two.clear()["s3"].blocks == 1
    assert set(blocks) == set(KEYS[:2])


class SilentMetadata:
    """Answers nothing, as a service behind an open breaker does."""

    def put(self, keys: Sequence[BlockKey], location: Location, num_bytes: int | Sequence[int]) -> bool:
        return False

    def find(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        return [None] * len(keys)

    def remove(self, keys: Sequence[BlockKey], location: Location) -> bool:
        return False

    def drain(self, instance: str) -> bool:
        return False

    def stats(self) -> MetadataStats:
        return MetadataStats(backend="silent", breaker="open")

    def close(self) -> None:
        return


def test_without_an_answer_from_the_metadata_the_store_serves_what_it_knows_itself() -> None:
    store = TieredStore(
        [TierSettings(tier=DictTier("hbm")), TierSettings(tier=DictTier("s3"), shared=True)],
        metadata=SilentMetadata(),
    )
    store.store(KEYS[:2], views(KEYS[:2]))
    assert store.flush(5)
    assert store.lookup(KEYS[:3]).tiers == ("hbm", "hbm", None)
    assert store.close()


def test_metadata_of_another_tier_or_another_instance_or_size_is_not_believed(spec: str) -> None:
    metadata = open_metadata(spec)
    metadata.put(KEYS[:1], Location(instance="", tier="elsewhere"), BLOCK_BYTES)
    metadata.put(KEYS[1:2], Location(instance="host-7", tier="s3"), BLOCK_BYTES)
    metadata.put(KEYS[2:3], Location(instance="", tier="s3"), BLOCK_BYTES // 2)
    store = a_store({KEYS[2]: content(KEYS[2])}, spec)
    assert store.lookup(KEYS[:2]).tiers == (None, None)
    assert store.lookup(KEYS[2:3]).ready_prefix == 1
    assert store.load(KEYS[2:3], buffers(1)).outcomes[0].result == "miss"
    metadata.close()
