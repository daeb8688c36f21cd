"""One tier's order of loads and stores, on a simulated clock."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.io_schedule import IoSchedule, StoreBatch

BATCH_BYTES = 4
LOAD_S = 3.0


def simulate(
    loads_at: list[float], stores: list[tuple[float, int]], patience_s: float
) -> tuple[list[float], list[float]]:
    """One server that takes a second per stored byte: how long each load waited, and when the batches began."""
    schedule: IoSchedule[float, int] = IoSchedule(
        queue_bytes=10**9, batch_bytes=BATCH_BYTES, max_store_batches=1, patience_s=patience_s
    )
    arrivals = sorted([(at, 0, 0) for at in loads_at] + [(at, 1, size) for at, size in stores])
    now, waits, batches = 0.0, [], []

    def arrive() -> None:
        while arrivals and arrivals[0][0] <= now:
            at, kind, size = arrivals.pop(0)
            if kind == 0:
                schedule.add_load(at)
            else:
                schedule.add_store(size, size)

    while True:
        arrive()
        if (load := schedule.next_load()) is not None:
            waits.append(now - load)
            now += LOAD_S
            arrive()
            schedule.end_load()
        elif (batch := schedule.next_stores(now)) is not None:
            assert isinstance(batch, StoreBatch)
            assert batch.num_bytes <= BATCH_BYTES or len(batch.items) == 1
            batches.append(now)
            now += batch.num_bytes
            schedule.end_stores(batch)
        elif arrivals:
            now = max(now, arrivals[0][0])
        else:
            assert schedule.idle
            assert schedule.stored_bytes_held == 0
            return waits, batches


@settings(max_examples=100, deadline=None)
@given(
    loads=st.lists(st.floats(0, 200), max_size=12),
    stores=st.lists(st.tuples(st.floats(0, 200), st.integers(1, BATCH_BYTES)), max_size=60),
)
def test_a_load_waits_for_loads_before_it_and_at_most_one_batch_of_stores(
    loads: list[float], stores: list[tuple[float, int]]
) -> None:
    """Waiting loads run without a store between, so whatever came before, work ahead of one is loads and one batch."""
    waits, _ = simulate(loads, stores, patience_s=1.0)
    assert len(waits) == len(loads)
    free = float("-inf")
    for at, wait in zip(sorted(loads), waits, strict=True):
        assert wait <= max(0.0, free - at) + (BATCH_BYTES if at > free else 0.0) + 1e-6
        free = at + wait + LOAD_S


def test_ten_seconds_of_queued_stores_do_not_delay_a_load_beyond_the_batch_in_flight() -> None:
    waits, batches = simulate([5.5], [(0.0, 1)] * 40, patience_s=1.0)
    assert waits == [8.0 - 5.5]  # the batch of 4 s that began at 4
    assert batches == [0.0, 4.0, 11.0, 15.0, 19.0, 23.0, 27.0, 31.0, 35.0, 39.0]


def test_stores_held_back_by_running_loads_get_one_batch_per_patience() -> None:
    schedule: IoSchedule[str, int] = IoSchedule(queue_bytes=100, batch_bytes=4, patience_s=2.0)
    for _ in range(4):
        schedule.add_store(0, 4)
    schedule.begin_load()  # and it never ends
    begun = []
    for now in range(9):
        if (batch := schedule.next_stores(float(now))) is not None:
            begun.append(now)
            schedule.end_stores(batch)
    assert begun == [2, 5, 8]


def test_the_queue_counts_bytes_until_their_batch_has_ended_and_takes_one_large_store_when_empty() -> None:
    schedule: IoSchedule[str, int] = IoSchedule(queue_bytes=8, batch_bytes=4)
    assert schedule.has_room(100)
    schedule.add_store(0, 6)
    assert schedule.has_room(2)
    assert not schedule.has_room(3)
    batch = schedule.next_stores(0.0)
    assert batch is not None
    assert not schedule.has_room(3)
    schedule.end_stores(batch)
    assert schedule.has_room(100)


def test_a_load_that_has_not_begun_can_be_taken_back() -> None:
    schedule: IoSchedule[str, int] = IoSchedule(queue_bytes=8, batch_bytes=4)
    schedule.add_load("a")
    assert schedule.remove_load("a")
    assert schedule.next_load() is None
    schedule.add_load("b")
    assert schedule.next_load() == "b"
    assert not schedule.remove_load("b")
