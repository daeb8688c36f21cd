from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.collectives import Signature, conflict
from kvbench.core.divergence import camps, explain, first_difference

ITEMS = st.lists(st.integers(0, 50), min_size=1, max_size=30, unique=True)


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_the_first_difference_is_the_first(one: list[int], other: list[int]) -> None:
    at = first_difference(one, other)
    assert (at is None) == (one == other)
    if at is not None:
        assert one[:at] == other[:at]
        assert one[at : at + 1] != other[at : at + 1]


@given(ITEMS, st.data())
def test_one_edit_of_distinct_items_is_explained_by_that_edit(items: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(items) - 1))
    last = at == len(items) - 1
    dropped, extra = [*items[:at], *items[at + 1 :]], [*items[:at], 99, *items[at:]]
    found = {name: explain(items, other) for name, other in (("drop", dropped), ("extra", extra))}
    assert found["drop"] is not None
    assert (found["drop"].kind, found["drop"].at) == ("ended" if last else "missing", at)
    assert found["extra"] is not None
    assert (found["extra"].kind, found["extra"].at) == ("extra", at)
    changed = explain(items, [*items[:at], 99, *items[at + 1 :]])
    assert changed is not None
    assert (changed.kind, changed.at) == ("changed", at)
    if not last:
        swapped = explain(items, [*items[:at], items[at + 1], items[at], *items[at + 2 :]])
        assert swapped is not None
        assert (swapped.kind, swapped.at) == ("swapped", at)


@given(st.dictionaries(st.integers(0, 9), st.sampled_from([Signature("AllReduce", 1), Signature("AllReduce", 2)])))
def test_camps_hold_every_rank_once_and_the_largest_leads(calls: dict[int, Signature]) -> None:
    found = camps(calls)
    assert sorted(rank for _, members in found for rank in members) == sorted(calls)
    assert [len(members) for _, members in found] == sorted((len(members) for _, members in found), reverse=True)


def test_a_field_that_one_side_does_not_know_is_no_conflict() -> None:
    assert conflict({0: Signature("Broadcast", 8, None, None, 0), 1: Signature("Broadcast", 8, "int8")}) == ()
    assert conflict({0: Signature("Send", 8), 1: Signature("Recv", 8)}) == ()
    assert conflict({0: Signature("Send", 8), 1: Signature("Recv", 9)}) == ("count",)
