"""Ranks that are regularly the last to enter what everyone entered. Never a cause, and only with timestamps."""

import re
from collections import defaultdict
from datetime import UTC, datetime
from statistics import median

from kvbench.core.collectives import Instance
from kvbench.core.units import format_duration
from kvbench.deadlock_diagnose.causes import Case
from kvbench.results.deadlock_diagnosis import Finding

MOST_CALLS = 512
MOST_RANKS = 128
_LAST_RATIO = 0.2
_DEVIATIONS = 3.0
_NS = 1e-9
_TIME = re.compile(r"\[?(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")


def straggler_findings(case: Case) -> tuple[Finding, ...]:
    """A finding per rank that is last in more than a fifth of the calls, by more than three deviations."""
    times = _times(case)
    late: dict[int, list[float]] = defaultdict(list)
    last: dict[int, int] = defaultdict(int)
    meetings = 0
    spread: list[float] = []
    for members in times.values():
        if len(members) < 2:
            continue
        meetings += 1
        first = min(members.values())
        ordered = sorted(members, key=lambda program: members[program])
        last[ordered[-1]] += 1
        spread += [members[program] - first for program in ordered[:-1]]
        for program, at in members.items():
            late[program].append(at - first)
    if meetings < 8 or not spread:
        return ()
    usual = median(spread)
    deviation = median([abs(one - usual) for one in spread]) or 1e-9
    findings = []
    for program, count in sorted(last.items()):
        lateness = median(late[program])
        if count / meetings > max(_LAST_RATIO, 3 / len(late)) and lateness - usual > _DEVIATIONS * deviation:
            findings.append(
                Finding(
                    code="straggler",
                    message=(
                        f"{case.label(program)} is the last to enter {count} of "
                        f"{meetings} calls, by {format_duration(lateness)} in the median"
                    ),
                    remedy=(
                        "a late rank makes others wait and does not deadlock them; look "
                        "at its host work, and at clocks when ranks are on several hosts"
                    ),
                    evidence=(),
                )
            )
    return tuple(findings)


def _times(case: Case) -> dict[Instance, dict[int, float]]:
    found: dict[Instance, dict[int, float]] = defaultdict(dict)
    for program, calls in enumerate(case.window.programs[:MOST_RANKS]):
        log = case.identity.actors[program].segments[0]
        tail = [call for call in calls if not call.instance.is_p2p][-MOST_CALLS:]
        if log.times_ns is not None:
            for call in tail:
                found[call.instance][program] = log.times_ns[call.position] * _NS
            continue
        if not tail or log.places is not None:
            continue
        case.places.find(case.identity.actors, [(program, tail[0].position)])
        one = case.places.get(program, tail[0].position)
        if one is None or _TIME.match(one.text) is None:
            return {}
        case.places.find(case.identity.actors, [(program, call.position) for call in tail])
        for call in tail:
            line = case.places.get(program, call.position)
            match = _TIME.match(line.text) if line is not None else None
            if match is not None:
                found[call.instance][program] = _seconds(match)
    return found


def _seconds(match: re.Match[str]) -> float:
    year, month, day, hour, minute, second = (int(match[number]) for number in range(1, 7))
    fraction = float(f"0.{match[7]}") if match[7] else 0.0
    return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp() + fraction
