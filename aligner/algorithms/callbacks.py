"""Callbacks: a user's own classes that follow a run, by the paths in ``trainer.callbacks``."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.config.algorithms.process import CallbackConfig
from aligner.errors import AlignerError, CallbackError, ConfigError
from aligner.importing import check_call, describe_exception, load_function
from aligner.parallel.collectives import on_rank_zero

KEY = "trainer.callbacks"


@dataclass(frozen=True)
class CallbackRun:
    """The run, as a callback sees it.

    ``config``: the whole configuration, as JSON has it. ``folder``: the run's directory, with
    ``metrics.jsonl`` and, at the end, the trained ``.nemo``. ``total_steps``: number of the last
    step.
    """

    config: Mapping[str, Any]
    folder: Path
    total_steps: int
    _stop: Callable[[str], None]

    def stop(self, reason: str) -> None:
        """End the run as its last step does: validated, saved, its ``.nemo`` written.

        In `Callback.on_step_end` and `Callback.on_validation_end` after this step, elsewhere after
        the next one. ``reason`` is printed. The same command goes on from there.
        """
        self._stop(reason)


class Callback:
    """Base of the classes that ``trainer.callbacks`` names; a subclass has the methods it needs.

    They are called in the one process that prints and writes files (on Ray the driver, else rank 0;
    the others wait), in the order of the list, and not in dry runs. What a method raises ends the
    run with an error that names the callback. Metrics are those of ``metrics.jsonl`` by their
    names; changing them changes nothing.
    """

    def on_run_start(self, run: CallbackRun, step: int) -> None:
        """Everything is built; ``step`` steps are made, 0 in a new run.

        On Ray also when the run goes on after a worker has died.
        """

    def on_step_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """Step ``step`` (from 1) is made, not yet validated or saved.

        ``metrics``: of the step, without times.
        """

    def on_validation_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """The model was validated after ``step`` (0: before the first one); ``metrics`` of that."""

    def on_save(self, run: CallbackRun, step: int, path: Path) -> None:
        """The run state of ``step`` is complete in the directory ``path``.

        With ``exp_manager.async_save`` that may be some steps later. It is deleted once it is
        neither among the last nor the best.
        """

    def on_run_end(self, run: CallbackRun, step: int, reason: str) -> None:
        """The run is over after ``step``; report and ``.nemo``, if any, are written.

        ``reason``: why, in words; after an error its name and message.
        """

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run's callback needs, as JSON has it; kept in run states."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; called before `on_run_start`."""


# Methods of `Callback` that a run calls, each with the names of its arguments.
_HOOKS = {
    name: list(inspect.signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if inspect.isfunction(method)
}


class Callbacks:
    """The callbacks of a run; every rank calls the methods, only rank 0 has the callbacks."""

    def __init__(self, named: Sequence[str] = (), callbacks: Sequence[Callback] = ()) -> None:
        """``named``: ``key=value`` of each, on every rank; ``callbacks``: none but on rank 0."""
        self._named, self._callbacks = list(named), list(callbacks)
        self.stop_reason: str | None = None  # the same on every rank
        self._asked: str | None = None
        self._run: CallbackRun | None = None

    @classmethod
    def load(cls, configured: Sequence[str | CallbackConfig]) -> "Callbacks":
        """Import and construct them on rank 0.

        Raises:
            ConfigError: one cannot be imported or constructed, or is no `Callback`.
        """
        entries = [
            one if isinstance(one, CallbackConfig) else CallbackConfig(one) for one in configured
        ]
        named = [f"{KEY}[{place}]={one.callback}" for place, one in enumerate(entries)]
        made: list[Callback] = []

        def construct() -> None:
            for place, (name, entry) in enumerate(zip(named, entries, strict=True)):
                made.append(_construct(f"{KEY}[{place}]", name, entry))

        if named:
            on_rank_zero(construct)
        return cls(named, made)

    def begin(self, config: Mapping[str, Any], folder: Path, total_steps: int) -> None:
        """Set the run; a stop that an earlier attempt asked for is forgotten."""
        self.stop_reason = self._asked = None
        self._run = CallbackRun(config, folder, total_steps, self._ask_to_stop)

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call ``hook`` of every callback; what one raises is raised on every rank.

        Raises:
            CallbackError: one of them raised.
        """
        if not self._named:
            return

        def call() -> str | None:
            for name, callback in zip(self._named, self._callbacks, strict=True):
                _call(name, callback, hook, self._run, *arguments)
            return self._asked

        self.stop_reason = on_rank_zero(call)

    def failed(self, step: int, error: BaseException) -> None:
        """Report a run that ends with ``error``, on this rank only: others may be gone."""
        reason = f"{type(error).__name__}: {error}"
        for name, callback in zip(self._named, self._callbacks, strict=False):
            try:
                _call(name, callback, "on_run_end", self._run, step, reason)
            except CallbackError as second:
                error.add_note(str(second))  # the first error is the one that is raised

    def state_dict(self) -> dict[str, Any]:
        """States of the callbacks that have one, by their paths; the same on every rank."""

        def states() -> dict[str, Any]:
            pairs = zip(self._keys(), self._callbacks, strict=True)
            found = {key: _call(name, callback, "state_dict") for (key, name), callback in pairs}
            return {key: state for key, state in found.items() if state}

        return on_rank_zero(states) if self._named else {}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; a callback that was not there then begins anew."""

        def load() -> None:
            for (key, name), callback in zip(self._keys(), self._callbacks, strict=True):
                if key in states:
                    _call(name, callback, "load_state_dict", states[key])

        if self._named:
            on_rank_zero(load)

    def _keys(self) -> list[tuple[str, str]]:
        """Key of the state and ``key=value`` of each: the path, numbered where it occurs again."""
        paths = [name.partition("=")[2] for name in self._named]
        return [
            (f"{path}#{paths[:place].count(path)}", name)
            for place, (path, name) in enumerate(zip(paths, self._named, strict=True))
        ]

    def _ask_to_stop(self, reason: str) -> None:
        self._asked = self._asked or str(reason)


def _call(name: str, callback: Callback, hook: str, *arguments: Any) -> Any:
    given = [dict(one) if isinstance(one, Mapping) else one for one in arguments]
    try:
        return getattr(callback, hook)(*given)
    except Exception as error:
        raise CallbackError(
            f"{name}: {hook} raised {describe_exception(error)}; correct it, or leave it out of "
            f"{KEY}: the same command goes on from the last run state"
        ) from error


def _construct(key: str, name: str, entry: CallbackConfig) -> Callback:
    factory = load_function(entry.callback, key=key, kind="class")
    check_call(
        factory,
        entry.kwargs,
        f"{name}: its constructor",
        f"Give arguments as {key}={{callback: {entry.callback}, kwargs: {{NAME: VALUE}}}}",
    )
    try:
        callback = factory(**entry.kwargs)
    except AlignerError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}: its constructor raised {describe_exception(error)}; it was given "
            f"{dict(entry.kwargs)}"
        ) from error
    if not isinstance(callback, Callback):
        raise ConfigError(
            f"{name}: makes a {type(callback).__name__}, which is no {__name__}.Callback; derive "
            "the class from that"
        )
    for hook in (one for one in dir(callback) if one.startswith("on_") and one not in _HOOKS):
        near = difflib.get_close_matches(hook, _HOOKS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(_HOOKS)}."
        raise ConfigError(f"{name}: nobody calls {hook}; {meant} Begin other names otherwise")
    for hook, names in _HOOKS.items():
        check_call(
            getattr(callback, hook),
            (),
            f"{name}: {hook}",
            f"Write it as {hook}({', '.join(['self', *names])})",
            positional=len(names),
        )
    return callback
