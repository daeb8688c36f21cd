"""`kvbench replay`: does tiering help end to end, at my load, on my engine?"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.options import Html, Json, Out, Quiet
from kvbench.core.errors import KvbenchError, UsageError

if TYPE_CHECKING:
    from kvbench.engines.base import Arm, EngineAdapter, EngineOptions
    from kvbench.results.document import Document
    from kvbench.results.replay import ReplayResult
    from kvbench.workloads.base import RequestPlan


class CacheOption(StrEnum):
    """How a run starts."""

    COLD = "cold"
    SALT = "salt"
    WARM = "warm"
    AS_IS = "as-is"


class ServersOption(StrEnum):
    """Which servers are up at a time."""

    KEEP = "keep"
    ONE_AT_A_TIME = "one-at-a-time"
    SWITCH = "switch"


class ExportOption(StrEnum):
    """Whose command line to print."""

    VLLM = "vllm"
    GUIDELLM = "guidellm"
    AIPERF = "aiperf"
    INFERENCE_PERF = "inference-perf"


_DEFAULT_ARMS = ("recompute", "hbm", "hbm+dram")


def replay(
    workload: Annotated[
        str | None, typer.Argument(metavar="WORKLOAD", help="A workload by name (--list), a YAML file, or a trace.")
    ] = None,
    list_workloads: Annotated[bool, typer.Option("--list", help="List the workloads and exit.")] = False,
    engine: Annotated[
        str, typer.Option(metavar="ENGINE|URL", help="builtin, vllm, sglang, or the address of a server that is up.")
    ] = "builtin",
    arm: Annotated[
        list[str],
        typer.Option(metavar="ARM", help="off, l1, l1=64MiB, l1+l2=1GiB+l3=/path, NAME@l1+l2, NAME=http://…; repeat."),
    ] = [],  # noqa: B006 - Typer copies it; a None default would make the option look required
    model: Annotated[str | None, typer.Option(help="Model to serve, or the one to ask for.")] = None,
    engine_arg: Annotated[
        list[str], typer.Option(metavar="ARGUMENT", help="Passed on to each server that is started; repeat.")
    ] = [],  # noqa: B006
    engine_program: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="The engine in an environment of its own: /opt/vllm/bin/vllm."),
    ] = None,
    engine_env: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="Set for each server that is started; repeat.")
    ] = [],  # noqa: B006
    work_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Logs of servers and default file tiers (default: scratch)."),
    ] = None,
    pairs: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Runs of each arm, made in turn: ABBA.")] = 5,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first N requests.")] = None,
    rate: Annotated[float | None, typer.Option(metavar="R", help="Requests (sessions) per second, open loop.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Closed loop of N; for capacity, not for latency.")
    ] = None,
    speedup: Annotated[float | None, typer.Option(metavar="X", help="Times of a trace, X times as fast.")] = None,
    spread_ties: Annotated[
        bool | None, typer.Option("--spread-ties/--keep-ties", help="Requests of one recorded time, spread evenly.")
    ] = None,
    scale: Annotated[float | None, typer.Option(metavar="X", help="Every text X times as long.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(metavar="N", help="Cut prompts at their end.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(metavar="N", help="Bound answers.")] = None,
    trace_format: Annotated[
        str | None, typer.Option("--format", metavar="NAME", help="Format of a trace (default: seen from the file).")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens per block id of a trace (default: its format's).")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Token ids below N (default: told by the server).")
    ] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Other texts at other times.")] = None,
    slo: Annotated[str | None, typer.Option(metavar="BOUNDS", help="ttft=500ms,tpot=50ms,e2e=5s, for goodput.")] = None,
    margin: Annotated[float, typer.Option(metavar="X", min=0.0, max=1.0, help="A change that matters.")] = 0.05,
    cache: Annotated[CacheOption, typer.Option(help="How each run starts; cold is reset and verified.")] = (
        CacheOption.COLD
    ),
    servers: Annotated[
        ServersOption | None,
        typer.Option(help="Default: keep for builtin and addresses, else one-at-a-time; switch toggles tiers live."),
    ] = None,
    workers: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Processes that generate load.")] = 1,
    max_in_flight: Annotated[int, typer.Option(metavar="N", min=1, help="Requests on their way at a time.")] = 1024,
    connect_timeout: Annotated[str, typer.Option(metavar="TIME", help="No connection for so long: failed.")] = "10s",
    read_timeout: Annotated[str, typer.Option(metavar="TIME", help="No byte for so long: failed.")] = "120s",
    total_timeout: Annotated[str, typer.Option(metavar="TIME", help="No end for so long: failed.")] = "600s",
    start_timeout: Annotated[str, typer.Option(metavar="TIME", help="For a server to start.")] = "600s",
    max_run: Annotated[str | None, typer.Option(metavar="TIME", help="Stop a run after so long.")] = None,
    scrape_every: Annotated[str, typer.Option(metavar="TIME", help="Read metrics this often; 0s: only around.")] = "1s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and the plan, start nothing.")] = False,
    export: Annotated[ExportOption | None, typer.Option(help="Print another tool's command for this run.")] = None,
    save_vllm_json: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also save each arm under the key names of vllm bench serve.")
    ] = None,
    as_json: Json = False,
    out: Out = None,
    html: Html = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Send one workload to several tier settings in turn and say whether they differ.

    Example: kvbench replay shared-prefix --arm recompute --arm hbm --arm hbm+dram --out replay.json
    """
    from dataclasses import replace

    from kvbench.cli.emit import command_line, progress
    from kvbench.core.units import parse_duration
    from kvbench.engines.base import EngineOptions
    from kvbench.replay.commands import dry_run_text, export_text, workload_list_text
    from kvbench.replay.experiment import FALLBACK_VOCABULARY, provenance
    from kvbench.replay.experiment import replay as run_replay
    from kvbench.replay.load.plan import Limits
    from kvbench.replay.settings import ReplaySettings, parse_slo
    from kvbench.results.document import new_document
    from kvbench.results.host import describe_host
    from kvbench.workloads.plan import plan_requests
    from kvbench.workloads.workload import load_workload

    if list_workloads:
        typer.echo(workload_list_text())
        return ExitCode.OK
    if workload is None:
        raise UsageError("no workload was named; kvbench replay --list shows what there is")
    if rate is not None and concurrency is not None:
        raise UsageError("--rate is an open loop and --concurrency a closed one; give one of them")
    settings = ReplaySettings(
        pairs=pairs,
        cache=cache.value,
        servers="keep" if servers is None else servers.value,
        slo=None if slo is None else parse_slo(slo),
        margin_ratio=margin,
        limits=Limits(
            connect_s=parse_duration(connect_timeout),
            read_s=parse_duration(read_timeout),
            total_s=parse_duration(total_timeout),
            max_in_flight=max_in_flight,
        ),
        workers=workers,
        scrape_every_s=parse_duration(scrape_every),
        max_run_s=None if max_run is None else parse_duration(max_run),
        seed=1 if seed is None else seed,
    )
    traffic = load_workload(workload, trace_format=trace_format, block_tokens=block_tokens)

    def make_plan(told: int) -> "RequestPlan":
        return plan_requests(
            traffic,
            vocab_size=vocab_size or told,
            seed=seed,
            limit=limit,
            rate_per_s=rate,
            concurrency=concurrency,
            speedup=speedup,
            spread_ties=spread_ties,
            scale=scale,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
        )

    arms, default_engine = _arms(engine, arm)
    if export is not None:
        plan = make_plan(FALLBACK_VOCABULARY)
        url = next((one.url for one in arms if one.url), None) or "http://127.0.0.1:8000"
        typer.echo(export_text(traffic, plan, export.value, url=url, model=model or "MODEL", folder=Path()))
        return ExitCode.OK
    options = EngineOptions(
        model=model,
        executable=engine_program,
        work_dir=work_dir,
        arguments=tuple(engine_arg),
        environment=_environment(engine_env),
        start_timeout_s=parse_duration(start_timeout),
    )
    adapters = _adapters(arms, default_engine, options)
    if servers is None and default_engine in ("vllm", "sglang"):
        settings = replace(settings, servers="one-at-a-time")
    if dry_run:
        typer.echo(dry_run_text(arms, adapters, make_plan(FALLBACK_VOCABULARY), settings))
        return ExitCode.OK
    host = describe_host()

    def document_of(result: "ReplayResult", interrupted: bool) -> "Document[ReplayResult]":
        return new_document(
            result,
            command_line=command_line(),
            provenance=provenance(result),
            warnings=result.warnings,
            interrupted=interrupted,
            host=host,
        )

    with progress(quiet=quiet) as report, _terminable():
        result = run_replay(
            make_plan,
            arms,
            adapters,
            settings,
            progress=report,
            keep=None if out is None else lambda so_far: _keep(document_of(so_far, True), out),
        )
    document = document_of(result, result.stopped is not None)
    if save_vllm_json is not None:
        _save_vllm_json(document, save_vllm_json)
    code = _emit_or_rescue(document, as_json=as_json, out=out, html=html, quiet=quiet)
    return _code(result, code)


def _arms(engine: str, spelled: list[str]) -> "tuple[tuple[Arm, ...], str]":
    """The arms, and the engine of those that are no address."""
    from kvbench.engines.arms import parse_arms

    if engine.startswith(("http://", "https://")):
        if spelled:
            raise UsageError("an --engine that is an address has no arms; name each server: --arm off=URL --arm on=URL")
        return parse_arms([engine]), "url"
    return parse_arms(spelled or list(_DEFAULT_ARMS)), engine


def _environment(pairs: list[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--engine-env {pair!r} is not NAME=VALUE; write it like PYTHONPATH=/opt/lmcache_site")
        settings[name] = value
    return settings


def _adapters(arms: "tuple[Arm, ...]", engine: str, options: "EngineOptions") -> dict[str, "EngineAdapter"]:
    from kvbench.engines.registry import open_engine

    names = {"url" if arm.url else engine for arm in arms}
    opened = {name: open_engine(name, options) for name in names}
    return {arm.name: opened["url" if arm.url else engine] for arm in arms}


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a replay as Ctrl-C does: finished requests are kept and servers stopped."""
    import signal

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _keep(document: "Document[ReplayResult]", out: Path | None) -> None:
    """Saves what there is so far, so that a crash of the machine loses one run; a full disk is reported at the end."""
    from kvbench.results.codec import write_document

    if out is not None:
        with suppress(KvbenchError):
            write_document(document, out)


def _save_vllm_json(document: "Document[ReplayResult]", folder: Path) -> None:
    import json
    import re

    from kvbench.report.replay_vllm_json import vllm_result
    from kvbench.results.codec import write_text

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvbenchError(
            f"{folder}: cannot be made ({error.strerror}); name a folder for --save-vllm-json"
        ) from error
    for arm in document.result.arms:
        name = re.sub(r"[^\w.+=-]+", "_", arm.name)
        write_text(json.dumps(vllm_result(document, arm.name)), folder / f"{name}.json")


def _emit_or_rescue(
    document: "Document[ReplayResult]", *, as_json: bool, out: Path | None, html: Path | None, quiet: bool
) -> ExitCode:
    """Saves and prints; where a file cannot be written (a full disk), a copy goes to the first folder that has room."""
    from kvbench.cli.emit import emit, note

    try:
        return emit(document, as_json=as_json, out=out, html=html, quiet=quiet)
    except KvbenchError as error:
        saved = _rescue(document) if out is not None else None
        note(f"error: {error}", quiet=False)
        if saved is not None:
            note(f"the result is in {saved} instead", quiet=False)
        emit(document, as_json=as_json, quiet=quiet)
        return ExitCode.FAILED


def _rescue(document: "Document[ReplayResult]") -> Path | None:
    import os
    import tempfile

    from kvbench.results.codec import write_document

    for folder in (Path(tempfile.gettempdir()), Path.home(), Path("/dev/shm")):
        path = folder / f"kvbench-replay-{os.getpid()}.json"
        with suppress(KvbenchError):
            write_document(document, path)
            return path
    return None


def _code(result: "ReplayResult", code: ExitCode) -> ExitCode:
    """Worse is a found problem; a comparison that was not possible is insufficient; no good request at all failed."""
    if code is not ExitCode.OK:
        return code
    if not any(run.finished for run in result.runs):
        raise KvbenchError(f"no request ended well: {_first_failure(result)}")
    if result.verdict == "worse":
        return ExitCode.FOUND_PROBLEM
    if result.verdict in ("contaminated", "tier not exercised", "saturated", "failed requests"):
        return ExitCode.INSUFFICIENT
    return ExitCode.OK


def _first_failure(result: "ReplayResult") -> str:
    details = [request.detail for run in result.runs for request in run.requests if request.detail]
    return details[0] if details else "nothing was sent"
