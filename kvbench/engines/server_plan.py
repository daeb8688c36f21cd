"""What must run for one arm of a real engine: programs in their order, folders, and how its tiers are emptied."""

import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.catalogue.models import find_model
from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.kv_format import KvFormat, parse_kv_dtype
from kvbench.core.layout import CacheLayout, Parallelism
from kvbench.core.units import parse_bytes
from kvbench.engines.base import Arm, ArmTier, EngineOptions

_TOKENS_FOR_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One process of an arm. It is ready when `health` answers 200, or when its `port` accepts a connection."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str | None = None
    port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Everything behind one arm; the last program is the engine itself.

    `folders` hold the arm's file tiers: made before the start, emptied by a reset (engines keep their files then), and
    removed at the end. `clears` are POST addresses of companions that a reset also needs.
    """

    url: str
    model: str
    programs: tuple[Program, ...]
    folders: tuple[Path, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    clears: tuple[str, ...] = ()
    metrics_urls: tuple[str, ...] = ()
    kv_bytes_per_token: float | None = None
    vocab_size: int | None = None
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """Command lines that can be pasted into a shell, with the environment in front."""
        lines = []
        for program in self.programs:
            settings = [f"{key}={value}" for key, value in program.environment.items()]
            lines.append((*(["env", *settings] if settings else []), *program.command))
        return tuple(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the model's `config.json` says that a plan needs."""

    kv_bytes_per_token: float
    vocab_size: int | None


def served_model(options: EngineOptions, engine: str) -> tuple[str, ServedModel]:
    """The model to serve and its figures; KV bytes of all ranks per token, at the dtype that the arguments ask for."""
    if options.model is None:
        raise UsageError(f"--engine {engine} needs the model to serve; pass --model DIRECTORY (with a config.json)")
    model = find_model(options.model).model
    asked = argument(options.arguments, "--kv-cache-dtype") or "bf16"
    kv_format = KvFormat(kv_dtype="bf16" if asked == "auto" else parse_kv_dtype(asked))
    layout = CacheLayout(model, Parallelism(), kv_format)
    per_token = layout.at(_TOKENS_FOR_BYTES).unique_bytes / _TOKENS_FOR_BYTES
    return options.model, ServedModel(kv_bytes_per_token=per_token, vocab_size=model.vocab_size)


def argument(arguments: tuple[str, ...], flag: str) -> str | None:
    """The value of a flag among the arguments that are passed on, written `--flag value` or `--flag=value`."""
    for index, word in enumerate(arguments):
        if word == flag and index + 1 < len(arguments):
            return arguments[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def tier_bytes(tier: ArmTier, arm: Arm, example: str) -> int:
    """The size that a tier of an arm names."""
    if tier.value is None:
        raise UsageError(f"arm {arm.name!r}: {tier.name} needs a size; write it like {example}")
    return parse_bytes(tier.value)


def tokens_of(num_bytes: int, served: ServedModel, page_tokens: int, arm: Arm) -> int:
    """Whole pages of tokens that fit `num_bytes`."""
    pages = int(num_bytes // (served.kv_bytes_per_token * page_tokens))
    if pages < 1:
        raise UsageError(
            f"arm {arm.name!r}: {num_bytes} bytes hold no page of {page_tokens} tokens "
            f"({served.kv_bytes_per_token:g} bytes each); give the tier more"
        )
    return pages * page_tokens


def free_port() -> int:
    """A port of the loopback interface that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def scratch_folder(tier: ArmTier, work: Path, arm: Arm) -> Path:
    """A folder of our own inside the one that the arm names, so that emptying it takes nobody else's files."""
    name = "kvbench-" + "".join(letter if letter.isalnum() else "-" for letter in arm.name)[:40] + f"-{os.getpid()}"
    return Path(tier.value).expanduser().absolute() / name if tier.value else work / name


def find_program(name: str, options: EngineOptions) -> str:
    """A program beside the engine's own, in a `bin` of its PYTHONPATH, or on PATH."""
    beside = [Path(options.executable).expanduser().parent] if options.executable else []
    python_path = options.environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    extra = [Path(entry) / "bin" for entry in python_path.split(os.pathsep) if entry]
    for folder in (*beside, *extra):
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    return shutil.which(name) or name


def engine_python(options: EngineOptions) -> str:
    """The interpreter of the engine's environment: the one beside its program, else ours."""
    if options.executable:
        beside = Path(options.executable).expanduser().parent / "python"
        if beside.exists():
            return str(beside)
    return sys.executable


def site_packages(python: str) -> Path:
    """Where the environment of an interpreter keeps its packages, by the layout of venvs."""
    root = Path(python).parent.parent
    found = sorted(root.glob("lib/python3*/site-packages"))
    return found[-1] if found else Path(sysconfig.get_path("purelib"))


def read_only_folder_error(folder: Path, error: OSError) -> KvbenchError:
    """The file tier of an arm cannot be made."""
    return KvbenchError(f"the folder {folder} of a file tier cannot be made ({error.strerror}); name another")
