"""vLLM as an arm: its flags for each tier, its LMCache and Mooncake companions. Flags as of vLLM 0.32 and 0.33."""

import json
from pathlib import Path
from typing import Any

from kvbench.core.errors import UsageError
from kvbench.core.units import GIB, MIB
from kvbench.engines.base import Arm, ArmTier, EngineOptions
from kvbench.engines.server_plan import (
    Program,
    ServerPlan,
    argument,
    engine_python,
    find_program,
    free_port,
    scratch_folder,
    served_model,
    tier_bytes,
    tokens_of,
)
from kvbench.engines.started import StartedEngine
from kvbench.results.host import discover_gpus
from kvbench.tiers.spec import parse_tier_spec

PLUGIN_FOLDER = Path(__file__).parent / "plugins"
_BLOCK_TOKENS = {"cpu": "128", "cuda": "16"}
_MOONCAKE_BUFFER = "256MB"


def open_vllm_adapter(options: EngineOptions) -> StartedEngine:
    """The adapter that starts `vllm serve`."""
    return StartedEngine("vllm", vllm_plan, options)


def vllm_plan(arm: Arm, options: EngineOptions, work: Path) -> ServerPlan:
    """The programs of one arm. `off` has no prefix cache; a lower tier needs L1 above it, as vLLM does."""
    if arm.url is not None:
        raise UsageError(f"arm {arm.name!r} is an address; leave out --engine vllm, or name tiers: l1+l2=16GiB")
    if arm.lower_tiers and arm.tier("hbm") is None:
        raise UsageError(f"arm {arm.name!r}: vLLM has no lower tier without its prefix cache; write l1+{arm.name}")
    model, served = served_model(options, "vllm")
    on_gpu = not isinstance(discover_gpus(), str)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    block = argument(options.arguments, "--block-size") or _BLOCK_TOKENS["cuda" if on_gpu else "cpu"]
    command = [options.executable or "vllm", "serve", model, "--served-model-name", Path(model).name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enable-prompt-tokens-details", "--block-size", block]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not on_gpu:
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if "--enforce-eager" not in options.arguments:
            command.append("--enforce-eager")
    hbm = arm.tier("hbm")
    if hbm is None:
        command.append("--no-enable-prefix-caching")
    elif hbm.value is not None:
        tokens = tokens_of(tier_bytes(hbm, arm, "l1=64GiB"), served, int(block), arm)
        command += ["--num-gpu-blocks-override", str(tokens // int(block))]
    environment |= options.environment
    parts = _lower_tiers(arm, options, work, on_gpu=on_gpu, environment=environment)
    if parts.connector is not None:
        command += ["--kv-transfer-config", json.dumps(parts.connector, separators=(",", ":"))]
    command += parts.flags
    command += [word for word in options.arguments if word not in ("--block-size", block)]
    engine = Program(
        name="vllm", command=tuple(command), environment={**environment, **parts.environment}, health=f"{url}/health"
    )
    return ServerPlan(
        url=url,
        model=Path(model).name,
        programs=(*parts.companions, engine),
        folders=tuple(parts.folders),
        files=parts.files,
        clears=tuple(parts.clears),
        metrics_urls=tuple(parts.metrics_urls),
        kv_bytes_per_token=served.kv_bytes_per_token,
        vocab_size=served.vocab_size,
        notes=parts.notes,
    )


class _Parts:
    """What the lower tiers of an arm add to the plain server."""

    def __init__(self) -> None:
        self.connector: dict[str, Any] | None = None
        self.flags: list[str] = []
        self.companions: list[Program] = []
        self.environment: dict[str, str] = {}
        self.folders: list[Path] = []
        self.files: dict[Path, str] = {}
        self.clears: list[str] = []
        self.metrics_urls: list[str] = []
        self.notes: dict[str, str] = {}


def _lower_tiers(arm: Arm, options: EngineOptions, work: Path, *, on_gpu: bool, environment: dict[str, str]) -> _Parts:
    parts = _Parts()
    kinds = set(arm.lower_tiers)
    if not kinds:
        return parts
    products = kinds & {"lmcache", "mooncake"}
    if products and len(kinds) > 1:
        raise UsageError(
            f"arm {arm.name!r}: {products.pop()} brings its own lower tiers; "
            "write lmcache=SIZE,/path for LMCache with files, or leave the others out"
        )
    if "lmcache" in kinds:
        _lmcache(arm, options, work, parts, environment)
    elif "mooncake" in kinds:
        _mooncake(arm, options, work, parts, environment)
    else:
        _native(arm, work, parts, on_gpu=on_gpu, environment=environment)
    return parts


def _native(arm: Arm, work: Path, parts: _Parts, *, on_gpu: bool, environment: dict[str, str]) -> None:
    """Native offloading: DRAM first, then `secondary_tiers` in order. Without GPU, with our page mover."""
    dram = arm.tier("dram")
    if dram is None:
        raise UsageError(f"arm {arm.name!r}: vLLM's file and object tiers lie below DRAM; add l2=SIZE")
    dram_bytes = tier_bytes(dram, arm, "l2=16GiB")
    secondary = []
    if (files := arm.tier("file")) is not None:
        folder = scratch_folder(files, work, arm)
        parts.folders.append(folder)
        secondary.append({"type": "fs", "root_dir": str(folder)})
    if (remote := arm.tier("remote")) is not None:
        secondary.append(_object_tier(remote, arm))
    if on_gpu and not secondary:
        parts.flags += ["--kv-offloading-size", f"{dram_bytes / GIB:g}", "--kv-offloading-backend", "native"]
        return
    extra: dict[str, Any] = {"cpu_bytes_to_use": dram_bytes}
    if secondary:
        extra["secondary_tiers"] = secondary
    if on_gpu:
        extra["spec_name"] = "TieringOffloadingSpec"
    else:
        extra["spec_name"] = "HostTieringSpec" if secondary else "HostCPUSpec"
        extra["spec_module_path"] = "vllm_host_offload"
        path = environment.get("PYTHONPATH", "")
        parts.environment["PYTHONPATH"] = f"{PLUGIN_FOLDER}:{path}" if path else str(PLUGIN_FOLDER)
        parts.notes["page_mover"] = "kvbench plug-in (memcpy): stock vLLM moves pages on GPUs only"
    parts.connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _object_tier(tier: ArmTier, arm: Arm) -> dict[str, Any]:
    spec = parse_tier_spec(tier.value or "")
    options = dict(spec.options)
    if spec.scheme != "s3" or "endpoint" not in options:
        raise UsageError(
            f"arm {arm.name!r}: vLLM's remote tier is an object store; write l4=s3://bucket/prefix?endpoint=http://HOST:PORT"
        )
    scheme, _, host = options["endpoint"].partition("://")
    bucket, _, prefix = spec.location.partition("/")
    store = {"bucket": bucket, "endpoint_override": f"{scheme}://{host}", "scheme": scheme}
    return {"type": "obj", "store_config": store, "prefix": prefix or "kvbench"}


def _lmcache(arm: Arm, options: EngineOptions, work: Path, parts: _Parts, environment: dict[str, str]) -> None:
    """LMCache's own server beside vLLM. Its L1 is our DRAM, its L2 our file tier: `lmcache=4GiB,/mnt/kv`."""
    tier = arm.tier("lmcache")
    size, _, place = (tier.value if tier and tier.value else "1GiB").partition(",")
    size_bytes = tier_bytes(ArmTier(name="lmcache", value=size), arm, "lmcache=4GiB")
    port, http_port = free_port(), free_port()
    url = f"http://127.0.0.1:{http_port}"
    command = [find_program("lmcache", options), "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--l1-size-gb", f"{size_bytes / GIB:g}"]
    # Without a GPU only this transfer mode has a handler, and it needs shared memory; vLLM would wait for ever.
    command += ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--chunk-size", "256"]
    command += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"kvbench_{port}"]
    if place:
        folder = scratch_folder(ArmTier(name="file", value=place), work, arm)
        parts.folders.append(folder)
        command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder)}, separators=(",", ":"))]
    lmcache_environment = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    if "PYTHONPATH" in environment:
        lmcache_environment["PYTHONPATH"] = environment["PYTHONPATH"]
    if options.executable and Path(command[0]).parent not in (Path(), Path(options.executable).expanduser().parent):
        # A script of another folder (pip --target) names an interpreter of its own: run it with the engine's.
        command = [engine_python(options), *command]
    parts.companions.append(
        Program(name="lmcache", command=tuple(command), environment=lmcache_environment, health=f"{url}/healthcheck")
    )
    parts.clears.append(f"{url}/cache/clear")
    parts.metrics_urls.append(url)
    parts.connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }


def _mooncake(arm: Arm, options: EngineOptions, work: Path, parts: _Parts, environment: dict[str, str]) -> None:
    """A Mooncake master beside vLLM, or one that is up (`mooncake=HOST:PORT`); vLLM's own process lends the memory."""
    tier = arm.tier("mooncake")
    value = tier.value if tier and tier.value else "512MB"
    segment = "512MB"
    if ":" in value:
        master = value
    else:
        segment = f"{tier_bytes(ArmTier(name='mooncake', value=value), arm, 'mooncake=16GiB') // MIB}MB"
        port, metrics_port = free_port(), free_port()
        master = f"127.0.0.1:{port}"
        parts.companions.append(
            Program(
                name="mooncake-master",
                command=(
                    _mooncake_master(options), "-rpc_port", str(port), "-rpc_address", "127.0.0.1",
                    "-metrics_port", str(metrics_port), "-metrics_host", "127.0.0.1", "-logtostderr",
                ),
                port=port,
            )
        )  # fmt: skip
    settings = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
        "local_hostname": "127.0.0.1",
        "global_segment_size": segment,
        "local_buffer_size": _MOONCAKE_BUFFER,
    }
    path = work / "mooncake.json"
    parts.files[path] = json.dumps(settings)
    parts.environment["MOONCAKE_CONFIG_PATH"] = str(path)
    parts.notes["mooncake_segment"] = segment
    parts.connector = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}


def _mooncake_master(options: EngineOptions) -> str:
    for entry in options.environment.get("PYTHONPATH", "").split(":"):
        binary = Path(entry) / "mooncake" / "mooncake_master"
        if entry and binary.exists():
            return str(binary)
    return find_program("mooncake_master", options)
