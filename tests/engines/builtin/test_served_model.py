"""A real model behind real HTTP over small tiers that evict and fail: official clients, many requests, kill -9.

A short run of one layer by default; the whole one, of the demo shape as it is:
KVBENCH_SERVE_REQUESTS=500 KVBENCH_SERVE_ROUNDS=5 pytest tests/engines/builtin/test_served_model.py
"""

import http.client
import json
import os
import random
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.builtin.serving import Served, serving

pytest.importorskip("torch")
REQUESTS = int(os.environ.get("KVBENCH_SERVE_REQUESTS", "32"))
ROUNDS = int(os.environ.get("KVBENCH_SERVE_ROUNDS", "2"))
WHOLE = REQUESTS >= 500
CONCURRENCY = 16
LAYERS = 6 if WHOLE else 1
TOKEN = LAYERS * 2 * 64 * 2 * 4  # bytes in float32: layers × KV heads × width × 2 (K and V) × 4
BLOCK = 16 * TOKEN
TIERS = ("hbm", "dram", "file")
SOURCES = re.compile(r'kvbench:prompt_tokens_by_source_total\{source="(\w+)"\}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("kv")
    failing = f"faulty(file:{folder}?size={60 * BLOCK}B, load_fail=0.3, store_fail=0.3, after=60, until=4000)"
    options = ("--l1", f"{12 * BLOCK}B", "--tier", f"dram:{30 * BLOCK}B", "--tier", failing, "--max-running", "8")
    kept = () if WHOLE else ("--layers-per-kind", "1")
    with serving("demo", *options, *kept, timeout_s=120) as found:
        yield found
        assert found.stop() == 0
        assert "Traceback" not in found.log.read_text()


def source_tokens(metrics: dict[str, float]) -> dict[str, float]:
    """Prompt tokens by where their KV came from."""
    return {match[1]: value for name, value in metrics.items() if (match := SOURCES.fullmatch(name))}


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What was added to each counter."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


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
        assert details["loaded_bytes"] == details["cached_tokens"] * TOKEN
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


def test_answers_under_load_over_failing_tiers_are_those_without_tiers(server: Served) -> None:
    asked = prompts(seed=7)
    before = server.metrics()
    server.call("/tiers", dict.fromkeys(TIERS, False))
    expected = answers(server, asked)
    computed = source_tokens(grown(before, server.metrics()))["computed"]
    assert computed == sum(len(prompt) for prompt, _ in asked)
    server.call("/tiers", dict.fromkeys(TIERS, True))
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
    assert metrics["kvbench:num_requests_running"] == metrics["kvbench:num_requests_waiting"] == 0
    counted(grown(before, metrics))
    assert resident[-1] <= resident[0] * 1.1 + 32 * 2**20, resident  # caches of the allocator, and no growth per round


def counted(metrics: dict[str, float]) -> None:
    """Every prompt token has one source, every tier evicted, and what failed was seen."""
    assert metrics['kvbench:requests_total{result="error"}'] == 0
    assert metrics['kvbench:requests_total{result="length"}'] == REQUESTS * (ROUNDS + 1)
    assert metrics['kvbench:requests_total{result="abort"}'] > 0
    assert sum(source_tokens(metrics).values()) == metrics["kvbench:prompt_tokens_total"]
    for tier in TIERS:
        assert metrics[f'kvbench:tier_evicted_blocks_total{{tier="{tier}"}}'] > 0, tier
        stored = metrics[f'kvbench:tier_store_bytes_total{{tier="{tier}"}}']
        assert stored == metrics[f'kvbench:tier_store_blocks_total{{tier="{tier}"}}'] * BLOCK
    assert metrics['kvbench:tier_failures_total{tier="file"}'] > 0


def test_usage_and_metrics_say_the_same_token_for_token_and_byte_for_byte(server: Served) -> None:
    asked = [prompt for prompt, _ in prompts(seed=8)[:12]]
    before = server.metrics()
    details = [
        server.complete(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]
        for prompt in [*asked, *asked]
    ]
    since = grown(before, server.metrics())
    by_tier = {tier: sum(detail["cached_tokens_by_tier"].get(tier, 0) for detail in details) for tier in TIERS}
    assert sum(by_tier.values()) > 0
    assert source_tokens(since) == {**by_tier, "computed": 2 * sum(map(len, asked)) - sum(by_tier.values())}
    assert since["kvbench:loaded_bytes_total"] == sum(detail["loaded_bytes"] for detail in details)
    assert since["kvbench:loaded_bytes_total"] == sum(by_tier.values()) * TOKEN


def test_the_openai_client_works_with_a_model(server: Served) -> None:
    chat = [{"role": "user", "content": "Grüße, 世界! " * 8}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        [model] = [model.id for model in client.models.list()]
        asked: dict[str, Any] = {"model": model, "messages": chat, "max_tokens": 12, "temperature": 0}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= 16  # of the whole answer before
        drawn = [
            client.completions.create(model=model, prompt="x", max_tokens=8, temperature=0.9, seed=seed).choices[0].text
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="other", prompt="x")


def test_a_stop_string_ends_the_text_before_it_whatever_the_pieces(server: Served) -> None:
    whole = server.complete(prompt="stop", max_tokens=24, ignore_eos=True).json()["choices"][0]["text"]
    stop = whole[9:13]
    cut = whole[: whole.index(stop)]
    asked = {"prompt": "stop", "max_tokens": 24, "ignore_eos": True, "stop": [stop, "never seen"]}
    assert server.complete(**asked).json()["choices"][0] | {"text": ""} == {
        "index": 0, "logprobs": None, "finish_reason": "stop", "text": "",
    }  # fmt: skip
    assert server.complete(**asked).json()["choices"][0]["text"] == cut
    events = server.complete(**asked, stream=True).events()
    assert "".join(event["choices"][0]["text"] for event in events) == cut
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_the_smallest_temperatures_take_the_most_likely_token(server: Served) -> None:
    texts = [
        server.call("/v1/completions", {"prompt": "t", "max_tokens": 6, "temperature": t}).json()["choices"][0]["text"]
        for t in (0, 1e-40, 1e-300)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_curl_streams_from_a_model(server: Served) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 4, "stream": True, "ignore_eos": True})
    command = ["curl", "-sSN", "--max-time", "30", f"{server.url}/v1/completions", "-d", body]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=40).stdout
    assert [line[:6] for line in printed.splitlines() if line] == ["data: "] * 5
    assert printed.endswith("data: [DONE]\n\n")


@pytest.mark.skipif(not WHOLE, reason="a part of the whole run; the runner and --null show the same by default")
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
