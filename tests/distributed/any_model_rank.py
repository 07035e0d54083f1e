"""One rank of `test_any_model_layouts`: one update of models of transformers, sharded by FSDP2.

    torchrun --nproc-per-node N any_model_rank.py FOLDER MODEL_TYPE[+lora|+reward|+unchecked] ...

All ranks are data parallel, then all are tensor parallel. Each data-parallel rank scores and learns
from its share of the rows, with recomputed layers where the model can. Rank 0 writes the log-probs
of its rows and the change of each weight, or why a layout is refused, to FOLDER/N.pt, by type and
tensor-parallel size.
"""

import os
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from aligner.checkpoint.hf.any_model import empty_model, read_any
from aligner.config import LoraConfig, OptimConfig, ParallelConfig
from aligner.errors import LayoutError
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.dtensor import model
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.dtensor.critic import DTensorRewardModel
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel, shutdown_parallel

LENGTHS, WIDTH = (11, 7, 13, 9), 13


def make_batch(rank: int, ranks: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    position, lengths = torch.arange(WIDTH), torch.tensor(LENGTHS)
    inside = position < lengths[:, None]
    ids = torch.randint(3, 120, (len(LENGTHS), WIDTH), generator=generator)
    noise = torch.randn(len(LENGTHS), WIDTH, generator=generator)
    batch = {
        "input_ids": torch.where(inside, ids, 0),
        "input_lengths": lengths,
        "token_mask": ((position >= 1) & inside).float(),
        "sample_mask": torch.ones(len(LENGTHS)),
        "advantages": noise,
        "returns": noise.flip(0),
        "values": torch.zeros_like(noise),
        "prev_logprobs": torch.full_like(noise, -5.0),
        "generation_logprobs": torch.full_like(noise, -5.0),
    }
    return {name: column[rank::ranks] for name, column in batch.items()}


def updated(folder: Path, layout: ParallelConfig, variant: str) -> dict[str, object]:
    parallel = initialize_parallel(layout)
    source = read_any(folder)
    recomputes = empty_model(source.architecture).supports_gradient_checkpointing
    settings = RoleSettings(
        parallel=layout,
        optim=OptimConfig(name="sgd", lr=1e-3),
        gradient_clip_val=0.0,
        micro_batch_size=1,
        sequence_packing="auto",
        recompute="full" if recomputes else None,
        lora=LoraConfig(adapter_dim=3) if variant == "lora" else None,  # no divisor of the rows
    )
    is_reward = variant == "reward"
    kind = DTensorRewardModel if is_reward else DTensorActorModel
    role = kind.from_checkpoint(source, settings=settings, tokenizer=None)
    for shard in role.shards:
        if shard.name == "score.weight":  # a fresh head is zero and lets no gradient into the body
            shard.local.normal_(generator=torch.Generator().manual_seed(3))
    batch = make_batch(parallel.dp_rank, parallel.dp_size)
    before = role.whole_weights()
    seen: dict[str, object] = {}
    seen["logprobs"] = role.infer(batch) if is_reward else role.get_logprobs(batch)
    role.setup_training()
    role.loss_fn = PPOValueLoss(value_clip=None) if is_reward else PPOPolicyLoss()
    role.prepare_for_training()
    seen["norm"] = role.training_update(batch)["grad_norm"]
    after = role.whole_weights()
    seen["changes"] = {name: after[name] - weight for name, weight in before.items()}
    return seen


def main() -> None:
    """Every model type, then the file."""
    import transformers

    transformers.logging.set_verbosity_error()
    folder, *types = sys.argv[1:]
    ranks = int(os.environ["WORLD_SIZE"])
    seen = {}
    for model_type in types:
        name, _, variant = model_type.partition("+")
        if variant == "unchecked":
            model.check_backend = lambda *_: None
        for tensor in {1, ranks}:
            layout = ParallelConfig(tensor=tensor)
            try:
                seen[model_type, tensor] = updated(Path(folder) / name, layout, variant)
            except LayoutError as refusal:
                seen[model_type, tensor] = str(refusal)
    if torch.distributed.get_rank() == 0:
        torch.save(seen, Path(folder) / f"{ranks}.pt")
    shutdown_parallel()


if __name__ == "__main__":
    main()
