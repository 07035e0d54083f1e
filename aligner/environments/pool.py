"""Processes of environments and agents, one for each conversation under way."""

import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Literal, NamedTuple

from aligner.child_process import ChildProcess, Wording
from aligner.environments.calls import Form
from aligner.environments.protocol import Start, Turn, check_start, check_turn
from aligner.environments.worker import COMMAND_KEY, KEY
from aligner.errors import EnvironmentCallError, EnvironmentTimeoutError

_WORKER = "aligner.environments.worker"
AGENT_WORKER = "aligner.environments.agent"
_MOST_BYTES = 2**24  # of one answer
FailureReason = Literal["env_timeout", "env_error", "engine_error"]


class Call(NamedTuple):
    """A call of what is in a slot; see `aligner.environments.worker` and ``agent``."""

    slot: int
    name: Literal["begin", "step", "close", "run"]
    argument: Any
    limit_s: float


class Answer(NamedTuple):
    """Return value of a call: a ``Start``, a ``Turn`` or None. ``seconds``: what it took."""

    value: Any
    seconds: float


class Failure(NamedTuple):
    """End of a conversation that is no sample, in one of the reasons and in words.

    ``cause``: what the engine raised; None: it was the environment.
    """

    reason: FailureReason
    text: str
    cause: Exception | None = None


def engine_failure(error: Exception) -> Failure:
    """Failure of a call of the engine: one object, for all conversations that waited for it."""
    return Failure("engine_error", f"the engine raised {type(error).__name__}: {error}", error)


class EnvironmentPool:
    """Slots, each with a process that holds one conversation at a time.

    A process that hangs is killed with all it started, one that raised is ended; the next
    conversation of the slot starts it again. The others do not notice. A conversation that was left
    under way is closed when its slot begins another.
    """

    def __init__(
        self,
        factory: str | Sequence[str],
        kwargs: Mapping[str, Any],
        columns: Collection[str],
        *,
        form: Form | None = None,
        memory_mb: int | None = None,
        runs_agents: bool = False,
    ) -> None:
        """Start the first process, so that a class that cannot be used is refused now.

        ``factory``: the class; with ``runs_agents`` a function, or the words of a command.
        ``columns``: the data's, which the class must take. ``form``: of calls in the chat template,
        for a class with a parameter of this name; None: nobody knows. ``memory_mb``: mebibytes that
        each process may allocate; None: no limit.
        """
        named = dict(columns) if isinstance(columns, Mapping) else sorted(columns)
        self._first = (factory, dict(kwargs), named, form, memory_mb)
        self._module = AGENT_WORKER if runs_agents else _WORKER
        self._memory_mb = memory_mb
        is_command = not isinstance(factory, str)
        self.factory = factory if isinstance(factory, str) else shlex.join(factory)
        self._key = f"{COMMAND_KEY if is_command else KEY}={self.factory!r}"
        self._wording = Wording(
            f"{'agent' if runs_agents else 'environment'} {self.factory!r}",
            "raise environment.timeout_s and total_timeout_s, or make it faster",
            EnvironmentCallError,
            EnvironmentTimeoutError,
        )
        self._processes: dict[int, ChildProcess] = {0: self._started()}
        self._processes[0].wait_until_ready()

    def call(self, calls: Sequence[Call]) -> list[Answer | Failure]:
        """Make calls of different slots at the same time; each has its own time limit."""
        sent = self.begin(calls)
        return [
            began if isinstance(began, Failure) else self.receive(call, began)
            for call, began in zip(calls, sent, strict=True)
        ]

    def begin(self, calls: Sequence[Call]) -> list[float | Failure]:
        """The first half of `call`: when each began (``time.monotonic()``), or how it failed."""
        began = self._start_missing([call.slot for call in calls if call.name in ("begin", "run")])
        for call in calls:
            if call.slot in began:
                continue
            began[call.slot] = time.monotonic()
            try:
                self._processes[call.slot].ask(call.name, call.argument, time_limit_s=call.limit_s)
            except EnvironmentCallError as error:
                began[call.slot] = _failure(error)
        return [began[call.slot] for call in calls]

    def answered(self, slots: Sequence[int], timeout_s: float) -> set[int]:
        """Those ``slots`` with a whole answer or a dead process, within so many seconds."""
        slot_of = {self._processes[slot].fileno(): slot for slot in slots}
        ready = [slot_of[number] for number in wait(list(slot_of), timeout_s)]  # type: ignore[index]
        return {slot for slot in ready if self._processes[slot].has_answer()}

    def kill(self, slot: int) -> None:
        """Kill a slot's process, with all that it started; the next call starts it again."""
        self._processes[slot].close()

    def close(self) -> None:
        """Kill all processes. A later call starts them again."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def pid(self, slot: int) -> int:
        """Process id of a slot's process."""
        return self._processes[slot].pid

    def _started(self) -> ChildProcess:
        return ChildProcess(self._module, self._first, self._wording, most_bytes=_MOST_BYTES)

    def _start_missing(self, slots: Sequence[int]) -> dict[int, float | Failure]:
        """Start processes together, for importing takes a while; those that died meanwhile."""
        known = self._processes
        missing = [slot for slot in slots if not (slot in known and known[slot].alive)]
        failed: dict[int, float | Failure] = {}
        for slot in missing:
            self._processes[slot] = self._started()
        for slot in missing:
            try:
                self._processes[slot].wait_until_ready()
            except EnvironmentCallError as error:
                failed[slot] = _failure(error)
        return failed

    def receive(self, call: Call, began: float) -> Answer | Failure:
        """The second half of `call`, of a call that began at ``began``."""
        process = self._processes[call.slot]
        try:
            answer = process.receive(began + call.limit_s, call.limit_s)
            value, seconds = process.parse(partial(_value_of, call), answer)
        except EnvironmentCallError as error:
            return _failure(error)
        if answer[0] == "raised":
            process.close()  # who knows what it left behind
            text = f"{self._key} raised {value} in {call.name}"
            if value.startswith("MemoryError") and self._memory_mb is not None:
                text += f"; environment.memory_mb={self._memory_mb} is what it may allocate"
            return Failure("env_error", text)
        return Answer(value, seconds)


def _value_of(call: Call, answer: tuple[str, Any]) -> tuple[Any, float]:
    """Return value of a call, or the text of its exception, and its seconds.

    The value is checked again: a child may send anything.
    """
    kind, (value, seconds) = answer
    if kind == "raised":
        return str(value), float(seconds)
    if call.name == "begin":
        return check_start(Start(**value)), float(seconds)
    if call.name == "close":
        return None, float(seconds)
    characters = len(call.argument["content"]) if call.name == "step" else 0
    turn = Turn(**{**value, "steps": [tuple(step) for step in value["steps"]]})
    return check_turn(turn, characters), float(seconds)


def _failure(error: EnvironmentCallError) -> Failure:
    is_late = isinstance(error, EnvironmentTimeoutError)
    return Failure("env_timeout" if is_late else "env_error", str(error))
