import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.engines.arms import parse_arms
from kvbench.engines.base import Endpoint, EngineOptions, Setting
from kvbench.engines.http_calls import split_url
from kvbench.engines.url import UrlAdapter, detect, reset_caches, server_settings
from kvbench.replay.experiment import replay
from kvbench.replay.load.generator import run_load
from kvbench.replay.load.plan import Limits
from kvbench.replay.requests import TEXT_FORM, worker_plan
from kvbench.replay.settings import ReplaySettings
from kvbench.report.replay import terminal
from kvbench.results.document import new_document
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.workload import load_workload


class TextOnly(BaseHTTPRequestHandler):
    """An OpenAI-compatible server of unknown make, which refuses token ids and knows no metrics."""

    protocol_version = "HTTP/1.1"
    prompts: list[Any] = []  # noqa: RUF012 - shared by the handlers of one test

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "m", "object": "model"}]}).encode())
        else:
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not isinstance(body["prompt"], str) or "ignore_eos" in body:
            self.answer(400, b'{"error": {"message": "prompt must be text"}}')
            return
        self.prompts.append(body["prompt"])
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": 1}
        events = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self.answer(200, text.encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the name is the base class's


@pytest.fixture
def text_only() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), TextOnly)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    TextOnly.prompts.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join(10)
    server.server_close()


def test_a_server_that_takes_no_ids_gets_words_that_share_prefixes_as_planned(text_only: str) -> None:
    endpoint = detect(text_only)
    assert (endpoint.dialect, endpoint.takes_ids, endpoint.model) == ("unknown", False, "m")
    plan = plan_requests(load_workload("shared-prefix-1024"), vocab_size=TEXT_FORM.vocab_size, limit=4, scale=0.05)
    found = run_load(worker_plan(plan, endpoint, limits=Limits(read_s=10)))
    assert [one.status for one in found.finished] == ["ok"] * 4
    assert all(re.fullmatch(r"( [a-z]+)+", prompt) for prompt in TextOnly.prompts)
    assert [one.prompt_tokens for one in found.finished] == [request.prompt_tokens for request in plan.requests]
    with pytest.raises(UsageError, match="words to write prompts with"):
        worker_plan(replace(plan, vocab_size=8192), endpoint, limits=Limits())
    shared = min(request.shared_prefix_tokens for request in plan.requests[1:])
    assert len({tuple(prompt.split()[:shared]) for prompt in TextOnly.prompts}) == 1


def test_a_whole_replay_of_a_server_that_takes_no_ids_is_unverified_and_says_what_was_sent(text_only: str) -> None:
    arms = parse_arms([f"a={text_only}"])
    found = replay(
        lambda vocab: plan_requests(load_workload("shared-prefix-1024"), vocab_size=vocab, limit=4, scale=0.05),
        arms,
        {"a": UrlAdapter(EngineOptions())},
        ReplaySettings(pairs=1, warm_up_requests=1),
    )
    assert [one.status for one in found.runs[0].requests] == ["ok"] * 4
    assert found.runs[0].cache.state == "unverified"
    (words,) = [one for one in found.warnings if one.code == "words"]
    assert "counted 1.00 tokens a word" in words.message
    assert found.summaries[0].tokens_by_source == {}


class Replaced(UrlAdapter):
    """A server that says that a part of it was replaced, and a lot about its machine."""

    def settings(self, endpoint: Endpoint) -> Mapping[str, Setting]:
        return {**super().settings(endpoint), "kernel_package": "stubbed kernel package"}


def test_a_replaced_part_of_an_engine_is_said_on_the_first_screen(text_only: str) -> None:
    found = replay(
        lambda vocab: plan_requests(load_workload("shared-prefix-1024"), vocab_size=vocab, limit=2, scale=0.05),
        parse_arms([f"a={text_only}"]),
        {"a": Replaced(EngineOptions())},
        ReplaySettings(pairs=1, warm_up_requests=0),
    )
    assert found.arms[0].label == "SGLang with a stubbed kernel package"
    console = Console(file=io.StringIO(), width=120)
    terminal(new_document(found, command_line=(), provenance={}), console)
    assert isinstance(console.file, io.StringIO)
    assert "a: SGLang with a stubbed kernel package." in console.file.getvalue().splitlines()[:6]


def test_settings_are_of_the_engine_and_not_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"vllm_config": {"block_size": 16}, "system_env": {"cpu_info": "many"}, "vllm_env": {"X": 1}}
    monkeypatch.setattr("kvbench.engines.url.server_info", lambda *_args, **_named: info)
    endpoint = Endpoint(url="http://127.0.0.1:9", model="m", dialect="vllm", version="0.32.0")
    found = server_settings(endpoint, timeout_s=1)
    assert found == {"vllm_config.block_size": 16, "dialect": "vllm", "version": "0.32.0"}


def test_a_server_without_a_known_reset_says_so(text_only: str) -> None:
    report = reset_caches(detect(text_only), timeout_s=5)
    assert not report.ok
    assert "no reset is known" in report.steps[0].detail


def test_another_model_than_the_served_ones_is_refused(text_only: str) -> None:
    with pytest.raises(UsageError, match="serves m, not 'n'"):
        detect(text_only, model="n")


def test_nobody_there_is_one_sentence() -> None:
    with pytest.raises(KvbenchError, match="is an OpenAI-compatible server running there"):
        detect("http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("http://h:80/v1", ("h", 80, "", False)),
        ("https://h/api/v1/", ("h", 443, "/api", True)),
        ("http://[::1]:8000", ("::1", 8000, "", False)),
    ],
)
def test_an_address_has_a_host_a_port_and_a_base_path(url: str, parts: tuple[str, int, str, bool]) -> None:
    assert split_url(url) == parts


@pytest.mark.parametrize("url", ["ftp://h", "h:80", "http://", "http://h:x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="write it like http"):
        split_url(url)
