"""The agent's process: runs a function or a command of a user's, which asks the policy over HTTP.

Messages are those of `aligner.environments.worker`, with one call: ``run`` with ``(base URL, API
key, seed, columns of the row)``. It returns a ``Turn`` with the reward that the function returned,
None of a command, and in ``info`` the end of what a command wrote.
"""

import asyncio
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import IO, Any

from aligner.child_process import kill_children
from aligner.environments.protocol import Turn, check_turn
from aligner.environments.worker import (
    COMMAND_KEY,
    KEY,
    answer_calls,
    awaited,
    check_columns,
    check_kwargs,
)
from aligner.errors import AlignerError, ConfigError
from aligner.importing import load_function

_OWN = ("base_url", "api_key", "seed")
_KEPT = 500  # bytes of what a command wrote last
_CLOSING_S = 2.0  # to read the rest of it


class AgentError(AlignerError):
    """A command ended with an error."""


def main(channel: int) -> None:
    """Run agents until the parent closes the socket ``channel`` or is gone.

    The parent alone keeps the time: while the policy answers, an agent's clock stands still.
    """

    def load(source: Any, kwargs: Any, columns: Any, form: Any) -> "Agent":
        del form
        return Agent(source, kwargs, columns)

    answer_calls(channel, load, lambda _: nullcontext())


class Agent:
    """A function or a command, run for one row of the data at a time.

    ``function(base_url=..., api_key=..., seed=..., **columns, **kwargs)``, plain or a coroutine,
    returns the reward: a number, a mapping with ``reward``, or None. A command reads ``seed``,
    ``columns`` and ``kwargs`` as one JSON object from its standard input. Either finds the address
    and the key in ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, too.
    """

    def __init__(
        self, source: str | Sequence[str], kwargs: Mapping[str, Any], columns: Collection[str]
    ) -> None:
        """Load a function by its name, or find the program of a command's words.

        Raises:
            ConfigError: there is no such, it cannot be called with the data's ``columns``, or its
                ``check_kwargs`` refuses ``kwargs``.
        """
        self._kwargs = dict(kwargs)
        self._loop = asyncio.new_event_loop()
        is_command = not isinstance(source, str)
        key = f"{COMMAND_KEY if is_command else KEY}={source!r}"
        twice = sorted({*_OWN, *columns} & kwargs.keys()) + sorted({*_OWN} & {*columns})
        if twice:
            raise ConfigError(
                f"{key}: {', '.join(twice)} would be given twice, by the run, by a column of the "
                "data or by environment.kwargs; rename one"
            )
        self._function: Callable[..., Any] | None = None
        self._words = list(source)
        if is_command:
            if shutil.which(self._words[0]) is None:
                raise ConfigError(
                    f"{key}: there is no program {self._words[0]!r}; give its path, or a program "
                    "that is on PATH"
                )
            return
        self._function = load_function(str(source), key=KEY)
        called = "is called with base_url, api_key, seed, the columns of the data and"
        what = f"{key} {called} environment.kwargs"
        check_columns(self._function, [*_OWN, *kwargs], columns, what)
        check_kwargs(self._function, kwargs, key)

    def call(self, name: str, argument: Any) -> Turn:
        """Run it; ``argument``: base URL, API key, seed and columns."""
        assert name == "run"
        base_url, api_key, seed, columns = argument
        task = {"seed": seed, **columns, **self._kwargs}
        os.environ.update(_variables(base_url, api_key))
        if self._function is None:
            return _run(self._words, task)
        value = self._function(base_url=base_url, api_key=api_key, **task)
        return check_turn(Turn(reward=awaited(value, self._loop), done=True))


def _variables(base_url: str, api_key: str) -> dict[str, str]:
    """Environment variables by which an agent finds the policy."""
    host = "127.0.0.1"  # which a proxy could not reach
    names = ("NO_PROXY", "no_proxy")
    kept = {name: [one for one in os.environ.get(name, "").split(",") if one] for name in names}
    direct = {name: ",".join(dict.fromkeys([*kept[name], host])) for name in names}
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, **direct}


def _run(words: Sequence[str], task: Mapping[str, Any]) -> Turn:
    """Run a command to its end; what it has started ends with it."""
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        kept = bytearray()
        given = json.dumps(task, default=str).encode()
        threads = [
            threading.Thread(target=_write, args=(process.stdin, given), daemon=True),
            threading.Thread(target=_keep, args=(process.stdout, kept), daemon=True),
        ]
        for thread in threads:
            thread.start()
        code = process.wait()
        kill_children()
        for thread in threads:
            thread.join(_CLOSING_S)
    output = bytes(kept).decode(errors="replace").strip()
    if code:
        raise AgentError(f"it ended with exit code {code}; what it wrote ends: {output}")
    return Turn(done=True, info={"output": output} if output else {})


def _write(pipe: IO[bytes], given: bytes) -> None:
    try:
        with pipe:
            pipe.write(given)
    except OSError:  # it does not read
        return


def _keep(pipe: IO[bytes], kept: bytearray) -> None:
    """Read to the end; ``kept`` has the last bytes of it."""
    while piece := pipe.read1(2**16):  # type: ignore[attr-defined]
        kept += piece
        del kept[:-_KEPT]
