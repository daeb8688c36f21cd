"""Recorded requests as sessions of the plan: block ids become pieces of text, recorded times starts or pauses."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice

from kvbench.core.errors import UsageError
from kvbench.core.units import format_count
from kvbench.workloads.drafts import Draft, Scaling, Sessions
from kvbench.workloads.prompts import scope_base, text_key, text_keys
from kvbench.workloads.traces.base import TraceRequest
from kvbench.workloads.traces.formats import Trace, open_trace
from kvbench.workloads.workload import TraceFile

Doubt = Callable[[str, str, str], None]


def recorded_sessions(
    recorded: TraceFile, seed: int, scaling: Scaling, doubt: Doubt, wanted: int, *, at_recorded_times: bool
) -> Sessions:
    """The sessions of a trace, as many as are needed for `wanted` requests; what the format lacks is a doubt.

    Without `at_recorded_times` something else says when a session starts, and single requests have no own time.
    """
    trace = open_trace(
        recorded.path,
        format_name=recorded.format_name,
        block_tokens=recorded.block_tokens,
        output_tokens=recorded.output_tokens,
    )
    for missing in trace.format.not_carried:
        doubt("not-in-trace", f"the trace ({trace.format.name}) does not carry {missing}", "see docs/workloads.md")
    drafts = _Drafts(trace, seed, scaling)
    timing = recorded.timing or trace.format.timing
    if timing == "think" and trace.format.timing != "think":
        raise UsageError(f"{recorded.path}: a {trace.format.name} trace has no pauses; leave timing: think out")
    try:
        if timing == "think":
            yield from _conversations(drafts, trace, wanted)
        else:
            for request in islice(_with_prompt(trace.requests(), trace), wanted):
                yield [drafts.alone(request, (request.at_s or 0.0) if at_recorded_times else 0.0)]
    finally:
        for what, count in trace.notes.counts.items():
            doubt("trace-notes", f"{format_count(count)} {what}", "see the trace")


def _conversations(drafts: "_Drafts", trace: Trace, wanted: int) -> Sessions:
    """One session for each conversation."""
    taken = 0
    for _, requests in groupby(_with_prompt(trace.requests(), trace), lambda one: one.conversation):
        session = drafts.together(requests)
        yield session
        taken += len(session)
        if taken >= wanted:
            return


def _with_prompt(requests: Iterable[TraceRequest], trace: Trace) -> Iterator[TraceRequest]:
    for request in requests:
        if request.input_tokens:
            yield request
        else:
            trace.notes.count("requests without a prompt (left out)")


class _Drafts:
    def __init__(self, trace: Trace, seed: int, scaling: Scaling) -> None:
        self._trace, self._seed, self._scaling = trace, seed, scaling
        self._bases: dict[str, int] = {}
        self._own = scope_base(seed, "own")

    def alone(self, request: TraceRequest, start_s: float) -> Draft:
        """A request that waits for no other."""
        return self._draft(request, after=(), start_s=start_s)

    def together(self, requests: Iterable[TraceRequest]) -> list[Draft]:
        """A conversation whose later requests wait for earlier ones."""
        places: dict[int, int] = {}
        drafts: list[Draft] = []
        for request in requests:
            after = tuple(places[one] for one in request.after if one in places)
            places[request.ordinal] = len(drafts)
            drafts.append(self._draft(request, after=after, start_s=0.0 if after else request.at_s or 0.0))
        return drafts

    def _draft(self, request: TraceRequest, *, after: tuple[int, ...], start_s: float) -> Draft:
        keys, lengths = self._pieces(request)
        return Draft(
            keys=keys,
            lengths=lengths,
            max_tokens=self._scaling.answer(request.output_tokens),
            after=after,
            start_s=start_s,
            think_s=(request.think_s or 0.0) if after else 0.0,
            session=request.session,
            turn=request.turn,
            group=request.group,
            source=f"{self._trace.path}:{request.line}",
        )

    def _pieces(self, request: TraceRequest) -> "tuple[array[int], array[int]]":
        """One piece for each id, of its own tokens, and one for the tokens that no id names."""
        base = self._bases.get(request.scope)
        if base is None:
            base = self._bases[request.scope] = scope_base(self._seed, f"trace/{request.scope}")
        text, block = self._scaling.text, self._trace.block_tokens or 0
        keys = text_keys(base, request.ids)
        if request.id_tokens is None:
            lengths = array("I", [text(block)]) * len(request.ids)
            named = block * len(request.ids)
            if named > request.input_tokens:  # the last block is partly filled
                lengths[-1] = text(block - (named - request.input_tokens))
        else:
            lengths = array("I", [text(one) for one in request.id_tokens])
            named = sum(request.id_tokens)
        if named < request.input_tokens:
            keys.append(text_key(self._own, request.ordinal))
            lengths.append(text(request.input_tokens - named))
        return keys, lengths
