"""SGLang as an arm: radix cache and HiCache flags for each tier; storage attached and detached live. As of 0.5.23."""

import json
import math
import secrets
from collections.abc import Mapping
from pathlib import Path

from kvbench.core.errors import UsageError
from kvbench.core.units import GIGA, MIB
from kvbench.engines.base import Arm, ArmTier, Endpoint, EngineOptions, Setting
from kvbench.engines.http_calls import call
from kvbench.engines.server_plan import (
    Program,
    ServerPlan,
    argument,
    engine_python,
    free_port,
    scratch_folder,
    served_model,
    site_packages,
    tier_bytes,
    tokens_of,
)
from kvbench.engines.started import StartedEngine
from kvbench.results.host import discover_gpus

# Pages smaller than SGLang's own default make hits of short shared prefixes possible; as its HiCache examples do.
_PAGE_TOKENS = "64"
_STUB_MARK = "KVBENCH_STUB"
_PREFETCH = "wait_complete"  # the default `timeout` recomputes what is late, and a tier that was late was not measured


def open_sglang_adapter(options: EngineOptions) -> "SglangAdapter":
    """The adapter that starts `sglang.launch_server`."""
    return SglangAdapter(options)


class SglangAdapter(StartedEngine):
    """Starts servers, and moves a running one between arms that differ only in their file tier."""

    def __init__(self, options: EngineOptions) -> None:
        self._admin_key = secrets.token_hex(16)
        super().__init__(
            "sglang",
            lambda arm, options, work: sglang_plan(arm, options, work, admin_key=self._admin_key),
            options,
            key=self._admin_key,
        )
        self._arms: dict[str, Arm] = {}
        self._places: dict[str, ArmTier | None] = {}  # of files, as named when the server started

    def start(self, arm: Arm) -> Endpoint:
        """A server for the arm."""
        endpoint = super().start(arm)
        self._arms[endpoint.url] = arm
        self._places[endpoint.url] = arm.tier("file")
        return endpoint

    def switch(self, endpoint: Endpoint, arm: Arm) -> Endpoint | None:
        """Attaches or detaches HiCache storage where that is the only difference; None where a restart is needed."""
        running = self._arms.get(endpoint.url)
        if running is None or running.url or arm.url or running.tier("dram") is None:
            return None
        if _without_file(running) != _without_file(arm):
            return None
        wanted = arm.tier("file")
        if wanted is not None and wanted.value is not None and wanted != self._places.get(endpoint.url):
            return None  # the folder is fixed when the server starts
        if (running.tier("file") is None) != (wanted is None):
            path = "/hicache/storage-backend"
            body = None if wanted is None else {
                "hicache_storage_backend": "file",
                "hicache_storage_prefetch_policy": _PREFETCH,
            }  # fmt: skip
            reply = call(
                endpoint.url,
                path,
                method="DELETE" if wanted is None else "PUT",
                body=body,
                key=self._admin_key,
                timeout_s=self._options.call_timeout_s,
            )
            if not reply.ok:
                return None
        self._arms[endpoint.url] = arm
        return endpoint

    def settings(self, endpoint: Endpoint) -> Mapping[str, Setting]:
        """Resolved settings, without the key that guards the control calls."""
        found = super().settings(endpoint)
        return {name: value for name, value in found.items() if value != self._admin_key}


def _without_file(arm: Arm) -> tuple[object, ...]:
    return tuple(tier for tier in arm.tiers if tier.name != "file")


def sglang_plan(arm: Arm, options: EngineOptions, work: Path, *, admin_key: str = "ADMIN_KEY") -> ServerPlan:
    """The server of one arm. `off` has no radix cache; the file tier needs the DRAM tier above it."""
    if arm.url is not None:
        raise UsageError(f"arm {arm.name!r} is an address; leave out --engine sglang, or name tiers: l1+l2=16GiB")
    if arm.lower_tiers and (arm.tier("hbm") is None or arm.tier("dram") is None):
        raise UsageError(f"arm {arm.name!r}: HiCache stacks its tiers; write l1+l2=SIZE, then +l3=/path or +mooncake=…")
    if unknown := set(arm.lower_tiers) - {"dram", "file", "mooncake"}:
        raise UsageError(f"arm {arm.name!r}: {unknown.pop()} is not a tier of SGLang here; use l2, l3 or mooncake")
    model, served = served_model(options, "sglang")
    on_gpu = not isinstance(discover_gpus(), str)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    page = argument(options.arguments, "--page-size") or _PAGE_TOKENS
    command = [engine_python(options) if options.executable else "python", "-m", "sglang.launch_server"]
    command += ["--model-path", model, "--served-model-name", Path(model).name, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--page-size", page, "--enable-metrics", "--enable-cache-report"]
    environment: dict[str, str] = {}
    if not on_gpu:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"]
        command += ["--disable-cuda-graph"]
    l1_tokens = None
    if (hbm := arm.tier("hbm")) is None:
        command.append("--disable-radix-cache")
    elif hbm.value is not None:
        l1_tokens = tokens_of(tier_bytes(hbm, arm, "l1=64GiB"), served, int(page), arm)
        command += ["--max-total-tokens", str(l1_tokens)]
    folders: list[Path] = []
    if (dram := arm.tier("dram")) is not None:
        dram_bytes = tier_bytes(dram, arm, "l2=16GiB")
        command += ["--enable-hierarchical-cache", "--hicache-write-policy", "write_through"]
        if l1_tokens is None:
            command += ["--hicache-size", str(max(1, round(dram_bytes / GIGA)))]
        else:
            # `--hicache-size` counts whole GB; the ratio to a sized L1 says small sizes as well.
            ratio = dram_bytes / (l1_tokens * served.kv_bytes_per_token)
            command += ["--hicache-ratio", f"{math.floor(ratio * 100) / 100:g}"]
        if not on_gpu:
            command += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"]
        command += ["--admin-api-key", admin_key]
        place = arm.tier("file")
        folder = scratch_folder(place, work, arm) if place else work / f"hicache-{port}"
        # The folder is fixed at start even where no storage is attached yet, so that it can be attached live.
        environment["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(folder)
        folders.append(folder)
        if place:
            command += ["--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", _PREFETCH]
        elif arm.tier("mooncake") is not None:
            command += _mooncake_flags(arm)
    command += [word for word in options.arguments if word not in ("--page-size", page)]
    notes = {"kernel_package": "stubbed kernel package"} if _stubbed(options) else {}
    return ServerPlan(
        url=url,
        model=Path(model).name,
        programs=(
            Program(
                name="sglang",
                command=tuple(command),
                environment={**environment, **options.environment},
                health=f"{url}/health",
            ),
        ),
        folders=tuple(folders),
        kv_bytes_per_token=served.kv_bytes_per_token,
        vocab_size=served.vocab_size,
        notes=notes,
    )


def _mooncake_flags(arm: Arm) -> list[str]:
    """HiCache over a Mooncake master that is up: `mooncake=HOST:PORT`. Read in SGLang's source, not run here."""
    tier = arm.tier("mooncake")
    if tier is None or tier.value is None or ":" not in tier.value:
        raise UsageError(f"arm {arm.name!r}: SGLang needs the address of a Mooncake master; write mooncake=HOST:50051")
    extra = {
        "master_server_address": tier.value,
        "metadata_server": "P2PHANDSHAKE",
        "protocol": "tcp",
        "global_segment_size": str(512 * MIB),
    }
    return [
        "--hicache-storage-backend", "mooncake", "--hicache-storage-prefetch-policy", _PREFETCH,
        "--hicache-storage-backend-extra-config", json.dumps(extra, separators=(",", ":")),
    ]  # fmt: skip


def _stubbed(options: EngineOptions) -> bool:
    """Whether the environment has our stand-in for SGLang's kernels, which every result must then say."""
    stub = site_packages(engine_python(options)) / "sgl_kernel.py"
    try:
        return _STUB_MARK in stub.read_text(encoding="utf-8")
    except OSError:
        return False
