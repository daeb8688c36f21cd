"""A prefix that comes back from a tier gives the tokens and the logits of one that is recomputed."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvbench.engines.builtin.runner import ModelInfo, ModelRunner, make_runner
from kvbench.tiers.tiered import TieredStore
from tests.engines.builtin.tiny import CONFIGS, generate, largest_difference, tiered_store, tiny

FAMILIES = [family for family in CONFIGS if family != "hybrid-mamba2"]
PAGES = (1, 16, 64)
TIERS = ("hbm", "dram", "file")
FLOAT32_BOUND = 1e-5
BFLOAT16_BOUND = 0.25  # logits have a standard deviation of about 1, and bfloat16 has 8 bits


def _prompt(tokens: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(256), k=tokens)


@contextmanager
def _running(
    family: str, folder: Path, page_tokens: int, *, dtype: str = "float32", layer_ranges: int = 1, split: bool = False
) -> Iterator[tuple[ModelRunner, TieredStore]]:
    with ExitStack() as stack:
        opened: list[TieredStore] = []

        def open_store(info: ModelInfo) -> TieredStore:
            opened.append(stack.enter_context(tiered_store(info.block_bytes, folder)))
            return opened[0]

        runner = make_runner(
            tiny(family, dtype),
            open_store=open_store,
            page_tokens=page_tokens,
            layer_ranges=layer_ranges,
            state_interval_tokens=64,
            split=split,
        )
        stack.callback(runner.close)
        yield runner, opened[0]


def _only(store: TieredStore, tier: str) -> None:
    for name in store.tiers:
        store.set_enabled(name, name == tier)


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_from_each_tier_gives_what_recomputing_gives(family: str, page_tokens: int, tmp_path: Path) -> None:
    with _running(family, tmp_path, page_tokens) as (runner, store):
        for tokens in (128, 139):  # on a border of every page size, and off
            prompt = _prompt(tokens)
            recomputed = generate(runner, prompt, load=False, store=False)
            generate(runner, prompt, load=False)
            assert store.flush(10)
            for tier in TIERS:
                _only(store, tier)
                restored = generate(runner, prompt, store=False)
                cached = (tokens - 1) // page_tokens * page_tokens
                assert restored.cached_tokens == cached
                assert restored.cached_tokens_by_tier == {tier: cached}
                assert restored.output_ids == recomputed.output_ids
                assert largest_difference(restored, recomputed) <= FLOAT32_BOUND
                assert restored.loaded_bytes == sum(restored.loaded_bytes_by_tier.values())
                assert restored.loaded_bytes == runner.info.prefix_bytes(cached)
            for name in TIERS:
                store.set_enabled(name, True)
            store.clear()


@pytest.mark.parametrize("family", ["gqa", "mla", "window", "hybrid"])
def test_two_prompts_that_share_half_a_page_share_only_whole_pages(family: str, tmp_path: Path) -> None:
    first = _prompt(120)
    second = first[:72] + _prompt(48, seed=2)
    with _running(family, tmp_path, 16) as (runner, _):
        generate(runner, first)
        restored = generate(runner, second)
        recomputed = generate(runner, second, load=False, store=False)
    assert restored.cached_tokens == 64  # the page [64, 80) is shared only up to 72
    assert restored.output_ids == recomputed.output_ids
    assert largest_difference(restored, recomputed) <= FLOAT32_BOUND


@pytest.mark.parametrize("family", ["gqa", "mla", "window", "hybrid"])
def test_bfloat16_restores_the_same_bytes_and_stays_within_its_rounding(family: str, tmp_path: Path) -> None:
    prompt = _prompt(139)
    with _running(family, tmp_path, 16, dtype="bfloat16") as (runner, store):
        stored = generate(runner, prompt, chunk=16)
        assert store.flush(10)
        _only(store, "file")
        restored = generate(runner, prompt, store=False, chunk=16)
        assert restored.cached_tokens_by_tier == {"file": 128}
        # computed in the same pieces, so nothing but the stored bytes could make a difference
        assert largest_difference(restored, stored) == 0
        whole = generate(runner, prompt, load=False, store=False, chunk=1000, tokens=1)
        assert float((whole.logits[0] - restored.logits[0]).abs().max()) <= BFLOAT16_BOUND


@pytest.mark.parametrize("family", ["gqa", "mla", "window", "hybrid"])
def test_a_conversation_goes_on_from_the_pages_of_its_own_answers(family: str, tmp_path: Path) -> None:
    with _running(family, tmp_path, 16) as (runner, _):
        turn = generate(runner, _prompt(70), tokens=60)
        longer = [*turn.prompt, *turn.output_ids, *_prompt(9, seed=3)]
        restored = generate(runner, longer)
        recomputed = generate(runner, longer, load=False, store=False)
    assert restored.cached_tokens == 128  # 70 + 60 tokens, of which the last was never fed to the model
    assert restored.output_ids == recomputed.output_ids
    assert largest_difference(restored, recomputed) <= FLOAT32_BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_wait_for_their_own_load_compute_the_same(family: str, tmp_path: Path) -> None:
    prompt = _prompt(139)
    with _running(family, tmp_path, 16, layer_ranges=4) as (runner, _):
        assert {group.span for group in runner.info.layout.groups} == {(0, 1), (1, 2), (2, 3), (3, 4)}
        recomputed = generate(runner, prompt)
        restored = generate(runner, prompt)
        assert restored.cached_tokens == 128
        assert restored.loaded_bytes == runner.info.prefix_bytes(128)
    assert restored.output_ids == recomputed.output_ids
    assert largest_difference(restored, recomputed) <= FLOAT32_BOUND


@pytest.mark.parametrize("family", ["gqa", "mla", "window", "hybrid"])
def test_computing_the_front_while_the_back_is_loaded_computes_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = _prompt(139)
    with _running(family, tmp_path, 16, split=True) as (runner, _):
        recomputed = generate(runner, prompt)
        monkeypatch.setattr(runner, "_front_pages", lambda _sequence, _pages: 3)
        restored = generate(runner, prompt, chunk=20)
    assert restored.cached_tokens == 128 - 48
    assert restored.output_ids == recomputed.output_ids
    assert largest_difference(restored, recomputed) <= FLOAT32_BOUND


def test_the_split_follows_the_measured_rates(tmp_path: Path) -> None:
    with _running("gqa", tmp_path, 16, split=True) as (runner, _):
        prompt = _prompt(1025)
        sequence = generate(runner, prompt, tokens=1)
        # 1,024 bytes a token: loading 64 MB/s is 62,500 tokens/s, so computing 62,500 tokens/s meets it half way
        runner._prefill_tokens_per_s, runner._load_bytes_per_s = 62_500.0, 64e6
        assert runner._front_pages(runner.start(prompt, load=False), 64) == 32
        runner._load_bytes_per_s = 64e9
        assert runner._front_pages(runner.start(prompt, load=False), 64) == 0
        assert sequence.cached_tokens == 0


def test_another_salt_model_seed_or_dtype_never_finds_the_pages(tmp_path: Path) -> None:
    prompt = _prompt(100)
    with tiered_store(1 << 14, tmp_path) as store:

        def cached(dtype: str = "float32", seed: int = 0, page_tokens: int = 16, salt: str = "") -> int:
            model = tiny("gqa", dtype, seed)
            runner = make_runner(model, open_store=lambda _: store, page_tokens=page_tokens)
            sequence = generate(runner, prompt, cache_salt=salt, tokens=1)
            runner.close()
            return sequence.cached_tokens

        assert cached() == 0
        assert cached() == 96
        assert cached(salt="another") == 0
        assert cached(dtype="bfloat16") == 0
        assert cached(seed=1) == 0
        assert cached(page_tokens=8) == 0


def test_a_model_that_transformers_cannot_continue_is_computed_in_one_piece(tmp_path: Path) -> None:
    with _running("hybrid-mamba2", tmp_path, 16) as (runner, _):
        first = generate(runner, _prompt(100))
        second = generate(runner, _prompt(100))
        reuses = runner.info.reuses_prefixes
    assert reuses or second.cached_tokens == 0
    assert second.output_ids == first.output_ids
