"""OpenAI's completions and chat completions: bodies to `Generation`s, generations to JSON or events."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.engines.builtin.generation import (
    ApiError,
    FinishReason,
    Generation,
    PromptUse,
    ServedModel,
    Tokenizer,
    Usage,
)
from kvbench.engines.builtin.http import Exchange, Outlet, error_body

_MAX_STOPS = 16
_DEFAULT_MAX_TOKENS = 16
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_ONLY_ONE = ("n", "best_of")
_REFUSED = ("suffix", "logprobs", "top_logprobs", "tools", "response_format", "logit_bias")


class Ask:
    """A checked body: the generation, and how the answer is to look."""

    __slots__ = ("chat", "generation", "include_usage", "return_token_ids", "stream", "tier_details")

    def __init__(
        self,
        generation: Generation,
        *,
        chat: bool,
        stream: bool,
        include_usage: bool,
        return_token_ids: bool,
        tier_details: bool,
    ) -> None:
        self.generation = generation
        self.chat = chat
        self.stream = stream
        self.include_usage = include_usage
        self.return_token_ids = return_token_ids
        self.tier_details = tier_details


def parse_ask(body: bytes, *, chat: bool, request_id: str, model: ServedModel, tokenizer: Tokenizer) -> Ask:
    """The request in a body of `/v1/completions` or `/v1/chat/completions`, or `ApiError`."""
    fields = parse_object(body)
    name = fields.get("model")
    if name is not None and name != model.name:
        raise ApiError(
            f"the model {name!r} is not served here; this server has {model.name!r}",
            status=404,
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )
    for key in _ONLY_ONE:
        if fields.get(key) not in (None, 1):
            raise ApiError(f"{key} must be 1: this server gives one answer per request", param=key)
    for key in _REFUSED:
        if fields.get(key) not in (None, False, [], {}, "") and fields[key] != {"type": "text"}:
            raise ApiError(f"{key} is not supported by this server; leave it out", param=key)
    if fields.get("echo"):
        raise ApiError("echo is not supported by this server; leave it out", param="echo")
    stream = _flag(fields, "stream")
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError('stream_options is an object such as {"include_usage": true}', param="stream_options")
    if options and not stream:
        raise ApiError("stream_options goes only with stream: true", param="stream_options")
    prompt = _chat_prompt(fields, tokenizer) if chat else _prompt(fields, model, tokenizer)
    room = model.max_context_tokens - len(prompt)
    if room < 1:
        raise ApiError(
            f"the prompt has {len(prompt)} tokens and leaves no room for output: the model takes at most "
            f"{model.max_context_tokens} tokens",
            param="messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    default = room if chat else _DEFAULT_MAX_TOKENS
    max_tokens = _whole(fields, "max_completion_tokens", None, least=1) if chat else None
    if max_tokens is None:
        max_tokens = _whole(fields, "max_tokens", min(default, room), least=1) or 1
    if max_tokens > room:
        raise ApiError(
            f"max_tokens {max_tokens} and a prompt of {len(prompt)} tokens do not fit into the "
            f"{model.max_context_tokens} tokens of this model",
            param="max_tokens",
            code="context_length_exceeded",
        )
    generation = Generation(
        request_id=request_id,
        prompt_ids=prompt,
        max_tokens=max_tokens,
        temperature=_number(fields, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(fields, "top_p", 1.0, 1e-9, 1.0),
        seed=_whole(fields, "seed", None, least=-(2**63), most=2**63 - 1),
        stop=_stops(fields),
        ignore_eos=_flag(fields, "ignore_eos"),
        cache_salt=_text(fields, "cache_salt"),
        stream=stream,
    )
    return Ask(
        generation,
        chat=chat,
        stream=stream,
        include_usage=bool(options and _flag(options, "include_usage")),
        return_token_ids=_flag(fields, "return_token_ids"),
        tier_details=_flag(fields, "return_cached_tokens_details"),
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body, or `ApiError`."""
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object")
    return fields


def request_id(exchange: Exchange, number: int, prefix: str) -> str:
    """The client's `X-Request-Id` where it is printable, or one of our own."""
    given = exchange.request.headers.get(b"x-request-id")
    if given is not None:
        text = given.decode("latin-1")
        if _REQUEST_ID.fullmatch(text):
            return text
    return f"{prefix}{number:08x}"


def _prompt(fields: dict[str, Any], model: ServedModel, tokenizer: Tokenizer) -> Sequence[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids: Sequence[int] = tokenizer.encode(prompt)
    elif isinstance(prompt, list):
        if prompt and set(map(type, prompt)) != {int}:
            several = all(isinstance(part, str | list) for part in prompt)
            raise ApiError(
                "prompt holds several prompts; send one per request"
                if several
                else "prompt must be a text or a list of token ids",
                param="prompt",
            )
        if prompt and not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            raise ApiError(f"prompt has a token id outside 0..{model.vocab_size - 1}", param="prompt")
        ids = prompt
    else:
        raise ApiError("prompt is missing: a text or a list of token ids", param="prompt")
    if not ids:
        raise ApiError("prompt is empty", param="prompt")
    return ids


def _chat_prompt(fields: dict[str, Any], tokenizer: Tokenizer) -> Sequence[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages is missing: a list of objects with role and content", param="messages")
    return tokenizer.chat([_message(message) for message in messages])


def _message(message: object) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError("every message is an object with a role and a content", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError('this server takes text only: every part is {"type": "text", "text": …}', param="messages")
        content = "".join(str(part) for part in parts)
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise ApiError("the content of a message is a text", param="messages")
    return {"role": message["role"], "content": content}


def _flag(fields: Mapping[str, Any], key: str) -> bool:
    value = fields.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ApiError(f"{key} must be true or false", param=key)
    return value


def _text(fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 1024:
        raise ApiError(f"{key} must be a text of at most 1024 characters", param=key)
    return value


def _whole(fields: Mapping[str, Any], key: str, default: int | None, *, least: int, most: int = 2**31) -> int | None:
    value = fields.get(key)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise ApiError(f"{key} must be a whole number, at least {least}", param=key)
    return value


def _number(fields: Mapping[str, Any], key: str, default: float, least: float, most: float) -> float:
    value = fields.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
        raise ApiError(f"{key} must be a number between {least:g} and {most:g}", param=key)
    return float(value)


def _stops(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"stop must be a text or a list of at most {_MAX_STOPS} texts that are not empty", param="stop")
    return tuple(stops)


FormatUsage = Callable[[Usage], dict[str, Any]]


class Answer:
    """Turns one generation into the events or the one body that its client asked for."""

    __slots__ = (
        "_ask",
        "_exchange",
        "_extension",
        "_format_usage",
        "_head",
        "_ids",
        "_leave_usage_out",
        "_reason",
        "_request_id",
        "_started",
        "_tail",
        "_texts",
        "_tokens_per_event",
    )

    def __init__(
        self,
        exchange: Outlet,
        ask: Ask,
        *,
        model: str,
        format_usage: FormatUsage,
        extension: FormatUsage | None = None,
        null_usage: bool = False,
        tokens_per_event: int = 1,
        echo_request_id: bool = True,
        leave_usage_out: bool = False,
    ) -> None:
        self._exchange = exchange
        self._ask = ask
        self._format_usage = format_usage
        self._extension = extension if ask.tier_details else None
        self._tail = ',"usage":null}' if null_usage else "}"
        self._reason: FinishReason | None = None
        self._tokens_per_event = tokens_per_event
        self._request_id = ask.generation.request_id if echo_request_id else None
        self._leave_usage_out = leave_usage_out
        name = ("chatcmpl-" if ask.chat else "cmpl-") + ask.generation.request_id
        kind = ("chat.completion" if ask.chat else "text_completion") + (".chunk" if ask.chat and ask.stream else "")
        self._head = (
            f'{{"id":{json.dumps(name)},"object":"{kind}","created":{int(time.time())},"model":{json.dumps(model)},'
            '"choices":['
        )
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._started = False

    def begin(self) -> None:
        """The head of a stream: the request is accepted."""
        if self._ask.stream and not self._exchange.streaming:
            echo = "" if self._request_id is None else f"x-request-id: {self._request_id}\r\n"
            self._exchange.start_stream(echo.encode("ascii"))

    def prompt_ready(self, prompt: PromptUse) -> None:
        """Nothing to tell yet."""

    def tokens(self, ids: Sequence[int], texts: Sequence[str], reason: FinishReason | None) -> None:
        """Streams tokens, or keeps them for the whole answer."""
        self._ids += ids
        self._texts += texts
        self._reason = reason
        if self._ask.stream and (reason is not None or len(self._ids) >= self._tokens_per_event):
            self.begin()
            self._flush()

    def _flush(self) -> None:
        write, step, count = self._exchange.event, self._tokens_per_event, len(self._ids)
        if self._ask.chat and not self._started:
            write(self._event('{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}'))
        self._started = True
        for start in range(0, max(count, 1), step):
            ids, text = self._ids[start : start + step], "".join(self._texts[start : start + step])
            write(self._event(self._choice(text, ids, self._reason if start + step >= count else None)))
        self._ids.clear()
        self._texts.clear()

    def _choice(self, text: str, ids: Sequence[int], reason: FinishReason | None) -> str:
        finish = "null" if reason is None else f'"{reason}"'
        token_ids = f',"token_ids":{json.dumps(list(ids))}' if self._ask.return_token_ids else ""
        content = f'"delta":{{"content":{_quoted(text)}}}' if self._ask.chat else f'"text":{_quoted(text)}'
        return f'{{"index":0,{content},"logprobs":null,"finish_reason":{finish}{token_ids}}}'

    def _event(self, choice: str) -> bytes:
        return f"{self._head}{choice}]{self._tail}".encode("ascii")

    def finished(self, usage: Usage) -> None:
        """The usage if it was asked for, and the end; or the whole answer."""
        if not self._ask.stream:
            self._whole(usage)
            return
        if self._extension is not None:
            self._exchange.event(f"{self._head}]{self._more(usage)}{self._tail}".encode("ascii"))
        if self._ask.include_usage and not self._leave_usage_out:
            counted = json.dumps(self._format_usage(usage), separators=(",", ":"))
            self._exchange.event(f'{self._head}],"usage":{counted}}}'.encode("ascii"))
        self._exchange.event(b"[DONE]")
        self._exchange.end_stream()

    def _more(self, usage: Usage) -> str:
        """Members of the body that only some engines have, each after a comma."""
        more = {} if self._extension is None else self._extension(usage)
        return "".join(f",{json.dumps(name)}:{json.dumps(value)}" for name, value in more.items())

    def _whole(self, usage: Usage) -> None:
        text = "".join(self._texts)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._reason}
        choice |= {"message": {"role": "assistant", "content": text}} if self._ask.chat else {"text": text}
        if self._ask.return_token_ids:
            choice["token_ids"] = self._ids
        counted = "" if self._leave_usage_out else f',"usage":{json.dumps(self._format_usage(usage))}'
        body = f"{self._head}{json.dumps(choice)}]{counted}{self._more(usage)}}}"
        echo = () if self._request_id is None else (("x-request-id", self._request_id),)
        self._exchange.send(200, body.encode("ascii"), headers=echo)

    def failed(self, error: ApiError) -> None:
        """An error as status, or as event if the stream has begun."""
        if self._exchange.streaming:
            self._exchange.event(
                error_body(error.message, error.kind, param=error.param, code=error.code or error.status)
            )
            self._exchange.event(b"[DONE]")
            self._exchange.end_stream()
        else:
            send_error(self._exchange, error)


def send_error(exchange: Outlet, error: ApiError, *, headers: Sequence[tuple[str, str]] = ()) -> None:
    """The error as a response."""
    if error.retry_after_s is not None:
        headers = (*headers, ("retry-after", str(error.retry_after_s)))
    body = error_body(error.message, error.kind, param=error.param, code=error.code or error.status)
    exchange.send(error.status, body, headers=headers)


_QUOTED: dict[str, str] = {}


def _quoted(text: str) -> str:
    """JSON of a piece of text, remembered while it is short: a stream repeats its tokens."""
    known = _QUOTED.get(text)
    if known is None:
        known = json.dumps(text)
        if len(_QUOTED) < 65536 and len(text) < 32:
            _QUOTED[text] = known
    return known
