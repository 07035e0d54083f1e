"""Processes of a test, forked from one in which the imports are done.

Importing torch, megatron-core and NeMo keeps a core busy for ten seconds, and many tests need it
for a dozen processes. A server process does it once; every other begins as its copy.
"""

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from servers import bound_port

PRELOADED = [
    "aligner.models.gpt",
    "aligner.algorithms.ppo.trainer",
    "aligner.models.gpt.dtensor.actor",
    "transformers.models.llama.modeling_llama",
    "accelerate",
]
GRACE_S = 5.0  # for what the other ranks say, once one has failed


def run_ranks(
    script: Path, processes: int, arguments: Sequence[object], timeout_s: float
) -> list[str]:
    """Run ``python script arguments ...`` as so many ranks, with torchrun's environment.

    Returns what each printed, and fails with that when one fails or they take too long. None
    outlives the call.
    """
    with tempfile.TemporaryDirectory() as folder, bound_port() as port:
        logs = [Path(folder) / f"rank{rank}" for rank in range(processes)]
        common = {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        ranks = [
            start_script(
                script, arguments, log, {**common, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
            )
            for rank, log in enumerate(logs)
        ]
        try:
            _wait(ranks, time.monotonic() + timeout_s)
        finally:
            codes = [process.exitcode for process in ranks]
            for process in ranks:
                process.kill()
                process.join()
        texts = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
    assert codes == [0] * processes, "\n".join(
        f"--- rank {rank}, exit code {code}\n{text[-4000:]}"
        for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
    )
    return texts


def start_script(
    script: Path, arguments: Sequence[object], log: Path, environment: Mapping[str, str]
) -> BaseProcess:
    """``python script arguments ...``, begun; what it prints goes to the end of ``log``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    words = [str(argument) for argument in arguments]
    process = context.Process(
        target=_run, args=(str(script), words, dict(environment), str(log)), daemon=True
    )
    process.start()
    return process


def _wait(ranks: Sequence[BaseProcess], deadline: float) -> None:
    """Until all have ended, one has failed (and a little longer), or the deadline."""
    running = list(ranks)
    while running and time.monotonic() < deadline:
        wait([process.sentinel for process in running], max(0.0, deadline - time.monotonic()))
        running = [process for process in running if process.is_alive()]
        if any(process.exitcode for process in ranks):
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _run(script: str, arguments: list[str], environment: dict[str, str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
