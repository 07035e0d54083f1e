"""Errors for users of the library.

Each class derives from ``AlignerError`` and from a standard exception, so that both
``except AlignerError`` and ``except ValueError`` work. A message names the key, its value and a
remedy. Errors of the models name the step of the run (`current_step`).
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_step: ContextVar[int] = ContextVar("training step", default=0)


class AlignerError(Exception):
    """Base class of the errors of this library."""


class ConfigError(AlignerError, ValueError):
    """A configuration key is unknown or missing, or its value is invalid."""


class LayoutError(AlignerError, ValueError):
    """A parallel layout does not fit the model or the number of processes."""


class DataError(AlignerError, ValueError):
    """A data file, a row or a column does not match the configuration."""


class TokenizerError(AlignerError, ValueError):
    """A tokenizer cannot be loaded, or lacks a required feature."""


class CheckpointError(AlignerError, ValueError):
    """A checkpoint or run state is damaged, malicious, or does not fit the model."""


class DamagedStateError(CheckpointError):
    """The files of a run state are truncated, altered or unreadable."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint that the configuration names does not exist."""


class StorageError(AlignerError, OSError):
    """A directory is not writable, or the disk is full."""


class RewardError(AlignerError, RuntimeError):
    """A reward function raised an error, or returned the wrong number or kind of values."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function did not answer within its time limit."""


class RewardServerError(RewardError, ConnectionError):
    """A reward server cannot be reached, refuses a request, or sends an invalid answer."""


class EnvironmentCallError(AlignerError, RuntimeError):
    """More conversations failed than ``environment.retries`` allows, or none was scored."""


class EnvironmentTimeoutError(EnvironmentCallError, TimeoutError):
    """An environment did not answer within its time limit."""


class CallbackError(AlignerError, RuntimeError):
    """A callback of ``trainer.callbacks`` raised an error."""


class NonFiniteError(AlignerError, FloatingPointError):
    """A loss or a gradient is NaN or infinite, and the option ``non_finite`` ends the run."""


class DeviceMemoryError(AlignerError, MemoryError):
    """A dry run exceeded the device memory. The message names the phase."""


class WorkerError(AlignerError, RuntimeError):
    """A worker process failed or died."""


class WorkerDiedError(WorkerError):
    """A worker process died during the run, for example out of memory or with its node."""


class DryDeviceError(AlignerError, RuntimeError):
    """The dry device (a simulated GPU) is not available, or lacks a value that the run reads."""


class NativeCodeError(AlignerError, RuntimeError):
    """A C++ file of the library cannot be compiled or loaded."""


class VersionError(AlignerError, ImportError):
    """The installed version of a library is not supported."""


class MissingPackageError(AlignerError, ImportError):
    """An optional package that a setting or a file needs is not installed."""


def error_class(name: str) -> type[AlignerError] | None:
    """Return the error class with the given name, or None."""
    kind = getattr(sys.modules[__name__], name, None)
    return kind if isinstance(kind, type) and issubclass(kind, AlignerError) else None


@contextlib.contextmanager
def raised_as(
    kind: type[AlignerError], text: str, *caught: type[Exception], remedy: str = ""
) -> Iterator[None]:
    """Context manager: convert exceptions to ``kind``, with ``text``, the cause and ``remedy``.

    ``caught``: classes of exceptions to convert, by default all. An `AlignerError` is converted
    only if ``caught`` contains its class.
    """
    try:
        yield
    except Exception as error:
        own_classes = tuple(cls for cls in caught if issubclass(cls, AlignerError))
        is_final = isinstance(error, AlignerError) and not isinstance(error, own_classes)
        if is_final or not isinstance(error, caught or Exception):
            raise
        cause = f"no {error}" if isinstance(error, KeyError) else str(error) or repr(error)
        raise kind(f"{text}: {cause}{remedy and '; '}{remedy}") from error


def json_object(
    content: bytes, kind: type[AlignerError], text: str, remedy: str = ""
) -> dict[str, Any]:
    """Parse a JSON object. Raises ``kind``, with ``text`` and ``remedy``, if this fails."""
    with raised_as(kind, text, ValueError, RecursionError, remedy=remedy):
        value = json.loads(content)
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} is not a JSON object")
    return value


@contextlib.contextmanager
def training_step(step: int) -> Iterator[ContextVar[int]]:
    """Context manager: set `current_step`, and yield its variable for a loop over steps."""
    token = _step.set(step)
    try:
        yield _step
    finally:
        _step.reset(token)


def current_step() -> int:
    """Return the current step, 0 outside of a run."""
    return _step.get()
