"""Compares with fio when asked to, because it takes minutes: KVBENCH_COMPARE_WITH_FIO=DIRECTORY pytest tests/live."""

import os
import shutil
from pathlib import Path

import pytest

from tests.live.compare_with_fio import BLOCKS_KIB, DEPTHS, main

pytestmark = pytest.mark.live


def test_file_probes_are_within_a_tenth_of_fio() -> None:
    directory = os.environ.get("KVBENCH_COMPARE_WITH_FIO")
    if directory is None:
        pytest.skip("set KVBENCH_COMPARE_WITH_FIO to a directory on the disk to compare on")
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    assert BLOCKS_KIB == (128, 1024, 4096)
    assert DEPTHS == (1, 16)
    assert main([str(Path(directory))]) == 0
