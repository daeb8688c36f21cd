"""Parses XML into plain elements with limits on depth, size and count, and without entities.

expat, from the standard library, does the reading. Captured files need no entity of their own, so a document that
declares one is refused: that is how a few lines grow into gigabytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from kvbench.core.errors import KvbenchError

MOST_DEPTH = 128
MOST_ELEMENTS = 500_000
_AT_END = frozenset({expat.errors.codes[name] for name in ("no element found", "unclosed token")})


@dataclass(slots=True)
class Element:
    """One element: tag, attributes, children in order, and its text."""

    tag: str
    attributes: dict[str, str]
    children: list["Element"] = field(default_factory=list)
    text: str = ""

    def get(self, name: str, default: str = "") -> str:
        return self.attributes.get(name, default)

    def walk(self) -> Iterator["Element"]:
        """This element and all below it, in document order."""
        stack = [self]
        while stack:
            element = stack.pop()
            yield element
            stack.extend(reversed(element.children))


class _Builder:
    def __init__(self, source: str) -> None:
        self.source = source
        self.root: Element | None = None
        self.stack: list[Element] = []
        self.count = 0

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.count += 1
        if self.count > MOST_ELEMENTS or len(self.stack) >= MOST_DEPTH:
            what = f"{MOST_ELEMENTS} elements" if self.count > MOST_ELEMENTS else f"{MOST_DEPTH} levels"
            raise KvbenchError(f"{self.source}: XML with more than {what}; that is no topology file, check what it is")
        element = Element(tag, attributes)
        if self.stack:
            self.stack[-1].children.append(element)
        else:
            self.root = element
        self.stack.append(element)

    def end(self, _tag: str) -> None:
        self.stack.pop()

    def data(self, text: str) -> None:
        if self.stack:
            self.stack[-1].text += text

    def refuse_entity(self, *_declaration: object) -> None:
        raise KvbenchError(
            f"{self.source}: the XML declares entities, which no topology file does; remove the declarations"
        )


def parse_xml(text: str, source: str) -> tuple[Element, bool]:
    """The root element, and whether the document ends before its root is closed."""
    builder = _Builder(source)
    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.EntityDeclHandler = builder.refuse_entity
    try:
        parser.Parse(text.encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        if builder.root is not None and error.code in _AT_END and builder.count > 1:
            return builder.root, True
        raise KvbenchError(
            f"{source}:{error.lineno}: not readable as XML ({expat.errors.messages[error.code]}); "
            "give the whole file as the tool wrote it"
        ) from error
    if builder.root is None:
        raise KvbenchError(f"{source}: the XML has no element; give the whole file as the tool wrote it")
    return builder.root, False
