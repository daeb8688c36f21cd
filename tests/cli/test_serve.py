import socket
from pathlib import Path

import pytest

from kvbench.cli.exit_codes import ExitCode
from kvbench.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "name a model to serve, such as demo, or --null"),
        (["demo", "--null"], 2, "--null serves no model, but 'demo' was named"),
        (["demo", "--ttft", "1ms"], 2, "--ttft and --itl go only with --null"),
        (["--null", "--itl", "5"], 2, "duration '5'"),
        (["--null", "--dialect", "tgi"], 2, "there is no dialect 'tgi'; choose one of native, vllm, sglang"),
        (["--null", "--trap", "no-dev-mode"], 2, "dialect native has no trap 'no-dev-mode'"),
        (["--null", "--tier", "tape:1"], 2, "tier 'tape:1' has no known scheme"),
        (["--null", "--tier", "dram:1MiB", "--policy", "lazy"], 2, "there is no write policy 'lazy'"),
        (["--null", "--tier", "dram:1MiB", "--l1", "64M"], 2, "did you mean 64MiB"),
        (["--null", "--seed", "3"], 2, "--seed has no effect with --null"),
        (["--null", "--ttl", "1min"], 2, "--ttl has no effect without tiers"),
        (["--null", "--tier", "dram:1MiB", "--eviction", "fifo"], 2, "there is no eviction 'fifo'"),
        (["--null", "--tier", "dram:1MiB", "--metadata", "sqlite:/x.db"], 2, "no tier is one that several servers"),
        (["--null", "--admin-key", "k"], 2, "--admin-key goes with --dialect sglang alone"),
        (["nosuch", "--port", "0"], 2, "shipped shapes are demo, demo-mla, demo-window, demo-hybrid"),
        (["--null", "--faults", "/nowhere.yaml"], 1, "/nowhere.yaml: cannot be read"),
        (["--null", "--ready-file", "/nowhere/ready"], 2, "there is no folder /nowhere"),
        (["--null", "--port", "70000"], 2, "less than or equal to 65535"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--null", "--port", str(port)]) == ExitCode.FAILED
    assert f"cannot listen on 127.0.0.1:{port}: " in capsys.readouterr().err


def test_help_shows_an_example_and_the_page_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == ExitCode.OK
    assert "Example: kvbench serve demo --l1 64MiB" in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    options = (
        "--l1",
        "--tier",
        "--policy",
        "--load-timeout",
        "--eviction",
        "--cooldown",
        "--ttl",
        "--spans",
        "--metadata",
        "--admin-key",
        "--page-tokens",
        "--device",
        "--dtype",
        "--seed",
        "--split",
    )
    more = ("--max-running", "--max-waiting", "--prefill-tokens", "--ttft", "--itl", "--faults", "--dialect", "--trap")
    assert all(f"`{option}" in page for option in (*options, *more, "--ready-file", "--max-body", "--grace"))
