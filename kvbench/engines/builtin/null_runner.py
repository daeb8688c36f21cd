"""A runner without a model: real blocks go through real tiers, and the output says whether they came back unchanged."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.core.block_key import BlockKey, KvIdentity, block_keys
from kvbench.engines.builtin.deferred_store import DeferredStore
from kvbench.engines.builtin.generation import Generation, ServedModel
from kvbench.engines.builtin.null import Utf8Tokenizer
from kvbench.tiers.tiered import Request, TieredStore

VOCAB_SIZE = 2**31
_BYTES_PER_TOKEN = 256
_VISIBLE = b"abcdefghijklmnopqrstuvwxyz "


@dataclass(slots=True, eq=False)
class NullSequence:
    """A request of the null runner. Its KV is one digest per page."""

    generation: Generation
    keys: Sequence[BlockKey]
    cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0
    output_ids: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: str | None = None
    state: bytes = b""
    slept_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.generation.prompt_ids)

    @property
    def is_loading(self) -> bool:
        return False


def null_block_bytes(page_tokens: int) -> int:
    """The size of a block of the null runner."""
    return page_tokens * _BYTES_PER_TOKEN


class NullRunner:
    """Pretends to compute: a prompt that is not cached at all takes `ttft_s`, each further token `itl_s`.

    The block of a page is a digest of all tokens up to its end, repeated. Tokens of the output are digests of the
    blocks, so an output that follows a wrong or a mixed-up block differs from one that follows computed ones.
    """

    def __init__(
        self,
        store: TieredStore | DeferredStore | None,
        *,
        page_tokens: int = 16,
        ttft_s: float = 0.0,
        itl_s: float = 0.0,
    ) -> None:
        self._store = store
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self.tokenizer = Utf8Tokenizer()
        self.eos_ids: tuple[int, ...] = ()
        self.served = ServedModel(
            name="null",
            vocab_size=VOCAB_SIZE,
            max_context_tokens=2**20,
            page_tokens=page_tokens,
            kv_bytes_per_token=float(_BYTES_PER_TOKEN),
            block_bytes=null_block_bytes(page_tokens),
            architecture="none",
            num_parameters=0,
        )

    def begin(self, generation: Generation) -> NullSequence:
        """Looks the prefix up and loads it; the last token is always computed."""
        page = self.served.page_tokens
        identity = KvIdentity(
            model="null",
            model_version="1",
            tokenizer_version="utf-8",
            dtype="digest",
            page_tokens=page,
            layers=(0, 1),
            attention="digest",
            extra=generation.cache_salt,
        )
        keys = block_keys(generation.prompt_ids, identity)
        sequence = NullSequence(generation, keys)
        self._load(sequence, keys[: (len(generation.prompt_ids) - 1) // page])
        return sequence

    def _load(self, sequence: NullSequence, keys: Sequence[BlockKey]) -> None:
        if self._store is None or not keys:
            return
        ready = self._store.lookup(keys).ready_prefix
        if not ready:
            return
        buffers = [bytearray(self.served.block_bytes) for _ in range(ready)]
        name = Request(id=sequence.generation.request_id)
        result = self._store.load(keys[:ready], [memoryview(buffer) for buffer in buffers], request=name)
        page = self.served.page_tokens
        for buffer, outcome, tier in zip(buffers, result.outcomes, result.tiers, strict=True):
            if outcome.result != "ok" or tier is None:
                break
            sequence.state = hashlib.sha256(sequence.state + buffer).digest()
            sequence.computed += page
            sequence.cached_tokens += page
            sequence.cached_tokens_by_tier[tier] = sequence.cached_tokens_by_tier.get(tier, 0) + page
            sequence.loaded_bytes += len(buffer)

    def prefill_step(self, sequence: NullSequence, max_tokens: int) -> bool:
        """Makes the blocks of up to `max_tokens` more tokens, in the time that this share of the prompt takes."""
        tokens, page = sequence.prompt_tokens, self.served.page_tokens
        end = min(tokens, sequence.computed + max_tokens)
        if self._ttft_s:
            time.sleep(self._ttft_s * (end - sequence.computed) / tokens)
        first, last = sequence.computed // page, end // page
        blocks = [self._block(key) for key in sequence.keys[first:last]]
        for block in blocks:
            sequence.state = hashlib.sha256(sequence.state + block).digest()
        if self._store is not None and blocks:
            name = Request(id=sequence.generation.request_id)
            self._store.store(sequence.keys[first:last], [memoryview(block) for block in blocks], request=name)
        sequence.computed = end
        if end < tokens:
            return False
        tail = repr(list(sequence.generation.prompt_ids[last * page :]))
        sequence.state = hashlib.sha256(sequence.state + tail.encode()).digest()
        self._sample(sequence)
        return True

    def _block(self, key: BlockKey) -> bytes:
        digest = hashlib.sha256(key.prefix).digest()
        size = self.served.block_bytes
        return (digest * (size // len(digest) + 1))[:size]

    def decode_step(self, sequences: Sequence[NullSequence]) -> None:
        """One more token each; all of them take `itl_s` together, as in a batch."""
        if self._itl_s:
            time.sleep(self._itl_s)
        for sequence in sequences:
            self._sample(sequence)

    def _sample(self, sequence: NullSequence) -> None:
        generation = sequence.generation
        chosen = sequence.state + len(sequence.output_ids).to_bytes(4)
        if generation.temperature > 0:
            chosen += repr((generation.seed, generation.temperature)).encode()
        sequence.output_ids.append(_VISIBLE[hashlib.sha256(chosen).digest()[0] % len(_VISIBLE)])
        if len(sequence.output_ids) >= generation.max_tokens:
            sequence.finish_reason = "length"

    def finish(self, sequence: NullSequence, *, cancelled: bool) -> None:
        """Nothing to free: pages were stored as they were made."""

    def settle(self) -> None:
        """Nothing is kept back."""

    def close(self) -> None:
        """Nothing to free."""
