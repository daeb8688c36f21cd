"""Unpacks archives of logs: zip, tar and single compressed files, by content, with a limit against archive bombs."""

import bz2
import gzip
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from kvbench.core.errors import KvbenchError
from kvbench.core.units import GIB, format_bytes

MOST_BYTES = 64 * GIB


def unpack(path: Path, into: Path, *, most_bytes: int = MOST_BYTES) -> Iterator[tuple[Path, str]]:
    """Writes each regular file of an archive under `into`; yields where, and its name inside the archive."""
    try:
        if zipfile.is_zipfile(path):
            yield from _zip(path, into, most_bytes)
        elif tarfile.is_tarfile(path):
            yield from _tar(path, into, most_bytes)
        else:
            yield _single(path, into, most_bytes)
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError, RuntimeError) as error:
        raise KvbenchError(f"{path}: the archive is damaged ({error}); unpack it by hand and give the files") from error


def _zip(path: Path, into: Path, most_bytes: int) -> Iterator[tuple[Path, str]]:
    with zipfile.ZipFile(path) as archive:
        for number, member in enumerate(archive.infolist()):
            if not member.is_dir():
                with archive.open(member) as source:
                    yield _write(cast(BinaryIO, source), into / str(number), most_bytes, path), member.filename


def _tar(path: Path, into: Path, most_bytes: int) -> Iterator[tuple[Path, str]]:
    with tarfile.open(path) as archive:
        for number, member in enumerate(archive):
            source = archive.extractfile(member) if member.isreg() else None
            if source is not None:
                with source:
                    yield _write(cast(BinaryIO, source), into / str(number), most_bytes, path), member.name


def _single(path: Path, into: Path, most_bytes: int) -> tuple[Path, str]:
    with path.open("rb") as file:
        magic = file.read(6)
    opener = gzip.open if magic.startswith(b"\x1f\x8b") else bz2.open if magic.startswith(b"BZh") else lzma.open
    with opener(path, "rb") as source:
        return _write(cast(BinaryIO, source), into / "0", most_bytes, path), path.stem


def _write(source: BinaryIO, target: Path, most_bytes: int, archive: Path) -> Path:
    """Copies under a name of ours: a member called `../../x` cannot leave the folder."""
    target.parent.mkdir(parents=True, exist_ok=True)
    room = min(most_bytes, shutil.disk_usage(target.parent).free - 256 * 1024 * 1024)
    written = 0
    with target.open("wb") as file:
        while block := source.read(1024 * 1024):
            written += len(block)
            if written > room:
                raise KvbenchError(
                    f"{archive}: a member unpacks to more than "
                    f"{format_bytes(max(room, 0))}; unpack it by hand and give the files"
                )
            file.write(block)
    return target
