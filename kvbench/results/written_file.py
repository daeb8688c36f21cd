"""Read YAML that a person wrote into its schema, and say in one line which key of which file is wrong."""

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvbench.core.errors import KvbenchError, UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def read_plan_file(path: Path, *, example: str) -> Any:
    """What the YAML file holds; `example` names a good one in the error."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise KvbenchError(f"{path}: cannot be read ({error}); name a plan such as {example}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or error
        raise UsageError(f"{path}{line}: is not YAML ({problem}); see {example}") from error


def validated_plan(written: object, schema: "type[BaseModel]", *, source: str, example: str) -> Any:
    """The plan that was written, as its schema; the first mistake is named with its key."""
    from pydantic import ValidationError

    try:
        return schema.model_validate(written)
    except ValidationError as error:
        raise UsageError(f"{source}: {_first_error(error, schema, example)}") from error


def quantity(parse: Callable[[str], float], example: str) -> Callable[[object], float]:
    """A value with its unit as a number; a bare number is refused, because it does not say of what."""

    def convert(value: object) -> float:
        if not isinstance(value, str):
            raise ValueError(f"has no unit; write it like {example}")
        try:
            return parse(value)
        except UsageError as error:
            raise ValueError(str(error)) from error

    return convert


def _first_error(error: "ValidationError", schema: "type[BaseModel]", example: str) -> str:
    errors = error.errors(include_url=False)
    # a misspelt key is also a missing one; the misspelling says more
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    where = ".".join(str(part) for part in first["loc"] if part != "[key]") or "the plan"
    if first["type"] == "extra_forbidden":
        known = _known_keys(schema, first["loc"][:-1])
        nearest = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        return f"unknown key {where!r}{hint}; the keys here are {', '.join(known)}"
    if first["type"] == "missing":
        return f"key {where!r} is missing; see {example} for a complete plan"
    message = first["msg"].removeprefix("Value error, ")
    given: Any = first["input"]
    shown = "" if isinstance(given, Mapping | list) else f" is {given!r}"
    return f"key {where!r}{shown}: {message[0].lower()}{message[1:]}; see {example}"


def _known_keys(schema: "type[BaseModel]", path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        if isinstance(part, int):  # an item of a list: its schema is the list's argument
            continue
        annotation: Any = schema.model_fields[part].annotation
        while not hasattr(annotation, "model_fields"):  # `Part | None`, `list[Part]`, `list[Part] | None`
            annotation = annotation.__args__[0]
        schema = cast("type[BaseModel]", annotation)
    return list(schema.model_fields)
