"""The renderer of each kind of result: one list to read, nothing imported until chosen."""

from importlib import import_module
from typing import Any, Protocol, cast

from rich.console import Console

from kvbench.core.errors import KvbenchError
from kvbench.results.document import Document

RENDERERS = {
    "deadlock-diagnosis": "kvbench.report.deadlock_diagnosis",
    "host-paths": "kvbench.report.host_paths",
    "load-vs-recompute": "kvbench.report.load_vs_recompute",
    "topology": "kvbench.report.topology",
    "probe": "kvbench.report.probe",
    "replay": "kvbench.report.replay",
    "tier-probe": "kvbench.report.tier_probe",
}


class Renderer(Protocol):
    """What a module in `RENDERERS` offers: it draws a document and computes nothing new."""

    def terminal(self, document: Document[Any], console: Console) -> None:
        """Prints the document: the verdict first, then tables, a plot and the warnings."""

    def html(self, document: Document[Any]) -> str:
        """Returns the document as one self-contained page."""


def renderer(kind: str) -> Renderer:
    """The renderer of a kind; a kind without one is refused by name."""
    if kind not in RENDERERS:
        raise KvbenchError(
            f"kind {kind!r} has no report in this kvbench ({', '.join(RENDERERS)}); use --json to see it"
        )
    return cast("Renderer", import_module(RENDERERS[kind]))
