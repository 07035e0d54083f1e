"""One rank of `test_family_layouts`: the actor of every model in one layout; rank 0 writes.

    torchrun --nproc-per-node N family_worker.py OUTPUT LAYOUT MODEL [MODEL ...]

A layout is ``tensor,pipeline``, with sequence parallelism where tensor is more than 1.
"""

import sys

import torch
from role_worker import train

from aligner.config import OptimConfig, ParallelConfig
from aligner.losses.policy import PPOPolicyLoss
from aligner.models.gpt import MegatronGPTActorModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import shutdown_parallel


def train_all(layout: str, models: list[str], output: str) -> dict[str, dict[str, object]]:
    """Two updates of every model, by its path."""
    tensor, pipeline = (int(size) for size in layout.split(","))
    settings = RoleSettings(
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline, sequence_parallel=tensor > 1),
        dropout=0.0,
        optim=OptimConfig(lr=5e-3, eps=1e-2),  # a small eps turns rounding into updates
        micro_batch_size=4,
        global_batch_size=8,
        gradient_clip_val=0.1,
    )
    loss = PPOPolicyLoss(entropy_bonus=0.01)
    return {
        model: train(MegatronGPTActorModel, loss, model, settings, f"{output}.{number}.nemo")
        for number, model in enumerate(models)
    }


def main() -> None:
    """Every model, then the file."""
    output, layout, *models = sys.argv[1:]
    seen = train_all(layout, models, output)
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
