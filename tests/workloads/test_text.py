from collections.abc import Sequence

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.text import plain_text_form, text_form
from kvbench.workloads.workload import load_workload


class Bytes:
    """A byte-level tokenizer with a begin-of-text mark, as the built-in engine may have."""

    vocab_size = 258

    def encode(self, text: str) -> Sequence[int]:
        return [256, *text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one for one in ids if one < 256).decode(errors="replace")


class Words:
    """Greedy longest match over words with a space before them, as byte-pair encodings end up doing."""

    def __init__(self) -> None:
        self.texts = [
            *(chr(one) for one in range(32, 127)),
            *(f" {a}{b}" for a in "abcdefg" for b in "xyzuvw"),
            " a",
            "ax",
        ]

    def encode(self, text: str) -> Sequence[int]:
        ids = []
        while text:
            best = max((one for one in self.texts if text.startswith(one)), key=len)
            ids.append(self.texts.index(best))
            text = text[len(best) :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[one] for one in ids)


class Lossy(Bytes):
    """Nothing comes back as it was."""

    def encode(self, text: str) -> Sequence[int]:
        return [256, *(one ^ 1 for one in text.encode())]


@pytest.mark.parametrize(("tokenizer", "vocab_size", "extra"), [(Bytes(), 258, 1), (Words(), 139, 0)])
def test_a_prompts_text_is_tokenized_to_exactly_the_planned_count(
    tokenizer: Bytes | Words, vocab_size: int, extra: int
) -> None:
    form = text_form(tokenizer, vocab_size)
    plan = plan_requests(load_workload("demo"), vocab_size=form.vocab_size, limit=4)
    texts = [form.text(one.recipe) for one in plan.requests]
    for one, text in zip(plan.requests, texts, strict=True):
        assert len(tokenizer.encode(text)) == form.expected_tokens(one.recipe) == one.prompt_tokens + extra
    same = [text for text, one in zip(texts, plan.requests, strict=True) if one.group == plan.requests[0].group]
    prefix = list(tokenizer.encode(same[0]))[: 1536 + extra]
    assert all(list(tokenizer.encode(text))[: 1536 + extra] == prefix for text in same)
    assert len(set(texts)) == 4


def test_a_tokenizer_that_gives_nothing_back_is_refused() -> None:
    with pytest.raises(KvbenchError, match="send token ids instead"):
        text_form(Lossy(), 258)


def test_plain_words_are_a_labelled_guess() -> None:
    form = plain_text_form()
    assert not form.exact
    assert form.vocab_size > 150
    plan = plan_requests(load_workload("demo"), vocab_size=form.vocab_size, limit=1)
    assert len(form.text(plan.requests[0].recipe).split()) == form.expected_tokens(plan.requests[0].recipe) == 1600


def test_a_plan_with_more_ids_than_words_is_refused() -> None:
    plan = plan_requests(load_workload("demo"), vocab_size=32_000, limit=1)
    with pytest.raises(KvbenchError, match="plan with vocab_size="):
        plain_text_form().text(plan.requests[0].recipe)
