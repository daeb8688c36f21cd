import pytest

from kvbench.tiers.base import Block
from kvbench.tiers.cuda_runtime import no_gpu_reason
from kvbench.tiers.registry import open_tier
from tests.tiers.storing_child import key_of

torch = pytest.importorskip("torch")


def test_a_block_can_be_used_where_it_lies_and_keeps_its_room_meanwhile() -> None:
    from kvbench.tiers.device import DeviceTier

    tier = open_tier("hbm:8KiB", block_bytes=4096)
    assert isinstance(tier, DeviceTier)
    first, second = b"\1" * 4096, b"\2" * 4096
    assert [outcome.result for outcome in tier.store([Block(key_of(1), memoryview(first))])] == ["ok"]
    with tier.view(key_of(1)) as view, tier.view(key_of(1)) as again, tier.view(key_of(2)) as missing:
        assert view is not None
        assert again is not None
        assert missing is None
        assert view.data_ptr() == again.data_ptr()  # no copy
        assert tier.evict([key_of(1)]) == [True]
        stored = tier.store([Block(key_of(number), memoryview(second)) for number in (2, 3)])
        assert [outcome.result for outcome in stored] == ["ok", "full"]  # one slot is still being viewed
        assert bytes(view.cpu().numpy()) == first
    assert [outcome.result for outcome in tier.store([Block(key_of(3), memoryview(second))])] == ["ok"]
    tier.close()


def test_memory_that_is_not_a_gpus_is_called_so() -> None:
    tier = open_tier("device:8KiB", block_bytes=4096)
    description = getattr(tier, "description", "")
    assert tier.name == "hbm"
    assert ("torch CPU tensor (no GPU" in description) == (no_gpu_reason() is not None)
    tier.close()
