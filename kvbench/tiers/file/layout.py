"""The bytes of a tier's files: superblock and slots, and pages of headers. `docs/tiers.md` has the same as tables."""

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError
from kvbench.core.units import MIB
from kvbench.tiers.checksum import crc32c_of

PAGE_BYTES = 4096
SLOTS_PER_GROUP = 32
HEADER_BYTES = PAGE_BYTES // SLOTS_PER_GROUP
TIER_ID_BYTES = 16
LAYOUT_VERSION = 2
FREE_HEADER = bytes(HEADER_BYTES)

_SUPERBLOCK = struct.Struct("<8sIIQ16s")
_SUPERBLOCK_MAGIC = b"KVBTIER\0"
_HEADER = struct.Struct("<4sHHQQ16s32sQI16s24x")
_HEADER_MAGIC = b"KVBH"
_USED = 1
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """The first page of the file of blocks: which tier this is, and how large its slots are."""

    tier_id: bytes
    slot_bytes: int

    def packed(self) -> bytes:
        """The page."""
        fields = _SUPERBLOCK.pack(_SUPERBLOCK_MAGIC, LAYOUT_VERSION, SLOTS_PER_GROUP, self.slot_bytes, self.tier_id)
        return (fields + _checksum(fields)).ljust(PAGE_BYTES, b"\0")


def read_superblock(page: bytes, *, what: str) -> Superblock:
    """The superblock of a page, or a refusal that names `what`."""
    fields = page[: _SUPERBLOCK.size]
    if len(page) < PAGE_BYTES or page[_SUPERBLOCK.size : _SUPERBLOCK.size + 4] != _checksum(fields):
        raise KvbenchError(f"{what} does not begin as a tier's file does; move it away to start with an empty tier")
    magic, version, slots, slot_bytes, tier_id = _SUPERBLOCK.unpack(fields)
    if (magic, version, slots) != (_SUPERBLOCK_MAGIC, LAYOUT_VERSION, SLOTS_PER_GROUP) or slot_bytes % PAGE_BYTES:
        raise KvbenchError(
            f"{what} has layout version {version}, and this kvbench reads {LAYOUT_VERSION}; "
            "move it away to start with an empty tier"
        )
    return Superblock(tier_id=tier_id, slot_bytes=slot_bytes)


class Header(NamedTuple):
    """What a slot holds. Of two headers with the same key, the one with the higher sequence is the later."""

    slot: int
    sequence: int
    key: BlockKey
    num_bytes: int
    crc32c: int


def header_bytes(slot: int, sequence: int, key: BlockKey, num_bytes: int, crc32c: int, tier_id: bytes) -> bytes:
    """The header of a slot as it lies in its page."""
    identity, prefix = key
    fields = _HEADER.pack(
        _HEADER_MAGIC, LAYOUT_VERSION, _USED, slot, sequence, identity, prefix, num_bytes, crc32c, tier_id
    )
    return fields + _checksum(fields)


def read_header(data: bytes, *, slot: int, tier_id: bytes, slot_bytes: int) -> Header | str | None:
    """The header of a slot, None for a free slot, or why these bytes are neither."""
    if data == FREE_HEADER:
        return None
    fields = data[: _HEADER.size]
    if data[_HEADER.size :] != _checksum(fields):
        return "its checksum differs"
    magic, version, state, named, sequence, identity, prefix, num_bytes, crc, owner = _HEADER.unpack(fields)
    if (magic, version, state) != (_HEADER_MAGIC, LAYOUT_VERSION, _USED) or not 0 < num_bytes <= slot_bytes:
        return "it is not a header of this version"
    if (named, owner) != (slot, tier_id):
        return "it belongs to another slot or file"
    return Header(slot, sequence, BlockKey(identity, prefix), num_bytes, crc)


def _checksum(fields: bytes) -> bytes:
    return _CHECKSUM.pack(crc32c_of(fields))


@dataclass(frozen=True)
class Geometry:
    """Where slots lie in the file of blocks, and their headers in the file of headers: a page for every 32 slots.

    Two files, because a buffered write of headers would wait for the direct transfers of its file, and hold up those
    that come after it. The superblock takes `alignment_bytes`, so that a slot of 1 MiB begins at a multiple of 1 MiB:
    blocks of 1 MiB that begin 4 KiB later were a third slower to load here.
    """

    slot_bytes: int

    @cached_property
    def alignment_bytes(self) -> int:
        """The largest power of two that divides a slot, at most 1 MiB."""
        return min(self.slot_bytes & -self.slot_bytes, MIB)

    def page_offset(self, group: int) -> int:
        """Where a page of headers begins in its file."""
        return group * PAGE_BYTES

    def data_offset(self, slot: int) -> int:
        """Where a slot's bytes begin; always a multiple of 4 KiB."""
        return self.alignment_bytes + slot * self.slot_bytes

    def end_of(self, slots: int) -> int:
        """Bytes of a file of blocks that ends with its last slot."""
        return self.data_offset(slots) if slots else PAGE_BYTES

    def slots_in(self, file_bytes: int) -> int:
        """How many whole slots a file of that length has."""
        return max(file_bytes - self.alignment_bytes, 0) // self.slot_bytes


def slot_bytes_for(block_bytes: int) -> int:
    """The slot of a block: whole pages."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES
