import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.errors import KvbenchError
from kvbench.workloads.plan import plan_requests
from kvbench.workloads.traces.formats import FORMATS, open_trace
from kvbench.workloads.workload import load_workload

DATA = Path(__file__).parents[1] / "data" / "workloads"
FILES = sorted(DATA.glob("*.json*")) + sorted(DATA.glob("*.csv"))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def read_or_refuse(data: bytes, format_name: str | None) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(data)
        _read_or_refuse(path, format_name)


def _read_or_refuse(path: Path, format_name: str | None) -> None:
    try:
        requests = list(open_trace(path, format_name=format_name).requests())
        assert all(one.input_tokens >= 0 and one.output_tokens >= 0 for one in requests)
        plan = plan_requests(load_workload(path, trace_format=format_name), vocab_size=300, max_prompt_tokens=2000)
        assert all(len(one.prompt) == one.prompt_tokens <= 2000 for one in plan.requests)
    except KvbenchError as refused:
        assert "\n" not in str(refused)


@settings(max_examples=150)
@given(st.sampled_from(FILES), st.data())
def test_no_damage_to_a_trace_ends_in_anything_but_a_plan_or_a_refusal(file: Path, data: st.DataObject) -> None:
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(raw)))
        kind = data.draw(st.sampled_from(["cut", "flip", "insert", "double"]))
        if kind == "cut":
            del raw[start : start + data.draw(st.integers(1, 40))]
        elif kind == "flip" and start < len(raw):
            raw[start] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            raw[start:start] = data.draw(st.binary(max_size=6))
        else:
            raw[start:start] = raw[start : start + 60]
    read_or_refuse(bytes(raw), data.draw(st.sampled_from([None, *FORMATS])))


@settings(max_examples=150)
@given(st.sampled_from([one for one in FILES if one.suffix != ".csv"]), st.data())
def test_any_value_in_place_of_another_is_read_or_refused(file: Path, data: st.DataObject) -> None:
    text = file.read_text()
    whole = file.suffix == ".json"
    rows = [json.loads(text)] if whole else [json.loads(line) for line in text.splitlines() if line]
    spots = [spot for row in rows for spot in _spots(row)]
    holder, key = data.draw(st.sampled_from(spots))
    holder[key] = data.draw(VALUES)
    read_or_refuse("\n".join(json.dumps(row) for row in rows).encode(), None)


def _spots(value: Any) -> list[tuple[Any, Any]]:
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [spot for key, inner in keys for spot in [(value, key), *_spots(inner)]]
