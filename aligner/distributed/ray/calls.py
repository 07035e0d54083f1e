"""Calls of workers on Ray: waiting for them, and errors that name a worker that failed or died."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aligner.distributed.ray.worker import Failure, Seat
from aligner.distributed.step import current_step
from aligner.errors import AlignerError, WorkerDiedError, WorkerError

if TYPE_CHECKING:
    from ray import ObjectRef

_GRACE_S = 5.0  # after a worker failed: until a death that caused it is reported
_LOG_LINES = 20


class WorkerHandle:
    """One worker: ``handle.method.remote(...)`` calls its method and returns Ray's reference.

    ``ray.get`` of it gives what the method returned, or raises a `Failure` with the error.
    """

    def __init__(self, actor: Any, seat: Seat) -> None:
        self._actor, self._seat = actor, seat

    def __getattr__(self, method_name: str) -> Any:
        if method_name.startswith("_"):
            raise AttributeError(method_name)

        def remote(*args: Any, **kwargs: Any) -> "ObjectRef":
            return self._actor.call_with.remote(method_name, current_step(), args, kwargs)

        return SimpleNamespace(remote=remote)

    def __repr__(self) -> str:
        return str(self._seat)


def wait_for(calls: "Sequence[tuple[ObjectRef, Seat]]", what: str, timeout_s: float) -> list[Any]:
    """Results of all calls in order; raises as `MultiWorkerFuture.get_results`."""
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    places = {ref: position for position, (ref, _) in enumerate(calls)}
    results: list[Any] = [None] * len(calls)
    pending = list(places)
    deadline = time.monotonic() + timeout_s
    failed: AlignerError | None = None
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        (ref,) = ready
        seat = calls[places[ref]][1]
        try:
            results[places[ref]] = ray.get(ref)
            continue
        except RayActorError as error:
            raise died(seat, what, error) from None
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            if not isinstance(cause, Failure):
                cause = Failure(f"{type(error).__name__}: {error}", "", None)
        if cause.error is not None:
            cause.error.add_note(f"raised by {seat} in {what}; its log: {seat.log}")
            raise cause.error
        failed = failed or _failed(seat, what, cause)
        deadline = min(deadline, time.monotonic() + _GRACE_S)
    if failed is not None:
        raise failed
    if pending:
        waited = [calls[places[ref]][1] for ref in pending]
        raise WorkerError(
            f"{what}: no answer within cluster.timeout_s={timeout_s:g} s from "
            f"{', '.join(map(str, waited))}; raise it if the work takes longer"
            f"{last_lines(waited[0].log)}"
        )
    return results


def died(seat: Seat, what: str, cause: Exception) -> WorkerDiedError:
    """The error that names a dead worker; ``what``: the call in which it died."""
    reason = " ".join(str(cause).split("\n")[0].split())
    return WorkerDiedError(f"{seat} died in {what}: {reason}{last_lines(seat.log)}")


def last_lines(log: str) -> str:
    """Last lines of a worker's log, to follow a message; its path if it cannot be read."""
    try:
        lines = Path(log).read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return f"\nits log, on its node: {log}"
    if not lines:
        return f"\nits log {log} is empty"
    return f"\nlast lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)


def _failed(seat: Seat, what: str, failure: Failure) -> WorkerError:
    error = WorkerError(f"{seat} failed in {what}: {failure.words}; its log: {seat.log}")
    if failure.trace:
        error.add_note(failure.trace)
    return error
