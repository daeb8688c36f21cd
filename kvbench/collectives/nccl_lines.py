"""Lines of NCCL and RCCL text logs, 2.4 to 2.31: COLL, CALL, INIT and DESTROY messages, whole or damaged.

    node1:814:902 [0] NCCL INFO AllReduce: opCount 1c sendbuff 0x7f.. recvbuff 0x7f.. count 8192 datatype 9 op 0
        root 0 comm 0x55.. [nranks=8] stream 0x56..                                             (one line)
    node1:814:902 NCCL CALL ncclAllReduce(7f2e00,7f2e00,8192,9,0,0,0x55d0,0x56a0)

Everything of a line but its time, opCount and buffers is one key of a dictionary of lines seen before. A line that is
not in it is parsed by regular expressions once; damaged and interleaved lines end up there too.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvbench.collectives import watchdog
from kvbench.collectives.summary import Kind, Remark

LONGEST_LINE = 64 * 1024
_MOST_CACHED = 200_000
_MIDDLE = 90  # from `: opCount` to ` count`; an interleaved second message makes it longer
_MIDDLE_RCCL = 112  # with RCCL's `acc POINTER`

MARKER = re.compile(rb" NCCL |ProcessGroupNCCL|WorkNCCL|CollectiveFingerPrint|NCCL work|enqueued work|NCCL version ")

DTYPES = [
    "int8",
    "uint8",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8e4m3",
    "float8e5m2",
]
REDOPS = ("sum", "prod", "max", "min", "avg")
ROOTED = frozenset({"Broadcast", "Reduce", "Gather", "Scatter"})
REDUCING = frozenset({"AllReduce", "Reduce", "ReduceScatter"})
P2P = frozenset({"Send", "Recv"})
OPS = (
    frozenset({"AllGather", "AllReduce", "Broadcast", "Reduce", "ReduceScatter", "AlltoAll", "Gather", "Scatter"}) | P2P
)

ANSI = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")
_POINTER = rb"(?:0x[0-9a-f]+|\(nil\))"
HEAD = re.compile(
    rb"(?P<host>[A-Za-z0-9_][\w.\-]*):(?P<pid>\d+):(?P<tid>\d+) "
    rb"(?:\[-?\d+\] )?(?:[\d.]+ [\w~:<>]+:\d+ |\S+:\d+ (?:\([^)]*\) )?)?NCCL (?P<level>INFO|CALL|WARN|TRACE|ABORT) "
)
_COLL = re.compile(
    rb"(?P<op>[A-Z][A-Za-z]+): opCount [0-9a-f]+ sendbuff \S+ recvbuff \S+ (?:\w+ \S+ )??count (?P<count>\d+) "
    rb"datatype (?P<dtype>\d+) op (?P<redop>\d+) root (?P<root>-?\d+) comm (?P<comm>" + _POINTER + rb") "
    rb"\[nranks=(?P<nranks>\d+)\] stream (?P<stream>" + _POINTER + rb")(?: task \d+ globalrank (?P<globalrank>\d+))?"
)
_CALL = re.compile(
    rb"nccl(?P<op>[A-Z][A-Za-z]+)\((?:0x)?[0-9a-f]+,(?:0x)?[0-9a-f]+,(?P<count>\d+),(?P<dtype>\d+),(?P<redop>\d+),"
    rb"(?P<root>-?\d+),(?P<comm>" + _POINTER + rb"),(?P<stream>" + _POINTER + rb")\)"
)
_CALL_GROUP = re.compile(rb"ncclGroup(?P<step>Start|End|SimulateEnd)\(\)")
_CALL_INIT = re.compile(
    rb"ncclCommInitRank\((?P<comm>"
    + _POINTER
    + rb"), ?(?P<nranks>\d+), ?(?P<commId>0x[0-9a-f]+), ?(?P<rank>\d+), ?-?\d+\)"
)
_CALL_SPLIT = re.compile(
    rb"ncclCommSplit\((?P<parent>"
    + _POINTER
    + rb"), ?(?P<color>-?\d+), ?(?P<key>-?\d+), ?(?P<comm>"
    + _POINTER
    + rb"), ?"
    rb"(?P<rank>-?\d+), ?(?P<nranks>-?\d+)\)"
)
_CALL_GROW = re.compile(
    rb"ncclCommGrow\((?P<parent>" + _POINTER + rb"), ?(?P<nranks>\d+), ?(?P<comm>" + _POINTER + rb")\)"
)
_CALL_END = re.compile(rb"ncclComm(?P<step>Abort|Destroy|Finalize)\((?P<comm>" + _POINTER + rb")\)")
_INIT = re.compile(
    rb"comm (?P<comm>" + _POINTER + rb") rank (?P<rank>\d+) n[rR]anks (?P<nranks>\d+) cudaDev (?P<dev>-?\d+) "
    rb"(?:nvmlDev -?\d+ )?busId [0-9a-fA-F]+ ?(?:parent (?P<parent>" + _POINTER + rb") )?"
    rb"(?:(?:split|child)Count (?P<ordinal>\d+) )?(?:color (?P<color>-?\d+) )?(?:key (?P<key>-?\d+) ?)?"
    rb"(?:commId (?P<commId>0x[0-9a-f]+) ?)?- (?P<step>Init START|Init COMPLETE|Destroy COMPLETE|Abort COMPLETE|"
    rb"Abort START|Revoke START|Revoke COMPLETE)"
)
TAIL = re.compile(
    rb" count \d+ datatype \d+ op \d+ root -?\d+ comm "
    + _POINTER
    + rb" \[nranks=\d+\] stream "
    + _POINTER
    + rb"(?: \w+ \d+)*\r?"
)
_HEAD_START = re.compile(rb"[A-Za-z0-9_][\w.\-]*:\d+:\d+ (?:\[-?\d*\]?)? ?N?C?C?$")
_MOST_DOUBTFUL = 10_000
_API = re.compile(rb"(ncclComm\w+) comm ")
_NOCOLOR = re.compile(rb"Rank (\d+) has color with NCCL_SPLIT_NOCOLOR")
_VERSION = re.compile(rb"NCCL version ([\w.+\-]+)")
_LABELS = (  # mpirun, torchrun and Ray, srun
    re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>:"),
    re.compile(rb"\[rank(\d+)\]:|\brank(\d+): "),
    re.compile(rb"(?:^|\s)(\d+): "),
)
_LOCAL_LABEL = re.compile(rb"\[default(\d+)\]:")
LOCAL_LABEL = "the launcher's label of the rank on its host"

_REMARKS: tuple[tuple[str, re.Pattern[bytes]], ...] = (
    ("size-mismatch", re.compile(rb"collective mismatch error|message truncated : receiving")),
    ("self-diagnosis", re.compile(rb"Mismatched collective detected|may be caused by a collective mismatch")),
    ("unmatched-self-send", re.compile(rb"Trying to (?:send to|recv from|receive from) self without")),
    ("revoked", re.compile(rb"communicator was revoked")),
    ("threads-racing", re.compile(rb"host threads racing to launch NCCL")),
    ("graph-mixing", re.compile(rb"communicators in a ncclGroup\(\) can be CUDA graph captured|can lead to hangs!")),
    ("network-error", re.compile(rb"NET/IB.*(?:Got completion from peer|async fatal event)")),
    ("wrong-argument", re.compile(rb": invalid root|is not a valid pointer|mismatchs with NCCL device")),
    ("symmetric-registration", re.compile(rb"symmetric registration check failed")),
)


@dataclass(slots=True)
class _Process:
    host: str
    pid: str
    number: int
    rank: int | None = None
    rank_source: str = ""


@dataclass(slots=True)
class Scanner:
    """Turns lines into numbers of kinds. `emit` receives one number per record, in file order."""

    path: str
    kinds: list[Kind] = field(default_factory=list)
    process_of: list[int] = field(default_factory=list)
    processes: list[_Process] = field(default_factory=list)
    emit: Callable[[int], None] = lambda _number: None
    damaged: int = 0
    recovered: int = 0
    doubtful: list[int] = field(default_factory=list)
    versions: dict[str, None] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    watch: watchdog.WatchdogText = field(default_factory=watchdog.WatchdogText)
    line: int = 0
    _cache: dict[bytes, int] = field(default_factory=dict)
    _numbers: dict[tuple[int, Kind], int] = field(default_factory=dict)
    _by_name: dict[tuple[str, str], _Process] = field(default_factory=dict)
    _by_comm: dict[str, _Process] = field(default_factory=dict)
    _skip: int = 0
    middle: int = _MIDDLE
    pending: bytes = b""
    pending_line: int = 0

    def scan(self, lines: Iterable[bytes], first_line: int) -> None:
        """Reads lines; the first has number `first_line`."""
        get, emit = self._cache.get, self.emit
        skip, middle = self._skip, self.middle
        for at_line, line in enumerate(lines, first_line):
            number = None
            at = line.find(b": opCount ")
            if at > 0:
                count = line.find(b" count ", at, at + middle)
                if count > 0:
                    number = get(line[skip:at] + line[count:])
            elif line.find(b" NCCL CALL ") > 0:
                at = line.find(b"(")
                number = get(line[skip:at] + line[line.find(b",", line.find(b",", at) + 1) :])
            if number is not None:
                emit(number)
            elif at > 0 or self.pending or MARKER.search(line) or watchdog.CONTINUES in line:
                self.line = at_line
                self._slow(line[:LONGEST_LINE])
                skip, middle = self._skip, self.middle

    def _slow(self, raw: bytes) -> None:
        line = ANSI.sub(b"", raw).rstrip(b"\r")
        if self.pending:
            line, self.pending = self._continued(line), b""
        head = HEAD.search(line)
        if head is None:
            self._without_head(line)
            return
        process = self._process(head["host"].decode(), head["pid"].decode(), line[: head.start()])
        message = line[head.end() :]
        tid, level = head["tid"].decode(), head["level"]
        number = self._call(process, message, tid) if level in {b"INFO", b"CALL"} else None
        if number is not None:
            if line == raw:
                self._remember(raw, head.start(), number)
            self.emit(number)
        elif level == b"WARN":
            self._remark(message, process)
        elif level == b"INFO" and self._lifecycle(process, message, tid):
            return
        elif b": opCount " in line or level == b"CALL":
            self._recover(line)

    def _call(self, process: _Process, message: bytes, tid: str) -> int | None:
        """The number of a complete call message, or None."""
        match = _COLL.fullmatch(message) or (_COLL.match(message) if b"NCCL " not in message else None)
        if match is not None and match["op"].decode() in OPS:
            if match["globalrank"] is not None and process.rank is None:
                process.rank, process.rank_source = int(match["globalrank"]), "globalrank of its RCCL lines"
            self._by_comm[match["comm"].decode()] = process
            return self._number(process, _call_kind(match, "COLL", tid, int(match["nranks"])))
        match = _CALL.fullmatch(message)
        if match is not None and match["op"].decode() in OPS:
            self._by_comm[match["comm"].decode()] = process
            return self._number(process, _call_kind(match, "CALL", tid, None))
        return None

    def _lifecycle(self, process: _Process, message: bytes, tid: str) -> bool:
        """Records INIT, DESTROY and split lines of level INFO."""
        match = _INIT.search(message)
        if match is not None:
            api = _API.search(message)
            found = {name: value.decode() for name, value in match.groupdict().items() if value is not None}
            found["api"] = api[1].decode() if api else ""
            what = _STEPS[found.pop("step")]
            self._step(process, what, "INIT", tid, found)
            return True
        nocolor = _NOCOLOR.search(message)
        if nocolor is not None:
            self._step(process, "split-without-colour", "INIT", tid, {"rank": nocolor[1].decode()})
            return True
        return False

    def _step(self, process: _Process, what: str, source: str, tid: str, found: dict[str, str]) -> None:
        comm, nranks = found.pop("comm", ""), found.pop("nranks", None)
        if comm:
            self._by_comm[comm] = process
        kind = Kind(
            what=what,
            source=source,
            thread=tid,
            comm=comm,
            num_ranks=int(nranks) if nranks is not None else None,
            detail=tuple(sorted(found.items())),
        )
        self.emit(self._number(process, kind))

    def _call_step(self, process: _Process, message: bytes, tid: str) -> bool:
        """Records a CALL line that is no collective."""
        match = _CALL_GROUP.fullmatch(message)
        if match is not None:
            step = match["step"]
            if step != b"SimulateEnd":
                self._step(process, "group-start" if step == b"Start" else "group-end", "CALL", tid, {})
            return True
        for pattern, what in ((_CALL_INIT, "init-done"), (_CALL_SPLIT, "split-done"), (_CALL_GROW, "grow-done")):
            match = pattern.fullmatch(message)
            if match is not None:
                found = {name: value.decode() for name, value in match.groupdict().items()}
                if found.get("color") == "-1":
                    found.pop("comm")
                    self._step(process, "split-without-colour", "CALL", tid, found)
                else:
                    self._step(process, what, "CALL", tid, found)
                return True
        match = _CALL_END.fullmatch(message)
        if match is not None:
            what = {b"Abort": "aborted", b"Destroy": "destroyed", b"Finalize": "finalized"}[match["step"]]
            self._step(process, what, "CALL", tid, {"comm": match["comm"].decode()})
            return True
        return message.startswith(
            (b"ncclGetUniqueId(", b"ncclRedOp", b"ncclPutSignal(", b"ncclSignal(", b"ncclWaitSignal(")
        )

    def _recover(self, line: bytes) -> None:
        """Takes whole messages out of a damaged line; keeps what may go on in the next line."""
        head = HEAD.search(line)
        if head is not None and head["level"] == b"CALL":
            process = self._process(head["host"].decode(), head["pid"].decode(), line[: head.start()])
            if self._call_step(process, line[head.end() :], head["tid"].decode()):
                return
        rest, found = line, 0
        while True:
            inner = None
            for candidate in HEAD.finditer(rest):
                inner = candidate
            if inner is None:
                break
            message = rest[inner.end() :]
            match = _COLL.match(message) or _CALL.match(message)
            if match is None or match["op"].decode() not in OPS:
                break
            process = self._process(inner["host"].decode(), inner["pid"].decode(), b"")
            self._by_comm[match["comm"].decode()] = process
            coll = match.re is _COLL
            kind = _call_kind(
                match, "COLL" if coll else "CALL", inner["tid"].decode(), int(match["nranks"]) if coll else None
            )
            self.emit(self._number(process, kind))
            found += 1
            glued = len(inner["host"]) - len(process.host)  # the end of the line that was interrupted
            rest = rest[: inner.start() + glued] + message[match.end() :]
        self.recovered += found
        self._doubt(self.line)
        if b"NCCL " in rest:
            self.pending, self.pending_line = rest, self.line

    def _continued(self, line: bytes) -> bytes:
        """The first half of an interleaved line with its second half, if `line` is that; else `line`."""
        if HEAD.search(line) is None:
            joined = self.pending + line
            head = HEAD.search(joined)
            if head is not None and (_COLL.match(joined, head.end()) or _CALL.match(joined, head.end())):
                self.recovered += 1
                return joined
        self.damaged += 1
        self._doubt(self.pending_line)
        return line

    def _doubt(self, line: int) -> None:
        """Notes a line that could not be read, or not as it stood."""
        if len(self.doubtful) < _MOST_DOUBTFUL and line not in self.doubtful[-2:]:
            self.doubtful.append(line)

    def _without_head(self, line: bytes) -> None:
        version = _VERSION.search(line)
        if version is not None:
            self.versions[version[1].decode()] = None
            return
        match = _COLL.search(line)
        if match is not None and match["op"].decode() in OPS:
            process = self._by_comm.get(match["comm"].decode())
            self._doubt(self.line)
            if process is not None:
                self.recovered += 1
                self.emit(self._number(process, _call_kind(match, "COLL", "", int(match["nranks"]))))
                return
        if not self.watch.read(line.decode("utf-8", "replace"), f"{self.path}:{self.line}") and b": opCount " in line:
            self.damaged += 1
            self._doubt(self.line)

    def _remark(self, message: bytes, process: _Process) -> None:
        for code, pattern in _REMARKS:
            if pattern.search(message):
                text = f"{process.host}:{process.pid}: {message.decode('utf-8', 'replace').strip()[:300]}"
                self.remarks.append(Remark(code, text, f"{self.path}:{self.line}"))
                return

    def number_of(self, line: bytes) -> int | None:
        """The number of a clean line that holds one call, without emitting it."""
        line = ANSI.sub(b"", line)
        head = HEAD.search(line)
        if head is None:
            return None
        process = self._process(head["host"].decode(), head["pid"].decode(), line[: head.start()])
        return self._call(process, line[head.end() :].rstrip(b"\r"), head["tid"].decode())

    def is_whole(self, line: bytes) -> bool:
        """Whether the last line of a file is a complete record, or none of ours."""
        line = ANSI.sub(b"", line)
        head = HEAD.search(line)
        if head is None:
            return _HEAD_START.search(line) is None
        message = line[head.end() :]
        patterns = (_INIT, _CALL_GROUP, _CALL_INIT, _CALL_SPLIT, _CALL_GROW, _CALL_END)
        return self.number_of(line) is not None or any(one.search(message) for one in patterns)

    def finish(self) -> None:
        """Counts a half line that was never continued."""
        if self.pending:
            self.damaged += 1
            self._doubt(self.pending_line)
            self.pending = b""

    def _remember(self, line: bytes, start: int, number: int) -> None:
        """Puts the line's fixed parts into the dictionary of the fast path."""
        if len(self._cache) >= _MOST_CACHED:
            self._cache.clear()
        self._skip = start
        at = line.find(b": opCount ")
        if at > 0:
            count = line.find(b" count ", at)
            self.middle = _MIDDLE_RCCL if b" acc " in line[at:count] else _MIDDLE
            key = line[start:at] + line[count:]
        else:
            at = line.find(b"(")
            key = line[start:at] + line[line.find(b",", line.find(b",", at) + 1) :]
        self._cache[key] = number

    def _number(self, process: _Process, kind: Kind) -> int:
        key = (process.number, kind)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.kinds)
            self.kinds.append(kind)
            self.process_of.append(process.number)
        return number

    def _process(self, host: str, pid: str, before: bytes) -> _Process:
        process = self._by_name.get((host, pid))
        if process is None:
            for known_host, known_pid in self._by_name:  # a host glued to the end of an interrupted line
                if known_pid == pid and host.endswith(known_host):
                    return self._by_name[known_host, known_pid]
            process = _Process(host=host, pid=pid, number=len(self.processes))
            process.rank, process.rank_source = _labelled(before)
            self._by_name[host, pid] = process
            self.processes.append(process)
        return process


_STEPS = {
    "Init START": "init-start",
    "Init COMPLETE": "init-done",
    "Destroy COMPLETE": "destroyed",
    "Abort COMPLETE": "aborted",
    "Abort START": "aborting",
    "Revoke START": "revoking",
    "Revoke COMPLETE": "revoked",
}


def _labelled(before: bytes) -> tuple[int | None, str]:
    """The rank that a launcher wrote before its lines, behind a timestamp or not, and where it comes from."""
    for pattern in _LABELS:
        match = pattern.search(before)
        if match is not None:
            return int(match[match.lastindex or 1]), "the launcher's label before its lines"
    match = _LOCAL_LABEL.search(before)
    return (int(match[1]), LOCAL_LABEL) if match is not None else (None, "")


def _call_kind(match: re.Match[bytes], source: str, tid: str, num_ranks: int | None) -> Kind:
    op = match["op"].decode()
    root = int(match["root"])
    redop = int(match["redop"])
    dtype = int(match["dtype"])
    stream = match["stream"].decode()
    return Kind(
        what="call",
        source=source,
        thread=tid,
        comm=match["comm"].decode(),
        op=op,
        count=int(match["count"]),
        dtype=DTYPES[dtype] if dtype < len(DTYPES) else f"type{dtype}",
        redop=(REDOPS[redop] if redop < len(REDOPS) else "dynamic") if op in REDUCING else None,
        root=root if op in ROOTED or op in P2P else None,
        stream="default" if stream == "(nil)" else stream,
        num_ranks=num_ranks,
    )
