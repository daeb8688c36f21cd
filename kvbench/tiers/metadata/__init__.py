"""Where the blocks of a shared tier lie: a small service from a block's key to the places that hold it."""

from kvbench.tiers.metadata.base import Location, Metadata, MetadataStats
from kvbench.tiers.metadata.registry import open_metadata

__all__ = ["Location", "Metadata", "MetadataStats", "open_metadata"]
