"""Prompts as text, for endpoints that take no token ids, with a token count that the server's own can be held against.

Random token ids do not survive being written out and tokenized again. So only ids are used that do: `text_form` looks
for words that stand on their own, and checks that texts made of them come back as the same ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kvbench.core.errors import KvbenchError
from kvbench.workloads.base import Prompt

MOST_WORDS = 4096
_TRIALS = 32
_TRIAL_TOKENS = 256
_COMMON_WORDS = """
the of and to in is was for on that with he be at by had not are but from or have an they which one you were all her
she there would their we him been has when who will no more if out so up said what its about than into them can only
other time new some could these two may first then do any like my now over such our man me even most made after also
did many off before must well back through years much where your way down should because long each just state those
people too how little good world make very year still see own work men day get here old life both between being
under three never know same last another while us might great go come since against right came take used himself few
house use place during high without again home around small however found part school thought went say general once
upon number water every until away something fact hand system program public left side
"""
PLAIN_WORDS = tuple(_COMMON_WORDS.split())


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """Writes prompts that were planned with `vocab_size` = `form.vocab_size`.

    `extra_tokens` are those that the tokenizer puts around every text, such as a begin-of-text mark. `exact` says
    whether counts come from the endpoint's own tokenizer; otherwise they are a guess of one token a word.
    """

    words: tuple[str, ...]
    extra_tokens: int
    exact: bool

    @property
    def vocab_size(self) -> int:
        """Different words: what a plan has to be made with."""
        return len(self.words)

    def text(self, prompt: Prompt) -> str:
        """The prompt's text, with synthetic answers: an engine's own are ids of its vocabulary, not of these words."""
        if prompt.vocab_size > self.vocab_size:
            raise KvbenchError(
                f"the plan has {prompt.vocab_size} token ids and this text form {self.vocab_size} words; "
                f"plan with vocab_size={self.vocab_size}"
            )
        return "".join(self.words[one] for one in prompt.token_ids())

    def expected_tokens(self, prompt: Prompt) -> int:
        """What the server should count for it (`usage.prompt_tokens` of a completion; a chat template adds its own)."""
        return len(prompt) + self.extra_tokens


def plain_text_form() -> TextForm:
    """Common English words, for an endpoint whose tokenizer is not at hand: most count each as one token."""
    words = tuple(f" {word}" for word in dict.fromkeys(PLAIN_WORDS))
    return TextForm(words=words, extra_tokens=0, exact=False)


def text_form(tokenizer: Tokenizer, vocab_size: int, *, seed: int = 0) -> TextForm:
    """Words of this tokenizer that come back as the same ids in any order; KvbenchError where there are too few."""
    extra = len(tokenizer.encode(" a")) - len(_inner(tokenizer, " a"))
    for first in (" ", ""):  # words with a space before them are tokenized apart from each other by every common model
        found = _candidates(tokenizer, vocab_size, first)
        if len(found) >= 16 and _survive(tokenizer, [token for token, _ in found], seed):
            return TextForm(words=tuple(word for _, word in found), extra_tokens=extra, exact=True)
    raise KvbenchError(
        "this tokenizer has too few tokens that survive being written as text; send token ids instead, if the endpoint "
        "takes them"
    )


def _candidates(tokenizer: Tokenizer, vocab_size: int, first: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for token in range(vocab_size):
        word = tokenizer.decode([token])
        letters = word[len(first) :]
        plain = word.startswith(first) and letters.isascii() and letters.isalnum() and letters == letters.lower()
        if plain and _inner(tokenizer, word + word) == [token, token]:
            found.append((token, word))
            if len(found) == MOST_WORDS:
                break
    return found


def _survive(tokenizer: Tokenizer, tokens: list[int], seed: int) -> bool:
    random = Random(seed)
    for _ in range(_TRIALS):
        ids = random.choices(tokens, k=_TRIAL_TOKENS)
        if _inner(tokenizer, "".join(tokenizer.decode([one]) for one in ids)) != ids:
            return False
    return True


def _inner(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of the text alone, without what the tokenizer puts before and after every text."""
    ids, around = list(tokenizer.encode(text)), list(tokenizer.encode(""))
    while around and ids and ids[0] == around[0]:
        ids, around = ids[1:], around[1:]
    while around and ids and ids[-1] == around[-1]:
        ids, around = ids[:-1], around[:-1]
    return ids
