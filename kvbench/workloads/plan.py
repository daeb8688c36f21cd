"""A workload as the requests of one run: the same for every arm, and the same again from the same seed."""

from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from random import Random

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.provenance import Warning_
from kvbench.workloads import arrivals
from kvbench.workloads.base import PlannedRequest, Prompt, RequestPlan
from kvbench.workloads.drafts import Draft, Scaling, Session, Sessions
from kvbench.workloads.prompts import key_tokens
from kvbench.workloads.reuse import ReuseCount
from kvbench.workloads.traffic import sessions
from kvbench.workloads.workload import MOST_REQUESTS, TraceFile, Workload, with_arrival

MOST_PROMPT_PIECES = 200_000_000


def plan_requests(
    workload: Workload,
    *,
    vocab_size: int,
    seed: int | None = None,
    limit: int | None = None,
    rate_per_s: float | None = None,
    concurrency: int | None = None,
    speedup: float | None = None,
    spread_ties: bool | None = None,
    scale: float | None = None,
    max_prompt_tokens: int | None = None,
    max_output_tokens: int | None = None,
    first_token_id: int = 0,
) -> RequestPlan:
    """The plan of a run; an argument that is given replaces what the workload says.

    `limit` keeps the first requests, `scale` makes every text that many times as long, `max_prompt_tokens` cuts prompts
    at their end (what two prompts share within that length, they still share). Token ids go from `first_token_id` to
    `vocab_size` - 1. Another seed gives other texts at other times.
    """
    workload = with_arrival(
        replace(
            workload,
            seed=workload.seed if seed is None else seed,
            scale=workload.scale if scale is None else scale,
            max_prompt_tokens=max_prompt_tokens or workload.max_prompt_tokens,
            max_output_tokens=max_output_tokens or workload.max_output_tokens,
        ),
        rate_per_s=rate_per_s,
        concurrency=concurrency,
        speedup=speedup,
        spread_ties=spread_ties,
    )
    for what, value in (
        ("limit", limit),
        ("max_prompt_tokens", max_prompt_tokens),
        ("max_output_tokens", max_output_tokens),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{what} is {value}; give a number from 1 on")
    if not 0 < workload.scale <= 1000:
        raise UsageError(f"scale is {workload.scale:g}; give a number above zero, up to 1000")
    spelled = key_tokens(vocab_size, first_token_id)
    wanted = min(limit or MOST_REQUESTS, workload.num_requests or MOST_REQUESTS)
    scaling = Scaling(scale=workload.scale, max_output_tokens=workload.max_output_tokens)
    doubts = _Doubts()
    with closing(_sessions(workload, scaling, doubts, wanted)) as made:
        timed = _timed(workload, made, wanted, doubts)
    if not timed:
        raise KvbenchError(
            f"{workload.source}: no request is left to send; see its requests, its duration and the limit"
        )
    plan = _planned(workload, timed, vocab_size=vocab_size, first_token_id=first_token_id, doubts=doubts)
    doubts.about_lengths(plan, spelled)
    return replace(plan, warnings=tuple(doubts.warnings))


@dataclass(slots=True)
class _Timed:
    """A draft with its place: the order of planning, and the start time of requests that wait for none."""

    draft: Draft
    session: int
    number: int
    nominal_s: float
    at_s: float | None


class _Doubts:
    def __init__(self) -> None:
        self.warnings: list[Warning_] = []

    def add(self, code: str, message: str, remedy: str) -> None:
        self.warnings.append(Warning_(code=code, message=message, remedy=remedy))

    def about_lengths(self, plan: RequestPlan, spelled: int) -> None:
        short = sum(min(one.recipe.lengths) < spelled for one in plan.requests if one.recipe.lengths)
        if short:
            self.add(
                "short-pieces",
                f"{short} of {len(plan.requests)} prompts have a piece under {spelled} tokens, too short to differ "
                f"from every other one with {plan.vocab_size} token ids",
                "nothing, where the engine's pages are longer; else use longer pieces or a larger scale",
            )


def _sessions(workload: Workload, scaling: Scaling, doubts: _Doubts, wanted: int) -> Sessions:
    if isinstance(workload.traffic, TraceFile):
        from kvbench.workloads.recorded import recorded_sessions

        at_recorded_times = workload.arrival.process == "trace"
        return recorded_sessions(
            workload.traffic, workload.seed, scaling, doubts.add, wanted, at_recorded_times=at_recorded_times
        )
    return sessions(workload.traffic, name=workload.name, seed=workload.seed, scaling=scaling)


def _timed(workload: Workload, made: Sessions, wanted: int, doubts: _Doubts) -> list[_Timed]:
    """The first requests with their start times, in the order of the times that are known beforehand."""
    arrival = workload.arrival
    if arrival.process == "trace":
        return _at_recorded_times(workload, made, wanted, doubts)
    random = Random(f"{workload.seed}/{workload.name}/arrivals")
    starts: Iterator[float | None] = iter(lambda: None, 0)
    if arrival.process != "closed":
        starts = arrivals.start_times(arrival, random)
    until_s = workload.duration_s or inf
    in_order = arrival.process in ("closed", "at-once")  # no times to sort by: session after session
    timed: list[_Timed] = []
    look_at = wanted
    for number, (session, start_s) in enumerate(zip(made, starts, strict=False)):
        if start_s is not None and start_s >= until_s:
            break
        timed.extend(_placed(session, number, start_s))
        if len(timed) >= look_at:
            if in_order or start_s is None or _is_settled(timed, start_s, wanted):
                break
            look_at = len(timed) + len(timed) // 8 + 1
        if len(timed) >= MOST_REQUESTS:
            raise KvbenchError(
                f"{workload.source}: the plan has more than {MOST_REQUESTS} requests; give requests or a lower rate"
            )
    if not in_order:
        timed.sort(key=lambda one: (one.nominal_s, one.session, one.number))
    return timed[:wanted]


def _is_settled(timed: list[_Timed], start_s: float, wanted: int) -> bool:
    """Whether no later session can still be among the first `wanted` requests, or the search was long enough."""
    return sum(one.nominal_s <= start_s for one in timed) >= wanted or len(timed) >= 4 * wanted + 1000


def _placed(session: Session, number: int, start_s: float | None) -> list[_Timed]:
    """A session's requests at their times, as if every answer came at once."""
    placed: list[_Timed] = []
    for place, draft in enumerate(session):
        own_s = (start_s or 0.0) + draft.start_s
        nominal_s = max(placed[one].nominal_s for one in draft.after) + draft.think_s if draft.after else own_s
        at_s = None if draft.after or start_s is None else own_s
        placed.append(_Timed(draft=draft, session=number, number=place, nominal_s=nominal_s, at_s=at_s))
    return placed


def _at_recorded_times(workload: Workload, made: Sessions, wanted: int, doubts: _Doubts) -> list[_Timed]:
    arrival = workload.arrival
    timed: list[_Timed] = []
    for number, session in enumerate(made):
        timed.extend(_placed(session, number, 0.0))
        if len(timed) >= wanted:
            break
    del timed[wanted:]
    backwards = sum(later.nominal_s < earlier.nominal_s for earlier, later in pairwise(timed))
    if backwards:
        doubts.add(
            "unsorted-times",
            f"{backwards} recorded times are before the one above them; the requests were sorted by time",
            "nothing, if the file was written by several processes; else check the trace",
        )
    timed.sort(key=lambda one: (one.nominal_s, one.session, one.number))
    if not timed:
        return timed
    first_s = timed[0].nominal_s
    recorded = [one.nominal_s - first_s for one in timed]
    distinct, tied, most = arrivals.ties(recorded)
    times = arrivals.spread(recorded) if arrival.spread_ties else recorded
    if tied:
        doubts.add(
            "tied-times",
            f"{tied} of {len(timed)} requests share their recorded time with another (up to {most} at once, "
            f"{distinct} times in all); "
            + ("they were spread evenly up to the next time" if arrival.spread_ties else "they are sent together"),
            "compare with the raw times (spread_ties: false)"
            if arrival.spread_ties
            else "spread_ties: true sends them evenly up to the next time",
        )
    for one, at_s in zip(timed, times, strict=True):
        one.nominal_s = at_s / arrival.speedup
        if one.at_s is not None:
            one.at_s = one.nominal_s
    until_s = workload.duration_s or inf
    return [one for one in timed if one.nominal_s < until_s]


def _planned(
    workload: Workload, timed: list[_Timed], *, vocab_size: int, first_token_id: int, doubts: _Doubts
) -> RequestPlan:
    index = {(one.session, one.number): place for place, one in enumerate(timed)}
    counts = ReuseCount(with_answers=workload.history == "engine")
    requests: list[PlannedRequest] = []
    cut = 0
    pieces = 0
    for place, one in enumerate(timed):
        draft = one.draft
        keys, lengths, answers = _cut(draft, workload.max_prompt_tokens)
        cut += sum(lengths) < sum(draft.lengths)
        pieces += len(keys)
        if pieces > MOST_PROMPT_PIECES:
            raise KvbenchError(f"{workload.source}: the plan is too large for this machine's memory; give a limit")
        shared = counts.add(keys, lengths, answer_key=draft.answer_key, max_tokens=draft.max_tokens)
        after = tuple(index[one.session, waited] for waited in draft.after)
        requests.append(
            PlannedRequest(
                index=place,
                at_s=one.at_s,
                think_s=draft.think_s / workload.arrival.speedup,
                after=after,
                root=requests[after[0]].root if after else place,
                session=draft.session,
                turn=draft.turn,
                recipe=Prompt(
                    keys=keys,
                    lengths=lengths,
                    vocab_size=vocab_size,
                    first_token_id=first_token_id,
                    answers=tuple((piece, index[one.session, answered]) for piece, answered in answers)
                    if workload.history == "engine"
                    else (),
                ),
                max_tokens=draft.max_tokens,
                group=draft.group,
                shared_prefix_tokens=shared,
                source=draft.source,
            )
        )
    if cut:
        doubts.add(
            "cut-prompts",
            f"{cut} of {len(requests)} prompts were cut to {workload.max_prompt_tokens} tokens",
            "raise max_prompt_tokens, or use scale, which keeps the ends of prompts apart",
        )
    return RequestPlan(
        name=workload.name,
        seed=workload.seed,
        requests=tuple(requests),
        vocab_size=vocab_size,
        loop=workload.arrival.loop,
        concurrency=workload.arrival.concurrency,
        arrival=_in_words(workload, requests),
        history=workload.history,
        reuse=counts.figures(),
        duration_s=workload.duration_s,
        made_from=workload,
    )


def _cut(draft: Draft, most: int | None) -> "tuple[array[int], array[int], list[tuple[int, int]]]":
    """The first `most` tokens of a prompt, in the same pieces; an answer that is cut is no longer the engine's."""
    if most is None or sum(draft.lengths) <= most:
        return draft.keys, draft.lengths, draft.answers
    lengths: array[int] = array("I")
    left = most
    for tokens in draft.lengths:
        if not left:
            break
        lengths.append(min(tokens, left))
        left -= lengths[-1]
    whole = len(lengths) - (lengths[-1] < draft.lengths[len(lengths) - 1])
    return draft.keys[: len(lengths)], lengths, [one for one in draft.answers if one[0] < whole]


def _in_words(workload: Workload, requests: list[PlannedRequest]) -> str:
    sizes = Counter(one.root for one in requests)
    several = f" ({len(sizes)} sessions)" if len(sizes) < len(requests) else ""
    return f"{workload.arrival}; {len(requests)} requests{several}, seed {workload.seed}"
