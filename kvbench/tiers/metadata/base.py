"""The protocol of shared metadata: from a block's key to a place that holds the block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from kvbench.core.block_key import BlockKey
from kvbench.core.errors import KvbenchError

# Part of every stored key: entries written by another version of this schema never match.
SCHEMA_VERSION = 1
# What one look-up may cost before the service does more harm than good to a load of a few milliseconds.
LOOKUP_BUDGET_S = 1e-3

BreakerState = Literal["closed", "open", "half-open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A place that holds a block. A caller of `put` gives `instance` and `tier`; `find` fills in the rest.

    `instance` is the process that owns the place; its entries vanish when it dies. Empty: a place that outlives all
    its users, such as a bucket; its entries end by time to live only. `version` counts how often the entry was
    published. `expires_at_s` is the Unix time at which it ends unless it is renewed, None where that is not known.
    """

    instance: str
    tier: str
    num_bytes: int = 0
    version: int = 0
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataStats:
    """Counters since opening. A call refused by the open breaker is `skipped`; one past its time is a `timeout`.

    `lookup_p50_s` and the others are of the latest look-ups (a batch of keys is one), as its caller waited for them,
    refused ones left out; None before the first.
    """

    backend: str
    breaker: BreakerState
    lookups: int = 0
    keys_looked_up: int = 0
    hits: int = 0
    published: int = 0
    withdrawn: int = 0
    skipped: int = 0
    timeouts: int = 0
    failures: int = 0
    breaker_opened: int = 0
    lookup_p50_s: float | None = None
    lookup_p99_s: float | None = None
    lookup_max_s: float | None = None
    budget_s: float = LOOKUP_BUDGET_S
    last_error: str = ""

    @property
    def budget_kept(self) -> bool | None:
        """Whether the 99th percentile of look-ups is within the budget; None before the first look-up."""
        return None if self.lookup_p99_s is None else self.lookup_p99_s <= self.budget_s


class Metadata(Protocol):
    """Shared knowledge of who holds what. Every method may be called from several threads and none raises because the
    service is slow or gone: a look-up then finds nothing, a publication is dropped, and both are counted.

    What is found is a hint. A place may have let go of the block since; the load from it decides.
    """

    def put(self, keys: Sequence[BlockKey], location: Location, num_bytes: int | Sequence[int]) -> bool:
        """Publishes that `location` holds these blocks, of one size or one each; whether the service has taken it."""
        ...

    def find(self, keys: Sequence[BlockKey]) -> list[Location | None]:
        """One live location of each block, the latest published; None where there is none or nobody answers."""
        ...

    def remove(self, keys: Sequence[BlockKey], location: Location) -> bool:
        """Withdraws the blocks from `location`; whether the service has taken it."""
        ...

    def drain(self, instance: str) -> bool:
        """Withdraws everything that `instance` has published."""
        ...

    def stats(self) -> MetadataStats:
        """Counters, latencies and the breaker's state."""
        ...

    def close(self) -> None:
        """Ends the use, and with it the leases of the instances that published through it."""
        ...


class MetadataBackend(Protocol):
    """One service. Its methods are called by one thread, may block, and raise `MetadataUnavailableError`."""

    @property
    def name(self) -> str: ...

    def put(self, keys: Sequence[BlockKey], location: Location, sizes_bytes: Sequence[int]) -> None: ...

    def find(self, keys: Sequence[BlockKey]) -> list[Location | None]: ...

    def remove(self, keys: Sequence[BlockKey], location: Location) -> None: ...

    def drain(self, instance: str) -> None: ...

    def renew(self) -> None:
        """Renews the leases of the instances that published through this client, and drops what has ended."""
        ...

    def close(self) -> None: ...


class MetadataUnavailableError(KvbenchError):
    """The service did not do it; the caller goes on without."""
