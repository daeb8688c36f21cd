"""A replay as text: what would be run and sent, as another tool's command, and the workloads there are."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.engines.base import Arm, EngineAdapter
from kvbench.replay.experiment import order
from kvbench.replay.settings import ReplaySettings
from kvbench.results.codec import write_text
from kvbench.workloads.base import RequestPlan
from kvbench.workloads.exports import export_workload
from kvbench.workloads.workload import Workload, load_workload, workload_names


def dry_run_text(
    arms: Sequence[Arm], adapters: Mapping[str, EngineAdapter], plan: RequestPlan, settings: ReplaySettings
) -> str:
    """The commands of each arm, then what would be sent and in which order."""
    lines = []
    for arm in arms:
        commands = adapters[arm.name].command(arm)
        lines.append(f"# arm {arm.name}")
        lines += [shlex.join(command) for command in commands] or [f"# a server that is up: {arm.url}"]
    reuse = plan.reuse
    ratio = "" if reuse.hit_ratio is None else f", of which a cache without limit would have {reuse.hit_ratio:.1%}"
    turns = ", ".join(arm.name for _, arm in order(arms, settings.pairs))
    lines += [
        "",
        f"# plan {plan.name}: {len(plan.requests)} requests, {reuse.prompt_tokens:,} prompt tokens{ratio}",
        f"# arrival: {plan.arrival}",
        f"# runs: {turns}; cache at the start of each: {settings.cache}",
    ]
    lines += [f"# {warning.code}: {warning.message}; {warning.remedy}" for warning in plan.warnings]
    return "\n".join(lines)


def export_text(traffic: Workload, plan: RequestPlan, tool: str, *, url: str, model: str, folder: Path) -> str:
    """The command of another tool; files that it reads are written into `folder`."""
    found = export_workload(traffic, plan, tool, url=url, model=model)
    lines = []
    for file in found.files:
        write_text(file.text, folder / file.name)
        lines.append(f"# wrote {folder / file.name}")
    lines += [f"# {note}" for note in found.notes]
    variables = [f"{name}={shlex.quote(value)}" for name, value in found.environment]
    lines.append(" ".join([*variables, shlex.join(found.command)]))
    return "\n".join(lines)


def workload_list_text() -> str:
    """Each workload of the folder with the reason why it exists."""
    names = workload_names()
    width = max(len(name) for name in names)
    return "\n".join(f"{name:{width}}  {' '.join(load_workload(name).why.split())}" for name in names)
