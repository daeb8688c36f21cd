import re
from importlib.metadata import distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
PINNED: dict[NormalizedName, str] = {
    canonicalize_name(name): pinned for name, _, pinned in (line.partition("==") for line in LINES)
}
INSTALLED_EXTRAS = {"dev", "torch", "plot"}


def requirements() -> list[Requirement]:
    declared = [Requirement(text) for text in distribution("kvbench").requires or []]
    environments = [{"extra": extra} for extra in ("", *INSTALLED_EXTRAS)]
    return [
        requirement
        for requirement in declared
        if requirement.marker is None or any(requirement.marker.evaluate(dict(one)) for one in environments)
    ]


@pytest.mark.parametrize("line", LINES)
def test_every_line_is_one_exact_public_version(line: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", line), "no local suffix, URL or editable path"


def test_torch_is_the_tested_one() -> None:
    assert PINNED[canonicalize_name("torch")] == "2.13.0"


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_direct_dependency_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("name", sorted({canonicalize_name(requirement.name) for requirement in requirements()}))
def test_the_tests_run_with_the_pinned_version(name: NormalizedName) -> None:
    assert version(name).partition("+")[0] == PINNED[name]
