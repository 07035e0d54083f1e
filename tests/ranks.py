"""Processes of a test, forked from one in which the imports are done.

Importing torch, megatron-core and NeMo keeps a core busy for ten seconds, and many tests need it
for a dozen processes. A server process does it once; every other begins as its copy.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from servers import bound_port

PRELOADED = [
    "aligner.models.gpt",
    "aligner.models.gpt.megatron.actor",
    "aligner.algorithms.ppo.trainer",
    "aligner.models.gpt.dtensor.actor",
    "transformers.models.llama.modeling_llama",
    "accelerate",
]
# One server for each pytest process: it imports what was set before its first process started.
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(PRELOADED)
GRACE_S = 5.0  # for what the other ranks say, once one has failed
Script = Path | str | Callable[[], None]  # a function reads its arguments from sys.argv


def on_ranks(
    processes: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 280.0
) -> Any:
    """Call ``function(*arguments)`` of a module in so many ranks, and return rank 0's value."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "value")
        script = partial(_save_value, output, function, arguments)
        run_ranks(script, processes, [], timeout_s)
        return torch.load(output, weights_only=False)


def _save_value(output: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    from aligner.parallel.groups import shutdown_parallel

    torch.set_num_threads(1)
    value = function(*arguments)
    if os.environ["RANK"] == "0":
        torch.save(value, output)
    shutdown_parallel()


def run_ranks(
    script: Script, processes: int, arguments: Sequence[object], timeout_s: float
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


def run_script(
    script: Path | str,
    *arguments: object,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 200.0,
) -> subprocess.CompletedProcess[str]:
    """Run ``python script arguments ...`` in ``folder`` to its end.

    Args:
        script: a file, or the name of a module as ``python -m`` takes it.
        environment: variables beside those of this process.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as logs:
        out, err = Path(logs, "out"), Path(logs, "err")
        process = start_script(script, words, out, environment or {}, folder=folder, errors=err)
        process.join(timeout_s)
        process.kill()
        process.join()
        texts = [log.read_text(errors="replace") for log in (out, err)]
    return subprocess.CompletedProcess([str(script), *words], process.exitcode or 0, *texts)


def start_script(
    script: Script,
    arguments: Sequence[object],
    log: Path,
    environment: Mapping[str, str],
    folder: Path | None = None,
    errors: Path | None = None,
) -> BaseProcess:
    """``python script arguments ...``, begun.

    Standard output goes to the end of ``log``, standard errors to that of ``errors`` or ``log``.
    """
    words = [str(argument) for argument in arguments]
    logs = str(log), str(errors or log)
    where = os.fspath(folder or Path.cwd())
    process = FORKSERVER.Process(
        target=_run, args=(script, words, dict(environment), logs, where), daemon=True
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


def _run(
    script: Script,
    arguments: list[str],
    environment: dict[str, str],
    logs: tuple[str, str],
    folder: str,
) -> None:
    for standard, log in enumerate(logs, 1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    try:
        if callable(script):
            script()
        elif str(script).endswith(".py"):
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(str(script), run_name="__main__")
        else:
            runpy.run_module(str(script), run_name="__main__", alter_sys=True)
    except Exception:
        sys.excepthook(*sys.exc_info())  # as Python itself does
        sys.exit(1)
