"""The header in front of a block in a remote store: the object itself says whose block it is and what its bytes are."""

import struct

from kvbench.core.block_key import IDENTITY_BYTES, PREFIX_HASH_BYTES, BlockKey
from kvbench.tiers.checksum import crc32c_of

# magic, version, header's length, CRC32C of the data, length of the data, identity, prefix; at the end the CRC32C of
# all before it. Little-endian. A multiple of a cache line, so that the data is as aligned as the header.
HEADER_BYTES = 128
_VERSION = 1
_MAGIC = b"kvblock\0"
_FIELDS = struct.Struct(f"<8sHHIQ{IDENTITY_BYTES}s{PREFIX_HASH_BYTES}s")
_SUM = struct.Struct("<I")
_SUM_AT = HEADER_BYTES - _SUM.size


def header_of(key: BlockKey, num_bytes: int, crc32c: int) -> bytes:
    """The header of a block of `num_bytes` with this checksum."""
    fields = _FIELDS.pack(_MAGIC, _VERSION, HEADER_BYTES, crc32c, num_bytes, key.identity, key.prefix)
    fields = fields.ljust(_SUM_AT, b"\0")
    return fields + _SUM.pack(crc32c_of(fields))


def header_damage(header: bytes | memoryview, key: BlockKey) -> str:
    """Why `header` is not that of block `key`; empty where it is."""
    if len(header) < HEADER_BYTES:
        return f"the object ends after {len(header)} bytes, inside its header"
    magic, version, length, _, _, identity, prefix = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        return "the object is not one of kvbench"
    if _SUM.unpack_from(header, _SUM_AT)[0] != crc32c_of(header[:_SUM_AT]):
        return "the header's checksum differs"
    if (version, length) != (_VERSION, HEADER_BYTES):
        return f"the header has version {version}, this kvbench reads {_VERSION}"
    if (identity, prefix) != (key.identity, key.prefix):
        return f"the object is block {BlockKey(identity, prefix)}"
    return ""


def damage(stored: bytes | memoryview, key: BlockKey) -> str:
    """Why `stored`, header and data, is not block `key`; empty where it is, checksum included."""
    if reason := header_damage(stored, key):
        return reason
    if len(stored) != HEADER_BYTES + stored_bytes(stored):
        return f"the object has {len(stored)} bytes instead of {HEADER_BYTES + stored_bytes(stored)}"
    if crc32c_of(memoryview(stored)[HEADER_BYTES:]) != stored_crc32c(stored):
        return "the data's checksum differs"
    return ""


def stored_crc32c(header: bytes | memoryview) -> int:
    """The checksum of the data that a whole header names."""
    value: int = _FIELDS.unpack_from(header)[3]
    return value


def stored_bytes(header: bytes | memoryview) -> int:
    """The length of the data that a whole header names."""
    value: int = _FIELDS.unpack_from(header)[4]
    return value
