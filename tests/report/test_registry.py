import pytest

from kvbench.core.errors import KvbenchError
from kvbench.report.registry import RENDERERS, renderer
from kvbench.results.registry import KINDS


def test_every_kind_has_a_renderer_and_the_reverse() -> None:
    assert list(RENDERERS) == list(KINDS)


@pytest.mark.parametrize("kind", RENDERERS)
def test_every_renderer_draws_text_and_pages(kind: str) -> None:
    found = renderer(kind)
    assert callable(found.terminal)
    assert callable(found.html)


def test_a_kind_without_a_renderer_is_refused_by_name() -> None:
    with pytest.raises(KvbenchError, match="kind 'horoscope' has no report"):
        renderer("horoscope")
