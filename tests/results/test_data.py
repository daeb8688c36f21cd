from pathlib import Path
from typing import Literal

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.results.data import data_folder

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["probes", "workloads"])
def test_a_checkout_uses_its_top_level_folder(name: Literal["probes", "workloads"]) -> None:
    assert data_folder(name) == ROOT / name


def test_a_wheel_uses_the_folder_inside_the_package(tmp_path: Path) -> None:
    inside = tmp_path / "kvbench" / "_data" / "probes"
    inside.mkdir(parents=True)
    (inside / "README.md").touch()
    assert data_folder("probes", package=tmp_path / "kvbench") == inside


def test_a_folder_of_the_same_name_elsewhere_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "probes").mkdir()
    with pytest.raises(KvbenchError, match="the data folder 'probes' is missing"):
        data_folder("probes", package=tmp_path / "kvbench")
