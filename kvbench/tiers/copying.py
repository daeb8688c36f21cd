"""Copies between buffers of this process that let other threads run meanwhile."""

import ctypes

from kvbench.core.units import KIB

# Copying or checksumming so few bytes takes 10 to 20 µs, about what it costs to give up the GIL and get it back while
# other threads want it too.
SHORT_BYTES = 256 * KIB


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copies all of `source` into a buffer of the same length. A plain slice assignment would hold the GIL for long."""
    if source.nbytes <= SHORT_BYTES:
        into.cast("B")[:] = source.cast("B")
        return
    import numpy as np

    np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def address_and_length(buffer: memoryview) -> tuple[int, int]:
    """Where a buffer lies, writable or not."""
    if not buffer.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes
    import numpy as np

    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data), buffer.nbytes
