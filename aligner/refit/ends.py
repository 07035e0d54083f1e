"""Check, before an engine is started, whether it can receive weights from the policy.

Policy and engine may run in different Python environments. On GPUs, CUDA IPC requires the same
release of torch in both, and NCCL the same version of NCCL.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aligner.device import accelerator
from aligner.errors import ConfigError


@dataclass(frozen=True)
class RefitEnd:
    """Properties of a process that sends or receives weights."""

    name: str  # for errors, such as "policy rank 0"
    sharing_key: str  # `accelerator.sharing_key`: processes with equal keys can share memory
    has_gpu: bool
    torch: str  # version
    nccl: tuple[int, ...] | None  # version, None on CPU

    @classmethod
    def of_this_process(cls, name: str) -> "RefitEnd":
        """Return the properties of this process."""
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
        senders: workers of the policy, by rank. Rank 0 broadcasts.
        receiver: engine.
        separate: whether weights are broadcast instead of passed in shared memory.
        section: configuration section of the engine, with the keys ``python`` and ``refit``.
        versions: advice on how to install a matching torch, for the error.
    """
    # The sender is rank 0 for a broadcast, else a worker on the engine's device.
    if separate:
        sender = senders[0]
    else:
        sharing = [end for end in senders if end.sharing_key == receiver.sharing_key]
        sender = (sharing or senders)[0]
    # Both ends must have access to the same memory. On GPUs their libraries must match.
    problem = ""
    if sender.has_gpu != receiver.has_gpu:
        problem = (
            f"python: {receiver} cannot receive weights from {sender}, because only one of them "
            f"uses a GPU. Remedy: {versions}"
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
    """Return major and minor version, ["2", "13"] for ``2.13.0+cu130``."""
    return version.split(".")[:2]
