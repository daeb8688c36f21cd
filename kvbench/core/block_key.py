"""Names of KV blocks: a chain of hashes over the prefix, and all else that must agree before KV may be reused."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

PREFIX_HASH_BYTES = 32
IDENTITY_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class KvIdentity:
    """What, besides the tokens, decides whether two KV blocks are the same bytes. Any difference keeps them apart.

    `layers` is (first, end). `attention` names the kind and the stored form: `gqa`, `mla-expanded`, `mla-latent`,
    `window`, `recurrent-state`. `extra` is for what an engine adds, such as a LoRA or a cache salt.
    """

    model: str
    model_version: str
    tokenizer_version: str
    dtype: str
    page_tokens: int
    layers: tuple[int, int]
    attention: str
    rank: int = 0
    world: int = 1
    extra: str = ""

    @cached_property
    def fingerprint(self) -> bytes:
        """SHA-256 of the fields as canonical JSON, cut to 16 bytes."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:IDENTITY_BYTES]


class BlockKey(NamedTuple):
    """One block: whose KV it is, and the hash of all tokens up to its end."""

    identity: bytes
    prefix: bytes

    def __str__(self) -> str:
        return f"{self.identity.hex()}/{self.prefix.hex()}"


def parse_block_key(text: str) -> BlockKey:
    """The key that `str(key)` printed; ValueError for anything else."""
    identity, _, prefix = text.partition("/")
    key = BlockKey(bytes.fromhex(identity), bytes.fromhex(prefix))
    if (len(key.identity), len(key.prefix)) != (IDENTITY_BYTES, PREFIX_HASH_BYTES) or str(key) != text:
        raise ValueError(f"{text!r} is not a block key (32 hex digits, '/', 64 hex digits)")
    return key


def prefix_hashes(tokens: Sequence[int], page_tokens: int) -> tuple[bytes, ...]:
    """The hash of the prefix at the end of every full page: h[i] = SHA-256(h[i-1] ‖ page i as little-endian uint32).

    The chain starts from `page_tokens`, so chains of different page sizes never meet. Tokens past the last full page
    have no hash.
    """
    from array import array
    from sys import byteorder

    ids = array("I", tokens)
    if ids.itemsize != 4:
        raise ValueError("this platform has no 32-bit unsigned int")
    if byteorder == "big":
        ids.byteswap()
    data = memoryview(ids.tobytes())
    page_bytes = page_tokens * 4
    chain = hashlib.sha256(b"kvbench" + page_tokens.to_bytes(4, "little")).digest()
    hashes = []
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        chain = hashlib.sha256(chain + data[start : start + page_bytes]).digest()
        hashes.append(chain)
    return tuple(hashes)


def block_keys(tokens: Sequence[int], identity: KvIdentity) -> tuple[BlockKey, ...]:
    """The key of every full page of `tokens`."""
    return tuple(BlockKey(identity.fingerprint, prefix) for prefix in prefix_hashes(tokens, identity.page_tokens))
