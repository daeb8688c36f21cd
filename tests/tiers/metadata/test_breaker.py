"""When the breaker lets calls through, against a clock that the test moves."""

from hypothesis import given
from hypothesis import strategies as st

from kvbench.tiers.metadata.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = Breaker(failures=3, clock=Clock())
    for good in (False, False, True, False, False):
        assert breaker.allows()
        (breaker.succeeded if good else breaker.failed)()
    assert breaker.state == "closed"
    assert breaker.allows()
    breaker.failed()
    assert breaker.state == "open"
    assert not breaker.allows()


def test_after_the_cooldown_one_call_tries_and_its_success_closes_it() -> None:
    clock = Clock()
    breaker = Breaker(failures=1, cooldown_s=2.0, clock=clock)
    breaker.allows()
    breaker.failed()
    clock.now_s += 1.99
    assert not breaker.allows()
    clock.now_s += 0.02
    assert breaker.state == "half-open"
    assert breaker.allows()
    assert not breaker.allows(), "only one call tries"
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows()


def test_each_failed_try_doubles_the_wait_up_to_a_limit_and_a_recovery_forgets_it() -> None:
    clock = Clock()
    breaker = Breaker(failures=1, cooldown_s=1.0, max_cooldown_s=4.0, clock=clock)
    breaker.allows()
    breaker.failed()
    for wait_s in (1.0, 2.0, 4.0, 4.0):
        clock.now_s += wait_s - 0.01
        assert not breaker.allows()
        clock.now_s += 0.02
        assert breaker.allows()
        breaker.failed()
    clock.now_s += 4.0
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows()
    breaker.failed()
    clock.now_s += 1.01
    assert breaker.allows()


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 3)), max_size=60))
def test_it_always_lets_a_call_through_after_the_longest_cooldown(steps: list[tuple[bool, float]]) -> None:
    clock = Clock()
    breaker = Breaker(failures=2, cooldown_s=0.5, max_cooldown_s=2.0, clock=clock)
    for good, wait_s in steps:
        clock.now_s += wait_s
        if breaker.allows():
            (breaker.succeeded if good else breaker.failed)()
    clock.now_s += 2.0
    assert breaker.allows()
