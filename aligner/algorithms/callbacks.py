"""Callbacks: users' classes that a run calls after steps, validations and saves."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aligner.config.algorithms.process import CallbackConfig
from aligner.errors import CallbackError, ConfigError
from aligner.importing import check_call, construct, describe_exception, load_function
from aligner.parallel.collectives import on_rank_zero

KEY = "trainer.callbacks"


@dataclass(frozen=True)
class CallbackRun:
    """Properties of the run that a callback can read.

    ``config``: the whole configuration in JSON types. ``folder``: directory of the run's files,
    such as ``metrics.jsonl``. ``total_steps``: index of the last step.
    """

    config: Mapping[str, Any]
    folder: Path
    total_steps: int
    _stop: Callable[[str], None]

    def stop(self, reason: str) -> None:
        """End the run early. The model is validated and saved as after the last step.

        The run ends after the current step if `Callback.on_step_end` or
        `Callback.on_validation_end` calls this method, else after the next step. The same command
        continues the run. ``reason`` is printed.
        """
        self._stop(reason)


class Callback:
    """Base class of users' callbacks, which ``trainer.callbacks`` lists.

    Subclasses override the methods that they need. All callbacks run in the order of the list, on
    rank 0 (with Ray in the driver process), while the other ranks wait. A dry run calls no
    callbacks. An exception ends the run with an error that names the callback. ``metrics`` has the
    names of ``metrics.jsonl``. Changes to it have no effect.
    """

    def on_run_start(self, run: CallbackRun, step: int) -> None:
        """Handle the start of a run, or a restart of its workers. ``step``: last finished step."""

    def on_step_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the end of a step, before its validation. ``metrics`` lacks ``timers/*``."""

    def on_validation_end(self, run: CallbackRun, step: int, metrics: Mapping[str, float]) -> None:
        """Handle the metrics of the validation after ``step`` (0: before the first step)."""

    def on_save(self, run: CallbackRun, step: int, path: Path) -> None:
        """Handle the run state of ``step``, after it is completely written to ``path``.

        With ``exp_manager.async_save``, later steps may be finished, and older states deleted.
        """

    def on_run_end(self, run: CallbackRun, step: int, reason: str) -> None:
        """Handle the end of the run. ``reason``: a sentence, or the error that ended the run."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's part of the run state, in JSON types."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``, a result of `state_dict`, before `on_run_start` of a resumed run."""


# Methods of `Callback` that a run calls, with the names of their arguments.
_HOOKS = {
    name: list(inspect.signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if inspect.isfunction(method)
}


class Callbacks:
    """Callbacks of a run. All ranks must call the methods together, except `failed`."""

    def __init__(self, names: Sequence[str] = (), callbacks: Sequence[Callback] = ()) -> None:
        self._names, self._callbacks = list(names), list(callbacks)
        # Key of each callback's state: its path, and the number of earlier callbacks of this path.
        paths = [name.partition("=")[2] for name in names]
        self._keys = [f"{path}#{paths[:index].count(path)}" for index, path in enumerate(paths)]
        self.stop_reason: str | None = None  # the same on every rank
        self._requested: str | None = None
        self._run: CallbackRun | None = None

    @classmethod
    def load(cls, configured: Sequence[str | CallbackConfig]) -> "Callbacks":
        """Construct the callbacks on rank 0. Raises `ConfigError` for a wrong class or method."""
        entries = [
            CallbackConfig(entry) if isinstance(entry, str) else entry for entry in configured
        ]
        keys = [f"{KEY}[{index}]" for index in range(len(entries))]
        names = [f"{key}={entry.callback}" for key, entry in zip(keys, entries, strict=True)]
        callbacks: list[Callback] = []  # other ranks need the names only
        if names:
            on_rank_zero(lambda: callbacks.extend(map(_construct, keys, names, entries)))
        return cls(names, callbacks)

    def begin(self, config: Mapping[str, Any], folder: Path, total_steps: int) -> None:
        """Store the properties of the run, and clear an earlier request to stop it."""
        self.stop_reason = self._requested = None

        def stop(reason: str) -> None:
            self._requested = self._requested or str(reason)

        self._run = CallbackRun(config, folder, total_steps, stop)

    def notify(self, hook: str, *arguments: Any) -> None:
        """Call ``hook`` of every callback. Raises `CallbackError` on all ranks if one fails."""
        if not self._names:
            return

        def call() -> str | None:
            for name, callback in zip(self._names, self._callbacks, strict=True):
                _call(name, callback, hook, self._run, *arguments)
            return self._requested

        self.stop_reason = on_rank_zero(call)

    def failed(self, step: int, error: BaseException) -> None:
        """Call ``on_run_end`` of every callback, because ``error`` ends the run on this rank."""
        reason = f"{type(error).__name__}: {error}"
        for name, callback in zip(self._names, self._callbacks, strict=False):
            try:
                _call(name, callback, "on_run_end", self._run, step, reason)
            except CallbackError as second:
                error.add_note(str(second))  # the caller raises the first error

    def state_dict(self) -> dict[str, Any]:
        """Return the non-empty states of the callbacks. The result is the same on every rank."""

        def states() -> dict[str, Any]:
            named = zip(self._keys, self._names, self._callbacks, strict=True)
            by_key = {key: _call(name, callback, "state_dict") for key, name, callback in named}
            return {key: state for key, state in by_key.items() if state}

        return on_rank_zero(states) if self._names else {}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Restore ``states``, a result of `state_dict`. Other callbacks are not changed."""

        def load() -> None:
            for key, name, callback in zip(self._keys, self._names, self._callbacks, strict=True):
                if key in states:
                    _call(name, callback, "load_state_dict", states[key])

        if self._names:
            on_rank_zero(load)


def _call(name: str, callback: Callback, hook: str, *arguments: Any) -> Any:
    copies = [dict(value) if isinstance(value, Mapping) else value for value in arguments]
    try:
        return getattr(callback, hook)(*copies)
    except Exception as error:
        raise CallbackError(
            f"{name}: {hook} raised {describe_exception(error)}. Correct the callback, or remove "
            f"it from {KEY}. The same command continues from the last run state"
        ) from error


def _construct(key: str, name: str, entry: CallbackConfig) -> Callback:
    """Import and construct a callback. Raises `ConfigError` for a wrong class or wrong hooks."""
    factory = load_function(entry.callback, key=key, kind="class")
    remedy = f"Set arguments with {key}={{callback: {entry.callback}, kwargs: {{NAME: VALUE}}}}"
    callback = construct(factory, entry.kwargs, name, remedy)
    if not isinstance(callback, Callback):
        raise ConfigError(
            f"{name}: {type(callback).__name__} is not derived from {__name__}.Callback. Make this "
            "class its base class"
        )
    # Reject methods with misspelt names, and methods that do not accept the hook's arguments.
    for hook in (attribute for attribute in dir(callback) if attribute.startswith("on_")):
        if hook in _HOOKS:
            continue
        near = difflib.get_close_matches(hook, _HOOKS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"Hooks are {', '.join(_HOOKS)}."
        raise ConfigError(f"{name}: {hook} is not a hook. {hint} Only hooks may begin with on_")
    for hook, names in _HOOKS.items():
        check_call(
            getattr(callback, hook),
            (),
            f"{name}: {hook}",
            f"Write it as {hook}({', '.join(['self', *names])})",
            positional=len(names),
        )
    return callback
