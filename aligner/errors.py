"""Every error a user can meet.

Each derives from ``AlignerError`` and from the standard type it refines, so both
``except AlignerError`` and ``except ValueError`` work as usual. A message names the
key, the value it had, and what to do about it.
"""

import contextlib
from collections.abc import Iterator


class AlignerError(Exception):
    """Root of all errors raised on purpose by this library."""


class ConfigError(AlignerError, ValueError):
    """A configuration key is unknown, missing, or has a value that cannot work."""


class LayoutError(AlignerError, ValueError):
    """A parallel layout does not fit the model or the number of processes."""


class DataError(AlignerError, ValueError):
    """A data file, a row or a column is not what the configuration promises."""


class TokenizerError(AlignerError, ValueError):
    """A tokenizer cannot be loaded or lacks a feature that is needed."""


class CheckpointError(AlignerError, ValueError):
    """An archive or a run state is damaged, foreign, unsafe, or does not fit the model."""


class DamagedStateError(CheckpointError):
    """A run state whose files are not what was written: cut short, altered, or unreadable."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The checkpoint that the configuration names does not exist."""


class StorageError(AlignerError, OSError):
    """A directory cannot be written, or the disk is full."""


class RewardError(AlignerError, RuntimeError):
    """A reward function raised, or returned the wrong number or kind of values."""


class RewardTimeoutError(RewardError, TimeoutError):
    """A reward function did not answer within its time limit."""


class RewardServerError(RewardError, ConnectionError):
    """A reward server cannot be reached, refuses, or answers what cannot be used.

    The message names its address and the cause.
    """


class EnvironmentCallError(AlignerError, RuntimeError):
    """Conversations failed more often than a rollout may begin again, or none was scored."""


class EnvironmentTimeoutError(EnvironmentCallError, TimeoutError):
    """An environment did not answer within its time limit."""


class CallbackError(AlignerError, RuntimeError):
    """A callback of ``trainer.callbacks`` raised; the message names it and the cause."""


class NonFiniteError(AlignerError, FloatingPointError):
    """A loss or a gradient is NaN or infinite, and ``non_finite`` is set to stop the run."""


class DeviceMemoryError(AlignerError, MemoryError):
    """A dry run took more memory than the device has; the message names the phase."""


class WorkerError(AlignerError, RuntimeError):
    """A worker process failed or died."""


class WorkerDiedError(WorkerError):
    """A worker process ended while it was needed: killed, out of memory, or its node is gone.

    The message names its role, rank, node and the last lines of its log.
    """


class DryDeviceError(AlignerError, RuntimeError):
    """The dry device is not available here, or does not compute a value that is read."""


class NativeCodeError(AlignerError, RuntimeError):
    """A C++ file of the library cannot be compiled or loaded here."""


class VersionError(AlignerError, ImportError):
    """A library is installed in a version that this one does not work with."""


class MissingPackageError(AlignerError, ImportError):
    """An optional package that a setting or a file needs is not installed."""


@contextlib.contextmanager
def raised_as(
    kind: type[AlignerError], text: str, *caught: type[Exception], remedy: str = ""
) -> Iterator[None]:
    """Raise errors of the block as ``kind``, with ``text``, the cause and ``remedy`` as message.

    Args:
        kind: class of the error that is raised.
        text: what has failed, with the key or the file.
        caught: classes of errors that are raised so; default: all. Errors of this library are
            raised as they are, unless their own class is named.
        remedy: what to do about it.
    """
    try:
        yield
    except Exception as error:
        named = tuple(each for each in caught if issubclass(each, AlignerError))
        is_ours = isinstance(error, AlignerError) and not isinstance(error, named)
        if is_ours or not isinstance(error, caught or Exception):
            raise
        cause = f"no {error}" if isinstance(error, KeyError) else str(error) or repr(error)
        raise kind(f"{text}: {cause}{remedy and '; '}{remedy}") from error
