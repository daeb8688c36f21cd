"""Draws a replay: the verdict, one row per arm, the three answers; then the evidence for all of it."""

from collections.abc import Sequence

from rich.console import Console

from kvbench.core.percentiles import least_samples
from kvbench.core.units import format_bytes, format_duration
from kvbench.report.page import Figure, page
from kvbench.report.replay_figures import paired_differences_svg, timeline_svg, ttft_by_tier_svg
from kvbench.report.tables import TextTable, Tone, print_notes, print_tables, print_verdict
from kvbench.results.document import Document
from kvbench.results.replay import ArmSummary, Comparison, Distribution, HitRow, ReplayResult, Run, TierUse

_TONES: dict[str, Tone] = {"better": "good", "worse": "bad", "one arm": "neutral", "no difference": "neutral"}
_SHOWN = ("TTFT p50", "TTFT p99", "TTFT max", "TPOT p50", "ITL p99", "requests/s", "output tokens/s", "good requests/s")


def terminal(document: Document[ReplayResult], console: Console) -> None:
    """Prints the verdict, the arms, the answers, and the tables of evidence."""
    result = document.result
    print_verdict(_verdict(result), console, tone=_tone(result), details=_details(result))
    console.print()
    first, *others = _tables(result)
    print_tables((first,), console)
    for answer in result.answers:
        print_verdict(answer.question, console, tone=answer.tone, details=(answer.text,))
        console.print()
    print_tables(others, console)
    print_notes(document, console)


def html(document: Document[ReplayResult]) -> str:
    """The replay as one page."""
    result = document.result
    answers = tuple(f"{answer.question} {answer.text}" for answer in result.answers)
    return page(
        document,
        title=f"Replay of {result.workload}",
        verdict=_verdict(result),
        tone=_tone(result),
        details=(*_details(result), *answers),
        figures=_figures(result),
        tables=_tables(result),
    )


def _tone(result: ReplayResult) -> Tone:
    return _TONES.get(result.verdict, "unsure")


def _verdict(result: ReplayResult) -> str:
    head = result.headline
    if head is None:
        if len(result.arms) > 1:
            return f"No verdict: {result.stopped or 'no pair of runs is complete'}."
        return _one_arm(result)
    change = _change(head)
    base, arm = head.base, head.arm
    margin = f"±{result.margin_ratio:.0%}"
    median = f"median TTFT {_times(head)}"
    sentences = {
        "better": f"{arm} is better than {base}: {median}, {change}.",
        "worse": f"{arm} is worse than {base}: {median}, {change}.",
        "no difference": f"No difference between {arm} and {base}: {median}, {change}, within {margin}.",
        "inconclusive": f"Inconclusive: {arm} against {base}, {median}, {change}.",
    }
    reason = f": {head.doubts[0]}" if head.doubts else ""
    return sentences.get(head.verdict, f"No verdict, {head.verdict}{reason}.")


def _one_arm(result: ReplayResult) -> str:
    summary = result.summaries[0] if result.summaries else None
    middle = summary.ttft_s.at(0.5) if summary and summary.ttft_s else None
    if summary is None or middle is None:
        return f"Nothing was measured: {result.stopped or 'no request ended well'}."
    return (
        f"{summary.arm}: median TTFT {format_duration(middle.value)}, "
        f"{summary.requests_per_s:.2f} requests/s; one arm, so nothing is compared."
    )


def _times(one: Comparison) -> str:
    return f"{format_duration(_middle(one.arm_values))} instead of {format_duration(_middle(one.base_values))}"


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _change(one: Comparison) -> str:
    if one.low is None or one.high is None:
        return f"{_factors(one.ratio)[0]} (one pair, no interval)"
    ratio, low, high = _factors(one.ratio, one.low, one.high)
    return f"{ratio} ({low} to {high})"


def _factors(*ratios: float) -> list[str]:
    """Ratios in one style: as changes in percent, or as factors where one of them is far from 1."""
    if all(0.5 <= ratio < 2 for ratio in ratios):
        return [f"{ratio - 1:+.1%}" for ratio in ratios]
    return [f"×{ratio:.2f}" if 0.01 <= ratio < 100 else "×<0.01" if ratio < 1 else "×>100" for ratio in ratios]


def _details(result: ReplayResult) -> tuple[str, ...]:
    loop = (
        f"closed loop of {result.concurrency}: latencies are those of this client, not of users"
        if result.loop == "closed"
        else f"open loop, latency from the intended send time; {result.arrival}"
    )
    lines = [
        f"{_counted(result.num_requests, 'request')} per run, {result.planned_prompt_tokens:,} prompt tokens; {loop}.",
    ]
    if len(result.arms) > 1:
        lines.append(
            f"{_counted(len(result.runs), 'run')} in {_counted(result.rounds, 'round')}"
            f"{', every second one backwards' if result.rounds > 1 else ''}; ratios are paired by round, with "
            f"{result.confidence:.0%} intervals."
        )
    lines += [f"{arm.name}: {arm.label}." for arm in result.arms if arm.label]
    if result.stopped:
        lines.append(f"Stopped early: {result.stopped}. What was finished is kept.")
    if result.headline is not None:
        said = 0 if result.headline.verdict == result.headline.measured else 1  # the verdict's own reason
        lines += [f"Doubt: {doubt}." for doubt in result.headline.doubts[said : said + 4]]
    return tuple(lines)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _tables(result: ReplayResult) -> tuple[TextTable, ...]:
    return (
        _arm_table(result),
        _comparison_table(result),
        _hit_table(result),
        _evidence_table(result),
        _latency_table(result),
        _interval_table(result),
        _failure_table(result),
        _client_table(result),
        _run_table(result),
        _command_table(result),
    )


def _arm_table(result: ReplayResult) -> TextTable:
    sources = list(dict.fromkeys(source for one in result.summaries for source in one.tokens_by_source))
    rows = []
    names = {_tail(one.ttft_s)[1] for one in result.summaries if one.ttft_s is not None}
    for one in result.summaries:
        tail, name = _tail(one.ttft_s)
        if len(names) > 1 and tail != "-":
            tail = f"{name} {tail}"
        rows.append(
            (
                one.arm,
                _middle_text(one.ttft_s),
                tail,
                f"{one.requests_per_s:.2f}",
                f"{one.output_tokens_per_s:.1f}",
                _ratio_text(one),
                *(f"{one.tokens_by_source.get(source, 0.0):,.0f}" for source in sources),
                _cache_states(one),
                f"{one.ok}/{one.requests + one.not_sent}",
            )
        )
    tail_name = "tail" if len(names) > 1 else next(iter(names), "max")
    return TextTable(
        title="Arms",
        columns=(
            "arm", "TTFT p50", f"TTFT {tail_name}", "req/s", "out tok/s", "cached", *sources, "start", "ok",
        ),
        left=frozenset({"start"}),
        rows=tuple(rows),
        highlight=frozenset() if result.headline is None else frozenset({len(rows) - 1}),
        note=f"{', '.join(sources) or 'no source'}: prompt tokens by where they came from, as the server counts; "
        "cached: all but the computed ones. start: the cache at the start of a run.",
    )  # fmt: skip


def _tail(spread: Distribution | None) -> tuple[str, str]:
    """The highest percentile that so many values carry, else the maximum; with its name."""
    if spread is None:
        return "-", "max"
    found = spread.at(0.99)
    if found is not None:
        return format_duration(found.value), "p99"
    return format_duration(spread.maximum), "max"


def _middle_text(spread: Distribution | None) -> str:
    middle = spread.at(0.5) if spread else None
    return "-" if middle is None else format_duration(middle.value)


def _ratio_text(one: ArmSummary) -> str:
    total = sum(one.tokens_by_source.values())
    if not total:
        return "not told"
    return f"{1 - one.tokens_by_source.get('computed', 0.0) / total:.1%}"


def _cache_states(one: ArmSummary) -> str:
    states = dict.fromkeys(one.cache_states)
    return ", ".join(state if len(states) == 1 else f"{one.cache_states.count(state)} {state}" for state in states)


def _comparison_table(result: ReplayResult) -> TextTable:
    rows: list[tuple[str, ...]] = []
    highlight: set[int] = set()
    for one in result.comparisons:
        if one.quantity not in _SHOWN:
            continue
        if one is result.headline:
            highlight.add(len(rows))
        timed = "/s" not in one.quantity
        if one.low is None or one.high is None:
            change, interval = _factors(one.ratio)[0], "-"
        else:
            change, low, high = _factors(one.ratio, one.low, one.high)
            interval = f"{low} to {high}"
        rows.append(
            (
                f"{one.arm} / {one.base}",
                one.quantity,
                format_duration(_middle(one.base_values)) if timed else f"{_middle(one.base_values):.2f}",
                format_duration(_middle(one.arm_values)) if timed else f"{_middle(one.arm_values):.2f}",
                change,
                interval,
                str(len(one.arm_values)),
                one.verdict if one.verdict == one.measured else f"{one.verdict} (else {one.measured})",
            )
        )
    return TextTable(
        title="Paired comparison",
        columns=(
            "arm / base",
            "quantity",
            "base",
            "arm",
            "change",
            f"{result.confidence:.0%} interval",
            "pairs",
            "verdict",
        ),
        left=frozenset({"quantity", "verdict"}),
        rows=tuple(rows),
        highlight=frozenset(highlight),
        note=f"No P99 of a run below {least_samples(0.99)} requests, nor of fewer gaps. Better or worse: the interval "
        f"excludes no change and the change is beyond ±{result.margin_ratio:.0%}; no difference: the interval lies "
        "within it.",
    )  # fmt: skip


def _hit_table(result: ReplayResult) -> TextTable:
    return TextTable(
        title="TTFT by the tier that served it and by prompt length",
        columns=("arm", "tier", "prompt tokens", "n", "TTFT p50", "computed (in)", "change", "verdict"),
        left=frozenset({"tier", "verdict"}),
        rows=tuple(_hit_cells(row) for row in result.hits),
        note="tier: that of most cached tokens where at least half of the prompt was cached, else miss. "
        "computed: the same requests where an arm missed them, with the change from it.",
    )  # fmt: skip


def _hit_cells(row: HitRow) -> tuple[str, ...]:
    middle = row.ttft_s.at(0.5)
    if row.ratio is None:
        change = "-"
    elif row.low is None or row.high is None:
        change = _factors(row.ratio)[0]
    else:
        ratio, low, high = _factors(row.ratio, row.low, row.high)
        change = f"{ratio} ({low} to {high})"
    most = "…" if row.most_tokens >= 1 << 30 else f"{row.most_tokens:,}"
    return (
        row.arm,
        row.tier,
        f"{row.least_tokens:,} to {most}",
        str(row.requests),
        "-" if middle is None else format_duration(middle.value),
        "-" if row.computed_ttft_s is None else f"{format_duration(row.computed_ttft_s)} ({row.computed_arm})",
        change,
        row.verdict or "-",
    )


def _evidence_table(result: ReplayResult) -> TextTable:
    rows = [
        (
            summary.arm,
            use.tier,
            {True: "yes", False: "no", None: "not told"}[use.exercised],
            _served(use),
            "-" if use.load_bytes is None else format_bytes(use.load_bytes),
            _weight(use),
            "-" if use.store_bytes is None else format_bytes(use.store_bytes),
        )
        for summary in result.summaries
        for use in summary.tier_use
    ]
    return TextTable(
        title="Was the tier used?",
        columns=("arm", "tier", "used", "tokens served", "loaded", "against tokens × bytes/token", "stored"),
        left=frozenset({"tier", "used"}),
        rows=tuple(rows),
        note="Differences of the server's own counters around each run, added up over the arm's runs.",
    )


def _served(use: TierUse) -> str:
    if use.tokens is None:
        return "not told"
    total = sum(use.found.values())
    parts = ", ".join(f"{count / total:.0%} {name}" for name, count in use.found.items())
    return f"{use.tokens:,.0f}" + (f" ({parts})" if total else "")


def _weight(use: TierUse) -> str:
    if not use.expected_bytes or use.load_bytes is None:
        return "-"
    return f"{format_bytes(use.expected_bytes)} ({use.load_bytes / use.expected_bytes - 1:+.1%})"


def _latency_table(result: ReplayResult) -> TextTable:
    rows = []
    for one in result.summaries:
        for name, spread in (
            ("TTFT", one.ttft_s), ("TTFT, cold prefix", one.ttft_cold_s), ("TTFT, shared prefix", one.ttft_warm_s),
            ("TTFT to first text", one.first_text_ttft_s), ("ITL (per chunk)", one.itl_s), ("TPOT", one.tpot_s),
            ("E2E", one.e2e_s), ("send lag", one.send_lag_s),
        ):  # fmt: skip
            if spread is not None:
                rows.append((one.arm, name, str(spread.count), *_cells(spread)))
    return TextTable(
        title="Latencies of all runs together",
        columns=("arm", "quantity", "n", "mean", "p50", "p90", "p95", "p99", "max"),
        left=frozenset({"quantity"}),
        rows=tuple(rows),
        note=f"A percentile needs enough values: {least_samples(0.9)} for p90, {least_samples(0.95)} for p95, "
        f"{least_samples(0.99)} for p99. Requests of one run depend on each other: read, do not test, these.",
    )


def _cells(spread: Distribution) -> tuple[str, ...]:
    found = [spread.at(quantile) for quantile in (0.5, 0.9, 0.95, 0.99)]
    return (
        _signed(spread.mean),
        *("-" if one is None else _signed(one.value) for one in found),
        _signed(spread.maximum),
    )


def _interval_table(result: ReplayResult) -> TextTable:
    rows = []
    for one in result.summaries:
        for name, spread in (
            ("TTFT", one.ttft_s),
            ("ITL (per chunk)", one.itl_s),
            ("TPOT", one.tpot_s),
            ("E2E", one.e2e_s),
        ):
            if spread is not None:
                rows.append((one.arm, name, *(_interval(spread, quantile) for quantile in (0.5, 0.9, 0.99))))
    return TextTable(
        title="95 % intervals of these percentiles",
        columns=("arm", "quantity", "p50", "p90", "p99"),
        left=frozenset({"quantity"}),
        rows=tuple(rows),
    )


def _interval(spread: Distribution, quantile: float) -> str:
    found = spread.at(quantile)
    if found is None or found.low is None or found.high is None:
        return "-"
    return f"{_signed(found.low)} to {_signed(found.high)}"


def _signed(seconds: float) -> str:
    return format_duration(seconds)


def _failure_table(result: ReplayResult) -> TextTable:
    rows = []
    for one in result.summaries:
        for status, count in one.failed.items():
            example = next(
                (request for run in result.runs_of(one.arm) for request in run.requests if request.status == status),
                None,
            )
            rows.append((one.arm, status, str(count), (example.detail or "") if example else ""))
        if one.not_sent:
            rows.append((one.arm, "not sent", str(one.not_sent), result.stopped or ""))
    return TextTable(
        title="Requests that did not end well",
        columns=("arm", "what", "requests", "first of them"),
        left=frozenset({"what", "first of them"}),
        rows=tuple(rows),
    )


def _client_table(result: ReplayResult) -> TextTable:
    rows = []
    for arm in result.arms:
        runs = result.runs_of(arm.name)
        if not runs:
            continue
        late = max((run.client.send_lag_p99_s or 0.0 for run in runs), default=0.0)
        rows.append(
            (
                arm.name,
                str(max(run.client.workers for run in runs)),
                f"{max(run.client.cpu_ratio for run in runs):.0%}",
                f"{sum(run.client.cpu_s for run in runs):.1f} s",
                format_bytes(max(run.client.max_rss_bytes for run in runs)),
                format_duration(late),
                format_duration(max((run.client.loop_lag_max_s or 0.0 for run in runs), default=0.0)),
                str(sum(run.client.held_back for run in runs)),
            )
        )
    return TextTable(
        title="The load generator itself",
        columns=(
            "arm",
            "workers",
            "CPU, busiest run",
            "CPU, all",
            "memory",
            "send lag p99",
            "loop lag max",
            "held back",
        ),
        rows=tuple(rows),
    )


def _run_table(result: ReplayResult) -> TextTable:
    return TextTable(
        title="Runs in their order",
        columns=("run", "arm", "TTFT p50", "ok", "cached tokens", "duration", "cache at start", "what showed it"),
        left=frozenset({"arm", "cache at start", "what showed it"}),
        rows=tuple(_run_cells(run) for run in sorted(result.runs, key=lambda one: one.position)),
    )


def _run_cells(run: Run) -> tuple[str, ...]:
    ttfts = [one.ttft_s for one in run.finished if one.ttft_s is not None]
    return (
        f"{run.position + 1} (round {run.round + 1})",
        run.arm,
        format_duration(_middle(ttfts)) if ttfts else "-",
        f"{len(run.finished)}/{len(run.requests) + run.not_sent}",
        "not told" if run.cached_tokens is None else f"{run.cached_tokens:,}",
        format_duration(run.duration_s),
        run.cache.state,
        run.cache.reason if run.stopped is None else f"{run.cache.reason}; stopped: {run.stopped}",
    )


def _command_table(result: ReplayResult) -> TextTable:
    from kvbench.report.tables import shell_line

    rows = []
    for arm in result.arms:
        page_text = "" if arm.page_tokens is None else f", pages of {arm.page_tokens} tokens"
        weight = "" if arm.kv_bytes_per_token is None else f", {arm.kv_bytes_per_token:,.0f} B/token"
        server = f"{arm.dialect} {arm.version or ''} {arm.model}{page_text}{weight}"
        started = "" if arm.start_s is None else format_duration(arm.start_s)
        command = " ; ".join(shell_line(one) for one in arm.commands) or arm.url
        rows.append((arm.name, " ".join(server.split()), started, command))
    return TextTable(
        title="Servers",
        columns=("arm", "server", "start", "command"),
        left=frozenset({"server", "command"}),
        rows=tuple(rows),
    )


def _figures(result: ReplayResult) -> tuple[Figure, ...]:
    figures = []
    if any(run.finished for run in result.runs):
        figures.append(
            Figure(
                svg=ttft_by_tier_svg(result),
                caption="Share of requests with at most this TTFT, by arm and by the tier of most cached tokens.",
            )
        )
    if any(one.quantity in _SHOWN for one in result.comparisons):
        figures.append(
            Figure(
                svg=paired_differences_svg(result),
                caption="Each dot is one pair of runs, each bar the interval; the band is the margin of no difference.",
            )
        )
    if any(run.requests for run in result.runs):
        figures.append(
            Figure(
                svg=timeline_svg(result),
                caption="One run of each arm: requests in flight, and bytes loaded from each tier by interval.",
            )
        )
    return tuple(figures)
