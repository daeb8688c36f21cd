"""How a model's cache is spread over ranks: bytes per rank, per node (all ranks) and unique.

Ranks of one pipeline stage: tp = attention TP × CP × DP, as SGLang counts them (`dcp` reuses the attention-TP ranks, as
vLLM does). Copies are counted, not assumed away: GQA beyond its KV heads, MLA on every TP rank, all-gather CP.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvbench.core.errors import UsageError
from kvbench.core.kv_format import KvFormat, head_row_bytes, latent_row_bytes, resident_tokens, state_bytes
from kvbench.core.layers import Attention, LatentAttention, Layer, RecurrentState
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
            raise UsageError(f"{name} is {getattr(p, name)}; it must be 1 or more")
    inner = p.dp_attention * p.token_shards
    if p.tp % inner:
        raise UsageError(
            f"tp {p.tp} is not divisible by dp_attention × cp = {inner}; attention TP is tp / (dp_attention × cp)"
        )
    if p.pp > len(model.layers):
        raise UsageError(
            f"pp {p.pp} exceeds the {len(model.layers)} layers of {model.name}; use pp <= {len(model.layers)}"
        )
    if p.tp % p.ep:
        raise UsageError(f"ep {p.ep} does not divide tp {p.tp}; expert parallelism spreads experts over the tp ranks")
    _check_heads(model, p)


def _check_heads(model: Model, p: Parallelism) -> None:
    tp = p.attention_tp
    for mixer in model.mixers():
        if mixer.heads % tp:
            raise UsageError(
                f"attention TP {tp} does not divide the {mixer.heads} heads of {model.name}; use one of "
                f"{', '.join(str(d) for d in divisors(mixer.heads))}"
            )
        if isinstance(mixer, Attention) and mixer.kv_heads % tp and tp % mixer.kv_heads:
            raise UsageError(
                f"attention TP {tp} neither divides nor is a multiple of the {mixer.kv_heads} KV heads of {model.name}"
            )
        if p.cp_mode == "dcp" and isinstance(mixer, Attention) and p.cp > max(1, tp // mixer.kv_heads):
            raise UsageError(
                f"cp {p.cp} in mode dcp exceeds the {max(1, tp // mixer.kv_heads)} attention-TP ranks that hold the "
                f"same KV head of {model.name}; raise tp or lower cp"
            )
    if p.cp_mode == "dcp" and tp % p.cp:
        raise UsageError(f"cp {p.cp} in mode dcp does not divide attention TP {tp}")


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

    def _rank_bytes(self, stage: _Stage, tokens: int, cp_rank: int) -> tuple[int, int, int]:
        """Bytes of one rank: all, index key, state."""
        p = self.parallelism
        total = index = 0
        for group in stage.rows:
            resident = resident_tokens(group.mixer, tokens, self.kv_format)
            layers, held, held_index = group.layers, resident, resident
            if p.cp > 1 and p.cp_mode == "layer-split":
                layers = share(layers, p.cp, cp_rank)
            elif p.cp > 1 and p.cp_mode == "ring":
                held = held_index = share(resident, p.cp, cp_rank)
            elif p.cp > 1 and p.cp_mode == "dcp":
                held = share(resident, p.cp, cp_rank)  # SGLang keeps the index key whole on every rank
            index += layers * group.index_row_bytes * held_index
            total += layers * (group.rank_row_bytes - group.index_row_bytes) * held
        state = stage.rank_state_bytes if tokens else 0
        return total + index + state, index, state

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

    def bytes_per_token(self) -> int:
        """Bytes one more token adds on the fullest stage's rank, once windows are full; token shards divide it."""
        per_stage = [
            sum(g.layers * g.rank_row_bytes for g in stage.rows if _grows(g.mixer, self.kv_format))
            for stage in self.stages
        ]
        return max(per_stage)


def _grows(mixer: Attention | LatentAttention, kv_format: KvFormat) -> bool:
    bounded = isinstance(mixer, Attention) and (mixer.window_tokens is not None or mixer.chunk_tokens is not None)
    return not (bounded and kv_format.hybrid)
