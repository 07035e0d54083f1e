"""One rank of `test_rank_death`: watched, it works in collectives until something ends it.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment, the case as the argument. The case
"starts" starts its two processes itself, and they meet.
"""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from aligner.config import ProcessConfig
from aligner.config.layout import ParallelConfig
from aligner.parallel import heartbeat as liveness
from aligner.parallel.groups import ParallelState
from aligner.parallel.heartbeat import watched_ranks
from aligner.parallel.launch import started_processes

torch.set_num_threads(1)
TIMEOUT_S = 300.0


def place() -> ParallelState:
    """Data parallelism alone, without megatron-core's groups, which take seconds to import."""
    rank, world, everyone = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    return ParallelState(ParallelConfig(), rank, world, 0, 0, 0, rank, world, *[everyone] * 6)


def work(case: str) -> None:
    rank, dying = dist.get_rank(), 0 if case == "host killed" else 1
    for step in range(200):
        dist.all_reduce(torch.ones(100_000))
        if step == 100 and rank == dying:
            if "killed" in case:
                os.kill(os.getpid(), signal.SIGKILL)
            if case == "raised":
                raise ValueError("the reward of sample 7 is a banana")
        if step == 100 and case == "killed, others stuck":
            threading.Event().wait()  # as in a collective that no error reaches
        if step == 100 and case == "slow":
            time.sleep(3 * rank)  # six beats


def main() -> None:
    if sys.argv[1] == "starts":
        with started_processes(ProcessConfig(devices=2), TIMEOUT_S):
            print("met", flush=True)
            return
    if sys.argv[1] == "raised":  # beating at every moment, that of the end too
        liveness._INTERVAL_S = 0.0
    dist.init_process_group("gloo")
    try:
        with watched_ranks(place(), TIMEOUT_S):
            work(sys.argv[1])
    finally:
        # An interpreter that ends while a thread is in the store is aborted (exit code -6).
        if any(thread.name == "rank-watch" for thread in threading.enumerate()):
            print("the watch is alive", file=sys.stderr, flush=True)
    print("clean", flush=True)
    os._exit(0)  # nothing is left to be waited for


if __name__ == "__main__":
    main()
