"""What the load generator of `kvbench replay` costs, and how late it is, against `kvbench serve --null`; peers by path.

    python tests/live/bench_replay_client.py lateness [--rate 200] [--seconds 60]
    python tests/live/bench_replay_client.py peak [--tokens 16] [--requests 2000]
        [--vllm V/bin/vllm] [--guidellm G/bin/guidellm] [--aiperf A/bin/aiperf] [--tokenizer DIR]
    python tests/live/bench_replay_client.py agree --url http://127.0.0.1:8000 --vllm V/bin/vllm --tokenizer DIR
    python tests/live/bench_replay_client.py small        # 50 requests, start-up included: CPU seconds and memory

`agree` runs the 50 requests of shared-prefix-1024, and the same in `vllm bench serve`, in turn against one server.
Each run has texts of its own; the first few requests meet a cold prefix (in vLLM's tool one unmeasured request does),
which a median of 50 does not see. Peers are run from their own environments. CPU seconds
are user and system time of the whole client with its children.
"""

import argparse
import ctypes
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvbench.core.percentiles import percentile
from kvbench.replay.load.generator import LoadResult, run_load
from kvbench.replay.load.plan import LoadRequest, WorkerPlan

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_SERVERS = 1
NOTHING: Mapping[str, str | None] = {}
FIELDS = {"model": "null", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}


@contextmanager
def null_server(*options: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "url"
        command = [sys.executable, "-m", "kvbench", "serve", "--null", "--port", "0", "-q", "--ready-file", str(ready)]
        server = subprocess.Popen([*command, *options])
        try:
            deadline = time.monotonic() + 30
            while not (ready.is_file() and ready.stat().st_size):
                if time.monotonic() > deadline or server.poll() is not None:
                    raise SystemExit("the null server did not start")
                time.sleep(0.02)
            yield ready.read_text().strip()
        finally:
            server.terminate()
            server.wait(20)


def load(url: str, requests: int, *, rate: float | None, slots: int | None, tokens: int, workers: int) -> LoadResult:
    host, _, port = url.removeprefix("http://").partition(":")
    planned = tuple(
        LoadRequest(
            index=index, at_s=None if rate is None else index / rate, think_s=0.0, after=(), root=index,
            prompt=array("I", range(64)), max_tokens=tokens,
        )
        for index in range(requests)
    )  # fmt: skip
    plan = WorkerPlan(host=host, port=int(port), fields=FIELDS, requests=planned, slots=slots)
    return run_load(plan, workers=workers)


def lateness(rate: float, seconds: float, workers: int) -> None:
    with null_server("--ttft", "10ms", "--itl", "5ms") as url:
        found = load(url, round(rate * seconds), rate=rate, slots=None, tokens=16, workers=workers)
    lags = [abs(one.sent_ns - one.due_ns) * 1e-6 for one in found.finished]
    ok = sum(one.status == "ok" for one in found.finished)
    print(
        f"{rate:g} requests/s for {seconds:g} s: {ok} ok of {len(found.finished)}; send error p50 "
        f"{percentile(lags, 0.5):.2f} ms, p99 {percentile(lags, 0.99):.2f} ms, max {max(lags):.2f} ms; "
        f"client {found.cpu_s:.1f} CPU-s ({found.run_cpu_s / found.run_s:.0%} of a CPU), "
        f"{found.max_rss_bytes / 1e6:.0f} MB; load average {os.getloadavg()[0]:.1f}"
    )


def peak(options: argparse.Namespace) -> None:
    """Requests per client CPU second: of the whole tool, and of each further request (its start-up left out)."""
    with null_server() as url:
        for workers in (1, 2):
            found = load(url, options.requests, rate=None, slots=32, tokens=options.tokens, workers=workers)
            ok = sum(one.status == "ok" for one in found.finished)
            print(
                f"load generator alone, {workers} worker{'s' * (workers > 1)}: {ok / found.run_s:.0f} requests/s, "
                f"{ok / found.run_cpu_s:.0f} per CPU-s of the run"
            )
        whole: dict[str, float] = {}
        further: dict[str, float] = {}
        few, many = max(50, options.requests // 10), options.requests
        for name in [name for name, _, _ in commands(options, url, many)]:
            cpu: list[tuple[int, float]] = []
            for count in (few, many):
                _, command, environment = next(one for one in commands(options, url, count) if one[0] == name)
                before = served(url)
                cpu_s, wall_s, code = timed(command, environment)
                done = served(url) - before
                print(f"{name}: exit {code}, {done} requests served, {wall_s:.1f} s, {cpu_s:.2f} CPU-s")
                cpu.append((done, cpu_s))
            (less, little_s), (more, much_s) = cpu
            if more > less:
                whole[name] = more / much_s
                further[name] = (more - less) / max(much_s - little_s, 1e-3)
    for title, rates in (("start-up included", whole), ("start-up left out", further)):
        best = max((rate for name, rate in rates.items() if name != "kvbench replay"), default=None)
        told = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        ratio = f"; kvbench / best peer: {rates['kvbench replay'] / best:.1f}" if best else ""
        print(f"requests per client CPU-s, {title}: {told}{ratio}")


def served(url: str) -> int:
    """Requests that the server has answered well so far, by its own count."""
    from kvbench.engines.http_calls import call
    from kvbench.engines.metrics_text import read_metrics

    page = read_metrics(call(url, "/metrics").text)
    return round(page.total("kvbench:e2e_request_latency_seconds_count") or 0)


def commands(
    options: argparse.Namespace, url: str, requests: int
) -> Iterator[tuple[str, list[str], dict[str, str | None]]]:
    """Name, command line and environment of each tool for the same work: 64 tokens in, 32 requests at a time."""
    workload = Path(tempfile.mkdtemp()) / "peak.yaml"
    workload.write_text(
        "version: 1\nwhy: x\nshape: x\nseed: 1\n"
        f"requests: {requests}\narrival: {{process: closed, concurrency: 32}}\n"
        "shared_prefix: {groups: 1, popularity: uniform, prefix_tokens: 32, unique_tokens: 32, "
        f"output_tokens: {options.tokens}}}\n"
    )
    ours = [sys.executable, "-m", "kvbench", "replay", str(workload), "--engine", url, "--pairs", "1"]
    yield "kvbench replay", [*ours, "--cache", "as-is", "-q", "--scrape-every", "0s"], {}
    for name, command in peer_commands(options, url, requests):
        # aiperf refuses a local tokenizer when the hub is offline, so its hub is a port where nobody listens.
        offline = {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:9"}
        yield name, command, offline if name == "aiperf" else {"HF_HUB_OFFLINE": "1"}


def peer_commands(options: argparse.Namespace, url: str, requests: int) -> Iterator[tuple[str, list[str]]]:
    n, tokens, tokenizer = str(requests), str(options.tokens), options.tokenizer
    if options.vllm:
        yield "vllm bench serve", [
            options.vllm, "bench", "serve", "--backend", "vllm", "--base-url", url, "--endpoint", "/v1/completions",
            "--model", "null", "--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "64",
            "--random-output-len", tokens, "--num-prompts", n, "--max-concurrency", "32", "--ignore-eos",
        ]  # fmt: skip
    if options.guidellm:
        data = json.dumps({"kind": "synthetic_text", "prompt_tokens": 64, "output_tokens": options.tokens})
        yield "guidellm", [
            options.guidellm, "run",
            "--backend", json.dumps(
                {"kind": "openai_http", "target": url, "model": "null", "request_format": "/v1/completions"}
            ),
            "--profile", "kind=concurrent,streams=32", "--constraint", f"kind=max_requests,count={n}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer}", "--data", data, "--disable-progress",
        ]  # fmt: skip
    if options.aiperf:
        yield "aiperf", [
            options.aiperf, "profile", "--model", "null", "--url", url, "--endpoint-type", "completions", "--streaming",
            "--tokenizer", tokenizer, "--isl", "64", "--isl-stddev", "0", "--osl", tokens, "--osl-stddev", "0",
            "--extra-inputs", "ignore_eos:true", "--concurrency", "32", "--request-count", n,
            "--use-server-token-count",
            "--ui", "none", "--output-artifact-dir", tempfile.mkdtemp(),
        ]  # fmt: skip


def agree(options: argparse.Namespace) -> None:
    from kvbench.engines.url import detect

    model = detect(options.url).model
    medians: dict[str, list[float]] = {"kvbench": [], "vllm bench serve": []}
    for turn in range(options.turns):
        with tempfile.TemporaryDirectory() as folder:
            vllm = [
                options.vllm, "bench", "serve", "--backend", "vllm", "--base-url", options.url, "--endpoint",
                "/v1/completions", "--model", model, "--tokenizer", options.tokenizer, "--dataset-name",
                "prefix_repetition", "--prefix-repetition-prefix-len", "1024", "--prefix-repetition-suffix-len", "100",
                "--prefix-repetition-num-prefixes", "1", "--prefix-repetition-output-len", "32", "--num-prompts", "50",
                "--max-concurrency", "4", "--ignore-eos", "--temperature", "0", "--seed", str(7 + turn),
                "--save-result", "--result-dir", folder, "--result-filename", "vllm.json",
            ]  # fmt: skip
            ours = [
                sys.executable, "-m", "kvbench", "replay", "shared-prefix-1024", "--engine", options.url, "--cache",
                "as-is", "--pairs", "1", "--seed", str(100 + turn), "-q", "--save-vllm-json", folder,
            ]  # fmt: skip
            runs = [("kvbench", ours), ("vllm bench serve", vllm)]
            for name, command in runs if turn % 2 == 0 else reversed(runs):
                before = set(Path(folder).glob("*.json"))
                cpu_s, wall_s, code = timed(command)
                (saved,) = set(Path(folder).glob("*.json")) - before
                median_ms = json.loads(saved.read_text())["median_ttft_ms"]
                medians[name].append(median_ms)
                print(f"{name}: exit {code}, median TTFT {median_ms:.1f} ms, {cpu_s:.1f} CPU-s, {wall_s:.1f} s")
    ours_ms, theirs_ms = (percentile(values, 0.5) for values in medians.values())
    print(f"kvbench / vllm bench serve: {ours_ms / theirs_ms:.3f}")


def timed(command: Sequence[str], environment: Mapping[str, str | None] = NOTHING) -> tuple[float, float, int]:
    """CPU seconds of a child with all its children, wall seconds, exit code; what it said where it failed."""
    variables = {**os.environ, **{name: value for name, value in environment.items() if value is not None}}
    for name, value in environment.items():
        if value is None:
            variables.pop(name, None)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    # In a folder of its own: some tools write their results where they stand.
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            timeout=600,
            check=False,
            env=variables,
            cwd=folder,
        )
        if done.returncode not in (0, 3):
            said.seek(0)
            print(said.read().decode(errors="replace")[-1500:])
    _reap_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, time.monotonic() - started, done.returncode


def _adopt_orphans() -> None:
    """Processes that a tool leaves behind become ours, so that their CPU time is counted, too."""
    ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)


def _reap_orphans() -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        mine = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if len(mine) <= _SERVERS:
            return
        time.sleep(0.05)


def small() -> None:
    with null_server("--ttft", "20ms", "--itl", "1ms") as url, tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "replay.json")
        command = [sys.executable, "-m", "kvbench", "replay", "shared-prefix-1024", "--engine", url, "--pairs", "1"]
        print(shlex.join(command))
        cpu_s, wall_s, code = timed([*command, "--cache", "as-is", "-q", "--out", out])
        worker = json.loads(Path(out).read_text())["result"]["runs"][0]["client"]
    parent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000
    print(
        f"exit {code}: {cpu_s:.2f} CPU-s, {wall_s:.1f} s; largest process {parent:.0f} MB, "
        f"worker {worker['max_rss_bytes'] / 1e6:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lateness", "peak", "agree", "small"])
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=16)
    for peer in ("vllm", "guidellm", "aiperf", "tokenizer"):
        parser.add_argument(f"--{peer}", default=os.environ.get(f"KVBENCH_{peer.upper()}"))
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    _adopt_orphans()
    if options.what == "lateness":
        lateness(options.rate, options.seconds, options.workers)
    elif options.what == "peak":
        peak(options)
    elif options.what == "agree":
        agree(options)
    else:
        small()


if __name__ == "__main__":
    main()
