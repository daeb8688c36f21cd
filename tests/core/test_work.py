"""FLOPs: pairs against brute force, parts that add up, and what every rank repeats."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.layers import Attention, DenseFeedForward, Indexer, LatentAttention, Layer, MoeFeedForward
from kvbench.core.layout import Parallelism
from kvbench.core.model import Model
from kvbench.core.work import (
    active_params_terms,
    chunk_pairs,
    full_pairs,
    model_terms,
    stage_terms,
    window_pairs,
)

GQA = Attention(heads=16, kv_heads=4, qk_dim=64, v_dim=64)
SPARSE = LatentAttention(
    heads=16, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=256,
    indexer=Indexer(heads=8, head_dim=128, top_k=64),
)  # fmt: skip
DENSE = DenseFeedForward(intermediate_size=1024)
MOE = MoeFeedForward(experts=16, experts_per_token=2, intermediate_size=128, shared_size=128)


def model_of(
    mixer: Attention | LatentAttention, feed_forward: DenseFeedForward | MoeFeedForward, layers: int = 4
) -> Model:
    layer = Layer(hidden_size=256, mixer=mixer, feed_forward=feed_forward)
    return Model(
        name="toy", architecture="Toy", hidden_size=256, vocab_size=100, tied_embeddings=True, layers=(layer,) * layers
    )


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 40))
def test_pairs_equal_counting_them(new: int, cached: int, size: int) -> None:
    def count(sees: Callable[[int, int], bool]) -> int:
        return sum(1 for q in range(cached, cached + new) for k in range(q + 1) if sees(q, k))

    assert full_pairs(new, cached) == count(lambda q, k: True)
    assert window_pairs(new, cached, size) == count(lambda q, k: q - k < size)
    assert chunk_pairs(new, cached, size) == count(lambda q, k: q // size == k // size)


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_prefill_in_two_parts_costs_as_much_as_in_one(first: int, second: int) -> None:
    for mixer in (GQA, SPARSE):
        terms = model_terms(model_of(mixer, DENSE))
        parts = terms.at(first) + terms.at(second, first)
        assert parts.total == terms.at(first + second).total


@given(st.sampled_from([1, 2, 4]), st.integers(1, 2000))
def test_even_division_over_ranks_conserves_work(tp: int, tokens: int) -> None:
    model = model_of(GQA, MOE)
    (even,) = stage_terms(model, Parallelism(tp=tp), replicated_work=False)
    assert even.at(tokens).total * tp == pytest.approx(model_terms(model).at(tokens).total)


@given(st.sampled_from([2, 4, 8, 16]), st.integers(1, 2000))
def test_what_every_rank_repeats_is_on_top_of_the_even_share(tp: int, tokens: int) -> None:
    model = model_of(GQA, MOE)
    (exact,) = stage_terms(model, Parallelism(tp=tp))
    (even,) = stage_terms(model, Parallelism(tp=tp), replicated_work=False)
    router = 4 * 2 * tokens * 256 * 16
    kv_share = max(1, 4 // tp) / 4 - 1 / tp
    kv = 4 * 2 * tokens * 256 * 4 * 128 * kv_share
    assert exact.at(tokens).total - even.at(tokens).total == pytest.approx(router * (1 - 1 / tp) + kv)


def test_index_scores_are_on_every_tensor_parallel_rank_and_divided_by_cp() -> None:
    whole = model_terms(model_of(SPARSE, DENSE)).at(4096)
    (tp,) = stage_terms(model_of(SPARSE, DENSE), Parallelism(tp=8))
    (cp,) = stage_terms(model_of(SPARSE, DENSE), Parallelism(tp=8, cp=8))
    assert tp.at(4096).index == whole.index
    assert cp.at(4096).index == pytest.approx(whole.index / 8)


def test_a_shared_indexer_scores_nothing_and_still_limits_attention() -> None:
    follower = LatentAttention(
        heads=16, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=256,
        indexer=Indexer(heads=8, head_dim=128, top_k=64, owned=False),
    )  # fmt: skip
    owner, shared = model_terms(model_of(SPARSE, DENSE)).at(1000), model_terms(model_of(follower, DENSE)).at(1000)
    assert shared.index == 0
    assert shared.attention == owner.attention
    assert owner.linear - shared.linear == 4 * 2 * 1000 * (256 * 8 * 128 + 256 * (128 + 8))


@given(st.integers(1, 10**6), st.integers(1, 100_000))
def test_the_rule_of_thumb_is_two_psi_n_plus_half_of_the_square(active: int, tokens: int) -> None:
    work = active_params_terms(model_of(GQA, DENSE), active).at(tokens)
    assert work.linear == 2 * active * tokens
    assert work.attention == 4 * tokens**2 * 16 * 64 * 4 / 2


def test_pipeline_stages_hold_all_the_work_between_them() -> None:
    model = model_of(GQA, DENSE, layers=7)
    stages = stage_terms(model, Parallelism(pp=3))
    assert sum(stage.at(777).total for stage in stages) == model_terms(model).at(777).total
