"""Stores and evicts blocks in a file tier until it is killed, and tells on stdout what was acknowledged.

    python storing_child.py SPELLING BLOCK_BYTES SEED

`s N` after a store of block N returned ok, `b N` before an evict of it, `e N` after. A line is one write of the system,
so that it is there whole or not at all.
"""

import os
import random
import sys
import threading

from kvbench.core.block_key import BlockKey
from kvbench.tiers.base import Block
from kvbench.tiers.registry import open_tier


def key_of(number: int) -> BlockKey:
    """The key of a block by its number."""
    chance = random.Random(number)
    return BlockKey(chance.randbytes(16), chance.randbytes(32))


def content_of(number: int, block_bytes: int) -> bytes:
    """The bytes of a block: every size up to the largest."""
    chance = random.Random(-1 - number)
    return chance.randbytes(chance.randint(1, block_bytes))


def main() -> None:
    """Two threads over disjoint numbers; each evicts some of its own blocks, so that slots are used again."""
    spelling, block_bytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tier = open_tier(spelling, block_bytes=block_bytes)
    held = sorted(entry.key.prefix for entry in tier.entries())
    os.write(1, f"opened {len(held)}\n".encode())

    def work(thread: int) -> None:
        chance = random.Random(seed * 2 + thread)
        mine: list[int] = []
        number = seed * 1_000_000 + thread * 500_000
        while True:
            batch = list(range(number, number + chance.randint(1, 6)))
            number += len(batch)
            blocks = [Block(key_of(one), memoryview(content_of(one, block_bytes))) for one in batch]
            stored = [one for one, outcome in zip(batch, tier.store(blocks), strict=True) if outcome.result == "ok"]
            os.write(1, "".join(f"s {one}\n" for one in stored).encode())
            mine += stored
            while len(mine) > 8:
                gone = [mine.pop(chance.randrange(len(mine))) for _ in range(3)]
                os.write(1, "".join(f"b {one}\n" for one in gone).encode())
                tier.evict([key_of(one) for one in gone])
                os.write(1, "".join(f"e {one}\n" for one in gone).encode())

    threads = [threading.Thread(target=work, args=(thread,), daemon=True) for thread in range(2)]
    for thread in threads:
        thread.start()
    threads[0].join(60)


if __name__ == "__main__":
    main()
