"""Comparisons with other tools, when asked to: KVBENCH_COMPARE=DIRECTORY pytest tests/live; fio takes minutes."""

import os
import shutil

import pytest

from tests.live import compare_with_fio, compare_with_memcpy

pytestmark = pytest.mark.live


@pytest.fixture
def directory() -> str:
    found = os.environ.get("KVBENCH_COMPARE")
    if found is None:
        pytest.skip("set KVBENCH_COMPARE to a directory on the disk to compare on")
    return found


def test_file_probes_are_within_a_tenth_of_fio(directory: str) -> None:
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    assert compare_with_fio.main([directory]) == 0


def test_a_block_copy_is_within_a_twentieth_of_memcpy(directory: str) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert compare_with_memcpy.main([]) == 0
