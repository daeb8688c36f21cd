import hashlib
import json
import os
import pickle
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.block_key import prefix_hashes
from kvbench.core.errors import UsageError
from kvbench.workloads.base import Prompt, RequestPlan
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.prompts import key_tokens, scope_base, text_key, text_keys
from kvbench.workloads.workload import load_workload

TRACES = Path(os.environ.get("KVBENCH_TRACES", Path(__file__).parents[3] / "shared" / "data" / "traces"))
VOCABULARIES = st.sampled_from([2, 16, 256, 257, 32_000, 151_936, 1 << 31])


def prompt(keys: list[int], lengths: list[int], vocab_size: int = 32_000, first: int = 0) -> Prompt:
    return Prompt(keys=array("Q", keys), lengths=array("I", lengths), vocab_size=vocab_size, first_token_id=first)


@given(VOCABULARIES, st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 70)), max_size=8), st.integers(0, 3))
def test_a_prompt_has_the_tokens_of_its_pieces_one_after_another_and_no_others(
    vocab_size: int, pieces: list[tuple[int, int]], first: int
) -> None:
    first = min(first, vocab_size - 2)
    whole = prompt([key for key, _ in pieces], [size for _, size in pieces], vocab_size, first)
    apart = [prompt([key], [size], vocab_size, first).token_ids() for key, size in pieces]
    joined = array("I", [token for part in apart for token in part])
    assert whole.token_ids() == joined
    assert len(whole) == len(joined) == sum(size for _, size in pieces)
    assert all(first <= token < vocab_size for token in joined)


@given(VOCABULARIES, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_texts_of_different_keys_differ_within_the_tokens_that_spell_the_key(
    vocab_size: int, one: int, other: int
) -> None:
    spelled = key_tokens(vocab_size)
    assert (prompt([one], [spelled], vocab_size).token_ids() == prompt([other], [spelled], vocab_size).token_ids()) == (
        one == other
    )


@given(st.integers(0, 2**64 - 1), st.integers(1, 600), st.integers(0, 600))
def test_a_shorter_piece_is_a_prefix_of_a_longer_one_of_the_same_name(key: int, short: int, more: int) -> None:
    assert prompt([key], [short]).token_ids() == prompt([key], [short + more]).token_ids()[:short]


@given(st.integers(0, 2**64 - 1), st.sets(st.integers(0, 2**64 - 1), max_size=50))
def test_whole_number_ids_of_one_scope_never_share_a_key(base: int, ids: set[int]) -> None:
    assert len({text_key(base, one) for one in ids}) == len(ids)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(-3, 2**64 + 3) | st.integers(0, 50) | st.text(max_size=3)))
def test_many_keys_at_once_are_those_one_by_one(base: int, names: list[int | str]) -> None:
    assert list(text_keys(base, names)) == [text_key(base, one) for one in names]
    numbers = [one for one in names if isinstance(one, int) and 0 <= one < 2**64]
    assert list(text_keys(base, numbers)) == [text_key(base, one) for one in numbers]


def test_seed_and_scope_make_other_texts_and_strings_are_names_too() -> None:
    bases = {scope_base(seed, scope) for seed in range(20) for scope in ("a", "b")}
    assert len(bases) == 40
    assert text_key(1, "7") != text_key(1, 7)
    assert text_key(1, "x") == text_key(1, "x") != text_key(2, "x")
    assert text_key(1, -3) != text_key(1, 3)


def test_tokens_are_the_same_on_every_machine_and_in_every_version() -> None:
    # written down once; a change here makes earlier results incomparable and needs a note in the changelog
    tokens = prompt([text_key(scope_base(1, "trace/"), 7)], [12]).token_ids()
    assert list(tokens) == RECORDED


RECORDED = [29649, 2825, 21288, 4991, 1, 24361, 30026, 16660, 7301, 17529, 8989, 21193]


def test_the_rest_of_a_text_uses_all_ids_about_equally_often() -> None:
    tokens = prompt([12345], [160_000 + key_tokens(16)], 16).token_ids()[key_tokens(16) :]
    counts = [tokens.count(one) for one in range(16)]
    # 10,000 each; the standard deviation of a count is sqrt(160000 * 1/16 * 15/16) = 97
    assert all(abs(count - 10_000) < 5 * 97 for count in counts)


def test_a_vocabulary_that_cannot_spell_is_refused() -> None:
    with pytest.raises(UsageError, match="token ids from 9 below 10"):
        key_tokens(10, 9)


def test_the_engines_answer_takes_the_place_of_the_planned_one_and_the_rest_stays() -> None:
    planned = Prompt(
        keys=array("Q", [1, 2, 3]), lengths=array("I", [6, 4, 5]), vocab_size=1000, answers=((1, 17),), first_token_id=0
    )
    whole = planned.token_ids()
    assert planned.token_ids({99: [1, 2]}) == whole
    replaced = planned.token_ids({17: [5, 6, 7]})
    assert replaced[:6] == whole[:6]
    assert list(replaced[6:9]) == [5, 6, 7]
    assert replaced[9:] == whole[10:]
    assert pickle.loads(pickle.dumps(planned)).token_ids({17: [5]}) == planned.token_ids({17: [5]})


def hits_by_hashing(plan: RequestPlan, page_tokens: int) -> tuple[int, int, int]:
    """(hit tokens, prompt tokens, distinct blocks) of real token ids in a cache without limit, by SHA-256 chains.

    Knows nothing of ids or pieces. The partly filled last page has a hash of its own, as it has an id in the trace.
    """
    seen: set[bytes] = set()
    hits = total = 0
    for request in plan.requests:
        tokens = request.prompt
        chain = list(prefix_hashes(tokens, page_tokens))
        if rest := len(tokens) % page_tokens:
            chain.append(hashlib.sha256((chain[-1] if chain else b"") + tokens[-rest:].tobytes()).digest())
        run = 0
        while run < len(chain) and chain[run] in seen:
            run += 1
        seen.update(chain)
        hits += min(run * page_tokens, len(tokens))
        total += len(tokens)
    return hits, total, len(seen)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not on this machine")
@pytest.mark.parametrize("trace", ["mooncake_fast25_conversation", "mooncake_fast25_synthetic"])
def test_prompts_made_from_a_whole_mooncake_trace_share_exactly_what_the_trace_says(trace: str) -> None:
    limit = int(os.environ.get("KVBENCH_TRACE_REQUESTS", "2000"))
    workload = load_workload(TRACES / f"{trace}.jsonl.gz")
    plan = plan_requests(workload, vocab_size=32_000, limit=limit)
    hits, total, blocks = hits_by_hashing(plan, 512)
    assert (hits, total) == (plan.reuse.hit_tokens, plan.reuse.prompt_tokens)
    golden = json.loads((TRACES / "golden_hit_rates.json").read_text())[trace]
    if limit >= golden["requests"]:
        whole = next(one for one in golden["results"] if one["capacity_blocks"] == "inf" and not one["warmup_fraction"])
        assert (hits, total) == (whole["hit_tokens"], whole["total_tokens"])
        assert blocks == golden["unique_blocks"]


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not on this machine")
@pytest.mark.parametrize("trace", ["mooncake_fast25_conversation", "mooncake_fast25_synthetic"])
def test_the_reuse_of_a_whole_mooncake_plan_equals_the_golden_figure(trace: str) -> None:
    plan = plan_requests(load_workload(TRACES / f"{trace}.jsonl.gz"), vocab_size=32_000)
    golden = json.loads((TRACES / "golden_hit_rates.json").read_text())[trace]["results"]
    whole = next(one for one in golden if one["capacity_blocks"] == "inf" and one["warmup_fraction"] == 0)
    assert plan.reuse.hit_tokens == whole["hit_tokens"]
    assert plan.reuse.prompt_tokens == whole["total_tokens"]
    assert plan.reuse.working_set_bytes(10) == 10 * (whole["total_tokens"] - whole["hit_tokens"])


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES} is not on this machine")
def test_agent_sessions_share_what_was_counted_from_their_ids() -> None:
    # counted from the ids alone, in the scope of each conversation: 897,997 of 979,908 blocks of 64 tokens
    plan = plan_requests(load_workload(TRACES / "kv_cache_tester_claude_code_34.jsonl.gz"), vocab_size=32_000)
    assert (len(plan.requests), plan.reuse.hit_tokens, plan.reuse.prompt_tokens) == (833, 897_997 * 64, 62_739_843)
