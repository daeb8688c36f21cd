"""Whole experiments against real servers: two alike, which should not be called different, and one a fifth slower.

    python tests/live/bench_replay_verdicts.py [--experiments 10]     # about 12 s each, and as long again for the fifth

Prints how often each verdict was given. `tests/replay/test_verdict.py` does the same on made-up runs, by the hundred.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from kvbench.engines.arms import parse_arms
from kvbench.engines.base import EngineOptions
from kvbench.engines.registry import open_engine
from kvbench.replay.experiment import replay
from kvbench.replay.settings import ReplaySettings
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.workload import load_workload
from tests.replay.serving import null_server


def verdict(base: str, arm: str, seed: int) -> str:
    engine = open_engine("url", EngineOptions())
    arms = parse_arms([f"a={base}", f"b={arm}"])
    settings = ReplaySettings(pairs=5, cache="as-is", scrape_every_s=0.0, seed=seed)
    found = replay(
        lambda vocab: plan_requests(
            load_workload("demo"),
            vocab_size=vocab,
            limit=20,
            scale=0.1,
            rate_per_s=40.0,
            seed=seed,
            max_output_tokens=4,
        ),
        arms,
        {one.name: engine for one in arms},
        settings,
    )
    head = found.headline
    assert head is not None
    print(f"seed {seed}: {found.verdict}, {head.ratio:.3f} ({head.low:.3f} to {head.high:.3f})", flush=True)
    return found.verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=10)
    count = parser.parse_args().experiments
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        with (
            null_server(place / "a", "--ttft", "50ms") as one,
            null_server(place / "b", "--ttft", "50ms") as twin,
            null_server(place / "c", "--ttft", "60ms") as slower,
        ):
            alike = Counter(verdict(one.url, twin.url, seed) for seed in range(count))
            fifth = Counter(verdict(one.url, slower.url, seed) for seed in range(count))
    print(f"alike: {dict(alike)}\na fifth slower: {dict(fifth)}")


if __name__ == "__main__":
    main()
