"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence


class StopText:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one."""

    __slots__ = ("_held", "_stops", "found")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """What of the text so far may be shown now."""
        if not self._stops:
            return piece
        if self.found:
            return ""
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.found = True
            self._held = ""
            return text[: min(places)]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back, once no more comes."""
        rest, self._held = self._held, ""
        return "" if self.found else rest


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
