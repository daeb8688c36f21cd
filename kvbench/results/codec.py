"""The one JSON codec: result documents to text and files, and back, refusing by name what it cannot read."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvbench.core.errors import KvbenchError
from kvbench.results.document import Document
from kvbench.results.registry import result_class

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

_LEAVES = frozenset({str, int, bool, type(None)})


def to_json(document: Document[Any]) -> str:
    """The document as indented JSON with a newline at its end; a number that is not finite is refused by its key."""
    from pydantic_core import to_json as encode

    try:
        plain = _plain(document)
    except _NotJsonError:
        _name_the_key(document, "document")
    return encode(plain, indent=2).decode() + "\n"


def from_json(text: str | bytes, *, source: str) -> Document[Any]:
    """The document in `text`; `source` is the file's name, for the one-line errors."""
    body = _parsed(text, source)
    kind = _header(body, "kind", str, source)
    version = _header(body, "schema_version", int, source)
    expected = result_class(kind, source=source)
    if version != expected.SCHEMA_VERSION:
        raise KvbenchError(
            f"{source}: schema_version {version} of kind {kind!r} cannot be read (this kvbench reads "
            f"{expected.SCHEMA_VERSION}); use the kvbench that wrote it ({body.get('kvbench_version', 'unknown')})"
        )
    return _validated(text, expected, source)


def read_document(path: Path) -> Document[Any]:
    """The document saved in a file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise KvbenchError(
            f"{path}: cannot be read ({error.strerror or error}); name a file that --out wrote"
        ) from error
    return from_json(text, source=str(path))


def write_document(document: Document[Any], path: Path) -> None:
    """Saves the document; the file is complete or unchanged, never half of it."""
    write_text(to_json(document), path)


def write_text(text: str, path: Path) -> None:
    """Writes beside the target and renames, so that a full disk or Ctrl-C leaves the old file as it was."""
    target = path.resolve()
    try:
        if target.exists() and not target.is_file():  # /dev/stdout or a pipe: renaming over it would replace the device
            target.write_text(text, encoding="utf-8")
            return
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise KvbenchError(
            f"{path}: cannot be written ({error.strerror or error}); name a file in a folder that exists and has room"
        ) from error


class _NotJsonError(Exception):
    """A value deep inside has no JSON form; the slow second pass finds out which."""


@cache
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is float:
        if math.isfinite(value):
            return value
        raise _NotJsonError
    if kind is tuple or kind is list:
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if is_dataclass(kind):
        return {name: _plain(getattr(value, name)) for name in _field_names(kind)}
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Path):
        return str(value)
    raise _NotJsonError


def _key(key: object) -> str:
    if isinstance(key, str):
        return key
    raise _NotJsonError


def _name_the_key(value: Any, name: str) -> NoReturn:
    """Walks down to the value that has no JSON form and raises with its dotted key."""
    children: list[tuple[str, Any]] = []
    if isinstance(value, tuple | list):
        children = [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    elif isinstance(value, Mapping):
        children = [(f"{name}.{key}", item) for key, item in value.items()]
    elif is_dataclass(value):
        children = [(f"{name}.{field.name}", getattr(value, field.name)) for field in fields(value)]
    for child_name, child in children:
        try:
            _plain(child)
        except _NotJsonError:
            _name_the_key(child, child_name)
    if isinstance(value, float):
        raise KvbenchError(
            f"{name} is {value}, which JSON cannot hold and no measurement means; "
            "a missing number must be None with a reason (please report this as a bug)"
        )
    raise TypeError(f"{name} is a {type(value).__name__}, which has no JSON form")


def _parsed(text: str | bytes, source: str) -> dict[str, Any]:
    remedy = "name a complete file that --out wrote"
    try:
        body = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise KvbenchError(
            f"{source}:{error.lineno}: not readable as JSON ({error.msg} at column {error.colno}); {remedy}"
        ) from error
    except RecursionError as error:
        raise KvbenchError(f"{source}: nested too deeply to be a result; {remedy}") from error
    except ValueError as error:  # not UTF-8, NaN, or an integer of thousands of digits
        raise KvbenchError(f"{source}: not readable as JSON ({error}); {remedy}") from error
    if not isinstance(body, dict):
        raise KvbenchError(f"{source}: holds a JSON {type(body).__name__}, not a result object; {remedy}")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(literal: str) -> float:
    value = float(literal)
    if math.isinf(value):
        raise ValueError(f"{literal} is beyond the range of a number")
    return value


def _header(body: Mapping[str, Any], key: str, kind: type, source: str) -> Any:
    value = body.get(key)
    if key not in body:
        raise KvbenchError(f"{source}: key {key!r} is missing, so this is not a kvbench result; see docs/results.md")
    if type(value) is not kind:
        raise KvbenchError(f"{source}: key {key!r} is {_short(value)}, not {kind.__name__}; see docs/results.md")
    return value


def _validated(text: str | bytes, expected: type[Any], source: str) -> Document[Any]:
    from pydantic import ValidationError

    try:
        document: Document[Any] = _adapter(expected).validate_json(text, strict=True)
    except ValidationError as error:
        raise KvbenchError(f"{source}: {_first_error(error)}") from error
    except KvbenchError as error:  # a dataclass refused an impossible value; say in which file
        raise type(error)(f"{source}: {error}") from error
    return document


def _adapter(expected: Any) -> "TypeAdapter[Document[Any]]":
    from pydantic import TypeAdapter

    return TypeAdapter(Document[expected])


def _first_error(error: "ValidationError") -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"]) or "the document"
    if first["type"] == "missing":
        return f"key {key!r} is missing; was the file edited by hand? make it again with the command that wrote it"
    return (
        f"key {key!r} is {_short(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}; "
        "was the file edited by hand? make it again with the command that wrote it"
    )


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
