"""The protocol of executions: one way to copy segments from a source pool to a target pool."""

from typing import Any, Literal, Protocol

from kvbench.core.errors import KvbenchError
from kvbench.probes.segments import Segments

Direction = Literal["h2h", "h2d", "d2h", "duplex"]


class ExecutionUnavailableError(KvbenchError):
    """This host cannot run the execution; the case is skipped with the message as its reason."""


class Execution(Protocol):
    """Two pools and one way between them. The pools hold random bytes in the source and zeros in the target."""

    source: str
    target: str
    """What the pools really are: a path into host memory is never a GPU path."""

    def prepare(self, segments: Segments) -> Any:
        """What a caller has at hand before it copies: index lists and pointers, made outside the clock."""
        ...

    def copy(self, prepared: Any) -> None:
        """Copies and returns when the bytes have arrived: the time a caller pays."""
        ...

    def wire_s(self, prepared: Any) -> float | None:
        """Seconds of the copy itself with the cost of launching it hidden; None where the two cannot be told apart."""
        ...

    def clear_target(self) -> None:
        """Sets the target to zero, so that bytes of an earlier copy cannot pass for those of the next."""
        ...

    def differs(self, segments: Segments) -> int | None:
        """Index of the first segment that did not arrive exactly, or None. Where targets overlap, the last one wins."""
        ...

    def close(self) -> None:
        """Frees the pools."""
        ...
