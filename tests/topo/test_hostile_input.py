"""Whatever a file holds, reading it ends quickly, in facts or in one clear sentence."""

import io
import random
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbench.core.errors import KvbenchError
from kvbench.core.graph import Graph
from kvbench.topo.bounded_xml import MOST_DEPTH, parse_xml
from kvbench.topo.build import build_machine
from kvbench.topo.discover import Sources, discover
from kvbench.topo.measured import read_measurements
from kvbench.topo.read import MOST_TEXT_BYTES, read_inputs, read_text
from tests.topo.shared_texts import DATA

SAMPLES = sorted(path for path in DATA.iterdir() if path.name != "README.md")
TOPOLOGIES = [path for path in SAMPLES if path.suffix in {".txt", ".csv", ".xml"} and path.name != "gdsio.txt"]
FUZZ = settings(max_examples=150, deadline=5000, suppress_health_check=[HealthCheck.too_slow])


def read_or_refuse(text: str) -> None:
    """Facts and their machine, or a KvbenchError of one line; any other exception fails the test."""
    try:
        build_machine([read_text(text, "fuzz")])
    except KvbenchError as error:
        assert str(error)
        assert "\n" not in str(error).strip() or len(str(error)) < 2000


@FUZZ
@given(st.text())
def test_any_text(text: str) -> None:
    read_or_refuse(text)


@FUZZ
@given(st.binary(max_size=4096))
def test_any_bytes_in_a_file(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f"
    path.write_bytes(data)
    try:
        read_inputs([path])
    except KvbenchError as error:
        assert str(error)


@FUZZ
@given(st.sampled_from(TOPOLOGIES), st.data())
def test_real_formats_with_random_damage(path: Path, data: st.DataObject) -> None:
    text = path.read_text()
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        until = data.draw(st.integers(at, min(at + 40, len(text))))
        piece = data.draw(
            st.one_of(st.text(max_size=8), st.sampled_from(["GPU0", "NV18", "\t", "\n", "X", "[00]", "<", "9" * 40]))
        )
        text = text[:at] + piece + text[until:]
    read_or_refuse(text)


@FUZZ
@given(st.sampled_from(TOPOLOGIES), st.integers(0, 10_000))
def test_real_formats_cut_anywhere(path: Path, at: int) -> None:
    read_or_refuse(path.read_text()[:at])


WORDS = [
    "GPU0",
    "GPU1",
    "NIC0",
    "X",
    "NV18",
    "PIX",
    "NODE",
    "SYS",
    "SOC",
    "0-7",
    "OK",
    "GNS",
    "|",
    "-[0000:00]-",
    "+-00.0",
    "\\-01.0-[01]--",
    "31:00.0",
]
LINES = ["CPU Affinity", "NUMA Affinity", "\t", "\n", " ", "LnkSta: Speed 8GT/s, Width x8", "=== Numa Nodes ==="]
GRAMMAR = st.lists(st.sampled_from([*WORDS, *LINES]), max_size=60)


@FUZZ
@given(GRAMMAR)
def test_words_of_the_formats_in_any_order(words: list[str]) -> None:
    read_or_refuse("".join(words))


@FUZZ
@given(st.sampled_from([path for path in SAMPLES if path.suffix == ".json" or path.name == "gdsio.txt"]), st.data())
def test_damaged_measurements(tmp_path_factory: pytest.TempPathFactory, path: Path, data: st.DataObject) -> None:
    text = path.read_text()
    at = data.draw(st.integers(0, len(text)))
    cut = text[:at] + data.draw(st.text(max_size=6)) + text[data.draw(st.integers(at, len(text))) :]
    broken = tmp_path_factory.mktemp("fuzz") / "m"
    broken.write_text(cut)
    machine, _ = build_machine([read_text((DATA / "dgx-8gpu.txt").read_text(), "m")])
    try:
        read_measurements([broken], Graph(machine))
    except KvbenchError as error:
        assert str(error)


def quickly(call: object, limit_s: float = 2.0) -> str:
    """The message of the refusal, which must come within the limit."""
    started = time.perf_counter()
    with pytest.raises(KvbenchError) as refused:
        call()  # type: ignore[operator]
    assert time.perf_counter() - started < limit_s
    return str(refused.value)


def test_a_file_of_100_mb_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(100 * 1024 * 1024)
    assert "is too large for a topology" in quickly(lambda: read_inputs([path]))
    with pytest.raises(KvbenchError, match="larger than"):
        read_measurements([path], Graph(build_machine([])[0]))


def test_a_full_sized_file_of_noise_ends_quickly(tmp_path: Path) -> None:
    path = tmp_path / "noise.txt"
    path.write_text(("GPU0 " + "lorem ipsum " * 8 + "\n") * (MOST_TEXT_BYTES // 110))
    assert "none of the formats" in quickly(lambda: read_inputs([path]), 10)


def test_one_endless_line_ends_quickly() -> None:
    for piece in ("X ", "GPU0\t", "PIX", "NV1", "+-00.0", "-[0000:00]-" + "+-00.0-[01]--" * 3, "= ", "[", "0,"):
        started = time.perf_counter()
        read_or_refuse("GPU0\t" + piece * (1_000_000 // len(piece)))
        read_or_refuse(piece * (1_000_000 // len(piece)))
        assert time.perf_counter() - started < 3


def test_binary_junk_is_called_binary(tmp_path: Path) -> None:
    path = tmp_path / "junk"
    path.write_bytes(random.Random(1).randbytes(100_000))
    assert "holds binary data" in quickly(lambda: read_inputs([path]))


def test_an_empty_file_asks_whether_the_command_failed(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.touch()
    assert "is empty; did the command that made it fail?" in quickly(lambda: read_inputs([path]))


def test_entities_are_refused_before_they_grow() -> None:
    lines = ['<!ENTITY a0 "ha">'] + [f'<!ENTITY a{at} "{f"&a{at - 1};" * 10}">' for at in range(1, 12)]
    bomb = f'<?xml version="1.0"?><!DOCTYPE topology [{"".join(lines)}]><topology version="2.0">&a11;</topology>'
    assert "declares entities" in quickly(lambda: read_text(bomb, "bomb.xml"))
    outside = '<!DOCTYPE topology [<!ENTITY x SYSTEM "file:///etc/passwd">]><topology version="2.0">&x;</topology>'
    assert "declares entities" in quickly(lambda: read_text(outside, "x.xml"))


def test_deep_and_wide_xml_is_refused() -> None:
    deep = "<topology version='2.0'>" + "<object type='Group'>" * 100_000
    assert f"more than {MOST_DEPTH} levels" in quickly(lambda: read_text(deep, "deep.xml"))
    wide = "<topology version='2.0'>" + "<object/>" * 600_000 + "</topology>"
    assert "more than 500000 elements" in quickly(lambda: read_text(wide, "wide.xml"), 10)


def test_a_cut_xml_keeps_what_it_holds() -> None:
    text = (DATA / "hwloc.xml").read_text()
    root, truncated = parse_xml(text[: len(text) // 2], "cut.xml")
    assert truncated
    assert root.tag == "topology"
    facts = read_text(text[: len(text) // 2], "cut.xml")
    assert facts.truncated
    assert any(fact.name == "NVIDIA A100-SXM4-80GB" for fact in facts.pci)


def test_a_bridge_loop_in_lspci_does_not_hang() -> None:
    blocks = (
        "0000:01:00.0 PCI bridge [0604]: A\n\tBus: primary=01, secondary=02, subordinate=02\n"
        "0000:02:00.0 PCI bridge [0604]: B\n\tBus: primary=02, secondary=01, subordinate=02\n"
        "0000:01:01.0 3D controller [0302]: NVIDIA Corporation X\n"
    )
    read_or_refuse(blocks)


def archive_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def test_an_archive_cannot_write_or_read_outside(tmp_path: Path) -> None:
    outside = archive_of(tmp_path / "a.tar.gz", (member("../escaped.txt"), b"x"))
    assert "not readable as an archive" in quickly(lambda: read_inputs([outside]))
    assert not (tmp_path.parent / "escaped.txt").exists()
    link = archive_of(tmp_path / "b.tar.gz", (member("topology/sys", tarfile.SYMTYPE, "/sys"), b""))
    assert "not readable as an archive" in quickly(lambda: read_inputs([link]))
    device = archive_of(tmp_path / "c.tar.gz", (member("topology/null", tarfile.CHRTYPE), b""))
    assert quickly(lambda: read_inputs([device]))


def test_a_cut_archive_and_an_archive_bomb_are_refused(tmp_path: Path) -> None:
    whole = archive_of(tmp_path / "a.tar.gz", (member("topology/x.txt"), random.Random(2).randbytes(50_000)))
    whole.write_bytes(whole.read_bytes()[:20_000])
    assert "not readable as an archive" in quickly(lambda: read_inputs([whole]))
    bomb = archive_of(tmp_path / "b.tar.gz", (member("topology/zeros.txt"), bytes(300 * 1024 * 1024)))
    assert "unpacks to more than" in quickly(lambda: read_inputs([bomb]), 15)


def test_json_goes_to_import_and_unknown_xml_is_named() -> None:
    assert "give it with --import" in quickly(lambda: read_text('{"nvbandwidth": {}}', "j.json"))
    assert "root <svg>" in quickly(lambda: read_text("<svg></svg>", "p.svg"))


def test_a_file_that_is_not_there_is_named() -> None:
    assert "nowhere.txt: cannot be read (No such file or directory)" in quickly(
        lambda: discover(Sources(files=(Path("nowhere.txt"),)))
    )
