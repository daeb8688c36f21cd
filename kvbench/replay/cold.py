"""A known cache before each run: emptied by the engine's own calls, and shown to be empty by prompts of the plan."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvbench.engines.base import Endpoint, EngineAdapter
from kvbench.engines.http_calls import call
from kvbench.replay.requests import TEXT_FORM
from kvbench.results.replay import CacheCheck, CacheState, RequestSample, ResetProbe
from kvbench.results.tier_counters import TierCounters
from kvbench.workloads.base import PlannedRequest, RequestPlan

_ATTEMPTS, _PAUSE_S = 4, 0.5
_PROBE_TIMEOUT_S = 300.0
_LOWER = ("dram", "file", "remote", "peer", "external")
_ACCIDENT_TOKENS = 15  # that prompts may share by chance where a page is one token, or a mark begins every text


def probe_requests(plan: RequestPlan) -> tuple[PlannedRequest, ...]:
    """Prompts that a cache would certainly still have: the one with the longest shared prefix, and the latest other.

    The other must begin differently, or the first probe's own prompt would be what it finds.
    """
    longest = max(plan.requests, key=lambda request: (request.shared_prefix_tokens, -request.index))
    start = longest.recipe.keys[0]
    latest = next((request for request in reversed(plan.requests) if request.recipe.keys[0] != start), None)
    return (longest,) if latest is None else (longest, latest)


def ask(endpoint: Endpoint, prompt: Sequence[int], *, salt: str | None, max_tokens: int = 1) -> ResetProbe:
    """One request outside the load generator, whose usage says what was cached."""
    body: dict[str, object] = {
        "model": endpoint.model,
        "prompt": list(prompt) if endpoint.takes_ids else "".join(TEXT_FORM.words[one] for one in prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    if salt is not None:
        body["cache_salt"] = salt
    reply = call(endpoint.url, "/v1/completions", method="POST", body=body, timeout_s=_PROBE_TIMEOUT_S)
    answer = reply.json() if reply.ok else None
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        said = " ".join(reply.text.split())[:120]
        return ResetProbe(prompt_tokens=len(prompt), cached_tokens=None, status=f"{reply.status or 'failed'}: {said}")
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    told = usage.get("prompt_tokens")
    return ResetProbe(
        prompt_tokens=told if isinstance(told, int) else len(prompt),
        cached_tokens=cached if isinstance(cached, int) else None,
        status="ok",
    )


def make_cold(
    adapter: EngineAdapter,
    endpoint: Endpoint,
    plan: RequestPlan,
    *,
    served_before: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> CacheCheck:
    """Resets, sends prompts of the plan, and resets again, since the prompts are now cached themselves.

    Without a reset the run is unverified, and contaminated where the server has had the plan before and does not tell
    what it has cached.
    """
    steps: list[str] = []
    probes: tuple[ResetProbe, ...] = ()
    trouble = ""
    for attempt in range(_ATTEMPTS):
        report = adapter.reset(endpoint)
        steps += [f"{step.what}: {'ok' if step.ok else 'failed'} ({step.detail})" for step in report.steps]
        if not report.ok:
            failed = next((step for step in report.steps if not step.ok), None)
            detail = f"{failed.what}: {failed.detail}" if failed else "the engine has no reset"
            return _without_reset(adapter, endpoint, f"the reset failed ({detail})", steps, served_before)
        before = adapter.counters(endpoint)
        probes = tuple(ask(endpoint, request.prompt, salt=None) for request in probe_requests(plan))
        trouble = _trouble(probes, adapter.counters(endpoint).since(before))
        if not trouble:
            break
        if attempt + 1 < _ATTEMPTS:
            sleep(_PAUSE_S)
    last = adapter.reset(endpoint)
    steps += [f"{step.what}: {'ok' if step.ok else 'failed'} ({step.detail})" for step in last.steps]
    if trouble.startswith("not told"):
        return CacheCheck(state="unverified", reason=trouble, steps=tuple(steps), probes=probes)
    if trouble or not last.ok:
        why = trouble or "the reset after the probe failed, so the probe's own prompts are still cached"
        return CacheCheck(state="contaminated", reason=why, steps=tuple(steps), probes=probes)
    tokens = sum(probe.prompt_tokens for probe in probes)
    reason = f"{len(probes)} prompts of the plan ({tokens:,} tokens) sent after the reset had 0 cached tokens"
    return CacheCheck(state="verified cold", reason=reason, steps=tuple(steps), probes=probes)


def _without_reset(
    adapter: EngineAdapter, endpoint: Endpoint, reason: str, steps: Sequence[str], served_before: bool
) -> CacheCheck:
    """A server that has had the plan is not cold, unless what it tells in this run will show it (`check_after`)."""
    if served_before:
        reason += "; the server has had these prompts before"
    tells = adapter.counters(endpoint).cached_tokens is not None
    state: CacheState = "contaminated" if served_before and not tells else "unverified"
    return CacheCheck(state=state, reason=reason, steps=tuple(steps))


def check_after(check: CacheCheck, plan: RequestPlan, samples: Sequence[RequestSample], *, exact: bool) -> CacheCheck:
    """The check with what the run itself showed: more cached tokens than its own requests can have left there.

    An unlimited empty cache has exactly `plan.reuse.hit_tokens` in the end, in whatever order requests come; and a
    prompt that was answered before any other with its beginning was sent has none. `exact` says that the server counts
    tokens as the plan does.
    """
    if check.state not in ("verified cold", "cold by salt", "unverified"):
        return check
    told = [one for one in samples if one.ok and one.cached_tokens is not None]
    first = _first_of_their_beginning(plan, samples)
    warm = [one for one in told if one.index in first and (one.cached_tokens or 0) > _ACCIDENT_TOKENS]
    found = ""
    if warm:
        tokens = sum(one.cached_tokens or 0 for one in warm)
        found = (
            f"{len(warm)} of {len(first)} prompts whose beginning nothing in the run had sent before had {tokens:,} "
            "cached tokens"
        )
    elif exact and plan.history == "synthetic":
        tokens = sum(one.cached_tokens or 0 for one in told)
        if tokens > plan.reuse.hit_tokens + _ACCIDENT_TOKENS + len(told):  # a mark may begin every text
            found = (
                f"{tokens:,} prompt tokens were cached, and the run's own requests share only {plan.reuse.hit_tokens:,}"
            )
    if not found:
        return check
    return replace(check, state="contaminated", reason=f"{found} ({check.reason})")


def _first_of_their_beginning(plan: RequestPlan, samples: Sequence[RequestSample]) -> frozenset[int]:
    """Requests that were answered before any other prompt that begins as theirs was sent."""
    begins = {request.index: request.recipe.keys[0] for request in plan.requests if len(request.recipe.keys)}
    groups: dict[int, list[RequestSample]] = {}
    for one in samples:
        if one.sent_s is not None and one.index in begins:
            groups.setdefault(begins[one.index], []).append(one)
    found = []
    for group in groups.values():
        first, *others = sorted(group, key=lambda one: one.sent_s or 0.0)
        next_s = min((one.sent_s or 0.0 for one in others), default=math.inf)
        if first.ok and first.first_choice_s is not None and first.first_choice_s < next_s:
            found.append(first.index)
    return frozenset(found)


def make_salted(endpoint: Endpoint, plan: RequestPlan, *, salt: str) -> CacheCheck:
    """Gives the run a namespace of its own. Logically cold: old blocks still take up room."""
    if endpoint.dialect == "unknown":
        return CacheCheck(state="unverified", reason="a server of unknown make may ignore cache_salt")
    probes = tuple(ask(endpoint, request.prompt, salt=f"{salt}-probe") for request in probe_requests(plan))
    trouble = _trouble(probes, TierCounters())
    if trouble:
        state: CacheState = "unverified" if trouble.startswith("not told") else "contaminated"
        return CacheCheck(state=state, reason=trouble, probes=probes)
    return CacheCheck(
        state="cold by salt",
        reason="each run has a cache_salt of its own and finds nothing cached; old blocks still take up room",
        probes=probes,
    )


def make_warm(endpoint: Endpoint, plan: RequestPlan) -> CacheCheck:
    """Sends every prompt of the plan once, unmeasured."""
    failed = sum(ask(endpoint, request.prompt, salt=None).status != "ok" for request in plan.requests)
    reason = f"every prompt was sent once before, unmeasured ({failed} of {len(plan.requests)} failed)"
    return CacheCheck(state="warm", reason=reason)


def _trouble(probes: Sequence[ResetProbe], moved: TierCounters) -> str:
    """Why the cache is not known to be empty; empty when it is."""
    broken = [probe for probe in probes if probe.status != "ok"]
    if broken:
        return f"not told: a probe failed ({broken[0].status})"
    found = [probe.cached_tokens for probe in probes if probe.cached_tokens]
    if found:
        return f"{sum(found):,} tokens of prompts sent after the reset were still cached"
    external = sum(moved.prompt_tokens.get(tier, 0.0) for tier in _LOWER)
    if external > 0:
        return f"a lower tier served {external:,.0f} tokens of prompts sent after the reset"
    if all(probe.cached_tokens is None for probe in probes):
        if moved.cached_tokens is None:
            return "not told: the server reports no cached tokens, neither in usage nor in its metrics"
        if moved.cached_tokens > 0:
            return f"{moved.cached_tokens:,.0f} tokens of prompts sent after the reset were still cached"
    return ""
