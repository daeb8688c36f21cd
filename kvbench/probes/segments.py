"""Which pieces of memory one transfer moves: scattered pages of one size, or a model's pages in a host layout."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.core.units import format_bytes

Layout = Literal["scattered", "layer-first", "page-first", "page-first-direct"]
LAYOUTS: tuple[Layout, ...] = ("scattered", "layer-first", "page-first", "page-first-direct")


@dataclass(frozen=True)
class Segments:
    """Segments of one size: `sources` and `targets` are byte offsets into the two pools."""

    segment_bytes: int
    sources: Sequence[int]
    targets: Sequence[int]

    def __post_init__(self) -> None:
        """Refuses lists that do not pair up."""
        if len(self.sources) != len(self.targets) or self.segment_bytes < 1:
            raise KvbenchError(
                f"{len(self.sources)} sources and {len(self.targets)} targets of {self.segment_bytes} bytes "
                "are no transfer; give one target for each source and at least one byte"
            )

    def __len__(self) -> int:
        return len(self.sources)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes moved, counted once."""
        return len(self.sources) * self.segment_bytes

    @cached_property
    def source_end(self) -> int:
        """Bytes of the source pool that are used."""
        return max(self.sources, default=0) + self.segment_bytes

    @cached_property
    def target_end(self) -> int:
        """Bytes of the target pool that are used."""
        return max(self.targets, default=0) + self.segment_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The cache of one rank: rows of `row_bytes` per token, `planes` of them per layer (K and V; one for MLA)."""

    model: str
    layers: int
    planes: int
    row_bytes: int
    page_tokens: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.layers * self.planes * self.row_bytes * self.page_tokens


def kv_shape(model: str, *, tp: int, page_tokens: int) -> KvShape:
    """The shape of a catalogue model's bf16 cache on one of `tp` ranks."""
    from kvbench.catalogue.models import find_model
    from kvbench.core.kv_format import head_row_bytes, latent_row_bytes
    from kvbench.core.layers import Attention, LatentAttention
    from kvbench.core.layout import Parallelism, check_parallelism, kv_heads_per_rank

    found = find_model(model).model
    check_parallelism(found, Parallelism(tp=tp))
    shapes: dict[tuple[int, int], int] = {}
    for mixer in found.mixers():
        match mixer:
            case Attention(stores_kv=True):
                row = head_row_bytes(mixer, "bf16") * kv_heads_per_rank(mixer.kv_heads, tp) // 2
                shapes[2, row] = shapes.get((2, row), 0) + 1
            case LatentAttention():
                row = latent_row_bytes(mixer, "bf16")
                shapes[1, row] = shapes.get((1, row), 0) + 1
    if not shapes:
        raise UsageError(f"model {found.name} keeps no pages of KV; choose a model with attention")
    (planes, row), layers = max(shapes.items(), key=lambda item: item[1])  # the shape that most layers have
    return KvShape(model=found.name, layers=layers, planes=planes, row_bytes=row, page_tokens=page_tokens)


def scattered(total_bytes: int, segment_bytes: int, *, pool_bytes: int, seed: int) -> Segments:
    """Segments from random places of the source pool to consecutive places of the target pool."""
    count, places = total_bytes // segment_bytes, pool_bytes // segment_bytes
    if count < 1 or places < count:
        raise KvbenchError(
            f"{format_bytes(total_bytes)} in segments of {format_bytes(segment_bytes)} do not fit a pool of "
            f"{format_bytes(pool_bytes)}; give a larger pool or smaller transfers"
        )
    chosen = random.Random(seed).sample(range(places), count)
    return Segments(
        segment_bytes, [place * segment_bytes for place in chosen], [index * segment_bytes for index in range(count)]
    )


def paged(total_bytes: int, shape: KvShape, layout: Layout, *, pool_bytes: int, seed: int) -> Segments:
    """Whole pages from a host pool in `layout` to a device pool that is layer-first, as SGLang's HiCache moves them.

    Host shapes, outermost first: layer-first (plane, layer, page, token), page-first-direct (plane, page, layer,
    token), page-first (plane, token, layer). The device is (plane, layer, page, token), so page-first moves single
    tokens and the other two whole pages of one layer.
    """
    pages = total_bytes // shape.page_bytes
    slots = pool_bytes // shape.page_bytes
    if pages < 1 or slots < pages:
        raise KvbenchError(
            f"pages of {format_bytes(shape.page_bytes)} ({shape.model}): {format_bytes(total_bytes)} hold {pages}, and "
            f"the pool of {format_bytes(pool_bytes)} {slots}; give larger transfers and a pool that holds them"
        )
    generator = random.Random(seed)
    origins = generator.sample(range(slots), pages)
    destinations = generator.sample(range(slots), pages)
    row = shape.row_bytes
    chunk = row if layout == "page-first" else row * shape.page_tokens
    parts = shape.page_tokens if layout == "page-first" else 1
    plane_bytes = shape.layers * slots * row * shape.page_tokens
    sources, targets = [], []
    for origin, destination in zip(origins, destinations, strict=True):
        for plane in range(shape.planes):
            for layer in range(shape.layers):
                for part in range(parts):
                    targets.append(plane * plane_bytes + ((layer * slots + destination) * parts + part) * chunk)
                    match layout:
                        case "layer-first":
                            inside = layer * slots + origin
                        case "page-first-direct":
                            inside = origin * shape.layers + layer
                        case _:
                            inside = (origin * parts + part) * shape.layers + layer
                    sources.append(plane * plane_bytes + inside * chunk)
    return Segments(chunk, sources, targets)
