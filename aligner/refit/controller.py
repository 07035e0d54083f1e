"""Weights from a policy to the engines that sample for it: the controller's side.

::

    policy workers                          engines
      tensor made whole on all ranks          reload begins
      group of a byte budget  ── shared memory, CUDA IPC or broadcast ──►  loaded layer by layer
      next group ...                          reload ends, caches of old keys and values dropped

Nothing touches the disk, and no process holds the model a second time: a group is at most the
budget. Names and shapes are those of a Hugging Face state dict.
"""

from collections.abc import Collection, Sequence
from typing import Any

from aligner.distributed.interfaces import WorkerFuture, WorkerGroup
from aligner.distributed.workers import on_all_workers, phase, run_on_all, start_on_all
from aligner.refit.ends import RefitEnd
from aligner.refit.receiver import RefitReceiver
from aligner.refit.worker import RefitWorker


class RefitSource:
    """A policy's part of a refit; its workers are `RefitWorker`."""

    worker_group: WorkerGroup

    def refit_ends(self) -> list[RefitEnd]:
        """Places of the workers and the versions they send with, by rank."""
        return run_on_all(self.worker_group, RefitWorker.refit_end)

    prepare_refit_info = on_all_workers(RefitWorker.prepare_refit_info)

    def prepare_weights_for_ipc(
        self, _refit_buffer_size_gb: float | None = None
    ) -> list[list[str]]:
        """Names of all weights in groups of at most this many GiB; default what all workers have.

        A tensor that is larger than the budget is a group of its own.
        """
        results = run_on_all(self.worker_group, RefitWorker.prepare_weights_for_ipc)
        sizes, _ = results[0]
        budget = min(available for _, available in results)
        if _refit_buffer_size_gb is not None:
            budget = int(_refit_buffer_size_gb * 1024**3)
        return group_by_bytes(sizes, budget)

    def get_weights_ipc_handles(
        self, keys: Sequence[str], readers: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Offer some weights; what opens them, by machine or device. See `RefitWorker`."""
        offers = run_on_all(
            self.worker_group, RefitWorker.get_weights_ipc_handles, list(keys), readers
        )
        return {key: handle for offered in offers for key, handle in offered.items()}

    def open_meeting_place(self, timeout_s: float) -> tuple[str, int]:
        """Address and port of a store of rank 0, where processes find each other."""
        places = run_on_all(self.worker_group, RefitWorker.open_meeting_place, timeout_s)
        return next(place for place in places if place is not None)

    def init_collective(
        self, ip: str, port: int, world_size: int, timeout_s: float = 600.0
    ) -> WorkerFuture:
        """Begin to meet the engines; the caller waits, for the engines must come at once."""
        return start_on_all(
            self.worker_group, RefitWorker.init_collective, ip, port, world_size, timeout_s
        )

    def broadcast_weights_for_collective(self, keys: Sequence[str] | None = None) -> WorkerFuture:
        """Begin to send weights (default all); the caller waits, for the engines must receive."""
        names = None if keys is None else list(keys)
        return start_on_all(self.worker_group, RefitWorker.broadcast_weights_for_collective, names)

    offload_before_refit = phase(RefitWorker.offload_before_refit)
    offload_after_refit = phase(RefitWorker.offload_after_refit)


class Refit:
    """Pushes a policy's weights into engines whenever it is called."""

    def __init__(
        self,
        policy: RefitSource,
        engines: WorkerGroup,
        *,
        separate: bool,
        buffer_bytes: int,
        world_size: int,
        timeout_s: float,
    ) -> None:
        """``engines``: a group of `RefitReceiver`.

        ``separate``: by broadcast among ``world_size`` members, else through shared memory.
        """
        self._policy, self._engines = policy, engines
        self._separate = separate
        self._buffer_gb = buffer_bytes / 1024**3
        self._world_size, self._timeout_s = world_size, timeout_s
        self._groups: list[list[str]] | None = None
        self._infos: dict[str, Any] = {}
        self._readers: list[str] = []

    def __call__(self) -> None:
        """Bring the engines' weights to the policy's."""
        self._policy.offload_before_refit()
        groups = self._prepare()
        run_on_all(self._engines, RefitReceiver.begin_refit)
        for keys in groups:
            if self._separate:
                sending = self._policy.broadcast_weights_for_collective(keys)
                infos = [(key, self._infos[key]) for key in keys]
                receiving = start_on_all(self._engines, RefitReceiver.receive_weights, infos)
                sending.get_results()
                receiving.get_results()
            else:
                handles = self._policy.get_weights_ipc_handles(keys, self._readers)
                run_on_all(self._engines, RefitReceiver.load_weights_from_ipc, handles)
        run_on_all(self._engines, RefitReceiver.finish_refit)
        self._policy.offload_after_refit()

    def _prepare(self) -> list[list[str]]:
        """Prepare the parts that are the same in every refit, in the first."""
        if self._groups is None:
            self._groups = self._policy.prepare_weights_for_ipc(self._buffer_gb)
            if self._separate:
                self._infos = self._policy.prepare_refit_info()
                place = self._policy.open_meeting_place(self._timeout_s)
                members = (*place, self._world_size, self._timeout_s)
                meeting = self._policy.init_collective(*members)
                joined = start_on_all(self._engines, RefitReceiver.init_collective, *members)
                meeting.get_results()
                joined.get_results()
            else:
                self._readers = run_on_all(self._engines, RefitReceiver.sharing_key)
        return self._groups


def group_by_bytes(sizes: Sequence[tuple[str, int]], budget: int) -> list[list[str]]:
    """Names in order, cut into groups whose bytes add up to ``budget`` at most.

    A weight larger than the budget makes a group of its own.
    """
    groups: list[list[str]] = []
    left = 0
    for name, size in sizes:
        if not groups or size > left:
            groups.append([])
            left = budget
        groups[-1].append(name)
        left -= size
    return groups
