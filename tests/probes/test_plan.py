import re
from pathlib import Path

import pytest
import yaml

from kvbench.core.errors import KvbenchError, UsageError
from kvbench.probes.plan import load_measure_plan
from kvbench.results.data import data_folder


def test_the_plan_in_the_data_folder_is_complete() -> None:
    plan = load_measure_plan()
    assert plan.load.sizes_bytes[0] == 64 * 1024
    assert plan.prefill.check_tokens["cpu"] > max(plan.prefill.tokens["cpu"])
    assert plan.load.time_s < plan.load.timeout_s <= plan.total_s


def changed(tmp_path: Path, pattern: str, replacement: str) -> Path:
    text = (data_folder("probes") / "measure.yaml").read_text()
    text, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "plan.yaml").write_text(text)
    return tmp_path / "plan.yaml"


@pytest.mark.parametrize(
    ("pattern", "replacement", "parts"),
    [
        ("^  repeats: 15", "  repeat: 15", ("unknown key 'load.repeat'", "did you mean 'repeats'?")),
        ("^  repeats: 15", "  repeats: 0", ("'load.repeats' is 0",)),
        ("^  repeats: 15", "  repeats: true", ("'load.repeats' is True",)),
        ("^  time: 6s", "  time: 6", ("'load.time' is 6", "has no unit")),
        ("^  time: 6s", "  time: 6 parsecs", ("'load.time'", "parsecs")),
        ("64KiB, ", "64K, ", ("'load.sizes.0'", "64KiB")),
        ("64KiB, ", "1000B, ", ("'load.sizes'", "4096")),
        ("^    cpu: 4096", "    cpu: 100", ("'prefill'", "check_tokens.cpu must be larger")),
        (r"^    cpu: \[.*\]", "    cpu: [1, 2]", ("prefill.tokens.cpu",)),
        (r"^    cpu: \[", "    gpu: [", ("prefill.tokens.gpu",)),
        ("^  dtype: auto", "  dtype: fp8", ("'prefill.dtype' is 'fp8'",)),
        ("^total: .*", "", ("'total' is missing",)),
        ("^load:", "lode:", ("unknown key 'lode'", "did you mean 'load'?")),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line_with_file_and_key(
    tmp_path: Path, pattern: str, replacement: str, parts: tuple[str, ...]
) -> None:
    path = changed(tmp_path, pattern, replacement)
    with pytest.raises(UsageError) as refusal:
        load_measure_plan(path)
    message = str(refusal.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("content", [b"a: [", b"\xff\xfe\x00", b"- 1\n", b"", b"load: 3\n", b"a: &a [*a]\n"])
def test_a_file_that_is_no_plan_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(KvbenchError, match=re.escape(str(path))):
        load_measure_plan(path)


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"nowhere\.yaml: cannot be read"):
        load_measure_plan(tmp_path / "nowhere.yaml")


def test_every_plan_says_which_question_it_answers() -> None:
    for path in data_folder("probes").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["question"], path
