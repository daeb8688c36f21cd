"""The CRC32C of blocks and headers, by the library that computes it at memory speed."""

from collections.abc import Callable
from functools import cache
from typing import Any

from kvbench.tiers.copying import SHORT_BYTES


def crc32c_of(data: bytes | bytearray | memoryview) -> int:
    """The CRC32C of `data`. Other threads run meanwhile, unless it is so short that handing over would cost more."""
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    value: int = _crc32c()(data, 0, size > SHORT_BYTES)
    return value


@cache
def _crc32c() -> Callable[..., Any]:
    from crc32c import crc32c

    return crc32c
