"""How a model's cache is spread over ranks: bytes per rank, per node (all ranks) and unique.

Ranks of one pipeline stage: tp = attention TP × CP × DP, as SGLang counts them (`dcp` reuses the attention-TP ranks, as
vLLM does). Copies are counted, not assumed away: GQA beyond its KV heads, MLA on every TP rank, all-gather CP.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Literal

from kvbench.core.errors import LayoutError
from kvbench.core.kv_format import KvFormat, head_row_bytes, latent_row_bytes, resident_tokens, state_bytes
from kvbench.core.layers import Attention, LatentAttention, Layer, MoeFeedForward, RecurrentState
from kvbench.core.model import Model

CpMode = Literal["all-gather", "ring", "layer-split", "dcp"]
CpOrder = Literal["zigzag", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Ranks and what each dimension divides.

    `cp_mode`: `all-gather` (every CP rank ends with the whole cache), `ring` (each keeps its token share),
    `layer-split` (each keeps its share of the layers), `dcp` (decode CP: attention-TP ranks that hold the same heads
    share tokens). In `contiguous` token order the last CP rank has the most causal pairs; `zigzag` balances them.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    cp_mode: CpMode = "all-gather"
    cp_order: CpOrder = "zigzag"
    dp_attention: int = 1
    ep: int = 1

    @property
    def attention_tp(self) -> int:
        """Ranks that divide attention heads for one request."""
        return self.tp // (self.dp_attention * (1 if self.cp_mode == "dcp" else self.cp))

    @property
    def attention_imbalance(self) -> float:
        """Attention time of the busiest CP rank over the mean: (2g-1)/g for contiguous shards, else 1."""
        g = self.token_shards
        return (2 * g - 1) / g if self.cp_order == "contiguous" else 1.0

    def label(self) -> str:
        """`TP 8 PP 2`: the dimensions that are not 1, TP always."""
        parts = [f"TP {self.tp}"]
        parts += [f"PP {self.pp}"] if self.pp > 1 else []
        parts += [f"CP {self.cp} {self.cp_mode}"] if self.cp > 1 else []
        parts += [f"DP attention {self.dp_attention}"] if self.dp_attention > 1 else []
        parts += [f"EP {self.ep}"] if self.ep > 1 else []
        return " ".join(parts)

    @property
    def ranks(self) -> int:
        """All ranks of one engine instance."""
        return self.tp * self.pp

    @property
    def token_shards(self) -> int:
        """Ranks that divide the prefix's tokens in prefill (dcp divides them at rest only)."""
        return 1 if self.cp_mode == "dcp" else self.cp


def kv_heads_per_rank(kv_heads: int, tp: int) -> int:
    """max(1, h_kv // TP): engines keep at least one KV head per rank (vLLM `get_num_kv_heads`)."""
    return max(1, kv_heads // tp)


def check_parallelism(model: Model, parallelism: Parallelism) -> None:
    """Refuse a layout the engines refuse, naming the number that does not divide."""
    p = parallelism
    for name in ("tp", "pp", "cp", "dp_attention", "ep"):
        if getattr(p, name) < 1:
            raise LayoutError(f"--{name.replace('_', '-')} {getattr(p, name)} must be 1 or more")
    inner = p.dp_attention * p.token_shards
    if p.tp % inner:
        raise LayoutError(
            f"tp {p.tp} is not divisible by dp_attention × cp = {inner}; attention TP is tp / (dp_attention × cp)"
        )
    if p.pp > len(model.layers):
        raise LayoutError(
            f"pp {p.pp} exceeds the {len(model.layers)} layers of {model.name}; use pp <= {len(model.layers)}"
        )
    if p.tp % p.ep:
        raise LayoutError(f"ep {p.ep} does not divide tp {p.tp}; expert parallelism spreads experts over the tp ranks")
    experts = max(
        (f.experts for f in (layer.feed_forward for layer in model.layers) if isinstance(f, MoeFeedForward)), default=1
    )
    if p.ep > experts:
        raise LayoutError(f"ep {p.ep} exceeds the {experts} experts of {model.name}; use ep <= {experts}")
    _check_heads(model, p)


def _check_heads(model: Model, p: Parallelism) -> None:
    tp = p.attention_tp
    for mixer in model.mixers():
        if mixer.heads % tp:
            raise LayoutError(
                f"attention TP {tp} does not divide the {mixer.heads} heads of {model.name}; use one of "
                f"{', '.join(str(d) for d in divisors(mixer.heads))}"
            )
        if isinstance(mixer, Attention) and mixer.kv_heads % tp and tp % mixer.kv_heads:
            raise LayoutError(
                f"attention TP {tp} neither divides nor is a multiple of the {mixer.kv_heads} KV heads of {model.name}"
            )
        if p.cp_mode == "dcp" and isinstance(mixer, Attention) and p.cp > max(1, tp // mixer.kv_heads):
            raise LayoutError(
                f"cp {p.cp} in mode dcp exceeds the {max(1, tp // mixer.kv_heads)} attention-TP ranks that hold the "
                f"same KV head of {model.name}; raise tp or lower cp"
            )
    if p.cp_mode == "dcp" and tp % p.cp:
        raise LayoutError(f"cp {p.cp} in mode dcp does not divide attention TP {tp}")


def divisors(number: int) -> tuple[int, ...]:
    """Divisors of a positive number, ascending."""
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def stage_sizes(num_layers: int, pp: int) -> tuple[int, ...]:
    """Layers per pipeline stage: even, the remainder to the stages before the last (vLLM `get_pp_indices`)."""
    sizes = [num_layers // pp] * pp
    for back in range(2, num_layers % pp + 2):
        sizes[-back] += 1
    return tuple(sizes)


def share(total: int, parts: int, index: int) -> int:
    """Round-robin share of part `index`; the shares of all parts add up to `total`."""
    return total // parts + (1 if index < total % parts else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowGroup:
    """Layers of one stage with equal cache rows."""

    layers: int
    mixer: Attention | LatentAttention
    rank_row_bytes: int  # per token and layer on one rank
    unique_row_bytes: int  # per token and layer, one replica over all ranks
    index_row_bytes: int  # part of both that is index key


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    rows: tuple[_RowGroup, ...]
    rank_state_bytes: int
    unique_state_bytes: int
    state_layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """Bytes to move for one cached prefix. `rank_bytes` is the fullest rank, `node_bytes` the sum over all ranks.

    `stage_rank_bytes` lists the fullest rank of each pipeline stage. `index_bytes` and `state_bytes` are the parts of
    `rank_bytes` that are index keys and recurrent state.
    """

    tokens: int
    rank_bytes: int
    node_bytes: int
    unique_bytes: int
    index_bytes: int
    state_bytes: int
    stage_rank_bytes: tuple[int, ...]

    @property
    def replicas(self) -> float:
        """Copies of the average byte: node_bytes / unique_bytes."""
        return self.node_bytes / self.unique_bytes if self.unique_bytes else 1.0


@dataclass(frozen=True)
class CacheLayout:
    """A model's cache under one parallelism and format; `at(tokens)` gives the bytes of a prefix."""

    model: Model
    parallelism: Parallelism
    kv_format: KvFormat

    @cached_property
    def stages(self) -> tuple[_Stage, ...]:
        """The cache rows of each pipeline stage."""
        bounds, start = [], 0
        for size in stage_sizes(len(self.model.layers), self.parallelism.pp):
            bounds.append(self.model.layers[start : start + size])
            start += size
        return tuple(self._stage(layers) for layers in bounds)

    def _stage(self, layers: Iterable[Layer]) -> _Stage:
        tp = self.parallelism.attention_tp
        groups: dict[Attention | LatentAttention, int] = {}
        rank_state = unique_state = state_layers = 0
        for layer in layers:
            match layer.mixer:
                case RecurrentState() as state:
                    kwargs = {"model_state_dtype": self.model.state_dtype}
                    rank_state += state_bytes(state, self.kv_format, tp=tp, **kwargs)
                    unique_state += state_bytes(state, self.kv_format, tp=1, **kwargs)
                    state_layers += 1
                case Attention(stores_kv=True) | LatentAttention() as mixer:
                    groups[mixer] = groups.get(mixer, 0) + 1
        rows = tuple(self._row_group(mixer, count, tp) for mixer, count in groups.items())
        return _Stage(
            rows=rows, rank_state_bytes=rank_state, unique_state_bytes=unique_state, state_layers=state_layers
        )

    def _row_group(self, mixer: Attention | LatentAttention, count: int, tp: int) -> _RowGroup:
        if isinstance(mixer, Attention):
            head, index = head_row_bytes(mixer, self.kv_format.kv_dtype), 0
            rank, unique = kv_heads_per_rank(mixer.kv_heads, tp) * head, mixer.kv_heads * head
        else:
            index = mixer.indexer.row_bytes() if mixer.indexer else 0
            rank = unique = latent_row_bytes(mixer, self.kv_format.kv_dtype) + index
        return _RowGroup(layers=count, mixer=mixer, rank_row_bytes=rank, unique_row_bytes=unique, index_row_bytes=index)

    def _row_bytes(self, group: _RowGroup, tokens: int, cp_rank: int) -> tuple[int, int]:
        """Bytes of one layer of the group on one rank: all, and the index key's part; layer-split divides layers."""
        p = self.parallelism
        held = held_index = resident_tokens(group.mixer, tokens, self.kv_format)
        if p.cp > 1 and p.cp_mode in ("ring", "dcp"):
            held = share(held, p.cp, cp_rank)
            held_index = held if p.cp_mode == "ring" else held_index  # SGLang keeps the index key whole under DCP
        index = group.index_row_bytes * held_index
        return index + (group.rank_row_bytes - group.index_row_bytes) * held, index

    def _rank_bytes(self, stage: _Stage, tokens: int, cp_rank: int) -> tuple[int, int, int]:
        """Bytes of one rank: all, index key, state."""
        p = self.parallelism
        total = index = 0
        for group in stage.rows:
            split = p.cp > 1 and p.cp_mode == "layer-split"
            layers = share(group.layers, p.cp, cp_rank) if split else group.layers
            row, row_index = self._row_bytes(group, tokens, cp_rank)
            total += layers * row
            index += layers * row_index
        state = stage.rank_state_bytes if tokens else 0
        return total + state, index, state

    def layer_bytes(self, tokens: int) -> tuple[float, ...]:
        """Bytes of each layer that holds cache, in layer order, on the fullest rank of the fullest stage."""
        stage = max(range(len(self.stages)), key=lambda i: self._rank_bytes(self.stages[i], tokens, 0)[0])
        start = sum(stage_sizes(len(self.model.layers), self.parallelism.pp)[:stage])
        stop = start + stage_sizes(len(self.model.layers), self.parallelism.pp)[stage]
        rows = {group.mixer: float(self._row_bytes(group, tokens, 0)[0]) for group in self.stages[stage].rows}
        states = self.stages[stage].state_layers
        state = self.stages[stage].rank_state_bytes / states if states and tokens else 0.0
        kept = (layer.mixer for layer in self.model.layers[start:stop])
        sizes = [
            state if isinstance(m, RecurrentState) else rows[m]
            for m in kept
            if isinstance(m, RecurrentState) or m in rows
        ]
        if self.parallelism.cp > 1 and self.parallelism.cp_mode == "layer-split":
            return tuple(sizes[:: self.parallelism.cp])
        return tuple(sizes)

    def at(self, tokens: int) -> CacheBytes:
        """Bytes of a prefix of `tokens` tokens."""
        p = self.parallelism
        copies = p.attention_tp // (p.cp if p.cp_mode == "dcp" else 1)
        fullest = [max(self._rank_bytes(stage, tokens, j) for j in range(p.cp)) for stage in self.stages]
        node = sum(copies * self._rank_bytes(stage, tokens, j)[0] for stage in self.stages for j in range(p.cp))
        rank_bytes, index, state = max(fullest)
        return CacheBytes(
            tokens=tokens,
            rank_bytes=rank_bytes,
            node_bytes=node,
            unique_bytes=self._unique_bytes(tokens),
            index_bytes=index,
            state_bytes=state,
            stage_rank_bytes=tuple(total for total, _, _ in fullest),
        )

    def _unique_bytes(self, tokens: int) -> int:
        if tokens == 0:
            return 0
        rows = sum(
            group.layers * group.unique_row_bytes * resident_tokens(group.mixer, tokens, self.kv_format)
            for stage in self.stages
            for group in stage.rows
        )
        return rows + sum(stage.unique_state_bytes for stage in self.stages)

    def bytes_per_token(self, *, short: bool = False) -> float:
        """Bytes one more token adds on the fullest rank once windows are full; `short`: while every layer still grows.

        Taken between two lengths at which every window, chunk, page and token shard is whole.
        """
        sizes = [self.kv_format.page_tokens or 1]
        for mixer in self.model.mixers():
            if isinstance(mixer, Attention):
                sizes += [size for size in (mixer.window_tokens, mixer.chunk_tokens) if size is not None]
        if short:
            whole = CacheLayout(self.model, self.parallelism, replace(self.kv_format, hybrid=False))
            return whole.bytes_per_token()
        step = lcm(*sizes) * self.parallelism.cp
        added = self.at(2 * step).rank_bytes - self.at(step).rank_bytes
        return added // step if added % step == 0 else added / step

    def shortest_window_tokens(self) -> int | None:
        """Prefix length up to which every layer grows; None where no layer is bounded."""
        bounds = [
            size
            for mixer in self.model.mixers()
            if isinstance(mixer, Attention) and self.kv_format.hybrid
            for size in (mixer.window_tokens, mixer.chunk_tokens)
            if size is not None
        ]
        return min(bounds, default=None)
