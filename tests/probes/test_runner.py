import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbench.probes.runner import ChildRun, run_child


def child_that(code: str) -> Sequence[str]:
    return (sys.executable, "-c", "import json, os, signal, sys, time\n" + textwrap.dedent(code))


def run(code: str, case: dict[str, Any] | None = None, timeout_s: float = 30) -> ChildRun:
    return run_child(case or {}, timeout_s=timeout_s, command=child_that(code))


SAMPLE = '{"record": "sample", "bytes": 4096, "seconds": 0.5}'


def test_records_arrive_in_order_and_stages_are_told_at_once() -> None:
    told: list[str] = []
    case = {"padding": "x" * 1_000_000}  # far more than a pipe holds
    result = run_child(
        case,
        timeout_s=30,
        on_stage=told.append,
        command=child_that(f"""
            length = len(json.load(sys.stdin)["padding"])
            print(json.dumps({{"record": "stage", "text": f"got {{length}}"}}))
            print('{SAMPLE}')
            print('{{"record": "done"}}')
        """),
    )
    assert result.status == "ok"
    assert told == ["got 1000000"]
    assert [record["bytes"] for record in result.of_kind("sample")] == [4096]


def test_a_hanging_child_costs_its_timeout_and_keeps_its_samples() -> None:
    result = run(
        f"""
        print('{SAMPLE}', flush=True)
        print('{{"record": "stage", "text": "reading"}}', flush=True)
        time.sleep(600)
        """,
        timeout_s=1.5,
    )
    assert result.status == "failed"
    assert result.reason is not None
    assert "no end after 1.5 s, while reading" in result.reason
    assert len(result.of_kind("sample")) == 1


def test_a_child_that_never_answers_is_ended_with_its_own_children() -> None:
    result = run(
        """
        import subprocess
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(json.dumps({"record": "stage", "text": str(other.pid)}), flush=True)
        other.wait()
        """,
        timeout_s=1.5,
    )
    pid = int(result.records[0]["text"])
    for _ in range(100):  # the grandchild is reaped by init, some time after it was killed
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("the grandchild still runs")


@pytest.mark.parametrize(
    ("code", "part"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL, as the kernel does when memory runs out"),
        ("os.abort()", "ended by SIGABRT"),
        ("sys.exit('the disk is on fire')", "the disk is on fire"),
        ("raise RuntimeError('unexpected')", "RuntimeError: unexpected"),
        ("sys.exit(7)", "exit code 7 and said nothing"),
        ("print('hello')", "'hello', which is no record"),
        ("print('[1, 2]')", "no record"),
        ("print('null')", "no record"),
        ("""print('{"record": "sample", "seconds": "fast"}')""", "no record"),
        ("""print('{"record": ["stage"]}')""", "no record"),
        (r"sys.stdout.buffer.write(b'\xff\xfe\n')", "no record"),
        ("print('{\"record\": \"sam', end='')", "no record"),
    ],
)
def test_a_child_that_dies_or_babbles_costs_one_case_with_the_reason(code: str, part: str) -> None:
    result = run(code)
    assert result.status == "failed"
    assert result.reason is not None
    assert part in result.reason
    assert "\n" not in result.reason


def test_a_skipped_case_has_the_reason_of_the_child() -> None:
    result = run("""print('{"record": "skipped", "reason": "no GPU on this host"}')""")
    assert (result.status, result.reason) == ("skipped", "no GPU on this host")


def test_ctrl_c_ends_the_child_and_keeps_the_samples_so_far() -> None:
    parent = textwrap.dedent(f"""
        import json, sys
        from kvbench.probes.runner import run_child
        child = '''import time
        print({SAMPLE!r}, flush=True)
        print('{{"record": "stage", "text": "ready"}}', flush=True)
        time.sleep(600)'''
        command = (sys.executable, "-c", child)
        result = run_child({{}}, timeout_s=60, command=command, on_stage=lambda stage: print(stage, flush=True))
        print(json.dumps([result.status, result.reason, result.interrupted, len(result.of_kind("sample"))]))
    """)
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out.strip() == '["failed", "interrupted", true, 1]'
