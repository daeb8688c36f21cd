"""Scripted misbehaviour, seen by a client on the wire."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.engines.builtin.faults import FAULTS, Fault, load_faults, parse_faults
from tests.engines.builtin.serving import Served, serving

SCRIPT = """
seed: 3
requests:
  - {fault: reset, at: 0, after_tokens: 2}
  - {fault: reset, at: 1}
  - {fault: status, at: 2, status: 500}
  - {fault: status, at: 3, status: 429, retry_after: 2s}
  - {fault: slow-header, at: [4, 5], delay: 300ms}
  - {fault: stall, at: 6, after_tokens: 2, delay: 300ms}
  - {fault: slow-body, at: 7, delay: 50ms}
  - {fault: invalid-sse, at: 8, after_tokens: 1}
  - {fault: missing-usage, at: [9, 10]}
  - {fault: null-cached-tokens, at: 11}
  - {fault: two-tokens, at: 12}
  - {fault: end-early, at: 13, after_tokens: 2}
  - {fault: invalid-sse, at: 14}
  - {fault: die, at: 16, after_tokens: 1}
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "faults.yaml"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def server(script: Path) -> Iterator[Served]:
    with serving("--null", "--faults", str(script)) as found:
        yield found


def raw(server: Served, *, stream: bool = True) -> tuple[bytes, str, float, float]:
    """What came over the wire, how it ended, when the head was there, and when it ended."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = json.dumps({"prompt": "x", "max_tokens": 4, **options}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    began = time.monotonic()
    first_s = 0.0
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head + body)
        received, end = b"", "closed"
        try:
            while part := connection.recv(65536):
                first_s = first_s or time.monotonic() - began
                received += part
        except ConnectionResetError:
            end = "reset"
    return received, end, first_s, time.monotonic() - began


def test_every_fault_does_what_its_name_says_to_the_request_it_is_for(server: Served) -> None:
    received, end, _, _ = raw(server)
    assert (received.count(b"data: "), end) == (2, "reset")
    received, end, _, _ = raw(server, stream=False)
    assert end == "reset"
    assert received.startswith(b"HTTP/1.1 200")
    assert raw(server)[0].startswith(b"HTTP/1.1 500 ")
    refused = raw(server)[0]
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 2\r\n" in refused
    for stream in (True, False):
        received, end, first_s, _ = raw(server, stream=stream)
        assert first_s >= 0.29  # asyncio may wake up a clock tick early
        assert b"length" in received
    received, _, first_s, end_s = raw(server)
    assert first_s < 0.3 <= end_s
    assert received.count(b"data: ") == 6
    received, _, _, end_s = raw(server)
    assert end_s >= 0.05 * 5
    assert received.count(b"data: ") == 6
    events = [line for line in raw(server)[0].split(b"\n") if line.startswith(b"data: ")]
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        json.loads(events[1].removeprefix(b"data: "))
    assert b'"usage"' not in raw(server)[0]
    assert b'"usage"' not in raw(server, stream=False)[0]
    assert b'"prompt_tokens_details":null' in raw(server)[0]
    events = [line for line in raw(server)[0].split(b"\n") if b'"text"' in line]
    assert [json.loads(event[6:])["choices"][0]["text"] for event in events] == [" t0 t1", " t2 t3"]
    received, end, _, _ = raw(server)
    assert (received.count(b"data: "), b"[DONE]" in received, end) == (2, False, "closed")
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        json.loads(raw(server, stream=False)[0].partition(b"\r\n\r\n")[2])
    assert raw(server)[0].count(b"data: ") == 6  # request 15 has no fault
    raw(server)
    assert server.process.wait(10) == -signal.SIGKILL


def test_a_request_behind_a_broken_one_on_another_connection_is_well(server: Served) -> None:
    raw(server)
    assert raw(server, stream=False)[1] == "reset"
    metrics = server.metrics()
    assert metrics["kvbench:num_requests_running"] == 0
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_resets_can_be_told_to_lie_in_the_file_too(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("reset: lies\n")
    with serving("--null", "--l1", "0", "--tier", "dram:1MiB", "--faults", str(path)) as server:
        prompt = list(range(100))
        server.complete(prompt=prompt, max_tokens=1)
        server.call("/drain", {})
        assert server.call("/cache/clear", {}).json()["cleared"]["dram"]["blocks"] == 6
        usage = server.complete(prompt=prompt, max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 96


@given(st.integers(0, 2**31), st.floats(0, 1), st.integers(1, 5), st.integers(0, 50))
def test_the_same_file_always_means_the_same_requests(seed: int, probability: float, every: int, first: int) -> None:
    rule = {"fault": "reset", "probability": probability, "every": every, "from": first}
    faults = [parse_faults({"seed": seed, "requests": [rule]}, "f") for _ in range(2)]
    hit = [index for index in range(200) if faults[0].of(index) is not None]
    assert hit == [index for index in range(200) if faults[1].of(index) is not None]
    assert all(index >= first and (index - first) % every == 0 for index in hit)


def test_a_probability_is_the_share_of_requests_in_the_long_run() -> None:
    rule = Fault(fault="reset", number=0, probability=0.1)
    share = sum(rule.applies(index, seed=1) for index in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01  # more than four standard deviations


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("requests: [{fault: rest}]", "rule 1: there is no fault 'rest' \\(did you mean 'reset'\\?\\)"),
        ("requests: [{at: 1}]", "rule 1 names no fault; it is one of reset, die"),
        ("requests: [{fault: reset, delay: 1s}]", "rule 1 has the unknown key 'delay'"),
        ("requests: [{fault: stall, delay: 1}]", "rule 1: delay is a time such as 500ms, got 1"),
        ("requests: [{fault: stall, delay: soon}]", "rule 1: delay: duration 'soon'"),
        ("requests: [{fault: reset, probability: 2}]", "probability is a number from 0 to 1, got 2"),
        ("requests: [{fault: status, status: 200}]", "status is a whole number, at least 400, got 200"),
        ("requests: [{fault: reset, at: x}]", "at is an index of a request"),
        ("requests: 5", "requests is a list of rules, got 5"),
        ("reset: maybe", "reset is one of lies, refused, missing, got 'maybe'"),
        ("request: []", "unknown key 'request' \\(did you mean 'requests'\\?\\)"),
        ("[1, 2", "faults.yaml:1: is not YAML"),
        ("", "holds no keys"),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_faults(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"nowhere\.yaml: cannot be read"):
        load_faults(tmp_path / "nowhere.yaml")


def test_the_page_names_every_fault() -> None:
    page = (Path(__file__).parents[3] / "docs" / "serve.md").read_text()
    assert all(f"`{fault}`" in page for fault in FAULTS)
