"""Refit: transfer of a policy's weights to the engines that sample for it. Part of the trainer.

::

    policy workers                             engines
      gather a group of tensors                  begin reload
      send the group  ── shared memory, CUDA IPC or broadcast ──►  load the group
      next group ...                             end reload, drop caches of old keys and values

Weights are not written to disk, and no process stores a second copy of the model. Names and shapes
are those of a Hugging Face state dict.
"""

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from aligner.distributed.interfaces import WorkerFuture, WorkerGroup
from aligner.distributed.workers import on_all_workers, phase, run_on_all, start_on_all
from aligner.refit.ends import RefitEnd
from aligner.refit.receiver import RefitReceiver
from aligner.refit.worker import RefitWorker


class RefitSource:
    """Policy that sends weights. Its workers are `RefitWorker`."""

    worker_group: WorkerGroup

    def refit_ends(self) -> list[RefitEnd]:
        """Return location and library versions of each worker, by rank."""
        return run_on_all(self.worker_group, RefitWorker.refit_end)

    prepare_refit_info = on_all_workers(RefitWorker.prepare_refit_info)

    def prepare_weights_for_ipc(
        self, _refit_buffer_size_gb: float | None = None
    ) -> list[list[str]]:
        """Return the names of all weights, in groups of at most ``_refit_buffer_size_gb`` GiB.

        The default is the largest size for which all workers have memory. A larger tensor is a
        group of its own.
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
        """Return sharing key → handle. See `RefitWorker.get_weights_ipc_handles`."""
        offers = run_on_all(
            self.worker_group, RefitWorker.get_weights_ipc_handles, list(keys), readers
        )
        return {key: handle for offer in offers for key, handle in offer.items()}

    def open_meeting_place(self, timeout_s: float) -> tuple[str, int]:
        """Open a rendezvous for the broadcast on rank 0. Returns its address and port."""
        addresses = run_on_all(self.worker_group, RefitWorker.open_meeting_place, timeout_s)
        return next(address for address in addresses if address is not None)

    def init_collective(
        self, ip: str, port: int, world_size: int, timeout_s: float = 600.0
    ) -> WorkerFuture:
        """Start to join the broadcast group. Let the engines join before waiting for the result."""
        return start_on_all(
            self.worker_group, RefitWorker.init_collective, ip, port, world_size, timeout_s
        )

    def broadcast_weights_for_collective(self, keys: Sequence[str] | None = None) -> WorkerFuture:
        """Start to broadcast the weights ``keys``, by default all.

        Wait for the result after the engines have started to receive.
        """
        names = None if keys is None else list(keys)
        return start_on_all(self.worker_group, RefitWorker.broadcast_weights_for_collective, names)

    offload_before_refit = phase(RefitWorker.offload_before_refit)
    offload_after_refit = phase(RefitWorker.offload_after_refit)


@dataclass(eq=False)
class Refit:
    """Callable that sends a policy's current weights to engines."""

    policy: RefitSource
    engines: WorkerGroup  # its workers are `RefitReceiver`
    _: KW_ONLY
    separate: bool  # broadcast weights instead of sharing memory
    buffer_bytes: int  # maximum size of a group of weights
    world_size: int  # number of members of the broadcast group
    timeout_s: float  # time limit of joining the group and of each broadcast
    _groups: list[list[str]] | None = field(default=None, init=False)
    _infos: dict[str, Any] = field(default_factory=dict, init=False)
    _readers: list[str] = field(default_factory=list, init=False)

    def __call__(self) -> None:
        """Send the policy's weights to the engines."""
        self.policy.offload_before_refit()
        groups = self._prepare()
        run_on_all(self.engines, RefitReceiver.begin_refit)
        # Send one group at a time, so that memory stays within ``buffer_bytes``.
        for keys in groups:
            if self.separate:
                sending = self.policy.broadcast_weights_for_collective(keys)
                infos = [(key, self._infos[key]) for key in keys]
                receiving = start_on_all(self.engines, RefitReceiver.receive_weights, infos)
                sending.get_results()
                receiving.get_results()
            else:
                handles = self.policy.get_weights_ipc_handles(keys, self._readers)
                run_on_all(self.engines, RefitReceiver.load_weights_from_ipc, handles)
        run_on_all(self.engines, RefitReceiver.finish_refit)
        self.policy.offload_after_refit()

    def _prepare(self) -> list[list[str]]:
        """Return the groups of weights. The first call also connects policy and engines."""
        if self._groups is None:
            self._groups = self.policy.prepare_weights_for_ipc(self.buffer_bytes / 1024**3)
            if self.separate:
                self._infos = self.policy.prepare_refit_info()
                address = self.policy.open_meeting_place(self.timeout_s)
                arguments = (*address, self.world_size, self.timeout_s)
                # Start both sides before waiting, because they wait for each other.
                policy_joins = self.policy.init_collective(*arguments)
                engines_join = start_on_all(self.engines, RefitReceiver.init_collective, *arguments)
                policy_joins.get_results()
                engines_join.get_results()
            else:
                self._readers = run_on_all(self.engines, RefitReceiver.sharing_key)
        return self._groups


def group_by_bytes(sizes: Sequence[tuple[str, int]], budget: int) -> list[list[str]]:
    """Split names into groups of at most ``budget`` bytes. A larger weight is alone in its group.

    ``sizes``: name and number of bytes of each weight. The order of names is kept.
    """
    groups: list[list[str]] = []
    free_bytes = 0
    for name, size in sizes:
        if not groups or size > free_bytes:
            groups.append([])
            free_bytes = budget
        groups[-1].append(name)
        free_bytes -= size
    return groups
