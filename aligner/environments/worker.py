"""The environment's process: loads the class once, then holds one conversation at a time.

Messages are those of `aligner.child_process`. Parent to child: first ``(class, kwargs, columns,
form of calls, mebibytes it may allocate | None)``, then ``(number, call, argument, time limit in
seconds)``, where the calls are ``begin`` with ``(seed, columns of the row)``, ``step`` with the
policy's message, and ``close``. Child to parent: ``answer, (value, seconds)`` or ``raised, (text,
seconds)``.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol

from aligner.child_process import Channel, ended_after, limit_memory, refusal
from aligner.environments.calls import Form
from aligner.environments.protocol import Start, Turn, check_start, check_turn
from aligner.errors import AlignerError, ConfigError
from aligner.importing import check_call, describe_exception, load_function

KEY, COMMAND_KEY = "environment.factory", "environment.command"


class Callee(Protocol):
    """Object whose calls a process answers."""

    def call(self, name: str, argument: Any) -> Start | Turn | None:
        """Return value of a call."""
        ...


# Makes it of what is named, keyword arguments, the data's columns and a form of calls.
Load = Callable[[Any, Mapping[str, Any], Collection[str], Form | None], Callee]


def main(channel: int) -> None:
    """Serve on the inherited socket ``channel`` until the parent closes it or is gone."""

    def load(factory: Any, kwargs: Any, columns: Any, form: Any) -> "Host":
        return Host(load_factory(factory, kwargs, columns, form), kwargs)

    answer_calls(channel, load, ended_after)


def answer_calls(
    channel: int, load: Load, bounded: Callable[[float], AbstractContextManager[None]]
) -> None:
    """Answer calls on the inherited socket ``channel`` until the parent closes it or is gone.

    Args:
        channel: the socket's number.
        load: makes what is called.
        bounded: entered for each call with its time limit in seconds.
    """
    parent = Channel(channel)
    try:
        *loaded, memory_mb = parent.receive()
        if memory_mb is not None:
            limit_memory(memory_mb)
        host = load(*loaded)
    except AlignerError as error:
        parent.send(0, *refusal(error))
        return
    parent.send(0, "ready", None)
    while True:
        try:
            number, call, argument, limit_s = parent.receive()
        except EOFError:
            return
        with bounded(limit_s):
            began = time.monotonic()
            value: Any
            try:
                result = host.call(call, argument)
                kind, value = "answer", None if result is None else vars(result)
            except SystemExit:
                raise
            except BaseException as error:
                kind, value = "raised", describe_exception(error)
            parent.send(number, kind, (value, time.monotonic() - began))


def load_factory(
    factory: str,
    kwargs: Mapping[str, Any],
    columns: Collection[str],
    form: Form | None = None,
) -> Callable[..., Any]:
    """The class that ``environment.factory`` names.

    ``form``: of calls in the chat template, for a class with the attribute ``reads_calls`` and a
    parameter of this name; a column or one of ``kwargs`` comes first.

    Raises:
        ConfigError: it cannot be imported, is no environment, or cannot be made of the data's
            ``columns`` and ``kwargs``, or its ``check_kwargs`` refuses ``kwargs``.
    """
    found = load_function(factory, key=KEY, kind="class")
    if isinstance(found, type):
        lacking = [name for name in ("init", "step") if not callable(getattr(found, name, None))]
        if lacking:
            raise ConfigError(
                f"{KEY}={factory!r} has no method {' and no method '.join(lacking)}; see "
                "docs/environments.md"
            )
    own = {"seed", "self"}  # of the call
    twice = sorted({*own, *columns} & kwargs.keys()) + sorted(own & {*columns})
    if twice:
        raise ConfigError(
            f"{KEY}={factory!r}: {', '.join(twice)} would be given twice, by the call, by a "
            "column of the data or by environment.kwargs; rename one"
        )
    named = found
    if form is not None and "form" not in {*columns, *kwargs} and _takes_form(found):
        found = partial(found, form=form)
    what = f"{KEY}={factory!r} is made with seed, the columns of the data and environment.kwargs"
    check_columns(found, ["seed", *kwargs], columns, what)
    check_kwargs(named, kwargs, f"{KEY}={factory!r}")
    return found


def check_columns(
    found: Callable[..., Any], names: Sequence[str], columns: Collection[str], what: str
) -> None:
    """Refuse what cannot be called with ``names`` and the columns of each row.

    ``columns``: where they have values, of `aligner.data.prompts.columns_of_rows`. ``what``: begins
    the message of the `ConfigError`.
    """
    check_call(found, [*names, *columns], what, "Take what it does not need as **columns.")
    for name, row in columns.items() if isinstance(columns, Mapping) else ():
        if row is not None:
            rest = [*names, *(other for other in columns if other != name)]
            remedy = f"Give the row a value of {name!r}, or the parameter a default."
            check_call(found, rest, f"{what}; {row} has no {name!r}", remedy)


def check_kwargs(found: Any, kwargs: Mapping[str, Any], key: str) -> None:
    """Ask the ``check_kwargs`` of what ``environment.factory`` names, where it has one.

    ``key``: with its value, for the message.

    Raises:
        ConfigError: it refuses ``kwargs``.
    """
    check = getattr(found, "check_kwargs", None)
    if check is None:
        return
    try:
        check(kwargs)
    except AlignerError as error:
        raise ConfigError(f"{key}: {error}") from error


def _takes_form(found: Callable[..., Any]) -> bool:
    reads_calls = bool(getattr(found, "reads_calls", False))
    return reads_calls and "form" in inspect.signature(found).parameters


class Host:
    """One conversation at a time, and the event loop of its coroutines."""

    def __init__(self, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        """Nothing is made yet."""
        self._factory, self._kwargs = factory, kwargs
        self._loop = asyncio.new_event_loop()
        self._environment: Any = None

    def call(self, name: str, argument: Any) -> Start | Turn | None:
        """Do what a message asks for and check what comes back."""
        if name == "begin":
            with suppress(Exception):  # of a conversation that was left under way
                self._close()
            seed, columns = argument
            self._environment = self._factory(seed=seed, **columns, **self._kwargs)
            return check_start(awaited(self._environment.init(), self._loop))
        if name == "step":
            characters = len(argument["content"])  # the environment may change the message
            return check_turn(awaited(self._environment.step(argument), self._loop), characters)
        self._close()
        return None

    def _close(self) -> None:
        environment, self._environment = self._environment, None
        close = getattr(environment, "close", None)
        if close is not None:
            awaited(close(), self._loop)


def awaited(value: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """``value``; of a coroutine, its result."""
    return loop.run_until_complete(value) if inspect.isawaitable(value) else value
