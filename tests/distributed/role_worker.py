"""One rank of tests of layouts (moe, recompute, forward reuse): actor and critic in each layout.

    torchrun --nproc-per-node N role_worker.py MODEL OUTPUT LAYOUT [LAYOUT ...]

A layout is ``tensor,pipeline,expert,recompute``, with sequence parallelism where tensor is more
than 1; what is left of the world is data parallel. With ``,whole`` after it an update is one
micro-batch, which the critic values first, as PPO does. With ``,overlap`` gradients are summed and
weights collected in the background, in buckets of few layers; with ``,uneven`` the first pipeline
stage has two layers; with ``,frozen`` routers of experts are not trained. Rank 0 writes what it saw
to OUTPUT, and the roles after training beside it.
"""

import functools
import sys

import torch
from batches import ppo_batch

torch.set_num_threads(1)

from megatron.core.distributed import DistributedDataParallelConfig

from aligner.config import LengthParams, OptimConfig, ParallelConfig, SamplingParams
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTActorModel, MegatronGPTCriticModel, load_from_nemo
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.megatron import optimizer
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import gather_objects
from aligner.parallel.groups import shutdown_parallel

ROWS = 8


def make_batch() -> dict[str, torch.Tensor]:
    """Ragged rows: micro-batches of two have different lengths on every rank."""
    batch = ppo_batch([16, 9, 12, 4, 5, 14, 7, 10], [4, 3, 6, 2, 1, 7, 5, 8])
    return {**batch, "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 0])}


def generate(role: MegatronGPTActorModel, whole: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Responses to all rows' first tokens; ranks draw different numbers of tokens for theirs."""
    generator = Generator(
        role.gpt,
        role.architecture,
        eos_ids=tuple(range(0, 256, 9)),
        pad_id=0,
        length=LengthParams(max_length=12),
        sampling=SamplingParams(),
        max_batch_size=3,
    )
    rank, ranks = role.parallel.dp_rank, role.parallel.dp_size
    rows = torch.arange(ROWS).chunk(ranks)[rank]
    prompts = whole["input_ids"][rows, :5]
    output = generator.sample(prompts, torch.full_like(rows, 5), rows, seed=3)
    mine = [tokens[:length] for tokens, length in zip(output.tokens, output.lengths, strict=True)]
    by_rank = dict(gather_objects((rank, mine)))
    return [tokens for rank in range(ranks) for tokens in by_rank[rank]]


def train(
    cls: type, loss: object, model: str, settings: RoleSettings, save_to: str
) -> dict[str, object]:
    """Two updates; what was reported and the answers before and after, of all rows."""
    role = load_from_nemo(cls, settings, restore_path=model)
    role.setup_training()
    role.loss_fn = loss
    whole = make_batch()
    rank, ranks = role.parallel.dp_rank, role.parallel.dp_size
    share = {key: value.chunk(ranks)[rank] for key, value in whole.items()}
    before = role.infer_tokens(whole)
    generated = generate(role, whole) if isinstance(role, MegatronGPTActorModel) else []
    if settings.micro_batch_size == ROWS and isinstance(role, MegatronGPTCriticModel):
        role.get_values(share)
    passes: list[None] = []
    role.gpt.decoder.register_forward_hook(lambda *_: passes.append(None))
    role.prepare_for_training()
    updates = [role.training_update(share, number) for number in range(2)]
    passes_of_updates = len(passes)
    role.save_to(save_to)
    after = role.infer_tokens(whole)
    return {
        "updates": updates,
        "before": before,
        "after": after,
        "generated": generated,
        "passes": passes_of_updates,
    }


def train_both(model: str, output: str, layout: str) -> dict[str, dict[str, object]]:
    """Actor and critic in one layout."""
    sizes, (recompute, *others) = layout.split(",")[:3], layout.split(",")[3:]
    whole, overlap = "whole" in others, "overlap" in others
    buckets = functools.partial(
        DistributedDataParallelConfig, bucket_size=2000 if overlap else None
    )
    optimizer.DistributedDataParallelConfig = buckets
    tensor, pipeline, expert = (int(size) for size in sizes)
    settings = RoleSettings(
        parallel=ParallelConfig(
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            sequence_parallel=tensor > 1,
            first_stage=2 if "uneven" in others else None,
        ),
        freeze_moe_router="frozen" in others,
        recompute=None if recompute == "none" else recompute,
        optim=OptimConfig(lr=5e-3, eps=1e-2),  # a small eps turns rounding into updates
        micro_batch_size=ROWS if whole else 1,
        global_batch_size=ROWS,
        gradient_clip_val=0.1,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    roles = {
        "actor": (MegatronGPTActorModel, PPOPolicyLoss(entropy_bonus=0.01)),
        "critic": (MegatronGPTCriticModel, PPOValueLoss(value_clip=0.2)),
    }
    return {
        name: train(cls, loss, model, settings, f"{output}.{layout}.{name}.nemo")
        for name, (cls, loss) in roles.items()
    }


def main() -> None:
    """Every layout, then the file."""
    model, output, *layouts = sys.argv[1:]
    seen = {layout: train_both(model, output, layout) for layout in layouts}
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
