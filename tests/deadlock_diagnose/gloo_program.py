"""A program that diverges, for `torchrun`: `gloo_program.py FOLDER CASE`. Each rank writes its flight-recorder dump.

It stays a process group of its own: a rank that gives up writes its dump and leaves without waiting for the others.
"""

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=6)


def cache_load(case: str, rank: int, tokens: torch.Tensor, cache: dist.ProcessGroup) -> None:
    """One step of a server: a cache broadcast and a forward all-reduce."""
    if case == "inverted" and rank == 0:
        dist.broadcast(tokens, 0, group=cache)
        dist.all_reduce(tokens)
    elif case == "inverted":
        dist.all_reduce(tokens)
        dist.broadcast(tokens, 0, group=cache)
    elif case == "skipped":
        if rank != 1:  # its local list is empty, so it skips the call that the others enter
            dist.all_reduce(tokens)
        dist.barrier()
    else:
        dist.all_reduce(tokens)


def main() -> None:
    """Three good steps, then the step that diverges."""
    folder, case = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    cache = dist.new_group(list(range(dist.get_world_size())), timeout=TIMEOUT, group_desc="cache")
    tokens = torch.ones(64)
    for _ in range(3):
        if case != "inverted":
            dist.broadcast(tokens, 0, group=cache)
        dist.all_reduce(tokens)
    try:
        cache_load(case, rank, tokens, cache)
    except RuntimeError as error:
        print(f"rank {rank}: {str(error)[:80]}", file=sys.stderr)
    dump = torch._C._distributed_c10d._dump_fr_trace()
    (folder / f"trace_rank_{rank}").write_bytes(dump)
    os._exit(0)


main()
