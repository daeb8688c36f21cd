"""Reads captured files for `--from`: finds out by content what each one is, and refuses what is none, quickly."""

import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB, format_bytes
from kvbench.topo import ethtool, lspci, nvidia_smi, rocm_smi
from kvbench.topo.facts import Facts
from kvbench.topo.sysfs import looks_like_root, read_root

if TYPE_CHECKING:
    from tarfile import TarFile

MOST_TEXT_BYTES = 32 * MIB
MOST_ARCHIVE_BYTES = 256 * MIB
MOST_MEMBERS = 200_000
KNOWN = (
    "nvidia-smi topo -m or -p2p, nvidia-smi -L, nvidia-smi --query-gpu, rocm-smi --showtopo, lspci -t or -vv, "
    "hwloc XML, "
    "NCCL topology XML, ethtool, or the archive of probes/capture/topology.sh"
)
_ROOT_TAG = re.compile(r"<\s*(?!\?|!)([A-Za-z_][\w.-]*)")

# The first that recognises the text reads it.
_READERS: tuple[tuple[Callable[[str], bool], Callable[[str, str], Facts]], ...] = (
    (nvidia_smi.looks_like_query, nvidia_smi.read_query),
    (rocm_smi.looks_like_rocm, rocm_smi.read_rocm),
    (lspci.looks_like_tree, lspci.read_tree),
    (ethtool.looks_like_ethtool, ethtool.read_ethtool),
    (lspci.looks_like_lspci, lspci.read_lspci),
    (nvidia_smi.looks_like_matrix, nvidia_smi.read_matrix),
    (nvidia_smi.looks_like_gpu_list, nvidia_smi.read_gpu_list),
)


def read_inputs(paths: Sequence[Path]) -> tuple[Facts, ...]:
    """The facts of every file, folder or archive, in the order given."""
    return tuple(facts for path in paths for facts in _read(path))


def _read(path: Path) -> Iterator[Facts]:
    if path.is_dir():
        yield from _read_folder(path)
        return
    data = _bytes(path)
    if data[:2] == b"\x1f\x8b" or data[257:262] == b"ustar":
        yield from _read_archive(path)
        return
    yield read_text(_decoded(data, path.name), path.name)


def _bytes(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise KvbenchError(
                f"{path}: is neither a regular file nor a folder, and reading it might never end; save it in a file"
            )
        size = path.stat().st_size
        if size > MOST_TEXT_BYTES and not _is_archive(path):
            raise KvbenchError(
                f"{path}: {format_bytes(size)} is too large for a topology (at most {format_bytes(MOST_TEXT_BYTES)} is "
                "read); is this the right file?"
            )
        with path.open("rb") as file:
            data = file.read(MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise KvbenchError(f"{path}: cannot be read ({error.strerror or error}); name a captured file") from error
    if len(data) > MOST_TEXT_BYTES and not _is_archive_head(data):
        raise KvbenchError(f"{path}: more than {format_bytes(MOST_TEXT_BYTES)}; is this the right file?")
    return data


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return _is_archive_head(file.read(512))


def _is_archive_head(data: bytes) -> bool:
    return data[:2] == b"\x1f\x8b" or data[257:262] == b"ustar"


def _decoded(data: bytes, name: str) -> str:
    if b"\0" in data[:65536]:
        raise KvbenchError(f"{name}: holds binary data; --from reads {KNOWN}")
    return data.decode("utf-8", "replace")


def read_text(text: str, name: str) -> Facts:
    """The facts of one text; `name` stands in front of errors."""
    head = text.lstrip("\ufeff \t\r\n")
    if not head:
        raise KvbenchError(f"{name}: is empty; did the command that made it fail? --from reads {KNOWN}")
    if head.startswith("<"):
        return _read_xml(text, name)
    if head[0] in "{[" and '"' in head[:2000]:
        raise KvbenchError(f"{name}: is JSON, so perhaps a measurement: give it with --import; --from reads {KNOWN}")
    for recognises, read in _READERS:
        if recognises(text):
            return read(text, name)
    raise KvbenchError(f"{name}: is none of the formats that --from reads ({KNOWN})")


def _read_xml(text: str, name: str) -> Facts:
    body = re.sub(r"<!--.*?-->", "", text[:65536], flags=re.DOTALL)
    tag = _ROOT_TAG.search(body)
    if tag is not None and tag[1] == "topology":
        from kvbench.topo.hwloc import read_hwloc

        return read_hwloc(text, name)
    if tag is not None and tag[1] == "system":
        from kvbench.topo.nccl_xml import read_nccl

        return read_nccl(text, name)
    found = f"<{tag[1][:40]}>" if tag else "no element"
    raise KvbenchError(f"{name}: XML with the root {found}, neither hwloc's <topology> nor NCCL's <system>")


def _read_folder(folder: Path, *, name: str | None = None) -> Iterator[Facts]:
    """A captured /sys tree, or a folder of captured files (as an unpacked archive has both)."""
    found = False
    if looks_like_root(folder):
        found = True
        yield read_root(folder, name=name)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.stat().st_size and path.name not in _NOT_INPUTS:
            found = True
            yield read_text(_decoded(_bytes(path), path.name), path.name)
    if not found:
        raise KvbenchError(
            f"{folder}: holds no captured file and no sys tree; name the folder of probes/capture/topology.sh"
        )


_NOT_INPUTS = frozenset({"README.txt", "missing.txt", "manifest.txt"})


def _read_archive(path: Path) -> Iterator[Facts]:
    """What probes/capture/topology.sh packed; nothing is written outside a temporary folder."""
    import tarfile
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kvbench-topo-") as temporary:
        target = Path(temporary)
        try:
            with tarfile.open(path, "r:*") as archive:
                _check_members(archive, path)
                archive.extractall(target, filter="data")
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            raise KvbenchError(
                f"{path}: not readable as an archive ({error}); make it again with probes/capture/topology.sh"
            ) from error
        inside = [child for child in target.iterdir() if child.is_dir()]
        whole = len(inside) == 1 and len(list(target.iterdir())) == 1
        yield from _read_folder(inside[0] if whole else target, name=path.name)


def _check_members(archive: "TarFile", path: Path) -> None:
    total = 0
    for count, member in enumerate(archive, start=1):
        total += member.size
        if count > MOST_MEMBERS or total > MOST_ARCHIVE_BYTES:
            raise KvbenchError(
                f"{path}: unpacks to more than {MOST_MEMBERS} files or {format_bytes(MOST_ARCHIVE_BYTES)}; "
                "that is no topology capture"
            )
