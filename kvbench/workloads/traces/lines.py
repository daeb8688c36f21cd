"""Lines, JSON objects and CSV rows of a trace, one at a time, from a file that may be compressed."""

import csv
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB, format_bytes
from kvbench.workloads.traces.base import Row, shown

LONGEST_LINE_BYTES = 64 * MIB
LARGEST_DOCUMENT_BYTES = 512 * MIB
_GZIP_MAGIC = b"\x1f\x8b"


def opened(path: Path) -> IO[bytes]:
    """The file's bytes, decompressed when it starts like gzip, whatever its name."""
    import gzip

    try:
        raw = path.open("rb")
        magic = raw.read(2)
        raw.seek(0)
    except OSError as error:
        raise KvbenchError(f"{path}: cannot be read ({error.strerror or error}); name a trace file") from error
    return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if magic == _GZIP_MAGIC else raw


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text without the line end) of every line; no line may be longer than 64 MiB."""
    number = 0
    with opened(path) as file:
        while True:
            number += 1
            try:
                data = file.readline(LONGEST_LINE_BYTES + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise KvbenchError(
                    f"{path}:{number}: the file ends early or is damaged ({error}); fetch it again"
                ) from error
            if not data:
                return
            if len(data) > LONGEST_LINE_BYTES:
                raise KvbenchError(
                    f"{path}:{number}: the line is longer than {format_bytes(LONGEST_LINE_BYTES)}; "
                    "write one request, or one conversation, per line"
                )
            try:
                text = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise KvbenchError(
                    f"{path}:{number}: is not UTF-8 text (byte {error.start} of the line); is it a trace?"
                ) from error
            yield number, text.rstrip("\r\n")


def json_rows(path: Path, format_name: str) -> Iterator[Row]:
    """One row per line that is not blank."""
    for number, text in text_lines(path):
        if text.strip():
            yield json_row(text, str(path), number, format_name)


def json_row(text: str, path: str, number: int, format_name: str) -> Row:
    """The JSON object in `text`."""
    value = json_value(text, path, number)
    if not isinstance(value, dict):
        raise KvbenchError(
            f"{path}:{number}: {shown(value)} is not a JSON object; is this a {format_name} trace? "
            "name the format with --format"
        )
    return Row(value, path, number, format_name)


def json_value(text: str, path: str, number: int) -> Any:
    """The JSON value in `text`; NaN and Infinity are refused."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise KvbenchError(f"{path}:{number}: the JSON is nested too deeply; is it a trace?") from error
    except ValueError as error:
        reason = str(error).split(" (", 1)[0]
        raise KvbenchError(
            f"{path}:{number}: is not JSON ({reason[:80]}: {shown(text[:40])}); is the file cut off?"
        ) from error


def json_documents(path: Path, format_name: str) -> Iterator[Row]:
    """JSON objects: one per line, or the whole file as one; a folder gives those of its *.json files in order."""
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.name.endswith((".json", ".json.gz", ".jsonl", ".jsonl.gz")))
        if not files:
            raise KvbenchError(f"{path}: has no .json or .jsonl file; name a trace file or a folder of them")
        for file in files:
            yield from json_documents(file, format_name)
        return
    lines = text_lines(path)
    first = next(((number, text) for number, text in lines if text.strip()), None)
    if first is None:
        return
    number, text = first
    if _is_json(text):
        yield json_row(text, str(path), number, format_name)
        for number, text in lines:
            if text.strip():
                yield json_row(text, str(path), number, format_name)
        return
    parts, size = [text], len(text)
    for _, text in lines:
        size += len(text) + 1
        if size > LARGEST_DOCUMENT_BYTES:
            raise KvbenchError(
                f"{path}: is one JSON document of more than {format_bytes(LARGEST_DOCUMENT_BYTES)}; "
                "write one object per line"
            )
        parts.append(text)
    yield json_row("\n".join(parts), str(path), number, format_name)


def csv_rows(path: Path, format_name: str) -> Iterator[Row]:
    """One row per line after the header."""
    lines = ((number, text) for number, text in text_lines(path) if text.strip())
    header_line = next(lines, None)
    if header_line is None:
        return
    header = _csv_fields(header_line[1], str(path), header_line[0])
    for number, text in lines:
        fields = _csv_fields(text, str(path), number)
        if len(fields) != len(header):
            raise KvbenchError(
                f"{path}:{number}: has {len(fields)} columns where the header has {len(header)} "
                f"({shown(text)}); correct or remove the line"
            )
        yield Row(dict(zip(header, fields, strict=True)), str(path), number, format_name)


def _csv_fields(text: str, path: str, number: int) -> list[str]:
    try:
        return [one.strip() for one in next(csv.reader([text], strict=True), [])]
    except csv.Error as error:
        raise KvbenchError(f"{path}:{number}: is not CSV ({error}); correct or remove the line") from error


def csv_whole(row: Row, key: str, *, most: int) -> int:
    """A whole number in a CSV field; `12.0` counts as one."""
    text = str(row.get(key))
    digits = text.removesuffix(".0")
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 15:
        raise row.refuse(f"{key!r} is {shown(text)}, not a whole number")
    return row.whole(key, int(digits), least=0, most=most)


def csv_seconds(row: Row, key: str) -> float:
    """A number of seconds in a CSV field."""
    text = str(row.get(key))
    try:
        value = float(text)
    except ValueError:
        raise row.refuse(f"{key!r} is {shown(text)}, not a number of seconds") from None
    return row.number_of_seconds(key, value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
