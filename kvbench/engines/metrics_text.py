"""Reads a Prometheus text page into samples; `vllm:x` and `vllm_x` are one name."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

# vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 4352.0
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_PREFIXES = ("kvbench", "vllm", "sglang")


class Sample(NamedTuple):
    """One line: a name such as `vllm:prompt_tokens_total`, its labels, its value."""

    name: str
    labels: dict[str, str]
    value: float


class MetricsPage:
    """The samples of one page by name."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def has_prefix(self, prefix: str) -> bool:
        """Whether any name starts with it."""
        return any(name.startswith(prefix) for name in self._by_name)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over all series of the name that carry these labels; None where there is no such series."""
        values = [
            sample.value
            for sample in self._by_name.get(name, ())
            if all(sample.labels.get(key) == value for key, value in labels.items())
        ]
        return sum(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by the values of one label."""
        sums: dict[str, float] = {}
        for sample in self._by_name.get(name, ()):
            if label in sample.labels:
                sums[sample.labels[label]] = sums.get(sample.labels[label], 0.0) + sample.value
        return sums

    def label(self, name: str, label: str) -> str | None:
        """The value of one label of the first series of a name, as `vllm:cache_config_info` carries settings."""
        return next((sample.labels[label] for sample in self._by_name.get(name, ()) if label in sample.labels), None)


def read_metrics(text: str) -> MetricsPage:
    """The page; comments, `_created` stamps, NaN and lines of another form are left out."""
    return MetricsPage(sample for line in text.splitlines() if (sample := _sample(line)) is not None)


def _sample(line: str) -> Sample | None:
    if not line or line[0] == "#":
        return None
    match = _LINE.fullmatch(line)
    if match is None or match[1].endswith("_created"):
        return None
    try:
        value = float(match[3])
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return Sample(_name(match[1]), dict(_LABEL.findall(match[2] or "")), value)


def _name(raw: str) -> str:
    for prefix in _PREFIXES:
        if raw.startswith(f"{prefix}_"):
            return f"{prefix}:{raw[len(prefix) + 1 :]}"
    return raw
