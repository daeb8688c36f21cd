"""Reads `ethtool DEVICE`: the rate now and the highest rate of the port.

Settings for eth2:
        Supported link modes:   25000baseCR/Full
                                100000baseCR4/Full
        Speed: 25000Mb/s
"""

import re

from kvbench.core.errors import KvbenchError
from kvbench.topo.facts import Facts

_BLOCK = re.compile(r"Settings for ([\w.\-:@]{1,64}):")
_MODE = re.compile(r"\b(\d{2,7})base[\w-]{1,12}/(?:Full|Half)")
_SPEED = re.compile(r"\s*Speed: (\d{1,7})Mb/s")
_MBIT = 1e6


def looks_like_ethtool(text: str) -> bool:
    """Whether a `Settings for DEVICE:` line stands near the start."""
    return _BLOCK.search(text[:5000]) is not None


def read_ethtool(text: str, source: str) -> Facts:
    """The highest supported mode and the speed of every device in the text."""
    found: dict[str, tuple[float | None, float | None]] = {}
    name, supported = "", False
    for line in (whole[:400] for whole in text.splitlines()):
        if match := _BLOCK.match(line):
            name, supported = match[1], False
            found[name] = (None, None)
            continue
        if ":" in line:
            supported = line.strip().startswith("Supported link modes")
        now, most = found.get(name, (None, None))
        if supported:
            modes = [int(mode) * _MBIT for mode in _MODE.findall(line)]
            most = max([*modes, *([most] if most else [])], default=most)
        if match := _SPEED.match(line):
            now = int(match[1]) * _MBIT
        if name:
            found[name] = (now, most)
    if not found:
        raise KvbenchError(f"{source}: no `Settings for DEVICE:` block; give the output of ethtool DEVICE")
    rates = tuple((device, now, most) for device, (now, most) in found.items())
    return Facts(format="ethtool", source=source, port_rates=rates)
