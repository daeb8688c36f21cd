"""`kvbench topo`: the machine as one graph, with ceilings and findings."""

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.options import Html, Json, Out, Quiet

_File = typer.Option(
    "--from", metavar="FILE", help="A captured text, XML, archive or folder; repeat it to join several."
)
_Root = typer.Option("--root", metavar="DIR", help="A captured /sys tree.", exists=True, file_okay=False)
_Import = typer.Option(
    "--import", metavar="FILE", help="Measurements: nvbandwidth -j, nccl-tests -J, fio, perftest, gdsio. Repeatable."
)
_Dram = typer.Option(
    "--dram",
    metavar="SPEC",
    help="Channels of one socket where no input tells, such as 8xDDR5-4800; 8xDDR5-4800/4 for 4 NUMA nodes per socket.",
)
_Gpu = typer.Option("--gpu", metavar="NAME", help="The GPU model where no input tells, such as 'H100 SXM'.")


def topo(
    files: Annotated[list[Path] | None, _File] = None,
    root: Annotated[Path | None, _Root] = None,
    imports: Annotated[list[Path] | None, _Import] = None,
    gpu: Annotated[str | None, _Gpu] = None,
    dram: Annotated[str | None, _Dram] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time host memory and the disk of this folder.")] = False,
    mermaid: Annotated[
        Path | None, typer.Option("--mermaid", metavar="FILE", help="Write a Mermaid flowchart.")
    ] = None,
    dot: Annotated[Path | None, typer.Option("--dot", metavar="FILE", help="Write a Graphviz graph.")] = None,
    as_json: Json = False,
    out: Out = None,
    html: Html = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Show what is connected to what, what each link carries, and which link is the ceiling.

    Reads this machine, or what was captured on another one. Exit code 3: a finding is a problem.
    """
    from kvbench.cli.emit import command_line, emit, note, progress
    from kvbench.results.codec import write_text
    from kvbench.results.document import new_document
    from kvbench.topo.discover import PROVENANCE, Sources, discover, doubts

    sources = Sources(files=tuple(files or ()), root=root, imports=tuple(imports or ()))
    probe = None
    if measure:
        from kvbench.topo.link_probe import SmallProbe

        probe = SmallProbe(folder=Path.cwd())
    with progress(quiet=quiet) as report:
        result = discover(sources, gpu=gpu, dram=dram, probe=probe, report=report)
    document = new_document(result, command_line=command_line(), provenance=PROVENANCE, warnings=doubts(result))
    if mermaid is not None or dot is not None:
        from kvbench.report import topology_export

        for path, draw in ((mermaid, topology_export.mermaid), (dot, topology_export.dot)):
            if path is not None:
                write_text(draw(result), path)
                note(f"saved {path}", quiet=quiet)
    code = emit(document, as_json=as_json, out=out, html=html, quiet=quiet)
    problem = any(finding.severity == "problem" for finding in result.findings)
    return ExitCode.FOUND_PROBLEM if code == ExitCode.OK and problem else code
