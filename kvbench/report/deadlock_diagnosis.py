"""Draws a deadlock diagnosis: three lines, the proof, the timeline by rank, the evidence, and what it cannot show."""

from rich.console import Console
from rich.text import Text

from kvbench.core.units import format_bytes
from kvbench.report.page import Figure, page
from kvbench.report.swim_lanes import Arrow, Box, swim_lanes_svg
from kvbench.report.tables import TextTable, Tone, print_notes, print_tables, print_verdict
from kvbench.results.deadlock_diagnosis import Cause, DeadlockDiagnosis, TimelineCall
from kvbench.results.document import Document

_TONES: dict[str, Tone] = {"divergence": "bad", "no-divergence": "good", "insufficient-input": "unsure"}
_MOST_ROWS = 24


def terminal(document: Document[DeadlockDiagnosis], console: Console) -> None:
    """Prints the three lines of the verdict, then everything that supports them."""
    result = document.result
    print_verdict(result.verdict[0], console, tone=_TONES[result.status], details=result.verdict[1:])
    console.print()
    for number, cause in enumerate(result.causes, start=1):
        _print_cause(number, cause, console)
    print_tables(_tables(result), console)
    _print_list("Consequences, not causes", result.consequences, console)
    _print_list("Other inputs", result.also, console)
    _print_list("What this input cannot show", result.cannot_show, console)
    _print_list("What to capture next", result.capture_next, console)
    print_notes(document, console)


def _print_cause(number: int, cause: Cause, console: Console) -> None:
    console.print(Text(f"Cause {number}, {cause.strength}, {cause.kind}: {cause.headline}", style="bold"))
    console.print(Text(f"  shown by {cause.model}, in the {cause.source}"))
    for line in _cause_lines(cause):
        console.print(Text(f"  {line}"))
    console.print()


def _cause_lines(cause: Cause) -> tuple[str, ...]:
    lines = [
        f"{step.rank} waits in {step.waits_in}; {step.for_rank} has it behind {step.held_by} ({step.queue})"
        if step.queue != "its host"
        else (
            f"{step.rank} waits in {step.waits_in}; {step.for_rank} never issued it and its last call is {step.held_by}"
        )
        for step in cause.cycle
    ]
    lines += [
        f"{', '.join(camp.ranks[:12])}{_more(len(camp.ranks) - 12)}: {camp.did}"
        for camp in cause.camps
        if not cause.cycle
    ]
    lines += [f"suspect {one.rank}: {one.reason}" for one in cause.suspects[:8]]
    if not cause.suspects:
        lines.append(f"no suspect: {cause.no_suspect_reason}")
    lines += [f"doubt: {doubt}" for doubt in cause.doubts]
    lines += [f"{one.place}  {one.text}".rstrip() for one in cause.evidence]
    lines.append(f"fix: {cause.fix}")
    return tuple(lines)


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def _print_list(title: str, lines: tuple[str, ...], console: Console) -> None:
    if lines:
        console.print(Text(title, style="bold"))
        for line in lines:
            console.print(Text(f"  {line}"))
        console.print()


def html(document: Document[DeadlockDiagnosis]) -> str:
    """The diagnosis as one page with the lanes drawn."""
    result = document.result
    details = [*result.verdict[1:]]
    details += [
        f"Cause {number}, {cause.strength}, {cause.kind}: {cause.headline}"
        for number, cause in enumerate(result.causes, start=1)
        if number > 1
    ]
    figures = (Figure(svg=_lanes(result), caption=_caption(result)),) if result.timeline else ()
    return page(
        document,
        title="Deadlock diagnosis",
        verdict=result.verdict[0],
        tone=_TONES[result.status],
        details=details,
        figures=figures,
        tables=(*_proof_tables(result), *_tables(result), *_list_tables(result)),
    )


def _caption(result: DeadlockDiagnosis) -> str:
    words = (
        "Calls around the first divergence in each rank's host order. "
        "Thick: entered, and waits; dashed: behind it in a queue, "
        "or in conflict; pale: ran. An arrow leads to the call that holds the rank which is waited for."
    )
    ring = bool(result.causes) and len(result.causes[0].cycle) > 0 and result.causes[0].strength == "certain"
    return f"{words} The arrows close a ring: none of these calls can ever run." if ring else words


def _lanes(result: DeadlockDiagnosis) -> str:
    boxes = []
    keys: dict[tuple[str, str, int], str] = {}
    columns = _columns(result.timeline)
    for call in result.timeline:
        key = f"{call.rank}|{call.communicator}|{call.index}"
        keys.setdefault((call.rank, call.communicator, call.index), key)
        boxes.append(
            Box(
                lane=f"{call.rank}, stream {call.stream}",
                column=columns[call.rank, call.position],
                title=f"{call.operation.split(' ')[0]} #{call.index} {call.communicator}",
                subtitle=f"{call.state}, {' '.join(call.operation.split(' ')[1:])}",
                colour_group=f"comm {call.communicator}",
                state=call.state,
                key=key,
                marked=call.cause is not None,
            )
        )
    return swim_lanes_svg(boxes, _arrows(result), title="Who is where, by rank and stream")


def _columns(timeline: tuple[TimelineCall, ...]) -> dict[tuple[str, int], int]:
    """The column of each call: its place in its rank's calls, counted so that the first marked calls align."""
    by_rank: dict[str, list[TimelineCall]] = {}
    for call in timeline:
        by_rank.setdefault(call.rank, []).append(call)
    columns = {}
    anchors = {}
    for rank, calls in by_rank.items():
        marked = [number for number, call in enumerate(calls) if call.cause == 1]
        anchors[rank] = marked[0] if marked else max(len(calls) - 1, 0)
    deepest = max(anchors.values(), default=0)
    for rank, calls in by_rank.items():
        for number, call in enumerate(calls):
            columns[rank, call.position] = number + deepest - anchors[rank]
    return columns


def _arrows(result: DeadlockDiagnosis) -> list[Arrow]:
    """One arrow per step of the first cycle: from the call a rank waits in to the call that holds the other rank."""
    if not result.causes:
        return []
    at = {}
    for call in result.timeline:
        if call.cause is not None:
            at[call.rank, _operation(call)] = f"{call.rank}|{call.communicator}|{call.index}"
    arrows = []
    for step in result.causes[0].cycle:
        source = next(
            (key for (rank, text), key in at.items() if rank == step.rank and step.waits_in.startswith(text)), None
        )
        target = next(
            (key for (rank, text), key in at.items() if rank == step.for_rank and step.held_by.startswith(text)), None
        )
        if source is not None and target is not None:
            arrows.append(Arrow(source=source, target=target))
    return arrows


def _operation(call: TimelineCall) -> str:
    words = call.operation.split(" ")
    return (
        f"{words[0]} #{call.index} of comm {call.communicator}"
        if words[0] not in {"Send", "Recv"}
        else f"Send {words[0]}"
    )


def _tables(result: DeadlockDiagnosis) -> tuple[TextTable, ...]:
    return (_timeline_table(result), _findings_table(result), _progress_table(result), *_input_tables(result))


def _timeline_table(result: DeadlockDiagnosis) -> TextTable:
    rows = tuple(
        (
            call.rank,
            f"#{call.index}",
            call.communicator,
            call.operation,
            call.stream,
            call.state,
            call.place.rpartition("/")[2],
        )
        for call in result.timeline
    )
    return TextTable(
        title="Timeline around the divergence, each rank in its own order",
        columns=("rank", "#", "comm", "call", "stream", "state", "where"),
        left=frozenset({"comm", "call", "stream", "state", "where"}),
        rows=rows,
        highlight=frozenset(number for number, call in enumerate(result.timeline) if call.cause == 1),
        note=(
            "ran: could run; waits: entered, its members are not all "
            "there; queued: behind a waiting call; conflict: members differ"
        ),
    )


def _findings_table(result: DeadlockDiagnosis) -> TextTable:
    return TextTable(
        title="Findings beside the verdict",
        columns=("finding", "what", "where", "what to do"),
        left=frozenset({"what", "where", "what to do"}),
        rows=tuple(
            (one.code, one.message, one.evidence[0].place.rpartition("/")[2] if one.evidence else "", one.remedy)
            for one in result.findings
        ),
    )


def _progress_table(result: DeadlockDiagnosis) -> TextTable:
    rows = result.progress[:_MOST_ROWS]
    return TextTable(
        title="Progress that the ranks report",
        columns=("rank", "communicator", "operation", "issued", "completed", "gave up on", "where"),
        left=frozenset({"communicator", "operation", "where"}),
        rows=tuple(
            (
                one.rank,
                one.communicator,
                one.operation or "all",
                _number(one.enqueued),
                _number(one.completed),
                _number(one.timed_out_at),
                one.place.rpartition("/")[2],
            )
            for one in rows
        ),
        note=f"{len(result.progress) - len(rows)} more rows are in the JSON"
        if len(result.progress) > len(rows)
        else "",
    )


def _number(value: int | None) -> str:
    return "" if value is None else f"{value}" if value >= 0 else "none"


def _input_tables(result: DeadlockDiagnosis) -> tuple[TextTable, ...]:
    communicators = TextTable(
        title="Communicators",
        columns=("communicator", "ranks with data", "unseen", "streams"),
        left=frozenset({"ranks with data", "streams"}),
        rows=tuple(
            (one.name, f"{len(one.ranks)} of {one.size}", str(one.num_unseen), ", ".join(one.streams))
            for one in result.communicators[:_MOST_ROWS]
        ),
        note="recognised across ranks: " + "; ".join(result.how_communicators) if result.how_communicators else "",
    )
    ranks = TextTable(
        title="Ranks",
        columns=("rank", "process", "calls", "file"),
        left=frozenset({"process", "file"}),
        rows=tuple(
            (one.rank, one.process.rpartition("/")[2], f"{one.num_calls:,}", one.path.rpartition("/")[2])
            for one in result.ranks[:_MOST_ROWS]
        ),
        note=_ranks_note(result),
    )
    files = TextTable(
        title="Files",
        columns=("file", "format", "size", "lines", "recovered", "damaged", "left out because"),
        left=frozenset({"format", "left out because"}),
        rows=tuple(
            (
                one.path.rpartition("/")[2],
                one.format or "none",
                format_bytes(one.num_bytes),
                f"{one.num_lines:,}",
                str(one.num_recovered),
                str(one.num_damaged),
                one.refused,
            )
            for one in result.files[:_MOST_ROWS]
        ),
        note=f"{len(result.files) - _MOST_ROWS} more files are in the JSON" if len(result.files) > _MOST_ROWS else "",
    )
    return communicators, ranks, files


def _ranks_note(result: DeadlockDiagnosis) -> str:
    parts = [f"rank known from: {result.how_ranks}"] if result.how_ranks else []
    if result.num_skipped_calls:
        parts.append(
            f"{result.num_skipped_calls:,} of {result.num_calls:,} calls are alike on all ranks and were skipped"
        )
    if len(result.ranks) > _MOST_ROWS:
        parts.append(f"{len(result.ranks) - _MOST_ROWS} more ranks are in the JSON")
    return "; ".join(parts)


def _proof_tables(result: DeadlockDiagnosis) -> tuple[TextTable, ...]:
    return tuple(
        TextTable(
            title=f"Cause {number}: {cause.kind}, {cause.strength}, shown by {cause.model}",
            columns=("",),
            rows=tuple((line,) for line in _cause_lines(cause)),
        )
        for number, cause in enumerate(result.causes, start=1)
    )


def _list_tables(result: DeadlockDiagnosis) -> tuple[TextTable, ...]:
    return tuple(
        TextTable(title=title, columns=("",), rows=tuple((line,) for line in lines))
        for title, lines in (
            ("Consequences, not causes", result.consequences),
            ("Other inputs", result.also),
            ("What this input cannot show", result.cannot_show),
            ("What to capture next", result.capture_next),
        )
    )
