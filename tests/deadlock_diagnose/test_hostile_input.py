"""Input that is broken, empty, foreign or malicious: a clear answer each, in bounded time and memory."""

import gzip
import io
import json
import os
import pickle
import random
import sqlite3
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.main import main
from kvbench.core.errors import KvbenchError
from kvbench.deadlock_diagnose.diagnose import diagnose
from tests.deadlock_diagnose.programs import (
    FORMATS,
    Op,
    World,
    flight_recorder_dump,
    random_world,
    write_flight_recorder,
    write_logs,
    write_nsys,
)

REDUCE, GATHER = Op(comm=0), Op(comm=0, op="AllGather")
WORLD = World(comms=[(0, 1)], programs=[[REDUCE, GATHER], [REDUCE, REDUCE]])


class _Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def refusal(*paths: Path) -> str:
    with pytest.raises(KvbenchError) as error:
        diagnose(list(paths), jobs=1)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    victim = tmp_path / "made-by-the-pickle"
    dump = flight_recorder_dump(WORLD, 0)
    dump["entries"].append(_Touches(victim))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(dump))
    text = refusal(tmp_path / "nccl_trace_rank_0")
    assert "mkdir" in text
    assert "was not run" in text
    assert not victim.exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_dumps_of_every_pickle_protocol_are_read_and_cut_ones_refused(tmp_path: Path, protocol: int) -> None:
    for rank in range(2):
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(flight_recorder_dump(WORLD, rank), protocol=protocol))
    assert diagnose([tmp_path], jobs=1).diagnosis.status == "divergence"
    cut = tmp_path / "cut"
    cut.write_bytes((tmp_path / "trace_0").read_bytes()[:300])
    assert "not a complete pickle" in refusal(cut)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(pickle.dumps([1, 2, 3]))
    assert "not a flight-recorder dump" in refusal(tmp_path)


def test_entries_of_a_wrong_shape_are_counted(tmp_path: Path) -> None:
    dump = flight_recorder_dump(WORLD, 0)
    dump["entries"][1:1] = [None, {"profiling_name": 7}, "text"]
    (tmp_path / "trace_0").write_bytes(pickle.dumps(dump))
    (tmp_path / "trace_1").write_bytes(pickle.dumps(flight_recorder_dump(WORLD, 1)))
    found = diagnose([tmp_path], jobs=1).diagnosis
    assert found.status == "divergence"
    assert sum(one.num_damaged for one in found.files) == 3


def test_sqlite_that_is_no_database_or_not_from_nsys_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"SQLite format 3\x00" + os.urandom(4096))
    assert "not a usable sqlite database" in refusal(broken)
    text = tmp_path / "text.sqlite"
    text.write_text("not a database")
    assert "not a usable sqlite database" in refusal(text)
    foreign = tmp_path / "foreign.sqlite"
    connection = sqlite3.connect(foreign)
    connection.execute('CREATE TABLE "odd "" name" (x)')
    connection.commit()
    connection.close()
    assert "none that nsys wrote" in refusal(foreign)


def test_a_database_cut_in_half_is_refused(tmp_path: Path) -> None:
    write_nsys(WORLD, tmp_path)
    path = tmp_path / "rank0.sqlite"
    path.write_bytes(path.read_bytes()[:9000])
    (tmp_path / "rank1.sqlite").unlink()
    assert "not a usable sqlite database" in refusal(tmp_path)


def test_noise_without_lines_takes_little_memory_and_says_so(tmp_path: Path) -> None:
    block = random.Random(1).randbytes(1024 * 1024)
    with (tmp_path / "noise").open("wb") as file:
        for _ in range(64):
            file.write(block)
    started = time.monotonic()
    assert "a binary file of no known kind" in refusal(tmp_path)
    assert time.monotonic() - started < 10


def test_a_long_training_log_without_nccl_lines_is_refused_with_what_to_record(tmp_path: Path) -> None:
    line = "step {} loss 2.31 lr 1e-4 tokens/s 81234\n"
    with (tmp_path / "train.log").open("w") as file:
        for start in range(0, 400_000, 10_000):
            file.write("".join(line.format(number) for number in range(start, start + 10_000)))
    found = refusal(tmp_path)
    assert "train.log: holds no line or record of a known kind" in found
    assert "NCCL_DEBUG_SUBSYS=INIT,CALL" in found


def test_one_endless_line_of_text_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "one-line.txt").write_text("x" * 20_000_000)
    assert "one-line.txt: holds no line" in refusal(tmp_path)


def test_binary_and_empty_files_beside_good_ones_are_left_out_by_name(tmp_path: Path) -> None:
    write_logs(WORLD, tmp_path)
    (tmp_path / "core.1234").write_bytes(b"\x7fELF" + os.urandom(5000))
    (tmp_path / "empty.log").touch()
    found = diagnose([tmp_path], jobs=1)
    assert found.diagnosis.status == "divergence"
    assert {Path(one.path).name for one in found.diagnosis.files if one.refused} == {"core.1234", "empty.log"}
    assert "refused-files" in {one.code for one in found.warnings}


def test_empty_folders_and_missing_paths_are_named(tmp_path: Path) -> None:
    assert "holds no file" in refusal(tmp_path)
    assert "there is no such file" in refusal(tmp_path / "absent")
    (tmp_path / "empty").touch()
    assert "the file is empty" in refusal(tmp_path)


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "gz"])
def test_archives_are_read_by_content_and_cannot_leave_their_folder(tmp_path: Path, kind: str) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    write_logs(WORLD, logs)
    target = tmp_path / "bundle"
    names = sorted(logs.iterdir())
    if kind == "zip":
        with zipfile.ZipFile(target, "w") as archive:
            for path in names:
                archive.write(path, f"../../{path.name}")
    elif kind == "gz":
        target.write_bytes(gzip.compress(b"".join(path.read_bytes() for path in names)))
    else:
        with tarfile.open(target, "w:gz" if kind == "tar.gz" else "w") as tar:
            for path in names:
                tar.add(path, f"../../{path.name}")
            link = tarfile.TarInfo("evil")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(link)
    found = diagnose([target], jobs=1).diagnosis
    assert found.status == "divergence"
    assert all("bundle!" in one.place for one in found.causes[0].evidence)
    assert not (tmp_path.parent.parent / names[0].name).exists()


def test_damaged_archives_are_refused(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.log", "NCCL INFO " * 5000)
    (tmp_path / "bad.zip").write_bytes(packed.getvalue()[:-40])
    assert "the archive is damaged" in refusal(tmp_path)
    (tmp_path / "bad.zip").write_bytes(gzip.compress(os.urandom(100_000))[:-500])
    assert "the archive is damaged" in refusal(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"a": 1}',
        "[" * 100_000,
        '{"traceEvents": [{"args": 3}, 7, null]}',
        '{"communicators": [{"ranks": [{}]}]}',
        '{"pg_config": 3, "entries": 4}',
    ],
)
def test_broken_and_foreign_json_is_refused_or_insufficient(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    try:
        assert diagnose([tmp_path], jobs=1).diagnosis.status == "insufficient-input"
    except KvbenchError as error:
        assert "\n" not in str(error)


def test_text_that_only_looks_like_nccl_is_counted_as_damaged(tmp_path: Path) -> None:
    write_logs(WORLD, tmp_path)
    rng = random.Random(3)
    line = sorted(tmp_path.iterdir())[0].read_text().splitlines()[-1]
    with (tmp_path / "fuzz.log").open("wb") as file:
        for _ in range(3000):
            broken = bytearray(line.encode())
            for _ in range(rng.randrange(1, 6)):
                broken[rng.randrange(len(broken))] = rng.randrange(256)
            file.write(bytes(broken[: rng.randrange(1, len(broken))]) + b"\n")
    assert diagnose([tmp_path], jobs=1).diagnosis.status in {"divergence", "no-divergence", "insufficient-input"}


def test_exit_codes_tell_the_four_answers_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {}
    inputs: dict[str, list[list[Op]]] = {
        "divergence": WORLD.programs,
        "none": [[REDUCE], [REDUCE]],
        "insufficient": [[], []],
    }
    for name, programs in inputs.items():
        (tmp_path / name).mkdir()
        write_logs(World(comms=[(0, 1)], programs=programs), tmp_path / name)
        answers[name] = main(["deadlock-diagnose", str(tmp_path / name), "--quiet"])
        assert capsys.readouterr().out.count("\n") > 3
    (tmp_path / "unreadable").mkdir()
    answers["unreadable"] = main(["deadlock-diagnose", str(tmp_path / "unreadable")])
    assert answers == {"divergence": 3, "none": 0, "insufficient": 4, "unreadable": 1}
    assert capsys.readouterr().err.startswith("kvbench: error: ")


def test_several_formats_in_one_folder_are_told_apart_by_content(tmp_path: Path) -> None:
    write_logs(WORLD, tmp_path)
    write_flight_recorder(WORLD, tmp_path)
    write_nsys(WORLD, tmp_path)
    found = diagnose([tmp_path], jobs=1).diagnosis
    assert {one.format for one in found.files} == {"nccl-log", "flight-recorder", "nsys"}
    assert len(found.also) == 2
    assert all("field mismatch" in one for one in found.also)


def test_workers_and_ranges_give_the_same_answer_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvbench.deadlock_diagnose import gather

    programs = [[Op(comm=0, count=1000 + number % 5) for number in range(4000)] for _ in range(2)]
    del programs[1][3000]
    write_logs(World(comms=[(0, 1)], programs=programs), tmp_path)
    alone = diagnose([tmp_path], jobs=1).diagnosis
    monkeypatch.setattr(gather, "RANGE_BYTES", 100_000)
    monkeypatch.setattr(gather, "_ALONE_BELOW", 0)
    shared = diagnose([tmp_path], jobs=2).diagnosis
    assert shared.verdict == alone.verdict
    assert shared.causes == alone.causes
    assert shared.causes[0].index == 3001


def with_foreign_values(value: Any, rng: random.Random) -> Any:
    """The same tree with a few values replaced by something of another type, and a few keys gone."""
    if rng.random() < 0.02:
        return rng.choice([None, -1, 3.5, "x", [], {}, [1], {"a": 2}, True, 2**70, ""])
    if isinstance(value, dict):
        return {key: with_foreign_values(one, rng) for key, one in value.items() if rng.random() > 0.01}
    return [with_foreign_values(one, rng) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", ["kineto", "fr-json", "fr"])
@pytest.mark.parametrize("seed", range(15))
def test_values_of_any_type_get_an_answer(tmp_path: Path, form: str, seed: int) -> None:
    rng = random.Random(seed)
    FORMATS[form](random_world(rng, ranks=3, comms=2, calls=6, one_stream=True, p2p=True), tmp_path)
    for path in tmp_path.iterdir():
        if form == "fr":
            path.write_bytes(pickle.dumps(with_foreign_values(pickle.loads(path.read_bytes()), rng)))
        else:
            path.write_text(json.dumps(with_foreign_values(json.loads(path.read_text()), rng)))
    try:
        assert diagnose([tmp_path], jobs=1).diagnosis.verdict
    except KvbenchError as error:
        assert "\n" not in str(error)
