"""Properties that the two ends of a refit must share, compared before an engine is started.

A policy trains in one interpreter and an engine samples in another, each with a torch of its own.
On GPUs weights cross between them in torch's own formats: memory handles of CUDA IPC, which a torch
of another release refuses or misreads, and NCCL, whose members must be of one version.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from aligner.device import accelerator
from aligner.errors import ConfigError


class RefitKeys(NamedTuple):
    """Keys of an engine that messages name."""

    python: str  # of its interpreter
    refit: str  # ``colocated`` or ``separate``
    versions: str  # how to get a torch that agrees with the trainer's


@dataclass(frozen=True)
class RefitEnd:
    """One process that sends or receives weights."""

    who: str  # "policy rank 0"
    sharing_key: str  # `accelerator.sharing_key`: with whom it can share memory
    has_gpu: bool
    torch: str  # version
    nccl: tuple[int, ...] | None  # version; None on CPU

    @classmethod
    def here(cls, who: str) -> "RefitEnd":
        """This process."""
        return cls(
            who,
            accelerator.sharing_key(),
            accelerator.has_gpu(),
            torch.__version__,
            accelerator.nccl_version(),
        )

    def __str__(self) -> str:
        nccl = "" if self.nccl is None else f", NCCL {'.'.join(map(str, self.nccl))}"
        return f"{self.who} (torch {self.torch}{nccl}, {'GPU' if self.has_gpu else 'CPU'})"


def check_ends(
    senders: Sequence[RefitEnd], receiver: RefitEnd, *, separate: bool, keys: RefitKeys
) -> None:
    """Refuse an engine to which the policy's weights cannot be handed over.

    Args:
        senders: every worker of the policy, by rank; rank 0 broadcasts.
        receiver: the engine.
        separate: by broadcast; else through memory that both see.
        keys: of the engine.

    Raises:
        ConfigError: the ends compute on different kinds of devices, share none, or have versions
            of torch or NCCL between which weights cannot cross.
    """
    if separate:
        sender = senders[0]
    else:
        near = [end for end in senders if end.sharing_key == receiver.sharing_key]
        sender = (near or senders)[0]
    if sender.has_gpu != receiver.has_gpu:
        raise ConfigError(
            f"{keys.python}: {receiver} cannot take weights from {sender}: one computes "
            f"on a GPU, the other does not; {keys.versions}"
        )
    if not separate and sender.sharing_key != receiver.sharing_key:
        places = sorted({end.sharing_key for end in senders})
        raise ConfigError(
            f"{keys.refit}=colocated: {receiver} is on {receiver.sharing_key}, where no "
            f"worker of the policy is (they are on {places}); set {keys.refit}=separate"
        )
    if not receiver.has_gpu:
        return
    if separate and sender.nccl != receiver.nccl:
        raise ConfigError(
            f"{keys.refit}=separate: {sender} and {receiver} cannot meet in one NCCL "
            f"group, which takes the same NCCL on both sides; {keys.versions}"
        )
    if not separate and _release(sender.torch) != _release(receiver.torch):
        raise ConfigError(
            f"{keys.refit}=colocated: {receiver} cannot open GPU memory of {sender}: "
            f"handles of CUDA IPC change between releases of torch; {keys.versions}, or, where "
            f"both have the same NCCL, set {keys.refit}=separate"
        )


def _release(version: str) -> list[str]:
    """``2.13`` of ``2.13.0+cu130`` and of ``2.13.0a0+5f0``."""
    return version.split(".")[:2]
