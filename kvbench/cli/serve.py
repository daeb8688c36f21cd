"""`kvbench serve`: an engine with real tiers to try everything against."""

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.options import Quiet


def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A shipped shape, a catalogue name or a model directory.")
    ] = None,
    l1: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Size of the nearest tier, hbm (64MiB); 0 for none.")
    ] = None,
    tier: Annotated[
        list[str], typer.Option(metavar="SPEC", help="A tier below: dram:256MiB, file:DIR, … Nearest first.")
    ] = [],  # noqa: B006 - Typer copies it; a None default would make the option look required
    policy: Annotated[
        str, typer.Option(metavar="POLICY", help="write-through, write-through-selective or write-back.")
    ] = "write-through",
    load_timeout: Annotated[
        str, typer.Option(metavar="TIME", help="A load that takes longer is computed instead.")
    ] = "10s",
    eviction: Annotated[str, typer.Option(help="Which block leaves a full tier: lru, lfu or score.")] = "lru",
    cooldown: Annotated[
        str, typer.Option(metavar="TIME", help="How long a block that is to leave may still be asked for.")
    ] = "0s",
    ttl: Annotated[
        str | None, typer.Option(metavar="TIME", help="Blocks leave after this time without access.")
    ] = None,
    spans: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append what the tiers do, one JSON object per line.")
    ] = None,
    metadata: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Where servers that share a tier tell each other: sqlite:FILE, …")
    ] = None,
    page_tokens: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Tokens of one KV block.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Seed of random weights.")] = 0,
    layers_per_kind: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Keep N layers of each kind of a shape with random weights."),
    ] = None,
    layer_ranges: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Load KV in N ranges of layers, each while the one before computes."),
    ] = None,
    split: Annotated[
        bool, typer.Option("--split", help="Compute the front of a prefix while its back loads, where that is faster.")
    ] = False,
    max_running: Annotated[int, typer.Option(min=1, metavar="N", help="Requests computed at a time.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=0, metavar="N", help="Requests that may wait; more get a 429.")] = 256,
    prefill_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Prompt tokens computed between two decode steps.")
    ] = 512,
    null: Annotated[bool, typer.Option("--null", help="Compute nothing: answer at once, to measure clients.")] = False,
    ttft: Annotated[str, typer.Option(metavar="TIME", help="With --null: when the first token comes.")] = "0s",
    itl: Annotated[str, typer.Option(metavar="TIME", help="With --null: time between two tokens.")] = "0s",
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Misbehave as this YAML file says (docs/serve.md).")
    ] = None,
    dialect: Annotated[str, typer.Option(help="Whose metrics, usage and resets: native, vllm or sglang.")] = "native",
    trap: Annotated[
        list[str], typer.Option(metavar="NAME", help="A trap of the dialect; docs/serve.md lists them.")
    ] = [],  # noqa: B006
    admin_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="With --dialect sglang: the key that control calls must bring.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the URL here once requests are answered.")
    ] = None,
    max_body: Annotated[str, typer.Option(metavar="SIZE", help="Largest request body.")] = "32MiB",
    grace: Annotated[str, typer.Option(metavar="TIME", help="How long running answers may take after SIGTERM.")] = "5s",
    quiet: Quiet = False,
) -> ExitCode:
    """Serve an OpenAI-compatible API from a small real model with real KV tiers, or from no model at all.

    Example: kvbench serve demo --l1 64MiB --tier dram:256MiB --tier file:/tmp/kv --policy write-through-selective
    """
    from kvbench.engines.builtin.serve import ServeOptions, run

    run(
        ServeOptions(
            model=model,
            l1=l1,
            tiers=tuple(tier),
            policy=policy,
            load_timeout=load_timeout,
            eviction=eviction,
            cooldown=cooldown,
            ttl=ttl,
            spans=spans,
            metadata=metadata,
            page_tokens=page_tokens,
            device=device,
            dtype=dtype,
            seed=seed,
            layers_per_kind=layers_per_kind,
            layer_ranges=layer_ranges,
            split=split,
            max_running=max_running,
            max_waiting=max_waiting,
            prefill_tokens=prefill_tokens,
            null=null,
            ttft=ttft,
            itl=itl,
            faults=faults,
            dialect=dialect,
            traps=tuple(trap),
            admin_key=admin_key,
            host=host,
            port=port,
            ready_file=ready_file,
            max_body=max_body,
            grace=grace,
            quiet=quiet,
        )
    )
    return ExitCode.OK
