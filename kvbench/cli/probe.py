"""`kvbench probe`: what do transfers of KV cache really get on this machine?"""

from typing import Annotated

import typer

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.options import Html, Json, Out, Quiet
from kvbench.core.errors import KvbenchError, UsageError


def probe(
    plan: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="A plan by name (--list), or the path of a YAML file.")
    ] = None,
    list_plans: Annotated[bool, typer.Option("--list", help="List the plans with their questions and exit.")] = False,
    setting: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the plan: repeats=5, concurrency=1,16."),
    ] = [],  # noqa: B006 - Typer copies it; a None default would make the option look required
    model: Annotated[str | None, typer.Option(help="Take page shapes from this model (layouts).")] = None,
    tp: Annotated[int | None, typer.Option(metavar="N", help="Ranks that share the model's KV heads.")] = None,
    page_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens of one page.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of the catalogue for the anchor line (default: this host's).")
    ] = None,
    as_json: Json = False,
    out: Out = None,
    html: Html = None,
    quiet: Quiet = False,
) -> ExitCode:
    """Measure transfers that KV loads really pay: by size, layout, direction and way of copying, or by tier and policy.

    Example: kvbench probe file --set paths=file:/mnt/nvme --set concurrency=1,16 --out file.json
    """
    from kvbench.cli.emit import command_line, emit, progress
    from kvbench.probes.plan_file import list_text
    from kvbench.probes.probe import probe as run_probe
    from kvbench.probes.probe import provenance
    from kvbench.probes.tier_plan import is_tier_plan, load_tier_plan
    from kvbench.probes.tier_probe import probe_tiers, tier_provenance
    from kvbench.probes.transfer_plan import load_transfer_plan
    from kvbench.results.document import new_document
    from kvbench.results.probe import ProbeCase, ProbeResult
    from kvbench.results.tier_probe import PolicyCase, TierCase, TierProbeResult

    if list_plans:
        typer.echo(list_text())
        return ExitCode.OK
    if plan is None:
        raise UsageError("no plan was named; kvbench probe --list shows what there is")
    shape = {"model": model, "tp": tp, "page_tokens": page_tokens}
    settings = [*setting, *(f"{key}={value}" for key, value in shape.items() if value is not None)]
    result: ProbeResult | TierProbeResult
    cases: tuple[ProbeCase | TierCase | PolicyCase, ...]
    if is_tier_plan(plan):
        if gpu is not None:
            raise UsageError(f"--gpu {gpu} means nothing to a plan of tier stacks; drop it")
        stacks = load_tier_plan(plan, settings)
        with progress(quiet=quiet) as report:
            result = probe_tiers(stacks, progress=report)
        origins, cases = tier_provenance(result), (*result.tiers, *result.policies)
    else:
        transfers = load_transfer_plan(plan, settings)
        with progress(quiet=quiet) as report:
            result = run_probe(transfers, gpu=gpu, progress=report)
        origins, cases = provenance(), result.cases
    document = new_document(
        result,
        command_line=command_line(),
        provenance=origins,
        warnings=result.warnings,
        interrupted=result.interrupted,
    )
    code = emit(document, as_json=as_json, out=out, html=html, quiet=quiet)
    failed = [case for case in cases if case.status == "failed"]
    if failed and len(failed) == len(cases) and not result.interrupted:
        raise KvbenchError(f"every case of plan {result.plan} failed; the first: {failed[0].reason}")
    return code
