"""The kinds of result that a file can hold: one list to read, nothing imported until chosen."""

from importlib import import_module
from typing import Any, ClassVar, Protocol

from kvbench.core.errors import KvbenchError

KINDS = {
    "deadlock-diagnosis": "kvbench.results.deadlock_diagnosis:DeadlockDiagnosis",
    "host-paths": "kvbench.results.host_paths:HostPaths",
    "load-vs-recompute": "kvbench.results.load_vs_recompute:LoadVsRecomputeResult",
    "topology": "kvbench.results.topology:TopologyResult",
    "probe": "kvbench.results.probe:ProbeResult",
    "replay": "kvbench.results.replay:ReplayResult",
    "tier-probe": "kvbench.results.tier_probe:TierProbeResult",
}


class Result(Protocol):
    """The body of a document: a frozen dataclass that names its kind and the version of its fields.

    Raise the version when a field is removed, renamed or changes meaning, and keep one old file in `tests/data`.
    A new field with a default is not a breaking change: readers ignore keys they do not know.
    """

    KIND: ClassVar[str]
    SCHEMA_VERSION: ClassVar[int]


def result_class(kind: str, *, source: str) -> type[Any]:
    """The dataclass that holds results of this kind; an unknown kind found in `source` is refused by name."""
    if kind not in KINDS:
        raise KvbenchError(
            f"{source}: kind {kind!r} is not a result this kvbench knows ({', '.join(KINDS)}); "
            "was it written by a newer kvbench, or by another tool?"
        )
    module, _, name = KINDS[kind].partition(":")
    found: type[Any] = getattr(import_module(module), name)
    return found
