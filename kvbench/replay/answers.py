"""The three questions, answered in words from the summaries and comparisons."""

from collections.abc import Sequence
from typing import Literal

from kvbench.core.units import format_duration
from kvbench.results.replay import Answer, ArmRecord, ArmSummary, Comparison, HitRow

REUSE = "What reuse did the tier add?"
FASTER = "Is a hit faster than recompute?"
LOSS = "Did concurrency lose throughput or tail latency?"
_NO_ANSWER = ("contaminated", "failed requests", "saturated")
"""Verdicts that leave none of the three questions answered; of an idle tier the numbers themselves tell."""


def answers(
    arms: Sequence[ArmRecord],
    summaries: Sequence[ArmSummary],
    comparisons: Sequence[Comparison],
    hits: Sequence[HitRow],
    *,
    ideal_hit_tokens: int,
    planned_prompt_tokens: int,
) -> tuple[Answer, ...]:
    """One answer per question; with one arm there is nothing to compare, and only its own reuse is told."""
    ideal = ideal_hit_tokens / planned_prompt_tokens if planned_prompt_tokens else 0.0
    found = (_reuse(summaries, ideal), _faster(hits), _loss(arms, comparisons))
    caveat = _caveat(arms, comparisons)
    return tuple(_with_caveat(answer, caveat) for answer in found) if caveat else found


def _caveat(arms: Sequence[ArmRecord], comparisons: Sequence[Comparison]) -> str:
    """Why what was measured is no answer; empty where the last arm can be compared with the first."""
    if len(arms) < 2:
        return ""
    one = next((one for one in comparisons if (one.base, one.arm) == (arms[0].name, arms[-1].name)), None)
    if one is None or one.verdict == one.measured or one.verdict not in _NO_ANSWER:
        return ""
    return f"Not an answer, {one.verdict}: "


def _with_caveat(answer: Answer, caveat: str) -> Answer:
    return Answer(question=answer.question, text=caveat + answer.text[:1].lower() + answer.text[1:], tone="unsure")


def _reuse(summaries: Sequence[ArmSummary], ideal: float) -> Answer:
    told = [one for one in summaries if sum(one.tokens_by_source.values()) > 0]
    if not told:
        return Answer(question=REUSE, text="No server tells where its prompt tokens came from.", tone="unsure")
    parts = []
    for one in told:
        total = sum(one.tokens_by_source.values())
        cached = total - one.tokens_by_source.get("computed", 0.0)
        tiers = [
            f"{count / total:.0%} {source}"
            for source, count in one.tokens_by_source.items()
            if source != "computed" and count / total >= 0.005
        ]
        parts.append(f"{one.arm} {cached / total:.0%}" + (f" ({', '.join(tiers)})" if len(tiers) > 1 else ""))
    shares = {one.arm: _share(one) for one in told}
    first, last = told[0], told[-1]
    added = shares[last.arm] - shares[first.arm]
    text = f"From a cache came, of all prompt tokens: {'; '.join(parts)}. A cache without limit would have {ideal:.0%}."
    if len(told) > 1:
        text += f" {last.arm} added {added * 100:.0f} percentage points over {first.arm}."
    return Answer(question=REUSE, text=text, tone="good" if added >= 0.01 else "neutral")


def _share(summary: ArmSummary) -> float:
    total = sum(summary.tokens_by_source.values())
    return 1 - summary.tokens_by_source.get("computed", 0.0) / total if total else 0.0


def _faster(hits: Sequence[HitRow]) -> Answer:
    rows = [row for row in hits if row.ratio is not None and row.tier != "miss"]
    if not rows:
        text = "No request was served by a tier in one arm and computed in another, so nothing can be said."
        return Answer(question=FASTER, text=text, tone="unsure")
    parts = []
    for row in sorted(rows, key=lambda one: (one.tier, one.least_tokens)):
        middle = row.ttft_s.at(0.5)
        ratio = row.ratio or 1.0
        speed = f"{1 / ratio:.1f}× as fast" if ratio <= 1 else f"{ratio:.1f}× as slow"
        word = {"better": "faster", "worse": "slower", "no difference": "the same", "inconclusive": "unsure"}
        parts.append(
            f"{row.tier} ({row.arm}, {_range(row)}): {word[row.verdict or 'inconclusive']}, {speed}: "
            f"{format_duration(middle.value if middle else 0)} against {format_duration(row.computed_ttft_s or 0)}"
        )
    verdicts = {row.verdict for row in rows}
    tone: str = "good" if verdicts == {"better"} else "bad" if "worse" in verdicts else "unsure"
    return Answer(question=FASTER, text="; ".join(parts) + ".", tone="good" if tone == "good" else _tone(tone))


def _tone(name: str) -> Literal["bad", "unsure"]:
    return "bad" if name == "bad" else "unsure"


def _range(row: HitRow) -> str:
    most = "" if row.most_tokens >= 1 << 30 else f"{row.most_tokens + 1:,}"
    if not most:
        return f"{row.least_tokens:,} tokens and more"
    return f"below {most} tokens" if row.least_tokens == 0 else f"{row.least_tokens:,} to {most} tokens"


def _loss(arms: Sequence[ArmRecord], comparisons: Sequence[Comparison]) -> Answer:
    if len(arms) < 2:
        return Answer(question=LOSS, text="One arm alone cannot show a loss.", tone="unsure")
    base = arms[0].name
    names = ("requests/s", "output tokens/s", "TTFT p99", "TTFT max", "ITL p99")
    tail_known = any(one.quantity == "TTFT p99" for one in comparisons)
    mine = [
        one
        for one in comparisons
        if one.base == base and one.quantity in names and not (tail_known and one.quantity == "TTFT max")
    ]
    if not mine:
        return Answer(question=LOSS, text=f"No pair of runs with {base} is complete.", tone="unsure")
    worse = [one for one in mine if one.measured == "worse"]
    if worse:
        parts = [f"{one.arm}: {one.quantity} {_change(one)}" for one in worse]
        return Answer(question=LOSS, text=f"Yes, against {base}: {'; '.join(parts)}.", tone="bad")
    unsure = [one for one in mine if one.measured == "inconclusive"]
    gained = [f"{one.arm}: {one.quantity} {_change(one)}" for one in mine if one.measured == "better"]
    text = f"No loss against {base} was found"
    if gained:
        text += f"; better are {'; '.join(gained)}"
    if unsure:
        by_arm: dict[str, list[str]] = {}
        for one in unsure:
            by_arm.setdefault(one.arm, []).append(one.quantity)
        told = "; ".join(f"{arm} ({', '.join(names)})" for arm, names in by_arm.items())
        text += f". Too uncertain to exclude one: {told}"
    if not tail_known:
        text += ". There are too few requests per run for a P99 (368), so the slowest request stands for it"
    return Answer(question=LOSS, text=text + ".", tone="unsure" if unsure and not gained else "good")


def _change(one: Comparison) -> str:
    change = f"{one.ratio - 1:+.0%}"
    if one.low is None or one.high is None:
        return change
    return f"{change} ({one.low - 1:+.0%} to {one.high - 1:+.0%})"
