"""Process of an agent: a user's function or command, which calls the policy over HTTP.

    pool ── run ──► Agent ──► function, or command ── HTTP ──► server of the policy
      ▲               │              └─ output ─► thread: its last bytes
      └──── Turn ─────┘

The message ``run`` has ``(base URL, API key, seed, columns of the row)``. Answers are those of
`aligner.environments.worker`, with a ``Turn``.
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
from typing import Any

from aligner.child_process import Answers
from aligner.environments.protocol import Turn, check_turn
from aligner.environments.worker import COMMAND_KEY, KEY, answers_of, awaited, check_arguments
from aligner.errors import ConfigError
from aligner.importing import load_function
from aligner.process_tree import kill_children

_RUN_ARGUMENTS = ("base_url", "api_key", "seed")
_OUTPUT_BYTES = 500  # number of bytes that are kept from the end of a command's output
_CLOSING_S = 2.0  # time limit to read the output after the command has ended


def load(
    source: str | Sequence[str], kwargs: Mapping[str, Any], columns: Collection[str], _form: None
) -> tuple[None, Callable[..., Answers]]:
    """Load the agent in its process, and return the function that answers messages."""
    return None, partial(answers_of, Agent(source, kwargs, columns).call)


class Agent:
    """A user's function or command that sends requests to the policy, run for one row at a time.

    ``function(base_url=..., api_key=..., seed=..., **columns, **kwargs)``, plain or a coroutine,
    returns the reward: a number, a mapping with ``reward``, or None. A command reads ``seed``,
    ``columns`` and ``kwargs`` as one JSON object from its standard input. The address and the key
    are also in the environment variables ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``.
    """

    def __init__(
        self, source: str | Sequence[str], kwargs: Mapping[str, Any], columns: Collection[str]
    ) -> None:
        """Load the function or find the program that ``source`` names.

        Raises `ConfigError` if it does not exist, or if the function does not accept the data's
        ``columns`` and ``kwargs`` as arguments.
        """
        self._kwargs = dict(kwargs)
        self._loop = asyncio.new_event_loop()
        is_command = not isinstance(source, str)
        key = f"{COMMAND_KEY if is_command else KEY}={source!r}"
        self._words = list(source)
        self._function = None if is_command else load_function(str(source), key=KEY)
        function = self._function or (lambda **arguments: None)
        check_arguments(function, _RUN_ARGUMENTS, kwargs, columns, key, "is called")
        if is_command and shutil.which(self._words[0]) is None:
            raise ConfigError(
                f"{key}: the program {self._words[0]!r} was not found. Begin the command with the "
                "path of a program, or with the name of a program on PATH"
            )

    def call(self, name: str, argument: Any) -> Turn:
        """Run the agent once. ``argument``: base URL, API key, seed and columns of a row."""
        assert name == "run"
        # Only the parent limits the time, as an agent's clock stops while the policy answers.
        faulthandler.cancel_dump_traceback_later()
        base_url, api_key, seed, columns = argument
        task = {"seed": seed, **columns, **self._kwargs}
        # The agent must reach the policy without a proxy.
        for variable in ("NO_PROXY", "no_proxy"):
            hosts = [host for host in os.environ.get(variable, "").split(",") if host]
            os.environ[variable] = ",".join(dict.fromkeys([*hosts, "127.0.0.1"]))
        os.environ.update(OPENAI_BASE_URL=base_url, OPENAI_API_KEY=api_key)
        if self._function is None:
            return _run(self._words, task)
        value = self._function(base_url=base_url, api_key=api_key, **task)
        return check_turn(Turn(reward=awaited(value, self._loop), done=True))


def _run(words: Sequence[str], task: Mapping[str, Any]) -> Turn:
    """Run a command until it ends, then kill all processes that it has started."""
    # The task is on the standard input, and only the end of the output is kept.
    with tempfile.TemporaryFile() as task_file:
        task_file.write(json.dumps(task, default=str).encode())
        task_file.seek(0)
        process = subprocess.Popen(
            words, stdin=task_file, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
    assert process.stdout is not None
    output, pipe = bytearray(), process.stdout

    def read() -> None:
        while piece := pipe.read1(2**16):  # type: ignore[attr-defined]
            output.extend(piece)
            del output[:-_OUTPUT_BYTES]

    with process:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        # Other processes of the command may keep the pipe open.
        code = process.wait()
        kill_children()
        reader.join(_CLOSING_S)
    text = bytes(output).decode(errors="replace").strip()
    if code:
        raise ChildProcessError(f"it ended with exit code {code}. Its output ends: {text}")
    return Turn(done=True, info={"output": text} if text else {})
