"""Runs one model for a scheduler: prefixes from the tiered store, chunked prefill, decode, and pages back into it."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.core.block_key import BlockKey, KvIdentity, prefix_hashes
from kvbench.core.errors import UsageError
from kvbench.core.overlap import token_split
from kvbench.engines.builtin.models import LoadedModel, load_model
from kvbench.engines.builtin.pages import (
    KvLayout,
    PageGroup,
    default_layer_ranges,
    empty_blocks,
    expect,
    forget_fresh,
    forward,
    install,
    kv_layout,
    new_cache,
    row_views,
    take_pages,
    take_state,
)
from kvbench.engines.builtin.tokenizer import Tokenizer
from kvbench.tiers.base import Outcome
from kvbench.tiers.tiered import LoadResult, Lookup, Request

if TYPE_CHECKING:
    import torch

_GREEDY_BELOW = 1e-5  # dividing logits by less overflows float32
_RATE_WEIGHT = 0.3  # of the newest measurement in the running mean


class PrefixStore(Protocol):
    """What the runner asks of a tiered store; `kvbench.tiers.tiered.TieredStore` is one."""

    @property
    def tiers(self) -> tuple[str, ...]: ...

    def lookup(self, keys: Sequence[BlockKey]) -> Lookup: ...

    def load_async(
        self, keys: Sequence[BlockKey], into: Sequence[memoryview], *, request: Request
    ) -> "Future[LoadResult]": ...

    def store(self, keys: Sequence[BlockKey], data: Sequence[memoryview], *, request: Request) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the most likely; a seed makes the rest repeatable."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


GREEDY = Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model as it is served. `kv_bytes_per_token` has the bytes of one token by kind (`gqa`, `mla-latent`,
    `window` …); a recurrent state has `state_bytes` per snapshot instead. `block_bytes` is the largest block.
    """

    name: str
    architecture: str
    weights: str
    num_parameters: int
    vocab_size: int
    max_tokens: int
    eos_ids: tuple[int, ...]
    device: str
    dtype: str
    page_tokens: int
    kv_bytes_per_token: Mapping[str, int]
    state_bytes: int
    block_bytes: int
    identities: tuple[KvIdentity, ...]
    reuses_prefixes: bool
    layout: KvLayout

    def prefix_bytes(self, tokens: int) -> int:
        """The exact number of bytes that loading a prefix of so many tokens (whole pages) moves."""
        return self.layout.prefix_bytes(tokens)


@dataclass(slots=True, eq=False)
class RunningSequence:
    """One request inside the runner. `cached_tokens` and the two maps are final once `prefill_step` was called.

    `loaded_bytes` are those that came into use; `wasted_bytes` were moved for a prefix that could not be used.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    ignore_eos: bool
    keep_logits: bool
    cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0
    loaded_bytes_by_tier: dict[str, int] = field(default_factory=dict)
    wasted_bytes: int = 0
    load_failures: dict[str, int] = field(default_factory=dict)
    output_ids: list[int] = field(default_factory=list)
    logits: "list[torch.Tensor]" = field(default_factory=list)
    computed: int = 0
    finish_reason: str | None = None
    _cache: Any = None
    _hashes: tuple[bytes, ...] = ()
    _fingerprints: tuple[bytes, ...] = ()
    _load: "_Load | None" = None
    _stored_pages: int = 0
    _states: "dict[int, list[torch.Tensor]]" = field(default_factory=dict)
    _border_state: "tuple[int, list[torch.Tensor]] | None" = None
    _store: bool = True
    _generator: Any = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt is computed and the first token sampled."""
        return bool(self.output_ids)

    @property
    def is_loading(self) -> bool:
        """Whether `prefill_step` would have to wait for a tier; a scheduler may run others meanwhile."""
        load = self._load
        if load is None or self.computed < load.begin or time.monotonic() >= load.deadline_s:
            return False
        needed = [n for n, group in enumerate(load.groups) if not load.by_layer or group.span[0] == 0]
        return not all(load.futures[number].done() for number in needed)


class _LoadFailedError(Exception):
    """A block that a forward is waiting for is not coming."""


class _Load:
    """The load of pages [begin, end) of a prefix: one future per group, in the order of their layers."""

    def __init__(self, groups: Sequence[PageGroup], begin: int, end: int, *, by_layer: bool, timeout_s: float) -> None:
        self.groups = groups
        self.begin = begin  # tokens computed before what is loaded is appended
        self.end = end  # tokens of the prefix
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + timeout_s
        self.pages: list[range] = []
        self.rows: list[torch.Tensor] = []
        self.futures: list[Future[LoadResult]] = []
        self.by_layer = by_layer
        self.ok_bytes = 0
        self.installed: set[int] = set()

    def num_bytes(self) -> int:
        return sum(len(pages) * group.block_bytes for pages, group in zip(self.pages, self.groups, strict=True))


class ModelRunner:
    """One model on one device. Not thread-safe: one thread calls it.

    Decoding goes through the sequences one by one: in a batch, the rounding of a sequence's numbers would depend on
    who else is in it, and the same prompt would not always give the same tokens.
    """

    def __init__(
        self,
        model: LoadedModel,
        store: PrefixStore | None,
        *,
        layout: KvLayout,
        load_timeout_s: float = 30.0,
        state_interval_tokens: int = 512,
        split: bool = False,
    ) -> None:
        self._model = model
        self._store = store if layout.continues != "never" else None
        self._layout = layout
        self._load_timeout_s = load_timeout_s
        page = layout.page_tokens
        self._state_interval = max(page, -(-state_interval_tokens // page) * page)
        self._split = split
        self._has_state = bool(layout.of("state"))
        self._due: list[RunningSequence] = []
        self._current: RunningSequence | None = None
        self._salted: dict[str, tuple[bytes, ...]] = {}
        self._prefill_tokens_per_s: float | None = None
        self._load_bytes_per_s: float | None = None
        self.info = model_info(model, layout)
        self.tokenizer: Tokenizer = model.tokenizer
        self._hooks = [
            layer.register_forward_pre_hook(lambda *_, layer=number: self._arrive(layer))
            for number, layer in enumerate(model.layers)
        ]

    def start(
        self,
        prompt: Sequence[int],
        *,
        request_id: str = "",
        load: bool = True,
        store: bool = True,
        max_tokens: int = 16,
        sampling: Sampling = GREEDY,
        ignore_eos: bool = False,
        cache_salt: str = "",
        keep_logits: bool = False,
    ) -> RunningSequence:
        """Looks the prompt's prefix up and begins to load it; the rest is for `prefill_step`.

        Prefixes with another `cache_salt` never meet. `load=False` recomputes everything, `store=False` keeps nothing.
        """
        self._check(prompt, max_tokens)
        self._store_due()
        sequence = RunningSequence(
            request_id=request_id,
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling,
            ignore_eos=ignore_eos,
            keep_logits=keep_logits,
        )
        sequence._cache = new_cache(self._model)
        sequence._store = store
        if self._store is not None and (load or store):
            sequence._hashes = prefix_hashes(sequence.prompt, self._layout.page_tokens)
            sequence._fingerprints = self._fingerprints(cache_salt)
            if load:
                self._begin_load(sequence, limit_pages=(len(prompt) - 1) // self._layout.page_tokens)
        return sequence

    def prefill_step(self, sequence: RunningSequence, max_tokens: int = 512) -> bool:
        """Computes up to `max_tokens` more tokens of the prompt. True when the first token has been sampled."""
        self._store_due()
        if sequence.prefilled or sequence.finished:
            return True
        while (load := sequence._load) is not None and sequence.computed == load.begin:
            self._join(sequence, load)  # a failed load may begin a shorter one
        begin = sequence.computed
        end = self._chunk_end(sequence, begin, max_tokens)
        started_s = time.perf_counter()
        logits = self._forward(sequence, begin, end)
        if logits is None:  # the load it was waiting for failed: the prefix is shorter now
            return self.prefill_step(sequence, max_tokens)
        self._prefill_tokens_per_s = _mean(
            self._prefill_tokens_per_s, (end - begin) / (time.perf_counter() - started_s)
        )
        sequence.computed = end
        self._after_chunk(sequence)
        if end < sequence.prompt_tokens:
            return False
        self._sample(sequence, logits)
        return True

    def decode_step(self, sequences: Sequence[RunningSequence]) -> None:
        """One more token for each sequence that is prefilled and not finished."""
        self._store_due()
        for sequence in sequences:
            if sequence.finished or not sequence.prefilled:
                continue
            logits = self._run(sequence, sequence.output_ids[-1:])
            sequence.computed += 1
            page = self._layout.page_tokens
            if self._has_state and sequence._store and page > 1 and sequence.computed % page == 0:
                sequence._border_state = (sequence.computed // page, self._take_states(sequence))
            self._sample(sequence, logits)

    def finish(self, sequence: RunningSequence, *, cancelled: bool = False) -> None:
        """Stores the full pages not stored yet (unless cancelled) and frees the sequence's KV."""
        if sequence._cache is None:
            return
        if not cancelled:
            self._take_in_output(sequence)
            self._store_pages(sequence)
        if sequence in self._due:
            self._due.remove(sequence)
        sequence._load = None
        sequence._cache = None
        sequence._states.clear()
        sequence._border_state = None
        if sequence.finish_reason is None:
            sequence.finish_reason = "cancelled" if cancelled else "length"

    def settle(self) -> None:
        """Hands pages that are due to the store now, not at the next step."""
        self._store_due()

    def close(self) -> None:
        """Takes the hooks off the model."""
        self._store_due()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _check(self, prompt: Sequence[int], max_tokens: int) -> None:
        if not prompt:
            raise UsageError("the prompt is empty; send at least one token")
        if max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}; ask for at least one token")
        if len(prompt) + max_tokens > self.info.max_tokens:
            raise UsageError(
                f"{len(prompt)} prompt tokens and {max_tokens} more exceed the context of {self.info.max_tokens}; "
                "send a shorter prompt or ask for fewer tokens"
            )
        for token in prompt:
            if not 0 <= token < self.info.vocab_size:
                raise UsageError(f"token id {token} is not below the vocabulary size {self.info.vocab_size}")

    # ---- loading

    def _fingerprints(self, salt: str) -> tuple[bytes, ...]:
        if not salt:
            return tuple(group.identity.fingerprint for group in self._layout.groups)
        found = self._salted.get(salt)
        if found is None:
            if len(self._salted) > 1024:
                self._salted.clear()
            found = tuple(
                replace(group.identity, extra=f"{group.identity.extra} salt {salt}").fingerprint
                for group in self._layout.groups
            )
            self._salted[salt] = found
        return found

    def _keys(self, sequence: RunningSequence, group: int, pages: range) -> list[BlockKey]:
        fingerprint = sequence._fingerprints[group]
        return [BlockKey(fingerprint, sequence._hashes[page]) for page in pages]

    def _ready_pages(self, sequence: RunningSequence, limit_pages: int) -> int:
        """The longest prefix, in pages, that every group can supply."""
        store, groups = self._store, self._layout.groups
        found: list[set[int]] = [set() for _ in groups]
        pages = limit_pages
        # attention decides first, since it needs all pages; what windows and states lack can only shorten that
        for kind in ("attention", "window", "state"):
            asked = [number for number, group in enumerate(groups) if group.kind == kind]
            if not asked or pages <= 0 or store is None:
                continue
            keys = [key for number in asked for key in self._keys(sequence, number, range(pages))]
            tiers = store.lookup(keys).tiers
            for position, number in enumerate(asked):
                mine = tiers[position * pages : (position + 1) * pages]
                found[number] = {page for page, tier in enumerate(mine) if tier is not None}
            pages = _longest(groups, found, asked, pages)
        return pages

    def _begin_load(self, sequence: RunningSequence, limit_pages: int) -> None:
        store = self._store
        if store is None or limit_pages <= 0:
            return
        pages = self._ready_pages(sequence, limit_pages)
        if pages == 0:
            return
        groups = self._layout.groups
        front = self._front_pages(sequence, pages)
        load = _Load(
            groups,
            front * self._layout.page_tokens,
            pages * self._layout.page_tokens,
            by_layer=bool(self._hooks) and self._layout.layer_ranges > 1 and front == 0,
            timeout_s=self._load_timeout_s,
        )
        for number, group in enumerate(groups):
            wanted = group.pages_for_prefix(pages)
            if group.kind == "attention":
                wanted = range(max(front, wanted.start), wanted.stop)
            rows = empty_blocks(len(wanted), group.block_bytes, pinned=self._model.device != "cpu")
            load.pages.append(wanted)
            load.rows.append(rows)
            asked = self._request(sequence, group, wanted)
            load.futures.append(store.load_async(self._keys(sequence, number, wanted), row_views(rows), request=asked))
        sequence._load = load

    def _front_pages(self, sequence: RunningSequence, pages: int) -> int:
        """How many pages to compute while the others are loaded, so that both end together; 0 without `split`."""
        if not self._split or sequence.computed or not self._prefill_tokens_per_s or not self._load_bytes_per_s:
            return 0
        page = self._layout.page_tokens
        per_token = sum(group.block_bytes for group in self._layout.of("attention")) / page
        found = token_split(
            tokens=pages * page,
            linear_flop_per_token=1.0,
            attention_flop_per_pair=0.0,
            bytes_per_token=per_token,
            flop_per_s=self._prefill_tokens_per_s,
            bytes_per_s=self._load_bytes_per_s,
        )
        return min(found.x_star // page, pages - 1)

    def _join(self, sequence: RunningSequence, load: _Load) -> None:
        """Makes the cache ready for what is loaded: at once, or layer by layer during the forward."""
        if load.by_layer:
            expect(sequence._cache, self._layout, load.end)
        else:
            try:
                rows = [self._arrived(load, number) for number in range(len(load.groups))]
            except _LoadFailedError:
                self._fall_back(sequence, load)
                return
            for number, group in enumerate(load.groups):
                install(sequence._cache, group, rows[number], load.pages[number])
            self._end_load(sequence, load)
        sequence.computed = load.end

    def _arrive(self, layer: int) -> None:
        """Before a layer's forward: wait for what its range of layers loads, and put it in."""
        sequence = self._current
        load = None if sequence is None else sequence._load
        if sequence is None or load is None or sequence.computed != load.end:
            return
        for number, group in enumerate(load.groups):
            if number not in load.installed and group.span[0] <= layer:
                install(sequence._cache, group, self._arrived(load, number), load.pages[number])
                load.installed.add(number)

    def _arrived(self, load: _Load, number: int) -> "torch.Tensor":
        try:
            result = load.futures[number].result(timeout=max(0.0, load.deadline_s - time.monotonic()))
        except FutureTimeoutError as error:
            raise _LoadFailedError from error
        if any(outcome.result != "ok" for outcome in result.outcomes):
            raise _LoadFailedError
        return load.rows[number].to(self._model.device)

    def _end_load(self, sequence: RunningSequence, load: _Load) -> None:
        elapsed_s = time.monotonic() - load.started_s
        self._load_bytes_per_s = _mean(self._load_bytes_per_s, load.num_bytes() / max(elapsed_s, 1e-9))
        sequence._load = None
        self._account(sequence, load)

    def _account(self, sequence: RunningSequence, load: _Load) -> None:
        """Whose pages they were. A page counts for the outermost tier that had a part of it."""
        page_tokens = self._layout.page_tokens
        depth = {name: number for number, name in enumerate([] if self._store is None else self._store.tiers)}
        outermost: dict[int, str] = {}
        bytes_by_tier: dict[str, int] = {}
        for group, pages, future in zip(load.groups, load.pages, load.futures, strict=True):
            for page, tier in zip(pages, future.result(timeout=0).tiers, strict=False):  # pages may have been cut short
                if tier is None:
                    continue
                bytes_by_tier[tier] = bytes_by_tier.get(tier, 0) + group.block_bytes
                if page not in outermost or depth[tier] > depth[outermost[page]]:
                    outermost[page] = tier
        everywhere = max(bytes_by_tier, key=lambda tier: depth[tier])
        by_tier: dict[str, int] = {}
        for page in range(load.begin // page_tokens, load.end // page_tokens):
            tier = outermost.get(page, everywhere)  # a page before the window of a model without full attention
            by_tier[tier] = by_tier.get(tier, 0) + page_tokens
        sequence.cached_tokens = load.end - load.begin
        sequence.cached_tokens_by_tier = by_tier
        sequence.loaded_bytes = load.num_bytes()
        sequence.loaded_bytes_by_tier = bytes_by_tier
        sequence._stored_pages = load.end // page_tokens

    def _fall_back(self, sequence: RunningSequence, load: _Load) -> None:
        """A block is gone, damaged or late: go on from the pages that did come, or look for a shorter prefix.

        A model of attention alone can use any beginning. A window or a state fits one length only, so the shorter
        prefix is looked up anew; after a timeout it is computed instead, since the tier is slow.
        """
        page_tokens = self._layout.page_tokens
        good, late = self._good_pages(sequence, load)
        if load.by_layer:
            sequence._cache = new_cache(self._model)
        sequence._load = None
        sequence.computed = load.begin
        sequence.cached_tokens = sequence.loaded_bytes = sequence._stored_pages = 0
        sequence.cached_tokens_by_tier, sequence.loaded_bytes_by_tier = {}, {}
        first = load.begin // page_tokens
        if all(group.kind == "attention" for group in load.groups):
            if good > first:
                for number, group in enumerate(load.groups):
                    load.pages[number] = range(first, good)
                    rows = load.rows[number][: good - first].to(self._model.device)
                    install(sequence._cache, group, rows, load.pages[number])
                load.end = good * page_tokens
                self._account(sequence, load)
                sequence.computed = load.end
        elif not late and load.begin == 0:
            self._begin_load(sequence, limit_pages=good)
        sequence.wasted_bytes += load.ok_bytes - sequence.loaded_bytes

    def _good_pages(self, sequence: RunningSequence, load: _Load) -> tuple[int, bool]:
        """How many leading pages every group has, and whether one was late."""
        good, late = load.end // self._layout.page_tokens, False
        for number, future in enumerate(load.futures):
            pages = load.pages[number]
            left_s = max(0.0, load.deadline_s - time.monotonic())
            try:
                outcomes: Sequence[Outcome] = future.result(timeout=left_s).outcomes
            except FutureTimeoutError:
                outcomes = [Outcome("timeout")] * len(pages)
            for page, outcome in zip(pages, outcomes, strict=True):
                if outcome.result == "ok":
                    load.ok_bytes += load.groups[number].block_bytes
                    continue
                sequence.load_failures[outcome.result] = sequence.load_failures.get(outcome.result, 0) + 1
                late = late or outcome.result == "timeout"
                good = min(good, page)
        return good, late

    # ---- computing

    def _chunk_end(self, sequence: RunningSequence, begin: int, max_tokens: int) -> int:
        end = min(begin + max(1, max_tokens), sequence.prompt_tokens)
        if self._layout.continues != "chunks" and begin == 0:
            end = sequence.prompt_tokens  # what follows a break is computed token by token
        load = sequence._load
        if load is not None and begin < load.begin:
            return min(end, load.begin)
        if self._has_state:
            # also where nothing is stored, so that a request is computed in the same pieces with tiers and without
            border = (begin // self._state_interval + 1) * self._state_interval
            if self._layout.continues != "chunks":
                border = end
            last = (sequence.prompt_tokens - 1) // self._layout.page_tokens * self._layout.page_tokens
            end = min([end, *(cut for cut in (border, last) if cut > begin)])
        return end

    def _forward(self, sequence: RunningSequence, begin: int, end: int) -> "torch.Tensor | None":
        """Logits after [begin, end) of the prompt; None where a load it waited for failed."""
        load = sequence._load if sequence._load is not None and sequence._load.end == begin else None
        self._current = sequence
        try:
            logits = self._run(sequence, sequence.prompt[begin:end])
        except _LoadFailedError:
            if load is None:
                raise
            self._fall_back(sequence, load)
            return None
        finally:
            self._current = None
        if load is not None:
            self._end_load(sequence, load)
        return logits

    def _run(self, sequence: RunningSequence, ids: Sequence[int]) -> "torch.Tensor":
        if sequence.computed and self._layout.continues != "chunks":
            for token in ids[:-1]:
                forward(self._model, (token,), sequence._cache)
            ids = ids[-1:]
        return forward(self._model, ids, sequence._cache)

    def _sample(self, sequence: RunningSequence, logits: "torch.Tensor") -> None:
        if sequence.keep_logits:
            sequence.logits.append(logits.cpu().clone())
        token = self._choose(sequence, logits)
        sequence.output_ids.append(token)
        if token in self.info.eos_ids and not sequence.ignore_eos:
            sequence.finish_reason = "stop"
        elif len(sequence.output_ids) >= sequence.max_tokens:
            sequence.finish_reason = "length"

    def _choose(self, sequence: RunningSequence, logits: "torch.Tensor") -> int:
        import torch

        sampling = sequence.sampling
        if sampling.temperature < _GREEDY_BELOW:
            return int(logits.argmax())
        if sequence._generator is None:
            sequence._generator = torch.Generator()
            if sampling.seed is None:
                sequence._generator.seed()
            else:
                sequence._generator.manual_seed(sampling.seed & (2**63 - 1))
        probabilities, ids = torch.softmax(logits.cpu() / sampling.temperature, dim=-1).sort(descending=True)
        if sampling.top_k > 0:
            probabilities[sampling.top_k :] = 0
        if sampling.top_p < 1:
            before = probabilities.cumsum(0) - probabilities
            probabilities[(before > sampling.top_p).nonzero()] = 0
        return int(ids[torch.multinomial(probabilities, 1, generator=sequence._generator)])

    # ---- storing

    def _stores(self, sequence: RunningSequence) -> bool:
        return self._store is not None and sequence._store

    def _after_chunk(self, sequence: RunningSequence) -> None:
        """Notes what is to be stored. That waits for the next call, so that the first token goes out before it."""
        if not self._stores(sequence):
            return
        page_tokens = self._layout.page_tokens
        if self._has_state and sequence.computed % page_tokens == 0:
            sequence._states[sequence.computed // page_tokens] = self._take_states(sequence)
        if sequence not in self._due:
            self._due.append(sequence)

    def _store_due(self) -> None:
        due, self._due = self._due, []
        for sequence in due:
            if sequence._cache is not None:
                self._store_pages(sequence)

    def _take_states(self, sequence: RunningSequence) -> "list[torch.Tensor]":
        return [take_state(sequence._cache, group) for group in self._layout.of("state")]

    def _take_in_output(self, sequence: RunningSequence) -> None:
        """Extends the page names over what was generated, and adds the state at the last page border."""
        if not self._stores(sequence) or len(sequence.output_ids) < 2:
            return
        page_tokens = self._layout.page_tokens
        tokens = (*sequence.prompt, *sequence.output_ids)[: sequence.computed]
        sequence._hashes = prefix_hashes(tokens, page_tokens)
        if not self._has_state:
            return
        if sequence.computed % page_tokens == 0:
            sequence._states[sequence.computed // page_tokens] = self._take_states(sequence)
        elif sequence._border_state is not None:
            pages, rows = sequence._border_state
            sequence._states[pages] = rows

    def _store_pages(self, sequence: RunningSequence) -> None:
        """Hands the full pages that are not in the store yet to it, all groups of a page together."""
        store = self._store
        load = sequence._load
        if store is None or not sequence._store or (load is not None and sequence.computed <= load.begin):
            return
        page_tokens = self._layout.page_tokens
        pages = range(sequence._stored_pages, min(sequence.computed // page_tokens, len(sequence._hashes)))
        blocks: list[tuple[int, int, memoryview]] = []  # page, group, bytes
        states = iter(range(len(self._layout.of("state"))))
        for number, group in enumerate(self._layout.groups):
            if group.kind == "state":
                position = next(states)
                blocks += [(end - 1, number, row_views(rows[position])[0]) for end, rows in sequence._states.items()]
            elif pages:
                taken = row_views(take_pages(sequence._cache, group, pages))
                blocks += [(page, number, row) for page, row in zip(pages, taken, strict=True)]
                if group.window is not None:
                    forget_fresh(sequence._cache, group, len(pages) * page_tokens)
        sequence._states.clear()
        if pages:
            sequence._stored_pages = pages.stop
        if blocks:
            blocks.sort(key=lambda block: block[:2])
            keys = [BlockKey(sequence._fingerprints[number], sequence._hashes[page]) for page, number, _ in blocks]
            store.store(keys, [data for *_, data in blocks], request=self._request(sequence, None, pages))

    def _request(self, sequence: RunningSequence, group: PageGroup | None, pages: range) -> Request:
        page_tokens = self._layout.page_tokens
        span = (0, len(self._model.layers)) if group is None else group.span
        tokens = (pages.start * page_tokens, pages.stop * page_tokens)
        return Request(id=sequence.request_id, token_range=tokens, layers=span)


def _longest(groups: Sequence[PageGroup], found: Sequence[set[int]], asked: Sequence[int], pages: int) -> int:
    """The largest number of pages, at most `pages`, that all of `asked` can supply."""
    for number in asked:
        if groups[number].kind == "attention":
            have = found[number]
            pages = next((page for page in range(pages) if page not in have), pages)
    others = [number for number in asked if groups[number].kind != "attention"]
    while pages > 0 and others:
        # every prefix from this one down to just behind a missing page needs that page: go to just before it
        lacking = [
            page for number in others for page in groups[number].pages_for_prefix(pages) if page not in found[number]
        ]
        if not lacking:
            break
        pages = max(lacking)
    return pages


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _RATE_WEIGHT) * old + _RATE_WEIGHT * new


def model_info(model: LoadedModel, layout: KvLayout) -> ModelInfo:
    """What `/server_info` and the tiers need to know."""
    return ModelInfo(
        name=model.name,
        architecture=model.architecture,
        weights=model.weights,
        num_parameters=model.num_parameters,
        vocab_size=model.vocab_size,
        max_tokens=model.max_tokens,
        eos_ids=model.eos_ids,
        device=model.device,
        dtype=model.dtype,
        page_tokens=layout.page_tokens,
        kv_bytes_per_token=layout.bytes_per_token,
        state_bytes=layout.state_bytes,
        block_bytes=layout.block_bytes,
        identities=tuple(group.identity for group in layout.groups),
        reuses_prefixes=layout.continues != "never",
        layout=layout,
    )


def load_runner(
    model: str,
    *,
    open_store: Callable[[ModelInfo], PrefixStore | None],
    device: str = "auto",
    dtype: str = "auto",
    page_tokens: int = 16,
    layers_per_kind: int | None = None,
    layer_ranges: int | None = None,
    seed: int = 0,
    name: str | None = None,
    load_timeout_s: float = 30.0,
    split: bool = False,
) -> ModelRunner:
    """A model ready to run. `open_store` gets what the tiers must know (`block_bytes`) before they can be opened."""
    if page_tokens < 1:
        raise UsageError(f"a page of {page_tokens} tokens is not possible; use 1 or more, such as 16")
    loaded = load_model(model, device=device, dtype=dtype, layers_per_kind=layers_per_kind, seed=seed, name=name)
    return make_runner(
        loaded,
        open_store=open_store,
        page_tokens=page_tokens,
        layer_ranges=layer_ranges,
        load_timeout_s=load_timeout_s,
        split=split,
    )


def make_runner(
    model: LoadedModel,
    *,
    open_store: Callable[[ModelInfo], PrefixStore | None],
    page_tokens: int = 16,
    layer_ranges: int | None = None,
    load_timeout_s: float = 30.0,
    state_interval_tokens: int = 512,
    split: bool = False,
) -> ModelRunner:
    """A runner of a model that is loaded."""
    ranges = default_layer_ranges(len(model.layers)) if layer_ranges is None else layer_ranges
    layout = kv_layout(model, page_tokens=page_tokens, layer_ranges=ranges)
    return ModelRunner(
        model,
        open_store(model_info(model, layout)),
        layout=layout,
        load_timeout_s=load_timeout_s,
        state_interval_tokens=state_interval_tokens,
        split=split,
    )
