"""How the conformance suite opens every kind of tier. One row per tier; a row may skip with a reason."""

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvbench.core.errors import MissingDependencyError
from kvbench.tiers.base import Tier
from kvbench.tiers.file_engines.base import EngineUnavailableError
from kvbench.tiers.registry import open_tier


@dataclass(frozen=True)
class TierOpener:
    """`open(folder, block_bytes, blocks)` opens a tier with room for that many blocks, in a folder of the test's own.

    A persistent tier opened twice in one folder is the same tier. `bounded=False`: it is never full. `keeps=False`: it
    takes blocks and does not have them afterwards.
    """

    name: str
    open: Callable[[Path, int, int], Tier]
    persistent: bool = False
    bounded: bool = True
    keeps: bool = True


def spelled(spelling: str) -> Callable[[Path, int, int], Tier]:
    """Opens a spelling in which {size}, {folder} and {name} are filled in."""

    def open_it(folder: Path, block_bytes: int, blocks: int) -> Tier:
        slot_bytes = -(-block_bytes // 4096) * 4096
        name = uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).hex
        try:
            return open_tier(
                spelling.format(size=f"{slot_bytes * blocks}B", folder=folder, name=f"test-{name}"),
                block_bytes=block_bytes,
            )
        except (EngineUnavailableError, MissingDependencyError) as error:
            pytest.skip(str(error))

    return open_it


def remove_shared(folder: Path) -> None:
    """Removes what a failing test may have left in shared memory."""
    name = uuid.uuid5(uuid.NAMESPACE_URL, str(folder)).hex
    shutil.rmtree(f"/dev/shm/kvbench-test-{name}", ignore_errors=True)


OPENERS = [
    TierOpener("hbm", spelled("hbm:{size}")),
    TierOpener("dram", spelled("dram:{size}")),
    TierOpener("dram-shared", spelled("dram:{size}?shared={name}")),
    TierOpener("file-psync", spelled("file:{folder}/kv?size={size}&io=psync&depth=4"), persistent=True),
    TierOpener("file-aio", spelled("file:{folder}/kv?size={size}&io=aio"), persistent=True),
    TierOpener("file-io_uring", spelled("file:{folder}/kv?size={size}&io=io_uring"), persistent=True),
    TierOpener("file-mmap", spelled("file:{folder}/kv?size={size}&io=mmap&depth=2"), persistent=True),
    TierOpener("file-gds", spelled("file:{folder}/kv?size={size}&io=gds"), persistent=True),
    TierOpener("file-buffered", spelled("file:{folder}/kv?size={size}&direct=0&fsync=fdatasync"), persistent=True),
    TierOpener("file-group-timeout", spelled("file:{folder}/kv?size={size}&fsync=group&timeout=20s"), persistent=True),
    TierOpener("file-fsync-unbounded", spelled("file:{folder}/kv?fsync=fsync"), persistent=True, bounded=False),
    TierOpener("null", spelled("null:"), bounded=False, keeps=False),
    TierOpener(
        "throttled-dram", spelled("throttled(dram:{size}, bandwidth=50GB/s, latency=10us, segment_latency=1us)")
    ),
    TierOpener("throttled-file", spelled("throttled(file:{folder}/kv?size={size}, latency=10us)"), persistent=True),
    TierOpener("faulty-dram", spelled("faulty(dram:{size}, load_fail=1, store_fail=1, after=1000000)")),
]
