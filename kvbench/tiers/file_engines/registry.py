"""The file engines by name: one list to read, nothing imported until chosen."""

from importlib import import_module

from kvbench.tiers.file_engines.base import EngineSettings, FileEngine

ENGINES = {
    "psync": "kvbench.tiers.file_engines.psync:PsyncEngine",
    "aio": "kvbench.tiers.file_engines.aio:open_aio",
    "io_uring": "kvbench.tiers.file_engines.io_uring:open_io_uring",
    "mmap": "kvbench.tiers.file_engines.mapped:MappedEngine",
    "gds": "kvbench.tiers.file_engines.gds:GdsEngine",
}


def open_engine(name: str, settings: EngineSettings) -> FileEngine:
    """The engine of that name on an open file; raises `EngineUnavailableError` where this host has none."""
    module, _, attribute = ENGINES[name].partition(":")
    engine: FileEngine = getattr(import_module(module), attribute)(settings)
    return engine
