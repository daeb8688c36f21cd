"""Which pages a prefix needs, and the longest prefix that is there."""

from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.block_key import KvIdentity
from kvbench.engines.builtin.pages import Kind, PageGroup, install, kv_layout, new_cache, take_pages
from kvbench.engines.builtin.runner import _longest
from tests.engines.builtin.tiny import tiny


def _group(kind: Kind, page_tokens: int, window: int | None = None) -> PageGroup:
    identity = KvIdentity(
        model="m",
        model_version="1",
        tokenizer_version="1",
        dtype="float32",
        page_tokens=page_tokens,
        layers=(0, 1),
        attention=kind,
    )
    return PageGroup(kind=kind, identity=identity, page_tokens=page_tokens, block_bytes=1, window=window, slots=())


@given(st.integers(1, 40), st.integers(1, 100), st.integers(0, 12))
def test_a_window_needs_the_pages_that_the_next_token_sees(page_tokens: int, window: int, pages: int) -> None:
    end = pages * page_tokens
    seen = range(max(0, end - window + 1), end)  # the next token sees itself and window - 1 before it
    needed = _group("window", page_tokens, window).pages_for_prefix(pages)
    assert set(needed) == {token // page_tokens for token in seen}


@given(
    st.integers(1, 8), st.integers(1, 40), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11)), st.integers(0, 12)
)
def test_the_longest_prefix_is_the_one_that_trying_all_finds(
    page_tokens: int, window: int, windows: set[int], states: set[int], limit: int
) -> None:
    groups = [_group("window", page_tokens, window), _group("state", page_tokens)]
    found = [windows, states]
    complete = [
        pages
        for pages in range(limit + 1)
        if all(set(group.pages_for_prefix(pages)) <= have for group, have in zip(groups, found, strict=True))
    ]
    assert _longest(groups, found, [0, 1], limit) == max(complete)


def test_a_block_has_the_layers_one_after_the_other_each_with_keys_then_values() -> None:
    import torch

    from kvbench.engines.builtin.pages import forward

    model = tiny("gqa")
    layout = kv_layout(model, page_tokens=4, layer_ranges=2)
    cache = new_cache(model)
    forward(model, range(10), cache)
    first, second = layout.groups
    assert (first.span, second.span) == ((0, 2), (2, 4))
    block = take_pages(cache, second, range(1, 2))
    by_hand = torch.cat(
        [part[0, :, 4:8].reshape(-1) for layer in cache.layers[2:] for part in (layer.keys, layer.values)]
    )
    assert block.numpy().tobytes() == by_hand.numpy().tobytes()

    restored = new_cache(model)
    install(restored, second, take_pages(cache, second, range(2)), range(2))
    assert torch.equal(restored.layers[3].values, cache.layers[3].values[:, :, :8])
