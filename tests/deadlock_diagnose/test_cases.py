"""The cases that were seen in the field, each in every reader that can show it, and what must not be invented."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.core.errors import KvbenchError
from kvbench.deadlock_diagnose.diagnose import Diagnosed, diagnose
from kvbench.results.deadlock_diagnosis import DeadlockDiagnosis
from tests.deadlock_diagnose.programs import (
    FORMATS,
    Op,
    World,
    call_lines,
    coll_lines,
    head_of,
    init_lines,
    pointer,
    seed_case,
    write_flight_recorder,
    write_logs,
    write_nsys,
)

WITH_STREAMS = ("coll", "call", "nsys", "kineto")
REDUCE = Op(comm=0)
GATHER = Op(comm=0, op="AllGather")
BROADCAST = Op(comm=0, op="Broadcast", count=53, dtype="int64")


def one_comm(*programs: list[Op]) -> World:
    return World(comms=[tuple(range(len(programs)))], programs=list(programs))


def read(folder: Path) -> DeadlockDiagnosis:
    return diagnose([folder], jobs=1).diagnosis


def full(folder: Path) -> Diagnosed:
    return diagnose([folder], jobs=1)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.log").write_text(text)
    return folder


# ---- the seed's case


@pytest.mark.parametrize("form", ["coll", "call", "nsys"])
def test_the_seeds_case_names_the_cycle_the_default_stream_and_the_fix(tmp_path: Path, form: str) -> None:
    world = seed_case()
    if form == "nsys":
        write_nsys(world, tmp_path, hang_from={0: 9, 1: 9}, copies=True)
    else:
        FORMATS[form](world, tmp_path)
    found = read(tmp_path)
    cause = found.causes[0]
    assert (found.status, cause.kind, cause.strength) == ("divergence", "order-cycle", "certain")
    assert [(step.rank, step.waits_in.split(" of ")[0], step.for_rank) for step in cause.cycle] == [
        ("rank 0", "Broadcast #4", "rank 1"),
        ("rank 1", "AllReduce #7", "rank 0"),
    ]
    assert "rank 0 waits in Broadcast #4" in found.verdict[0]
    assert "which waits in AllReduce #7" in found.verdict[0]
    assert not cause.suspects, "with two ranks neither order is the wrong one"
    default = [one for one in found.findings if one.code == "default-stream"]
    assert [one.message.partition(" is on the default stream")[0] for one in default] == ["Broadcast #4 of comm B"]
    assert "one load stream" in found.verdict[2]
    assert "forward stream wait on that stream's event" in found.verdict[2]
    if form == "nsys":
        copied = next(one for one in found.findings if one.code == "copy-without-event")
        assert "H2D copy runs on stream 21" in copied.message
        assert any(one.code == "hung-launch" for one in found.findings)
    else:
        assert all(":" in one.place and "nccl.node0" in one.place for one in cause.evidence)


def test_an_event_between_copy_and_broadcast_is_no_finding(tmp_path: Path) -> None:
    world = seed_case()
    world.programs[1] = list(world.programs[0])
    write_nsys(world, tmp_path, copies=True, event_between=True)
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert not [one for one in found.findings if one.code == "copy-without-event"]


def test_hosts_that_each_stop_in_the_call_the_other_never_enters_are_a_possible_cycle(tmp_path: Path) -> None:
    world = seed_case()
    world.programs = [program[:-1] for program in world.programs]
    FORMATS["coll"](world, tmp_path)
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].strength) == ("host-cycle", "possible")
    assert "Broadcast #4" in found.verdict[0]


@pytest.mark.parametrize("form", FORMATS)
def test_a_cycle_of_three_communicators_is_found(tmp_path: Path, form: str) -> None:
    a, b, c = (Op(comm=number, count=100 + number) for number in (1, 2, 3))
    world = World(comms=[(0, 1, 2), (0, 1), (1, 2), (0, 2)], programs=[[REDUCE, a, c], [REDUCE, b, a], [REDUCE, c, b]])
    FORMATS[form](world, tmp_path)
    found = read(tmp_path)
    assert found.causes[0].kind == "order-cycle"
    assert len(found.causes[0].cycle) == 3
    assert found.causes[0].strength == ("certain" if form in WITH_STREAMS else "possible")


# ---- one communicator


@pytest.mark.parametrize("form", FORMATS)
def test_a_different_operation_on_one_of_four_ranks_blames_that_rank(tmp_path: Path, form: str) -> None:
    usual = [REDUCE, GATHER, REDUCE, REDUCE, GATHER]
    world = one_comm(usual, usual, [*usual[:3], GATHER, usual[4]], usual)
    FORMATS[form](world, tmp_path)
    found = read(tmp_path)
    cause = found.causes[0]
    assert (cause.kind, cause.index, [one.rank for one in cause.suspects]) == ("field-mismatch", 4, ["rank 2"])
    assert "op" in cause.fields


@pytest.mark.parametrize("form", FORMATS)
def test_a_different_count_and_type_in_the_first_broadcast_is_named(tmp_path: Path, form: str) -> None:
    odd = replace(BROADCAST, count=25503912, dtype="float16")
    FORMATS[form](one_comm([odd], [BROADCAST], [BROADCAST]), tmp_path)
    found = read(tmp_path)
    cause = found.causes[0]
    assert (cause.kind, cause.index, [one.rank for one in cause.suspects]) == ("field-mismatch", 1, ["rank 0"])
    assert set(cause.fields) == ({"size_bytes"} if form == "nsys" else {"count", "dtype"})


@pytest.mark.parametrize("form", ["coll", "call", "nsys"])
def test_a_different_root_is_named_where_the_format_shows_it(tmp_path: Path, form: str) -> None:
    FORMATS[form](one_comm([BROADCAST], [replace(BROADCAST, root=1)], [BROADCAST]), tmp_path)
    assert read(tmp_path).causes[0].fields == ("root",)


@pytest.mark.parametrize("form", FORMATS)
def test_two_ranks_that_disagree_are_two_camps_and_nobody_is_blamed(tmp_path: Path, form: str) -> None:
    FORMATS[form](one_comm([REDUCE, GATHER], [REDUCE, BROADCAST]), tmp_path)
    cause = read(tmp_path).causes[0]
    assert cause.kind == "field-mismatch"
    assert not cause.suspects
    assert len(cause.camps) == 2
    assert cause.no_suspect_reason


@pytest.mark.parametrize("form", FORMATS)
def test_a_rank_that_skips_a_call_is_told_from_one_that_stopped(tmp_path: Path, form: str) -> None:
    usual = [REDUCE, BROADCAST, GATHER, REDUCE, BROADCAST]
    (tmp_path / "skips").mkdir()
    (tmp_path / "stops").mkdir()
    FORMATS[form](one_comm(usual, usual, [REDUCE, *usual[2:]]), tmp_path / "skips")
    FORMATS[form](one_comm(usual, usual, usual[:3]), tmp_path / "stops")
    skips, stops = read(tmp_path / "skips").causes[0], read(tmp_path / "stops").causes[0]
    assert (skips.kind, skips.index, skips.strength) == ("missing-call", 2, "certain")
    assert (stops.kind, stops.index, stops.strength) == ("not-entered", 4, "possible")
    assert [one.rank for one in (*skips.suspects, *stops.suspects)] == ["rank 2", "rank 2"]


@pytest.mark.parametrize("form", FORMATS)
def test_an_extra_call_is_not_taken_for_missing_ones(tmp_path: Path, form: str) -> None:
    usual = [REDUCE, BROADCAST, GATHER, REDUCE]
    FORMATS[form](one_comm([*usual[:2], REDUCE, *usual[2:]], usual, usual, usual), tmp_path)
    cause = read(tmp_path).causes[0]
    assert (cause.kind, cause.index, [one.rank for one in cause.suspects]) == ("extra-call", 3, ["rank 0"])


@pytest.mark.parametrize("form", FORMATS)
def test_swapped_neighbours_are_named_as_a_swap(tmp_path: Path, form: str) -> None:
    usual = [REDUCE, BROADCAST, GATHER, REDUCE]
    FORMATS[form](one_comm(usual, usual, [REDUCE, GATHER, BROADCAST, REDUCE]), tmp_path)
    cause = read(tmp_path).causes[0]
    assert (cause.kind, cause.index, [one.rank for one in cause.suspects]) == ("swapped-calls", 2, ["rank 2"])


def test_what_follows_a_divergence_is_a_consequence(tmp_path: Path) -> None:
    other = Op(comm=1, count=7)
    world = World(
        comms=[(0, 1, 2), (0, 1, 2)],
        programs=[[REDUCE, GATHER, other], [REDUCE, GATHER, other], [REDUCE, BROADCAST, other]],
    )
    FORMATS["coll"](world, tmp_path)
    found = read(tmp_path)
    assert len(found.causes) == 1
    assert any("comm B" in line for line in found.consequences)


# ---- Send and Recv


def p2p(op: str, peer: int, **changes: object) -> Op:
    return replace(Op(comm=0, op=op, peer=peer, count=4 * 1024 * 1024, dtype="float32"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["call", "nsys"])
def test_two_sends_that_face_each_other_are_a_cycle(tmp_path: Path, form: str) -> None:
    world = one_comm([p2p("Send", 1), p2p("Recv", 1)], [p2p("Send", 0), p2p("Recv", 0)])
    FORMATS[form](world, tmp_path)
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].strength) == ("p2p-cycle", "certain")


def test_small_sends_that_face_each_other_may_be_buffered(tmp_path: Path) -> None:
    small = [[p2p(op, peer, count=16) for op in ("Send", "Recv")] for peer in (1, 0)]
    FORMATS["call"](one_comm(*small), tmp_path)
    assert read(tmp_path).causes[0].strength == "possible"


@pytest.mark.parametrize("form", FORMATS)
def test_sends_and_receives_of_one_group_are_no_cycle(tmp_path: Path, form: str) -> None:
    world = one_comm(*[[p2p("Send", peer, group=1), p2p("Recv", peer, group=1)] for peer in (1, 0)])
    FORMATS[form](world, tmp_path)
    assert read(tmp_path).status == "no-divergence"


@pytest.mark.parametrize("form", FORMATS)
def test_a_send_without_its_receive_is_named(tmp_path: Path, form: str) -> None:
    FORMATS[form](one_comm([REDUCE, p2p("Send", 1)], [REDUCE]), tmp_path)
    found = read(tmp_path)
    assert found.causes[0].kind == "p2p-unmatched"
    assert "rank 1 never entered Send 0->1" in found.verdict[0]


@pytest.mark.parametrize("form", FORMATS)
def test_a_send_and_a_receive_of_different_size_are_named(tmp_path: Path, form: str) -> None:
    FORMATS[form](one_comm([p2p("Send", 1)], [p2p("Recv", 0, count=8)]), tmp_path)
    assert read(tmp_path).causes[0].kind == "p2p-mismatch"


# ---- identity and life of communicators


@pytest.mark.parametrize("version", ["2.14", "2.18", "2.21", "2.23", "2.27"])
def test_init_lines_of_every_version_identify_communicators(tmp_path: Path, version: str) -> None:
    inner = Op(comm=1, count=77)
    world = World(
        comms=[(0, 1, 2, 3), (0, 1), (2, 3)], programs=[[REDUCE, inner]] * 2 + [[REDUCE, replace(inner, comm=2)]] * 2
    )
    world.split = {1: (0, 0, 0), 2: (0, 0, 1)}
    world.programs[3] = [REDUCE, replace(inner, comm=2, count=78)]
    write_logs(world, tmp_path, coll_lines, version=version)
    found = full(tmp_path)
    cause = found.diagnosis.causes[0]
    assert (cause.kind, cause.index) == ("field-mismatch", 1)
    assert sorted(rank for camp in cause.camps for rank in camp.ranks) == ["rank 2", "rank 3"]
    assert ("guessed-communicator" in {one.code for one in found.warnings}) == (version == "2.14")


def test_a_pointer_that_is_reused_after_destroy_is_another_communicator(tmp_path: Path) -> None:
    world = one_comm([REDUCE] * 3, [REDUCE] * 3)
    for rank in range(2):
        first = coll_lines(world, rank)
        ended = (
            f"{head_of(rank)} INFO comm {pointer(rank, 0)} rank {rank} "
            f"nranks 2 cudaDev {rank} busId 1b000 - Destroy COMPLETE"
        )
        again = [
            line.replace("0xabc000", "0xdef000")
            for line in coll_lines(one_comm([GATHER] * 2, [GATHER] * (2 - rank)), rank)
        ]
        write(tmp_path, **{f"rank{rank}": "\n".join([*first, ended, *again]) + "\n"})
    found = read(tmp_path)
    assert len(found.communicators) == 2
    assert (found.causes[0].kind, found.causes[0].index) == ("not-entered", 2)
    assert "0xdef000" in found.causes[0].communicator


def test_a_call_after_destroy_is_named(tmp_path: Path) -> None:
    world = one_comm([REDUCE] * 2, [REDUCE] * 2)
    for rank in range(2):
        lines = coll_lines(world, rank)
        ended = (
            f"{head_of(rank)} INFO comm {pointer(rank, 0)} rank {rank} "
            f"nranks 2 cudaDev {rank} busId 1b000 - Destroy COMPLETE"
        )
        write(
            tmp_path, **{f"rank{rank}": "\n".join([*lines[:-1], ended, lines[-1]] if rank else [*lines, ended]) + "\n"}
        )
    found = read(tmp_path)
    assert found.causes[0].kind == "use-after-destroy"
    assert [one.rank for one in found.causes[0].suspects] == ["rank 1"]


def test_ranks_that_never_leave_the_creation_of_a_communicator_are_named(tmp_path: Path) -> None:
    world = one_comm([], [], [], [])
    for rank in range(3):
        write(tmp_path, **{f"rank{rank}": init_lines(world, rank)[0] + "\n"})
    found = read(tmp_path)
    assert (found.status, found.causes[0].kind, found.causes[0].strength) == ("divergence", "init-stuck", "certain")
    assert "1 of 4 members never printed Init START" in found.verdict[0]
    assert found.causes[0].suspects[0].rank == "rank 3 of the communicator"


def test_communicators_created_in_different_order_are_named(tmp_path: Path) -> None:
    world = World(comms=[(0, 1, 2), (0, 1, 2)], programs=[[], [], []])
    for rank in range(3):
        lines = init_lines(world, rank)
        lines = [*lines[2:], *lines[:2]] if rank == 1 else lines
        write(tmp_path, **{f"rank{rank}": "\n".join([*lines, *coll_lines(world, rank)[4:]]) + "\n"})
    found = read(tmp_path)
    assert found.causes[0].kind == "creation-order"
    assert [one.rank for one in found.causes[0].suspects] == ["rank 1"]


def test_a_group_that_never_ends_is_named(tmp_path: Path) -> None:
    grouped = [replace(REDUCE, group=1), replace(GATHER, group=1)]
    for rank in range(2):
        lines = call_lines(one_comm(grouped, grouped), rank)
        write(tmp_path, **{f"rank{rank}": "\n".join(lines[:-1] if rank else lines) + "\n"})
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].strength) == ("open-group", "possible")
    assert [one.rank for one in found.causes[0].suspects] == ["rank 1"]


def test_members_without_data_are_unseen_and_not_missing(tmp_path: Path) -> None:
    FORMATS["coll"](one_comm(*[[REDUCE, GATHER]] * 4), tmp_path)
    next(iter(sorted(tmp_path.iterdir()))).unlink()
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert found.communicators[0].num_unseen == 1
    assert "1 member of a communicator left no data" in found.verdict[1]


def test_one_process_that_drives_two_gpus_is_two_ranks(tmp_path: Path) -> None:
    lines = []
    for rank in range(2):
        own = coll_lines(one_comm([REDUCE, GATHER], [REDUCE, BROADCAST]), rank)
        lines += [line.replace(f":{1000 + rank}:", ":1000:") for line in own]
    write(tmp_path, both="\n".join(lines) + "\n")
    found = read(tmp_path)
    assert [one.rank for one in found.ranks] == ["rank 0", "rank 1"]
    assert found.causes[0].index == 2


def test_two_runs_in_one_folder_are_told_apart(tmp_path: Path) -> None:
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        write_logs(one_comm([REDUCE, GATHER], [REDUCE, GATHER] if run == "one" else [REDUCE]), tmp_path / run)
        for path in (tmp_path / run).iterdir():
            path.write_text(path.read_text().replace("0xabc000", f"0x{run.encode().hex()}"))
    found = full(tmp_path)
    assert "mixed-runs" in {one.code for one in found.warnings}
    assert "run 2 rank 1 never entered" in found.diagnosis.verdict[0]


# ---- text as it is found


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rank, line: f"(RayTrainWorker pid={1000 + rank}, ip=10.0.0.1) {line}",
        lambda rank, line: f"\x1b[36m(WorkerDict pid={1000 + rank})\x1b[0m {line}",
        lambda rank, line: f"{rank}: {line}",
        lambda rank, line: f"[1,{rank}]<stdout>:{line}",
        lambda rank, line: f"10.1.2.{rank}: {line}",
        lambda rank, line: f"2026-11-29T12:00:00.1234567Z {line}",
        lambda rank, line: f"[2026-11-29 12:00:00.123456] {line}",
        lambda _rank, line: f"{line}\r",
    ],
)
def test_launcher_prefixes_colours_and_times_are_stripped(tmp_path: Path, wrap: object) -> None:
    world = one_comm([REDUCE, GATHER, REDUCE], [REDUCE, GATHER, REDUCE], [REDUCE, BROADCAST, REDUCE])
    assert callable(wrap)
    lines = [wrap(rank, line) for rank in range(3) for line in coll_lines(world, rank)]
    write(tmp_path, merged="\n".join(lines) + "\n")
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].index) == ("field-mismatch", 2)
    assert [one.rank for one in found.causes[0].suspects] == ["rank 2"]


def test_lines_that_interleave_inside_each_other_are_recovered_and_counted(tmp_path: Path) -> None:
    world = one_comm([BROADCAST, REDUCE], [BROADCAST, REDUCE])
    first, second = coll_lines(world, 0), coll_lines(world, 1)
    outer, inner = first[2], second[2]
    cut = outer.index("count 53") + 7
    mixed = [*first[:2], *second[:2], outer[:cut] + inner, outer[cut:], first[3], second[3]]
    write(tmp_path, merged="\n".join(mixed) + "\n")
    found = full(tmp_path)
    assert found.diagnosis.status == "no-divergence", found.diagnosis.verdict
    assert found.diagnosis.num_calls == 4
    assert sum(one.num_recovered for one in found.diagnosis.files) == 2
    assert "damaged-lines" in {one.code for one in found.warnings}


def test_a_truncated_last_line_is_counted_and_does_not_become_a_call(tmp_path: Path) -> None:
    world = one_comm([REDUCE, GATHER], [REDUCE, GATHER])
    for rank in range(2):
        text = "\n".join(coll_lines(world, rank)) + "\n"
        write(tmp_path, **{f"rank{rank}": text + coll_lines(world, rank)[2][:-70] if rank else text})
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert sum(one.num_damaged for one in found.files) == 1


def test_rccl_lines_with_extra_keys_are_read_and_give_the_rank(tmp_path: Path) -> None:
    world = one_comm([REDUCE, GATHER], [REDUCE, BROADCAST], [REDUCE, GATHER])
    for rank in range(3):
        lines = [
            line.replace(" count ", " acc 0x0 count ") + f" task 0 globalrank {rank}"
            for line in coll_lines(world, rank)[2:]
        ]
        write(tmp_path, **{f"host{'abc'[rank]}": "\n".join(lines) + "\n"})
    found = read(tmp_path)
    assert found.how_ranks == "globalrank of its RCCL lines"
    assert [one.rank for one in found.causes[0].suspects] == ["rank 1"]


def test_coll_and_call_lines_of_the_same_calls_are_counted_once(tmp_path: Path) -> None:
    world = one_comm([REDUCE, GATHER, REDUCE], [REDUCE, GATHER, REDUCE])
    for rank in range(2):
        coll, call = coll_lines(world, rank), call_lines(world, rank)
        both = [*coll[:2], *(line for pair in zip(call[2:], coll[2:], strict=True) for line in pair)]
        write(tmp_path, **{f"rank{rank}": "\n".join(both) + "\n"})
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert found.num_calls == 6


def test_an_opcount_that_stays_zero_does_not_matter(tmp_path: Path) -> None:
    world = one_comm([REDUCE, GATHER], [REDUCE, BROADCAST])
    for rank in range(2):
        text = "\n".join(coll_lines(world, rank)).replace("opCount 1", "opCount 0")
        write(tmp_path, **{f"rank{rank}": text + "\n"})
    assert read(tmp_path).causes[0].index == 2


def test_warnings_of_the_transport_are_evidence(tmp_path: Path) -> None:
    world = one_comm([BROADCAST], [replace(BROADCAST, count=54)])
    write_logs(world, tmp_path)
    path = sorted(tmp_path.iterdir())[0]
    warning = (
        "node0:1000:2000 [0] transport/net_socket.cc:590 (ncclNetSocketTest) NCCL WARN "
        "NET/Socket : peer node1<1> message truncated : receiving 432 bytes instead of 424"
    )
    path.write_text(path.read_text() + "\n" + warning + "\n")
    assert any(one.code == "size-mismatch" for one in read(tmp_path).findings)


def test_one_communicator_from_two_streams_and_two_threads_is_a_finding(tmp_path: Path) -> None:
    program = [REDUCE, replace(GATHER, stream="load", thread=1)]
    FORMATS["coll"](one_comm(program, program), tmp_path)
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert {"several-streams", "several-threads", "default-stream"} <= {one.code for one in found.findings}


# ---- counts: watchdog text and RAS


def watchdog_line(rank: int, seq: int, op: str, numel: int, era: str) -> str:
    if era == "1.13":
        return (
            f"[Rank {rank}] Caught collective operation timeout: WorkNCCL(OpType={op}, "
            f"TensorShape=[{numel}], Timeout(ms)=1800000) ran for 1801591 milliseconds before timing out."
        )
    if era == "2.0":
        return (
            f"[E ProcessGroupNCCL.cpp:828] [Rank {rank}] Watchdog caught "
            f"collective operation timeout: WorkNCCL(SeqNum={seq}, "
            f"OpType={op}, TensorShape=[{numel}], Timeout(ms)=1800000) ran for 1801591 milliseconds before timing out."
        )
    return (
        f"[rank{rank}]:[E626 16:48:25.440243908 ProcessGroupNCCL.cpp:670] "
        f"[Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, "
        "Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    )


def status_line(rank: int, enqueued: int, completed: int, era: str) -> str:
    head = f"[rank{rank}]:[E626 16:48:25.440243908 ProcessGroupNCCL.cpp:1785] "
    if era == "2.3":
        return (
            f"{head}[PG 0 Rank {rank}] Timeout at NCCL work: {enqueued}, last enqueued "
            f"NCCL work: {enqueued}, last completed NCCL work: 76280750235782912."
        )
    if era == "2.4":
        return (
            f"{head}[PG 1 Rank {rank}] Exception (either an error or timeout) detected by watchdog at work: "
            f"{completed + 1}, last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}."
        )
    return (
        f"{head}[PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected by watchdog at work sequence "
        f"id: {completed + 1} PG status: last enqueued work: {enqueued}, last completed work: {completed}"
    )


@pytest.mark.parametrize("era", ["2.0", "2.7"])
def test_watchdogs_that_gave_up_on_different_calls_show_a_mismatch(tmp_path: Path, era: str) -> None:
    ops = ["ALLREDUCE", "BROADCAST", "ALLREDUCE", "ALLREDUCE"]
    write(tmp_path, err="\n".join(watchdog_line(rank, 485, op, 25, era) for rank, op in enumerate(ops)) + "\n")
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].index) == ("field-mismatch", 485)
    assert [one.rank for one in found.causes[0].suspects] == ["rank 1"]


@pytest.mark.parametrize("era", ["2.3", "2.4", "2.7"])
def test_a_rank_that_issued_fewer_calls_is_missing(tmp_path: Path, era: str) -> None:
    lines = [
        line
        for rank in range(4)
        for line in (
            watchdog_line(rank, 1580, "ALLREDUCE", 8, era),
            status_line(rank, 1581 if rank == 1 else 1582, 1579, era),
        )
    ]
    write(tmp_path, err="\n".join(lines) + "\n")
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].index) == ("not-entered", 1582)
    assert [one.rank for one in found.causes[0].suspects] == ["rank 1"]
    if era == "2.3":
        assert all(one.completed is None for one in found.progress), "an uninitialised number is unknown"


def test_one_rank_that_issued_more_than_all_others_has_an_extra_call(tmp_path: Path) -> None:
    write(tmp_path, err="\n".join(status_line(rank, 11 if rank == 0 else 10, 9, "2.7") for rank in range(4)) + "\n")
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].index) == ("extra-call", 11)
    assert [one.rank for one in found.causes[0].suspects] == ["rank 0"]


def test_sequence_numbers_far_apart_are_named(tmp_path: Path) -> None:
    lines = [watchdog_line(rank, 96120 if rank else 90000, "ALLREDUCE", 8, "2.0") for rank in range(8)]
    write(tmp_path, err="\n".join(lines) + "\n")
    assert "rank 0 waits in #90000" in read(tmp_path).verdict[0]


def test_the_wording_of_1_13_is_read_though_it_has_no_sequence_number(tmp_path: Path) -> None:
    write(tmp_path, err="\n".join(watchdog_line(rank, 0, "ALLREDUCE", 268298, "1.13") for rank in range(2)) + "\n")
    assert read(tmp_path).status == "no-divergence"


def test_coalesced_calls_of_different_size_are_a_mismatch(tmp_path: Path) -> None:
    write(
        tmp_path,
        err="\n".join(watchdog_line(rank, 9, "COALESCED", 56320 if rank else 76800, "2.7") for rank in range(3)) + "\n",
    )
    assert read(tmp_path).causes[0].kind == "field-mismatch"


def test_a_fingerprint_mismatch_of_detail_mode_is_read(tmp_path: Path) -> None:
    line = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank "
        "1 is running collective: CollectiveFingerPrint(SequenceNumber=485, "
        "OpType=ALLREDUCE, TensorShape=[25], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float "
        "(default))), but Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=485, OpType=BROADCAST, "
        "TensorShape=[25], TensorDtypes=Float).Collectives differ in the following aspects: Op type"
    )
    write(tmp_path, err=line + "\n")
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].strength, found.causes[0].index) == ("field-mismatch", "certain", 485)


def test_watchdogs_that_all_say_the_same_are_no_divergence(tmp_path: Path) -> None:
    lines = [
        line
        for rank in range(4)
        for line in (watchdog_line(rank, 10, "ALLREDUCE", 8, "2.7"), status_line(rank, 12, 9, "2.7"))
    ]
    write(tmp_path, err="\n".join(lines) + "\n")
    assert read(tmp_path).status == "no-divergence"


def ras(counts: list[int], missing: bool = False) -> dict[str, object]:
    ranks = [
        {"rank": rank, "host": "node1", "pid": 10 + rank, "collective_counts": {"AllGather": count, "AllReduce": 5}}
        for rank, count in enumerate(counts)
    ]
    gone = [{"rank": len(counts), "host": "node2", "pid": 7, "status": {"considered_dead": True}}] if missing else []
    comm = {
        "hash": "0xa1b2",
        "size": len(counts) + missing,
        "ranks_count": len(counts),
        "ranks": ranks,
        "missing_ranks": gone,
    }
    return {"nccl_version": "2.28.7", "communicators": [comm]}


def test_ras_counts_that_differ_name_the_rank_behind_and_the_dead_one(tmp_path: Path) -> None:
    (tmp_path / "ras.json").write_text(json.dumps(ras([641, 641, 640, 641], missing=True)))
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].strength) == ("not-entered", "possible")
    assert [one.rank for one in found.causes[0].suspects] == ["rank 2"]
    assert any(one.code == "ras-missing-rank" for one in found.findings)


def test_equal_ras_counts_are_no_divergence(tmp_path: Path) -> None:
    (tmp_path / "ras.json").write_text(json.dumps(ras([641, 641])))
    assert read(tmp_path).status == "no-divergence"


# ---- flight recorder


def test_rings_that_begin_at_different_calls_are_aligned_by_sequence_id(tmp_path: Path) -> None:
    usual = [REDUCE, GATHER] * 20
    world = one_comm(usual, usual, [*usual[:30], BROADCAST, *usual[31:]])
    write_flight_recorder(world, tmp_path, first=0)
    shorter = tmp_path / "nccl_trace_rank_1"
    write_flight_recorder(world, tmp_path / "..", first=0) if not shorter.exists() else None
    import pickle

    from tests.deadlock_diagnose.programs import flight_recorder_dump

    shorter.write_bytes(pickle.dumps(flight_recorder_dump(world, 1, first=17)))
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].index) == ("field-mismatch", 31)
    assert [one.rank for one in found.causes[0].suspects] == ["rank 2"]


def test_the_program_line_of_a_call_is_shown_from_its_stack(tmp_path: Path) -> None:
    write_flight_recorder(one_comm([REDUCE], [GATHER]), tmp_path, frames=True)
    assert "load_back at cache.py:40" in read(tmp_path).causes[0].evidence[0].place


# ---- nsys


def test_an_export_without_blobs_asks_for_the_right_export(tmp_path: Path) -> None:
    write_nsys(one_comm([REDUCE], [GATHER]), tmp_path, blobs=False)
    found = full(tmp_path)
    assert found.diagnosis.status == "insufficient-input"
    assert any("--include-blobs=true" in one.remedy for one in found.warnings)


@pytest.mark.parametrize(
    "missing",
    [
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "CUPTI_ACTIVITY_KIND_RUNTIME",
        "CUPTI_ACTIVITY_KIND_MEMCPY",
        "TARGET_INFO_CUDA_CONTEXT_INFO",
        "META_DATA_EXPORT",
        "TARGET_INFO_SESSION_START_TIME",
    ],
)
def test_tables_that_an_export_lacks_are_done_without(tmp_path: Path, missing: str) -> None:
    write_nsys(one_comm([REDUCE, GATHER], [REDUCE, BROADCAST]), tmp_path, without=(missing,), copies=True)
    assert read(tmp_path).causes[0].index == 2


# ---- negative controls


@pytest.mark.parametrize("form", FORMATS)
def test_equal_sequences_on_three_communicators_are_no_divergence(tmp_path: Path, form: str) -> None:
    program = [Op(comm=number % 3, count=10 + number, stream=f"s{number % 3}") for number in range(30)]
    world = World(comms=[(0, 1, 2, 3)] * 3, programs=[program] * 4)
    FORMATS[form](world, tmp_path)
    found = read(tmp_path)
    assert (found.status, found.kind) == ("no-divergence", "all-entered")
    assert "Entered is not completed" in found.verdict[1]


def test_stragglers_are_a_finding_and_no_divergence(tmp_path: Path) -> None:
    program = [REDUCE] * 40
    world = one_comm(*[program] * 4)
    for rank in range(4):
        lines = []
        for number, line in enumerate(coll_lines(world, rank)):
            at = number * 100_000 + rank * 10 + (50_000 if rank == 2 else 0)
            lines.append(f"[2026-11-29 12:00:{at // 1_000_000:02d}.{at % 1_000_000:06d}] {line}")
        write(tmp_path, **{f"rank{rank}": "\n".join(lines) + "\n"})
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert any(one.code == "straggler" and "rank 2" in one.message for one in found.findings)


def test_logs_with_creation_only_are_insufficient_and_say_what_to_capture(tmp_path: Path) -> None:
    world = one_comm([], [])
    write_logs(world, tmp_path)
    found = read(tmp_path)
    assert found.status == "insufficient-input"
    assert "no collective calls" in found.verdict[0]
    assert "NCCL_DEBUG_SUBSYS=INIT,CALL" in found.verdict[2]


def test_the_log_of_one_rank_is_insufficient(tmp_path: Path) -> None:
    FORMATS["coll"](one_comm([REDUCE], [REDUCE]), tmp_path)
    sorted(tmp_path.iterdir())[0].unlink()
    assert read(tmp_path).status == "insufficient-input"


def test_a_graph_replay_that_prints_few_lines_is_no_divergence(tmp_path: Path) -> None:
    world = one_comm([REDUCE], [REDUCE])
    FORMATS["coll"](world, tmp_path)
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert any("CUDA graph" in line for line in found.cannot_show)


def test_custom_all_reduce_kernels_are_named_as_not_covered(tmp_path: Path) -> None:
    import sqlite3

    write_nsys(one_comm([REDUCE], [REDUCE]), tmp_path)
    connection = sqlite3.connect(tmp_path / "rank0.sqlite")
    connection.execute("INSERT INTO StringIds VALUES (999, 'cross_device_reduce_1stage')")
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (1, 2, 0, 7, 5, 0, 999, 999)")
    connection.commit()
    connection.close()
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert any(one.code == "outside-nccl" for one in found.findings)


def test_the_end_of_each_file_gives_a_first_answer(tmp_path: Path) -> None:
    usual = [replace(REDUCE, count=1000 + number % 97) for number in range(3000)]
    write_logs(one_comm(usual, usual, [*usual[:2990], GATHER, *usual[2991:]]), tmp_path)
    found = diagnose([tmp_path], jobs=1, tail_bytes=64 * 1024)
    assert found.diagnosis.causes[0].kind == "field-mismatch"
    assert [one.rank for one in found.diagnosis.causes[0].suspects] == ["rank 2"]
    assert "tail-alignment" in {one.code for one in found.warnings}


# ---- completed calls


def complete(folder: Path, *, but: dict[int, int] | None = None) -> None:
    """Sets the state of every entry, but for some at the end of a rank's dump."""
    for path in sorted(folder.glob("trace_rank_*.json")):
        dump = json.loads(path.read_text())
        last = len(dump["entries"]) - (but or {}).get(int(path.stem.rpartition("_")[2]), 0)
        for entry in dump["entries"][:last]:
            entry["state"] = "completed"
        path.write_text(json.dumps(dump))


def test_an_inverted_order_whose_calls_completed_is_no_divergence(tmp_path: Path) -> None:
    write_flight_recorder(seed_case(), tmp_path, as_json=True)
    assert read(tmp_path).status == "divergence"
    complete(tmp_path)
    assert read(tmp_path).status == "no-divergence"


def test_after_an_inversion_that_completed_the_true_fault_is_named(tmp_path: Path) -> None:
    world = seed_case()
    world.programs[0].append(GATHER)
    write_flight_recorder(world, tmp_path, as_json=True)
    complete(tmp_path, but={0: 1})
    cause = read(tmp_path).causes[0]
    assert (cause.kind, cause.index) == ("not-entered", 8)
    assert cause.camps[-1].ranks == ("rank 1",) or cause.camps[0].ranks == ("rank 1",)


# ---- watchdog text of several groups, and silent ranks


def group_lines(rank: int, group: str, seq: int, op: str) -> list[str]:
    """A timeout, which names no group, and the status that follows it, as torch 2.7 prints them."""
    head = f"[rank{rank}]:[E626 16:48:25.540243900 ProcessGroupNCCL.cpp:2271] "
    return [
        watchdog_line(rank, seq, op, 8, "2.7"),
        (
            f"{head}[PG ID 1 PG GUID {group} Rank {rank}]  failure detected by watchdog at work sequence "
            f"id: {seq} PG status: last enqueued work: {seq}, last completed work: {seq - 1}"
        ),
    ]


def test_watchdogs_of_independent_groups_are_not_compared(tmp_path: Path) -> None:
    groups = [(0, "3(tp)", 100), (1, "3(tp)", 100), (2, "4(tp)", 101), (3, "4(tp)", 101)]
    lines = [line for rank, name, seq in groups for line in group_lines(rank, name, seq, "ALLREDUCE")]
    write(tmp_path, err="\n".join(lines) + "\n")
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert {one.communicator for one in found.progress} == {"3(tp)", "4(tp)"}


def test_ranks_that_gave_up_in_two_groups_are_told_what_that_looks_like(tmp_path: Path) -> None:
    calls = [("1(cache)", 5, "BROADCAST"), ("0(default_pg)", 12, "ALLREDUCE")]
    lines = [line for rank in (0, 1) for one in calls[:: 1 - 2 * rank] for line in group_lines(rank, *one)]
    write(tmp_path, err="\n".join(lines) + "\n")
    found = read(tmp_path)
    assert not found.causes
    assert "several-groups-stuck" in {one.code for one in found.findings}


@pytest.mark.parametrize("era", ["1.13", "2.0"])
def test_a_rank_that_says_nothing_while_the_others_give_up_is_named(tmp_path: Path, era: str) -> None:
    lines = [watchdog_line(rank, 77, "ALLREDUCE", 8, era) for rank in (0, 1, 3)]
    write(tmp_path, err="\n".join(lines) + "\n")
    found = read(tmp_path)
    assert (found.causes[0].kind, found.causes[0].strength) == ("not-entered", "possible")
    assert [one.rank for one in found.causes[0].suspects] == ["rank 2"]
    assert "#-1" not in found.verdict[0]
    assert {one.timed_out_at for one in found.progress} == ({None} if era == "1.13" else {77})


# ---- words


def test_one_run_without_a_world_gets_one_rank_each(tmp_path: Path) -> None:
    a, b, c = (Op(comm=number, count=100 + number) for number in range(3))
    write_logs(World(comms=[(0, 1), (1, 2), (0, 2)], programs=[[a, c], [b, a], [c, b]]), tmp_path)
    found = read(tmp_path)
    assert [one.rank for one in found.ranks] == ["rank 0", "rank 1", "rank 2"]
    assert "run 1" not in found.verdict[0]
    assert "mixed-runs" not in {one.code for one in full(tmp_path).warnings}


def test_an_assumed_group_is_said_to_be_assumed(tmp_path: Path) -> None:
    world = one_comm([p2p("Send", 1), p2p("Recv", 1)], [p2p("Send", 0), p2p("Recv", 0)])
    FORMATS["coll"](world, tmp_path)
    found = read(tmp_path)
    assert found.status == "no-divergence"
    assert "assumed to be one group" in found.verdict[1]
    assert "ungrouped, their order is a cycle" in found.verdict[1]


def test_few_calls_are_said_to_be_few(tmp_path: Path) -> None:
    FORMATS["coll"](one_comm([REDUCE], [REDUCE]), tmp_path)
    found = read(tmp_path)
    assert "all 2 ranks entered the same 1 call each on 1 communicator, " in found.verdict[0]
    assert "CUDA graphs" in found.verdict[1]


def test_a_call_missing_among_equal_ones_may_be_any_of_them(tmp_path: Path) -> None:
    FORMATS["coll"](one_comm([GATHER, *[REDUCE] * 5, GATHER], [GATHER, *[REDUCE] * 4, GATHER]), tmp_path)
    assert "one of #2–#6" in read(tmp_path).verdict[0]


def test_four_ranks_with_four_values_are_not_said_to_be_two_sides(tmp_path: Path) -> None:
    FORMATS["coll"](one_comm(*[[replace(REDUCE, count=10 + rank), GATHER] for rank in range(4)]), tmp_path)
    assert read(tmp_path).causes[0].no_suspect_reason == "every rank has its own value: no majority"


def test_text_without_a_known_line_is_unreadable(tmp_path: Path) -> None:
    write(tmp_path, junk="hello\nworld\n")
    with pytest.raises(KvbenchError, match=r"junk\.log: holds no line or record of a known kind"):
        read(tmp_path)
