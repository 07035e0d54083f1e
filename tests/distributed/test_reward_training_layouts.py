"""A reward model learns the same in every layout, padded and packed: from pairs, from ratings."""

import pytest
import torch
from ranks import on_ranks

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
from aligner.distributed.workers import LocalCluster
from aligner.examples.tasks.form_pairs import form_pairs
from aligner.losses.reward import AttributeRegressionLoss, BradleyTerryLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.reward.reward_model import RewardModel
from aligner.parallel.groups import initialize_parallel

ATTRIBUTES = ("form", "length", "nothing")
PAIRS = 6
LOSSES = ("pairs", "ratings")
ONE = [f"1,1,1,0,{loss}" for loss in LOSSES]
# Tensor, pipeline and context parallel sizes, packed, loss; what is left is data parallel.
LAYOUTS = [
    *ONE,
    *(f"1,1,1,1,{loss}" for loss in LOSSES),
    *("2,1,1,0,pairs", "2,1,1,1,ratings", "1,2,1,0,pairs", "1,1,2,0,pairs"),
]


def batch_of(loss):
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


def trained(path, layout, state, saves):
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


def train_all(path, layouts, folder):
    """By layout; the first with a loss writes the state that the others restore."""
    seen = {}
    for layout in layouts:
        state = folder / layout.split(",")[-1]
        seen[layout] = trained(path, layout, state, saves=layout in ONE)
    return seen


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    return [
        on_ranks(ranks, train_all, str(tiny_nemo), layouts, tmp_path_factory.mktemp("rewards"))
        for ranks, layouts in ((1, ONE), (2, LAYOUTS))
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(layout, seen):
    loss = layout.split(",")[-1]
    one, two = seen[0][f"1,1,1,0,{loss}"], seen[1][layout]
    assert one["rewards"].shape == ((12,) if loss == "pairs" else (12, 3))
    assert one["loss"][2] < one["loss"][0]  # it learned
    assert one["rewards"].std() > 0.1  # there was something to compare
    torch.testing.assert_close(two["loss"], one["loss"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(two["rewards"], one["rewards"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(two["restored"], one["rewards"], atol=1e-5, rtol=1e-4)
