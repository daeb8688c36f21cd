"""Every recorded trace at hand loads, and its first requests replay against a real server."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.engines.arms import parse_arms
from kvbench.engines.base import EngineOptions
from kvbench.engines.registry import open_engine
from kvbench.replay.experiment import replay
from kvbench.replay.load.plan import Limits
from kvbench.replay.settings import ReplaySettings
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.workload import load_workload
from tests.replay.serving import Served, null_server

REQUESTS = 200
_DEFAULT = Path(__file__).parents[3] / "shared" / "data" / "traces"
FOLDER = Path(os.environ.get("KVBENCH_TRACES", _DEFAULT))


def traces() -> list[Path]:
    if not FOLDER.is_dir():
        return []
    files = [
        path for path in sorted(FOLDER.iterdir()) if path.name.endswith((".jsonl.gz", ".csv.gz", ".csv", ".jsonl"))
    ]
    return [*files, *sorted((FOLDER / "otel").glob("*"))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with null_server(tmp_path_factory.mktemp("null"), "--max-body", "64MiB") as served:
        yield served


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no recorded traces in {FOLDER} (KVBENCH_TRACES names the folder)")
def test_there_are_traces_to_replay() -> None:
    assert len(traces()) >= 7


@pytest.mark.parametrize("path", traces(), ids=lambda path: path.name)
def test_the_first_requests_of_every_trace_replay(path: Path, server: Served) -> None:
    traffic = load_workload(path)
    first = plan_requests(traffic, vocab_size=8192, limit=REQUESTS)
    start_s = max((one.at_s for one in first.requests if one.at_s is not None), default=0.0)
    thinking_s = sum(one.think_s for one in first.requests)
    speedup = max(1.0, start_s + thinking_s)  # about a second

    (arm,) = parse_arms([f"a={server.url}"])
    found = replay(
        lambda vocab: plan_requests(
            traffic, vocab_size=vocab, limit=REQUESTS, speedup=speedup, max_prompt_tokens=512, max_output_tokens=2
        ),
        (arm,),
        {"a": open_engine("url", EngineOptions())},
        ReplaySettings(pairs=1, cache="as-is", limits=Limits(read_s=20, total_s=40), scrape_every_s=0.0),
    )
    (run,) = found.runs
    assert run.stopped is None
    assert len(run.finished) == len(first.requests), {one.detail for one in run.requests if not one.ok}
    assert all(one.prompt_tokens == one.planned_tokens for one in run.finished)
    assert found.loop == "open"
    assert [one.shared_prefix_tokens for one in first.requests if one.shared_prefix_tokens > one.prompt_tokens] == []
