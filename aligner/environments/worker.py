"""The environment's process: loads the class once, then holds one conversation at a time.

Messages of `aligner.child_process` are ``call, argument``, where the calls are ``begin`` with
``(seed, columns of the row)``, ``step`` with the policy's message, and ``close``. Answers are
``answer, (value, seconds)`` or ``raised, (text, seconds)``.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from aligner.child_process import Answers
from aligner.environments.calls import Form
from aligner.environments.protocol import Start, Turn, check_start, check_turn
from aligner.errors import AlignerError, ConfigError
from aligner.importing import check_call, describe_exception, load_function

KEY, COMMAND_KEY = "environment.factory", "environment.command"


def load(
    factory: str, kwargs: Mapping[str, Any], columns: Collection[str], form: Form | None
) -> tuple[None, Callable[..., Answers]]:
    """Load the class; `aligner.child_process.serve` calls this in the environment's process."""
    host = Host(load_factory(factory, kwargs, columns, form), kwargs)
    return None, partial(answers_of, host.call)


def answers_of(
    call: Callable[[str, Any], Start | Turn | None], name: str, argument: Any
) -> Answers:
    """The answer to one message: the value of a call or the text of its exception, and seconds."""
    began = time.monotonic()
    value: Any
    try:
        result = call(name, argument)
        kind, value = "answer", None if result is None else vars(result)
    except SystemExit:
        raise
    except BaseException as error:
        kind, value = "raised", describe_exception(error)
    yield kind, (value, time.monotonic() - began)


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
    key = f"{KEY}={factory!r}"
    check_names(["seed", "self"], kwargs, columns, key, "the call")
    is_free = form is not None and "form" not in {*columns, *kwargs}
    reads_calls = is_free and getattr(found, "reads_calls", False)
    takes_form = reads_calls and "form" in inspect.signature(found).parameters
    made = partial(found, form=form) if takes_form else found
    what = f"{key} is made with seed, the columns of the data and environment.kwargs"
    check_columns(made, ["seed", *kwargs], columns, what)
    check_kwargs(found, kwargs, key)
    return made


def check_names(
    own: Collection[str], kwargs: Mapping[str, Any], columns: Collection[str], key: str, giver: str
) -> None:
    """Refuse arguments that have a name twice: of ``own``, ``kwargs`` and the data's ``columns``.

    ``key``: with its value, for the message. ``giver``: gives the arguments ``own``.
    """
    twice = sorted({*own, *columns} & kwargs.keys()) + sorted({*own} & {*columns})
    if twice:
        raise ConfigError(
            f"{key}: {', '.join(twice)} would be given twice, by {giver}, by a column of the data "
            "or by environment.kwargs; rename one"
        )


def check_columns(
    found: Callable[..., Any], names: Sequence[str], columns: Collection[str], what: str
) -> None:
    """Refuse what cannot be called with ``names`` and the columns of each row.

    ``columns``: if they have values, those of `aligner.data.prompts.columns_of_rows`. ``what``:
    begins the message of the `ConfigError`.
    """
    check_call(found, [*names, *columns], what, "Take what it does not need as **columns.")
    for name, row in columns.items() if isinstance(columns, Mapping) else ():
        if row is not None:
            rest = [*names, *(other for other in columns if other != name)]
            remedy = f"Give the row a value of {name!r}, or the parameter a default."
            check_call(found, rest, f"{what}; {row} has no {name!r}", remedy)


def check_kwargs(found: Any, kwargs: Mapping[str, Any], key: str) -> None:
    """Call ``found.check_kwargs(kwargs)``, if there is one.

    Raises:
        ConfigError: it refuses ``kwargs``; the message begins with ``key``.
    """
    try:
        getattr(found, "check_kwargs", lambda kwargs: None)(kwargs)
    except AlignerError as error:
        raise ConfigError(f"{key}: {error}") from error


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
