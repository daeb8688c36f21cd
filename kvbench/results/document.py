"""The envelope of every saved result: what it is, where and how it was made, what to doubt, and the result itself."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from kvbench import __version__
from kvbench.core.provenance import Origin, Warning_
from kvbench.results.host import Host, describe_host
from kvbench.results.registry import Result

R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document(Generic[R]):
    """One saved result.

    `provenance` maps a field of the result to the origin of its number. A key is a field name, or a longer dotted tail
    where the same name occurs in two places: `rank_bytes`, `points.rank_bytes`. A dataclass that has a field
    `origin: Origin` speaks for its own numbers and needs no key.
    """

    kind: str
    schema_version: int
    kvbench_version: str
    created_at: str
    host: Host
    command_line: tuple[str, ...]
    interrupted: bool
    warnings: tuple[Warning_, ...]
    provenance: Mapping[str, Origin]
    result: R


def utc_now() -> datetime:
    """The clock of `created_at`; tests pass another one."""
    return datetime.now(UTC)


def new_document(
    result: R,
    *,
    command_line: Sequence[str],
    provenance: Mapping[str, Origin],
    warnings: Sequence[Warning_] = (),
    interrupted: bool = False,
    clock: Callable[[], datetime] = utc_now,
    host: Host | None = None,
) -> Document[R]:
    """Wraps a result that was made now, on this machine; passwords in `command_line` are masked."""
    return Document(
        kind=result.KIND,
        schema_version=result.SCHEMA_VERSION,
        kvbench_version=__version__,
        created_at=clock().astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        host=host or describe_host(),
        command_line=tuple(mask_secrets(argument) for argument in command_line),
        interrupted=interrupted,
        warnings=tuple(warnings),
        provenance=dict(provenance),
        result=result,
    )


_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SECRET = re.compile(r"([?&,][^=&,\s]*(?:secret|token|password|access_key)[^=&,\s]*=)[^&,)\s]+", re.IGNORECASE)


def mask_secrets(argument: str) -> str:
    """`redis://user:pw@host/0` as `redis://***@host/0`, `s3://b?secret_key=x` as `s3://b?secret_key=***`."""
    return _SECRET.sub(r"\1***", _USERINFO.sub("***", argument))


def numbers_without_origin(document: Document[Any]) -> tuple[str, ...]:
    """Dotted names of the result's numeric fields that neither `provenance` nor an `origin` field explains."""
    names = dict.fromkeys(_numeric_fields(document.result, ""))
    return tuple(name for name in names if not _explained(name, document.provenance))


def numeric_fields(result: Result) -> tuple[str, ...]:
    """Dotted names of all numeric fields of a result, for those who explain them by the part they stand in."""
    return tuple(dict.fromkeys(_numeric_fields(result, "")))


def _explained(name: str, provenance: Mapping[str, Origin]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[start:]) in provenance for start in range(len(parts)))


def _numeric_fields(value: object, name: str) -> Iterator[str]:
    """Names, some of them more than once; numbers of a tuple or record, which are many, without a call."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name
    elif isinstance(value, tuple | list):
        told = False
        for item in value:
            if type(item) in _PLAIN:
                if not told and type(item) in _NUMBERS:
                    told = True
                    yield name
            else:
                yield from _numeric_fields(item, name)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numeric_fields(item, f"{name}.{key}")
    elif is_dataclass(value) and not isinstance(getattr(value, "origin", None), Origin):
        prefix = f"{name}." if name else ""
        for field in fields(value):
            item = getattr(value, field.name)
            if type(item) not in _PLAIN:
                yield from _numeric_fields(item, prefix + field.name)
            elif type(item) in _NUMBERS:
                yield prefix + field.name


_NUMBERS = frozenset({int, float})
_PLAIN = _NUMBERS | {str, bool, type(None)}
