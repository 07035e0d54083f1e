"""Servers that tests start as a user does, in processes of their own."""

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def bound_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port of ``host`` that is this process's until the block ends.

    The socket is bound and never listens. With SO_REUSEADDR set on both, a server that binds this
    very port may listen there (TCPStore, uvicorn, http.server); whoever asks for any free port gets
    another one.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])


@contextmanager
def started(
    command: Sequence[str], ready: str, *, cwd: Path, env: Mapping[str, str]
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server's address and process, once it has printed ``ready``; killed at the end.

    ``ready``: regular expression of a line, whose first group is the address. ``env``: variables
    beside this process's own. After 240 s the server is killed, so that no test waits for ever.
    The processes that the server starts are in its group (`os.killpg`), and are killed with it.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )

    def kill() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    watchdog = threading.Timer(240, kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        found = (re.search(ready, line) for line in process.stdout)
        yield next(match[1] for match in found if match), process
    finally:
        watchdog.cancel()
        kill()
        process.wait(10)
