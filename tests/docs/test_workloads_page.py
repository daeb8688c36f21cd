"""What docs/workloads.md says about files, keys and formats is what the code does."""

import re
from pathlib import Path

from kvbench.workloads.traces.formats import FORMATS, trace_format
from kvbench.workloads.workload import load_workload

PAGE = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text()


def test_the_example_is_a_workload(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "w.yaml").write_text(block)
    workload = load_workload(tmp_path / "w.yaml")
    assert (workload.num_requests, workload.duration_s) == (200, 60.0)


def test_every_arrival_of_the_table_is_read(tmp_path: Path) -> None:
    arrivals = re.findall(r"^\| `(\{process: .*?\})` \|", PAGE, re.MULTILINE)
    assert len(arrivals) == 6
    traffic = "trace: {path: x.jsonl}"
    for arrival in arrivals:
        text = f"version: 1\nwhy: a\nshape: b\nrequests: 1\narrival: {arrival}\n{traffic}\n"
        (tmp_path / "w.yaml").write_text(text)
        assert load_workload(tmp_path / "w.yaml").arrival.process in arrival


def test_every_distribution_of_the_text_is_read(tmp_path: Path) -> None:
    spelled = re.findall(r"`(\{(?:uniform|exponential|lognormal|choice|mixture): .*?\})`", PAGE)
    assert len(spelled) == 5
    for one in spelled:
        key = "think" if "2s" in one else "user_tokens"
        sizes = {"user_tokens": "9", "think": "1s"} | {key: one}
        sessions = "".join(f"  {name}: {value}\n" for name, value in sizes.items())
        text = (
            "version: 1\nwhy: a\nshape: b\nrequests: 1\narrival: {process: at-once}\nsessions:\n"
            f"  system_tokens: 1\n  turns: 2\n  output_tokens: 3\n{sessions}"
        )
        (tmp_path / "w.yaml").write_text(text)
        load_workload(tmp_path / "w.yaml")


def test_every_format_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (chained|content|none)[^|]*\| (\d*)", PAGE, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(FORMATS)
    for name, kind, tokens in rows:
        assert trace_format(name).hash_kind == kind
        if tokens:
            assert trace_format(name).block_tokens == int(tokens)
