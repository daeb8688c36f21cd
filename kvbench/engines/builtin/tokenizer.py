"""Tokenizers without downloads: bytes as ids, or what a model directory brings."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kvbench.core.errors import MissingDependencyError, UsageError

Message = Mapping[str, Any]

NUM_BYTE_IDS = 256
EOS_ID, TURN_START_ID, TURN_END_ID = 256, 257, 258
MIN_VOCABULARY = 259
_SPELLED = re.compile(r"<\|(0|[1-9][0-9]{0,8})\|>")
_SPELLED_BEGINNING = re.compile(r"<(\|((0|[1-9][0-9]{0,8})\|?)?)?\Z")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
_MAX_HELD_IDS = 64


class TextStream(Protocol):
    """Turns ids into text as they come. The pieces joined are what `decode` gives for all ids at once."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these ids; half a character is held back."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    version: str

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...

    def stream(self) -> TextStream:
        """A decoder for one growing output."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the assistant's next turn begins."""
        ...


class ByteTokenizer:
    """One id per UTF-8 byte; ids without a byte are spelled by number, so any ids survive being text.

    Id 65 is `A`, id 300 is `<|300|>`, and so is a byte that is no part of a character: `<|195|>`. Ids to text to ids
    gives the same ids, always. Text to ids to text gives the same text, unless the text spells the id of a byte.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.version = "bytes-1"

    def encode(self, text: str) -> list[int]:
        """Bytes as ids, and `<|N|>` as id N where the model has one."""
        if self.vocab_size < MIN_VOCABULARY:
            raise UsageError(
                f"a vocabulary of {self.vocab_size} has no room for 256 bytes and {MIN_VOCABULARY - NUM_BYTE_IDS} "
                "special ids; send token ids instead of text"
            )
        ids: list[int] = []
        end = 0
        for match in _SPELLED.finditer(text):
            if (number := int(match[1])) < self.vocab_size:
                ids += text[end : match.start()].encode("utf-8", "surrogatepass")
                ids.append(number)
                end = match.end()
        ids += text[end:].encode("utf-8", "surrogatepass")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Characters where bytes form them, else numbers."""
        stream = _ByteStream(self.vocab_size)
        return stream.push(ids) + stream.finish()

    def stream(self) -> TextStream:
        """Holds back bytes of an unfinished character, and a beginning of what would read as a spelled id."""
        return _ByteStream(self.vocab_size)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Each turn as start id, role, newline, content, end id; then the start of the assistant's."""
        ids: list[int] = []
        for role, content in _turns(messages):
            ids += [TURN_START_ID, *self.encode(f"{role}\n{content}"), TURN_END_ID]
        return [*ids, TURN_START_ID, *self.encode("assistant\n")]


class _ByteStream:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._bytes = bytearray()  # not yet known to be whole characters
        self._text = ""  # whole characters that may be the beginning of what reads as a spelled id

    def push(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        for token in ids:
            if token < NUM_BYTE_IDS:
                self._bytes.append(token)
            else:
                parts += [self.finish(), f"<|{token}|>"]
        parts.append(self._settled(final=False))
        return "".join(parts)

    def finish(self) -> str:
        return self._settled(final=True)

    def _settled(self, *, final: bool) -> str:
        out: list[str] = []
        while self._bytes:
            try:
                self._text += self._bytes.decode("utf-8")
                self._bytes.clear()
            except UnicodeDecodeError as error:
                self._text += self._bytes[: error.start].decode("utf-8")
                if not final and error.reason == "unexpected end of data":
                    del self._bytes[: error.start]
                    break
                out += [self._escaped(self._text), f"<|{self._bytes[error.start]}|>"]
                self._text = ""
                del self._bytes[: error.start + 1]
        held = None if final or self._bytes else _SPELLED_BEGINNING.search(self._text)
        split = len(self._text) if held is None else held.start()
        out.append(self._escaped(self._text[:split]))
        self._text = self._text[split:]
        return "".join(out)

    def _escaped(self, text: str) -> str:
        """Text in which nothing reads as a spelled id: the `<` of such a place is itself spelled by number."""
        return _SPELLED.sub(
            lambda match: "<|60|>" + match[0][1:] if int(match[1]) < self._vocab_size else match[0], text
        )


class DirectoryTokenizer:
    """The tokenizer of a model directory, through transformers, from its files alone."""

    def __init__(self, directory: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise MissingDependencyError("transformers", "torch", "a tokenizer of a model directory") from error
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        digest = hashlib.sha256()
        for name in _TOKENIZER_FILES:
            if (file := directory / name).is_file():
                digest.update(json.dumps([name, file.stat().st_size]).encode() + file.read_bytes())
        self.version = digest.hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        """The directory's own ids, with the special ids its tokenizer adds; half of a surrogate pair reads as `?`."""
        text = text.encode("utf-8", "replace").decode("utf-8")
        return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The directory's own text; special ids are written out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def stream(self) -> TextStream:
        """Decodes a short window again at each step, because a token's text may depend on the one before it."""
        return _WindowStream(self)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The directory's chat template, or plain `role: content` lines where it has none."""
        if getattr(self._tokenizer, "chat_template", None) is None:
            lines = [f"{role}: {content}\n" for role, content in _turns(messages)]
            return self.encode("".join([*lines, "assistant:"]))
        from jinja2 import TemplateError

        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise UsageError(f"the chat template of this model refuses these messages: {error}") from error
        return [int(token) for token in ids]


class _WindowStream:
    """Emits what the text of (context + new) has beyond the text of the context."""

    def __init__(self, tokenizer: DirectoryTokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._new: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        self._new += ids
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._new)
        unfinished = text.endswith("\ufffd") and len(self._new) < _MAX_HELD_IDS
        if unfinished or not text.startswith(before):
            return "" if unfinished else self._restart(text)
        return self._restart(text[len(before) :])

    def _restart(self, piece: str) -> str:
        self._context, self._new = self._new, []
        return piece

    def finish(self) -> str:
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._new)
        self._new = []
        return text[len(before) :]


def load_tokenizer(directory: Path | None, vocab_size: int) -> Tokenizer:
    """The directory's tokenizer where it has one, else bytes."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if directory is not None and any((directory / name).is_file() for name in names):
        return DirectoryTokenizer(directory)
    return ByteTokenizer(vocab_size)


def _turns(messages: Sequence[Message]) -> list[tuple[str, str]]:
    return [(str(message.get("role", "user")), _content(message.get("content"))) for message in messages]


def _content(content: object) -> str:
    """The text of a message: a string, or the text parts of a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return ""
