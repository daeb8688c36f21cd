"""The scheduler behind `kvbench serve --null --tier …`: real tiers and real HTTP, and no model to wait for."""

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.builtin.serving import Served, serving

PROMPT = list(range(100))  # 6 pages of 16 tokens, and 4 more
BLOCK = 16 * 256


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--null", "--l1", f"{2 * BLOCK}B", "--tier", "dram:1MiB") as found:
        yield found
        assert found.stop() == 0
        assert "Traceback" not in found.log.read_text()


def fresh(number: int) -> list[int]:
    """A prompt that shares no page with another number's."""
    return [number * 1000 + token for token in PROMPT]


def test_usage_says_which_tier_the_prefix_came_from_and_the_bytes(server: Served) -> None:
    first = server.complete(prompt=fresh(1), max_tokens=4).json()
    again = server.complete(prompt=fresh(1), max_tokens=4).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    details = again["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 96
    assert sum(details["cached_tokens_by_tier"].values()) == 96
    assert details["cached_tokens_by_tier"]["dram"] >= 64  # L1 has room for two of the six pages
    assert details["loaded_bytes"] == 6 * BLOCK
    assert again["choices"] == first["choices"]


def test_a_salt_shares_nothing(server: Served) -> None:
    server.complete(prompt=fresh(2), max_tokens=1)
    for salt in ("a", "b"):
        reply = server.complete(prompt=fresh(2), max_tokens=1, cache_salt=salt)
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    reply = server.complete(prompt=fresh(2), max_tokens=1, cache_salt="a")
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96


def test_output_ends_before_a_stop_string_in_a_stream_and_without(server: Served) -> None:
    whole = server.complete(prompt=fresh(5), max_tokens=30).json()["choices"][0]["text"]
    stop = whole[10:13]
    cut = whole[: whole.index(stop)]
    done = server.complete(prompt=fresh(5), max_tokens=30, stop=[stop, "never"]).json()
    assert (done["choices"][0]["text"], done["choices"][0]["finish_reason"]) == (cut, "stop")
    assert done["usage"]["completion_tokens"] == len(cut) + 3
    events = server.complete(prompt=fresh(5), max_tokens=30, stop=stop, stream=True).events()
    assert "".join(event["choices"][0]["text"] for event in events) == cut
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_sampling_follows_its_seed(server: Served) -> None:
    texts = [
        server.complete(prompt=fresh(6), max_tokens=20, temperature=1, seed=seed).json()["choices"][0]["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_tier_that_is_off_is_not_used_and_keeps_its_blocks(server: Served) -> None:
    server.complete(prompt=fresh(3), max_tokens=1)
    server.call("/drain", {})
    assert server.call("/tiers", {"dram": False}).json()["tiers"][1]["enabled"] is False
    reply = server.complete(prompt=fresh(3), max_tokens=1)
    assert "dram" not in reply.json()["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    server.call("/tiers", {"dram": True})
    reply = server.complete(prompt=fresh(3), max_tokens=1)
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert server.call("/tiers", {"tape": True}).status == 400
    assert server.call("/tiers", {"dram": "off"}).status == 400


def test_a_reset_says_what_it_cleared_and_clears_it(server: Served) -> None:
    server.call("/cache/clear", {})
    server.complete(prompt=fresh(4), max_tokens=1)
    server.call("/drain", {})
    held = server.metrics()['kvbench:tier_blocks{tier="hbm"}']
    assert held >= 1
    assert server.call("/reset_prefix_cache", method="POST").json() == {
        "success": True,
        "cleared": {"hbm": {"blocks": held, "bytes": held * BLOCK}},
    }
    assert server.metrics()['kvbench:tier_blocks{tier="hbm"}'] == 0
    cached = server.complete(prompt=fresh(4), max_tokens=1).json()["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens_by_tier"] == {"dram": 96}
    cleared = server.call("/cache/clear", {"tiers": ["dram"]}).json()["cleared"]
    assert cleared == {"dram": {"blocks": 6, "bytes": 6 * BLOCK}}
    assert server.call("/reset_prefix_cache?reset_external=true", method="POST").json()["success"] is True
    cached = server.complete(prompt=fresh(4), max_tokens=1).json()["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] == 0
    assert server.call("/cache/clear", {"tiers": ["tape"]}).status == 400


def test_counters_add_up(server: Served) -> None:
    server.call("/drain", {})
    before = server.metrics()
    prompts = [fresh(number) for number in (50, 51, 50, 52, 51, 50)]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda prompt: server.complete(prompt=prompt, max_tokens=3).json()["usage"], prompts))
    server.call("/drain", {})
    after = server.metrics()

    def since(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert since("kvbench:prompt_tokens_total") == 600
    assert since("kvbench:completion_tokens_total") == 18
    assert since('kvbench:requests_total{result="length"}') == 6
    by_source = {
        source: since(f'kvbench:prompt_tokens_by_source_total{{source="{source}"}}')
        for source in ("computed", "hbm", "dram")
    }
    details = [usage["prompt_tokens_details"] for usage in replies]
    for tier in ("hbm", "dram"):
        assert by_source[tier] == sum(detail["cached_tokens_by_tier"].get(tier, 0) for detail in details)
        assert since(f'kvbench:tier_hits_total{{tier="{tier}"}}') == by_source[tier]
    assert sum(by_source.values()) == 600
    loaded = sum(since(f'kvbench:tier_load_bytes_total{{tier="{tier}"}}') for tier in ("hbm", "dram"))
    assert loaded == since("kvbench:loaded_bytes_total") == sum(detail["loaded_bytes"] for detail in details)
    assert since("kvbench:time_to_first_token_seconds_count") == 6
    assert since("kvbench:inter_token_latency_seconds_count") == 12
    assert since("kvbench:e2e_request_latency_seconds_count") == 6
    assert since('kvbench:time_to_first_token_seconds_bucket{le="+Inf"}') == 6
    assert after["kvbench:num_requests_running"] == after["kvbench:num_requests_waiting"] == 0


def stream(server: Served, **fields: object) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("POST", "/v1/completions", json.dumps({"temperature": 0, "stream": True, **fields}))
    return connection, connection.getresponse()


def wait_for(condition: object, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.01)


def test_a_full_queue_says_when_to_come_again_and_a_client_that_leaves_makes_room() -> None:
    options = ("--max-running", "1", "--max-waiting", "2", "--itl", "20ms", "--l1", "0", "--tier", "dram:1MiB")
    with serving("--null", *options) as server:
        streams = []
        for place in range(3):
            streams.append(stream(server, prompt=fresh(place), max_tokens=2000))
            wait_for(lambda: server.metrics()["kvbench:num_requests_running"] == 1)
        assert server.metrics()["kvbench:num_requests_waiting"] == 2
        refused = server.complete(prompt=fresh(9), max_tokens=1)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_exceeded"
        assert server.call("/cache/clear", {}).status == 409
        for connection, response in streams:
            response.close()
            connection.close()
        wait_for(lambda: server.metrics()['kvbench:requests_total{result="abort"}'] == 3)
        assert server.complete(prompt=fresh(9), max_tokens=1).status == 200
        metrics = server.metrics()
        assert metrics["kvbench:requests_rejected_total"] == 1
        assert metrics["kvbench:num_requests_running"] == metrics["kvbench:num_requests_waiting"] == 0


def test_a_short_prompt_is_not_stuck_behind_a_long_one_and_decoding_goes_on_meanwhile() -> None:
    # `--ttft` is the time of a whole prompt, in steps of 64 tokens: the long one takes 50 steps of 20 ms.
    options = ("--ttft", "1s", "--prefill-tokens", "64", "--l1", "0", "--tier", "dram:8MiB", "--itl", "1ms")
    with serving("--null", *options) as server:
        connection, decoding = stream(server, prompt=[7] * 10, max_tokens=4000)
        decoding.read(10)
        done: dict[str, float] = {}

        def complete(name: str, prompt: list[int]) -> None:
            server.complete(prompt=prompt, max_tokens=1)
            done[name] = time.monotonic()

        tokens = server.metrics()["kvbench:completion_tokens_total"]
        long = threading.Thread(target=complete, args=("long", [1_000_000 + token for token in range(3200)]))
        long.start()
        time.sleep(0.1)
        short = threading.Thread(target=complete, args=("short", [2_000_000 + token for token in range(64)]))
        short.start()
        short.join(20)
        long.join(20)
        more = server.metrics()["kvbench:completion_tokens_total"] - tokens
        connection.close()
        assert done["short"] < done["long"]
        assert more >= 50  # at least one between any two prefill steps


def test_at_the_end_running_answers_may_finish_and_the_rest_is_cut_with_an_error() -> None:
    with serving("--null", "--itl", "10ms", "--grace", "1s", "--l1", "0", "--tier", "dram:1MiB") as server:
        connection, quick = stream(server, prompt=fresh(1), max_tokens=20)
        other, slow = stream(server, prompt=fresh(2), max_tokens=5000)
        quick.read(20)
        slow.read(20)
        server.process.send_signal(signal.SIGTERM)
        assert quick.read().endswith(b"data: [DONE]\n\n")
        rest = slow.read().split(b"\n\n")
        assert json.loads(rest[-3].removeprefix(b"data: "))["error"]["message"] == "the server was stopped"
        assert rest[-2] == b"data: [DONE]"
        assert server.process.wait(20) == 0
        connection.close()
        other.close()


def test_a_second_signal_does_not_wait_for_the_grace() -> None:
    with serving("--null", "--itl", "50ms", "--grace", "60s", "--l1", "0", "--tier", "dram:1MiB") as server:
        connection, slow = stream(server, prompt=fresh(2), max_tokens=5000)
        slow.read(20)
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: not accepts(server))
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0
        connection.close()


def accepts(server: Served) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def test_tokens_of_the_null_engine_come_when_they_were_asked_for() -> None:
    with serving("--null", "--ttft", "50ms", "--itl", "10ms") as server:
        server.complete(prompt="warm", max_tokens=1)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        offs: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 10, "stream": True}))
            response = connection.getresponse()
            times = [time.perf_counter() for line in iter(response.readline, b"data: [DONE]\n") if line.strip()]
            response.read()
            ideal = [began + 0.05 + 0.01 * place for place in range(10)]
            assert all(time_s >= due for time_s, due in zip(times, ideal, strict=True))
            offs += [time_s - due for time_s, due in zip(times, ideal, strict=True)]
        connection.close()
        assert sorted(offs)[len(offs) // 2] < 0.005


def test_a_nearest_tier_that_hangs_stops_no_request_and_a_second_signal_ends_the_wait_for_it() -> None:
    options = ("--null", "--l1", "0", "--tier", "faulty(dram:1MiB, hang=1)")
    with serving(*options) as server:
        answers = [server.complete(prompt=fresh(number), max_tokens=3).json()["choices"] for number in (1, 2, 1)]
        assert answers[0] == answers[2]
        server.process.terminate()
        time.sleep(0.5)
        assert server.process.poll() is None  # it waits for the stores
        began = time.monotonic()
        server.process.terminate()
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 5
        assert "Traceback" not in server.log.read_text()


def test_a_request_that_finds_a_free_place_is_not_refused_however_short_the_queue() -> None:
    options = ("--null", "--itl", "20ms", "--l1", "0", "--tier", "dram:1MiB", "--max-running", "2")
    with serving(*options, "--max-waiting", "0") as server, ThreadPoolExecutor(8) as pool:
        together = [pool.submit(server.complete, prompt=fresh(number), max_tokens=40) for number in range(8)]
        statuses = sorted(reply.result(60).status for reply in together)
        assert statuses == [200] * 2 + [429] * 6
