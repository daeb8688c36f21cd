"""What to do about each kind of cause, and what to record when the input cannot answer."""

from kvbench.collectives.summary import Format

FIXES = {
    "broadcast-cycle": (
        "give both collectives one order on every rank: issue the "
        "H2D copy and the cache broadcast on one load stream, let the "
        "forward stream wait on that stream's event, and enter cache "
        "broadcast and forward collective in the same order everywhere"
    ),
    "order-cycle": (
        "enter these collectives in one order on every rank; different streams do not help when its kernels or "
        "its host wait for one of them"
    ),
    "host-cycle": (
        "give both collectives one order on every rank, and do not "
        "block the host (synchronize, .item(), .tolist()) between them"
    ),
    "p2p-cycle": "put the Sends and Recvs that face each other into one group (ncclGroupStart/End, batch_isend_irecv)",
    "p2p-unmatched": "issue the missing side of this Send/Recv pair, in the same order as its peer",
    "p2p-mismatch": "make the sender and the receiver agree on element count and type",
    "missing-call": (
        "make every rank take this branch: a condition on local "
        "state (an empty list, a local hit) must not skip a collective"
    ),
    "extra-call": (
        "remove the extra call, or let every rank issue it: a condition on local state must not add a collective"
    ),
    "op-mismatch": (
        "let every rank issue the same call here: a branch on local state took one rank elsewhere, or it left out or "
        "added a call before"
    ),
    "swapped-calls": "issue both calls in the same order on every rank",
    "field-mismatch": (
        "make the ranks agree on this call's arguments before they "
        "enter it: exchange the value, do not derive it locally"
    ),
    "not-entered": (
        "look at what the missing ranks do instead (py-spy dump, "
        "stack of the host thread); they are stopped before this call"
    ),
    "init-stuck": (
        "find out why the missing ranks do not reach the creation of "
        "this communicator: slow allocation, another order, a dead rank"
    ),
    "creation-order": "create communicators in the same order on every rank, with the same lists of ranks",
    "open-group": "look at the host stack of the rank inside ncclGroupEnd; its group's calls have not been launched",
    "use-after-destroy": "keep the communicator until the last call on it, or stop calling it after destroy",
}

CAPTURE_NCCL = (
    "NCCL_DEBUG=TRACE NCCL_DEBUG_SUBSYS=INIT,CALL NCCL_DEBUG_FILE=nccl.%h.%p.log "
    "NCCL_DEBUG_TIMESTAMP_LEVELS=ALL NCCL_DEBUG_TIMESTAMP_FORMAT='[%F %T.%6f] ' <your command>"
)
CAPTURE_NSYS = "nsys profile --trace=cuda,nvtx --cuda-event-trace=true --output=rank%q{RANK} <your command>"
EXPORT_NSYS = "nsys export --type=sqlite --include-blobs=true --output=rank0.sqlite rank0.nsys-rep"
CAPTURE_FLIGHT_RECORDER = (
    "TORCH_FR_BUFFER_SIZE=20000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_ENABLE_TIMING=1 "
    "TORCH_FR_DUMP_TEMP_FILE=/tmp/fr/rank <your command>"
)

CANNOT_SHOW: dict[Format, tuple[str, ...]] = {
    "nccl-log": (
        "NCCL logs show when a host enters a call, never that it completed",
        "calls replayed from a CUDA graph print nothing",
        "collectives outside NCCL (custom all-reduce kernels) print nothing",
    ),
    "watchdog": ("watchdog text names sequence numbers, not communicators' streams, roots or the order across groups",),
    "flight-recorder": (
        "flight-recorder entries hold no stream, no buffer and no root: an inversion is possible, not certain",
        "a rank that was blocked in destroy_process_group writes no dump",
    ),
    "nsys": (
        (
            "a kernel that never finished has no row: its stream is "
            "taken from earlier kernels of the same communicator and thread"
        ),
        "the payload holds bytes, not the datatype: a type mismatch with equal bytes is invisible",
    ),
    "kineto": (
        "a kernel that never finished is absent; only the host's call is there",
        "the root of a broadcast is not recorded",
    ),
    "ras": (
        (
            "RAS counts launches of collectives: no order, no arguments, "
            "no Send/Recv; one snapshot may catch ranks in motion"
        ),
    ),
}
