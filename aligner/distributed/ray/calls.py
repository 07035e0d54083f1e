"""Waits for the results of worker calls on Ray. Errors name the failed or dead worker."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aligner.distributed.ray.worker import WorkerFailure, WorkerIdentity
from aligner.errors import WorkerDiedError, WorkerError, current_step

if TYPE_CHECKING:
    from ray import ObjectRef

_GRACE_S = 5.0  # wait after a failure, because Ray may still report the death that caused it
_LOG_LINES = 20


class WorkerHandle:
    """Handle of one worker. Its methods are called like those of a Ray actor (``.remote``)."""

    def __init__(self, actor: Any, identity: WorkerIdentity) -> None:
        self._actor, self._identity = actor, identity

    def __getattr__(self, method_name: str) -> Any:
        if method_name.startswith("_"):
            raise AttributeError(method_name)

        def remote(*args: Any, **kwargs: Any) -> "ObjectRef":
            return self._actor.call.remote(method_name, current_step(), args, kwargs)

        return SimpleNamespace(remote=remote)

    def __repr__(self) -> str:
        return str(self._identity)


def wait_for(
    calls: "Sequence[tuple[ObjectRef, WorkerIdentity]]", call_name: str, timeout_s: float
) -> list[Any]:
    """Wait for all calls and return their results. Raises as `MultiWorkerFuture.get_results`."""
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError

    # Wait for one result at a time, in any order.
    positions = {ref: position for position, (ref, _) in enumerate(calls)}
    results: list[Any] = [None] * len(calls)
    pending = list(positions)
    deadline = time.monotonic() + timeout_s
    first_failure: WorkerError | None = None
    while pending:
        ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        (ref,) = ready
        worker = calls[positions[ref]][1]
        try:
            results[positions[ref]] = ray.get(ref)
            continue
        except RayActorError as error:
            reason = " ".join(str(error).split("\n")[0].split())
            log_end = last_lines(worker.log)
            raise WorkerDiedError(f"{worker} died in {call_name}: {reason}{log_end}") from None
        except RayError as error:
            cause = error.cause if isinstance(error, RayTaskError) else None
            if not isinstance(cause, WorkerFailure):
                cause = WorkerFailure(f"{type(error).__name__}: {error}", "", None)
        if cause.error is not None:
            cause.error.add_note(
                f"raised by {worker} in {call_name}. Log of the worker: {worker.log}"
            )
            raise cause.error
        # Other exceptions may be the consequence of a dead worker, so a death has precedence.
        if first_failure is None:
            first_failure = WorkerError(
                f"{worker} failed in {call_name}: {cause.message}. Log of the worker: {worker.log}"
            )
            if cause.trace:
                first_failure.add_note(cause.trace)
        deadline = min(deadline, time.monotonic() + _GRACE_S)
    # No death was reported within the grace period.
    if first_failure is not None:
        raise first_failure
    # Workers did not answer in time.
    if pending:
        silent = [calls[positions[ref]][1] for ref in pending]
        raise WorkerError(
            f"{call_name}: no answer within cluster.timeout_s={timeout_s:g} s from "
            f"{', '.join(map(str, silent))}. Raise cluster.timeout_s if the work takes longer"
            f"{last_lines(silent[0].log)}"
        )
    return results


def last_lines(log: str) -> str:
    """Return a worker's last log lines for an error message, or the path if unreadable."""
    try:
        lines = Path(log).read_text(errors="replace").splitlines()[-_LOG_LINES:]
    except OSError:
        return f"\nlog of the worker, on its node: {log}"
    if not lines:
        return f"\nthe worker's log {log} is empty"
    return f"\nlast lines of {log}:\n" + "\n".join(f"  {line}" for line in lines)
