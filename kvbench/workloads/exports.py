"""A plan as the command of another load generator, with its traps named and what it cannot express said."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvbench.core.block_key import prefix_hashes
from kvbench.core.errors import UsageError
from kvbench.workloads.base import RequestPlan
from kvbench.workloads.distributions import Constant, Distribution
from kvbench.workloads.traces.formats import detected_format, trace_format
from kvbench.workloads.traffic import SharedPrefix
from kvbench.workloads.workload import TraceFile, Workload

TOOLS = ("vllm", "guidellm", "aiperf", "inference-perf")
DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFile:
    """A file that the command reads."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The command, the variables to run it with, the files to write beside it, and what is different there."""

    tool: str
    environment: tuple[tuple[str, str], ...]
    command: tuple[str, ...]
    files: tuple[ExportFile, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What is to be exported, and to where."""

    workload: Workload
    plan: RequestPlan
    url: str
    model: str
    block_tokens: int


def export_workload(
    workload: Workload, plan: RequestPlan, tool: str, *, url: str, model: str, block_tokens: int | None = None
) -> Export:
    """The plan of this workload as `tool` would run it; UsageError where it cannot.

    Where the plan was made at another rate, scale or length than the workload says, the plan's count.
    `block_tokens` is the grain at which sharing is written into a trace file: what two prompts share is rounded down to
    it. Without it, the trace's own block, or 16.
    """
    makers: dict[str, Callable[[_Request], Export]] = {
        "vllm": _vllm,
        "guidellm": _guidellm,
        "aiperf": _aiperf,
        "inference-perf": _inference_perf,
    }
    if tool not in makers:
        raise UsageError(f"export to {tool!r} is not known; there are {', '.join(TOOLS)}")
    if block_tokens is not None and not 1 <= block_tokens <= 1 << 20:
        raise UsageError(f"block_tokens is {block_tokens}; give a number from 1 on")
    asked = plan.made_from or workload
    return makers[tool](
        _Request(
            workload=asked,
            plan=plan,
            url=url.rstrip("/"),
            model=model,
            block_tokens=block_tokens or _own_block(asked) or DEFAULT_BLOCK_TOKENS,
        )
    )


def trace_rows(plan: RequestPlan, block_tokens: int, *, timed: bool = True) -> Iterator[dict[str, Any]]:
    """The plan in Mooncake's form: one id for each distinct prefix of whole blocks, and one for each partial tail.

    A request that waits for an answer gets the time at which it would start if every answer came at once.
    """
    ids: dict[bytes, int] = {}
    starts: list[float] = []
    for request in plan.requests:
        start_s = request.at_s or 0.0
        if request.after:
            start_s = max(starts[one] for one in request.after) + request.think_s
        starts.append(start_s)
        tokens = request.prompt
        chain = list(prefix_hashes(tokens, block_tokens))
        rest = len(tokens) % block_tokens
        if rest:
            chain.append((chain[-1] if chain else b"") + tokens[-rest:].tobytes())
        row: dict[str, Any] = {"timestamp": round(start_s * 1000)} if timed else {}
        row["input_length"] = len(tokens)
        row["output_length"] = request.max_tokens
        row["hash_ids"] = [ids.setdefault(one, len(ids)) for one in chain]
        yield row


def _own_block(workload: Workload) -> int | None:
    """The block of a trace whose lengths were left as they are."""
    trace = workload.traffic
    if not isinstance(trace, TraceFile) or workload.scale != 1:
        return None
    return (
        trace.block_tokens
        or (trace_format(trace.format_name) if trace.format_name else detected_format(trace.path)).block_tokens
    )


def _trace_file(asked: _Request, *, timed: bool) -> tuple[ExportFile, list[str]]:
    """The plan as a file, and what the grain of its blocks costs."""
    seen: set[int] = set()
    shared = 0
    lines: list[str] = []
    for row in trace_rows(asked.plan, asked.block_tokens, timed=timed):
        run = 0
        for one in row["hash_ids"]:
            if one not in seen:
                break
            run += 1
        shared += min(run * asked.block_tokens, row["input_length"])
        seen.update(row["hash_ids"])
        lines.append(json.dumps(row))
    planned = asked.plan.reuse.hit_tokens
    notes = [
        (
            f"the file is in Mooncake's form with blocks of {asked.block_tokens} tokens: tell every reader that size. "
            f"In an unlimited cache {shared:,} prompt tokens are hits there, {planned:,} in kvbench's plan"
        ),
        f"{asked.plan.name}: the tool makes its own prompts from the ids, so they are other tokens than kvbench's",
    ]
    waiting = sum(bool(request.after) for request in asked.plan.requests)
    if waiting:
        notes.append(
            f"{waiting} requests wait for an earlier answer in kvbench; the file has fixed times as if every answer "
            "came at once, so a slow server gets later turns before it answered earlier ones"
        )
    if asked.plan.history == "engine":
        notes.append("history: engine cannot be written down; the file has the synthetic answers in later turns")
    return ExportFile(name=f"{asked.plan.name}-blocks-{asked.block_tokens}.jsonl", text="\n".join(lines) + "\n"), notes


def _vllm(asked: _Request) -> Export:
    plan, arrival = asked.plan, asked.workload.arrival
    command = ["vllm", "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"]
    command += ["--base-url", asked.url, "--model", asked.model, "--num-prompts", str(len(plan.requests))]
    command += ["--ignore-eos", "--seed", str(plan.seed), "--save-result"]
    prefix = _plain_shared_prefix(asked.workload)
    timed = plan.loop == "open"
    files: tuple[ExportFile, ...] = ()
    notes = [
        "--ignore-eos, since kvbench asks for exactly max_tokens; --percentile-metrics ttft,tpot,itl,e2el adds E2E"
    ]
    environment: tuple[tuple[str, str], ...] = ()
    # recorded times can only come from a file
    if prefix is not None and arrival.process in ("constant", "poisson", "gamma", "at-once", "closed"):
        shared, own, answer = prefix
        groups = _groups(asked.workload)
        command += ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", str(shared)]
        command += ["--prefix-repetition-suffix-len", str(own), "--prefix-repetition-num-prefixes", str(groups)]
        command += ["--prefix-repetition-output-len", str(answer)]
        notes.append("prompts are re-tokenized text there and may be a few tokens longer or shorter; check input_lens")
        if len(plan.requests) % groups:
            notes.append(
                f"{len(plan.requests)} requests are not a multiple of {groups} prefixes; the tool drops the remainder"
            )
        command += _vllm_rate(asked, notes)
    else:
        file, more = _trace_file(asked, timed=True)
        files, notes = (file,), notes + more
        environment = (("PYTHONHASHSEED", "0"),)
        command += ["--dataset-name", "timed_trace", "--dataset-path", file.name]
        command += ["--timed-trace-chunk-hash-size", str(asked.block_tokens), "--timed-trace-sec-multiplier", "0.001"]
        notes += [
            (
                "--timed-trace-chunk-hash-size is 16 unless given: prompts of a trace with blocks of 512 are then "
                "32 times too short, while every other number looks normal"
            ),
            (
                "PYTHONHASHSEED=0, since the tool seeds blocks with Python's string hash: without it, two runs send "
                "different prompts and the second one finds nothing in a warm cache"
            ),
        ]
        if not timed:
            command += ["--no-self-timed", *_vllm_rate(asked, notes)]
    return Export(tool="vllm", environment=environment, command=tuple(command), files=files, notes=tuple(notes))


def _vllm_rate(asked: _Request, notes: list[str]) -> list[str]:
    arrival = asked.workload.arrival
    if arrival.process == "closed":
        return ["--request-rate", "inf", "--max-concurrency", str(arrival.concurrency)]
    if arrival.process == "at-once":
        return ["--request-rate", "inf"]
    if arrival.ramp_s:
        notes.append(f"the ramp of {arrival.ramp_s:g} s is left out: --ramp-up-* there takes whole rates over the run")
    flags = ["--request-rate", f"{arrival.rate_per_s:g}"]
    if arrival.process == "gamma":
        flags += ["--burstiness", f"{arrival.burstiness:g}"]
    if arrival.process == "constant":
        notes.append("constant gaps cannot be asked for; --burstiness 1000000 comes close")
        flags += ["--burstiness", "1000000"]
    return flags


def _guidellm(asked: _Request) -> Export:
    plan, arrival = asked.plan, asked.workload.arrival
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={asked.url},model={asked.model}"]
    prefix = _plain_shared_prefix(asked.workload)
    files: tuple[ExportFile, ...] = ()
    notes: list[str] = []
    profile = _guidellm_profile(asked, notes)
    if prefix is not None and profile is not None:
        shared, own, answer = prefix
        command += ["--profile", profile, "--constraint", f"kind=max_requests,count={len(plan.requests)}"]
        command += [
            "--data",
            (
                f"kind=synthetic_text,prompt_tokens={own},output_tokens={answer},"
                f"prefix_tokens={shared},prefix_count={_groups(asked.workload)}"
            ),
        ]
        notes.append("the prefix is sent as a system message, so the chat template's tokens come on top")
    else:
        file, more = _trace_file(asked, timed=True)
        files, notes = (file,), notes + more
        command += ["--profile", "kind=replay,time_scale=1.0" if plan.loop == "open" else str(profile)]
        command += ["--constraint", f"kind=max_requests,count={len(plan.requests)}"]
        command += ["--data", f"kind=mooncake,path={file.name},hash_id_block_size={asked.block_tokens}"]
        notes.append(
            "hash_id_block_size has the default 512 for kind=mooncake and 64 for kind=weka; other blocks fail there"
        )
        if any(request.after for request in plan.requests):
            notes.append("the replay profile sends every row by its own time; turns do not wait for answers")
    if arrival.ramp_s:
        notes.append(f"the ramp of {arrival.ramp_s:g} s is in the times of a trace file, and left out of a rate")
    return Export(tool="guidellm", environment=(), command=tuple(command), files=files, notes=tuple(notes))


def _guidellm_profile(asked: _Request, notes: list[str]) -> str | None:
    arrival = asked.workload.arrival
    if arrival.process == "closed":
        return f"kind=concurrent,streams={arrival.concurrency}"
    if arrival.process == "at-once":
        return f"kind=throughput,max_concurrency={len(asked.plan.requests)}"
    if arrival.process in ("constant", "poisson"):
        return f"kind={arrival.process},rate={arrival.rate_per_s:g}"
    if arrival.process == "gamma":
        notes.append("gamma arrivals are not among its profiles; the trace file has kvbench's own times")
    return None


def _aiperf(asked: _Request) -> Export:
    plan, arrival = asked.plan, asked.workload.arrival
    timed = plan.loop == "open"
    command = ["aiperf", "profile", "--model", asked.model, "--url", asked.url, "--endpoint-type", "completions"]
    command += ["--streaming", "--random-seed", str(plan.seed), "--extra-inputs", "ignore_eos:true"]
    prefix = _plain_shared_prefix(asked.workload)
    files: tuple[ExportFile, ...] = ()
    notes: list[str] = []
    if prefix is not None and arrival.process in ("constant", "poisson", "gamma", "closed"):
        shared, own, answer = prefix
        command += ["--request-count", str(len(plan.requests)), "--num-prefix-prompts", str(_groups(asked.workload))]
        command += ["--prefix-prompt-length", str(shared), "--isl", str(own), "--isl-stddev", "0"]
        command += ["--osl", str(answer), "--osl-stddev", "0", "--num-dataset-entries", str(len(plan.requests))]
        if arrival.process == "closed":
            command += ["--concurrency", str(arrival.concurrency)]
        else:
            command += ["--request-rate", f"{arrival.rate_per_s:g}", "--arrival-pattern", arrival.process]
        if arrival.process == "gamma":
            command += ["--arrival-smoothness", f"{arrival.burstiness:g}"]
        if arrival.ramp_s:
            notes.append(f"the ramp of {arrival.ramp_s:g} s is left out")
        notes.append("the prefix is joined to the prompt as text, so a prompt may be a token longer or shorter")
    else:
        file, more = _trace_file(asked, timed=timed)
        files, notes = (file,), notes + more
        command += ["--input-file", file.name, "--custom-dataset-type", "mooncake_trace"]
        command += ["--isl-block-size", str(asked.block_tokens)]
        command += (
            ["--fixed-schedule"]
            if timed
            else ["--concurrency", str(arrival.concurrency), "--request-count", str(len(plan.requests))]
        )
        notes += [
            "--isl-block-size has the default 512 for mooncake_trace, 16 for Bailian and 64 for WEKA traces there",
            "rows of one session_id would be added up there, so the file has none: every row is a complete prompt",
        ]
    notes.append("its inter_token_latency is what vLLM and kvbench call TPOT; inter_chunk_latency is their ITL")
    return Export(tool="aiperf", environment=(), command=tuple(command), files=files, notes=tuple(notes))


def _inference_perf(asked: _Request) -> Export:
    import yaml

    workload = asked.workload
    notes: list[str] = []
    document: dict[str, Any] = {
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": asked.model, "base_url": asked.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": asked.model},
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": True}},
    }
    if isinstance(workload.traffic, SharedPrefix):
        document |= _inference_perf_prefix(asked, workload.traffic, notes)
    elif isinstance(workload.traffic, TraceFile):
        document |= _inference_perf_trace(asked, workload.traffic, notes)
    else:
        raise UsageError(
            f"{workload.name}: inference-perf reads no file of block ids, and this traffic is neither a shared prefix "
            f"nor a WEKA or OTel trace; export to {', '.join(TOOLS[:3])} instead"
        )
    name = f"{asked.plan.name}-inference-perf.yaml"
    return Export(
        tool="inference-perf",
        environment=(),
        command=("inference-perf", "--config_file", name),
        files=(ExportFile(name=name, text=yaml.safe_dump(document, sort_keys=False)),),
        notes=tuple(notes),
    )


def _inference_perf_prefix(asked: _Request, traffic: SharedPrefix, notes: list[str]) -> dict[str, Any]:
    arrival = asked.workload.arrival
    prefix = _plain_shared_prefix(asked.workload)
    if prefix is None:
        raise UsageError(
            f"{asked.workload.name}: inference-perf asks each prefix equally often, with lengths of its own kinds; "
            f"give constant lengths and popularity: uniform, or export to {', '.join(TOOLS[:3])}"
        )
    shared, own, answer = prefix
    notes.append("prompts are text that is tokenized again there, and may be a few tokens longer or shorter")
    per_group = -(-len(asked.plan.requests) // traffic.groups)
    stage: dict[str, Any]
    if arrival.process == "closed":
        kind = "concurrent"
        stage = {"num_requests": len(asked.plan.requests), "concurrency_level": arrival.concurrency}
    elif arrival.process in ("constant", "poisson") and arrival.rate_per_s:
        kind = arrival.process
        stage = {"rate": arrival.rate_per_s, "duration": max(1, round(len(asked.plan.requests) / arrival.rate_per_s))}
        notes.append("the tool counts by duration, so the number of requests is about, not exactly, kvbench's")
    else:
        raise UsageError(f"inference-perf has no arrivals like {arrival}; use constant, poisson or closed")
    if arrival.ramp_s:
        notes.append(f"the ramp of {arrival.ramp_s:g} s is left out; write it as several stages")
    return {
        "load": {"type": kind, "stages": [stage], "base_seed": asked.plan.seed},
        "data": {
            "type": "shared_prefix",
            "shared_prefix": {
                "num_groups": traffic.groups,
                "num_prompts_per_group": per_group,
                "system_prompt_len": shared,
                "question_len": own,
                "output_len": answer,
                "seed": asked.plan.seed,
            },
        },
    }


def _inference_perf_trace(asked: _Request, trace: TraceFile, notes: list[str]) -> dict[str, Any]:
    form = trace.format_name or detected_format(trace.path).name
    if form not in ("weka", "otel"):
        raise UsageError(
            f"{trace.path}: inference-perf replays WEKA and OTel traces, and this is a {form} trace; "
            f"export to {', '.join(TOOLS[:3])} instead"
        )
    kind = {"weka": "weka_trace_replay", "otel": "otel_trace_replay"}[form]
    settings: dict[str, Any] = {"use_static_model": True, "static_model_name": asked.model}
    settings["trace_directory" if trace.path.is_dir() else "trace_files"] = (
        str(trace.path) if trace.path.is_dir() else [str(trace.path)]
    )
    if form == "weka":
        settings["default_block_size"] = trace.block_tokens or 64
        notes.append("default_block_size is 64 there; a file's own block_size goes before it")
    notes += [
        (
            "the tool reads the original trace (one JSON object per file, not compressed): limits, scale and "
            "max_prompt_tokens of the plan do not apply"
        ),
        "max_wait_ms there caps pauses at 15 s by default, and later turns hold the server's own answers",
    ]
    sessions = len({request.root for request in asked.plan.requests})
    stage = {"concurrent_sessions": asked.workload.arrival.concurrency or 0, "num_sessions": sessions}
    if asked.workload.arrival.rate_per_s:
        notes.append("sessions all start at once there (concurrent_sessions: 0); set session_rate with a concurrency")
    return {
        "api": {"type": "chat", "streaming": True},
        "load": {"type": "trace_session_replay", "stages": [stage], "base_seed": asked.plan.seed},
        "data": {"type": kind, kind: settings},
    }


def _plain_shared_prefix(workload: Workload) -> tuple[int, int, int] | None:
    """(shared, own, answer) tokens, if every request has the same and every prefix the same chance."""
    traffic = workload.traffic
    if not isinstance(traffic, SharedPrefix) or workload.max_prompt_tokens or workload.scale != 1:
        return None
    sizes = [_constant(one) for one in (traffic.prefix_tokens, traffic.unique_tokens, traffic.output_tokens)]
    if (traffic.alpha and traffic.groups > 1) or None in sizes:
        return None
    shared, own, answer = (one or 0 for one in sizes)
    return shared, own, min(answer, workload.max_output_tokens or answer)


def _groups(workload: Workload) -> int:
    return workload.traffic.groups if isinstance(workload.traffic, SharedPrefix) else 1


def _constant(distribution: Distribution) -> int | None:
    return round(distribution.value) if isinstance(distribution, Constant) else None
