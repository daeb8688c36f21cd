"""Finds the data folders that people read at the top of the repository and that travel inside the wheel."""

from pathlib import Path
from typing import Literal

import kvbench
from kvbench.core.errors import KvbenchError


def data_folder(name: Literal["probes", "workloads"], *, package: Path = Path(kvbench.__file__).parent) -> Path:
    """The folder `name`: next to the package in a checkout, `kvbench/_data/name` in an installed wheel."""
    installed = package / "_data" / name
    checkout = package.parent / name
    for folder in (installed, checkout):
        if (folder / "README.md").is_file():
            return folder
    raise KvbenchError(
        f"the data folder {name!r} is missing (looked for {installed} and {checkout}); install kvbench again"
    )
