"""Every vector of `golden_vectors.yaml`, through the public function and through `kvbench … --json`."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbench.cli.main import main
from kvbench.core.overlap import exposed_s, layerwise_finish_s, token_split
from kvbench.core.units import GIB
from kvbench.core.work import full_pairs, window_pairs
from kvbench.load_vs_recompute.ask import Question, ask
from kvbench.results.load_vs_recompute import Point

GOLDEN = Path(__file__).parent.parent / "data" / "load-vs-recompute" / "golden_vectors.yaml"
SHARED = Path(__file__).parents[2].parent / "shared" / "facts" / "golden_vectors.yaml"


@cache
def vectors() -> dict[str, Any]:
    content = yaml.safe_load(GOLDEN.read_text())
    return {vector["id"]: vector for vector in [*content["vectors"], *content["time_vectors"]]}


def expected(name: str) -> dict[str, Any]:
    found: dict[str, Any] = vectors()[name]["expect"]
    return found


# What each vector is asked with. The same settings are typed as options and given to the public function.
QUESTIONS: dict[str, dict[str, str]] = {
    "GV01": {
        "model": "Qwen3-235B-A22B", "tokens": "32768", "tp": "8", "flops_mode": "active-params",
        "active_params": "22e9", "efficiency": "1.0", "peak_flops": "989e12", "tier": "dram=50GB/s",
    },
    "GV02": {
        "model": "Qwen3-235B-A22B", "tokens": "32768", "tp": "8", "rank_work": "even", "efficiency": "1.0",
        "peak_flops": "989e12", "tier": "dram=50GB/s",
    },
    "GV03": {"model": "Llama-3.1-8B", "tokens": "8192"},
    "GV04": {"model": "Llama-3.1-70B", "tokens": "131072", "tp": "16", "kv_dtype": "fp8_per_tensor"},
    "GV05": {"model": "deepseek-r1", "tokens": "32768", "tp": "8"},
    "GV06": {"model": "DeepSeek-V3.2", "tokens": "65536", "tp": "8", "kv_dtype": "fp8_ds_mla"},
    "GV07": {"model": "glm-5", "tokens": "457920", "kv_dtype": "fp8_ds_mla", "page_tokens": "64"},
    "GV08": {"model": "gpt-oss-120b", "tokens": "131072", "page_tokens": "16"},
    "GV09": {"model": "gemma-3-27b", "tokens": "32768", "tp": "2", "page_tokens": "16"},
    "GV10": {"model": "qwen3-next-80b-a3b", "tokens": "65536", "tp": "4", "state_dtype": "bf16"},
    "GV11": {"model": "kimi-k2", "tokens": "32768", "tp": "8", "dp_attention": "8"},
    "GV12": {
        "model": "qwen3-30b-a3b", "tokens": "65536", "gpu": "H20", "peak_flops": "148e12", "efficiency": "1.0",
        "tier": "dram=54.37982536708583GB/s",
    },
}  # fmt: skip

# Keys of the vectors that a point has under another name.
RENAMED = {
    "group_bytes": "node_bytes",
    "flops_per_rank_div_tp": "flops_per_rank_div_tp",
    "params_total_without_mtp": "params_total",
    "bytes_per_token_per_rank": "bytes_per_token",
    "pool_bytes": "rank_bytes",
    "rank_bytes_hybrid": "rank_bytes",
    "asymptotic_bytes_per_token": "bytes_per_token",
    "rank_bytes_ssm_bf16": "rank_bytes",
    "state_bytes_rank_ssm_bf16": "state_bytes",
    "owner_rank_bytes": "rank_bytes",
    "other_rank_bytes": "other_rank_bytes",
    "node_bytes_one_request": "node_bytes",
    "node_bytes_if_prefix_on_all_8_replicas": "node_bytes_all_replicas",
    "flops_attention_expanded": "flops_attention",
    "flops_total_expanded": "flops_total",
    "flops_sparse_core": "flops_attention",
    "flops_index_scores": "flops_index",
}
INTEGERS = (int,)


def question(name: str, **changes: str) -> Question:
    settings = QUESTIONS[name] | changes
    numbers: dict[str, Any] = {
        key: type_(settings[key])
        for key, type_ in (("page_tokens", int), ("dp_attention", int), ("active_params", float))
        if key in settings
    }
    texts: dict[str, Any] = {
        key: value
        for key, value in settings.items()
        if key not in ("model", "tier", "page_tokens", "dp_attention", "active_params")
    }
    tiers = (settings["tier"],) if "tier" in settings else ()
    return Question(models=(settings["model"],), tiers=tiers, **texts, **numbers)


def point_of(name: str, **changes: str) -> Point:
    return ask(question(name, **changes)).result.points[0]


def json_point(name: str, capsys: pytest.CaptureFixture[str], **changes: str) -> dict[str, Any]:
    settings = QUESTIONS[name] | changes
    options = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items() if key != "model"]
    assert main(["load-vs-recompute", settings["model"], *options, "--json"]) == 0
    point: dict[str, Any] = json.loads(capsys.readouterr().out)["result"]["points"][0]
    return point


def test_the_copy_of_the_vectors_is_the_published_one() -> None:
    if not SHARED.exists():
        pytest.skip("the shared facts are not beside this checkout")
    assert GOLDEN.read_text() == SHARED.read_text()


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_integer_of_a_vector_is_exact_in_the_function_and_in_json(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    point, from_json = point_of(name), json_point(name, capsys)
    compared = 0
    for key, value in expected(name).items():
        field = RENAMED.get(key, key)
        if isinstance(value, INTEGERS) and field in from_json:
            compared += 1
            if field == "break_even_bytes_per_s":  # a float that the vector rounds
                assert from_json[field] == pytest.approx(value, abs=0.51)
                continue
            assert getattr(point, field) == value, key
            assert from_json[field] == value, key
    assert compared >= 2


def test_gv01_prints_the_times_and_intensities_of_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    want = expected("GV01")
    for point in (point_of("GV01").__getattribute__, json_point("GV01", capsys).__getitem__):
        assert point("i_cache") == pytest.approx(want["i_cache"], abs=0.01)
        assert point("i_hardware") == pytest.approx(want["i_hardware"], rel=1e-12)
        assert point("t_load_s") * 1e3 == pytest.approx(want["t_load_ms"], abs=0.001)
        assert point("t_recompute_s") * 1e3 == pytest.approx(want["t_recompute_ms"], abs=0.001)
        assert point("verdict") == want["verdict"]


def test_gv02_pairs_layer_time_suffix_break_even_and_splits(capsys: pytest.CaptureFixture[str]) -> None:
    want = expected("GV02")
    assert full_pairs(32768) == want["pairs"]
    assert json_point("GV02", capsys)["layer_load_s"] * 1e3 == pytest.approx(want["layer_load_ms"], abs=1e-6)
    for efficiency, tokens in (("1.0", 1716), ("0.5", 866)):
        assert want["suffix_break_even_tokens"][f"eta_{efficiency}"] == tokens
        assert point_of("GV02", efficiency=efficiency).suffix_break_even_tokens == tokens
        assert json_point("GV02", capsys, efficiency=efficiency)["suffix_break_even_tokens"] == tokens


@pytest.mark.parametrize(
    ("key", "tier", "efficiency"),
    [
        ("b4GBps_eta1", "dram=4GB/s", "1.0"),
        ("b14GBps_eta0.5", "dram=14GB/s", "0.5"),
        ("b50GBps_eta0.5", "dram=50GB/s", "0.5"),
    ],
)
def test_gv02_splits_in_the_formula_the_function_and_json(
    key: str, tier: str, efficiency: str, capsys: pytest.CaptureFixture[str]
) -> None:
    want = expected("GV02")["split"][key]
    formula = token_split(
        tokens=32768,
        linear_flop_per_token=2 * 20945305600 / 8,
        attention_flop_per_pair=94 * 64 * (128 + 128) / 8,
        bytes_per_token=48128,
        flop_per_s=float(efficiency) * 989e12,
        bytes_per_s=float(tier.removeprefix("dram=").removesuffix("GB/s")) * 1e9,
    )
    assert formula.x_star == want["x_star"]
    assert formula.t_s * 1e3 == pytest.approx(want["t_ms"], rel=1e-3)
    point, from_json = (
        point_of("GV02", tier=tier, efficiency=efficiency),
        json_point("GV02", capsys, tier=tier, efficiency=efficiency),
    )
    for split_tokens, split_t_s in (
        (point.split_tokens, point.split_t_s),
        (from_json["split_tokens"], from_json["split_t_s"]),
    ):
        assert abs(split_tokens - want["x_star"]) <= 1
        assert (split_t_s or 0) * 1e3 == pytest.approx(want["t_ms"], rel=1e-3)


def test_gv05_absorbed_attention_is_printed_beside_the_expanded(capsys: pytest.CaptureFixture[str]) -> None:
    want = expected("GV05")["flops_attention_absorbed"]
    assert point_of("GV05").flops_attention_absorbed == want
    assert json_point("GV05", capsys)["flops_attention_absorbed"] == want


def test_gv06_sparse_pairs_index_bytes_and_the_replicated_index_work(capsys: pytest.CaptureFixture[str]) -> None:
    want = expected("GV06")
    assert window_pairs(65536, 0, 2048) == want["sparse_pairs"]
    assert full_pairs(65536) == want["index_pairs"]
    point = json_point("GV06", capsys)
    assert point["index_bytes"] == want["index_bytes"]
    # The index scores are on every TP rank: a rank does more than a plain eighth, by at least 7/8 of them.
    assert point["flops_per_rank"] - point["flops_per_rank_div_tp"] >= want["flops_index_scores"] * 7 / 8


def test_external_anchor_gv07_published_sglang_pool_size() -> None:
    """SGLang #29930 logged 457,920 tokens as 26.22 GB; one spare page of 64 tokens is in the pool."""
    want = expected("GV07")
    pool = point_of("GV07")
    assert pool.bytes_per_token == want["bytes_per_token"]
    assert pool.rank_bytes / GIB == pytest.approx(want["pool_gib"], abs=1e-4)
    with_spare = point_of("GV07", tokens=str(457920 + 64)).rank_bytes / GIB
    assert with_spare == pytest.approx(want["pool_gib_with_one_spare_page"], abs=1e-4)
    assert abs(with_spare - 26.22) <= want["tolerance_gib"]


def test_gv08_windows_that_are_not_kept_cost_full_length() -> None:
    want = expected("GV08")
    result = ask(question("GV08"))
    assert result.result.models[0].layers == {"window": want["window_layers"], "full": want["full_layers"]}
    assert window_pairs(131072, 0, 128) == want["window_pairs"]
    all_full = ask(Question(models=("gpt-oss-120b",), tokens="131072", hybrid=False)).result.points[0]
    assert all_full.rank_bytes == want["rank_bytes_if_all_full"]
    one_window = 128 * want["window_layers"] * 2 * 8 * 64 * 2
    assert point_of("GV08").rank_bytes == 131072 * want["asymptotic_bytes_per_token"] + one_window


def test_gv09_layer_counts() -> None:
    want = expected("GV09")
    layers = ask(question("GV09")).result.models[0].layers
    assert layers == {"window": want["local_layers"], "full": want["global_layers"]}


def test_gv10_state_in_fp32_and_the_growing_part(capsys: pytest.CaptureFixture[str]) -> None:
    want = expected("GV10")
    for name, dtype in (("bf16", "bf16"), ("fp32", "fp32")):
        point = json_point("GV10", capsys, state_dtype=dtype)
        assert point["rank_bytes"] == want[f"rank_bytes_ssm_{name}"]
        assert point["state_bytes"] == want[f"state_bytes_rank_ssm_{name}"]
        assert point["rank_bytes"] - point["state_bytes"] == want["kv_bytes_rank"]


def test_external_anchor_gv12_published_h20_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    """agentic-kvc, H20: a 65,536-token miss took 15.2 s and the copy 118.47 ms; the floor must lie below the miss."""
    vector = vectors()["GV12"]
    want, measured = vector["expect"], vector["measured"]
    for point in (point_of("GV12").__getattribute__, json_point("GV12", capsys).__getitem__):
        assert point("t_load_s") * 1e3 == pytest.approx(want["t_load_floor_ms"], abs=1e-3)
        assert point("t_load_s") == pytest.approx(measured["pcie_transfer_s"], rel=1e-4)
        assert point("t_recompute_s") == pytest.approx(want["t_recompute_floor_s"], abs=1e-4)
        assert point("rank_bytes") == measured["kv_bytes"]
        assert point("t_recompute_s") <= measured["ttft_miss_s"]
        # Without causal halving the floor would lie above what was measured.
        unhalved = (point("flops_linear") + 2 * point("flops_attention")) / 148e12
        assert unhalved == pytest.approx(25.24, abs=0.01)
        assert unhalved > measured["ttft_miss_s"]


def test_tv01_restore_strategies_in_the_function_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    vector = vectors()["TV01"]
    limits = (
        "pcie=50GB/s", "uplink=50GB/s", "ranks_per_uplink=2", "host_total=400GB/s", "home_socket=150GB/s",
        "inter_socket=100GB/s", "sockets=2", "collective=300GB/s", "alpha_h2d=100us", "alpha_collective=15us",
    )  # fmt: skip
    asked = Question(
        models=("glm-5",), tokens="25000", tp="8", kv_dtype="fp8_ds_mla", tiers=("dram=50GB/s",), limits=limits
    )
    point = ask(asked).result.points[0]
    assert point.rank_bytes == vector["inputs"]["replica_bytes"]
    options = [*(f"--limit={limit}" for limit in limits), "--tier=dram=50GB/s", "--kv-dtype=fp8_ds_mla"]
    assert main(["load-vs-recompute", "glm-5", "--tokens=25000", "--tp=8", *options, "--json"]) == 0
    from_json = json.loads(capsys.readouterr().out)["result"]["points"][0]
    for strategies in (
        {s.name: (s.t_s, s.node_h2d_bytes) for s in point.strategies},
        {s["name"]: (s["t_s"], s["node_h2d_bytes"]) for s in from_json["strategies"]},
    ):
        for name, milliseconds in vector["expect_ms"].items():
            assert (strategies[name][0] or 0) * 1e3 == pytest.approx(milliseconds, rel=1e-3), name
        for name, num_bytes in vector["node_h2d_bytes"].items():
            matching = [found for key, found in strategies.items() if key.startswith(name)]
            assert {found[1] for found in matching} == {num_bytes}, name


def test_tv02_layerwise_overlap() -> None:
    vector = vectors()["TV02"]
    loads = [vector["inputs"]["layer_load_s"]] * vector["inputs"]["layers"]
    cases = zip(
        vector["inputs"]["layer_compute_s"], vector["expect_total_ms"], vector["expect_exposed_ms"], strict=True
    )
    for compute_s, total_ms, exposed_ms in cases:
        computes = [compute_s] * len(loads)
        assert layerwise_finish_s(loads, computes) * 1e3 == pytest.approx(total_ms, abs=1e-3)
        assert exposed_s(loads, computes) * 1e3 == pytest.approx(exposed_ms, abs=1e-3)


def test_tv03_split_bounds() -> None:
    linear = token_split(
        tokens=1_000_000, linear_flop_per_token=1e-6, attention_flop_per_pair=0, bytes_per_token=1e-6,
        flop_per_s=1, bytes_per_s=1,
    )  # fmt: skip
    quadratic = token_split(
        tokens=1_000_000, linear_flop_per_token=0, attention_flop_per_pair=1e-12, bytes_per_token=1e-6,
        flop_per_s=1, bytes_per_s=1,
    )  # fmt: skip
    assert linear.t_s == pytest.approx(0.5, rel=1e-5)
    assert quadratic.t_s == pytest.approx(0.381966, rel=1e-5)
