"""Parse and print the spelling of a tier, such as `file:/mnt/nvme?size=1TiB&io=psync&direct=1`."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import unquote, urlsplit

from kvbench.core.errors import UsageError
from kvbench.core.units import GIB, KIB, MIB, TIB, parse_bandwidth, parse_bytes, parse_duration

Scheme = Literal["hbm", "dram", "file", "s3", "redis", "mooncake", "nixl", "null", "throttled", "faulty"]
Plugin = Literal["posix", "obj"]
FileIo = Literal["psync", "aio", "io_uring", "mmap", "gds"]
Fsync = Literal["none", "fdatasync", "fsync", "group"]

_SCHEMES: dict[str, Scheme] = {
    "hbm": "hbm",
    "device": "hbm",
    "dram": "dram",
    "file": "file",
    "s3": "s3",
    "redis": "redis",
    "mooncake": "mooncake",
    "nixl": "nixl",
    "null": "null",
    "throttled": "throttled",
    "faulty": "faulty",
}
_FILE_IO: dict[str, FileIo] = {"psync": "psync", "aio": "aio", "io_uring": "io_uring", "mmap": "mmap", "gds": "gds"}
_FSYNC: dict[str, Fsync] = {"none": "none", "fdatasync": "fdatasync", "fsync": "fsync", "group": "group"}
_KEYS: dict[Scheme, tuple[str, ...]] = {
    "hbm": (),
    "dram": ("shared", "headroom", "idle"),
    "file": ("size", "io", "direct", "fsync", "depth", "timeout"),
    "s3": ("size", "endpoint", "region", "timeout", "deadline", "concurrency"),
    "redis": ("size", "prefix", "timeout", "deadline", "concurrency"),
    "mooncake": (
        "size",
        "protocol",
        "devices",
        "host",
        "segment",
        "buffer",
        "replicas",
        "metrics",
        "prefix",
        "timeout",
        "deadline",
    ),
    "nixl": ("size", "io", "direct", "endpoint", "region", "buffer", "timeout", "deadline", "concurrency"),
    "null": (),
    "throttled": ("bandwidth", "latency", "segment_latency"),
    "faulty": (
        "load_fail",
        "store_fail",
        "corrupt",
        "torn",
        "slow",
        "hang",
        "after",
        "until",
        "down",
        "seed",
    ),
}
_PLUGINS: dict[str, Plugin] = {"posix": "posix", "obj": "obj"}
_PLUGIN_KEYS: dict[Plugin, tuple[str, ...]] = {
    "posix": ("size", "io", "direct", "buffer", "timeout", "deadline"),
    "obj": ("size", "endpoint", "region", "buffer", "timeout", "deadline", "concurrency"),
}
# What the POSIX plugin of NIXL calls its three ways to files.
_NIXL_IO = {"aio": "aio", "uring": "uring", "posix_aio": "posix_aio"}
_PROTOCOLS = {"tcp": "tcp", "rdma": "rdma"}
_SHARED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EXAMPLES = "hbm:1GiB, dram:64GiB, file:/mnt/nvme?size=1TiB&direct=1, s3://bucket/prefix, redis://host:6379/0, null:"
_T = TypeVar("_T", bound=str)
_MAX_WRAPPERS = 16
_PROBABILITIES = ("load_fail", "store_fail", "corrupt", "torn", "hang")
_MOST_AT_ONCE = 4096  # requests or connections: more is a slip of the pen, and would be that many threads
_COUNTS = {"depth": 1, "after": 0, "until": 0, "seed": 0, "concurrency": 1, "replicas": 1}
_DECIMAL = re.compile(r"[0-9]{1,6}(\.[0-9]{0,18})?|\.[0-9]{1,18}", re.ASCII)
_RESERVED = re.compile(r"[%?&=,()\s]")
_ENDPOINT = re.compile(r"https?://[^/\s]+/?")
_WRAPPER = re.compile(r"(throttled|faulty)\((.*)\)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier as a person spells it; `str()` gives the canonical spelling, which parses back to an equal spec.

    `location` is a directory for `file`, what follows `//` for a network tier, and empty otherwise. `options` are the
    other keys of a tier or a wrapper, as written. `plugin` is what a NIXL tier moves bytes to: a directory of files, or
    a bucket. `inner` is the tier inside a wrapper.
    """

    scheme: Scheme
    location: str = ""
    plugin: Plugin | None = None
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
        if self.scheme in ("hbm", "dram"):
            query = "&".join(f"{key}={_quoted(value)}" for key, value in self.options)
            size = "" if self.size_bytes is None else _size(self.size_bytes)
            return f"{self.scheme}:{size}" + (f"?{query}" if query else "")
        pairs = [] if self.size_bytes is None else [("size", _size(self.size_bytes))]
        pairs += [] if self.io is None else [("io", self.io)]
        pairs += [] if self.direct is None else [("direct", str(int(self.direct)))]
        pairs += [] if self.fsync is None else [("fsync", self.fsync)]
        query = "&".join(f"{key}={_quoted(value)}" for key, value in (*pairs, *self.options))
        separator = ":" if self.scheme in ("file", "null") or self.plugin == "posix" else "://"
        scheme = self.scheme if self.plugin is None else f"{self.scheme}+{self.plugin}"
        return f"{scheme}{separator}{_quoted(self.location)}" + (f"?{query}" if query else "")


def parse_tier_spec(text: str) -> TierSpec:
    """The tier that `text` spells; anything unknown in it is refused with the nearest known word."""
    stripped = text.strip()
    if stripped.count("(") > _MAX_WRAPPERS:
        raise UsageError(f"a tier with {stripped.count('(')} wrappers is refused; use at most {_MAX_WRAPPERS}")
    if wrapper := _WRAPPER.fullmatch(stripped):
        return _wrapped(_SCHEMES[wrapper[1]], wrapper[2], text)
    name, colon, rest = stripped.partition(":")
    if name.partition("+")[0] == "nixl" and (plus := name.partition("+")[1:])[0]:
        return _nixl(plus[1], rest if colon else "", text)
    scheme = _SCHEMES.get(name)
    if scheme == "nixl":
        raise UsageError(
            f"tier {text!r} names no plugin; write it like nixl+posix:/mnt/nvme or nixl+obj://bucket/prefix"
        )
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
    if scheme in ("hbm", "dram"):
        _check_options(pairs, text)
        size_bytes = _positive_bytes(body, text) if body else None
        return TierSpec(scheme=scheme, size_bytes=size_bytes, options=tuple(pairs.items()))
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
    _check_options(pairs, text)
    return TierSpec(
        scheme=scheme,
        location=unquote(body[2:]),
        size_bytes=None if size is None else _positive_bytes(size, text),
        options=tuple(pairs.items()),
    )


def _nixl(plugin_name: str, rest: str, text: str) -> TierSpec:
    plugin = _PLUGINS.get(plugin_name)
    if plugin is None:
        raise UsageError(
            f"tier {text!r} has the unknown plugin {plugin_name!r}{_hint(plugin_name, _PLUGINS)}; "
            "use nixl+posix:DIRECTORY or nixl+obj://BUCKET/PREFIX"
        )
    body, _, query = rest.partition("?")
    pairs = _pairs(query.split("&") if query else [], "nixl", text)
    for key in pairs:
        if key not in (known := _PLUGIN_KEYS[plugin]):
            raise UsageError(f"tier {text!r}: {key} means nothing to nixl+{plugin}; its keys are {', '.join(known)}")
    direct = _direct(pairs.pop("direct", None), text)
    size = pairs.pop("size", None)
    _choice("io", pairs.get("io"), _NIXL_IO, text)
    _check_options(pairs, text)
    location = unquote(body)
    if plugin == "posix":
        location = _directory(location, text, "nixl+posix:/mnt/nvme")
    elif not location.startswith("//") or not location.strip("/"):
        raise UsageError(f"tier {text!r} names no bucket; write it like nixl+obj://bucket/prefix")
    else:
        location = location[2:]
    return TierSpec(
        scheme="nixl",
        plugin=plugin,
        location=location,
        size_bytes=None if size is None else _positive_bytes(size, text),
        direct=direct,
        options=tuple(pairs.items()),
    )


def _directory(location: str, text: str, example: str) -> str:
    if location.startswith("//"):  # file:///mnt/nvme, as a URL
        location = "/" + location.lstrip("/")
    if not location or "\0" in location:
        raise UsageError(f"tier {text!r} names no directory; write it like {example}")
    if location == "~" or location.startswith("~/"):  # a shell leaves it as it is after a colon
        return str(Path(location).expanduser())
    return location


def _direct(value: str | None, text: str) -> bool | None:
    if value not in (None, "0", "1"):
        raise UsageError(f"tier {text!r}: direct is 1 (bypass the page cache) or 0 (through it), got {value!r}")
    return None if value is None else value == "1"


def _file(body: str, pairs: dict[str, str], text: str) -> TierSpec:
    directory = _directory(unquote(body), text, "file:/mnt/nvme")
    size, direct = pairs.get("size"), _direct(pairs.get("direct"), text)
    io = _choice("io", pairs.get("io"), _FILE_IO, text)
    if io == "mmap" and direct:
        raise UsageError(
            f"tier {text!r}: io=mmap always goes through the page cache and cannot be direct=1; drop one of them"
        )
    _check_options(pairs, text)
    return TierSpec(
        scheme="file",
        location=directory,
        size_bytes=None if size is None else _positive_bytes(size, text),
        io=io,
        direct=direct,
        fsync=_choice("fsync", pairs.get("fsync"), _FSYNC, text),
        options=tuple((key, pairs[key]) for key in ("depth", "timeout") if key in pairs),
    )


def _check_options(pairs: dict[str, str], text: str) -> None:
    """Refuses what nobody can use, before anything is opened."""
    for key, value in pairs.items():
        if key in _PROBABILITIES:
            _ratio(key, value, text)
        elif key == "slow":
            probability, colon, duration = value.partition(":")
            if not colon:
                raise UsageError(f"tier {text!r}: slow is a share and a time, like slow=0.1:50ms, got {value!r}")
            _ratio(key, probability, text)
            parse_duration(duration)
        elif key == "down":
            start, dash, end = value.partition("-")
            if not dash or parse_duration(start) >= parse_duration(end):
                raise UsageError(f"tier {text!r}: down is a span of time, like down=10s-20s, got {value!r}")
        elif key in _COUNTS and not (value.isascii() and value.isdecimal() and _COUNTS[key] <= int(value) <= 2**32):
            raise UsageError(f"tier {text!r}: {key} is a whole number from {_COUNTS[key]} on, got {value!r}")
        elif key in ("depth", "concurrency") and int(value) > _MOST_AT_ONCE:
            raise UsageError(f"tier {text!r}: {key} is at most {_MOST_AT_ONCE}, got {value}")
        elif key in ("idle", "timeout", "deadline") and parse_duration(value) <= 0:
            raise UsageError(f"tier {text!r}: {key}={value} leaves no time; write it like {key}=30s")
        elif key in ("segment", "buffer"):
            if parse_bytes(value) <= 0 and key == "buffer":
                raise UsageError(f"tier {text!r} has a buffer of zero; write it like buffer=256MiB")
        elif key in ("endpoint", "metrics") and not (_ENDPOINT.fullmatch(value) and _has_port(value)):
            raise UsageError(f"tier {text!r}: {key} is a URL like http://127.0.0.1:8333, got {value!r}")
        elif key == "protocol":
            _choice("protocol", value, _PROTOCOLS, text)
        elif key == "headroom":
            _headroom(value, text)
        elif key == "shared" and not _SHARED_NAME.fullmatch(value):
            raise UsageError(
                f"tier {text!r}: shared is a name of letters, digits, '.', '_' and '-' (at most 64), got {value!r}"
            )


def _has_port(url: str) -> bool:
    """Whether what the URL names as its port, if anything, is one."""
    try:
        return bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        return False


def _ratio(key: str, value: str, text: str) -> float:
    if not _DECIMAL.fullmatch(value) or float(value) > 1:
        raise UsageError(f"tier {text!r}: {key} is a share from 0 to 1, like {key}=0.1, got {value!r}")
    return float(value)


def _headroom(value: str, text: str) -> float:
    if not _DECIMAL.fullmatch(value) or not 1 <= float(value) <= 16:
        raise UsageError(f"tier {text!r}: headroom is pool / capacity, from 1 to 16, like headroom=1.5, got {value!r}")
    return float(value)


def _wrapped(scheme: Scheme, inside: str, text: str) -> TierSpec:
    parts = _split_outside_parentheses(inside)
    inner = parse_tier_spec(parts[0])
    pairs = _pairs([part.strip() for part in parts[1:]], scheme, text)
    if "bandwidth" in pairs:
        parse_bandwidth(pairs["bandwidth"])
    for key in ("latency", "segment_latency"):
        if key in pairs:
            parse_duration(pairs[key])
    if scheme == "faulty":
        _check_options(pairs, text)
        if "until" in pairs and int(pairs["until"]) <= int(pairs.get("after", "0")):
            raise UsageError(f"tier {text!r}: until={pairs['until']} ends the faults before they begin; make it larger")
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
    known = _KEYS[scheme]
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise UsageError(f"tier {text!r}: {item!r} is not key=value")
        if key not in known:
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
