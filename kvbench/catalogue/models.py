"""The models kvbench knows by name: one YAML file each in `models/`, read only when that model is asked for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import cast

from kvbench.catalogue.huggingface import model_from_config, read_config
from kvbench.catalogue.yaml_file import parse_yaml, read_yaml
from kvbench.core.errors import UsageError
from kvbench.core.model import Model

_FOLDER = Path(__file__).parent / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A model with what was published about it. For a `config.json` only `model`, `source` and `config` are known.

    `config` holds the keys of the Hugging Face file, so the same layers can be built and run. `total_note` says why
    our total is more than one per cent from the published one, where it is.
    """

    model: Model
    hf: str | None
    source: str
    config: Mapping[str, object]
    published_total_params: int | None = None
    published_active_params: int | None = None
    total_note: str | None = None


def catalogue_names() -> tuple[str, ...]:
    """Names of all catalogue models, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def find_model(name_or_path: str, *, assume: str | None = None) -> CatalogueEntry:
    """The catalogue entry of that name, or the model that a `config.json` (or the directory around it) describes.

    Names are matched without regard to case: the id (`qwen3-8b`), the Hugging Face name with or without its
    organisation (`Qwen/Qwen3-8B`), or an alias (`deepseek-r1`). A path begins with `.`, `/` or `~`, or exists.
    """
    if not name_or_path.strip():
        raise UsageError("the model name is empty; name one of the catalogue (--list) or the path of a config.json")
    model_id = _catalogue_id(name_or_path)
    if model_id is not None:
        return _entry(model_id)
    path = _path(name_or_path)
    if path is not None:
        file, config = read_config(path)
        name = file.parent.name if file.name == "config.json" else file.stem
        model = model_from_config(config, name=name or file.stem, source=str(file), assume=assume)
        return CatalogueEntry(model=model, hf=None, source=str(file), config=config)
    raise UsageError(_unknown(name_or_path))


def _path(text: str) -> Path | None:
    """The path that `text` is, None where it only can be a name."""
    try:
        path = Path(text).expanduser()
        return path if text.startswith((".", "/", "~")) or text.endswith(".json") or path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL in it, or the home of nobody
        return None


def _catalogue_id(name: str) -> str | None:
    wanted = name.strip().lower()
    short = wanted.rpartition("/")[2]
    # A file name is the id, so most look-ups read one file; only an alias needs the heads of all of them.
    if short and wanted == short and _safe(short) and (_FOLDER / f"{short}.yaml").is_file():
        return short
    names = dict(_names())
    return names.get(wanted)


def _safe(name: str) -> bool:
    return len(name) < 100 and all(letter.isalnum() or letter in "-._" for letter in name)


def _names() -> Iterator[tuple[str, str]]:
    """Every spelling of every model in lower case, with the id it stands for."""
    for model_id in catalogue_names():
        text = (_FOLDER / f"{model_id}.yaml").read_text(encoding="utf-8")
        head = cast("dict[str, object]", parse_yaml(text.partition("\nconfig:")[0]))
        for name in (cast(str, head["hf"]), *cast("list[str]", head["aliases"])):
            yield name.lower(), model_id
            yield name.lower().rpartition("/")[2], model_id
        yield model_id, model_id


def _entry(model_id: str) -> CatalogueEntry:
    path = _FOLDER / f"{model_id}.yaml"
    values = cast("dict[str, object]", read_yaml(path))
    config = cast("dict[str, object]", values["config"])
    return CatalogueEntry(
        model=model_from_config(config, name=model_id, source=path.name),
        hf=cast(str, values["hf"]),
        source=cast(str, values["source"]),
        config=config,
        published_total_params=cast("int | None", values["published_total_params"]),
        published_active_params=cast("int | None", values["published_active_params"]),
        total_note=cast("str | None", values["total_note"]),
    )


def _unknown(name: str) -> str:
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    wanted = name.lower()[:200]
    close = get_close_matches(wanted, catalogue_names(), n=3, cutoff=0.6)
    if not close:
        close = get_close_matches(wanted.rpartition("/")[2], catalogue_names(), n=3, cutoff=0.6)
    meant = f"did you mean {' or '.join(close)}?" if close else f"it has {len(catalogue_names())} others."
    return f"model {shown!r} is not in the catalogue; {meant} For any other model pass the path of its config.json"
