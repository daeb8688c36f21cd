"""The tiered store: several tiers as one store of KV blocks."""

from kvbench.core.heat import HotPrefixes
from kvbench.tiers.tiered.results import (
    Cleared,
    DrainResult,
    EdgeFigures,
    LoadResult,
    Lookup,
    StoreStats,
    StoreTicket,
    TierFigures,
)
from kvbench.tiers.tiered.settings import NO_REQUEST, Request, TierSettings, WhenFull, WritePolicy
from kvbench.tiers.tiered.spans import (
    JsonlSpans,
    MemorySpans,
    OtlpJsonSpans,
    Span,
    SpanSink,
    TeeSpans,
    seed_fields,
    span_totals,
)
from kvbench.tiers.tiered.store import CALLER, TieredStore

__all__ = [
    "CALLER",
    "NO_REQUEST",
    "Cleared",
    "DrainResult",
    "EdgeFigures",
    "HotPrefixes",
    "JsonlSpans",
    "LoadResult",
    "Lookup",
    "MemorySpans",
    "OtlpJsonSpans",
    "Request",
    "Span",
    "SpanSink",
    "StoreStats",
    "StoreTicket",
    "TeeSpans",
    "TierFigures",
    "TierSettings",
    "TieredStore",
    "WhenFull",
    "WritePolicy",
    "seed_fields",
    "span_totals",
]
