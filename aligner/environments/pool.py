"""Processes of environments and agents, one for each running conversation.

driver ── Call ──► EnvironmentPool ── message ──► process of the slot (worker or agent)
   ▲                   │      ▲                            │
   └─ answer, Failure ─┘      └─────── kind, payload ──────┘
"""

import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, cast, get_args

from aligner.child_process import ProcessPool, Program
from aligner.environments.calls import Form
from aligner.environments.protocol import FailureKind, Start, Turn, check_start, check_turn
from aligner.environments.worker import COMMAND_KEY, KEY
from aligner.errors import AlignerError, EnvironmentCallError, EnvironmentTimeoutError

_MAX_BYTES = 2**24  # of an answer
CallName = Literal["begin", "step", "close", "run"]
FailureReason = Literal["env_timeout", "env_error", "engine_error"]


class Call(NamedTuple):
    """Message to the process of ``slot``. ``limit_s``: seconds until the answer must arrive."""

    slot: int
    name: CallName
    argument: Any
    limit_s: float


class CallAnswer(NamedTuple):
    """Return value of a call."""

    value: Start | Turn | None


class Failure(NamedTuple):
    """Failure of a conversation: a reason code and a message."""

    reason: FailureReason
    text: str
    cause: Exception | None = None  # the engine's exception, if the engine failed
    kind: FailureKind = "raised"


def engine_failure(error: Exception) -> Failure:
    """Return the failure for all conversations that waited for a failed call of the engine."""
    return Failure("engine_error", f"the engine raised {type(error).__name__}: {error}", error)


class EnvironmentPool(ProcessPool):
    """Pool of slots. A slot has a process, which runs one conversation at a time.

    A process that hangs or raises is killed with its children. The next conversation in the slot
    starts a new process. A slot closes an unfinished conversation when it begins the next.
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
        """Start the first process, so that an unusable class is refused now.

        ``factory``: dotted path of a class or of an agent's function, or the words of a command.
        ``columns``: columns of the data, which the class or function must accept as arguments.
        ``form``: format of tool calls in the chat template, for classes with this parameter.
        """
        is_path = isinstance(factory, str)
        self.factory = factory if is_path else shlex.join(factory)
        self._key = f"{KEY if is_path else COMMAND_KEY}={self.factory!r}"
        self.name = f"{'agent' if runs_agents else 'environment'} {self.factory!r}"
        column_names = dict(columns) if isinstance(columns, Mapping) else sorted(columns)
        super().__init__(
            Program(
                f"aligner.environments.{'agent' if runs_agents else 'worker'}",
                (factory, dict(kwargs), column_names, form),
                self.name,
                "raise environment.timeout_s and total_timeout_s, or make it faster",
                EnvironmentCallError,
                EnvironmentTimeoutError,
                memory_mb,
                _MAX_BYTES,
            )
        )

    def begin(self, calls: Sequence[Call]) -> list[float | Failure]:
        """Send ``calls``. Returns the time of each by ``time.monotonic()``, or its failure."""
        # Only a first call may start a process.
        errors = self.start([call.slot for call in calls if call.name in ("begin", "run")])
        began: dict[int, float | Failure] = {slot: _failure(errors[slot]) for slot in errors}
        for call in calls:
            if call.slot in began:
                continue
            began[call.slot] = time.monotonic()
            try:
                self._processes[call.slot].ask(call.name, call.argument, time_limit_s=call.limit_s)
            except EnvironmentCallError as error:
                began[call.slot] = _failure(error)
        return [began[call.slot] for call in calls]

    def answered(
        self, slots: Sequence[int], timeout_s: float, wake: Connection | None = None
    ) -> set[int]:
        """Wait for at most ``timeout_s``, and return the slots with an answer or a dead process.

        A message on ``wake`` ends the wait.
        """
        processes = {self._processes[slot].fileno(): slot for slot in slots}
        ready = wait([*processes, *([] if wake is None else [wake])], timeout_s)
        slots = [slot for descriptor, slot in processes.items() if descriptor in ready]
        return {slot for slot in slots if self._processes[slot].has_answer()}

    def receive(self, call: Call, began: float) -> CallAnswer | Failure:
        """Wait for the answer to ``call``, which was sent at the time ``began`` (see `begin`)."""
        process = self._processes[call.slot]
        try:
            kind, payload = process.receive(began + call.limit_s, call.limit_s)
            value = process.parse(partial(_value_of, call, kind), payload)
        except EnvironmentCallError as error:
            return _failure(error)
        if not isinstance(value, str):
            return CallAnswer(value)
        # The exception may have left the process in any state.
        process.close()
        text = f"{self._key} raised {value} in {call.name}"
        memory_mb = self._program.memory_mb
        if value.startswith("MemoryError") and memory_mb is not None:
            text += f". It may allocate environment.memory_mb={memory_mb} MiB"
        return Failure("env_error", text, kind=cast(FailureKind, kind))


def _value_of(call: Call, kind: str, payload: Any) -> Start | Turn | str | None:
    if kind in get_args(FailureKind):
        return str(payload)
    # The value is checked again, as a child process may send any message.
    if call.name == "begin":
        return check_start(Start(**payload))
    if call.name == "close":
        return None
    characters = len(call.argument["content"]) if call.name == "step" else 0
    steps = [tuple(step) for step in payload["steps"]]
    return check_turn(Turn(**{**payload, "steps": steps}), characters)


def _failure(error: AlignerError) -> Failure:
    is_late = isinstance(error, EnvironmentTimeoutError)
    return Failure("env_timeout" if is_late else "env_error", str(error))
