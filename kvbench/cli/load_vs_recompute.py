"""`kvbench load-vs-recompute`: is loading an evicted prefix faster than recomputing it?"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.options import Html, Json, Out, Quiet


class CpModeOption(StrEnum):
    """Where the cache of a context-parallel group ends up."""

    ALL_GATHER = "all-gather"
    RING = "ring"
    LAYER_SPLIT = "layer-split"
    DCP = "dcp"


class CpOrderOption(StrEnum):
    """Which tokens a context-parallel rank computes."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"


class FlopsModeOption(StrEnum):
    """How FLOPs are counted."""

    EXACT = "exact"
    ACTIVE_PARAMS = "active-params"


class RankWorkOption(StrEnum):
    """How FLOPs are spread over ranks."""

    EXACT = "exact"
    EVEN = "even"


class StrategyOption(StrEnum):
    """How ranks that need the same bytes get them."""

    PER_RANK = "per-rank"
    SHARED = "shared"
    BROADCAST_SERIAL = "broadcast-serial"
    BROADCAST = "broadcast"
    HASHED = "hashed"
    ALLGATHER = "allgather"
    NATIVE = "native"
    LAYER_SPLIT = "layer-split"


def load_vs_recompute(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Catalogue names (--list), config.json files or folders.")
    ] = [],  # noqa: B006 - Typer copies it; a None default would make the argument optional in the usage line
    list_models: Annotated[bool, typer.Option("--list", help="List the model and GPU catalogue and exit.")] = False,
    tokens: Annotated[str, typer.Option(metavar="N[,N…]", help="Prefix lengths.")] = "1024,8192,32768,131072",
    suffix: Annotated[
        str, typer.Option(metavar="N[,N…]", help="New tokens after the prefix; hide load layer by layer.")
    ] = "0",
    tp: Annotated[
        str, typer.Option(metavar="N[,N…]", help="Ranks of one pipeline stage: attention TP × CP × DP.")
    ] = "1",
    pp: Annotated[str, typer.Option(metavar="N[,N…]", help="Pipeline stages.")] = "1",
    cp: Annotated[str, typer.Option(metavar="N[,N…]", help="Context parallelism, part of --tp.")] = "1",
    cp_mode: Annotated[
        CpModeOption, typer.Option(help="Who keeps which part of the cache under CP.")
    ] = CpModeOption.ALL_GATHER,
    cp_order: Annotated[
        CpOrderOption,
        typer.Option(help="Order of tokens over CP ranks; contiguous leaves the last rank the most pairs."),
    ] = CpOrderOption.ZIGZAG,
    dp_attention: Annotated[int, typer.Option(metavar="N", help="DP attention groups, part of --tp.")] = 1,
    ep: Annotated[int, typer.Option(metavar="N", help="Expert parallelism, part of --tp.")] = 1,
    kv_dtype: Annotated[
        str, typer.Option(metavar="DTYPE[,DTYPE…]", help="bf16, fp8, fp8_ds_mla, int8, nvfp4, …")
    ] = "bf16",
    state_dtype: Annotated[
        str | None, typer.Option(help="Element type of recurrent state (default: the model's).")
    ] = None,
    page_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Round tokens up to pages (default: exact).")
    ] = None,
    hybrid: Annotated[bool, typer.Option(help="Keep only the window of sliding-window layers.")] = True,
    assume: Annotated[str | None, typer.Option(help="Treat an unknown architecture as gqa, mha, mqa or mla.")] = None,
    gpu: Annotated[str, typer.Option(help="GPU of the catalogue.")] = "H200-SXM",
    peak_flops: Annotated[
        str | None, typer.Option(metavar="RATE", help="Instead of the GPU's peak: 989e12, 989TFLOP/s.")
    ] = None,
    weight_dtype: Annotated[
        str | None, typer.Option(help="bf16, fp8, fp8_block, nvfp4, … (default: the checkpoint's).")
    ] = None,
    efficiency: Annotated[
        str, typer.Option(metavar="auto|X", help="auto: priors per kernel; X: share of peak end to end.")
    ] = "auto",
    expert_imbalance: Annotated[
        float | None, typer.Option(help="Busiest expert rank over the mean (default 1.0; 1.2 with EP).")
    ] = None,
    chunk_tokens: Annotated[int, typer.Option(metavar="N", help="Prefill chunk; fills the pipeline with --pp.")] = 8192,
    tier: Annotated[
        list[str],
        typer.Option(
            metavar="TIER",
            help="dram=50GB/s, file=7GB/s,100us[,shared|per-rank]; with --measure dram:1GiB, file:/mnt?size=1GiB.",
        ),
    ] = [],  # noqa: B006
    limit: Annotated[
        list[str],
        typer.Option(metavar="NAME=VALUE", help="A ceiling: uplink=50GB/s, ranks_per_uplink=2, collective=300GB/s, …"),
    ] = [],  # noqa: B006
    strategy: Annotated[
        StrategyOption, typer.Option(help="Restore to ranks that need the same bytes.")
    ] = StrategyOption.PER_RANK,
    flops_mode: Annotated[
        FlopsModeOption, typer.Option(help="Exact layer FLOPs, or 2·Ψ_active·N.")
    ] = FlopsModeOption.EXACT,
    active_params: Annotated[
        float | None, typer.Option(metavar="N", help="Ψ_active for active-params, like 22e9.")
    ] = None,
    rank_work: Annotated[
        RankWorkOption, typer.Option(help="Count what every rank repeats, or divide evenly.")
    ] = RankWorkOption.EXACT,
    concurrency: Annotated[
        int | None, typer.Option(metavar="RANKS", help="Ranks loading at once (default: this request's).")
    ] = None,
    loads_per_s: Annotated[
        float, typer.Option(metavar="RATE", help="Loads per second on one rank's path, for the queue.")
    ] = 0.0,
    hit: Annotated[
        list[str], typer.Option(metavar="TIER=SHARE", help="Share of look-ups a tier serves; with miss they sum to 1.")
    ] = [],  # noqa: B006
    claimed_rate: Annotated[
        float | None, typer.Option(metavar="PER_S", help="Check a claimed request rate against the roofline.")
    ] = None,
    claimed_bytes_per_token: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Check a claimed KV size, like 512KiB.")
    ] = None,
    topo: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Saved result with link limits; replaces priors.")
    ] = [],  # noqa: B006
    probe: Annotated[
        list[Path], typer.Option(metavar="FILE", help="Saved result with measured load paths; replaces priors.")
    ] = [],  # noqa: B006
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure copies and prefill on this host instead of modelling.")
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(metavar="REPLAY", help="Hold a saved replay against the prediction."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="How --measure measures (default: probes/measure.yaml).")
    ] = None,
    as_json: Json = False,
    out: Out = None,
    html: Html = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Is loading an evicted KV prefix faster than recomputing it, or should it be split?

    Example: kvbench load-vs-recompute qwen3-235b-a22b --tp 8 --tokens 32768 --gpu H200 --tier dram=50GB/s

    Exit code 3: an input contradicts the model, the machine or itself.
    """
    from dataclasses import replace

    from kvbench.cli.emit import command_line, emit, progress
    from kvbench.load_vs_recompute.ask import Question, ask, catalogue_text
    from kvbench.load_vs_recompute.check import checked, hit_lengths, saved_replay
    from kvbench.results.document import new_document

    if list_models:
        typer.echo(catalogue_text())
        return ExitCode.OK
    question = Question(
        models=tuple(models),
        tokens=tokens,
        suffixes=suffix,
        tp=tp,
        pp=pp,
        cp=cp,
        cp_mode=cp_mode.value,
        cp_order=cp_order.value,
        dp_attention=dp_attention,
        ep=ep,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        page_tokens=page_tokens,
        hybrid=hybrid,
        assume=assume,
        gpu=gpu,
        peak_flops=peak_flops,
        weight_dtype=weight_dtype,
        efficiency=efficiency,
        expert_imbalance=expert_imbalance,
        chunk_tokens=chunk_tokens,
        tiers=tuple(tier),
        limits=tuple(limit),
        strategy=strategy.value,
        flops_mode=flops_mode.value,
        active_params=active_params,
        rank_work=rank_work.value,
        concurrency=concurrency,
        loads_per_s=loads_per_s,
        hits=tuple(hit),
        claimed_rate=claimed_rate,
        claimed_bytes_per_token=claimed_bytes_per_token,
        topo=tuple(topo),
        probe=tuple(probe),
        measure=measure,
        plan=plan,
    )
    replayed = None if check is None else saved_replay(check)
    if replayed is not None:
        question = replace(question, tokens=hit_lengths(replayed))
    with progress(quiet=quiet) as report:
        answer = ask(question, progress=report)
    if replayed is not None and check is not None:
        answer = checked(answer, replayed, check)
    document = new_document(
        answer.result,
        command_line=command_line(),
        provenance=answer.provenance,
        warnings=answer.warnings,
        interrupted=answer.interrupted,
    )
    code = emit(document, as_json=as_json, out=out, html=html, quiet=quiet)
    return ExitCode.FOUND_PROBLEM if answer.found_impossible and code == ExitCode.OK else code
