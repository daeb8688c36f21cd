import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.workloads.arrivals import Arrival
from kvbench.workloads.base import PlannedRequest, RequestPlan
from kvbench.workloads.distributions import Constant
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.traffic import Agents, Rag
from kvbench.workloads.workload import TraceFile, load_workload, workload_names

NAMES = st.sampled_from([name for name in workload_names() if name not in ("agents", "claude-code")])


def plan_of(name: str, **settings: object) -> RequestPlan:
    return plan_requests(load_workload(name), **({"vocab_size": 32_000} | settings))  # type: ignore[arg-type]


def longest_common_prefix(request: PlannedRequest, earlier: list[list[int]]) -> int:
    tokens = list(request.prompt)
    best = 0
    for other in earlier:
        common = next((at for at, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
        best = max(best, min(len(tokens), len(other)) if common is None else common)
    return best


@settings(max_examples=30)
@given(NAMES, st.integers(0, 5), st.integers(1, 40), st.sampled_from([0.05, 0.2, 1.0]))
def test_a_plan_keeps_its_promises(name: str, seed: int, limit: int, scale: float) -> None:
    plan = plan_of(name, seed=seed, limit=limit, scale=scale, max_prompt_tokens=3000)
    again = plan_of(name, seed=seed, limit=limit, scale=scale, max_prompt_tokens=3000)
    assert plan == again
    assert [one.index for one in plan.requests] == list(range(len(plan.requests)))
    assert len(plan.requests) <= limit
    for one in plan.requests:
        assert len(one.prompt) == one.prompt_tokens <= 3000
        assert one.max_tokens >= 1
        assert all(other < one.index for other in one.after)
        assert one.root == (plan.requests[one.after[0]].root if one.after else one.index)
        assert one.think_s >= 0
        waits = bool(one.after) or plan.loop == "closed"
        assert (one.at_s is None) == waits
    starts = [one.at_s for one in plan.requests if one.at_s is not None]
    assert starts == sorted(starts)
    assert plan.reuse.hit_tokens == sum(one.shared_prefix_tokens for one in plan.requests)
    assert plan.reuse.prompt_tokens == sum(one.prompt_tokens for one in plan.requests)


@settings(max_examples=15)
@given(NAMES, st.integers(0, 3))
def test_what_the_plan_calls_shared_is_what_the_token_ids_share(name: str, seed: int) -> None:
    # 2^31 ids, so that texts differ from their first token on, and the common prefix is exact
    plan = plan_of(name, seed=seed, limit=25, scale=0.1, vocab_size=1 << 31)
    earlier: list[list[int]] = []
    for one in plan.requests:
        assert one.shared_prefix_tokens == longest_common_prefix(one, earlier)
        earlier.append(list(one.prompt))


def test_a_limit_keeps_the_first_requests_and_changes_none_of_them() -> None:
    for name in ("chat", "mixed", "demo-chat", "mooncake-conversation", "agents"):
        short, long = plan_of(name, limit=20), plan_of(name, limit=60)
        assert [one.recipe for one in short.requests] == [one.recipe for one in long.requests[:20]], name
        assert [one.shared_prefix_tokens for one in short.requests] == [
            one.shared_prefix_tokens for one in long.requests[:20]
        ]


def test_a_turn_is_the_turn_before_it_with_its_answer_and_what_the_user_says_next() -> None:
    plan = plan_of("demo-chat")
    followed = 0
    for one in plan.requests:
        if one.after:
            before = plan.requests[one.after[0]]
            assert (one.session, one.turn) == (before.session, before.turn + 1)
            assert one.prompt[: before.prompt_tokens] == before.prompt
            assert one.prompt_tokens > before.prompt_tokens + before.max_tokens
            assert one.shared_prefix_tokens == before.prompt_tokens
            followed += 1
    assert followed > 10


def test_with_the_engines_history_its_answer_is_in_the_next_prompt_and_counts_as_reused() -> None:
    workload = replace(load_workload("demo-chat"), history="engine")
    plan = plan_requests(workload, vocab_size=32_000)
    second = next(one for one in plan.requests if one.turn == 1)
    first = plan.requests[second.after[0]]
    answer = list(range(first.max_tokens - 3))  # the engine stopped early
    prompt = second.recipe.token_ids({first.index: answer})
    assert list(prompt[: first.prompt_tokens]) == list(first.prompt)
    assert list(prompt[first.prompt_tokens : first.prompt_tokens + len(answer)]) == answer
    assert len(prompt) == second.prompt_tokens - 3
    assert second.shared_prefix_tokens == first.prompt_tokens + first.max_tokens
    assert plan.history == "engine"
    third = next(one for one in plan.requests if one.turn == 2)
    assert len(third.recipe.answers) == 2
    assert plan_of("demo-chat").requests[second.index].recipe.answers == ()


def test_an_agents_step_waits_for_its_sub_agent_whose_context_is_its_own() -> None:
    plan = plan_of("agents", limit=300)
    joins = [one for one in plan.requests if len(one.after) == 2]
    assert joins
    for one in joins:
        parent, last = (plan.requests[at] for at in one.after)
        assert last.group == "subagent"
        assert one.session == parent.session
        assert last.session != parent.session
        assert one.shared_prefix_tokens >= parent.prompt_tokens
    subs = [one for one in plan.requests if one.group == "subagent" and one.turn == 0]
    assert all(one.shared_prefix_tokens in (0, 15_000) for one in subs)


def test_an_inherited_context_shares_all_that_the_parent_asked_with() -> None:
    workload = load_workload("agents")
    assert isinstance(workload.traffic, Agents)
    traffic = replace(workload.traffic, branch_context="inherited", branch_chance=1.0)
    plan = plan_requests(replace(workload, traffic=traffic), vocab_size=32_000, limit=40)
    subs = [one for one in plan.requests if one.group == "subagent" and one.turn == 0]
    assert subs
    assert all(one.shared_prefix_tokens >= plan.requests[one.after[0]].prompt_tokens for one in subs)


def test_documents_in_a_fixed_order_are_shared_more_than_in_any_order() -> None:
    workload = load_workload("rag")
    assert isinstance(workload.traffic, Rag)
    ranked = replace(workload, traffic=replace(workload.traffic, order="ranked"))
    shuffled = plan_requests(workload, vocab_size=32_000).reuse
    in_order = plan_requests(ranked, vocab_size=32_000).reuse
    assert in_order.hit_tokens > 1.2 * shuffled.hit_tokens


def test_parts_of_a_mixture_come_as_often_as_their_weights_say() -> None:
    plan = plan_of("mixed", limit=2000)
    sessions = [one for one in plan.requests if not one.after]
    share = sum("1-rag" in one.source for one in sessions) / len(sessions)
    assert share == pytest.approx(0.3, abs=0.06)


def test_another_seed_gives_other_texts_and_other_times() -> None:
    one, other = plan_of("shared-prefix", seed=1, limit=20), plan_of("shared-prefix", seed=2, limit=20)
    assert not {tuple(a.prompt[:32]) for a in one.requests} & {tuple(a.prompt[:32]) for a in other.requests}
    assert [a.at_s for a in one.requests] != [a.at_s for a in other.requests]


def test_another_rate_stretches_the_same_times_and_keeps_the_prompts() -> None:
    slow, fast = plan_of("shared-prefix", rate_per_s=1.0, limit=30), plan_of("shared-prefix", rate_per_s=4.0, limit=30)
    assert [one.recipe for one in slow.requests] == [one.recipe for one in fast.requests]
    assert [one.at_s for one in fast.requests] == pytest.approx([(one.at_s or 0) / 4 for one in slow.requests])


def test_a_duration_ends_the_starts_of_sessions() -> None:
    plan = plan_of("chat")
    assert max(one.at_s for one in plan.requests if one.at_s is not None) < 600
    assert plan.duration_s == 600
    assert len({one.root for one in plan.requests}) == pytest.approx(300, abs=60)


def test_recorded_times_can_be_sped_up_and_ties_spread() -> None:
    raw = plan_of("mooncake-conversation", spread_ties=False, limit=100)
    fast = plan_of("mooncake-conversation", spread_ties=False, speedup=10.0, limit=100)
    evenly = plan_of("mooncake-conversation", limit=100)
    assert [one.at_s for one in fast.requests] == pytest.approx([(one.at_s or 0) / 10 for one in raw.requests])
    assert any(later.at_s == earlier.at_s for earlier, later in pairwise(raw.requests))
    assert all((later.at_s or 0) > (earlier.at_s or 0) for earlier, later in pairwise(evenly.requests))
    assert "10 times as fast" in fast.arrival
    (tied,) = [one for one in raw.warnings if one.code == "tied-times"]
    assert "sent together" in tied.message
    (tied,) = [one for one in evenly.warnings if one.code == "tied-times"]
    assert "spread evenly" in tied.message


def test_recorded_requests_can_be_sent_in_a_closed_loop_or_at_a_rate() -> None:
    closed = plan_of("mooncake-conversation", concurrency=3, limit=20)
    assert (closed.loop, closed.concurrency) == ("closed", 3)
    assert all(one.at_s is None for one in closed.requests)
    timed = plan_of("mooncake-conversation", rate_per_s=5.0, limit=20)
    assert (timed.loop, timed.concurrency) == ("open", None)
    made_up = plan_of("shared-prefix", rate_per_s=5.0, seed=0, limit=20)
    gaps = [(later.at_s or 0) - (earlier.at_s or 0) for earlier, later in pairwise(timed.requests)]
    assert sum(gaps) < 20 / 5 * 3  # the recorded times of the first 20 requests play no part
    assert timed.requests[0].at_s == made_up.requests[0].at_s == 0.0
    assert [one.recipe for one in timed.requests] == [
        one.recipe for one in plan_of("mooncake-conversation", limit=20).requests
    ]
    assert "Poisson, 5/s" in timed.arrival


def test_scaled_lengths_keep_who_shares_with_whom() -> None:
    whole, small = plan_of("mooncake-conversation"), plan_of("mooncake-conversation", scale=0.125)
    for one, other in zip(whole.requests, small.requests, strict=True):
        assert list(one.recipe.keys) == list(other.recipe.keys)
        assert (one.shared_prefix_tokens > 0) == (other.shared_prefix_tokens > 0)
        # 512-token blocks become 64; only the tail is rounded
        assert other.shared_prefix_tokens == pytest.approx(one.shared_prefix_tokens / 8, abs=1)
    ratio, small_ratio = whole.reuse.hit_ratio, small.reuse.hit_ratio
    assert small_ratio == pytest.approx(ratio, abs=0.001)


def test_cut_prompts_share_up_to_the_cut_and_the_plan_says_how_many_were_cut() -> None:
    whole, cut = plan_of("mooncake-conversation"), plan_of("mooncake-conversation", max_prompt_tokens=1000)
    long = sum(one.prompt_tokens > 1000 for one in whole.requests)
    for one, other in zip(whole.requests, cut.requests, strict=True):
        assert other.prompt == one.prompt[:1000]
        assert other.shared_prefix_tokens == min(one.shared_prefix_tokens, 1000)
    (warning,) = [one for one in cut.warnings if one.code == "cut-prompts"]
    assert warning.message.startswith(f"{long} of 500 prompts were cut to 1000")


def test_answers_can_be_kept_short_also_where_later_turns_quote_them() -> None:
    plan = plan_of("demo-chat", max_output_tokens=5)
    assert {one.max_tokens for one in plan.requests} == {5}
    second = next(one for one in plan.requests if one.turn == 1)
    longer = plan_of("demo-chat").requests[second.index]
    assert second.prompt_tokens == longer.prompt_tokens - (24 - 5)


def test_a_plan_is_small_enough_to_be_sent_to_the_processes_that_send_it() -> None:
    plan = plan_of("agents", limit=300)
    data = pickle.dumps(plan)
    assert len(data) < plan.reuse.prompt_tokens / 4
    assert pickle.loads(data) == plan


def test_warnings_say_what_a_trace_does_not_carry() -> None:
    plan = plan_of("azure-code", limit=10)
    assert any("every prompt is unique" in one.message for one in plan.warnings)
    assert plan.reuse.hit_tokens == 0
    assert all(one.remedy for one in plan.warnings)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"limit": 0}, "limit is 0"),
        ({"scale": 0.0}, "scale is 0"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens is -1"),
        ({"vocab_size": 1}, "at least two ids"),
        ({"concurrency": 0}, "concurrency from 1"),
    ],
)
def test_settings_out_of_range_are_refused(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of("demo", **settings_)


def test_a_steep_popularity_still_finds_different_documents() -> None:
    workload = load_workload("rag")
    assert isinstance(workload.traffic, Rag)
    steep = replace(workload.traffic, documents=6, alpha=10.0, documents_per_request=Constant(6.0))
    plan = plan_requests(replace(workload, traffic=steep), vocab_size=32_000, limit=20)
    assert {len(one.recipe.keys) for one in plan.requests} == {8}
    assert all(len(set(one.recipe.keys)) == 8 for one in plan.requests)


def test_pauses_that_a_trace_does_not_have_are_refused() -> None:
    workload = load_workload("azure-code")
    assert isinstance(workload.traffic, TraceFile)
    paused = replace(workload, traffic=replace(workload.traffic, timing="think"))
    with pytest.raises(UsageError, match="azure trace has no pauses"):
        plan_requests(paused, vocab_size=300)


def test_all_at_once_starts_every_session_at_zero() -> None:
    workload = replace(load_workload("demo-chat"), arrival=Arrival(process="at-once"))
    plan = plan_requests(workload, vocab_size=300)
    assert len(plan.requests) == 24
    assert {one.at_s for one in plan.requests if not one.after} == {0.0}
    assert any(one.turn > 1 for one in plan.requests)


def test_a_plan_without_requests_is_refused() -> None:
    with pytest.raises(KvbenchError, match="no request is left"):
        plan_requests(replace(load_workload("azure-code"), duration_s=-1.0), vocab_size=300)
