"""Prompts from names: the same (seed, scope, id) is the same tokens everywhere, and another id is other tokens.

A name becomes a 64-bit key, a key an endless text of token ids. The first `key_tokens(vocab)` tokens of that text are
the key itself, written in base `vocab` (5 tokens at 32,000 ids, 8 at 256), the rest is pseudo-random. So:

- Equal ids of a scope give equal texts; a shorter piece is a prefix of a longer one of the same id.
- Different whole-number ids of one scope have different keys for certain, since the mixing below is a bijection. Ids
  of different scopes, and ids that are strings, share a key with the chance of a 64-bit collision: n²/2^65 for n ids,
  which is 3e-8 for a million.
- Texts of different keys differ within their first `key_tokens` tokens. They may agree on the first m of them, with
  chance vocab^-m: an engine whose pages have at least `key_tokens` tokens and start where the piece starts never sees
  a hit that the plan does not have, and pieces shorter than that may by chance be equal.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.core.errors import UsageError
from kvbench.workloads.base import Prompt

if TYPE_CHECKING:
    import numpy

_MASK = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the increment and the two multipliers of its finaliser
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

MOST_PROMPT_TOKENS = 1 << 24


def key_tokens(vocab_size: int, first_token_id: int = 0) -> int:
    """Tokens at the start of a piece that spell its 64-bit key: the least k with (vocab - first)^k ≥ 2^64."""
    ids = vocab_size - first_token_id
    if ids < 2 or first_token_id < 0 or vocab_size > 1 << 31:
        raise UsageError(
            f"token ids from {first_token_id} below {vocab_size}: at least two ids and at most 2^31 are needed; "
            "give the model's vocabulary size"
        )
    needed, reach = 1, ids
    while reach < 1 << 64:
        needed, reach = needed + 1, reach * ids
    return needed


def scope_base(seed: int, scope: str) -> int:
    """The 64-bit number that tells the ids of one scope from those of another."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{scope}".encode(), digest_size=8).digest(), "little")


def text_key(base: int, name: int | str) -> int:
    """The key of one id in the scope of `base`; whole numbers below 2^64 never share one."""
    if isinstance(name, int) and 0 <= name <= _MASK:
        return _mixed(name ^ base)
    digest = hashlib.blake2b(f"{base:x}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def text_keys(base: int, names: Sequence[int | str]) -> "array[int]":
    """`text_key` of each, all at once where they are whole numbers."""
    import numpy as np

    try:
        value = np.frombuffer(array("Q", names), dtype=np.uint64)  # type: ignore[type-var]
    except (TypeError, OverflowError):  # a string, or a number that does not fit
        return array("Q", [text_key(base, name) for name in names])
    value = value ^ np.uint64(base)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    keys: array[int] = array("Q")
    keys.frombytes((value ^ (value >> np.uint64(31))).tobytes())
    return keys


def token_ids(prompt: Prompt, answers: Mapping[int, Sequence[int]]) -> "array[int]":
    """The tokens of a prompt; see `Prompt.token_ids`."""
    given = [(piece, answers[request]) for piece, request in prompt.answers if request in answers]
    if not given:
        return _array_of(_spelt(prompt.keys, prompt.lengths, prompt.vocab_size, prompt.first_token_id))
    tokens: array[int] = array("I")
    start = 0
    for piece, answer in given:
        tokens.extend(_part(prompt, start, piece))
        tokens.extend(array("I", answer))
        start = piece + 1
    tokens.extend(_part(prompt, start, len(prompt.keys)))
    return tokens


def _part(prompt: Prompt, start: int, end: int) -> "array[int]":
    keys, lengths = prompt.keys[start:end], prompt.lengths[start:end]
    return _array_of(_spelt(keys, lengths, prompt.vocab_size, prompt.first_token_id))


def _spelt(keys: "array[int]", lengths: "array[int]", vocab_size: int, first: int) -> "numpy.ndarray[Any, Any]":
    import numpy as np

    num_keys = key_tokens(vocab_size, first)
    ids = np.uint64(vocab_size - first)
    key = np.frombuffer(keys, dtype=np.uint64) if keys else np.zeros(0, np.uint64)
    length = np.frombuffer(lengths, dtype=np.uint32).astype(np.int64) if lengths else np.zeros(0, np.int64)
    if not length.sum():
        return np.zeros(0, np.uint32)
    widest = int(length.max())
    if len(keys) > 1 and int(length.min()) * 2 < widest:  # pieces of very different length: no rectangle
        return np.concatenate(
            [_rectangle(np, key[i : i + 1], int(length[i]), num_keys, ids, first)[0] for i in range(len(keys))]
        )
    table = _rectangle(np, key, widest, num_keys, ids, first)
    if int(length.min()) == widest:
        return table.reshape(-1)
    return table[np.arange(widest)[None, :] < length[:, None]]


def _rectangle(
    np: Any, key: "numpy.ndarray[Any, Any]", width: int, num_keys: int, ids: Any, first: int
) -> "numpy.ndarray[Any, Any]":
    """The first `width` tokens of each key's text, one row each."""
    steps = np.arange(1, width + 1, dtype=np.uint64) * np.uint64(_STEP)
    noise = key[:, None] + steps[None, :]
    scratch = noise >> np.uint64(30)
    noise ^= scratch
    noise *= np.uint64(_MIX_1)
    np.right_shift(noise, np.uint64(27), out=scratch)
    noise ^= scratch
    noise *= np.uint64(_MIX_2)
    np.right_shift(noise, np.uint64(32), out=noise)  # the upper half, whose bits mix best
    noise *= ids
    np.right_shift(noise, np.uint64(32), out=noise)
    rest = key.copy()
    for position in range(min(num_keys, width)):
        noise[:, position] = rest % ids
        rest //= ids
    table: numpy.ndarray[Any, Any] = noise.astype(np.uint32)
    if first:
        table += np.uint32(first)
    return table


def _array_of(tokens: "numpy.ndarray[Any, Any]") -> "array[int]":
    made: array[int] = array("I")
    made.frombytes(tokens.tobytes())
    return made


def _mixed(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)
