"""Finds the real topology texts, which lie beside the repository and are not part of it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "topo"
DATA = Path(__file__).parents[1] / "data" / "topo"


def shared(name: str) -> Path:
    """The path of one real text; the test is skipped where the collection is not there."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"the collected topology texts are not beside this repository ({path})")
    return path
