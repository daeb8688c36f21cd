from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.engines.base import TierCounters
from kvbench.engines.metrics_text import read_metrics
from kvbench.engines.tier_counters import dialect_of, lmcache_tokens, read_counters

SCRAPES = Path(__file__).parents[1] / "data" / "engine-metrics"


def counters(name: str) -> TierCounters:
    return read_counters(read_metrics((SCRAPES / name).read_text()))


def test_native_offload_of_vllm_tells_host_from_disk_and_its_bytes_are_tokens_times_bytes_per_token() -> None:
    found = counters("vllm_native_fs.txt")
    assert found.prompt_tokens == {
        "computed": 4352, "hbm": 7936, "dram": 4224, "file": 4096, "peer": 0, "external": 0
    }  # fmt: skip
    per_token = 2048  # 4 layers x 2 heads x 64 x 2 (K and V) x 2 bytes
    assert found.load_bytes["dram"] == (4224 + 4096) * per_token  # what was on disk passes through the host too
    assert found.load_bytes["file"] == 4096 * per_token
    assert found.store_bytes == {"dram": 8650752, "file": 8650752}


def test_deprecated_twins_are_used_only_where_the_new_names_are_missing() -> None:
    text = (SCRAPES / "vllm_native_fs.txt").read_text()
    old = "\n".join(line for line in text.splitlines() if "kv_offload_load_" not in line)
    assert read_counters(read_metrics(old)).load_bytes["dram"] == 17039360
    assert read_counters(read_metrics(text)).load_bytes["dram"] == 17039360


def test_tokens_by_source_add_up_to_the_prompt_tokens_of_every_scrape() -> None:
    for name in SCRAPES.glob("*.txt"):
        page = read_metrics(name.read_text())
        prompt = page.total("vllm:prompt_tokens_total") or page.total("sglang:prompt_tokens_total")
        if prompt is not None:
            assert sum(read_counters(page).prompt_tokens.values()) == prompt, name.name


def test_lmcache_and_mooncake_are_an_external_tier_of_vllm() -> None:
    assert counters("vllm_lmcache_mp.txt").prompt_tokens["external"] == 8317
    mooncake = counters("vllm_mooncake.txt")
    assert mooncake.prompt_tokens["external"] == 16384
    assert mooncake.load_bytes == {"external": 16384 * 12288}
    server = lmcache_tokens(read_metrics((SCRAPES / "lmcache_server.txt").read_text()))
    assert server == {"dram": 12032, "file": 4096}


def test_sglang_says_device_host_and_storage() -> None:
    found = counters("sglang_hicache.txt")
    assert found.prompt_tokens == {"hbm": 16128, "dram": 4032, "file": 8064, "computed": 53512 - 28224}
    assert found.load_bytes["dram"] == 12096 * 2048
    assert found.store_bytes["dram"] == 25088 * 2048


def test_a_colon_and_an_underscore_after_the_prefix_are_one_name() -> None:
    text = (SCRAPES / "sglang_hicache.txt").read_text()
    assert read_counters(read_metrics(text.replace("sglang:", "sglang_"))) == counters("sglang_hicache.txt")


def test_a_difference_keeps_what_was_not_reported_apart_from_zero() -> None:
    before, after = counters("sglang_plain.txt"), counters("sglang_plain.txt")
    delta = after.since(before)
    assert delta.prompt_tokens["hbm"] == 0
    assert "dram" not in delta.prompt_tokens
    assert delta.cached_tokens == 0
    assert TierCounters().since(before).cached_tokens is None


@pytest.mark.parametrize("text", ["", "# only a comment", "python_info 1.0", "vllm:x NaN", 'vllm:x{le="+Inf"} 1 2 3'])
def test_pages_without_an_engine_have_no_counters(text: str) -> None:
    assert read_counters(read_metrics(text)).prompt_tokens == {}


def test_the_page_of_another_program_has_no_dialect() -> None:
    assert dialect_of(read_metrics("process_cpu_seconds_total 4")) == "unknown"
    assert dialect_of(read_metrics('vllm_prompt_tokens_total{engine="0"} 4')) == "vllm"


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    read_counters(read_metrics(text))
