"""One spelling of each operation, whatever the format calls it."""

_NAMES = {
    "allreduce": "AllReduce",
    "allreducecoalesced": "AllReduce",
    "allreducesparse": "AllReduce",
    "allgather": "AllGather",
    "allgatherbase": "AllGather",
    "allgatherintotensor": "AllGather",
    "allgatherintotensorcoalesced": "AllGather",
    "reducescatter": "ReduceScatter",
    "reducescatterbase": "ReduceScatter",
    "reducescattertensor": "ReduceScatter",
    "reducescattertensorcoalesced": "ReduceScatter",
    "broadcast": "Broadcast",
    "bcast": "Broadcast",
    "reduce": "Reduce",
    "alltoall": "AlltoAll",
    "alltoallbase": "AlltoAll",
    "alltoallv": "AlltoAll",
    "gather": "Gather",
    "scatter": "Scatter",
    "barrier": "Barrier",
    "send": "Send",
    "recv": "Recv",
}


def operation(name: str) -> str:
    """`AllReduce` for `nccl:all_reduce`, `ncclAllReduce` or `ALLREDUCE`; an unknown name stays as it is."""
    plain = name.rpartition(":")[2]
    key = plain.replace("_", "").lower().removeprefix("nccl")
    return _NAMES.get(key, plain)


def calls_elements(op: str, elements_in: int | None, elements_out: int | None) -> int | None:
    """The element count that all ranks must agree on; None where ranks may differ in a correct program."""
    if op == "AlltoAll":
        return None
    if op in {"ReduceScatter", "Scatter", "Recv"}:
        return elements_out
    return elements_in


# All-reduce kernels that inference engines launch themselves, beside NCCL.
OUTSIDE_NCCL = (
    "cross_device_reduce",
    "all_reduce_one_shot",
    "all_reduce_two_shot",
    "one_shot_all_reduce",
    "two_shot_all_reduce",
    "multimem_all_reduce",
)
