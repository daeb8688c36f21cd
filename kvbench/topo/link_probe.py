"""The seam for `--measure`: whatever times links of this machine, and the small probe that needs nothing installed.

The small probe runs in a child process, so that a stuck disk costs one timeout: plan in on stdin, one JSON line per
sample out. It times host memory per NUMA node and reads of the disk under the working folder.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from kvbench.core.graph import Graph, Link, Rate
from kvbench.core.provenance import Origin
from kvbench.core.units import MIB, format_bytes
from kvbench.results.host_paths import TransferSample
from kvbench.results.topology import Absent, LinkMeasurement

Report = Callable[[str, float | None], None]
RunChild = Callable[[Mapping[str, Any], float], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a probe put on links, and what it could not measure, each with its reason."""

    found: tuple[LinkMeasurement, ...]
    absent: tuple[Absent, ...]


class LinkProbe(Protocol):
    """Times links of this machine. `kvbench probe` offers a fuller one; this module has the one that always runs."""

    def measure(self, graph: Graph, report: Report) -> Measured:
        """Rates of the links that this host lets it time."""


def run_child(plan: Mapping[str, Any], timeout_s: float) -> Sequence[Mapping[str, Any]]:
    """The samples a child process printed for this plan; an unfinished child gives those printed until then."""
    import subprocess

    command = [sys.executable, "-m", "kvbench.topo.host_copy"]
    try:
        done = subprocess.run(
            command, input=json.dumps(plan), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return ({"failed": f"no answer within {timeout_s:g} s"},)
    samples = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode and not any("failed" in sample for sample in samples):
        samples.append({"failed": (done.stderr.strip().splitlines() or ["the child ended early"])[-1]})
    return tuple(samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallProbe:
    """Host memory of every NUMA node with CPUs, and one disk, in a few seconds."""

    folder: Path
    memory_bytes: int = 256 * MIB
    file_bytes: int = 256 * MIB
    repeats: int = 7
    timeout_s: float = 60.0
    child: RunChild = run_child

    def measure(self, graph: Graph, report: Report) -> Measured:
        found: list[LinkMeasurement] = []
        absent: list[Absent] = []
        for item in (*self._memory(graph, report), *self._disk(graph, report), *_beyond(graph)):
            if isinstance(item, LinkMeasurement):
                found.append(item)
            else:
                absent.append(item)
        return Measured(found=tuple(found), absent=tuple(absent))

    def _memory(self, graph: Graph, report: Report) -> Iterator[LinkMeasurement | Absent]:
        for numa in graph.of_kind("numa"):
            link = next((graph.uplink(child.id) for child in graph.children(numa.id) if child.kind == "dram"), None)
            if link is None or not numa.cpus:
                continue
            report(f"host memory of {numa.name}", None)
            plan = {"what": "memory", "cpus": numa.cpus, "bytes": self.memory_bytes, "repeats": self.repeats}
            samples = self.child(plan, self.timeout_s)
            seconds = [float(sample["seconds"]) for sample in samples if "seconds" in sample]
            if not seconds:
                yield Absent(what=f"rate of {link.label}", reason=_reason(samples))
                continue
            threads = next((sample["threads"] for sample in samples if "threads" in sample), "?")
            what = (
                f"copies of {format_bytes(self.memory_bytes)} with {threads} thread{'s' if threads != 1 else ''} on "
                f"{numa.name}, read and write counted, median of {len(seconds)}"
            )
            rate = Rate(
                bytes_per_s=2 * self.memory_bytes / median(seconds),
                origin=Origin(provenance="measured", source=what, formula="2 · bytes / seconds"),
            )
            raw = _samples(self.memory_bytes, seconds)
            yield LinkMeasurement(link=link.id, direction="forward", rate=rate, what=what, samples=raw)
            yield LinkMeasurement(link=link.id, direction="backward", rate=rate, what=what, samples=raw)

    def _disk(self, graph: Graph, report: Report) -> Iterator[LinkMeasurement | Absent]:
        link, why = _disk_under(graph, self.folder)
        if link is None:
            yield Absent(what="disk rate", reason=why)
            return
        report(f"reads of {link.label}", None)
        plan = {"what": "file", "folder": str(self.folder), "bytes": self.file_bytes, "repeats": self.repeats}
        samples = self.child(plan, self.timeout_s)
        seconds = [float(sample["seconds"]) for sample in samples if "seconds" in sample]
        if not seconds:
            yield Absent(what=f"rate of {link.label}", reason=_reason(samples))
            return
        what = f"O_DIRECT reads of {format_bytes(self.file_bytes)} in 4 MiB blocks, 4 threads, median of {len(seconds)}"
        rate = Rate(
            bytes_per_s=self.file_bytes / median(seconds),
            origin=Origin(provenance="measured", source=what, formula="bytes / seconds"),
        )
        raw = _samples(self.file_bytes, seconds)
        yield LinkMeasurement(link=link.id, direction="forward", rate=rate, what=what, samples=raw)


def _samples(size_bytes: int, seconds: Sequence[float]) -> tuple[TransferSample, ...]:
    return tuple(TransferSample(bytes=size_bytes, seconds=each) for each in seconds)


def _reason(samples: Sequence[Mapping[str, Any]]) -> str:
    return next((str(sample["failed"]) for sample in samples if "failed" in sample), "the child printed no sample")


def _beyond(graph: Graph) -> Iterator[Absent]:
    """What this probe does not time, said at run time."""
    if graph.of_kind("gpu"):
        yield Absent(
            what="GPU link rates",
            reason="the small probe times host memory and a disk only; run nvbandwidth -j and give it with --import",
        )
    if graph.of_kind("nic"):
        yield Absent(
            what="network rates",
            reason="a NIC needs a second machine; run perftest --out_json between two and give it with --import",
        )


def _disk_under(graph: Graph, folder: Path) -> tuple[Link | None, str]:
    """The link of the disk that holds this folder, by the kernel's device number."""
    try:
        device = folder.stat().st_dev
        target = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    except OSError as error:
        return None, f"{folder}: {error.strerror}"
    parts = target.split("/")
    for disk in graph.of_kind("disk"):
        if any(name in parts for name in disk.name.split(", ")):
            return graph.uplink(disk.id), ""
    filesystem = parts[-1] if re.search(r"/block/", target) else "no block device"
    return None, f"{folder} is on {filesystem}, which is no disk of this graph"
