import base64
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

from kvbench.core.provenance import Warning_
from kvbench.report.page import Figure, page
from kvbench.report.tables import TextTable
from kvbench.results.codec import from_json
from kvbench.results.document import Document
from kvbench.results.host_paths import HostPaths

VOID = {"meta", "br", "img", "link"}


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def drawn(document: Document[HostPaths]) -> str:
    table = TextTable(
        title="T", columns=("a", "b"), rows=(("<b>x</b>", "1"), ("y", "2")), note="n", highlight=frozenset({1})
    )
    return page(
        document,
        title="<script>title</script>",
        verdict="load & win",
        tone="good",
        details=["because"],
        figures=[Figure(svg="<svg><title>f</title></svg>", caption="look")],
        tables=[table, TextTable(title="hidden", columns=("a",), rows=())],
    )


def test_the_page_is_well_formed_and_in_order(host_paths: Document[HostPaths]) -> None:
    html = drawn(host_paths)
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    order = ("load &amp; win", "because", "<svg>", "look", "pageable", ">T<", "Where the numbers come from", "Download")
    assert [html.index(text) for text in order] == sorted(html.index(text) for text in order)
    assert "hidden" not in html


def test_what_a_file_or_user_wrote_is_escaped(new_host_paths: Callable[..., Document[HostPaths]]) -> None:
    evil = "<img src=x onerror=alert(1)>"
    document = new_host_paths(command_line=(evil,), warnings=(Warning_(code=evil, message=evil, remedy=evil),))
    html = drawn(document)
    assert "<img" not in html
    assert "<script" not in html
    assert "<b>x" not in html


def test_the_page_loads_nothing_from_elsewhere(host_paths: Document[HostPaths]) -> None:
    html = drawn(host_paths)
    assert not re.search(r"(?:src|href)=[\"'](?!data:)", html)
    assert "@import" not in html
    assert "url(" not in html
    assert "prefers-color-scheme: dark" in html


def test_the_page_carries_its_own_result(host_paths: Document[HostPaths]) -> None:
    found = re.search(r'data:application/json;base64,([^"]+)"', drawn(host_paths))
    assert found is not None
    assert from_json(base64.b64decode(found[1]), source="page") == host_paths


def test_an_interrupted_result_says_so(host_paths: Document[HostPaths]) -> None:
    assert "Interrupted" not in drawn(host_paths)
    assert "Interrupted" in drawn(replace(host_paths, interrupted=True))
