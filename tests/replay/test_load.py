import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.replay.load.generator import Live, LoadResult, run_load, split
from kvbench.replay.load.plan import Limits, LoadRequest, WorkerPlan
from tests.replay.serving import Served, null_server

FIELDS = {"model": "null", "stream": True, "stream_options": {"include_usage": True}}


def request(
    index: int, at_s: float | None = 0.0, *, after: tuple[int, ...] = (), think_s: float = 0.0, root: int | None = None,
    tokens: int = 4,
) -> LoadRequest:  # fmt: skip
    return LoadRequest(
        index=index, at_s=at_s, think_s=think_s, after=after, root=index if root is None else root,
        prompt=array("I", [1, 2, 3]), max_tokens=tokens,
    )  # fmt: skip


def plan(port: int, *requests: LoadRequest, slots: int | None = None, limits: Limits = Limits()) -> WorkerPlan:  # noqa: B008
    return WorkerPlan(host="127.0.0.1", port=port, fields=FIELDS, requests=requests, slots=slots, limits=limits)


def statuses(found: LoadResult) -> Counter[str]:
    return Counter(one.status for one in found.finished)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with null_server(tmp_path_factory.mktemp("null"), "--ttft", "20ms", "--itl", "1ms") as served:
        yield served


def test_an_open_loop_sends_at_its_times_and_counts_latency_from_them(server: Served) -> None:
    found = run_load(plan(server.port, *(request(index, index * 0.01) for index in range(50))), workers=2)
    assert statuses(found) == {"ok": 50}
    assert [one.due_ns - found.anchor_ns for one in found.finished] == [index * 10_000_000 for index in range(50)]
    assert all(one.first_choice_ns - one.due_ns >= 19_000_000 for one in found.finished)
    assert all(one.output_tokens == 4 and len(one.chunk_ns) == 4 for one in found.finished)
    assert all(one.sent_ns >= one.due_ns - 1_000_000 for one in found.finished)


def test_turns_of_a_session_wait_for_the_answer_and_a_think_time(server: Served) -> None:
    turns = [request(0), *(request(n, None, after=(n - 1,), think_s=0.05, root=0) for n in range(1, 4))]
    found = run_load(plan(server.port, *turns))
    for earlier, later in zip(found.finished, found.finished[1:], strict=False):
        assert later.due_ns - earlier.end_ns == pytest.approx(50_000_000, abs=1000)


def test_a_closed_loop_never_has_more_on_the_way_than_its_slots(server: Served) -> None:
    found = run_load(plan(server.port, *(request(index, None) for index in range(30)), slots=3), workers=2)
    moments = sorted([(one.sent_ns, 1) for one in found.finished] + [(one.end_ns, -1) for one in found.finished])
    level, most = 0, 0
    for _, change in moments:
        level += change
        most = max(most, level)
    assert (statuses(found), most) == ({"ok": 30}, 3)


def test_more_than_the_limit_waits_and_is_counted_as_held_back(server: Served) -> None:
    limits = Limits(max_in_flight=2)
    found = run_load(plan(server.port, *(request(index) for index in range(6)), limits=limits))
    assert (statuses(found), found.held_back) == ({"ok": 6}, 4)
    assert max(one.sent_ns - one.due_ns for one in found.finished) > 40_000_000


def test_a_run_that_is_stopped_keeps_what_was_finished(server: Served) -> None:
    def stop_after_ten(live: Live) -> str | None:
        seen.extend(live.fresh)
        return "enough" if len(seen) >= 10 else None

    seen: list[object] = []
    found = run_load(plan(server.port, *(request(index, index * 0.05) for index in range(200))), watch=stop_after_ten)
    assert found.stopped == "enough"
    assert 10 <= statuses(found)["ok"] < 100
    assert len(found.finished) + found.not_sent == 200


def test_nobody_listening_is_refused_and_quick(tmp_path: Path) -> None:
    with null_server(tmp_path) as served:
        port = served.port
    started = time.monotonic()
    found = run_load(plan(port, *(request(index) for index in range(5))))
    assert statuses(found) == {"refused": 5}
    assert time.monotonic() - started < 10


FAULTS = """
requests:
  - {fault: reset, at: 0, after_tokens: 2}
  - {fault: end-early, at: 1, after_tokens: 2}
  - {fault: stall, at: 2, after_tokens: 1, delay: 30s}
  - {fault: invalid-sse, at: 3, after_tokens: 1}
  - {fault: status, at: 4, status: 503}
  - {fault: missing-usage, at: 5}
  - {fault: null-cached-tokens, at: 6}
  - {fault: two-tokens, at: 7}
  - {fault: slow-header, at: 8, delay: 30s}
"""


def test_every_fault_of_a_server_is_told_as_what_it_is(tmp_path: Path) -> None:
    limits = Limits(read_s=1.0, total_s=5.0)
    with null_server(tmp_path, "--itl", "5ms", faults=FAULTS) as served:
        found = run_load(plan(served.port, *(request(index, index * 0.1) for index in range(10)), limits=limits))
    told = {one.number: one for one in found.finished}
    assert len(told) == 10
    assert [told[index].status for index in range(10)] == [
        "cut", "cut", "read-timeout", "invalid", "http", "ok", "ok", "ok", "read-timeout", "ok",
    ]  # fmt: skip
    assert told[4].http_status == 503
    assert (told[5].output_tokens, told[5].prompt_tokens) == (None, None)
    assert (told[6].cached_tokens, told[9].cached_tokens) == (None, 0)
    assert (told[7].output_tokens, len(told[7].chunk_ns)) == (4, 2)
    assert all(one.detail for one in told.values() if one.status != "ok")


def test_a_server_that_dies_leaves_the_finished_requests(tmp_path: Path) -> None:
    with null_server(tmp_path, faults="requests: [{fault: die, at: 20, after_tokens: 1}]") as served:
        found = run_load(plan(served.port, *(request(index, index * 0.01) for index in range(60))))
    told = statuses(found)
    assert told["ok"] >= 19
    assert sum(told.values()) == 60
    assert set(told) <= {"ok", "cut", "refused", "error"}


def test_what_waits_for_another_stays_with_it() -> None:
    requests = [
        request(0),
        request(1),
        request(2, None, after=(0,), root=0),
        request(3),
        request(4, None, after=(2,), root=0),
    ]
    shares = split(requests, 2)
    assert sorted(one.index for share in shares for one in share) == [0, 1, 2, 3, 4]
    home = next(share for share in shares if any(one.index == 0 for one in share))
    assert {0, 2, 4} <= {one.index for one in home}


def test_workers_import_nothing_heavy() -> None:
    import subprocess
    import sys

    program = "import sys, kvbench.replay.load.worker; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pandas", "torch", "pydantic", "aiohttp", "yaml", "rich", "typer"} & set(loaded)
