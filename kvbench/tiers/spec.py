"""Parse and print the spelling of a tier, such as `file:/mnt/nvme?size=1TiB&io=psync&direct=1`."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import unquote

from kvbench.core.errors import UsageError
from kvbench.core.units import GIB, KIB, MIB, TIB, parse_bandwidth, parse_bytes, parse_duration

Scheme = Literal["dram", "file", "s3", "redis", "mooncake", "null", "throttled", "faulty"]
FileIo = Literal["psync", "aio", "io_uring", "mmap", "gds"]
Fsync = Literal["none", "fdatasync", "fsync"]

_SCHEMES: dict[str, Scheme] = {
    "dram": "dram",
    "file": "file",
    "s3": "s3",
    "redis": "redis",
    "mooncake": "mooncake",
    "null": "null",
    "throttled": "throttled",
    "faulty": "faulty",
}
_FILE_IO: dict[str, FileIo] = {"psync": "psync", "aio": "aio", "io_uring": "io_uring", "mmap": "mmap", "gds": "gds"}
_FSYNC: dict[str, Fsync] = {"none": "none", "fdatasync": "fdatasync", "fsync": "fsync"}
_KEYS: dict[Scheme, tuple[str, ...]] = {
    "dram": (),
    "file": ("size", "io", "direct", "fsync"),
    "s3": ("size", "endpoint", "region"),
    "redis": ("size",),
    "mooncake": ("size", "protocol"),
    "null": (),
    "throttled": ("bandwidth", "latency", "segment_latency"),
}
_EXAMPLES = "dram:64GiB, file:/mnt/nvme?size=1TiB&direct=1, s3://bucket/prefix, redis://host:6379/0, null:"
_T = TypeVar("_T", bound=str)
_MAX_WRAPPERS = 16
_RESERVED = re.compile(r"[%?&=,()\s]")
_WRAPPER = re.compile(r"(throttled|faulty)\((.*)\)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier as a person spells it; `str()` gives the canonical spelling, which parses back to an equal spec.

    `location` is a directory for `file`, what follows `//` for a network tier, and empty otherwise. `options` are the
    keys of a network tier or a wrapper, as written. `inner` is the tier inside a wrapper.
    """

    scheme: Scheme
    location: str = ""
    size_bytes: int | None = None
    io: FileIo | None = None
    direct: bool | None = None
    fsync: Fsync | None = None
    options: tuple[tuple[str, str], ...] = ()
    inner: "TierSpec | None" = None

    def __str__(self) -> str:
        if self.inner is not None:
            settings = "".join(f", {key}={_quoted(value)}" for key, value in self.options)
            return f"{self.scheme}({self.inner}{settings})"
        if self.scheme == "dram":
            return "dram:" + ("" if self.size_bytes is None else _size(self.size_bytes))
        pairs = [] if self.size_bytes is None else [("size", _size(self.size_bytes))]
        pairs += [] if self.io is None else [("io", self.io)]
        pairs += [] if self.direct is None else [("direct", str(int(self.direct)))]
        pairs += [] if self.fsync is None else [("fsync", self.fsync)]
        query = "&".join(f"{key}={_quoted(value)}" for key, value in (*pairs, *self.options))
        separator = ":" if self.scheme in ("file", "null") else "://"
        return f"{self.scheme}{separator}{_quoted(self.location)}" + (f"?{query}" if query else "")


def parse_tier_spec(text: str) -> TierSpec:
    """The tier that `text` spells; anything unknown in it is refused with the nearest known word."""
    stripped = text.strip()
    if stripped.count("(") > _MAX_WRAPPERS:
        raise UsageError(f"a tier with {stripped.count('(')} wrappers is refused; use at most {_MAX_WRAPPERS}")
    if wrapper := _WRAPPER.fullmatch(stripped):
        return _wrapped(_SCHEMES[wrapper[1]], wrapper[2], text)
    name, colon, rest = stripped.partition(":")
    scheme = _SCHEMES.get(name)
    if scheme in ("throttled", "faulty"):
        raise UsageError(f"tier {text!r} wraps nothing; write it like {name}(dram:64GiB, …)")
    if scheme is None:
        if name.partition("=")[0] in _SCHEMES:
            raise UsageError(
                f"tier {text!r} is a modelled tier (name=bandwidth), not a place; a place is spelled like {_EXAMPLES}"
            )
        hint = _hint(name.partition("(")[0], _SCHEMES)
        raise UsageError(f"tier {text!r} has no known scheme{hint}; tiers are spelled like {_EXAMPLES}")
    body, _, query = rest.partition("?")
    pairs = _pairs(query.split("&") if query else [], scheme, text)
    if scheme == "dram":
        return TierSpec(scheme=scheme, size_bytes=_positive_bytes(body, text) if body else None)
    if not colon:
        raise UsageError(f"tier {text!r} names no place; tiers are spelled like {_EXAMPLES}")
    if scheme == "null":
        if body:
            raise UsageError(f"tier {text!r} takes nothing after 'null:', got {body!r}; write null:")
        return TierSpec(scheme=scheme)
    if scheme == "file":
        return _file(body, pairs, text)
    if not body.startswith("//") or body == "//":
        raise UsageError(f"tier {text!r} has no '//' and address after {name}:; tiers are spelled like {_EXAMPLES}")
    size = pairs.pop("size", None)
    return TierSpec(
        scheme=scheme,
        location=unquote(body[2:]),
        size_bytes=None if size is None else _positive_bytes(size, text),
        options=tuple(pairs.items()),
    )


def _file(body: str, pairs: dict[str, str], text: str) -> TierSpec:
    directory = unquote(body)
    if directory.startswith("//"):  # file:///mnt/nvme, as a URL
        directory = "/" + directory.lstrip("/")
    if not directory or "\0" in directory:
        raise UsageError(f"tier {text!r} names no directory; write it like file:/mnt/nvme")
    size, direct = pairs.get("size"), pairs.get("direct")
    if direct not in (None, "0", "1"):
        raise UsageError(f"tier {text!r}: direct is 1 (bypass the page cache) or 0 (through it), got {direct!r}")
    io = _choice("io", pairs.get("io"), _FILE_IO, text)
    if io == "mmap" and direct == "1":
        raise UsageError(
            f"tier {text!r}: io=mmap always goes through the page cache and cannot be direct=1; drop one of them"
        )
    return TierSpec(
        scheme="file",
        location=directory,
        size_bytes=None if size is None else _positive_bytes(size, text),
        io=io,
        direct=None if direct is None else direct == "1",
        fsync=_choice("fsync", pairs.get("fsync"), _FSYNC, text),
    )


def _wrapped(scheme: Scheme, inside: str, text: str) -> TierSpec:
    parts = _split_outside_parentheses(inside)
    inner = parse_tier_spec(parts[0])
    pairs = _pairs([part.strip() for part in parts[1:]], scheme, text)
    if "bandwidth" in pairs:
        parse_bandwidth(pairs["bandwidth"])
    for key in ("latency", "segment_latency"):
        if key in pairs:
            parse_duration(pairs[key])
    return TierSpec(scheme=scheme, options=tuple(pairs.items()), inner=inner)


def _split_outside_parentheses(inside: str) -> list[str]:
    parts, depth = [""], 0
    for character in inside:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _pairs(items: Iterable[str], scheme: Scheme, text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    known = _KEYS.get(scheme)  # None: the keys of `faulty` belong to whoever injects the faults
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"tier {text!r}: {item!r} is not key=value")
        if known is not None and key not in known:
            allowed = f"its keys are {', '.join(known)}" if known else f"{scheme} takes no keys"
            raise UsageError(f"tier {text!r} has the unknown key {key!r}{_hint(key, known)}; {allowed}")
        if key in pairs:
            raise UsageError(f"tier {text!r} has the key {key!r} twice; keep one")
        pairs[key] = unquote(value)
    return pairs


def _choice(key: str, value: str | None, allowed: dict[str, _T], text: str) -> _T | None:
    if value is None:
        return None
    if value not in allowed:
        raise UsageError(f"tier {text!r}: {key} is one of {', '.join(allowed)}, got {value!r}{_hint(value, allowed)}")
    return allowed[value]


def _hint(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _positive_bytes(size: str, text: str) -> int:
    size_bytes = parse_bytes(size)
    if size_bytes <= 0:
        raise UsageError(f"tier {text!r} has a size of zero; write it like 64GiB")
    return size_bytes


def _size(size_bytes: int) -> str:
    for scale, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"


def _quoted(text: str) -> str:
    return _RESERVED.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), text)
