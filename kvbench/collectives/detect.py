"""Which reader a file needs, decided by its content: names of logs and dumps follow no rule."""

import re
from pathlib import Path
from typing import Literal

from kvbench.collectives.nccl_lines import MARKER

_HEAD_BYTES = 256 * 1024
_ARCHIVES = ((b"PK\x03\x04", "zip"), (b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ\x00", "xz"))
_SQLITE = b"SQLite format 3\x00"
_PICKLE = re.compile(rb"\x80[\x02-\x05]")
_TAR_AT, _TAR = 257, b"ustar"

Content = Literal["archive", "nsys", "flight-recorder", "json", "text", "empty", "binary"]


def detect(path: Path) -> Content:
    """What the file holds, from its first and last bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        if not head:
            return "empty"
        if any(head.startswith(magic) for magic, _ in _ARCHIVES) or head[_TAR_AT : _TAR_AT + 5] == _TAR:
            return "archive"
        if head.startswith(_SQLITE):
            return "nsys"
        if _PICKLE.match(head):
            return "flight-recorder"
        file.seek(max(size - _HEAD_BYTES, 0))
        tail = file.read(_HEAD_BYTES)
    if MARKER.search(head) or MARKER.search(tail):
        return "text"
    start = head.lstrip()[:1]
    if start in {b"{", b"["}:
        return "json"
    if path.suffix.lower() in {".sqlite", ".sqlite3", ".db"}:
        return "nsys"  # to be refused by name
    return "binary" if _is_binary(head) else "text"


def _is_binary(head: bytes) -> bool:
    sample = head[:8192]
    strange = sum(sample.count(byte) for byte in (b"\x00", b"\x01", b"\x02", b"\xff"))
    try:
        sample.decode("utf-8")
        return strange > 0 and b"\x00" in sample
    except UnicodeDecodeError as error:
        return error.start < len(sample) - 4 and (
            strange > 0 or sum(byte >= 0x80 for byte in sample) > len(sample) // 4
        )
