"""TTFT of the built-in engine for a prefix: recomputed, and loaded from hbm, dram and file; beside it the prediction.

    python tests/live/bench_builtin_ttft.py
    python tests/live/bench_builtin_ttft.py --model demo-mla --suffix 64 --page-tokens 64 --directory /var/tmp

The prediction is that of `kvbench load-vs-recompute --measure` on this host and shape: recompute from the fit of real
prefills, a load as fixed + bytes / B, and the suffix on top. It knows one contiguous copy per load, and no page: where
the engine is more than 25 % away from it, its own parts are printed as the reason. Bytes moved are checked to be
tokens × bytes per token exactly. A file is read with O_DIRECT, so from the device and not from the page cache.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.engines.builtin.models import SHAPES, load_model
from kvbench.engines.builtin.runner import ModelInfo, ModelRunner, make_runner
from kvbench.tiers.registry import open_tier
from kvbench.tiers.tiered import LoadResult, TieredStore, TierSettings

ROOT = Path(__file__).parents[2]
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
CLOSE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What load-vs-recompute measured: prefill seconds by tokens, and (fixed, bytes/s) by tier."""

    prefill_s: Mapping[int, float]
    tiers: Mapping[str, tuple[float, float]]


def predict(model: str, tokens: int, suffix: int, dtype: str, directory: Path) -> Prediction:
    """Runs `kvbench load-vs-recompute --measure` on the same shape and dtype."""
    import yaml

    config = dict(SHAPES[model])
    config |= {"architectures": [ARCHITECTURES[str(config["model_type"])]], "torch_dtype": dtype}
    plan = yaml.safe_load((ROOT / "probes" / "measure.yaml").read_text(encoding="utf-8"))
    plan["prefill"]["dtype"] = dtype
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (Path(folder) / "plan.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "kvbench",
            "load-vs-recompute",
            f"{folder}/config.json",
            "--measure",
            "--quiet",
        ]
        command += ["--plan", f"{folder}/plan.yaml", "--json", "--tokens", f"{suffix},{tokens},{tokens + suffix}"]
        command += ["--tier", "dram:256MiB", "--tier", f"file:{directory}?size=256MiB"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    if done.returncode not in (0, 3):
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout)["result"]
    return Prediction(
        prefill_s={point["tokens"]: point["t_recompute_s"] for point in result["points"]},
        tiers={path["tier"]: (path["fixed_s"], path["bytes_per_s"]) for path in result["measured_paths"]},
    )


class Timed(TieredStore):
    """The store, noting how long its last loads took."""

    load_s = 0.0

    def load(self, *args: Any, **kwargs: Any) -> LoadResult:
        result = super().load(*args, **kwargs)
        self.load_s = max(self.load_s, result.seconds)
        return result


def ttft(runner: ModelRunner, prompt: list[int], *, load: bool, store: bool) -> tuple[float, int, int]:
    """Seconds to the first token, bytes loaded, tokens cached."""
    begin = time.perf_counter()
    sequence = runner.start(prompt, load=load, store=store, max_tokens=1, ignore_eos=True)
    while not runner.prefill_step(sequence, len(prompt)):
        pass
    seconds = time.perf_counter() - begin
    runner.finish(sequence)
    return seconds, sequence.loaded_bytes, sequence.cached_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", choices=["demo", "demo-mla", "demo-window"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--suffix", type=int, default=16)
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--no-prediction", action="store_true")
    options = parser.parse_args()
    predicted = None
    if not options.no_prediction:
        predicted = predict(options.model, options.tokens, options.suffix, options.dtype, options.directory)
    began = time.perf_counter()
    model = load_model(options.model, device="cpu", dtype=options.dtype)
    stores: list[Timed] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:

        def open_store(info: ModelInfo) -> TieredStore:
            specs = ("hbm:64MiB", "dram:64MiB", f"file:{folder}?size=64MiB&direct=1")
            tiers = [open_tier(spec, block_bytes=info.block_bytes) for spec in specs]
            stores.append(Timed([TierSettings(tier=tier, promote=False) for tier in tiers]))
            return stores[0]

        runner = make_runner(model, open_store=open_store, page_tokens=options.page_tokens)
        print(f"{options.model}: ready after {time.perf_counter() - began:.2f} s (loading torch included)")
        measure(runner, stores[0], options, predicted)
        runner.close()
        stores[0].close()


def measure(runner: ModelRunner, store: Timed, options: argparse.Namespace, predicted: Prediction | None) -> None:
    """Prints a row per source of the prefix."""
    prompt = random.Random(0).choices(range(256), k=options.tokens + options.suffix)
    ttft(runner, prompt, load=False, store=True)
    runner.settle()
    if not store.flush(60):
        raise SystemExit("the stores did not end within 60 s")
    suffix_s = statistics.median(
        ttft(runner, prompt[: options.suffix], load=False, store=False)[0] for _ in range(options.repeats)
    )
    info = runner.info
    print(
        f"{info.kv_bytes_per_token} bytes per token, page of {info.page_tokens} tokens, {info.dtype} on {info.device}"
    )
    print(f"{'source':10} {'TTFT':>9} {'min':>9} {'max':>9} {'bytes moved':>12} {'predicted':>10} {'off by':>7}")
    for source in ("recompute", *store.tiers):
        for name in store.tiers:
            store.set_enabled(name, name == source)
        runs, loads = [], []
        for _ in range(options.repeats):
            store.load_s = 0.0
            runs.append(ttft(runner, prompt, load=source != "recompute", store=False))
            loads.append(store.load_s)
        seconds = [run[0] for run in runs]
        median = statistics.median(seconds)
        cached, moved = runs[-1][2], runs[-1][1]
        expected = 0 if source == "recompute" else options.tokens // info.page_tokens * info.page_tokens
        if cached != expected or any(run[1] != info.prefix_bytes(expected) for run in runs):
            raise SystemExit(
                f"{source}: {cached} tokens and {moved} bytes, not {expected} and {info.prefix_bytes(expected)}"
            )
        guess = None if predicted is None else guessed_s(source, moved, predicted, options)
        off = "" if guess is None else f"{median / guess - 1:+7.0%}"
        shown = "" if guess is None else f"{guess * 1e3:8.2f}ms"
        print(
            f"{source:10} {median * 1e3:7.2f}ms {min(seconds) * 1e3:7.2f}ms {max(seconds) * 1e3:7.2f}ms"
            f" {moved:12} {shown:>10} {off:>7}"
        )
        if guess is not None and abs(median / guess - 1) > CLOSE:
            blocks = sum(len(group.pages_for_prefix(expected // info.page_tokens)) for group in info.layout.groups)
            load_s = statistics.median(loads)
            rest_s = median - load_s - (suffix_s if expected else 0)
            print(
                f"           reason: {blocks} blocks took {load_s * 1e3:.2f} ms in the store, a prefill of"
                f" {options.suffix} tokens alone {suffix_s * 1e3:.2f} ms, look-up, installing, attending to the prefix"
                f" {rest_s * 1e3:.2f} ms"
                if expected
                else "           reason: the prefill itself differs from the fit of few layers; see its warnings"
            )


def guessed_s(source: str, moved: int, predicted: Prediction, options: argparse.Namespace) -> float:
    """TTFT by the measured model. An `hbm` without a GPU is host memory, so it has the figures of `dram`."""
    if source == "recompute":
        return predicted.prefill_s[options.tokens + options.suffix]
    fixed_s, bytes_per_s = predicted.tiers["dram" if source == "hbm" else source]
    # a forward has a cost of its own, which the difference of two prefills does not show
    whole_s, prefix_s = (predicted.prefill_s[count] for count in (options.tokens + options.suffix, options.tokens))
    return fixed_s + moved / bytes_per_s + max(whole_s - prefix_s, predicted.prefill_s[options.suffix])


if __name__ == "__main__":
    main()
