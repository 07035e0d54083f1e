"""A run that goes on with batches of another size ends after the samples of its epochs."""

import pytest
import torch

from aligner.data.dataset import PromptSampler
from aligner.observe.metrics import read_metrics
from tests.regression.test_resume_algorithms import run

ROWS = 64
# By recipe: the key of a step's size, its first and its second value, samples of a row.
SIZES = {
    "sft_tiny_cpu": ("model.global_batch_size", (8, 16), 1),
    "reward_tiny_cpu": ("model.global_batch_size", (32, 16), 1),
    "distill_tiny_cpu": ("model.global_batch_size", (8, 16), 1),
    "grpo_tiny_cpu": ("model.ppo.num_rollout_samples", (64, 32), 4),
    "rs_tiny_cpu": ("model.rs.num_rollout_samples", (32, 64), 4),
}


@pytest.mark.parametrize("recipe", SIZES)
def test_an_epoch_is_its_rows_whatever_the_sizes_of_steps(tmp_path, tiny_nemo, teacher, recipe):
    key, (first, second), per_row = SIZES[recipe]
    section = recipe.split("_")[0]
    options = [
        f"data.train.arguments.size={ROWS}",
        "model.micro_batch_size=8",
        "model.optim.sched.max_steps=null",
    ]
    if section in ("grpo", "rs"):
        options += [
            f"model.{'ppo' if section == 'grpo' else section}.num_rollouts_per_prompt={per_row}",
            "model.global_batch_size=8",
        ]
        rows = [size // per_row for size in (first, second)]
    else:
        rows = [size // (2 if section == "reward" else 1) for size in (first, second)]
    run(tmp_path, tiny_nemo, teacher, recipe, 2, *options, f"{key}={first}")
    run(tmp_path, tiny_nemo, teacher, recipe, -1, *options, f"{key}={second}")
    last = list(read_metrics(tmp_path / "metrics.jsonl"))[-1]
    assert last["step"] == 2 + (ROWS - 2 * rows[0]) // rows[1]
    assert last["progress/consumed_samples"] == ROWS * per_row


@pytest.mark.parametrize("last_batch", ["wrap", "drop"])
@pytest.mark.parametrize("drawn", [0, 1, 2, 3, 6, 9])
def test_batches_left_are_those_that_are_drawn(last_batch, drawn):
    sampler = PromptSampler(7, 3, seed=1, last_batch=last_batch)
    whole = sampler.batches_in(3)
    for _ in range(min(drawn, whole)):
        sampler.next_batch()
    assert sampler.batches_left(3) == max(0, whole - drawn)
    other = PromptSampler(7, 2, seed=1, last_batch=last_batch)
    other.load_state_dict(sampler.state_dict())
    count = other.batches_left(3)
    seen = [other.next_batch() for _ in range(count)]
    assert torch.tensor([len(batch) for batch in seen]).sum() == 2 * count
    assert other.left_in(3) < 2 or last_batch == "drop"
