import pytest

from kvbench.core.errors import KvbenchError
from kvbench.results.registry import KINDS, result_class


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_names_a_frozen_dataclass_that_knows_its_kind(kind: str) -> None:
    found = result_class(kind, source="test")
    assert kind == found.KIND
    assert found.SCHEMA_VERSION >= 1
    assert found.__dataclass_params__.frozen
    assert hasattr(found, "__slots__")


def test_an_unknown_kind_is_refused_with_the_file_and_the_known_kinds() -> None:
    with pytest.raises(KvbenchError, match=r"^x\.json: kind 'tea-leaves' .*host-paths"):
        result_class("tea-leaves", source="x.json")
