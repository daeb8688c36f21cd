import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.core.errors import KvbenchError
from kvbench.core.provenance import Origin, Warning_
from kvbench.results.codec import from_json, read_document, to_json, write_document, write_text
from kvbench.results.document import Document
from kvbench.results.host import Gpu, Host
from kvbench.results.host_paths import HostPaths, Limit, LimitName, MeasuredPath, TransferSample

text = st.text(max_size=20)
number = st.floats(min_value=1e-300, max_value=1e300)
origins = st.builds(
    Origin,
    provenance=st.sampled_from(["spec", "modelled", "measured", "synthetic"]),
    source=text,
    formula=st.none() | text,
)
warnings = st.builds(Warning_, code=text, message=text, remedy=text)
paths = st.builds(
    MeasuredPath,
    tier=text,
    spec=text,
    direction=st.sampled_from(["load", "store"]),
    source=text,
    destination=text,
    fixed_s=number,
    bytes_per_s=number,
    residual_ratio=st.floats(allow_nan=False, allow_infinity=False),
    concurrency=st.integers(min_value=1, max_value=2**70),
    samples=st.lists(st.builds(TransferSample, bytes=st.integers(), seconds=number), max_size=3).map(tuple),
    cold=st.none() | st.booleans(),
    cold_evidence=text,
    warnings=st.lists(warnings, max_size=2).map(tuple),
)
limits = st.builds(Limit, name=st.sampled_from(get_args(LimitName)), value=number, origin=origins)
hosts = st.builds(
    Host,
    cpu=text,
    num_cpus=st.integers(min_value=1),
    memory_bytes=st.none() | st.integers(min_value=0),
    os=text,
    python=text,
    gpus=st.lists(st.builds(Gpu, name=text, memory_bytes=st.integers(min_value=0), driver=text), max_size=2).map(tuple),
    no_gpu_reason=st.none() | text,
)
documents: st.SearchStrategy[Document[HostPaths]] = st.builds(
    Document,
    kind=st.just("host-paths"),
    schema_version=st.just(1),
    kvbench_version=text,
    created_at=text,
    host=hosts,
    command_line=st.lists(text, max_size=3).map(tuple),
    interrupted=st.booleans(),
    warnings=st.lists(warnings, max_size=2).map(tuple),
    provenance=st.dictionaries(text, origins, max_size=2),
    result=st.builds(
        HostPaths, paths=st.lists(paths, max_size=2).map(tuple), limits=st.lists(limits, max_size=2).map(tuple)
    ),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(documents)
def test_a_document_reads_back_as_it_was(document: Document[HostPaths]) -> None:
    written = to_json(document)
    again = from_json(written, source="f.json")
    assert again == document
    assert to_json(again) == written
    json.loads(written)


@settings(max_examples=200)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_junk_is_refused_in_one_line_with_the_file(junk: bytes | str) -> None:
    with pytest.raises(KvbenchError, match=r"^junk\.json"):
        from_json(junk, source="junk.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_result_with_any_value_replaced_is_read_or_refused(
    host_paths: Document[HostPaths], data: st.DataObject
) -> None:
    body = json.loads(to_json(host_paths))
    where: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else list(range(len(where)))))
        if not (isinstance(where[key], dict | list) and where[key]) or data.draw(st.booleans()):
            break
        where = where[key]
    where[key] = data.draw(json_values)
    try:
        to_json(from_json(json.dumps(body), source="edited.json"))
    except KvbenchError as error:
        assert str(error).startswith("edited.json")


def test_a_truncated_file_is_refused_at_its_line(host_paths: Document[HostPaths]) -> None:
    written = to_json(host_paths)
    for cut in range(1, len(written) - 2, 97):
        with pytest.raises(KvbenchError, match=r"f\.json:\d+: not readable as JSON .* name a complete file"):
            from_json(written[:cut], source="f.json")


def test_an_unknown_kind_is_refused_by_name_and_lists_the_known_ones(host_paths: Document[HostPaths]) -> None:
    written = to_json(host_paths).replace('"kind": "host-paths"', '"kind": "horoscope"')
    with pytest.raises(KvbenchError, match=r"f\.json: kind 'horoscope' .*host-paths.*load-vs-recompute"):
        from_json(written, source="f.json")


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_schema_version_is_refused_by_number(host_paths: Document[HostPaths], version: int) -> None:
    written = to_json(host_paths).replace('"schema_version": 1', f'"schema_version": {version}')
    with pytest.raises(KvbenchError, match=rf"schema_version {version} of kind 'host-paths' cannot be read"):
        from_json(written, source="f.json")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"kind": "host-paths",', "", "key 'kind' is missing"),
        ('"kind": "host-paths"', '"kind": 3', "key 'kind' is 3, not str"),
        ('"schema_version": 1', '"schema_version": "1"', "key 'schema_version' is '1', not int"),
        ('"concurrency": 1', '"concurrency": "1"', r"key 'result\.paths\.0\.concurrency' is '1'"),
        ('"direction": "load"', '"direction": "up"', r"key 'result\.paths\.0\.direction' is 'up'"),
        ('"tier": "dram"', '"tear": "dram"', r"key 'result\.paths\.0\.tier' is missing"),
        ('"interrupted": false', '"interrupted": 0', "key 'interrupted' is 0"),
        ('"concurrency": 1', '"concurrency": 0', "path of tier 'dram': concurrency is 0"),
        ('"bytes_per_s": 8000000000.0', '"bytes_per_s": 1e999', "1e999 is beyond"),
        ('"bytes_per_s": 8000000000.0', '"bytes_per_s": NaN', "NaN is not a JSON number"),
        ('"bytes_per_s": 8000000000.0', '"bytes_per_s": -1.0', r"bytes_per_s is -1\.0, which cannot be"),
        ('"name": "host_total"', '"name": "mood"', r"result\.limits\.0\.name"),
    ],
)
def test_a_wrong_field_is_refused_by_its_key(host_paths: Document[HostPaths], old: str, new: str, message: str) -> None:
    written = to_json(host_paths)
    assert old in written
    with pytest.raises(KvbenchError, match=rf"^f\.json.*{message}") as refused:
        from_json(written.replace(old, new, 1), source="f.json")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("body", ["[]", "3", '"text"', "null", "[" * 100_000])
def test_json_that_is_no_object_is_refused(body: str) -> None:
    with pytest.raises(KvbenchError, match=r"^f\.json"):
        from_json(body, source="f.json")


def test_an_unknown_key_is_ignored_because_a_new_field_is_no_breaking_change(host_paths: Document[HostPaths]) -> None:
    written = to_json(host_paths).replace('"tier": "dram"', '"tier": "dram", "colour": "red"')
    assert from_json(written, source="f.json") == host_paths


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused_by_its_key(host_paths: Document[HostPaths], value: float) -> None:
    limit = replace(host_paths.result.limits[0])
    object.__setattr__(limit, "value", value)
    broken = replace(host_paths, result=replace(host_paths.result, limits=(limit,)))
    with pytest.raises(KvbenchError, match=r"document\.result\.limits\[0\]\.value is -?(nan|inf)"):
        to_json(broken)


def test_paths_are_written_as_text_and_unknown_types_are_bugs(host_paths: Document[HostPaths]) -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Odd:
        KIND: ClassVar[str] = "odd"
        SCHEMA_VERSION: ClassVar[int] = 1
        value: object

    written = to_json(replace(host_paths, result=Odd(value=Path("a/b"))))  # type: ignore[arg-type]
    assert json.loads(written)["result"] == {"value": "a/b"}
    with pytest.raises(TypeError, match=r"document\.result\.value is a complex"):
        to_json(replace(host_paths, result=Odd(value=1j)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"document\.result\.value is a dict"):
        to_json(replace(host_paths, result=Odd(value={1: 2})))  # type: ignore[arg-type]


def test_a_thousand_points_of_eighty_numbers_encode_quickly(host_paths: Document[HostPaths]) -> None:
    point = make_dataclass("Point", [(f"f{index}", float) for index in range(80)], frozen=True, slots=True)
    body = make_dataclass("Body", [("points", tuple)], frozen=True, slots=True)
    points = tuple(point(*(row + column / 7 for column in range(80))) for row in range(1000))
    document = replace(host_paths, result=body(points))
    to_json(host_paths)  # imports
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        to_json(document)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.2


def test_a_document_is_saved_and_read(host_paths: Document[HostPaths], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_document(host_paths, path)
    write_document(host_paths, path)
    assert read_document(path) == host_paths
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_a_symbolic_link_stays_a_link(host_paths: Document[HostPaths], tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    write_document(host_paths, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert read_document(tmp_path / "real.json") == host_paths


@pytest.mark.parametrize("where", ["missing/result.json", "."])
def test_a_file_that_cannot_be_written_is_an_expected_failure(
    host_paths: Document[HostPaths], tmp_path: Path, where: str
) -> None:
    with pytest.raises(KvbenchError, match="cannot be written"):
        write_document(host_paths, tmp_path / where)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_an_expected_failure() -> None:
    with pytest.raises(KvbenchError, match=r"/dev/full: cannot be written \(No space left on device\)"):
        write_text("text", Path("/dev/full"))


def test_a_failed_write_leaves_the_old_file(host_paths: Document[HostPaths], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    with pytest.raises(KvbenchError):
        write_document(replace(host_paths, created_at=math.nan), path)  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_file_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(KvbenchError, match=r"nothing\.json: cannot be read \(No such file or directory\)"):
        read_document(tmp_path / "nothing.json")


def test_the_file_of_schema_1_stays_readable() -> None:
    document = read_document(Path(__file__).parents[1] / "data" / "host-paths" / "v1.json")
    assert document.result.paths[0].bytes_per_s > 0


def test_every_field_of_the_envelope_is_in_the_file(
    new_host_paths: Callable[..., Document[HostPaths]],
) -> None:
    document = new_host_paths(interrupted=True)
    assert list(json.loads(to_json(document))) == [field.name for field in fields(Document)]
    assert from_json(to_json(document), source="f").interrupted
