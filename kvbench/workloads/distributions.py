"""Numbers drawn for lengths and pauses, by the standard library's generator, whose streams stay the same for good."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import accumulate
from random import Random
from typing import Protocol

KINDS = ("uniform", "exponential", "lognormal", "choice", "mixture")


class Distribution(Protocol):
    """A number with its spread."""

    def draw(self, random: Random) -> float: ...

    @property
    def most(self) -> float:
        """No draw is above this; infinite where there is no bound."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same."""

    value: float

    def draw(self, random: Random) -> float:
        return self.value

    @property
    def most(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Anything from `low` to `high`, both included when rounded."""

    low: float
    high: float

    def draw(self, random: Random) -> float:
        return random.uniform(self.low, self.high)

    @property
    def most(self) -> float:
        return self.high


@dataclass(frozen=True, slots=True)
class Exponential:
    """Memoryless with that mean, cut to `low`…`high`."""

    mean: float
    low: float = 0.0
    high: float = math.inf

    def draw(self, random: Random) -> float:
        return min(self.high, max(self.low, random.expovariate(1 / self.mean)))

    @property
    def most(self) -> float:
        return self.high


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Log-normal with that mean and coefficient of variation (both before it is cut to `low`…`high`)."""

    mean: float
    cv: float
    low: float = 0.0
    high: float = math.inf

    def draw(self, random: Random) -> float:
        variance = math.log1p(self.cv**2)
        value = random.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance))
        return min(self.high, max(self.low, value))

    @property
    def most(self) -> float:
        return self.high


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of `parts`, by weight."""

    weights: tuple[float, ...]
    parts: tuple[Distribution, ...]

    def draw(self, random: Random) -> float:
        return random.choices(self.parts, self.weights)[0].draw(random)

    @property
    def most(self) -> float:
        return max(part.most for part in self.parts)


class Popularity:
    """Which of `count` things is asked for: rank r with weight r^-alpha; alpha 0 is uniform, 1 is Zipf's law."""

    def __init__(self, count: int, alpha: float) -> None:
        self._reach = list(accumulate((rank + 1) ** -alpha for rank in range(count)))

    def draw(self, random: Random) -> int:
        """A number from 0, the most popular, to count - 1."""
        at = bisect_left(self._reach, random.random() * self._reach[-1])
        return min(at, len(self._reach) - 1)


def parse_distribution(written: object, value: Callable[[object], float], most: float = math.inf) -> Distribution:
    """A distribution as a file spells it; `value` reads one number with its unit. ValueError says what is wrong.

    No draw is above `most`: a value in the file that is gets refused, an open end is cut there.

    `512`, `{uniform: [100, 200]}`, `{exponential: {mean: 300, max: 900}}`, `{lognormal: {mean: 300, cv: 1, min: 16,
    max: 4096}}`, `{choice: {512: 0.5, 2048: 0.5}}`, `{mixture: [{weight: 0.7, of: 2s}, {weight: 0.3, of: …}]}`.
    """
    found = _parsed(written, value, most)
    if found.most > most:
        raise ValueError(f"goes up to {found.most:g}, and {most:g} is the most that can be planned")
    return found


def _parsed(written: object, value: Callable[[object], float], most: float) -> Distribution:
    if not isinstance(written, Mapping):
        return Constant(value(written))
    if len(written) != 1:
        raise ValueError(f"a distribution has one name ({', '.join(KINDS)}), not {_listed(written)}")
    kind, settings = next(iter(written.items()))
    if kind == "uniform":
        return _uniform(settings, value)
    if kind == "exponential":
        return Exponential(**_numbers(settings, kind, ("mean",), value, most))
    if kind == "lognormal":
        return Lognormal(**_numbers(settings, kind, ("mean", "cv"), value, most))
    if kind == "choice":
        if not isinstance(settings, Mapping) or not settings:
            raise ValueError("choice maps values to weights, like {choice: {512: 0.5, 2048: 0.5}}")
        return Mixture(
            tuple(_weight(weight) for weight in settings.values()), tuple(Constant(value(one)) for one in settings)
        )
    if kind == "mixture":
        return _mixture(settings, value, most)
    raise ValueError(f"unknown distribution {kind!r}{_hint(str(kind), KINDS)}; there are {', '.join(KINDS)}")


def _uniform(settings: object, value: Callable[[object], float]) -> Uniform:
    if not isinstance(settings, list) or len(settings) != 2:
        raise ValueError("uniform takes the lowest and the highest value, like {uniform: [100, 200]}")
    low, high = value(settings[0]), value(settings[1])
    if low > high:
        raise ValueError(f"uniform goes from {settings[0]} down to {settings[1]}; give the lower one first")
    return Uniform(low, high)


def _numbers(
    settings: object, kind: str, needed: tuple[str, ...], value: Callable[[object], float], most: float
) -> dict[str, float]:
    known = (*needed, "min", "max")
    if not isinstance(settings, Mapping) or not set(needed) <= set(settings):
        raise ValueError(f"{kind} needs {' and '.join(needed)}, like {{{kind}: {{mean: …, max: …}}}}")
    for key in settings:
        if key not in known:
            raise ValueError(f"unknown key {key!r} in {kind}{_hint(str(key), known)}; the keys are {', '.join(known)}")
    found = {key: _weight(one) if key == "cv" else value(one) for key, one in settings.items()}
    names = {"min": "low", "max": "high"}
    found.setdefault("max", most)
    if found["mean"] <= 0 or found.get("min", 0) > found.get("max", math.inf):
        raise ValueError(f"{kind} needs a mean above zero and min not above max (got {dict(settings)})")
    return {names.get(key, key): one for key, one in found.items()}


def _mixture(settings: object, value: Callable[[object], float], most: float) -> Mixture:
    if not isinstance(settings, list) or not settings:
        raise ValueError("mixture is a list of {weight: …, of: …}")
    for part in settings:
        if not isinstance(part, Mapping) or set(part) != {"weight", "of"}:
            raise ValueError(f"each part of a mixture has the keys weight and of, not {_listed(part)}")
    return Mixture(
        tuple(_weight(part["weight"]) for part in settings),
        tuple(_parsed(part["of"], value, most) for part in settings),
    )


def _weight(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not a number above zero")
    return float(value)


def _listed(written: object) -> str:
    return ", ".join(str(one) for one in written) if isinstance(written, Mapping) else repr(written)


def _hint(word: str, known: tuple[str, ...]) -> str:
    close = get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
