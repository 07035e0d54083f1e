"""One rank of `test_layouts`: trains actor and critic in each layout, rank 0 writes what it saw.

    torchrun --nproc-per-node N layout_worker.py MODEL OUTPUT LAYOUT [LAYOUT ...]

A layout is ``tensor,pipeline,sequence_parallel``; what is left of the world is data parallel.
"""

import sys

import torch

torch.set_num_threads(1)

from aligner.algorithms.losses.policy import PPOPolicyLoss
from aligner.algorithms.losses.value import PPOValueLoss
from aligner.config import OptimConfig, ParallelConfig
from aligner.distributed.parallel import shutdown_parallel
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, load_from_nemo
from aligner.models.gpt.settings import RoleSettings

ROWS, WIDTH = 8, 16


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.tensor([16, 9, 12, 16, 5, 14, 16, 10])
    prompts = torch.tensor([4, 3, 6, 2, 1, 7, 5, 8])
    position = torch.arange(WIDTH)
    mask = (position >= prompts[:, None]) & (position < lengths[:, None])
    noise = torch.randn(ROWS, WIDTH, generator=generator)
    return {
        "input_ids": torch.randint(0, 256, (ROWS, WIDTH), generator=generator),
        "input_lengths": lengths,
        "token_mask": mask.float(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 0]),
        "advantages": noise,
        "returns": noise.flip(0),
        "values": torch.zeros_like(noise),
        "prev_logprobs": torch.full_like(noise, -5.5),
        "generation_logprobs": torch.full_like(noise, -5.5),
    }


def train(cls: type, loss: object, model: str, parallel: ParallelConfig) -> dict[str, object]:
    """Two updates; what was reported and the answers before and after, of all rows."""
    settings = RoleSettings(
        parallel=parallel, optim=OptimConfig(lr=1e-4, eps=1e-3), micro_batch_size=2
    )
    role = load_from_nemo(cls, settings, restore_path=model)
    role.setup_training()
    role.loss_fn = loss
    whole = make_batch()
    rank, ranks = role.parallel.dp_rank, role.parallel.dp_size
    share = {key: value.chunk(ranks)[rank] for key, value in whole.items()}
    before = role.infer_tokens(whole)
    role.prepare_for_training()
    updates = [role.training_update(share, number) for number in range(2)]
    return {"updates": updates, "before": before, "after": role.infer_tokens(whole)}


def main() -> None:
    model, output, *layouts = sys.argv[1:]
    seen = {}
    for layout in layouts:
        tensor, pipeline, sequence = (int(part) for part in layout.split(","))
        parallel = ParallelConfig(
            tensor=tensor, pipeline=pipeline, sequence_parallel=bool(sequence)
        )
        seen[layout] = {
            "actor": train(
                MegatronGPTActorModel, PPOPolicyLoss(entropy_bonus=0.01), model, parallel
            ),
            "critic": train(MegatronGPTCriticModel, PPOValueLoss(value_clip=0.2), model, parallel),
        }
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
