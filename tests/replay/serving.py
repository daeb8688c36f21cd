"""Starts the real `kvbench serve --null` for a test, and ends it by its pid."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def null_server(folder: Path, *options: str, faults: str | None = None) -> Iterator[Served]:
    """A server without a model; with `--tier` it moves real blocks through real tiers."""
    folder.mkdir(parents=True, exist_ok=True)
    ready = folder / "url"
    command = [sys.executable, "-m", "kvbench", "serve", "--null", "--port", "0", "-q", "--ready-file", str(ready)]
    if faults is not None:
        (folder / "faults.yaml").write_text(faults)
        command += ["--faults", str(folder / "faults.yaml")]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (ready.is_file() and ready.stat().st_size):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield Served(url=ready.read_text().strip(), process=process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)
