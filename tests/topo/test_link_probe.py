from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.errors import UsageError
from kvbench.core.graph import Graph
from kvbench.results.codec import from_json, to_json
from kvbench.results.document import new_document, numbers_without_origin
from kvbench.topo.build import build_machine
from kvbench.topo.discover import PROVENANCE, Sources, discover, doubts
from kvbench.topo.facts import Facts
from kvbench.topo.link_probe import Measured, SmallProbe, run_child
from kvbench.topo.read import read_inputs
from tests.topo.shared_texts import DATA


def silent(_step: str, _ratio: float | None) -> None:
    return None


def test_the_child_times_copies_of_host_memory() -> None:
    samples = run_child({"what": "memory", "cpus": "0-4095", "bytes": 4 << 20, "repeats": 3}, 60)
    assert sum("seconds" in sample for sample in samples) == 3
    assert all(sample["seconds"] > 0 for sample in samples if "seconds" in sample)


def test_the_child_times_cold_reads_and_leaves_no_file(tmp_path: Path) -> None:
    samples = run_child({"what": "file", "folder": str(tmp_path), "bytes": 8 << 20, "repeats": 2}, 60)
    if "failed" in samples[0]:
        pytest.skip(f"O_DIRECT does not work here: {samples[0]['failed']}")
    assert sum("seconds" in sample for sample in samples) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_fails_gives_its_reason() -> None:
    (sample,) = run_child({"what": "file", "folder": "/nowhere", "bytes": 4 << 20, "repeats": 1}, 60)
    assert sample == {"failed": "No such file or directory"}
    (sample,) = run_child({"what": "memory", "cpus": "9999", "bytes": 4 << 20, "repeats": 1}, 60)
    assert sample == {"failed": "this process may not use any CPU of the node"}


def fake_child(plan: Mapping[str, Any], _timeout_s: float) -> Sequence[Mapping[str, Any]]:
    if plan["what"] == "file":
        return ({"failed": "no answer within 60 s"},)
    return ({"threads": 2}, *({"seconds": 0.01 * (at + 1)} for at in range(3)))


def test_rates_count_reads_and_writes_and_gaps_have_reasons(tmp_path: Path) -> None:
    graph = Graph(build_machine(read_inputs([DATA / "hwloc.xml"]))[0])
    found = SmallProbe(folder=tmp_path, memory_bytes=10**8, child=fake_child).measure(graph, silent)
    assert {(m.link, m.direction) for m in found.found} == {
        (f"dram{at}-numa{at}", way) for at in (0, 1) for way in ("forward", "backward")
    }
    assert {m.rate.bytes_per_s for m in found.found} == {2 * 10**8 / 0.02}  # the median of 10, 20 and 30 ms
    assert {m.spread_ratio for m in found.found} == {(0.03 - 0.01) / 0.02}
    reasons = {gap.what: gap.reason for gap in found.absent}
    assert "is no disk of this graph" in reasons["disk rate"]
    assert "run nvbandwidth -j" in reasons["GPU link rates"]


class Halving:
    """A probe as another package may bring one."""

    def measure(self, graph: Graph, report: object) -> Measured:
        del graph, report
        return Measured(found=(), absent=())


def test_a_wide_spread_is_a_warning_and_samples_have_an_origin(tmp_path: Path) -> None:
    result = discover(
        probe=SmallProbe(folder=tmp_path, child=fake_child),
        driver=lambda: Facts(format="NVML", source="driver", gpu_absent="not asked"),
    )
    if not result.measurements:
        pytest.skip("this kernel lists no NUMA node with CPUs")
    assert "spread" in {doubt.code for doubt in doubts(result)}
    document = new_document(result, command_line=("kvbench", "topo", "--measure"), provenance=PROVENANCE)
    assert numbers_without_origin(document) == ()
    assert from_json(to_json(document), source="made now") == document


def test_a_probe_only_fits_this_machine() -> None:
    with pytest.raises(UsageError, match="--measure reads this machine"):
        discover(Sources(files=(DATA / "hwloc.xml",)), probe=Halving())


def test_any_probe_fits_the_seam() -> None:
    result = discover(probe=Halving(), driver=lambda: Facts(format="NVML", source="driver", gpu_absent="not asked"))
    assert result.measurements == ()
