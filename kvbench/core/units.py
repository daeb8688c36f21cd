"""Parse and print sizes, rates and durations. The only file that converts units.

Values are in base units everywhere else: bytes, seconds, bytes per second, FLOP. People see capacity in GiB,
bandwidth in decimal GB/s, network links in Gbit/s.
"""

import math
import re

from kvbench.core.errors import UsageError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4
GIGA = 1e9
TERA = 1e12
PETA = 1e15

_BINARY_BYTES = {"KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_BYTES = {"B": 1, **_BINARY_BYTES, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BITS = {"bit": 1, "kbit": 10**3, "Kbit": 10**3, "Mbit": 10**6, "Gbit": 10**9, "Tbit": 10**12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_FLOP = {"FLOP": 1.0, "GFLOP": 1e9, "TFLOP": 1e12, "PFLOP": 1e15}
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*(\S*)\s*")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise UsageError(f"{what} {text!r} is not a number with a unit; write it like {example}")
    return _finite(float(match[1]), what, text, example), match[2]


def _finite(value: float, what: str, text: str, example: str) -> float:
    if not math.isfinite(value):
        raise UsageError(f"{what} {text!r} is beyond any machine; write it like {example}")
    return value


def parse_bytes(text: str) -> int:
    """Bytes in a size such as `64MiB` or `1.5TB`; `64M` is refused because it does not say 1000 or 1024."""
    value, unit = _split(text, "size", "64MiB")
    if unit not in _BYTES:
        hint = f"did you mean {text.strip()}iB or {text.strip()}B?" if f"{unit}iB" in _BYTES else "write it like 64MiB"
        raise UsageError(f"size {text!r} has unit {unit!r}, which is not one of {', '.join(_BYTES)}; {hint}")
    digits = text.strip().removesuffix(unit).strip()
    if digits.isdecimal():  # exact beyond 2**53, where a float is not
        return int(digits) * _BYTES[unit]
    size = _finite(value * _BYTES[unit], "size", text, "64MiB")
    if size != int(size):
        raise UsageError(f"size {text!r} is not a whole number of bytes; use a smaller unit")
    return int(size)


def parse_bandwidth(text: str) -> float:
    """Bytes per second in a rate such as `50GB/s`, `12GiB/s` or `400Gbit/s`."""
    value, unit = _split(text, "bandwidth", "50GB/s")
    per_second = unit.removesuffix("/s")
    if per_second == unit or per_second not in _BYTES | _BITS:
        raise UsageError(
            f"bandwidth {text!r} has unit {unit!r}; write bytes or bits per second, like 50GB/s or 400Gbit/s"
        )
    rate = value * _BYTES[per_second] if per_second in _BYTES else value * _BITS[per_second] / 8
    if rate <= 0:
        raise UsageError(f"bandwidth {text!r} must be above zero; write it like 50GB/s")
    return _finite(rate, "bandwidth", text, "50GB/s")


def parse_duration(text: str) -> float:
    """Seconds in a duration such as `100us`, `1.5ms` or `2s`."""
    value, unit = _split(text, "duration", "100us")
    if unit not in _SECONDS:
        raise UsageError(
            f"duration {text!r} has unit {unit!r}, which is not one of {', '.join(_SECONDS)}; write it like 100us"
        )
    return _finite(value * _SECONDS[unit], "duration", text, "100us")


def parse_request_rate(text: str) -> float:
    """Requests per second in a rate such as `2/s`, `0.5/s` or `30/min`."""
    value, unit = _split(text, "rate", "2/s")
    per = unit.removeprefix("/")
    if per == unit or per not in _SECONDS:
        raise UsageError(f"rate {text!r} has unit {unit!r}; write requests per time, like 2/s or 30/min")
    if value <= 0:
        raise UsageError(f"rate {text!r} must be above zero; write it like 2/s")
    return _finite(value / _SECONDS[per], "rate", text, "2/s")


def parse_flop_rate(text: str) -> float:
    """FLOP per second in `989e12` or `989TFLOP/s`."""
    value, unit = _split(text, "compute rate", "989e12 or 989TFLOP/s")
    scale = 1.0 if unit == "" else _FLOP.get(unit.removesuffix("/s"), 0.0) if unit.endswith("/s") else 0.0
    if value * scale <= 0:
        raise UsageError(
            f"compute rate {text!r} must be above zero FLOP per second; write it like 989e12 or 989TFLOP/s"
        )
    return _finite(value * scale, "compute rate", text, "989e12 or 989TFLOP/s")


def _scaled(value: float, steps: tuple[tuple[float, str], ...], digits: int) -> str:
    for scale, unit in steps:
        if abs(value) >= scale:
            return f"{value / scale:.{digits}f} {unit}"
    scale, unit = steps[-1]
    return f"{value / scale:.{digits}f} {unit}"


def format_bytes(size_bytes: float) -> str:
    """`1.47 GiB`; exact bytes below one KiB."""
    if abs(size_bytes) < KIB:
        return f"{size_bytes:g} B"
    return _scaled(size_bytes, ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")), 2)


def format_bandwidth(bytes_per_s: float) -> str:
    """`50.00 GB/s`, decimal as data sheets print it."""
    return _scaled(bytes_per_s, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")), 2)


def format_duration(seconds: float) -> str:
    """`31.5 ms`: three significant figures from ns to h; minutes from two minutes on, hours from two hours."""
    if seconds == 0:
        return "0 s"
    for scale, unit, least in (
        (3600.0, "h", 7200.0),
        (60.0, "min", 120.0),
        (1.0, "s", 1.0),
        (1e-3, "ms", 1e-3),
        (1e-6, "µs", 1e-6),
        (1e-9, "ns", 1e-9),
    ):
        if abs(seconds) >= least * 0.9995:
            value = seconds / scale
            digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
    return f"{seconds:.3g} s"


def format_flop(flop: float) -> str:
    """`0.39 PFLOP`: the next larger unit from a tenth of it on, as papers print it."""
    for scale, unit in ((PETA, "PFLOP"), (TERA, "TFLOP"), (GIGA, "GFLOP")):
        if flop >= scale / 10 or unit == "GFLOP":
            return f"{flop / scale:.2f} {unit}"
    raise AssertionError("unreachable")


def format_flop_rate(flop_per_s: float) -> str:
    """`989 TFLOP/s`."""
    for scale, unit in ((PETA, "PFLOP/s"), (TERA, "TFLOP/s"), (GIGA, "GFLOP/s")):
        if flop_per_s >= scale * 0.9995 or unit == "GFLOP/s":
            value = flop_per_s / scale
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    raise AssertionError("unreachable")


def format_count(count: float) -> str:
    """`235.1 B` parameters, `1,048,576` tokens below a million stay exact."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:,.0f}"


def seconds_from_ns(clock_ns: float) -> float:
    """A difference of two `perf_counter_ns` readings in seconds."""
    return clock_ns * 1e-9


def seconds_from_ms(elapsed_ms: float) -> float:
    """What a CUDA event timer returns, in seconds."""
    return elapsed_ms * 1e-3


def exact_ms_from_seconds(seconds: float) -> float:
    """For files of other tools whose times are in milliseconds."""
    return seconds * 1e3


def ns_from_seconds(seconds: float) -> int:
    """A duration as a difference of two `perf_counter_ns` readings."""
    return round(seconds * 1e9)


def whole_ms_from_seconds(seconds: float) -> int:
    """A duration as Redis takes it, in whole milliseconds and at least one."""
    return max(1, round(seconds * 1e3))
