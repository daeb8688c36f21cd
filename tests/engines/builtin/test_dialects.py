"""The faces of vLLM and SGLang: their names as real servers print them, and every trap of their resets and usage."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.core.errors import UsageError
from kvbench.engines.builtin.dialects import DIALECTS, dialect_named
from kvbench.engines.metrics_text import read_metrics
from kvbench.engines.tier_counters import read_counters
from kvbench.engines.url import detect, reset_caches
from tests.engines.builtin.serving import Served, serving

REAL = Path(__file__).parents[2] / "data" / "engine-metrics"
BLOCK = 16 * 256
PROMPT = list(range(100))
# A real server prints the type of these from the start, and a sample after the first event.
ONLY_AFTER_AN_EVENT = {
    "vllm:kv_offload_allocation_failure_total",
    "vllm:kv_offload_tiering_backpressure_blocks_dropped_total",
    "vllm:kv_offload_tiering_promotion_job_failures_total",
}


def fresh(number: int) -> list[int]:
    return [number * 1000 + token for token in PROMPT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[Served]:
    with tiers("vllm", folder / "vllm") as server:
        yield server


@pytest.fixture(scope="module")
def sglang(folder: Path) -> Iterator[Served]:
    with tiers("sglang", folder / "sglang") as server:
        yield server


def tiers(dialect: str, folder: Path, *options: str):  # type: ignore[no-untyped-def]
    places = ("--l1", f"{3 * BLOCK}B", "--tier", f"dram:{4 * BLOCK}B", "--tier", f"file:{folder}?size=1MiB")
    return serving("--null", *places, "--dialect", dialect, *options)


def cached(server: Served, prompt: list[int]) -> int:
    details = server.complete(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"])


def by_tier(server: Served, prompt: list[int]) -> dict[str, float]:
    """Tokens of one request by source, from the page that tells the truth behind the face."""
    before, after = server.metrics("/kvbench/metrics"), {}
    server.complete(prompt=prompt, max_tokens=1)
    after = server.metrics("/kvbench/metrics")
    name = re.compile(r'kvbench:prompt_tokens_by_source_total\{source="(\w+)"\}')
    found = {match[1]: after[key] - before.get(key, 0.0) for key in after if (match := name.fullmatch(key))}
    return {tier: count for tier, count in found.items() if count}


def families(text: str) -> dict[str, set[frozenset[str]]]:
    """Names with the sets of label names they come with; histograms under their own name."""
    found: dict[str, set[frozenset[str]]] = {}
    for line in text.splitlines():
        if match := re.match(r"([A-Za-z_:]\w*(?::\w+)?)(?:\{(.*)\})? ", line):
            name = re.sub(r"_(bucket|count|sum)$", "", match[1])
            labels = frozenset(re.findall(r'(\w+)="', match[2] or "")) - {"le"}
            found.setdefault(name, set()).add(labels)
    return found


@pytest.mark.parametrize(
    ("dialect", "pages"),
    [("vllm", ("vllm_native_fs.txt", "vllm_plain.txt")), ("sglang", ("sglang_hicache.txt", "sglang_plain.txt"))],
)
def test_names_and_labels_are_those_of_a_real_server(
    dialect: str, pages: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    server: Served = request.getfixturevalue(dialect)
    server.complete(prompt=fresh(1), max_tokens=2)
    ours = families(server.call("/metrics").body.decode())
    real: dict[str, set[frozenset[str]]] = {}
    for page in pages:
        for name, labels in families((REAL / page).read_text()).items():
            real.setdefault(name, set()).update(labels)
    assert set(ours) - set(real) <= ONLY_AFTER_AN_EVENT
    for name in set(ours) & set(real) - {"vllm:cache_config_info"}:  # an info has as many labels as there are settings
        assert ours[name] <= real[name], name


def test_vllms_page_says_which_tier_served_the_tokens(vllm: Served) -> None:
    vllm.complete(prompt=fresh(2), max_tokens=1)
    vllm.call("/kvbench/drain", {})
    before = read_counters(read_metrics(vllm.call("/metrics").body.decode()))
    truth = by_tier(vllm, fresh(2))
    since = read_counters(read_metrics(vllm.call("/metrics").body.decode())).since(before)
    assert {tier: count for tier, count in since.prompt_tokens.items() if count} == truth
    assert sum(truth.values()) == 100
    assert truth["computed"] == 4
    assert sum(since.load_bytes[tier] for tier in ("file",)) == truth.get("file", 0) * 256
    # what comes from the file passes through the host tier, and counts there too
    assert since.load_bytes["dram"] == (truth.get("dram", 0) + truth.get("file", 0)) * 256


def test_sglangs_page_says_which_tier_served_the_tokens(sglang: Served) -> None:
    sglang.complete(prompt=fresh(2), max_tokens=1)
    sglang.call("/kvbench/drain", {})
    before = read_counters(read_metrics(sglang.call("/metrics").body.decode()))
    truth = by_tier(sglang, fresh(2))
    since = read_counters(read_metrics(sglang.call("/metrics").body.decode())).since(before)
    assert {tier: count for tier, count in since.prompt_tokens.items() if count} == truth


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_client_that_looks_takes_it_for_the_real_one(dialect: str, request: pytest.FixtureRequest) -> None:
    server: Served = request.getfixturevalue(dialect)
    endpoint = detect(server.url)
    assert (endpoint.dialect, endpoint.page_tokens) == (dialect, 16)
    assert server.call("/tiers").status == server.call("/cache/clear", {}).status == 404


def test_vllms_plain_reset_empties_l1_alone_and_an_external_one_keeps_the_second_tier(vllm: Served) -> None:
    vllm.complete(prompt=fresh(3), max_tokens=1)
    vllm.call("/kvbench/drain", {})
    assert vllm.call("/reset_prefix_cache", method="POST").json() == {"success": True}
    first = by_tier(vllm, fresh(3))
    assert first["dram"] == 64 - 16 * (64 - first["dram"] > 0)
    assert "hbm" not in first
    assert reset_caches(detect(vllm.url), timeout_s=10).ok  # calls it with reset_external=true
    assert by_tier(vllm, fresh(3)) == {"file": 96, "computed": 4}  # a warm arm that was reset with success


def test_vllms_reset_says_success_false_in_a_200_while_requests_run(folder: Path) -> None:
    with serving("--null", "--itl", "20ms", "--l1", "0", "--tier", "dram:1MiB", "--dialect", "vllm") as server:
        running = threading.Thread(target=lambda: server.complete(prompt=fresh(1), max_tokens=100))
        running.start()
        time.sleep(0.5)
        reply = server.call("/reset_prefix_cache", method="POST")
        assert (reply.status, reply.json()) == (200, {"success": False})
        running.join(20)
        assert server.call("/reset_prefix_cache", method="POST").json() == {"success": True}


def test_sglangs_flush_keeps_the_storage_and_is_refused_while_requests_run(folder: Path) -> None:
    with tiers("sglang", folder / "flush", "--itl", "20ms") as server:
        server.complete(prompt=fresh(3), max_tokens=1)
        assert server.call("/flush_cache", method="POST").status == 200
        assert by_tier(server, fresh(3)) == {"file": 96, "computed": 4}
        running = threading.Thread(target=lambda: server.complete(prompt=fresh(1), max_tokens=60))
        running.start()
        time.sleep(0.5)
        assert server.call("/flush_cache", method="POST").status == 400
        assert server.call("/flush_cache?timeout=15", method="POST").status == 200
        running.join(20)
        assert reset_caches(detect(server.url), timeout_s=10).ok
        assert cached(server, fresh(3)) == 0


@pytest.mark.parametrize(("dialect", "trap"), [("vllm", "no-prompt-tokens-details"), ("sglang", "no-cache-report")])
def test_details_that_are_not_reported_are_null_and_not_zero(dialect: str, trap: str) -> None:
    with serving("--null", "--dialect", dialect, "--trap", trap) as server:
        assert server.complete(prompt="x").json()["usage"]["prompt_tokens_details"] is None
        options = {"include_usage": True}
        events = server.complete(prompt="x", stream=True, max_tokens=2, stream_options=options).events()
        assert events[-1]["usage"]["prompt_tokens_details"] is None
        assert [("usage" in event) for event in events[:-1]] == [dialect == "sglang"] * 2


def test_traps_of_vllms_resets(folder: Path) -> None:
    with serving("--null", "--dialect", "vllm", "--trap", "no-dev-mode") as server:
        assert server.call("/reset_prefix_cache", method="POST").status == 404
        assert not reset_caches(detect(server.url), timeout_s=10).ok
    with tiers("vllm", folder / "traps", "--trap", "connector-without-reset", "--trap", "hidden-tiers") as server:
        server.complete(prompt=fresh(1), max_tokens=1)
        reset = server.call("/reset_prefix_cache?reset_external=true", method="POST")
        assert reset.json() == {"success": True}
        assert cached(server, fresh(1)) == 96
        tokens = read_counters(read_metrics(server.call("/metrics").body.decode())).prompt_tokens
        assert (tokens["external"], tokens["dram"], tokens["file"]) == (96, 0, 0)


def test_traps_of_sglang(folder: Path) -> None:
    traps = ("--trap", "clear-fails", "--trap", "flush-noop", "--trap", "two-tokens", "--trap", "underscore-names")
    with tiers("sglang", folder / "traps2", *traps) as server:
        server.complete(prompt=fresh(1), max_tokens=1)
        assert server.call("/flush_cache", method="POST").status == 200
        failed = server.call("/hicache/storage-backend/clear", method="POST")
        assert (failed.status, b"cleared" in failed.body) == (400, True)
        assert cached(server, fresh(1)) == 96
        events = server.complete(prompt="x", stream=True, max_tokens=5, return_token_ids=True).events()
        assert [len(event["choices"][0]["token_ids"]) for event in events] == [2, 2, 1]
        page = server.call("/metrics").body.decode()
        assert "sglang_cached_tokens_total{" in page
        assert "sglang:" not in page
        assert read_counters(read_metrics(page)).prompt_tokens["computed"] > 0


@pytest.mark.parametrize(
    ("dialect", "trap"),
    [
        ("native", "reset-lies"),
        ("native", "reset-missing"),
        ("vllm", "reset-refused"),
        ("sglang", "reset-lies"),
        ("sglang", "reset-refused"),
    ],
)
def test_resets_that_lie_are_refused_or_missing(dialect: str, trap: str) -> None:
    path = {"native": "/cache/clear", "vllm": "/reset_prefix_cache", "sglang": "/flush_cache"}[dialect]
    options = ("--l1", "0", "--tier", "dram:1MiB", "--dialect", dialect, "--trap", trap)
    with serving("--null", *options) as server:
        server.complete(prompt=fresh(1), max_tokens=1)
        server.call("/drain", {})
        reply = server.call(path, method="POST")
        statuses = {"reset-lies": 200, "reset-missing": 404}
        refused = {"native": 409, "vllm": 200, "sglang": 400}[dialect]
        assert reply.status == statuses.get(trap, refused)
        if trap == "reset-lies" and dialect == "native":
            assert reply.json()["cleared"]["dram"] == {"blocks": 6, "bytes": 6 * BLOCK}
        if trap == "reset-refused" and dialect == "vllm":
            assert reply.json() == {"success": False}
        assert cached(server, fresh(1)) == 96


def test_sglang_splits_a_request_by_tier_if_it_is_asked_to(sglang: Served) -> None:
    sglang.complete(prompt=fresh(5), max_tokens=1)
    sglang.call("/kvbench/drain", {})
    fields = {"prompt": fresh(5), "max_tokens": 1, "return_cached_tokens_details": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = sglang.complete(**fields, **options).events()
    [streamed] = [event["sglext"]["cached_tokens_details"] for event in events if "sglext" in event]
    assert sum(streamed.values()) == events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    whole = sglang.complete(**fields).json()
    details = whole["sglext"]["cached_tokens_details"]
    assert set(details) == {"device", "host", "storage"}
    assert sum(details.values()) == whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert "sglext" not in sglang.complete(prompt=fresh(5), max_tokens=1).json()


def test_sglangs_storage_is_switched_live_by_who_has_the_key(sglang: Served, folder: Path) -> None:
    path, attach = "/hicache/storage-backend", {"hicache_storage_backend": "file"}
    assert sglang.call(path).status == sglang.call(path, attach, method="PUT").status == 403  # started without a key
    with tiers("sglang", folder / "guarded", "--admin-key", "k3y") as server:
        key = {"Authorization": "Bearer k3y"}
        server.complete(prompt=fresh(1), max_tokens=1)
        server.call("/kvbench/drain", {})
        for call in ((path, None, "DELETE"), ("/flush_cache", None, "POST"), (f"{path}/clear", None, "POST")):
            assert server.call(call[0], call[1], method=call[2]).status == 401
            assert server.call(call[0], call[1], method=call[2], Authorization="Bearer other").status == 401
        assert server.call(path, method="DELETE", **key).json() == {"hicache_storage_backend": None}
        assert server.call("/server_info").json()["hicache_storage_backend"] is None
        assert server.call("/flush_cache", method="POST", **key).status == 200
        assert by_tier(server, fresh(1)) == {"computed": 100}
        assert server.call(f"{path}/clear", method="POST", **key).status == 400  # nothing is attached
        assert server.call(path, {}, method="PUT", **key).status == 400
        assert server.call(path, attach, method="PUT", **key).json() == {"hicache_storage_backend": "file"}
        assert server.call("/flush_cache", method="POST", **key).status == 200
        assert by_tier(server, fresh(1)) == {"file": 96, "computed": 4}  # detaching has kept what was stored
        assert reset_caches(detect(server.url), timeout_s=10, key="k3y").ok
        assert cached(server, fresh(1)) == 0


def test_vllm_tells_its_configuration_as_text_or_json(vllm: Served) -> None:
    assert "'block_size': 16" in vllm.call("/server_info").json()["vllm_config"]
    config = vllm.call("/server_info?config_format=json").json()["vllm_config"]
    assert config["cache_config"] == {"block_size": 16, "enable_prefix_caching": True}


def test_an_unknown_dialect_or_trap_is_named() -> None:
    with pytest.raises(UsageError, match="no dialect 'tgi'; choose one of native, vllm, sglang"):
        dialect_named("tgi", ())
    with pytest.raises(UsageError, match="dialect vllm has no trap 'x'; it has reset-lies"):
        dialect_named("vllm", ("x",))
    assert all(trap and text for entry in DIALECTS.values() for trap, text in entry.traps.items())
