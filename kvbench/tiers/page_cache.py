"""Drop a file from the page cache, and see whether it is gone."""

import ctypes
import mmap
import os

_DROP_ATTEMPTS = 5


class PageCache:
    """What the page cache holds of one open file."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.mapping = mmap.mmap(descriptor, num_bytes)
        self._descriptor = descriptor
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.mapping))
        self._most_resident: float | None = None

    @property
    def most_resident_ratio(self) -> float | None:
        """The largest share of a range's pages that was seen in the cache; None where the system does not say."""
        return self._most_resident

    def drop(self) -> None:
        """Asks the kernel to forget the file's clean pages."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)  # pages that a mapping holds survive the next line
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def drop_and_note(self, offset: int, num_bytes: int) -> None:
        """Drops until the range is gone, and remembers what stayed."""
        resident_ratio = None
        for _ in range(_DROP_ATTEMPTS):  # pages that are still being read ahead are locked and survive a drop
            self.drop()
            resident_ratio = self._resident_ratio(offset, num_bytes)
            if not resident_ratio:
                break
        self._note(resident_ratio)

    def note(self, offset: int, num_bytes: int) -> None:
        """Remembers how much of the range is cached now."""
        self._note(self._resident_ratio(offset, num_bytes))

    def _resident_ratio(self, offset: int, num_bytes: int) -> float | None:
        """Share of these bytes' pages in the page cache, or None where the system does not say."""
        mincore = getattr(ctypes.CDLL(None), "mincore", None)
        pages = (num_bytes + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        vector = (ctypes.c_ubyte * pages)()
        aligned = offset - offset % mmap.PAGESIZE
        if mincore is None or mincore(ctypes.c_void_p(self._address + aligned), ctypes.c_size_t(num_bytes), vector):
            return None
        return sum(value & 1 for value in bytes(vector)) / pages  # the other bits are undefined

    def _note(self, resident_ratio: float | None) -> None:
        if resident_ratio is not None:
            self._most_resident = max(resident_ratio, self._most_resident or 0.0)
