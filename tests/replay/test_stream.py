import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.replay.load.stream import Stream


def chunk(text: str = "a", **extra: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], "usage": None, **extra}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes, **options: bool) -> Stream:
    stream = Stream(**options)
    for number, piece in enumerate(pieces, start=1):
        stream.feed(piece, number)
    stream.end()
    return stream


def test_each_chunk_has_the_time_of_its_last_byte() -> None:
    first, second = chunk("a"), chunk("b")
    found = read(first[:10], first[10:], second, LAST, DONE)
    assert list(found.chunks) == [2, 3]
    assert (found.first_choice_ns, found.first_text_ns, found.done) == (2, 2, True)
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (9, 4, 8)


def test_the_first_choice_may_be_empty_and_the_first_text_comes_later() -> None:
    found = read(chunk(""), chunk(""), chunk("x"), DONE)
    assert (found.first_choice_ns, found.first_text_ns) == (1, 3)


def test_a_null_of_cached_tokens_is_not_a_zero() -> None:
    def told(details: object) -> int | None:
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": details}
        return read(chunk(), chunk(usage=usage), DONE).cached_tokens

    assert told(None) is None
    assert told({"cached_tokens": None}) is None
    assert told({"cached_tokens": 0}) == 0


def test_text_that_looks_like_usage_is_text() -> None:
    found = read(chunk("a"), chunk('{"usage":{"prompt_tokens":1}} {"error":1}'), LAST, DONE)
    assert (found.prompt_tokens, found.error, len(found.chunks)) == (9, None, 2)


def test_tokens_come_from_usage_where_a_chunk_carries_two() -> None:
    found = read(chunk("a b"), chunk("c d"), LAST, DONE)
    assert (len(found.chunks), found.output_tokens) == (2, 4)


def test_comments_other_fields_and_carriage_returns_are_fine() -> None:
    found = read(b": ping\n\n", b"event: x\r\nid: 7\r\n" + chunk().replace(b"\n\n", b"\r\n\r\n"), DONE)
    assert (found.invalid, len(found.chunks), found.done) == (0, 1, True)


@pytest.mark.parametrize("bad", [b"data: {broken\n\n", b"data: nonsense\n\n", b"<html>\n\n", b'data: {"a": }\n\n'])
def test_an_event_that_is_no_json_object_is_counted(bad: bytes) -> None:
    assert read(bad, chunk(), DONE).invalid == 1


def test_a_chunk_that_was_not_read_on_the_way_is_read_after_the_run() -> None:
    stream = Stream(room=1000)
    for piece in (chunk(), chunk(), b'data: {"choices": ]}\n\n', DONE):
        stream.feed(piece, 1)
    assert stream.check_kept() == (2, 1)


def test_an_error_in_the_stream_is_an_error() -> None:
    found = read(chunk(), b'data: {"error": {"message": "out of blocks"}}\n\n')
    assert found.error == "error in the stream: out of blocks"


def test_sglang_tells_tiers_of_a_request() -> None:
    details = {"cached_tokens_details": {"device": 64, "host": 128, "storage": 0, "storage_backend": "file"}}
    assert read(chunk(), chunk(sglext=details), DONE, tier_details=True).cached_by_tier == {"hbm": 64, "dram": 128}


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 6))
def test_where_the_bytes_are_cut_does_not_matter(cuts: list[int], chunks: int) -> None:
    text = chunk("x") * chunks + LAST + DONE
    whole, parts = Stream(), Stream()
    whole.feed(text, 1)
    at = 0
    for size in cuts:
        parts.feed(text[at : at + size], 1)
        at += size
    parts.feed(text[at:], 1)
    assert (len(parts.chunks), parts.output_tokens, parts.done, parts.invalid) == (chunks, 4, True, 0)
    assert len(whole.chunks) == chunks


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_any_bytes_are_read_without_an_error(pieces: list[bytes]) -> None:
    read(*pieces)
    read(*pieces, tier_details=True, wants_ids=True)
