"""Where in a pool of equal slots a block goes: whole slots for large blocks, units of shared slots for small ones."""

from collections.abc import Sequence

# (offset, bytes) in the pool; the parts of a block in order
Parts = tuple[tuple[int, int], ...]

_UNITS_PER_SLOT = 64


class SlotAllocator:
    """Hands out room for blocks of up to `slot_bytes`. A pool with room for a block never refuses it.

    A slot is cut into up to 64 units. A block that needs a whole slot gets one in one piece while there is one; else
    it is put together from units wherever they are free, so that no mixture of sizes can strand room. Slots come in
    chunks, which whoever owns the memory adds and takes back.
    """

    def __init__(self, slot_bytes: int, *, align_bytes: int) -> None:
        units = max(min(_UNITS_PER_SLOT, slot_bytes // align_bytes), 1)
        self.unit_bytes = -(-slot_bytes // (units * align_bytes)) * align_bytes
        self._units = -(-slot_bytes // self.unit_bytes)
        self.slot_bytes = self._units * self.unit_bytes
        self._all = (1 << self._units) - 1
        self._whole: list[int] = []
        self._broken: dict[int, int] = {}  # slot → its free units, one bit each
        self._free_units = 0

    def add(self, slots: Sequence[int]) -> None:
        """More slots."""
        self._whole.extend(reversed(slots))
        self._free_units += len(slots) * self._units

    def take(self, slots: Sequence[int]) -> bool:
        """Takes slots out of the pool, if nothing lies in any of them."""
        wanted = set(slots)
        if not wanted <= set(self._whole):
            return False
        self._whole = [slot for slot in self._whole if slot not in wanted]
        self._free_units -= len(wanted) * self._units
        return True

    def allocate(self, num_bytes: int) -> Parts | None:
        """Room for a block, or None."""
        units = -(-num_bytes // self.unit_bytes)
        if units > self._free_units:
            return None
        self._free_units -= units
        if units == self._units and self._whole:
            return ((self._whole.pop() * self.slot_bytes, num_bytes),)
        pieces: list[tuple[int, int]] = []  # (first unit of the pool, units)
        while units:
            if not self._broken:
                self._broken[self._whole.pop()] = self._all
            slot, free = next(iter(self._broken.items()))
            first = (free & -free).bit_length() - 1
            run = 1
            while run < units and free >> (first + run) & 1:
                run += 1
            self._set(slot, free & ~(((1 << run) - 1) << first))
            pieces.append((slot * self._units + first, run))
            units -= run
        return self._parts(pieces, num_bytes)

    def free(self, parts: Parts) -> None:
        """Gives back the room of a block."""
        for offset, num_bytes in parts:
            slot, inside = divmod(offset, self.slot_bytes)
            units = -(-num_bytes // self.unit_bytes)
            self._free_units += units
            bits = ((1 << units) - 1) << (inside // self.unit_bytes)
            free = self._broken.pop(slot, 0) | bits
            if free == self._all:
                self._whole.append(slot)
            else:
                self._broken[slot] = free

    def _set(self, slot: int, free: int) -> None:
        if free:
            self._broken[slot] = free
        else:
            del self._broken[slot]

    def _parts(self, pieces: Sequence[tuple[int, int]], num_bytes: int) -> Parts:
        parts, left = [], num_bytes
        for first, units in pieces:
            size = min(units * self.unit_bytes, left)
            parts.append((first * self.unit_bytes, size))
            left -= size
        return tuple(parts)
