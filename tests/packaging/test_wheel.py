import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvbench import __version__
from kvbench.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]

# Runs kvbench from the unpacked wheel, with the optional packages out of reach, outside the checkout.
PROGRAM = """
import sys
blocked = {"aiobotocore", "cuda", "matplotlib", "mooncake", "nixl", "ray", "redis", "torch", "transformers"}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
sys.path.insert(0, sys.argv.pop(1))
import kvbench
assert kvbench.__file__.startswith(sys.path[0]), kvbench.__file__
if sys.argv[1] == "data":
    from kvbench.results.data import data_folder
    print(data_folder("probes"), data_folder("workloads"))
else:
    from kvbench.cli.main import main
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from an sdist, as users' installers build it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(unpacked), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=unpacked)


def test_the_wheel_holds_every_file_of_the_package_and_both_data_folders(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, home in (("kvbench", ""), ("workloads", "kvbench/_data/"), ("probes", "kvbench/_data/")):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert files
        missing = {f"{home}{path.relative_to(ROOT)}" for path in files} - inside
        assert not missing


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"kvbench", f"kvbench-{__version__}.dist-info"}


def test_the_data_folders_are_found_in_the_wheel(unpacked: Path) -> None:
    done = run(unpacked, "data")
    assert done.stdout.split() == [str(unpacked / "kvbench" / "_data" / name) for name in ("probes", "workloads")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_wheel_has_help_with_only_the_base_install(unpacked: Path, command: str) -> None:
    done = run(unpacked, command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: kvbench {command}")


def test_the_wheel_draws_a_saved_result(unpacked: Path) -> None:
    done = run(unpacked, "report", str(ROOT / "tests" / "data" / "host-paths" / "v1.json"))
    assert done.returncode == 0, done.stderr
    assert "GB/s" in done.stdout
