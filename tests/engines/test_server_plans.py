"""An arm becomes the flags of the engine that runs it; flags and key names are those of vLLM 0.32 and SGLang 0.5.23."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.engines.arms import parse_arm
from kvbench.engines.base import EngineOptions
from kvbench.engines.server_plan import Program, ServerPlan
from kvbench.engines.sglang import SglangAdapter, sglang_plan
from kvbench.engines.started import StartedEngine
from kvbench.engines.vllm import PLUGIN_FOLDER, vllm_plan

# Llama 120M: 12 layers × 4 KV heads × 64 × (K and V) × 2 bytes = 12,288 bytes per token.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
BYTES_PER_TOKEN = 12288
WITH_GPU, WITHOUT_GPU = (object(),), "no GPU on this host"


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    model = tmp_path / "llama-120m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    return EngineOptions(model=str(model))


@pytest.fixture(params=[WITHOUT_GPU, WITH_GPU], ids=["cpu", "gpu"])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in ("vllm", "sglang"):
        monkeypatch.setattr(f"kvbench.engines.{module}.discover_gpus", lambda: request.param)
    return request.param


def words(plan: ServerPlan) -> list[str]:
    return list(plan.programs[-1].command)


def value_of(plan: ServerPlan, flag: str) -> str:
    command = words(plan)
    return command[command.index(flag) + 1]


def connector(plan: ServerPlan) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(value_of(plan, "--kv-transfer-config"))
    return parsed


def test_vllm_off_has_no_prefix_cache_and_l1_no_connector(options: EngineOptions, gpus: Any, tmp_path: Path) -> None:
    assert "--no-enable-prefix-caching" in words(vllm_plan(parse_arm("off"), options, tmp_path))
    l1 = vllm_plan(parse_arm("l1"), options, tmp_path)
    assert "--no-enable-prefix-caching" not in words(l1)
    assert "--kv-transfer-config" not in words(l1)
    assert l1.kv_bytes_per_token == BYTES_PER_TOKEN


def test_every_vllm_arm_can_be_reset_and_tells_cached_tokens(options: EngineOptions, gpus: Any, tmp_path: Path) -> None:
    for text in ("off", "l1", "l1+l2=1GiB", "l1+lmcache=1GiB", "l1+mooncake=512MiB"):
        plan = vllm_plan(parse_arm(text), options, tmp_path)
        assert plan.programs[-1].environment["VLLM_SERVER_DEV_MODE"] == "1"
        assert "--enable-prompt-tokens-details" in words(plan)
        assert value_of(plan, "--host") == "127.0.0.1"


@pytest.mark.parametrize(("gpu", "block_tokens"), [(WITHOUT_GPU, 128), (WITH_GPU, 16)])
def test_a_sized_l1_is_whole_blocks_that_fit(
    options: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: Any, block_tokens: int
) -> None:
    monkeypatch.setattr("kvbench.engines.vllm.discover_gpus", lambda: gpu)
    plan = vllm_plan(parse_arm("l1=120MiB"), options, tmp_path)
    assert int(value_of(plan, "--block-size")) == block_tokens
    blocks = int(value_of(plan, "--num-gpu-blocks-override"))
    block_bytes = block_tokens * BYTES_PER_TOKEN
    assert blocks * block_bytes <= 120 * 2**20 < (blocks + 1) * block_bytes


def test_native_dram_is_a_flag_with_a_gpu_and_our_plugin_without(
    options: EngineOptions, tmp_path: Path, gpus: Any
) -> None:
    plan = vllm_plan(parse_arm("l1+l2=16GiB"), options, tmp_path)
    if gpus is WITH_GPU:
        assert value_of(plan, "--kv-offloading-size") == "16"
        assert "page_mover" not in plan.notes
    else:
        extra = connector(plan)["kv_connector_extra_config"]
        assert (extra["spec_name"], extra["cpu_bytes_to_use"]) == ("HostCPUSpec", 16 * 2**30)
        assert str(PLUGIN_FOLDER) in plan.programs[-1].environment["PYTHONPATH"].split(os.pathsep)
        assert (PLUGIN_FOLDER / f"{extra['spec_module_path']}.py").is_file()
        assert "plug-in" in plan.notes["page_mover"]


def test_secondary_tiers_keep_their_order_and_a_folder_of_our_own(
    options: EngineOptions, tmp_path: Path, gpus: Any
) -> None:
    text = f"l1+l2=1GiB+l3={tmp_path}/nvme+l4=s3://kv/p?endpoint=http://127.0.0.1:8333"
    plan = vllm_plan(parse_arm(text), options, tmp_path)
    transfer = connector(plan)
    # The default policy `fail` would turn a slow or missing block into a failed request.
    assert transfer["kv_load_failure_policy"] == "recompute"
    extra = transfer["kv_connector_extra_config"]
    assert extra["spec_name"] == ("TieringOffloadingSpec" if gpus is WITH_GPU else "HostTieringSpec")
    files, objects = extra["secondary_tiers"]
    assert files == {"type": "fs", "root_dir": str(plan.folders[0])}
    assert plan.folders[0].parent == tmp_path / "nvme"
    assert objects["store_config"]["bucket"] == "kv"
    assert objects["store_config"]["endpoint_override"] == "http://127.0.0.1:8333"


def test_lmcache_runs_beside_vllm_and_is_cleared_with_it(options: EngineOptions, tmp_path: Path, gpus: Any) -> None:
    plan = vllm_plan(parse_arm(f"l1+lmcache=4GiB,{tmp_path}/disk"), options, tmp_path)
    server = plan.programs[0]
    assert server.name == "lmcache"
    flags = dict(zip(server.command, server.command[1:], strict=False))
    assert flags["--l1-size-gb"] == "4"
    # Without this mode and a shared-memory name vLLM waits for ever in its start-up on a host without GPU.
    assert flags["--supported-transfer-mode"] == "engine_driven"
    assert "--shm-name" in flags
    assert json.loads(flags["--l2-adapter"])["base_path"] == str(plan.folders[0])
    assert connector(plan)["kv_connector_extra_config"]["lmcache.mp.port"] == int(flags["--port"])
    assert plan.clears == (f"{plan.metrics_urls[0]}/cache/clear",)
    assert plan.metrics_urls[0].endswith(flags["--http-port"])


def test_mooncake_gets_a_master_on_loopback_or_the_one_that_is_named(
    options: EngineOptions, tmp_path: Path, gpus: Any
) -> None:
    own = vllm_plan(parse_arm("l1+mooncake=512MiB"), options, tmp_path)
    master = dict(zip(own.programs[0].command, own.programs[0].command[1:], strict=False))
    assert master["-rpc_address"] == master["-metrics_host"] == "127.0.0.1"
    ((path, text),) = own.files.items()
    assert own.programs[-1].environment["MOONCAKE_CONFIG_PATH"] == str(path)
    assert json.loads(text)["master_server_address"] == f"127.0.0.1:{master['-rpc_port']}"
    assert json.loads(text)["global_segment_size"] == "512MB"
    named = vllm_plan(parse_arm("l1+mooncake=10.0.0.7:50051"), options, tmp_path)
    assert len(named.programs) == 1
    assert json.loads(next(iter(named.files.values())))["master_server_address"] == "10.0.0.7:50051"


def test_sglang_arms_stack_hicache_and_its_storage(options: EngineOptions, tmp_path: Path, gpus: Any) -> None:
    assert "--disable-radix-cache" in words(sglang_plan(parse_arm("off"), options, tmp_path))
    assert "--enable-hierarchical-cache" not in words(sglang_plan(parse_arm("l1"), options, tmp_path))
    sized = sglang_plan(parse_arm("l1=120MiB+l2=480MiB"), options, tmp_path)
    tokens = int(value_of(sized, "--max-total-tokens"))
    assert tokens == 10240  # 120 MiB / 12,288 B, a multiple of the page of 64
    assert float(value_of(sized, "--hicache-ratio")) == pytest.approx(4.0, abs=0.01)
    stored = sglang_plan(parse_arm(f"l1+l2=16GiB+l3={tmp_path}/kv"), options, tmp_path)
    assert value_of(stored, "--hicache-size") == "17"  # whole decimal GB
    assert value_of(stored, "--hicache-storage-backend") == "file"
    assert stored.programs[-1].environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == str(stored.folders[0])
    assert value_of(stored, "--hicache-storage-prefetch-policy") == "wait_complete"
    if gpus is WITHOUT_GPU:
        assert value_of(stored, "--hicache-io-backend") == "direct"


@pytest.mark.parametrize(
    ("plan", "text", "part"),
    [
        (vllm_plan, "l2=1GiB", "write l1+"),
        (vllm_plan, "l1+l2", "l2=16GiB"),
        (vllm_plan, "l1+l3=/mnt", "add l2=SIZE"),
        (vllm_plan, "l1+l2=1GiB+lmcache=1GiB", "brings its own lower tiers"),
        (vllm_plan, "l1=1KiB", "hold no page"),
        (vllm_plan, "l1+l2=1GiB+l4=redis://127.0.0.1:6379/0", "object store"),
        (vllm_plan, "a=http://127.0.0.1:8000", "is an address"),
        (sglang_plan, "l1+l3=/mnt", "HiCache stacks its tiers"),
        (sglang_plan, "l1+l2=1GiB+mooncake=1GiB", "HOST:50051"),
        (sglang_plan, "l1+lmcache=1GiB", "l1+l2=SIZE"),
    ],
)
def test_an_arm_that_the_engine_cannot_run_is_refused_in_one_line(
    options: EngineOptions, tmp_path: Path, plan: Callable[..., ServerPlan], text: str, part: str
) -> None:
    with pytest.raises(UsageError) as refused:
        plan(parse_arm(text), options, tmp_path)
    assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_engine_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--model DIRECTORY"):
        vllm_plan(parse_arm("l1"), EngineOptions(), tmp_path)


def test_sglang_moves_between_arms_only_where_the_file_tier_alone_differs(options: EngineOptions) -> None:
    adapter = SglangAdapter(options)
    from kvbench.engines.base import Endpoint

    nowhere = Endpoint(url="http://127.0.0.1:9", model="m", dialect="sglang")
    assert adapter.switch(nowhere, parse_arm("l1+l2=1GiB")) is None


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "m", "owned_by": "vllm"}]}).encode()
        known = self.path in ("/health", "/v1/models")
        self.send_response(200 if known else 404); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"success": true}')
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def small_engine(tmp_path: Path, *, port: int, first: tuple[str, ...] | None = None) -> StartedEngine:
    url = f"http://127.0.0.1:{port}"
    server = Program(name="engine", command=(sys.executable, "-c", SERVER, str(port)), health=f"{url}/health")
    others = (Program(name="companion", command=first, port=port + 1),) if first else ()
    plan = ServerPlan(url=url, model="m", programs=(*others, server), folders=(tmp_path / "tier",))
    options = EngineOptions(work_dir=tmp_path / "work", start_timeout_s=20, call_timeout_s=5)
    return StartedEngine("small", lambda arm, options, work: plan, options)


def test_a_started_engine_is_reset_with_its_files_and_ends_with_its_folder(tmp_path: Path) -> None:
    from kvbench.engines.server_plan import free_port

    engine = small_engine(tmp_path, port=free_port())
    endpoint = engine.start(parse_arm("l1"))
    try:
        nested = tmp_path / "tier" / "a" / "b"
        nested.mkdir(parents=True)
        (nested / "block.bin").write_bytes(b"x")
        report = engine.reset(endpoint)
        assert report.ok
        assert [step.what for step in report.steps] == [
            "POST /reset_prefix_cache?reset_external=true",
            f"emptied {tmp_path / 'tier'}",
        ]
        assert not (nested / "block.bin").exists()
        assert engine.death(endpoint) is None
        assert endpoint.pid is not None
        os.kill(endpoint.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (reason := engine.death(endpoint)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert reason is not None
        assert "SIGKILL" in reason
    finally:
        engine.stop()
    assert not (tmp_path / "tier").exists()


def test_when_the_engine_does_not_start_its_companion_is_stopped_and_the_log_is_told(tmp_path: Path) -> None:
    from kvbench.engines.server_plan import free_port

    port = free_port()
    listener = f"import socket,time; s=socket.create_server(('127.0.0.1',{port + 1})); time.sleep(600)"
    engine = small_engine(tmp_path, port=port, first=(sys.executable, "-c", listener))
    taken = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import socket,time; s=socket.create_server(('127.0.0.1',{port})); print(flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert taken.stdout is not None
        taken.stdout.readline()
        with pytest.raises(KvbenchError, match="Address already in use"):
            engine.start(parse_arm("l1"))
    finally:
        taken.kill()
        taken.communicate()
        engine.stop()
    import socket

    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port + 1), timeout=1):
        pass
