"""The store over real tiers: host memory as first and second tier, files on disk, and the wrappers that break them."""

from pathlib import Path

import pytest

from kvbench.tiers.registry import open_tier
from kvbench.tiers.tiered import Request, TieredStore, TierSettings, WritePolicy
from tests.tiers.tiered.tiers import buffers, content, key_of, views

BLOCK = 16 * 1024
KEYS = [key_of(n) for n in range(40)]


def open_store(
    directory: Path, *, file: str = "file:{}?fsync=none", dram: WritePolicy = "write-through"
) -> TieredStore:
    return TieredStore(
        [
            TierSettings(tier=open_tier(f"dram:{8 * BLOCK // 1024}KiB", block_bytes=BLOCK, name="hbm")),
            TierSettings(tier=open_tier(f"dram:{16 * BLOCK // 1024}KiB", block_bytes=BLOCK), write=dram),
            TierSettings(tier=open_tier(file.format(directory), block_bytes=BLOCK)),
        ],
        batch_bytes=4 * BLOCK,
    )


def right_blocks(store: TieredStore) -> int:
    into = buffers(len(KEYS), BLOCK)
    result = store.load(KEYS, into)
    for key, view, outcome in zip(KEYS, into, result.outcomes, strict=True):
        assert outcome.result != "ok" or view == content(key, BLOCK)
    return sum(outcome.result == "ok" for outcome in result.outcomes)


@pytest.mark.parametrize("dram", ["write-through", "write-through-selective", "write-back"])
def test_every_block_reads_back_from_the_tiers_and_after_opening_them_again(tmp_path: Path, dram: WritePolicy) -> None:
    store = open_store(tmp_path, dram=dram)
    for begin in range(0, 40, 8):
        keys = KEYS[begin : begin + 8]
        store.store(keys, views(keys, BLOCK), request=Request(str(begin)))
    assert store.flush(20)
    assert right_blocks(store) == 40
    assert right_blocks(store) == 40
    stats = store.stats()
    assert stats.tiers["hbm"].ready_blocks <= 8
    assert stats.tiers["dram"].ready_blocks <= 16
    assert stats.edges["dram", "file"].blocks == 40
    assert store.close()
    again = open_store(tmp_path, dram=dram)
    assert again.lookup(KEYS).tiers == ("file",) * 40
    assert right_blocks(again) == 40
    cleared = again.clear()
    assert cleared["file"].blocks == 40
    assert again.lookup(KEYS).ready_prefix == 0
    assert again.close()
    empty = open_store(tmp_path)
    assert empty.lookup(KEYS).ready_prefix == 0
    assert empty.close()


def test_a_damaged_file_tier_never_serves_a_wrong_byte_and_every_fault_is_counted(tmp_path: Path) -> None:
    faulty = "faulty(file:{}, corrupt=0.2, torn=0.1, load_fail=0.2, store_fail=0.1, seed=3)"
    store = open_store(tmp_path, file=faulty)
    found = []
    for _ in range(4):
        for begin in range(0, 40, 8):
            keys = KEYS[begin : begin + 8]
            store.store(keys, views(keys, BLOCK))
        assert store.flush(20)
        store.clear("hbm")
        store.clear("dram")
        found.append(right_blocks(store))
    figures = store.stats().tiers["file"]
    assert min(found) > 5
    assert figures.corrupt > 0
    assert figures.failures > 0
    assert store.close()


def test_bytes_of_a_file_that_were_changed_on_disk_are_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.store(KEYS, views(KEYS, BLOCK))
    assert store.close()
    secret = content(KEYS[7], BLOCK)[100:200]
    changed = 0
    for path in tmp_path.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(secret)) >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(b"\0" * 50)
            changed += 1
    assert changed == 1
    again = open_store(tmp_path)
    assert right_blocks(again) == 39
    assert again.stats().tiers["file"].corrupt == 1
    assert again.lookup(KEYS[7:8]).ready_prefix == 0
    assert again.close()
