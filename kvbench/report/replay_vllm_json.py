"""One arm of a replay with the key names of a `vllm bench serve` result, for scripts that read those."""

from statistics import fmean, median, pstdev
from typing import Any

from kvbench.core.percentiles import percentile
from kvbench.core.units import exact_ms_from_seconds
from kvbench.results.document import Document
from kvbench.results.replay import ReplayResult, RequestSample


def vllm_result(document: Document[ReplayResult], arm: str) -> dict[str, Any]:
    """The arm's runs together; times in ms where vLLM has ms. P99 is given as vLLM gives it, however few the requests.

    `ttfts` count from the intended send time (vLLM: from just before the request is sent), `itls` are per chunk.
    """
    result = document.result
    runs = [run for run in result.runs_of(arm) if run.complete]
    requests = [request for run in runs for request in run.requests]
    good = [request for request in requests if request.ok]
    summary = result.summary(arm)
    duration_s = sum(run.duration_s for run in runs)
    itls = [gap for request in good for gap in request.itls_s]
    found: dict[str, Any] = {
        "date": document.created_at,
        "backend": "kvbench",
        "model_id": next((one.model for one in result.arms if one.name == arm), ""),
        "num_prompts": len(requests),
        "request_rate": "closed loop" if result.loop == "closed" else result.arrival,
        "max_concurrency": result.concurrency,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(requests) - len(good),
        "total_input_tokens": sum(request.prompt_tokens or 0 for request in good),
        "total_output_tokens": sum(request.output_tokens or 0 for request in good),
        "request_throughput": _per_second(len(good), duration_s),
        "request_goodput": None if summary is None else summary.good_requests_per_s,
        "output_throughput": _per_second(sum(request.output_tokens or 0 for request in good), duration_s),
        "total_token_throughput": _per_second(
            sum((request.prompt_tokens or 0) + (request.output_tokens or 0) for request in good), duration_s
        ),
        "max_concurrent_requests": 0 if summary is None else summary.most_in_flight,
        "input_lens": [request.prompt_tokens for request in requests],
        "output_lens": [request.output_tokens or 0 for request in requests],
        "ttfts": [request.ttft_s or 0.0 for request in requests],
        "itls": [list(request.itls_s) for request in requests],
        "start_times": [request.sent_s for request in requests],
        "errors": [_error(request) for request in requests],
        "itl_unit": "chunk",
        "ttft_on": "first_choice",
    }
    for name, values in (
        ("ttft", [request.ttft_s for request in good]),
        ("tpot", [request.tpot_s for request in good]),
        ("itl", itls),
        ("e2el", [request.e2e_s for request in good]),
    ):
        found |= _statistics(name, [exact_ms_from_seconds(value) for value in values if value is not None])
    return found


def _per_second(count: int, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else 0.0


def _error(request: RequestSample) -> str:
    return "" if request.ok else f"{request.status}: {request.detail or ''}"


def _statistics(name: str, values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"mean_{name}_ms": fmean(values),
        f"median_{name}_ms": median(values),
        f"std_{name}_ms": pstdev(values),
        **{f"p{round(quantile * 100)}_{name}_ms": percentile(values, quantile) for quantile in (0.5, 0.9, 0.99)},
    }
