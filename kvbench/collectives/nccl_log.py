"""Reads NCCL and RCCL text logs block by block, over a million lines per second and core.

Stretches of nothing but COLL lines take the fast path of `_Pairs`; everything else goes line by line through
`nccl_lines.Scanner`. A line is found again by the checkpoint of its block.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvbench.collectives.nccl_lines import ANSI, HEAD, LONGEST_LINE, MARKER, OPS, TAIL, Scanner
from kvbench.collectives.summary import CHUNK_CALLS, Checkpoint, FileSummary, ProcessLog

BLOCK_BYTES = 1024 * 1024
PART_BYTES = 256 * 1024
_MOST_PAIRS = 50_000
_MOST_HEADS = 5_000


def read_nccl_log(path: Path, *, start: int = 0, stop: int | None = None, name: str | None = None) -> FileSummary:
    """The records of a text log, or of the whole lines of it that begin in the bytes from `start` to `stop`."""
    reader = _Reader(name or str(path))
    with path.open("rb") as file:
        for offset, block in _blocks(file, start, stop):
            reader.block(offset, block)
    return reader.summary(partial=start > 0)


def _blocks(file: BinaryIO, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines with their offsets. A line belongs to the range that it begins in."""
    offset = start
    if start > 0:
        file.seek(start - 1)
        offset = start - 1 + len(file.readline(LONGEST_LINE))
    rest = b""
    while stop is None or offset + len(rest) < stop:
        wanted = BLOCK_BYTES if stop is None else min(BLOCK_BYTES, stop - offset - len(rest))
        read = file.read(wanted)
        if not read:
            break
        block = rest + read
        end = block.rfind(b"\n") + 1
        if end == 0:
            if len(block) > LONGEST_LINE and not MARKER.search(block):  # no text: drop it, keep counting bytes
                offset, rest = offset + len(block), b""
            else:
                rest = block
            continue
        yield offset, block[:end]
        offset, rest = offset + end, block[end:]
    if rest:
        if stop is not None:
            rest += file.readline(LONGEST_LINE)
        yield offset, rest


def _parts(block: bytes) -> Iterator[bytes]:
    """The block in pieces of whole lines, small enough that one odd line costs little."""
    start = 0
    while start < len(block):
        end = block.find(b"\n", min(start + PART_BYTES, len(block) - 1)) + 1 or len(block)
        yield block[start:end]
        start = end


class _Pairs:
    """A second, faster path for stretches of nothing but COLL lines without times.

    Split at `: opCount `, a piece holds one line's end and the next line's beginning. There are few distinct pairs of
    these, so a line costs one search, one slice and one look-up; numpy then joins beginnings with their ends.
    """

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self.numbers: dict[bytes, int] = {}
        self.tails: dict[bytes, int] = {}
        self.heads: dict[bytes, int] = {b"": 0}
        self.tail_of: list[int] = []
        self.head_of: list[int] = []
        self.table: Any = None
        self.columns: Any = None
        self.off = False

    def read(self, part: bytes) -> bytes | None:
        """The kinds' numbers as 32-bit integers, or None where the part has to be read line by line."""
        if self.off or self.scanner.pending or not part.endswith(b"\n"):
            return None
        first, *pieces = part.split(b": opCount ")
        if not pieces or b"\n" in first:
            return None
        get, middle = self.numbers.get, self.scanner.middle
        usual = max(pieces[0].find(b" count ", 10, middle), 0)  # the same for long stretches: buffers have fixed widths
        found: list[int | None] = [get(piece[usual:]) for piece in pieces]
        if None in found and not self._learn(pieces, found, middle):
            return None
        head = self._head(first)
        return None if head is None else self._join(head, found)

    def _learn(self, pieces: list[bytes], found: list[int | None], middle: int) -> bool:
        for at, known in enumerate(found):
            if known is None:
                where = pieces[at].find(b" count ", 10, middle)
                found[at] = self._pair(pieces[at][where:]) if where > 0 else None
                if found[at] is None:
                    return False
        return True

    def _pair(self, key: bytes) -> int | None:
        known = self.numbers.get(key)
        if known is not None:
            return known
        tail, _, following = key.partition(b"\n")
        head = self._head(following)
        if head is None or not TAIL.fullmatch(tail):
            return None
        if len(self.numbers) >= _MOST_PAIRS:
            self.off = True
            return None
        self.tail_of.append(self.tails.setdefault(tail, len(self.tails)))
        self.head_of.append(head)
        self.numbers[key] = len(self.numbers)
        self.columns = None
        return self.numbers[key]

    def _head(self, text: bytes) -> int | None:
        known = self.heads.get(text)
        if known is not None:
            return known
        clean = ANSI.sub(b"", text)
        match = HEAD.search(clean)
        if match is None or clean[match.end() :].decode("latin-1") not in OPS or len(self.heads) >= _MOST_HEADS:
            return None
        self.heads[text] = len(self.heads)
        return self.heads[text]

    def _join(self, first: int, found: list[int | None]) -> bytes | None:
        import numpy as np

        if self.columns is None:
            self.columns = np.array(self.tail_of, dtype=np.int64), np.array(self.head_of, dtype=np.int64)
            size = (len(self.heads), len(self.tails))
            old, self.table = self.table, np.full(size, -1, dtype=np.int64)
            if old is not None:
                self.table[: old.shape[0], : old.shape[1]] = old
        pairs = np.array(found, dtype=np.int64)
        tails, following = self.columns[0][pairs], self.columns[1][pairs]
        heads = np.empty_like(following)
        heads[0], heads[1:] = first, following[:-1]
        if first >= self.table.shape[0]:
            self.columns = None
            return None
        numbers = self.table[heads, tails]
        if (numbers < 0).any():
            if not self._resolve(heads, tails, numbers):
                return None
            numbers = self.table[heads, tails]
        return bytes(numbers.astype(np.uint32).tobytes())

    def _resolve(self, heads: Any, tails: Any, numbers: Any) -> bool:
        """Asks the scanner once for each new combination of a beginning and an end."""
        head_texts, tail_texts = list(self.heads), list(self.tails)
        for at in (numbers < 0).nonzero()[0].tolist():
            head, tail = int(heads[at]), int(tails[at])
            if self.table[head, tail] >= 0:
                continue
            number = self.scanner.number_of(
                head_texts[head] + b": opCount 0 sendbuff 0x0 recvbuff 0x0" + tail_texts[tail]
            )
            if number is None:
                return False
            self.table[head, tail] = number
        return True


class _Reader:
    """Keeps what a scanner emits, apart by process and compressed, with a checkpoint per block."""

    def __init__(self, path: str) -> None:
        self.scanner = Scanner(path=path)
        self.logs: list[ProcessLog] = []
        self.waiting: list[array[int]] = []
        self.pairs = _Pairs(self.scanner)
        self.lines = 0
        self.num_bytes = 0
        self.ends_inside = 0

    def block(self, offset: int, block: bytes) -> None:
        """Reads one block of whole lines."""
        self.num_bytes += len(block)
        first_line = self.lines + 1
        if b"NCCL" not in block and b"CollectiveFingerPrint" not in block:
            self.lines += block.count(b"\n") + (not block.endswith(b"\n"))
            return
        ids = array("I")
        line = first_line
        for part in _parts(block):
            read = self.pairs.read(part)
            if read is not None:
                ids.frombytes(read)
                line += len(read) // ids.itemsize
            else:
                self.scanner.emit = ids.append
                lines = part.split(b"\n")
                self.scanner.scan(lines, line)
                line += len(lines) - (not lines[-1])
        self.lines = line - 1
        if not block.endswith(b"\n"):
            last = block[block.rfind(b"\n") + 1 :]
            self.ends_inside = 0 if self.scanner.is_whole(last) else self.lines
        for process in self.scanner.processes[len(self.logs) :]:
            self.logs.append(ProcessLog(path=self.scanner.path, format="nccl-log", host=process.host, pid=process.pid))
            self.waiting.append(array("I"))
        for number, own in self._by_process(ids):
            log, waiting = self.logs[number], self.waiting[number]
            log.checkpoints.append(Checkpoint(offset, first_line, log.num_records + len(waiting)))
            waiting.extend(own)
            if len(waiting) >= CHUNK_CALLS:
                log.append(waiting)
                self.waiting[number] = array("I")

    def _by_process(self, ids: "array[int]") -> Iterator[tuple[int, "array[int]"]]:
        if len(self.logs) == 1:
            yield 0, ids
            return
        if not ids:
            return
        import numpy as np

        numbers = np.frombuffer(ids, dtype=np.uint32)
        process = np.asarray(self.scanner.process_of, dtype=np.int64)[numbers]
        for number in np.unique(process).tolist():
            part = array("I")
            part.frombytes(numbers[process == number].tobytes())
            yield number, part

    def summary(self, *, partial: bool) -> FileSummary:
        """Everything that was read."""
        scanner = self.scanner
        scanner.finish()
        for number, log in enumerate(self.logs):
            if self.waiting[number]:
                log.append(self.waiting[number])
            process = scanner.processes[number]
            log.rank, log.rank_source = process.rank, process.rank_source
            log.kinds = scanner.kinds
            log.partial = partial
        return FileSummary(
            path=scanner.path,
            format="nccl-log" if self.logs or not scanner.watch.progress else "watchdog",
            processes=self.logs,
            progress=scanner.watch.progress,
            remarks=scanner.remarks + scanner.watch.remarks,
            comm_members={},
            versions=tuple(scanner.versions),
            num_lines=self.lines,
            num_bytes=self.num_bytes,
            damaged=scanner.damaged,
            recovered=scanner.recovered,
            doubtful=tuple(scanner.doubtful),
            ends_inside=self.ends_inside,
        )


class Located(NamedTuple):
    """Where a record stands in a text log."""

    line: int
    text: str


def locate(log: ProcessLog, positions: Iterable[int], *, path: Path) -> dict[int, Located]:
    """The lines of records, found by reading again only the blocks that hold them."""
    wanted = sorted(set(positions))
    found: dict[int, Located] = {}
    starts = [checkpoint.records for checkpoint in log.checkpoints]
    by_block: dict[int, list[int]] = {}
    for position in wanted:
        by_block.setdefault(bisect_right(starts, position) - 1, []).append(position)
    with path.open("rb") as file:
        for block, inside in by_block.items():
            checkpoint = log.checkpoints[block]
            _locate_in(file, log, checkpoint, set(inside), found)
    return found


def _locate_in(
    file: BinaryIO, log: ProcessLog, checkpoint: Checkpoint, wanted: set[int], found: dict[int, Located]
) -> None:
    scanner = Scanner(path=log.path)
    emitted: list[int] = []
    scanner.emit = emitted.append
    file.seek(checkpoint.offset)
    position, last, number = checkpoint.records, max(wanted), checkpoint.line
    while position <= last and (line := file.readline()):
        line = line.rstrip(b"\n")
        scanner.scan((line,), number)
        for kind in emitted:
            process = scanner.processes[scanner.process_of[kind]]
            if (process.host, process.pid) == (log.host, log.pid):
                if position in wanted:
                    found[position] = Located(number, line.decode("utf-8", "replace"))
                position += 1
        emitted.clear()
        number += 1
