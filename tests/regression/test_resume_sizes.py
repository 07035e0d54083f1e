"""A run that goes on with batches of another size ends after the samples of its epochs."""

import pytest
from test_resume_algorithms import drawn_batches, run
from variants import extended_except

from aligner.observe.metrics import read_metrics

ROWS = 64
# By recipe: the key of a step's size, its first and its second value, of them a row, samples of a
# row.
SIZES = {
    "sft_tiny_cpu": ("model.global_batch_size", (8, 16), 1, 1),
    "reward_tiny_cpu": ("model.global_batch_size", (32, 16), 2, 1),
    "dpo_tiny_cpu": ("model.global_batch_size", (16, 32), 2, 1),
    "kto_tiny_cpu": ("model.global_batch_size", (16, 8), 1, 1),
    "distill_tiny_cpu": ("model.global_batch_size", (8, 16), 1, 1),
    "ppo_tiny_cpu": ("model.ppo.num_rollout_samples", (8, 16), 1, 1),
    "grpo_tiny_cpu": ("model.ppo.num_rollout_samples", (64, 32), 4, 4),
    "rs_tiny_cpu": ("model.rs.num_rollout_samples", (32, 64), 4, 4),
}
# Samples of an update, where a step may make several.
UPDATE = 8


@pytest.mark.parametrize(
    "recipe",
    extended_except(SIZES.keys() - {"kto_tiny_cpu", "reward_tiny_cpu", "distill_tiny_cpu"}, SIZES),
)
def test_an_epoch_is_its_rows_whatever_the_sizes_of_steps(
    tmp_path, tiny_nemo, teacher, recipe, monkeypatch
):
    drawn = drawn_batches(monkeypatch)
    key, (first, second), sequences, samples = SIZES[recipe]
    options = [
        f"data.train.arguments.size={ROWS}",
        "model.micro_batch_size=8",
        "model.optim.sched.max_steps=null",
    ]
    if "rollout" in key:
        section = key.split(".")[1]
        options.append(f"model.{section}.num_rollouts_per_prompt={samples}")
        options.append(f"model.global_batch_size={UPDATE}")
    if recipe == "ppo_tiny_cpu":
        options += ["critic.global_batch_size=8", "critic.micro_batch_size=8"]
    rows = [size // sequences for size in (first, second)]
    run(tmp_path, tiny_nemo, teacher, recipe, 2, *options, f"{key}={first}")
    run(tmp_path, tiny_nemo, teacher, recipe, -1, *options, f"{key}={second}")
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    last = lines[-1]
    steps = 2 + (ROWS - 2 * rows[0]) // rows[1]
    assert last["step"] == steps
    assert last["progress/consumed_samples"] == ROWS * samples
    assert [len(batch) for *_, batch in drawn] == [rows[0]] * 2 + [rows[1]] * (steps - 2)
    assert sorted(row for *_, batch in drawn for row in batch) == list(range(ROWS))
    # The schedule falls to 0 at the end of the run; with several updates a step it assumes the new
    # number of them for the whole run (docs/ppo.md#resuming).
    made, horizon = steps - 1, steps
    if "rollout" in key:
        update = UPDATE * (samples if recipe == "rs_tiny_cpu" else 1)  # the best of each row
        before, now = first // update, second // update
        made, horizon = 2 * before + (steps - 2) * now - 1, steps * now
    peak = next(line for line in lines if line["step"] == 1)["train_optim/lr"]
    assert last["train_optim/lr"] == pytest.approx(peak * (1 - min(1.0, made / horizon)), rel=1e-6)
