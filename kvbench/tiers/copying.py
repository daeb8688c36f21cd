"""Copies between buffers of this process that let other threads run meanwhile."""

from kvbench.core.units import KIB

_SMALL_BYTES = 32 * KIB


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copies all of `source` into a buffer of the same length. A plain slice assignment would hold the GIL."""
    if source.nbytes <= _SMALL_BYTES:
        into.cast("B")[:] = source.cast("B")
        return
    import numpy as np

    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def address_and_length(buffer: memoryview) -> tuple[int, int]:
    """Where a buffer lies, writable or not."""
    import ctypes

    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes
    import numpy as np

    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data), buffer.nbytes
