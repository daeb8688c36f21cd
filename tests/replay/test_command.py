import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.cli.main import main
from kvbench.results.codec import read_document
from tests.replay.serving import Served, null_server

SMALL = ("demo", "--scale", "0.1", "--limit", "8", "--scrape-every", "0.2s")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with null_server(tmp_path_factory.mktemp("null"), "--ttft", "10ms", "--itl", "1ms") as served:
        yield served


def test_a_page_a_document_and_vllms_own_keys_come_out_of_one_command(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, html, folder = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "vllm"
    arms = ("--arm", f"a={server.url}", "--arm", f"b={server.url}")
    files = ("--out", str(out), "--html", str(html), "--save-vllm-json", str(folder), "--slo", "ttft=1s")
    assert main(["replay", *SMALL, *arms, *files, "--pairs", "2", "-q"]) in (0, 3)
    printed = capsys.readouterr().out
    assert "Paired comparison" in printed
    saved = read_document(out).result
    assert [run.arm for run in saved.runs] == ["a", "b", "b", "a"]
    page = html.read_text()
    assert page.count("<svg") == 3
    assert "http://" not in page.split("<body>")[0]
    vllm = json.loads((folder / "a.json").read_text())
    assert vllm["completed"] == 16
    assert len(vllm["ttfts"]) == 16
    assert vllm["total_output_tokens"] == sum(vllm["output_lens"])
    assert vllm["median_ttft_ms"] == pytest.approx(sorted(vllm["ttfts"])[8] * 1e3, rel=0.2)
    assert main(["report", str(out)]) == 0
    assert "What reuse did the tier add?" in capsys.readouterr().out


def test_a_full_disk_loses_no_result(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", *SMALL, "--engine", server.url, "--pairs", "1", "--out", "/dev/full"]) == 1
    told = capsys.readouterr()
    assert "No space left on device" in told.err
    rescued = Path(told.err.split("the result is in ")[1].split(" instead")[0])
    try:
        assert len(read_document(rescued).result.runs[0].finished) == 8
    finally:
        rescued.unlink()
    assert "one arm, so nothing is compared" in " ".join(told.out.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_replay_keeps_finished_requests_and_stops_its_servers(tmp_path: Path, number: int) -> None:
    out = tmp_path / "r.json"
    command = [sys.executable, "-m", "kvbench", "replay", *SMALL, "--model", "null", "--arm", "l1=1MiB+l2=64MiB"]
    slow = ["--engine-arg=--itl", "--engine-arg=900ms", "--concurrency", "1"]
    process = subprocess.Popen(
        [*command, *slow, "--pairs", "1", "--out", str(out), "--work-dir", str(tmp_path / "work")],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if ": 2/8" in line or ": 3/8" in line or ": 4/8" in line:
            break
    process.send_signal(number)
    assert process.wait(60) == 1
    process.stderr.close()
    saved = read_document(out)
    assert saved.interrupted
    assert 2 <= len(saved.result.runs[0].finished) < 8
    assert not listening(saved.result.arms[0].url)


def listening(url: str) -> bool:
    import socket

    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(("127.0.0.1", int(url.strip().rpartition(":")[2]))) == 0


def test_a_dry_run_prints_commands_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert main(["replay", "demo", "--arm", "off", "--arm", "l1=8MiB+l2=1GiB+l3=/mnt/kv", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "kvbench serve demo --host 127.0.0.1 --port 0 --l1 8MiB --tier dram:1GiB --tier file:/mnt/kv" in told
    assert "--l1 0" in told
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("tool", ["vllm", "guidellm", "aiperf", "inference-perf"])
def test_a_workload_can_be_run_by_another_tool(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["replay", "shared-prefix-1024", "--export", tool, "--model", "m"]) == 0
    assert tool.split("-", maxsplit=1)[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--concurrency", "2"], "give one of them"),
        (["--engine", "nope"], "not one of"),
        (["--engine", "http://127.0.0.1:9", "--arm", "l1"], "name each server"),
        (["--slo", "ttl=3s"], "write it like ttft=500ms"),
        (["--arm", "l9"], "arms are spelled like"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", "demo", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_an_address_without_a_server_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "demo", "--engine", "http://127.0.0.1:9", "-q"]) == 1
    assert "is an OpenAI-compatible server running there?" in capsys.readouterr().err


def test_the_list_tells_why_each_workload_exists(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--list"]) == 0
    assert "demo " in capsys.readouterr().out


def test_traces_replay_as_they_were_recorded(server: Served, tmp_path: Path) -> None:
    trace = Path(__file__).parents[2] / "workloads" / "traces" / "mooncake-conversation-500.jsonl.gz"
    out = tmp_path / "r.json"
    arguments = ["--limit", "20", "--speedup", "20", "--max-prompt-tokens", "2048", "--max-output-tokens", "4"]
    assert (
        main(["replay", str(trace), "--engine", server.url, *arguments, "--pairs", "1", "-q", "--out", str(out)]) == 0
    )
    result = read_document(out).result
    assert (result.loop, len(result.runs[0].finished)) == ("open", 20)
    assert all(one.prompt_tokens == one.planned_tokens for one in result.runs[0].finished)
