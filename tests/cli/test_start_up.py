import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.cli.main import COMMANDS

HEAVY = (
    "aiohttp", "aiobotocore", "crc32c", "httpx", "jinja2", "matplotlib", "numpy", "pandas", "plotext", "pydantic",
    "pynvml", "redis", "torch", "transformers", "yaml",
)  # fmt: skip
OPTIONAL = ("aiobotocore", "cuda", "matplotlib", "mooncake", "nixl", "ray", "redis", "torch", "transformers")

PROGRAM = """
import json, sys
blocked = set(json.loads(sys.argv.pop(1)))
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from kvbench.cli.main import main
code = main()
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
sys.exit(code)
"""


def run_without(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(blocked), *arguments], capture_output=True, text=True, check=False
    )


def imported(*arguments: str) -> set[str]:
    done = run_without((), *arguments)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_the_list_of_commands_imports_nothing_heavy(argument: str) -> None:
    assert not set(HEAVY) & imported(argument)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_imports_nothing_heavy(command: str) -> None:
    # Typer itself imports pydantic as soon as a command has an option with a converted type, such as a list.
    assert not (set(HEAVY) - {"pydantic"}) & imported(command, "--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_works_with_only_the_base_install(command: str) -> None:
    done = run_without(OPTIONAL, command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Usage: kvbench {command}")


def test_without_matplotlib_a_page_names_the_extra_and_a_table_still_prints(tmp_path: Path) -> None:
    saved = str(Path(__file__).parents[1] / "data" / "host-paths" / "v1.json")
    done = run_without(OPTIONAL, "report", saved, "--html", str(tmp_path / "page.html"))
    assert done.returncode == 1
    assert "matplotlib, which is not installed; run: pip install 'kvbench[plot]'" in done.stderr
    assert run_without(OPTIONAL, "report", saved).returncode == 0
