"""Read the catalogue's own YAML with the C parser where PyYAML has it: ten times faster, and start-up time counts."""

from pathlib import Path


def read_yaml(path: Path) -> object:
    """The document in `path`."""
    return parse_yaml(path.read_text(encoding="utf-8"))


def parse_yaml(text: str) -> object:
    """The document in `text`."""
    import yaml

    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
