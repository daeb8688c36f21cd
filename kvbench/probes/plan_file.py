"""The plans of `kvbench probe`: where they lie, what they ask, and what `--set key=value` replaces in them."""

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from kvbench.core.errors import UsageError
from kvbench.results.data import data_folder
from kvbench.results.written_file import read_plan_file

EXAMPLE = "probes/h2d.yaml"
_OTHER_COMMANDS = ("measure",)


def plan_names() -> tuple[str, ...]:
    """The plans that ship with kvbench, sorted."""
    return tuple(sorted(path.stem for path in data_folder("probes").glob("*.yaml") if path.stem not in _OTHER_COMMANDS))


def plan_path(name_or_path: str) -> Path:
    """The file of a plan by name, or the path itself."""
    if name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path:
        return Path(name_or_path)
    names = plan_names()
    if name_or_path not in names:
        close = difflib.get_close_matches(name_or_path, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise UsageError(f"plan {name_or_path!r} is not one of {', '.join(names)}{hint} A path ends in .yaml")
    return data_folder("probes") / f"{name_or_path}.yaml"


def written_plan(path: Path) -> dict[str, Any]:
    """The keys that the file holds, unchecked."""
    written = read_plan_file(path, example=EXAMPLE)
    if not isinstance(written, dict):
        raise UsageError(f"{path}: holds no keys; see {EXAMPLE} for a complete plan")
    return written


def replaced_keys(
    settings: Sequence[str], known: Sequence[str], *, lists: Collection[str], uncut: Collection[str]
) -> dict[str, Any]:
    """`concurrency=1,4` as a list, `repeats=5` as a number, `question=…` as text: what YAML makes of the value.

    `lists` are the keys that hold lists; those in `uncut` are not cut at commas, which belong to a wrapped tier.
    """
    import yaml

    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting!r} is not key=value; write it like --set repeats=5")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise UsageError(f"--set {key!r} is no key of a plan{hint}; the keys are {', '.join(known)}")
        if key in uncut and not text.lstrip().startswith("["):  # `dram:` is a tier, though YAML would make a key of it
            values[key] = [text]
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {key}: {text!r} is no value ({error}); write it like {key}=[a, b]") from error
        if key in lists and not isinstance(value, list):
            value = [yaml.safe_load(part) for part in text.split(",")]
        values[key] = value
    return values


def list_text() -> str:
    """Every plan with its question."""
    import textwrap

    questions = {
        name: " ".join(str(written_plan(plan_path(name)).get("question", "")).split()) for name in plan_names()
    }
    width = max(map(len, questions)) + 2
    return "\n".join(
        textwrap.fill(question, 110, initial_indent=name.ljust(width), subsequent_indent=" " * width)
        for name, question in questions.items()
    )
