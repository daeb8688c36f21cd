"""Bytes are conserved across any sharding; copies are counted where engines make them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.errors import UsageError
from kvbench.core.kv_format import KvFormat
from kvbench.core.layers import Attention, DenseFeedForward, Indexer, LatentAttention, Layer, Mixer, RecurrentState
from kvbench.core.layout import CacheLayout, Parallelism, check_parallelism, share, stage_sizes
from kvbench.core.model import Model

FULL = Attention(heads=32, kv_heads=4, qk_dim=64, v_dim=64)
WINDOW = Attention(heads=32, kv_heads=4, qk_dim=64, v_dim=64, window_tokens=100)
CHUNK = Attention(heads=32, kv_heads=4, qk_dim=64, v_dim=64, chunk_tokens=64)
SHARED = Attention(heads=32, kv_heads=4, qk_dim=64, v_dim=64, stores_kv=False)
LATENT = LatentAttention(heads=32, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1536)
SPARSE = LatentAttention(
    heads=32, kv_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_rank=1536,
    indexer=Indexer(heads=64, head_dim=128, top_k=2048),
)  # fmt: skip
STATE = RecurrentState(
    kind="gated_delta_net", heads=32, state_elements=32 * 128 * 128, conv_elements=32 * 512, matmul_params=10**6,
    update_flop_per_token=10**6,
)  # fmt: skip
MIXERS = (FULL, WINDOW, CHUNK, SHARED, LATENT, SPARSE, STATE)


def model_of(*mixers: Mixer) -> Model:
    layers = tuple(
        Layer(hidden_size=512, mixer=mixer, feed_forward=DenseFeedForward(intermediate_size=1024)) for mixer in mixers
    )
    return Model(
        name="toy", architecture="ToyForCausalLM", hidden_size=512, vocab_size=1000, tied_embeddings=True, layers=layers
    )


mixers = st.lists(st.sampled_from(MIXERS), min_size=1, max_size=12)
tokens = st.integers(1, 5000)


@given(mixers, tokens, st.sampled_from([1, 2, 4]), st.integers(1, 12))
def test_tensor_and_pipeline_sharding_without_copies_conserves_bytes(
    chosen: list[Mixer], n: int, tp: int, pp: int
) -> None:
    kept = [m for m in chosen if not isinstance(m, LatentAttention)]
    model = model_of(*(kept or [FULL]))
    layout = CacheLayout(model, Parallelism(tp=tp, pp=min(pp, len(model.layers))), KvFormat())
    assert layout.at(n).node_bytes == layout.at(n).unique_bytes


@given(mixers, tokens, st.sampled_from([1, 2, 4, 8]), st.sampled_from(["ring", "layer-split"]))
def test_sharded_context_parallelism_conserves_bytes(chosen: list[Mixer], n: int, cp: int, mode: str) -> None:
    kept = [m for m in chosen if not isinstance(m, RecurrentState)]
    model = model_of(*(kept or [LATENT]))
    layout = CacheLayout(model, Parallelism(tp=cp, cp=cp, cp_mode=mode), KvFormat())  # type: ignore[arg-type]
    cache = layout.at(n)
    assert cache.node_bytes == cache.unique_bytes
    assert cache.rank_bytes * cp >= cache.unique_bytes


@given(mixers, tokens, st.sampled_from([2, 4, 8]))
def test_all_gather_context_parallelism_keeps_a_copy_per_rank(chosen: list[Mixer], n: int, g: int) -> None:
    model = model_of(*chosen)
    whole = CacheLayout(model, Parallelism(), KvFormat()).at(n)
    copied = CacheLayout(model, Parallelism(tp=g, cp=g), KvFormat()).at(n)
    assert copied.node_bytes == g * whole.node_bytes
    assert copied.rank_bytes == whole.rank_bytes


@given(tokens, st.sampled_from([8, 16, 32]))
def test_tensor_parallelism_beyond_the_kv_heads_copies_them(n: int, tp: int) -> None:
    cache = CacheLayout(model_of(FULL, FULL), Parallelism(tp=tp), KvFormat()).at(n)
    assert cache.node_bytes == cache.unique_bytes * tp // FULL.kv_heads
    assert cache.replicas == tp / FULL.kv_heads


@given(tokens, st.sampled_from([2, 4, 8]))
def test_mla_is_copied_to_every_tensor_parallel_rank_but_not_under_dcp(n: int, tp: int) -> None:
    model = model_of(LATENT, LATENT)
    assert CacheLayout(model, Parallelism(tp=tp), KvFormat()).at(n).replicas == tp
    shared = CacheLayout(model, Parallelism(tp=tp, cp=tp, cp_mode="dcp"), KvFormat()).at(n)
    assert shared.node_bytes == shared.unique_bytes


def test_under_dcp_the_index_key_stays_whole_on_every_rank() -> None:
    cache = CacheLayout(model_of(SPARSE), Parallelism(tp=4, cp=4, cp_mode="dcp"), KvFormat()).at(4096)
    assert cache.index_bytes == 132 * 4096
    assert cache.rank_bytes == 132 * 4096 + 1152 * 1024


@given(mixers, st.integers(1, 3000), st.integers(1, 3000))
def test_a_longer_prefix_never_needs_fewer_bytes_once_chunks_are_out(chosen: list[Mixer], n: int, more: int) -> None:
    kept = [m for m in chosen if m is not CHUNK]
    layout = CacheLayout(model_of(*(kept or [FULL])), Parallelism(), KvFormat())
    assert layout.at(n + more).unique_bytes >= layout.at(n).unique_bytes


@given(mixers, tokens, st.sampled_from([1, 16, 64]))
def test_pages_only_add_bytes(chosen: list[Mixer], n: int, page: int) -> None:
    model = model_of(*chosen)
    paged = CacheLayout(model, Parallelism(), KvFormat(page_tokens=page)).at(n).unique_bytes
    assert paged >= CacheLayout(model, Parallelism(), KvFormat()).at(n).unique_bytes


def test_windows_keep_w_minus_1_tokens_and_chunks_the_open_one() -> None:
    row = 4 * 2 * 64 * 2
    assert CacheLayout(model_of(WINDOW), Parallelism(), KvFormat()).at(5000).unique_bytes == 99 * row
    assert CacheLayout(model_of(WINDOW), Parallelism(), KvFormat(page_tokens=16)).at(5000).unique_bytes == 112 * row
    assert CacheLayout(model_of(CHUNK), Parallelism(), KvFormat()).at(64 * 10).unique_bytes == 0
    assert CacheLayout(model_of(CHUNK), Parallelism(), KvFormat()).at(64 * 10 + 7).unique_bytes == 7 * row
    assert CacheLayout(model_of(WINDOW), Parallelism(), KvFormat(hybrid=False)).at(5000).unique_bytes == 5000 * row


def test_a_layer_that_reads_another_layers_cache_stores_nothing() -> None:
    with_sharing = CacheLayout(model_of(FULL, SHARED), Parallelism(), KvFormat()).at(1000)
    assert with_sharing.unique_bytes == CacheLayout(model_of(FULL), Parallelism(), KvFormat()).at(1000).unique_bytes


def test_a_recurrent_state_is_constant_and_replicated_under_cp() -> None:
    model = model_of(STATE)
    one = CacheLayout(model, Parallelism(), KvFormat()).at(10)
    assert one == CacheLayout(model, Parallelism(), KvFormat()).at(10)
    assert one.unique_bytes == CacheLayout(model, Parallelism(), KvFormat()).at(10000).unique_bytes
    ring = CacheLayout(model, Parallelism(tp=4, cp=4, cp_mode="ring"), KvFormat()).at(10)
    assert ring.node_bytes == 4 * one.unique_bytes


def test_dp_attention_keeps_the_cache_on_one_group() -> None:
    layout = CacheLayout(model_of(LATENT), Parallelism(tp=8, dp_attention=8), KvFormat())
    assert layout.at(1000).node_bytes == 1000 * 1152


@given(st.integers(1, 200), st.integers(1, 32))
def test_stage_sizes_and_shares_add_up(total: int, parts: int) -> None:
    assert sum(share(total, parts, i) for i in range(parts)) == total
    if parts <= total:
        sizes = stage_sizes(total, parts)
        assert sum(sizes) == total
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("parallelism", "part"),
    [
        (Parallelism(tp=3), "attention TP 3 does not divide the 32 heads"),
        (Parallelism(tp=0), "--tp 0 must be 1 or more"),
        (Parallelism(tp=4, cp=3), "tp 4 is not divisible by dp_attention × cp = 3"),
        (Parallelism(pp=9), "pp 9 exceeds the 1 layers"),
        (Parallelism(tp=4, ep=3), "ep 3 does not divide tp 4"),
        (Parallelism(tp=4, cp=2, cp_mode="dcp"), "exceeds the 1 attention-TP ranks"),
    ],
)
def test_layouts_that_engines_refuse_are_refused_with_the_number(parallelism: Parallelism, part: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_parallelism(model_of(FULL), parallelism)
    assert part in str(refused.value)
