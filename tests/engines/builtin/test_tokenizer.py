"""Ids survive being text, and text that comes in pieces is the text that comes at once."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import UsageError
from kvbench.engines.builtin.tokenizer import ByteTokenizer, load_tokenizer

VOCABULARY = 320
TOKENIZER = ByteTokenizer(VOCABULARY)
# pieces that collide with the spelling of an id, more often than chance would have it
PIECES = st.sampled_from([list(b"<|300|>"), list(b"<|"), list(b"<|3"), [300], [195], list("é".encode()), list(b"|>")])
IDS = st.lists(st.one_of(PIECES, st.lists(st.integers(0, VOCABULARY - 1), max_size=6)), max_size=12).map(
    lambda parts: [token for part in parts for token in part]
)


@given(IDS)
def test_any_ids_come_back_from_their_text(ids: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


@given(st.text())
def test_any_text_comes_back_from_its_ids(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(IDS, st.lists(st.integers(0, 40), max_size=10))
def test_text_in_pieces_is_the_text_at_once(ids: list[int], cuts: list[int]) -> None:
    stream = TOKENIZER.stream()
    text, begin = "", 0
    for end in [*sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]:
        text += stream.push(ids[begin:end])
        begin = end
    assert text + stream.finish() == TOKENIZER.decode(ids)


def test_half_a_character_is_held_back_and_none_is_lost() -> None:
    stream = TOKENIZER.stream()
    assert [stream.push([byte]) for byte in "a€".encode()] == ["a", "", "", "€"]
    assert stream.push([0xE2, 0x82]) == ""
    assert stream.finish() == "<|226|><|130|>"


def test_bytes_are_ids_and_other_ids_are_spelled() -> None:
    assert TOKENIZER.encode("Aé") == [65, 0xC3, 0xA9]
    assert TOKENIZER.decode([65, 300, 0xC3]) == "A<|300|><|195|>"
    assert TOKENIZER.encode("<|319|><|320|>") == [319, *b"<|320|>"]  # 320 is no id of this vocabulary


def test_a_small_vocabulary_takes_ids_only() -> None:
    with pytest.raises(UsageError, match="send token ids"):
        ByteTokenizer(200).encode("a")
    assert ByteTokenizer(200).decode([65]) == "A"


def test_a_conversation_keeps_its_beginning_when_it_goes_on() -> None:
    turns = [{"role": "user", "content": "hi"}]
    first = TOKENIZER.chat(turns)
    answer = [200, 300, 65]
    later = TOKENIZER.chat(
        [
            *turns,
            {"role": "assistant", "content": TOKENIZER.decode(answer)},
            {"role": "user", "content": [{"text": "?"}]},
        ]
    )
    assert later[: len(first) + len(answer)] == [*first, *answer]


def _word_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def test_a_directory_brings_its_own_tokenizer(tmp_path: Path) -> None:
    _word_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, VOCABULARY)
    text = "Grüße, 世界!"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "hi"}])) == "user: hi\nassistant:"
    assert tokenizer.version != load_tokenizer(None, VOCABULARY).version


def test_what_a_chat_template_refuses_is_an_error_of_the_request(tmp_path: Path) -> None:
    _word_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}", encoding="utf-8")
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        load_tokenizer(tmp_path, VOCABULARY).chat([{"role": "user", "content": "hi"}])


def test_half_a_surrogate_pair_does_not_break_a_tokenizer(tmp_path: Path) -> None:
    _word_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, VOCABULARY)
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
