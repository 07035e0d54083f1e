"""One rank of `test_reward_training_layouts`: trains a reward model in each layout.

    MODEL OUTPUT LAYOUT [LAYOUT ...]

A layout is ``tensor,pipeline,context,packed,loss``; what is left of the world is data parallel.
Rank 0 writes what it saw to OUTPUT.
"""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from aligner.checkpoint.run_state.worker_state import save_worker_state
from aligner.config import (
    OptimConfig,
    PairDataConfig,
    ParallelConfig,
    PromptSourceConfig,
    SequencePackingConfig,
    TrainedModelConfig,
)
from aligner.data.preferences import PairDataset, Rated, collate_pairs, collate_rated
from aligner.data.readers import DataRow
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.examples.tasks.form_pairs import form_pairs
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.reward.reward_model import RewardModel
from aligner.parallel.groups import initialize_parallel, shutdown_parallel

ATTRIBUTES = ("form", "length", "nothing")
PAIRS = 6


def batch_of(loss: str) -> BatchedDataDict:
    """12 rows of different lengths; of some ratings one or two are missing, and one row is out."""
    tokenizer, data = byte_level_tokenizer(), PairDataConfig(PromptSourceConfig(""))
    rows = form_pairs(size=PAIRS, shots=1, longest=12)
    pairs = [PairDataset.make(DataRow("", row), n, tokenizer, data) for n, row in enumerate(rows)]
    if loss == "pairs":
        return collate_pairs(pairs, tokenizer.pad_id)
    examples = [example for pair in pairs for example in (pair.chosen, pair.rejected)]
    rated = [
        Rated(example, (float(n % 2), len(example.ids) / 10, None if n % 3 else -1.0))
        for n, example in enumerate(examples)
    ]
    batch = collate_rated(rated, tokenizer.pad_id)
    batch["sample_mask"][5] = 0
    return batch


def trained(path: str, layout: str, state: Path, saves: bool) -> dict[str, torch.Tensor]:
    """Losses and rewards after three updates on the same 12 rows; rewards from the saved state.

    ``saves``: this layout writes ``state``; else another one has.
    """
    *sizes, packed, loss = layout.split(",")
    tensor, pipeline, context = map(int, sizes)
    parallel = ParallelConfig(tensor, pipeline, context, sequence_parallel=tensor > 1)
    config = TrainedModelConfig(
        restore_from_path=path,
        micro_batch_size=2,
        global_batch_size=12,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        sequence_parallel=parallel.sequence_parallel,
        sequence_packing=SequencePackingConfig(enabled=packed == "1", train_mb_tokens=96),
        # Nearly plain gradient descent: Adam would blow up the rounding of gradients near 0.
        optim=OptimConfig(lr=0.1, eps=1.0),
    )
    cluster = LocalCluster(initialize_parallel(parallel))
    attributes = () if loss == "pairs" else ATTRIBUTES
    handle = RewardModel(
        cluster,
        config,
        byte_level_tokenizer(),
        RunSettings(gradient_clip_val=0),
        attributes=attributes,
    )
    model = handle.worker_group.worker.model
    if model.parallel.is_last_stage:
        model.gpt.rm_head.weight.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    model.optimizer.copy_model_weights()
    batch = batch_of(loss)
    loss_fn = BradleyTerryLoss() if loss == "pairs" else AttributeRegressionLoss()
    handle.prepare_for_training()
    losses = [handle.train(batch, loss_fn)["loss"] for _ in range(3)]
    handle.finish_training()
    seen = {"loss": torch.tensor(losses), "rewards": handle.get_rewards(batch)["rewards"]}
    if saves:
        save_worker_state(handle.worker_group.worker, str(state))
        torch.distributed.barrier()
    handle.load_state(state)
    return {**seen, "restored": handle.get_rewards(batch)["rewards"]}


def main() -> None:
    model, output, *layouts = sys.argv[1:]
    seen: dict[str, dict[str, torch.Tensor]] = {}
    known: set[str] = set()
    for layout in layouts:
        loss = layout.split(",")[-1]
        seen[layout] = trained(model, layout, Path(output).with_name(loss), loss not in known)
        known.add(loss)
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
