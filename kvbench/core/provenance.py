"""Where a number comes from, carried beside it into every result."""

from dataclasses import dataclass
from typing import Literal

Provenance = Literal["spec", "modelled", "measured", "synthetic"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Origin of one number: a data sheet, a formula, a measurement on a named machine, or made-up input."""

    provenance: Provenance
    source: str
    formula: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Warning_:  # the trailing underscore keeps the built-in `Warning` visible
    """A doubt about a result, as data: a stable code, what is doubtful, what the reader can do about it."""

    code: str
    message: str
    remedy: str
