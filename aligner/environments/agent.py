"""The agent's process: runs a function or a command of a user's, which asks the policy over HTTP.

Messages are those of `aligner.environments.worker`, with one call: ``run`` with ``(base URL, API
key, seed, columns of the row)``. It returns a ``Turn`` with the reward that the function returned,
None of a command, and in ``info`` the end of what a command wrote.
"""

import asyncio
import faulthandler
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import IO, Any

from aligner.child_process import Answers
from aligner.environments.protocol import Turn, check_turn
from aligner.environments.worker import (
    COMMAND_KEY,
    KEY,
    answers_of,
    awaited,
    check_columns,
    check_kwargs,
    check_names,
)
from aligner.errors import AlignerError, ConfigError
from aligner.importing import load_function
from aligner.process_tree import kill_children

_OWN = ("base_url", "api_key", "seed")
_KEPT = 500  # bytes of what a command wrote last
_CLOSING_S = 2.0  # to read the rest of it


class AgentError(AlignerError):
    """A command ended with an error."""


def load(
    source: str | Sequence[str], kwargs: Mapping[str, Any], columns: Collection[str], form: None
) -> tuple[None, Callable[..., Answers]]:
    """Load the agent; `aligner.child_process.serve` calls this in the agent's process."""
    del form
    return None, partial(answers_of, Agent(source, kwargs, columns).call)


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
        check_names(_OWN, kwargs, columns, key, "the run")
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
        # The parent alone keeps the time: while the policy answers, an agent's clock stands still.
        faulthandler.cancel_dump_traceback_later()
        base_url, api_key, seed, columns = argument
        task = {"seed": seed, **columns, **self._kwargs}
        os.environ.update(_variables(base_url, api_key))
        if self._function is None:
            return _run(self._words, task)
        value = self._function(base_url=base_url, api_key=api_key, **task)
        return check_turn(Turn(reward=awaited(value, self._loop), done=True))


def _variables(base_url: str, api_key: str) -> dict[str, str]:
    """Environment variables by which an agent finds the policy, without a proxy."""
    direct = {}
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        direct[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1"]))
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, **direct}


def _run(words: Sequence[str], task: Mapping[str, Any]) -> Turn:
    """Run a command to its end; what it has started ends with it."""
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps(task, default=str).encode())
        given.seek(0)
        process = subprocess.Popen(
            words, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    assert process.stdout is not None
    with process:
        output = bytearray()
        reader = threading.Thread(target=_keep, args=(process.stdout, output), daemon=True)
        reader.start()
        code = process.wait()
        kill_children()
        reader.join(_CLOSING_S)
    text = bytes(output).decode(errors="replace").strip()
    if code:
        raise AgentError(f"it ended with exit code {code}; what it wrote ends: {text}")
    return Turn(done=True, info={"output": text} if text else {})


def _keep(pipe: IO[bytes], kept: bytearray) -> None:
    """Read to the end; ``kept`` has the last bytes of it."""
    while piece := pipe.read1(2**16):  # type: ignore[attr-defined]
        kept += piece
        del kept[:-_KEPT]
