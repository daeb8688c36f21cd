"""From a planned request to what a worker sends, and from what a worker saw to a sample of the result."""

from collections.abc import Mapping
from itertools import pairwise

from kvbench.core.errors import UsageError
from kvbench.core.units import seconds_from_ns
from kvbench.engines.base import Endpoint
from kvbench.engines.http_calls import split_url
from kvbench.replay.load.plan import Finished, Limits, LoadRequest, WorkerPlan
from kvbench.results.replay import RequestSample
from kvbench.workloads.base import PlannedRequest, RequestPlan
from kvbench.workloads.text import plain_text_form

TEXT_FORM = plain_text_form()
"""How prompts are written for servers that take no token ids: the tokenizer of such a server is not at hand."""

_MOST_TOKENS_MADE_HERE = 8_000_000  # beyond, workers make the tokens from the recipes just before they send them


def worker_plan(plan: RequestPlan, endpoint: Endpoint, *, limits: Limits, salt: str | None = None) -> WorkerPlan:
    """The plan as one worker's; `split` in the generator divides it."""
    if not endpoint.takes_ids and plan.vocab_size > TEXT_FORM.vocab_size:
        raise UsageError(
            f"{endpoint.url} takes no token ids, and there are {TEXT_FORM.vocab_size} words to write prompts with; "
            f"plan with --vocab-size {TEXT_FORM.vocab_size}"
        )
    host, port, base, secure = split_url(endpoint.url)
    here = sum(request.prompt_tokens for request in plan.requests) <= _MOST_TOKENS_MADE_HERE
    return WorkerPlan(
        host=host,
        port=port,
        secure=secure,
        path=f"{base}/v1/completions",
        fields=request_fields(endpoint, salt=salt, history=plan.history == "engine"),
        requests=tuple(_load_request(request, here) for request in plan.requests),
        slots=plan.concurrency if plan.loop == "closed" else None,
        limits=limits,
        words=None if endpoint.takes_ids else TEXT_FORM.words,
        tier_details=endpoint.dialect == "sglang",
        answers_needed=frozenset(answer for request in plan.requests for _, answer in request.recipe.answers),
    )


def request_fields(endpoint: Endpoint, *, salt: str | None, history: bool = False) -> dict[str, object]:
    """What every request's body has beside prompt and length; a server of unknown make gets OpenAI's fields only."""
    fields: dict[str, object] = {
        "model": endpoint.model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.dialect != "unknown":
        fields["ignore_eos"] = True
        if salt is not None:
            fields["cache_salt"] = salt
        if history:
            fields["return_token_ids"] = True
    if endpoint.dialect == "sglang":
        fields["return_cached_tokens_details"] = True
    return fields


def _load_request(request: PlannedRequest, here: bool) -> LoadRequest:
    return LoadRequest(
        index=request.index,
        at_s=request.at_s,
        think_s=request.think_s,
        after=request.after,
        root=request.root,
        prompt=request.prompt if here and not request.recipe.answers else request.recipe,
        max_tokens=request.max_tokens,
    )


def sample(one: Finished, planned: Mapping[int, PlannedRequest], anchor_ns: int) -> RequestSample:
    """One request of the result, its times counted from the start of the run."""
    request = planned[one.number]

    def at(clock_ns: int) -> float | None:
        return round(seconds_from_ns(clock_ns - anchor_ns), 7) if clock_ns else None

    stamps = one.chunk_ns
    return RequestSample(
        index=one.number,
        group=request.group,
        turn=request.turn,
        planned_tokens=request.prompt_tokens,
        shared_prefix_tokens=request.shared_prefix_tokens,
        max_tokens=request.max_tokens,
        status=one.status,  # type: ignore[arg-type]
        detail=one.detail or None,
        due_s=at(one.due_ns) or 0.0,
        sent_s=at(one.sent_ns),
        first_choice_s=at(one.first_choice_ns),
        first_text_s=at(one.first_text_ns),
        last_choice_s=at(one.last_choice_ns),
        end_s=at(one.end_ns) or 0.0,
        itls_s=tuple(round(seconds_from_ns(later - earlier), 7) for earlier, later in pairwise(stamps)),
        invalid_events=one.invalid_events,
        prompt_tokens=one.prompt_tokens,
        output_tokens=one.output_tokens,
        cached_tokens=one.cached_tokens,
        cached_by_tier=one.cached_by_tier,
        loaded_bytes=one.loaded_bytes,
    )
