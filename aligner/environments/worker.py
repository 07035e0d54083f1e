"""Process of an environment, which runs one conversation at a time.

Messages are ``begin`` with ``(seed, columns of the row)``, ``step`` with the policy's message, and
``close``. The process answers with ``("answer", value)``. After an exception, it answers with the
result of `failure_kind` and the text of the exception.
"""

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from aligner.child_process import Answers
from aligner.environments.calls import Form
from aligner.environments.protocol import FailureKind, Start, Turn, check_start, check_turn
from aligner.errors import AlignerError, ConfigError, raised_as
from aligner.importing import check_call, describe_exception, load_function

KEY, COMMAND_KEY = "environment.factory", "environment.command"
_FAULTS = (NameError, ImportError, AttributeError, TypeError, NotImplementedError, SyntaxError)
_ERRORS_OF_VALUES = (AssertionError, IndexError, KeyError, ValueError, ZeroDivisionError)


def load(
    factory: str, kwargs: Mapping[str, Any], columns: Collection[str], form: Form | None
) -> tuple[None, Callable[..., Answers]]:
    """Load the class in its process, and return the function that answers messages."""
    host = Host(load_factory(factory, kwargs, columns, form), kwargs)
    return None, partial(answers_of, host.call)


def answers_of(
    call: Callable[[str, Any], Start | Turn | None], name: str, argument: Any
) -> Answers:
    """Yield ("answer", the call's result as a dict), or the `failure_kind` and exception text."""
    value: Any
    try:
        result = call(name, argument)
        kind, value = "answer", None if result is None else vars(result)
    except SystemExit:
        raise
    except BaseException as error:
        kind, value = failure_kind(name, error), describe_exception(error)
    yield kind, value


def failure_kind(name: str, error: BaseException) -> FailureKind:
    """Classify an error of the call ``name``: can the conversation succeed if it is repeated?

    ``raised``: yes. ``fault``: the code seems wrong, at least for some texts of the policy.
    ``final``: no, the same error would be raised again.
    """
    is_fault = isinstance(error, _FAULTS)
    # `begin` has the same seed and row in a repetition, and does not depend on the policy.
    is_error_of_values = isinstance(error, AlignerError) or type(error) in _ERRORS_OF_VALUES
    is_same = name == "begin" and (is_fault or is_error_of_values)
    if is_same or isinstance(error, ConfigError | NameError | ImportError):
        return "final"
    return "fault" if is_fault else "raised"


def load_factory(
    factory: str, kwargs: Mapping[str, Any], columns: Collection[str], form: Form | None = None
) -> Callable[..., Any]:
    """Load the class with the path ``factory``, and bind the argument ``form`` if it needs one.

    ``form``: format of tool calls in the chat template, for a class with the attribute
    ``reads_calls`` and the parameter ``form``. A column or key of ``kwargs`` named ``form``
    overrides it. Raises `ConfigError` if the class does not accept ``columns`` and ``kwargs``.
    """
    factory_class = load_function(factory, key=KEY, kind="class")
    key = f"{KEY}={factory!r}"
    methods = ("init", "step") if isinstance(factory_class, type) else ()
    missing = [name for name in methods if not callable(getattr(factory_class, name, None))]
    if missing:
        raise ConfigError(
            f"{key} has no method {' and no method '.join(missing)}. See docs/environments.md"
        )
    needs_form = form is not None and "form" not in {*columns, *kwargs}
    reads_calls = needs_form and getattr(factory_class, "reads_calls", False)
    has_form = reads_calls and "form" in inspect.signature(factory_class).parameters
    names = ["seed", "form"] if has_form else ["seed"]
    check_arguments(factory_class, names, kwargs, columns, key, "is made", "self")
    return partial(factory_class, form=form) if has_form else factory_class


def check_arguments(
    function: Callable[..., Any],
    names: Sequence[str],
    kwargs: Mapping[str, Any],
    columns: Collection[str],
    key: str,
    call: str,
    *reserved: str,
) -> None:
    """Raise `ConfigError` if ``function`` does not accept the arguments of the run.

    The arguments are ``names``, the columns of a row, and ``kwargs``. ``columns``: names, or the
    result of `aligner.data.prompts.columns_of_rows`. ``key``: configuration key and value of the
    function. ``call``: verb of the error message. ``reserved``: names that columns cannot have.
    """
    run_names = {*names, *reserved}
    repeated = sorted({*run_names, *columns} & kwargs.keys()) + sorted(run_names & {*columns})
    if repeated:
        raise ConfigError(
            f"{key}: {', '.join(repeated)} would be given twice. Arguments come from the run, from "
            "the columns of the data and from environment.kwargs. Rename the column or the key"
        )
    message = (
        f"{key} {call} with {', '.join(names)}, the columns of the data and environment.kwargs"
    )
    fixed_names = [*names, *kwargs]
    check_call(function, [*fixed_names, *columns], message, "Add **columns to accept all columns.")
    for name, row in columns.items() if isinstance(columns, Mapping) else ():
        if row is not None:
            arguments = [*fixed_names, *(column for column in columns if column != name)]
            remedy = f"Add a value of {name!r} to the row, or a default to the parameter."
            check_call(function, arguments, f"{message}; {row} has no {name!r}", remedy)
    with raised_as(ConfigError, key, AlignerError):
        getattr(function, "check_kwargs", lambda kwargs: None)(kwargs)


class Host:
    """Runs one conversation at a time, with an event loop for coroutines."""

    def __init__(self, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        self._factory, self._kwargs = factory, kwargs
        self._loop = asyncio.new_event_loop()
        self._environment: Any = None

    def call(self, name: str, argument: Any) -> Start | Turn | None:
        """Answer the message ``name``, and check what the environment returns."""
        if name == "begin":
            # Close an unfinished conversation, whose errors no longer matter.
            with suppress(Exception):
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
    """Return ``value``, or its result if it is a coroutine."""
    return loop.run_until_complete(value) if inspect.isawaitable(value) else value
