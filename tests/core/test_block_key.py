import hashlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys, parse_block_key, prefix_hashes

IDENTITY = KvIdentity(
    model="m", model_version="1", tokenizer_version="t1", dtype="bf16", page_tokens=4, layers=(0, 2), attention="gqa"
)


def test_the_chain_is_sha256_over_the_last_hash_and_the_page() -> None:
    first = hashlib.sha256(hashlib.sha256(b"kvbench" + struct.pack("<I", 2)).digest() + struct.pack("<2I", 7, 2**31))
    second = hashlib.sha256(first.digest() + struct.pack("<2I", 9, 0))
    assert prefix_hashes([7, 2**31, 9, 0, 5], 2) == (first.digest(), second.digest())


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 5),
)
def test_two_prompts_share_as_many_hashes_as_they_share_full_pages(a: list[int], b: list[int], page: int) -> None:
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    equal = [x == y for x, y in zip(prefix_hashes(a, page), prefix_hashes(b, page), strict=False)]
    assert sum(equal) == shared // page
    assert equal == sorted(equal, reverse=True)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"model_version": "2"},
        {"tokenizer_version": "t2"},
        {"dtype": "fp16"},
        {"layers": (0, 3)},
        {"attention": "mla-latent"},
        {"rank": 1},
        {"world": 2},
        {"extra": "lora"},
        {"page_tokens": 2},
    ],
)
def test_any_difference_in_identity_keeps_blocks_apart(change: dict[str, object]) -> None:
    other = replace(IDENTITY, **change)  # type: ignore[arg-type]
    tokens = list(range(8))
    assert not set(block_keys(tokens, IDENTITY)) & set(block_keys(tokens, other))


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32))
def test_a_printed_key_parses_back(identity: bytes, prefix: bytes) -> None:
    key = BlockKey(identity, prefix)
    assert parse_block_key(str(key)) == key


@given(st.text())
def test_anything_else_is_no_key(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_block_key(text)
