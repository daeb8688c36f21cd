"""KV of a running model as pages of bytes, and back: what each layer keeps, in which block, and at which offset."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from kvbench.core.block_key import KvIdentity
from kvbench.core.errors import KvbenchError
from kvbench.engines.builtin.models import LoadedModel

if TYPE_CHECKING:
    import torch

# attention: KV of every token. window: KV of the last tokens only. state: one recurrent state, whatever the length.
Kind = Literal["attention", "window", "state"]
Continues = Literal["chunks", "steps", "never"]

_PROBE_TOKENS = 12
_ROOM_TOKENS = 256  # by which keys and values grow at a time while tokens come one by one
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}  # of the largest logit
_CACHE_ARGUMENTS: dict[Any, str] = {}
_PAGED: dict[Any, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor of one layer inside a block: `shape` is (heads, tokens, width) of a page, or that of a state."""

    layer: int
    part: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageGroup:
    """Blocks of one kind over some consecutive layers; each page of tokens is one block (a state: one per snapshot).

    A block holds the page of each layer after the other: K (heads, tokens, width), then V, then what else it keeps.
    `window` is how many tokens attention sees, so `window - 1` of them are loaded before the next one.
    """

    kind: Kind
    identity: KvIdentity
    page_tokens: int
    block_bytes: int
    window: int | None
    slots: tuple[Slot, ...]

    @property
    def span(self) -> tuple[int, int]:
        return self.identity.layers

    @property
    def label(self) -> str:
        return self.identity.attention

    def pages_for_prefix(self, num_pages: int) -> range:
        """Which pages must be loaded to go on after `num_pages` pages."""
        if self.kind == "state":
            return range(num_pages - 1, num_pages) if num_pages else range(0)
        if self.window is None:
            return range(num_pages)
        first = max(0, num_pages * self.page_tokens - (self.window - 1))
        return range(min(first // self.page_tokens, num_pages), num_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """All groups of a model. `layer_ranges` is how many ranges of layers are loaded one after the other.

    `continues` says how tokens can follow a recurrent state in transformers: several at once, or only one by one (the
    state is forgotten otherwise), or not at all (both give other numbers than no break; such a prefix is not reused).
    """

    groups: tuple[PageGroup, ...]
    page_tokens: int
    layer_ranges: int
    continues: Continues = "chunks"

    def of(self, kind: Kind) -> tuple[PageGroup, ...]:
        """The groups of one kind."""
        return tuple(group for group in self.groups if group.kind == kind)

    @property
    def block_bytes(self) -> int:
        return max(group.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> dict[str, int]:
        """Bytes of one token by the kind's label; a state has none."""
        totals: dict[str, int] = {}
        for group in self.groups:
            if group.kind != "state":
                totals[group.label] = totals.get(group.label, 0) + group.block_bytes // self.page_tokens
        return totals

    @property
    def state_bytes(self) -> int:
        return sum(group.block_bytes for group in self.of("state"))

    def prefix_bytes(self, tokens: int) -> int:
        """Bytes that a load of this prefix moves."""
        pages = tokens // self.page_tokens
        return sum(len(group.pages_for_prefix(pages)) * group.block_bytes for group in self.groups)


def kv_layout(model: LoadedModel, *, page_tokens: int, layer_ranges: int) -> KvLayout:
    """What the model's cache holds, learnt from a forward of a few tokens."""
    cache = new_cache(model)
    forward(model, range(_PROBE_TOKENS), cache)
    num_layers = len(cache.layers)
    ranges = max(1, min(layer_ranges, num_layers))
    borders = [round(position * num_layers / ranges) for position in range(ranges + 1)]
    groups: list[PageGroup] = []
    for span in pairwise(borders):
        tensors: dict[tuple[Kind, int | None], list[tuple[int, str, int, Any]]] = {}
        for index in range(*span):
            for kind, window, part, number, tensor in _kept(cache.layers[index]):
                tensors.setdefault((kind, window), []).append((index, part, number, tensor))
        groups += [
            _group(model, kind, window, span, page_tokens, members) for (kind, window), members in tensors.items()
        ]
    if not groups:
        raise KvbenchError(f"model {model.name!r} keeps nothing in its cache; only decoder-only models are served")
    recurrent = any(group.kind == "state" for group in groups)
    return KvLayout(
        groups=tuple(groups),
        page_tokens=page_tokens,
        layer_ranges=ranges,
        continues=_continues(model) if recurrent else "chunks",
    )


def _continues(model: LoadedModel) -> Continues:
    """How tokens that follow a state give what they give without a break."""
    ids = range(_PROBE_TOKENS)
    half = _PROBE_TOKENS // 2
    whole = forward(model, ids, new_cache(model))
    chunked, stepped = new_cache(model), new_cache(model)
    forward(model, ids[:half], chunked)
    forward(model, ids[:half], stepped)
    by_chunk = float((forward(model, ids[half:], chunked) - whole).abs().max())
    for token in ids[half:-1]:
        forward(model, (token,), stepped)
    by_step = float((forward(model, ids[-1:], stepped) - whole).abs().max())
    bound = _TOLERANCE[model.dtype] * float(whole.abs().max())
    return "chunks" if by_chunk <= bound else "steps" if by_step <= bound else "never"


def default_layer_ranges(num_layers: int) -> int:
    """A block per range costs per block, so only deep models get more than one."""
    return max(1, min(4, num_layers // 8))


def _group(
    model: LoadedModel,
    kind: Kind,
    window: int | None,
    span: tuple[int, int],
    page_tokens: int,
    members: Sequence[tuple[int, str, int, Any]],
) -> PageGroup:
    slots: list[Slot] = []
    offset = 0
    widest = 1
    for layer, part, number, tensor in members:
        sizes = tuple(tensor.shape[1:])
        if kind != "state":
            heads, width = (1, sizes[-1]) if len(sizes) == 2 else (sizes[0], sizes[-1])
            sizes = (heads, page_tokens, width)
        count = 1
        for size in sizes:
            count *= size
        item = tensor.element_size()
        widest = max(widest, item)
        offset = -(-offset // item) * item
        name = str(tensor.dtype).removeprefix("torch.")
        slots.append(
            Slot(layer=layer, part=part, index=number, shape=sizes, dtype=name, offset=offset, num_bytes=count * item)
        )
        offset += count * item
    block_bytes = -(-offset // widest) * widest
    shown = [[slot.layer, slot.part, slot.index, slot.shape, slot.dtype, slot.offset] for slot in slots]
    digest = hashlib.sha256(json.dumps([shown, window]).encode()).hexdigest()[:16]
    identity = KvIdentity(
        model=model.name,
        model_version=model.version,
        tokenizer_version=model.tokenizer.version,
        dtype=slots[0].dtype,
        page_tokens=page_tokens,
        layers=span,
        attention=_label(model, kind, members),
        extra=f"layout {digest}",
    )
    return PageGroup(
        kind=kind,
        identity=identity,
        page_tokens=page_tokens,
        block_bytes=block_bytes,
        window=window,
        slots=tuple(slots),
    )


def _label(model: LoadedModel, kind: Kind, members: Sequence[tuple[int, str, int, Any]]) -> str:
    """`mla-latent` where the cache keeps what is compressed, `mla-expanded` where it keeps every head's own."""
    if kind == "state":
        return "recurrent-state"
    if kind == "window":
        return "window"
    latent = getattr(model.config, "kv_lora_rank", None)
    if not latent:
        return "gqa"
    return "mla-latent" if any(int(tensor.shape[-1]) == latent for *_, tensor in members) else "mla-expanded"


def _kept(layer: Any) -> list[tuple[Kind, int | None, str, int, Any]]:
    """The tensors of a cache layer: kind, window, attribute, number of the state, and the tensor."""
    from transformers import cache_utils

    kept: list[tuple[Kind, int | None, str, int, Any]] = []
    if isinstance(layer, cache_utils.DynamicLayer) and layer.is_initialized:
        window = layer.sliding_window if isinstance(layer, cache_utils.DynamicSlidingWindowLayer) else None
        kind: Kind = "attention" if window is None else "window"
        kept += [(kind, window, part, 0, getattr(layer, part)) for part in ("keys", "values")]
        if getattr(layer, "is_indexer_initialized", False):
            kept.append((kind, window, "indexer_keys", 0, layer.indexer_keys))
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        for part in ("conv_states", "recurrent_states"):
            states: dict[int, Any] = getattr(layer, part)
            kept += [("state", None, part, number, state) for number, state in states.items() if state is not None]
    return kept


def forward(model: LoadedModel, ids: Sequence[int], cache: Any) -> "torch.Tensor":
    """Logits of the last of `ids`, as float32; their KV goes into `cache`."""
    import torch

    module: Any = model.module
    with torch.inference_mode():
        batch = torch.tensor([list(ids)], device=model.device)
        output = module(input_ids=batch, use_cache=True, logits_to_keep=1, **{_cache_argument(type(module)): cache})
        logits: torch.Tensor = output.logits[0, -1].float()
    return logits


def _cache_argument(module: Any) -> str:
    """What the forward calls its cache; transformers 5 renamed it."""
    from inspect import signature

    if module not in _CACHE_ARGUMENTS:
        names = signature(module.forward).parameters
        _CACHE_ARGUMENTS[module] = next(
            (name for name in ("cache", "cache_params") if name in names), "past_key_values"
        )
    return _CACHE_ARGUMENTS[module]


def new_cache(model: LoadedModel) -> Any:
    """An empty cache of the model, whose layers can be filled from pages."""
    from transformers import DynamicCache, cache_utils

    cache = DynamicCache(config=model.config)
    for number, layer in enumerate(cache.layers):
        known = (cache_utils.DynamicLayer, cache_utils.LinearAttentionLayer, cache_utils.DummyLayer)
        if not isinstance(layer, known) or type(layer).__name__ not in _KNOWN_LAYERS:
            raise KvbenchError(
                f"model {model.name!r} keeps its layer {number} in a {type(layer).__name__}, which cannot be stored in "
                "pages; serve a model with full, sliding-window, latent or recurrent layers"
            )
        if isinstance(layer, cache_utils.DynamicLayer):
            layer.__class__ = _paged(type(layer))
    return cache


_KNOWN_LAYERS = frozenset(
    {
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
    }
)


def _paged(kind: Any) -> Any:
    """The layer class with a length that is known before its KV has arrived; windows also keep what they drop."""
    if kind not in _PAGED:
        _PAGED[kind] = _make_paged(kind)
    return _PAGED[kind]


def _make_paged(kind: Any) -> Any:
    from transformers import cache_utils

    class Paged(kind):  # type: ignore[misc]
        """Reports `awaited_tokens` while a load is on its way."""

        awaited_tokens = 0

        def get_seq_length(self) -> int:
            return self.awaited_tokens or int(super().get_seq_length())

    class Growing(Paged):
        """Puts single tokens into room that is there already: appending would copy all keys and values every time."""

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            if key_states.shape[-2] != 1 or not self.is_initialized or self.keys.ndim != 4:
                return super().update(key_states, value_states, *args, **kwargs)
            return self._with("keys", key_states), self._with("values", value_states)

        def _with(self, part: str, new: Any) -> Any:
            held = getattr(self, part)
            tokens = held.shape[-2]
            if "rooms" not in vars(self):
                self.rooms: dict[str, Any] = {}
            room = self.rooms.get(part)
            if room is None or held.data_ptr() != room.data_ptr() or room.shape[-2] == tokens:
                room = self.rooms[part] = held.new_empty((*held.shape[:-2], tokens + _ROOM_TOKENS, held.shape[-1]))
                room[:, :, :tokens] = held
            room[:, :, tokens : tokens + 1] = new
            grown = room[:, :, : tokens + 1]
            setattr(self, part, grown)
            return grown

    class PagedWindow(Paged):
        """`fresh` are the keys and values that have come in since the last pages were taken."""

        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            if "fresh" not in vars(self):
                self.fresh: list[tuple[Any, Any]] = []
            self.fresh.append((key_states, value_states))
            return super().update(key_states, value_states, *args, **kwargs)

    if issubclass(kind, cache_utils.DynamicSlidingWindowLayer):
        return PagedWindow
    return Growing if kind.update is cache_utils.DynamicLayer.update else Paged


def expect(model_cache: Any, layout: KvLayout, tokens: int) -> None:
    """Makes an empty or shorter cache report `tokens` tokens, which `install` will bring."""
    for group in layout.groups:
        for slot in group.slots:
            layer = model_cache.layers[slot.layer]
            if group.kind == "state":
                layer.has_previous_state[slot.index] = True
            elif group.kind == "window":
                layer.cumulative_length = tokens
            else:
                layer.awaited_tokens = tokens


def install(model_cache: Any, group: PageGroup, data: "torch.Tensor", pages: range) -> None:
    """Put blocks (rows of `data`, one per page of `pages`) into the cache, behind the tokens before those pages."""
    import torch

    with torch.inference_mode():  # states of a forward are written in place
        for slot in group.slots:
            layer = model_cache.layers[slot.layer]
            if group.kind == "state":
                _install_state(layer, slot, _view(data[:1], slot)[0])
                continue
            pieces = _view(data, slot)  # pages, heads, tokens, width
            heads, width = slot.shape[0], slot.shape[-1]
            whole = pieces.permute(1, 0, 2, 3).reshape(heads, len(pages) * group.page_tokens, width)
            if group.window is not None:
                whole = whole[:, max(0, whole.shape[1] - (group.window - 1)) :]
                layer.fresh = []
                layer.cumulative_length = pages.stop * group.page_tokens
            else:
                layer.awaited_tokens = 0
                before = getattr(layer, slot.part)
                if before is not None and pages.start:
                    before = before[0] if before.ndim == 4 else before
                    whole = _cat(before[:, : pages.start * group.page_tokens], whole)
            _set(layer, slot.part, whole[None] if slot.part != "indexer_keys" else whole)


def _cat(before: "torch.Tensor", after: "torch.Tensor") -> "torch.Tensor":
    import torch

    return torch.cat([before, after], dim=1)


def _set(layer: Any, part: str, tensor: "torch.Tensor") -> None:
    if part == "indexer_keys":
        if not layer.is_indexer_initialized:
            layer.lazy_initialization_indexer(tensor)
    elif not layer.is_initialized:
        layer.lazy_initialization(tensor, tensor)
    setattr(layer, part, tensor.contiguous())


def _install_state(layer: Any, slot: Slot, state: "torch.Tensor") -> None:
    ready = layer.is_conv_states_initialized if slot.part == "conv_states" else layer.is_recurrent_states_initialized
    if not ready[slot.index]:
        layer.lazy_initialization(**{slot.part: state[None]}, state_idx=slot.index)
    getattr(layer, slot.part)[slot.index].copy_(state[None])
    layer.has_previous_state[slot.index] = True


def take_pages(model_cache: Any, group: PageGroup, pages: range) -> "torch.Tensor":
    """The blocks of `pages`, one row of bytes each, on the host; of a window, those since the last time."""
    import torch

    begin, tokens = pages.start * group.page_tokens, len(pages) * group.page_tokens
    rows: torch.Tensor | None = None
    for slot in group.slots:
        layer = model_cache.layers[slot.layer]
        if group.window is None:
            held = getattr(layer, slot.part)
            held = held[0] if held.ndim == 4 else held
            source = held[:, begin : begin + tokens]
        else:
            position = 0 if slot.part == "keys" else 1
            source = torch.cat([pair[position] for pair in layer.fresh], dim=2)[0][:, :tokens]
        if rows is None:
            rows = torch.empty((len(pages), group.block_bytes), dtype=torch.uint8, device=source.device)
        _view(rows, slot).copy_(source.unflatten(1, (len(pages), group.page_tokens)).permute(1, 0, 2, 3))
    if rows is None:
        raise ValueError(f"group {group.identity} has no slots")
    return rows.cpu()


def forget_fresh(model_cache: Any, group: PageGroup, tokens: int) -> None:
    """Drops from a window's layers the first `tokens` tokens that were kept for pages."""
    import torch

    for index in {slot.layer for slot in group.slots}:
        layer = model_cache.layers[index]
        keys, values = (torch.cat([pair[position] for pair in layer.fresh], dim=2) for position in (0, 1))
        layer.fresh = [(keys[:, :, tokens:].clone(), values[:, :, tokens:].clone())]


def take_state(model_cache: Any, group: PageGroup) -> "torch.Tensor":
    """The recurrent states as they are now, one row of bytes on the host."""
    import torch

    first = getattr(model_cache.layers[group.slots[0].layer], group.slots[0].part)[group.slots[0].index]
    row = torch.zeros((1, group.block_bytes), dtype=torch.uint8, device=first.device)
    for slot in group.slots:
        state = getattr(model_cache.layers[slot.layer], slot.part)[slot.index]
        _view(row, slot)[0].copy_(state[0])
    return row.cpu()


def _view(rows: "torch.Tensor", slot: Slot) -> "torch.Tensor":
    """The slot's tensor in every row."""
    import torch

    part = rows[:, slot.offset : slot.offset + slot.num_bytes]
    return part.view(getattr(torch, slot.dtype)).unflatten(1, slot.shape)


def empty_blocks(num_blocks: int, block_bytes: int, *, pinned: bool) -> "torch.Tensor":
    """Host memory for blocks, one row each."""
    import torch

    return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=pinned)


def row_views(rows: "torch.Tensor") -> list[memoryview]:
    """Each row as bytes that share its memory."""
    whole = memoryview(rows.numpy().reshape(-1))
    size = int(rows.shape[1])
    return [whole[start : start + size] for start in range(0, len(whole), size)]
