"""Restore strategies: copies and bytes as in the seed's table, and when each wins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.links import LinkLimits
from kvbench.core.restore import STRATEGIES, Restore, hashed_imbalance, restore_options

GB = 10**9
PRIVATE = LinkLimits(pcie=50e9, collective=300e9, alpha_h2d_s=1e-4, alpha_collective_s=1.5e-5)


def options(limits: LinkLimits, *, ranks: int = 8, replica_bytes: int = GB, **more: float) -> dict[str, Restore]:
    found = restore_options(replica_bytes=replica_bytes, ranks=ranks, limits=limits, chunks=80, **more)  # type: ignore[arg-type]
    assert tuple(option.name for option in found) == STRATEGIES
    return {option.name: option for option in found}


@pytest.mark.parametrize(
    ("name", "host", "d2h", "h2d", "gpu", "l1"),
    [
        ("per_rank_host_copies", 8, 8, 8, 0, 1),
        ("shared_memory_direct", 1, 1, 8, 0, 1),
        ("fixed_source_broadcast_pipelined", 1, 1, 1, 7, 1),
        ("hashed_source_broadcast_pipelined", 1, 1, 1, 7, 1),
        ("sharded_h2d_allgather_pipelined", 1, 1, 1, 7, 1),
        ("native_sequence_sharding", 1, 1, 1, 0, 1 / 8),
    ],
)
def test_copies_per_logical_page_follow_the_table(
    name: str, host: int, d2h: int, h2d: int, gpu: int, l1: float
) -> None:
    option = options(PRIVATE)[name]
    assert option.host_copies == host
    assert option.node_d2h_bytes == d2h * GB
    assert option.node_h2d_bytes == h2d * GB
    assert option.gpu_gpu_bytes == gpu * GB
    assert option.l1_rank_ratio == l1


@given(st.integers(2, 16), st.integers(10**6, 10**10))
def test_native_sharding_is_never_slower_than_the_others(ranks: int, replica_bytes: int) -> None:
    found = options(PRIVATE, ranks=ranks, replica_bytes=replica_bytes)
    native = found["native_sequence_sharding"].t_s
    assert native is not None
    assert all(native <= (option.t_s or 0) + 1e-12 for option in found.values())


def test_with_private_links_a_broadcast_gains_nothing_over_a_shared_buffer() -> None:
    found = options(LinkLimits(pcie=50e9, collective=300e9))
    shared, broadcast = found["shared_memory_direct"].t_s, found["fixed_source_broadcast_pipelined"].t_s
    assert shared == pytest.approx(GB / 50e9)
    assert broadcast == pytest.approx(GB / 50e9 + GB / 80 / 300e9)


def test_with_shared_uplinks_a_broadcast_wins() -> None:
    found = options(LinkLimits(pcie=50e9, uplink=50e9, ranks_per_uplink=4, collective=300e9))
    shared, broadcast = found["shared_memory_direct"].t_s, found["fixed_source_broadcast_pipelined"].t_s
    assert shared is not None
    assert broadcast is not None
    assert broadcast < shared / 3


def test_one_drive_is_read_once_by_a_broadcast_and_g_times_by_private_copies() -> None:
    found = options(LinkLimits(pcie=50e9, storage_total=8e9, collective=300e9))
    assert found["per_rank_host_copies"].t_s == pytest.approx(8 * GB / 8e9)
    assert found["fixed_source_broadcast_serial"].t_s == pytest.approx(GB / 8e9 + GB / 300e9)


def test_without_a_collective_rate_those_strategies_say_so() -> None:
    found = options(LinkLimits(pcie=50e9))
    assert found["fixed_source_broadcast_serial"].t_s is None
    assert "--limit collective" in (found["fixed_source_broadcast_serial"].reason or "")
    assert found["native_sequence_sharding"].t_s is not None


def test_other_groups_on_the_node_share_the_host() -> None:
    limits = LinkLimits(pcie=50e9, host_total=200e9)
    alone = options(limits, ranks=2, concurrent_ranks=2)["per_rank_host_copies"].t_s
    crowded = options(limits, ranks=2, concurrent_ranks=8)["per_rank_host_copies"].t_s
    assert alone == pytest.approx(GB / 50e9)
    assert crowded == pytest.approx(GB / 25e9)


def test_hashing_few_blocks_over_many_ranks_is_uneven() -> None:
    assert hashed_imbalance(1, 10) == 1
    assert hashed_imbalance(8, 10**9) == pytest.approx(1, abs=1e-3)
    assert hashed_imbalance(8, 64) > 1.5


def test_what_a_rank_keeps_for_itself_is_loaded_whatever_the_strategy() -> None:
    plain, with_state = options(PRIVATE), options(PRIVATE, private_bytes=GB // 10)
    for name in STRATEGIES:
        before, after = plain[name].t_s, with_state[name].t_s
        assert before is not None
        assert after == pytest.approx(before + GB / 10 / 50e9)
        assert with_state[name].node_h2d_bytes - plain[name].node_h2d_bytes == 8 * GB // 10
    assert with_state["native_sequence_sharding"].l1_rank_ratio == pytest.approx((1 / 8 + 0.1) / 1.1)


def test_more_loads_than_this_group_share_the_node_whatever_their_number() -> None:
    limits = LinkLimits(host_total=120e9)
    twelve = options(limits, ranks=8, concurrent_ranks=12)["per_rank_host_copies"].t_s
    assert twelve == pytest.approx(GB / 10e9)
