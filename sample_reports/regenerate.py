"""Makes the sample reports again, and fails when a file changed, so that nobody commits one unread.

A sample folder holds a `commands.txt`:

    # a comment
    qwen3-0.6b: kvbench load-vs-recompute qwen3-0.6b --tokens 1024,16384
    recorded measured: kvbench load-vs-recompute qwen3-0.6b --measure

The first line is run; NAME.json keeps its old time, host and version as long as nothing else changed. The second was
measured on some machine: its NAME.json is an input. NAME.txt and NAME.html are drawn from NAME.json in both cases.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvbench.core.errors import KvbenchError
from kvbench.results.codec import from_json, read_document, to_json, write_text

ROOT = Path(__file__).parent
TEXT_COLUMNS = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of a `commands.txt`."""

    name: str
    command: tuple[str, ...]
    recorded: bool


def samples(commands: Path) -> tuple[Sample, ...]:
    """The samples of one folder, in the order of its `commands.txt`."""
    found = []
    for number, line in enumerate(commands.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        head, colon, command = line.partition(": ")
        words = shlex.split(command)
        if not colon or words[:1] != ["kvbench"]:
            raise KvbenchError(f"{commands}:{number}: write `NAME: kvbench …` or `recorded NAME: kvbench …`")
        name = head.removeprefix("recorded ")
        found.append(Sample(name=name, command=tuple(words[1:]), recorded=head != name))
    return tuple(found)


def regenerate(folder: Path) -> list[Path]:
    """Makes one folder again and returns the files that changed, appeared, or that no line of it makes."""
    changed = []
    made = {folder / "commands.txt", folder / "README.md"}
    for sample in samples(folder / "commands.txt"):
        saved, text, page = (folder / f"{sample.name}.{suffix}" for suffix in ("json", "txt", "html"))
        before = {path: path.read_bytes() if path.exists() else None for path in (saved, text, page)}
        if not sample.recorded:
            write_text(_same_header(_kvbench(*sample.command, "--json"), saved), saved)
        drawn = _kvbench("report", str(saved), "--html", str(page), "--quiet")
        write_text("".join(f"{line.rstrip()}\n" for line in drawn.splitlines()), text)
        changed += [path for path, old in before.items() if path.read_bytes() != old]
        made |= before.keys()
    return changed + sorted(set(folder.iterdir()) - made)


def _same_header(made: str, saved: Path) -> str:
    """The new document with the old one's time, host and version, which a reviewer need not see change."""
    new = from_json(made, source="new result")
    if not saved.exists():
        return to_json(new)
    old = read_document(saved)
    return to_json(replace(new, created_at=old.created_at, host=old.host, kvbench_version=old.kvbench_version))


def _kvbench(*arguments: str) -> str:
    command = (str(Path(sys.executable).with_name("kvbench")), *arguments)
    environment = os.environ | {"COLUMNS": str(TEXT_COLUMNS), "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode not in {0, 3, 4}:  # 3: it found a problem; 4: the input cannot answer. A sample may show both
        raise KvbenchError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main(folders: Iterable[Path]) -> int:
    """Makes all folders again; 1 when something changed or failed."""
    try:
        changed = [path for folder in folders for path in regenerate(folder)]
    except KvbenchError as error:
        print(f"samples: {error}", file=sys.stderr)
        return 1
    for path in changed:
        print(f"changed: {path}")
    if changed:
        print("samples: read the difference (git diff sample_reports), delete what no command makes, then commit.")
        return 1
    print("samples: nothing changed")
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]] or sorted(path.parent for path in ROOT.glob("*/commands.txt"))))
