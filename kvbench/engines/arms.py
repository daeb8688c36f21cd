"""Parses the spelling of an arm: `off`, `l1`, `l1=64MiB+l2=1GiB+l3=/mnt/kv`, `hbm+dram`, `lmcache=1GiB`, `on=http://…`."""

import difflib
import re
from dataclasses import replace

from kvbench.core.errors import UsageError
from kvbench.engines.base import Arm, ArmTier

NO_REUSE = ("off", "recompute", "none")
_NAMES = {
    "l1": "hbm", "hbm": "hbm",
    "l2": "dram", "dram": "dram",
    "l3": "file", "file": "file", "fs": "file",
    "l4": "remote", "remote": "remote",
    "lmcache": "lmcache", "mooncake": "mooncake",
}  # fmt: skip
_ORDER = ("hbm", "dram", "file", "remote", "lmcache", "mooncake")
# A plus sign inside a path or an address is not a separator unless a tier's name follows it.
_SEPARATOR = re.compile(r"\+(?=(?:" + "|".join(_NAMES) + r")(?:=|\+|$))")
_NAMED = re.compile(r"([^@=/]+)@(.+)")
_URL = re.compile(r"(?:([^=/]+)=)?(https?://\S+)")
_EXAMPLES = "off, l1, l1=64MiB, l1+l2=16GiB, l1+l2=1GiB+l3=/mnt/kv, l1+lmcache=4GiB, on=http://127.0.0.1:8000"


def parse_arm(text: str) -> Arm:
    """The arm that `text` spells; its name is the spelling, or what stands before `@` or the `=` of an address."""
    text = text.strip()
    if named := _NAMED.fullmatch(text):
        return replace(parse_arm(named[2]), name=named[1])
    if address := _URL.fullmatch(text):
        return Arm(name=address[1] or address[2], url=address[2].rstrip("/"))
    if text in NO_REUSE:
        return Arm(name=text)
    tiers = tuple(_tier(part, text) for part in _SEPARATOR.split(text))
    names = [tier.name for tier in tiers]
    if len(set(names)) < len(names):
        raise UsageError(f"arm {text!r} names a tier twice; arms are spelled like {_EXAMPLES}")
    if names != sorted(names, key=_ORDER.index):
        raise UsageError(f"arm {text!r} lists its tiers out of order; write the nearest first: {_EXAMPLES}")
    return Arm(name=text, tiers=tiers)


def parse_arms(texts: list[str] | tuple[str, ...]) -> tuple[Arm, ...]:
    """All arms of a command line; two arms of one name are refused, since results are told apart by it."""
    arms = tuple(parse_arm(text) for text in texts)
    for arm in arms:
        if sum(other.name == arm.name for other in arms) > 1:
            raise UsageError(f"arm {arm.name!r} is named twice; give each address a name: --arm a=URL --arm b=URL")
    return arms


def _tier(part: str, text: str) -> ArmTier:
    word, equals, value = part.partition("=")
    name = _NAMES.get(word)
    if name is None:
        near = difflib.get_close_matches(word, [*_NAMES, *NO_REUSE], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise UsageError(f"arm {text!r} has the unknown tier {word!r}{hint}; arms are spelled like {_EXAMPLES}")
    if equals and not value:
        raise UsageError(f"arm {text!r} has no value after {word}=; arms are spelled like {_EXAMPLES}")
    return ArmTier(name=name, value=value or None)
