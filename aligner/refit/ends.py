"""Properties that both ends of a refit must share, compared before an engine is started.

Policy and engine run in different interpreters. On GPUs they exchange weights in formats of torch:
memory handles of CUDA IPC, which another release of torch rejects or misreads, or NCCL, which
requires the same version on all members.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aligner.device import accelerator
from aligner.errors import ConfigError


@dataclass(frozen=True)
class RefitEnd:
    """One process that sends or receives weights."""

    name: str  # "policy rank 0"
    sharing_key: str  # `accelerator.sharing_key`: processes with this key can share memory
    has_gpu: bool
    torch: str  # version
    nccl: tuple[int, ...] | None  # version, None on CPU

    @classmethod
    def of_this_process(cls, name: str) -> "RefitEnd":
        """Describe this process."""
        return cls(
            name,
            accelerator.sharing_key(),
            accelerator.has_gpu(),
            torch.__version__,
            accelerator.nccl_version(),
        )

    def __str__(self) -> str:
        nccl = "" if self.nccl is None else f", NCCL {'.'.join(map(str, self.nccl))}"
        return f"{self.name} (torch {self.torch}{nccl}, {'GPU' if self.has_gpu else 'CPU'})"


def check_ends(
    senders: Sequence[RefitEnd], receiver: RefitEnd, *, separate: bool, section: str, versions: str
) -> None:
    """Raise `ConfigError` if an engine cannot receive the policy's weights.

    Args:
        senders: workers of the policy by rank. Rank 0 broadcasts.
        receiver: the engine.
        separate: whether weights are broadcast, not passed in shared memory.
        section: section of the engine with the keys ``python`` and ``refit``, for messages.
        versions: advice on installing a matching torch.
    """
    # The sender is rank 0, or a worker on the engine's device.
    if separate:
        sender = senders[0]
    else:
        sharing = [end for end in senders if end.sharing_key == receiver.sharing_key]
        sender = (sharing or senders)[0]
    # Both ends must be able to reach the same memory. On GPUs their libraries must agree.
    problem = ""
    if sender.has_gpu != receiver.has_gpu:
        problem = (
            f"python: {receiver} cannot receive weights from {sender}, because only one of them "
            f"computes on a GPU. Remedy: {versions}"
        )
    elif not separate and sender.sharing_key != receiver.sharing_key:
        problem = (
            f"refit=colocated: {receiver} is on {receiver.sharing_key}, but the policy's workers "
            f"are on {sorted({end.sharing_key for end in senders})}. Set {section}.refit=separate"
        )
    elif separate and sender.nccl != receiver.nccl:
        problem = (
            f"refit=separate: {sender} and {receiver} cannot join one NCCL group, which requires "
            f"the same NCCL on both sides. Remedy: {versions}"
        )
    elif receiver.has_gpu and not separate and _release(sender.torch) != _release(receiver.torch):
        problem = (
            f"refit=colocated: {receiver} cannot open GPU memory of {sender}, because handles of "
            f"CUDA IPC differ between releases of torch. Remedy: {versions}, or, if both have the "
            f"same NCCL, set {section}.refit=separate"
        )
    if problem:
        raise ConfigError(f"{section}.{problem}")


def _release(version: str) -> list[str]:
    """Return ``2.13`` for ``2.13.0+cu130`` and ``2.13.0a0+5f0``."""
    return version.split(".")[:2]
