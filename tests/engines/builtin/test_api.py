import json
import subprocess
from collections.abc import Iterator

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.builtin.serving import Served, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--null", "--max-body", "64KiB") as found:
        yield found
        assert found.stop() == 0
        assert "Traceback" not in found.log.read_text()


def test_a_completion_has_as_many_tokens_as_asked_and_a_usage(server: Served) -> None:
    reply = server.complete(prompt=[1, 2, 3], max_tokens=5, return_token_ids=True)
    assert reply.status == 200
    body = reply.json()
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "logprobs": None,
            "finish_reason": "length",
            "text": " t0 t1 t2 t3 t4",
            "token_ids": [0, 1, 2, 3, 4],
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0, "cached_tokens_by_tier": {}, "loaded_bytes": 0},
    }


@pytest.mark.parametrize("prompt", ["abc", ["abc"], [97, 98, 99], [[97, 98, 99]]])
def test_a_prompt_is_text_or_ids_or_a_list_of_one(prompt: object, server: Served) -> None:
    assert server.complete(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"] == 3


def test_a_stream_has_one_event_per_token_and_a_usage_only_if_asked(server: Served) -> None:
    with_usage = server.complete(
        prompt="x", max_tokens=3, stream=True, stream_options={"include_usage": True}, return_token_ids=True
    )
    assert with_usage.headers["content-type"].startswith("text/event-stream")
    events = with_usage.events()
    assert [event["choices"][0]["token_ids"] for event in events[:-1]] == [[0], [1], [2]]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, "length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert len({event["id"] for event in events}) == 1
    assert len(server.complete(prompt="x", max_tokens=3, stream=True).events()) == 3


def test_a_chat_stream_begins_with_the_role(server: Served) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    reply = server.call("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "stream": True})
    deltas = [event["choices"][0]["delta"] for event in reply.events()]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": " t0"}, {"content": " t1"}]


def test_the_request_id_comes_back_if_it_is_printable(server: Served) -> None:
    reply = server.call("/v1/completions", {"prompt": "x", "max_tokens": 1}, X_Request_Id="trace-7/a")
    assert reply.headers["x-request-id"] == "trace-7/a"
    assert reply.json()["id"] == "cmpl-trace-7/a"
    other = server.call("/v1/completions", {"prompt": "x", "max_tokens": 1}, X_Request_Id="a b")
    assert other.headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    ("body", "status", "param", "part"),
    [
        (b"{", 400, None, "not JSON"),
        (b"\xff", 400, None, "not JSON"),
        (b"[" * 60000, 400, None, "nested too deeply"),
        (b"[1]", 400, None, "must be a JSON object"),
        ({}, 400, "prompt", "missing"),
        ({"prompt": ""}, 400, "prompt", "empty"),
        ({"prompt": []}, 400, "prompt", "empty"),
        ({"prompt": ["a", "b"]}, 400, "prompt", "several prompts"),
        ({"prompt": [1, "a"]}, 400, "prompt", "list of token ids"),
        ({"prompt": [True]}, 400, "prompt", "list of token ids"),
        ({"prompt": [-1]}, 400, "prompt", "outside 0.."),
        ({"prompt": [2**31]}, 400, "prompt", "outside 0.."),
        ({"prompt": "x", "n": 2}, 400, "n", "must be 1"),
        ({"prompt": "x", "best_of": 3}, 400, "best_of", "must be 1"),
        ({"prompt": "x", "echo": True}, 400, "echo", "not supported"),
        ({"prompt": "x", "logprobs": 5}, 400, "logprobs", "not supported"),
        ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "at least 1"),
        ({"prompt": "x", "max_tokens": 1.5}, 400, "max_tokens", "whole number"),
        ({"prompt": "x", "max_tokens": 2**21}, 400, "max_tokens", "do not fit"),
        ({"prompt": "x", "temperature": "hot"}, 400, "temperature", "number"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "temperature", "number"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p", "number"),
        ({"prompt": "x", "seed": 1.0}, 400, "seed", "whole number"),
        ({"prompt": "x", "stop": [""]}, 400, "stop", "not empty"),
        ({"prompt": "x", "stream": 1}, 400, "stream", "true or false"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
        ({"prompt": "x", "cache_salt": 3}, 400, "cache_salt", "text"),
        ({"prompt": "x", "model": "other"}, 404, "model", "not served here"),
    ],
)
def test_a_wrong_body_gets_one_sentence_in_openais_form(
    body: object, status: int, param: str | None, part: str, server: Served
) -> None:
    reply = server.call("/v1/completions", body)
    error = reply.json()["error"]
    assert (reply.status, error["param"]) == (status, param)
    assert part in error["message"]


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [("/v1/nothing", "GET", 404), ("/v1/completions", "GET", 405), ("/metrics", "POST", 405), ("/tiers", "PUT", 405)],
)
def test_other_paths_and_methods_are_refused(path: str, method: str, status: int, server: Served) -> None:
    reply = server.call(path, method=method)
    assert reply.status == status
    assert reply.json()["error"]["code"] == status
    assert ("allow" in reply.headers) == (status == 405)


def test_a_body_above_the_limit_is_a_413(server: Served) -> None:
    assert server.complete(prompt="x" * 70000).status == 413


def test_models_version_and_health(server: Served) -> None:
    assert [model["id"] for model in server.call("/v1/models").json()["data"]] == ["null"]
    assert server.call("/version").json()["version"]
    assert server.call("/health").status == 200
    assert server.call("/server_info").json()["engine"] == "kvbench"


def test_the_openai_client_works(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        assert [model.id for model in client.models.list()] == ["null"]
        done = client.completions.create(model="null", prompt="hello", max_tokens=3)
        assert (done.choices[0].text, done.usage and done.usage.total_tokens) == (" t0 t1 t2", 8)
        chat = client.chat.completions.create(
            model="null", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=2
        )
        assert chat.choices[0].message.content == " t0 t1"
        stream = client.chat.completions.create(
            model="null",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == " t0 t1 t2"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3
        assert [piece.choices[0].text for piece in client.completions.create(
            model="null", prompt=[1, 2], max_tokens=2, stream=True
        )] == [" t0", " t1"]  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="n must be 1"):
            client.completions.create(model="null", prompt="x", n=2)


def test_curl_prints_a_stream_as_it_comes(server: Served) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True})
    command = ["curl", "-sSN", "--max-time", "10", f"{server.url}/v1/completions", "-d", body]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    assert [line[:6] for line in printed.splitlines() if line] == ["data: "] * 3
    assert printed.endswith("data: [DONE]\n\n")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        "prompt",
        "messages",
        "max_tokens",
        "stream",
        "stream_options",
        "stop",
        "seed",
        "temperature",
        "model",
        "n",
        "tiers",
    ]
)
PATHS = st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tiers", "/cache/clear"])


@settings(max_examples=40)
@given(PATHS, st.dictionaries(FIELDS, JSON, max_size=5) | JSON, st.booleans())
def test_whatever_json_comes_the_answer_is_a_completion_or_an_error(
    server: Served, path: str, fields: object, cut: bool
) -> None:
    text = json.dumps(fields).encode()
    reply = server.call(path, text[: len(text) // 2] if cut else text)
    assert reply.status in (200, 400, 404)
    if reply.status != 200:
        assert reply.json()["error"]["message"]
