"""One rank of `test_reward_layouts`: scores a batch in each layout, rank 0 writes the rewards.

    MODEL OUTPUT LAYOUT [LAYOUT ...]

A layout is ``tensor,pipeline,context,packed``.
"""

import sys

import torch

torch.set_num_threads(1)

from aligner.config import ParallelConfig
from aligner.models.gpt import MegatronGPTRewardModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import shutdown_parallel


def rewards(model: str, layout: str) -> torch.Tensor:
    """Float32 [6]; two sequences a pass, lengths 1 to 21."""
    tensor, pipeline, context, packed = map(int, layout.split(","))
    parallel = ParallelConfig(tensor, pipeline, context, sequence_parallel=tensor > 1)
    settings = RoleSettings(
        parallel=parallel, forward_micro_batch_size=2, sequence_packing=bool(packed)
    )
    role = load_from_nemo(MegatronGPTRewardModel, settings, restore_path=model)
    generator = torch.Generator().manual_seed(3)
    if role.parallel.is_last_stage:  # a head that was not trained scores 0
        head = role.gpt.rm_head.weight
        head.data.copy_(torch.randn(head.shape, generator=torch.Generator().manual_seed(4)))
    ids = torch.randint(0, 256, (6, 21), generator=generator)
    return role.infer({"input_ids": ids, "input_lengths": torch.tensor([21, 5, 1, 12, 17, 2])})


def main() -> None:
    model, output, *layouts = sys.argv[1:]
    seen = {layout: rewards(model, layout) for layout in layouts}
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
