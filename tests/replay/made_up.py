"""A replay without a server, for what follows from its runs."""

import random
from collections.abc import Sequence

from kvbench.replay.experiment import with_conclusions
from kvbench.results.replay import ArmRecord, CacheCheck, CacheState, ClientHealth, ReplayResult, RequestSample, Run
from kvbench.results.tier_counters import TierCounters

CLIENT = ClientHealth(
    workers=1, cpu_s=0.1, run_cpu_s=0.1, cpu_ratio=0.1, max_rss_bytes=50_000_000, send_lag_p50_s=0.0,
    send_lag_p99_s=0.001, send_lag_max_s=0.002, loop_lag_p99_s=0.001, loop_lag_max_s=0.002, held_back=0,
    checked_chunks=0, bad_chunks=0,
)  # fmt: skip


def request(index: int, ttft_s: float, *, cached: int | None = 0, tier: str | None = None) -> RequestSample:
    due_s = index * 0.5
    return RequestSample(
        index=index, group=None, turn=0, planned_tokens=1000, shared_prefix_tokens=900, max_tokens=4, status="ok",
        detail=None, due_s=due_s, sent_s=due_s, first_choice_s=due_s + ttft_s, first_text_s=due_s + ttft_s,
        last_choice_s=due_s + ttft_s + 0.03, end_s=due_s + ttft_s + 0.03, itls_s=(0.01, 0.01, 0.01), invalid_events=0,
        prompt_tokens=1000, output_tokens=4, cached_tokens=cached,
        cached_by_tier={tier: cached} if tier and cached else None, loaded_bytes=None,
    )  # fmt: skip


def arm(name: str, *tiers: str) -> ArmRecord:
    return ArmRecord(
        name=name, tiers=tiers, engine="url", url="http://127.0.0.1:1", model="m", dialect="vllm", version="0.32.0",
        page_tokens=16, kv_bytes_per_token=100.0, commands=(), settings={}, start_s=None,
    )  # fmt: skip


def run(
    name: str, round_: int, requests: Sequence[RequestSample], *, state: CacheState = "verified cold",
    tokens: dict[str, float] | None = None, loaded: float = 0.0,
) -> Run:  # fmt: skip
    counters = TierCounters(prompt_tokens=tokens or {"computed": 1000.0 * len(requests)}, load_bytes={"dram": loaded})
    return Run(
        arm=name, round=round_, position=round_, cache=CacheCheck(state=state, reason="as made up"),
        requests=tuple(requests), not_sent=0, duration_s=max((one.end_s for one in requests), default=0.0),
        counters=counters, traffic=(), client=CLIENT,
    )  # fmt: skip


def experiment(
    seed: int, *, pairs: int = 5, spread: float = 0.04, factor: float = 1.0, state: CacheState = "verified cold",
    base_tiers: tuple[str, ...] = ("hbm",), tiers: tuple[str, ...] = ("hbm",), names: tuple[str, str] = ("a", "b"),
    tokens: dict[str, float] | None = None, loaded: float = 0.0,
) -> ReplayResult:  # fmt: skip
    """Twenty requests a run, the same in each; runs scatter by `spread`, and the second arm is slower by `factor`."""
    generator = random.Random(seed)
    sizes = [generator.lognormvariate(0, 0.5) for _ in range(20)]
    runs = []
    for number in range(pairs):
        for name, slower in zip(names, (1.0, factor), strict=True):
            level = 0.1 * slower * generator.lognormvariate(0, spread)
            requests = [
                request(index, level * size * generator.lognormvariate(0, 0.05)) for index, size in enumerate(sizes)
            ]
            if name == names[1]:
                runs.append(run(name, number, requests, state=state, tokens=tokens, loaded=loaded))
            else:
                runs.append(run(name, number, requests))
    return with_conclusions(
        ReplayResult(
            workload="made up", seed=1, loop="open", arrival="constant, 2/s", concurrency=None, num_requests=20,
            planned_prompt_tokens=20_000, planned_output_tokens=80, ideal_hit_tokens=17_100, reuse_definition="made up",
            rounds=pairs, margin_ratio=0.05, confidence=0.98, slo=None,
            arms=(arm(names[0], *base_tiers), arm(names[1], *tiers)), runs=tuple(runs),
        )
    )  # fmt: skip
