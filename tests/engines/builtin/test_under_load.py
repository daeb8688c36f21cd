"""Many mixed requests over small tiers that evict and fail, with clients that leave: answers are those without.

A short run by default; the whole one:
KVBENCH_SERVE_REQUESTS=500 KVBENCH_SERVE_ROUNDS=5 pytest tests/engines/builtin/test_under_load.py
"""

import http.client
import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engines.builtin.serving import Served, serving

pytest.importorskip("torch")
REQUESTS = int(os.environ.get("KVBENCH_SERVE_REQUESTS", "32"))
ROUNDS = int(os.environ.get("KVBENCH_SERVE_ROUNDS", "2"))
CONCURRENCY = 16
BLOCK = 16 * 6144  # 16 tokens of the demo shape in float32: 6 layers × 2 KV heads × 64 × 2 (K and V) × 4 bytes
SOURCES = re.compile(r'kvbench:prompt_tokens_by_source_total\{source="\w+"\}')


def prompts(seed: int) -> list[tuple[list[int], int]]:
    """Prompts over a dozen shared prefixes of 2 to 12 pages, with their output lengths."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(256) for _ in range(draw.randrange(32, 200))] for _ in range(12)]
    asked = []
    for _ in range(REQUESTS):
        prefix = prefixes[min(int(draw.expovariate(0.3)), len(prefixes) - 1)]
        asked.append((prefix + [draw.randrange(256) for _ in range(draw.randrange(1, 40))], draw.randrange(1, 8)))
    return asked


def answers(server: Served, asked: list[tuple[list[int], int]]) -> list[tuple[int, ...]]:
    """The ids of every answer, in the order of the requests."""

    def one(item: tuple[list[int], int]) -> tuple[int, ...]:
        prompt, max_tokens = item
        reply = server.complete(prompt=prompt, max_tokens=max_tokens, ignore_eos=True, return_token_ids=True)
        assert reply.status == 200, reply.body
        body = reply.json()
        details = body["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == sum(details["cached_tokens_by_tier"].values())
        assert details["loaded_bytes"] == details["cached_tokens"] * 6144
        return tuple(body["choices"][0]["token_ids"])

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(one, asked))


def leave(server: Served, asked: list[tuple[list[int], int]]) -> None:
    """Asks and hangs up: some before the first token, some after it."""
    for place, (prompt, _) in enumerate(asked):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        body = {"prompt": [*prompt, place], "max_tokens": 200, "stream": True, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        if place % 2:
            connection.getresponse().read(10)
        connection.close()


def resident_bytes(server: Served) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_answers_under_load_over_failing_tiers_are_those_without_tiers(tmp_path: Path) -> None:
    asked = prompts(seed=7)
    failing = f"faulty(file:{tmp_path / 'kv'}?size={60 * BLOCK}B, load_fail=0.3, store_fail=0.3, after=60, until=4000)"
    options = ("--l1", f"{12 * BLOCK}B", "--tier", f"dram:{30 * BLOCK}B", "--tier", failing, "--max-running", "8")
    with serving("demo", *options, timeout_s=120) as server:
        server.call("/tiers", dict.fromkeys(("hbm", "dram", "file"), False))
        expected = answers(server, asked)
        computed = server.metrics()['kvbench:prompt_tokens_by_source_total{source="computed"}']
        assert computed == sum(len(prompt) for prompt, _ in asked)
        server.call("/tiers", dict.fromkeys(("hbm", "dram", "file"), True))
        resident = []
        for round_number in range(ROUNDS):
            with ThreadPoolExecutor(1) as leaving:
                gone = leaving.submit(leave, server, asked[round_number :: max(1, REQUESTS // 6)])
                found = answers(server, asked)
                gone.result(60)
            assert found == expected
            assert server.call("/drain", {}).status == 200
            resident.append(resident_bytes(server))
        metrics = server.metrics()
        counted(metrics)
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()
    assert resident[-1] <= resident[0] * 1.1 + 32 * 2**20, resident  # caches of the allocator, and no growth per round


def counted(metrics: dict[str, float]) -> None:
    """Every prompt token has one source, every tier evicted, and what failed was seen."""
    assert metrics["kvbench:num_requests_running"] == metrics["kvbench:num_requests_waiting"] == 0
    assert metrics['kvbench:requests_total{result="error"}'] == 0
    assert metrics['kvbench:requests_total{result="length"}'] == REQUESTS * (ROUNDS + 1)
    assert metrics['kvbench:requests_total{result="abort"}'] > 0
    by_source = {name: value for name, value in metrics.items() if SOURCES.fullmatch(name)}
    assert sum(by_source.values()) == metrics["kvbench:prompt_tokens_total"]
    for tier in ("hbm", "dram", "file"):
        assert metrics[f'kvbench:tier_evicted_blocks_total{{tier="{tier}"}}'] > 0, tier
        stored = metrics[f'kvbench:tier_store_bytes_total{{tier="{tier}"}}']
        assert stored == metrics[f'kvbench:tier_store_blocks_total{{tier="{tier}"}}'] * BLOCK
    assert metrics['kvbench:tier_failures_total{tier="file"}'] > 0


def test_a_killed_server_leaves_a_file_tier_that_the_next_one_uses(tmp_path: Path) -> None:
    prompt = [(7 * place) % 251 for place in range(400)]
    options = ("demo", "--l1", "0", "--tier", f"file:{tmp_path / 'kv'}?size=64MiB")
    with serving(*options, timeout_s=120) as first:
        before = first.complete(prompt=prompt, max_tokens=8, ignore_eos=True, return_token_ids=True).json()
        assert first.call("/drain", {}).status == 200
        first.process.kill()
        first.process.wait(10)
    with serving(*options, timeout_s=120) as second:
        after = second.complete(prompt=prompt, max_tokens=8, ignore_eos=True, return_token_ids=True).json()
    assert after["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"] == {"file": 384}
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
