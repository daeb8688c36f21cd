import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.engines.builtin.generation import Engine
from kvbench.engines.builtin.null_runner import NullRunner, NullSequence
from kvbench.engines.builtin.scheduler import Scheduler, SchedulerLimits
from kvbench.engines.builtin.server import ServerSettings, serve
from kvbench.engines.builtin.tier_store import ServedTiers


class BreakingRunner(NullRunner):
    """Runs until the third token of any request."""

    def decode_step(self, sequences: Sequence[NullSequence]) -> None:
        if any(len(sequence.output_ids) == 2 for sequence in sequences):
            raise ZeroDivisionError("a bug in the model")
        super().decode_step(sequences)


def make(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Engine:
    limits = SchedulerLimits(max_running=1)
    return Scheduler(BreakingRunner(None), ServedTiers(None), limits=limits, loop=loop, on_death=on_death)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_the_compute_thread_ends_the_server_and_every_request(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    answers: list[int] = []
    message = ""

    def ask() -> None:
        nonlocal message
        deadline = time.monotonic() + 20
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        body = json.dumps({"prompt": "x", "max_tokens": 9, "temperature": 0}).encode()
        try:
            with urllib.request.urlopen(f"{ready.read_text().strip()}/v1/completions", body, timeout=20) as answer:
                answers.append(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                answers.append(error.code)
                message = json.loads(error.read())["error"]["message"]

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    with pytest.raises(KvbenchError, match="the thread that computes has failed"):
        serve(make, ServerSettings(ready_file=ready, quiet=True, grace_s=1.0))
    for client in clients:
        client.join(20)
    # a request that came after the end of the engine was refused, or met a closed door
    assert answers
    assert set(answers) <= {500, 503}
    assert "fail" in message or "stop" in message
