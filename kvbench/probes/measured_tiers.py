"""Which tiers `--measure` can load from."""

from kvbench.core.errors import UsageError
from kvbench.tiers.spec import TierSpec, parse_tier_spec

MEASURED_SCHEMES = ("dram", "file")
MEASURED_FILE_IO = ("psync", "mmap")


def measurable_tier(text: str) -> TierSpec:
    """The tier that `text` spells, or a refusal that names what this version can measure."""
    spec = parse_tier_spec(text)
    if spec.scheme not in MEASURED_SCHEMES:
        raise UsageError(
            f"tier {text!r}: this version measures {' and '.join(MEASURED_SCHEMES)} tiers, not {spec.scheme}; "
            f"give its speed instead, like {spec.scheme}=2GB/s,1ms"
        )
    if spec.io is not None and spec.io not in MEASURED_FILE_IO:
        known = " and ".join(f"io={io}" for io in MEASURED_FILE_IO)
        raise UsageError(f"tier {text!r}: this version measures {known}, not io={spec.io}; write io=psync")
    return spec
