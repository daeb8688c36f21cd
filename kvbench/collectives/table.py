"""Builds a process log from rows: for the formats that name each call in a record of its own."""

from array import array

from kvbench.collectives.summary import Format, Kind, ProcessLog

_MOST = 2**62


class LogBuilder:
    """Collects records and interns their kinds."""

    def __init__(self, path: str, form: Format, *, host: str = "", pid: str = "") -> None:
        self.log = ProcessLog(path=path, format=form, host=host, pid=pid)
        self._numbers: dict[Kind, int] = {}
        self._ids: array[int] = array("I")
        self._times: array[int] = array("q")
        self._seq_ids: array[int] = array("q")
        self._places: list[str] = []

    def add(self, kind: Kind, *, place: str, time_ns: int | None = None, seq_id: int | None = None) -> None:
        """One record, in host order. A number that no clock and no counter can show is a ValueError."""
        if not (-_MOST < (time_ns or 0) < _MOST and -_MOST < (seq_id or 0) < _MOST):
            raise ValueError(f"a time of {time_ns} or a sequence number of {seq_id}")
        number = self._numbers.get(kind)
        if number is None:
            number = self._numbers[kind] = len(self.log.kinds)
            self.log.kinds.append(kind)
        self._ids.append(number)
        self._places.append(place)
        if time_ns is not None:
            self._times.append(time_ns)
        if seq_id is not None:
            self._seq_ids.append(seq_id)

    def finish(self) -> ProcessLog:
        """The log; columns that not every record has are left out."""
        log = self.log
        log.append(self._ids)
        log.places = tuple(self._places)
        log.times_ns = self._times if len(self._times) == len(self._ids) and self._ids else None
        log.seq_ids = self._seq_ids if len(self._seq_ids) == len(self._ids) and self._ids else None
        return log
