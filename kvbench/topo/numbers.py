"""Reads the numbers and CPU lists that kernels and tools write in several spellings."""

import re

_WHOLE = re.compile(r"\s*(-?)(0x[0-9a-fA-F]{1,16}|\d{1,18})\s*")
_SPEED = re.compile(r"\s*(\d{1,4}(?:\.\d)?)\s?GT/s.{0,10}")


def whole(text: str | None) -> int | None:
    """`16`, `-1` or `0x0302`; None for anything else."""
    match = _WHOLE.fullmatch(text or "")
    if match is None:
        return None
    value = int(match[2], 16 if match[2].startswith("0x") else 10)
    return -value if match[1] else value


def lane_rate(text: str | None) -> float | None:
    """GT/s of `16 GT/s`, `16.0 GT/s PCIe` or `16GT/s`; None for `Unknown`."""
    match = _SPEED.fullmatch(text or "")
    return float(match[1]) if match else None


def cpu_list(mask: str) -> str | None:
    """`0-15,32-47` for a mask such as `0000ffff,0000ffff` (the last word holds CPU 0); a list stays as it is."""
    text = mask.strip()
    if not text or len(text) > 4096:
        return None
    if "-" in text or (
        re.fullmatch(r"\d{1,5}(,\d{1,5})*", text) and not re.fullmatch(r"[0-9a-f]{8}(,[0-9a-f]{8})*", text)
    ):
        return text
    words = [word.removeprefix("0x") or "0" for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9a-fA-F]{1,8}", word) for word in words):
        return None
    bits = 0
    for word in words:
        bits = bits << 32 | int(word, 16)
    return _ranges([index for index in range(bits.bit_length()) if bits >> index & 1])


def bits(mask: str) -> tuple[int, ...]:
    """Set bits of an hwloc mask such as `0x00000303,0x03030000,,0x03030303`; an empty word repeats zero."""
    if len(mask) > 4096 or not re.fullmatch(r"(0x[0-9a-fA-F]{1,8}|0xf\.\.\.f)?(,(0x[0-9a-fA-F]{1,8})?)*", mask):
        return ()
    value = 0
    for word in mask.replace("0xf...f", "0x0").split(","):
        value = value << 32 | int(word.removeprefix("0x") or "0", 16)
    return tuple(index for index in range(value.bit_length()) if value >> index & 1)


def _ranges(indexes: list[int]) -> str | None:
    parts: list[tuple[int, int]] = []
    for index in indexes:
        if parts and parts[-1][1] == index - 1:
            parts[-1] = (parts[-1][0], index)
        else:
            parts.append((index, index))
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts) or None


def ranges(indexes: tuple[int, ...]) -> str | None:
    """`0-3,8` for 0, 1, 2, 3, 8; None for nothing."""
    return _ranges(sorted(set(indexes)))


_LANE_RATES = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}


def generation_rate(generation: int | None) -> float | None:
    """GT/s per lane of a PCIe generation; None for an unknown one."""
    return _LANE_RATES.get(generation or 0)
