from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvbench.workloads.base import Prompt
from kvbench.workloads.prompts import text_key
from kvbench.workloads.reuse import PrefixTree, ReuseCount

# few keys and lengths, so that prompts meet, part, and end inside each other; the keys of 31-bit token ids differ from
# the first token on
KEYS = st.sampled_from([text_key(5, one) for one in range(4)])
PIECES = st.lists(st.tuples(KEYS, st.integers(1, 12)), min_size=1, max_size=5)


def tokens_of(pieces: list[tuple[int, int]]) -> list[int]:
    keys, lengths = array("Q", [key for key, _ in pieces]), array("I", [size for _, size in pieces])
    return list(Prompt(keys=keys, lengths=lengths, vocab_size=1 << 31).token_ids())


@given(st.lists(PIECES, max_size=8))
def test_shared_tokens_are_the_longest_prefix_in_common_with_an_earlier_prompt(
    prompts: list[list[tuple[int, int]]],
) -> None:
    tree = PrefixTree()
    earlier: list[list[int]] = []
    distinct: set[tuple[int, ...]] = set()
    for pieces in prompts:
        tokens = tokens_of(pieces)
        wanted = max((_common(tokens, other) for other in earlier), default=0)
        got = tree.add(array("Q", [key for key, _ in pieces]), array("I", [size for _, size in pieces]))
        assert got == wanted
        earlier.append(tokens)
        distinct |= {tuple(tokens[: end + 1]) for end in range(len(tokens))}
    assert tree.tokens == len(distinct)


def _common(one: list[int], other: list[int]) -> int:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def test_figures_add_up_and_an_answer_counts_only_where_the_next_turn_has_it() -> None:
    plain, with_answers = ReuseCount(with_answers=False), ReuseCount(with_answers=True)
    for count, shared in ((plain, 10), (with_answers, 15)):
        assert count.add(array("Q", [1]), array("I", [10]), answer_key=2, max_tokens=5) == 0
        assert count.add(array("Q", [1, 2, 3]), array("I", [10, 5, 4]), answer_key=4, max_tokens=5) == shared
        figures = count.figures()
        assert (figures.hit_tokens, figures.prompt_tokens, figures.output_tokens) == (shared, 29, 10)
        assert (figures.num_requests, figures.num_requests_with_hit) == (2, 1)
        assert figures.hit_ratio == shared / 29
        assert figures.working_set_tokens == 29 - shared
        assert figures.working_set_bytes(1000) == (29 - shared) * 1000
    assert plain.figures().definition != with_answers.figures().definition
    assert ReuseCount(with_answers=False).figures().hit_ratio is None
