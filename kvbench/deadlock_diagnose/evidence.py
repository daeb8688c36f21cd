"""From a record's number back to the line, row or entry that a reader can look up."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.collectives.nccl_log import locate
from kvbench.collectives.summary import ProcessLog
from kvbench.deadlock_diagnose.identity import Actor
from kvbench.results.deadlock_diagnosis import Evidence

_LONGEST = 300


@dataclass(slots=True, kw_only=True)
class Places:
    """Places of records, looked up in one go and kept."""

    paths: Mapping[str, Path]
    found: dict[tuple[int, int], Evidence] = field(default_factory=dict)

    def find(self, actors: "list[Actor]", wanted: Iterable[tuple[int, int]]) -> None:
        """Looks up (actor's number, record) pairs; each block of a log is read at most once."""
        by_segment: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for number, record in wanted:
            if (number, record) in self.found:
                continue
            segment, position = _segment(actors[number], record)
            by_segment[number, segment].append((position, record))
        for (number, which), positions in by_segment.items():
            log = actors[number].segments[which]
            self._in_log(number, log, positions)

    def _in_log(self, number: int, log: ProcessLog, positions: list[tuple[int, int]]) -> None:
        if log.places is not None:
            for position, record in positions:
                self.found[number, record] = Evidence(place=f"{log.path}: {log.places[position]}", text="")
            return
        lines = locate(log, [position for position, _ in positions], path=self.paths[log.path])
        for position, record in positions:
            line = lines.get(position)
            if line is not None:
                text = line.text.strip()
                text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
                self.found[number, record] = Evidence(place=f"{log.path}:{line.line}", text=text)

    def get(self, number: int, record: int) -> Evidence | None:
        """The place of a record that was looked up."""
        return self.found.get((number, record))

    def line(self, number: int, record: int) -> int:
        """The line of a record that was looked up in a text log, else 0."""
        found = self.found.get((number, record))
        line = found.place.rpartition(":")[2] if found is not None else ""
        return int(line) if line.isdigit() else 0


def _segment(actor: Actor, record: int) -> tuple[int, int]:
    for number, segment in enumerate(actor.segments):
        if record < segment.num_records:
            return number, record
        record -= segment.num_records
    raise AssertionError("a record number beyond the last segment")
