"""`kvbench serve`: an engine with real tiers to try everything against."""

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.options import Quiet
from kvbench.core.errors import UsageError


def serve(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A shipped shape, a catalogue name or a model directory.")
    ] = None,
    null: Annotated[
        bool, typer.Option("--null", help="Compute nothing and answer at once, to measure clients.")
    ] = False,
    ttft: Annotated[str, typer.Option(metavar="TIME", help="With --null: when the first token comes.")] = "0s",
    itl: Annotated[str, typer.Option(metavar="TIME", help="With --null: time between two tokens.")] = "0s",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    ready_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the URL here once requests are answered.")
    ] = None,
    grace: Annotated[str, typer.Option(metavar="TIME", help="How long running answers may take after SIGTERM.")] = "5s",
    quiet: Quiet = False,
) -> ExitCode:
    """Serve an OpenAI-compatible API from a small real model with real KV tiers, or from no model at all.

    Example: kvbench serve --null --ttft 20ms --itl 5ms --port 8000
    """
    from kvbench.core.units import parse_duration
    from kvbench.engines.builtin.null import NullEngine
    from kvbench.engines.builtin.server import ServerSettings
    from kvbench.engines.builtin.server import serve as run_server
    from kvbench.engines.builtin.timers import Timers

    if not null:
        raise UsageError("name a model to serve, or --null; kvbench serve --help shows an example")
    ttft_s, itl_s = parse_duration(ttft), parse_duration(itl)
    run_server(
        lambda loop: NullEngine(ttft_s=ttft_s, itl_s=itl_s, timers=Timers(loop)),
        ServerSettings(host=host, port=port, ready_file=ready_file, grace_s=parse_duration(grace), quiet=quiet),
    )
    return ExitCode.OK
