"""Calls that block for ever cost their caller no more than it was willing to wait."""

import threading
import time

import pytest

from kvbench.tiers.blocking_calls import BlockingCalls


def test_results_and_errors_come_back_in_order() -> None:
    calls = BlockingCalls("test")
    assert [calls.run(lambda number=number: number * number, 5) for number in range(5)] == [0, 1, 4, 9, 16]  # type: ignore[misc]
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, 5)
    assert calls.run(threading.current_thread, 5).daemon
    calls.close()


def test_a_caller_waits_only_so_long_and_what_it_gave_up_is_not_begun() -> None:
    calls, go, begun = BlockingCalls("test"), threading.Event(), []
    with pytest.raises(TimeoutError):
        calls.run(lambda: go.wait(20), 0.05)
    with pytest.raises(TimeoutError):
        calls.run(lambda: begun.append(1), 0.05)
    go.set()
    assert calls.run(lambda: "next", 5) == "next"
    assert begun == []
    calls.close()


def test_closing_runs_the_last_call_and_refuses_more() -> None:
    calls, last = BlockingCalls("test"), []
    calls.close(lambda: last.append(1), 5)
    assert last == [1]
    with pytest.raises(TimeoutError, match="closed"):
        calls.run(lambda: None, 5)
    calls.close()


def test_closing_does_not_wait_for_a_stuck_call() -> None:
    calls, go = BlockingCalls("test"), threading.Event()
    calls.submit(lambda: go.wait(20))
    begin_s = time.monotonic()
    calls.close(timeout_s=0.1)
    assert time.monotonic() - begin_s < 5
    go.set()
