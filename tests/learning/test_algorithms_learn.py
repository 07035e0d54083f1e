"""The tiny recipe of every algorithm, as users run it, learns its task.

The bounds are far from what a model reaches that learns nothing (see the recipes' headers).
"""

import re

import pytest
from recipes import ROOT, run

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (2, 3))]


def rows_of_the_page():
    """What the table of docs/reinforce.md says to set, by the algorithm's name."""
    page = (ROOT / "docs" / "reinforce.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(trainer\.[^`]+)` \|$", page, re.MULTILINE)
    # With filtering nothing pushes a response to end, and at this recipe's learning rate a policy
    # may stop ending any: then every sample is masked. That row is tested by its parts.
    learned = [
        (name, settings) for name, settings in rows if "improper_end.mode=mask" not in settings
    ]
    return [pytest.param(settings.split(), id=name) for name, settings in learned]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "recipe",
    ["grpo_tiny_cpu", "rs_tiny_cpu", pytest.param("rloo_tiny_cpu", marks=pytest.mark.extended)],
)
def test_the_rewarded_token_is_learned(tmp_path, tiny_nemo, recipe, seed):
    lines = run(tmp_path, tiny_nemo, recipe, f"seed={seed}")
    assert lines[0]["val_rollouts/accuracy"] < 0.2
    assert lines[-1]["val_rollouts/accuracy"] > 0.8


# What DAPO does to long responses needs some that end: at the first digit, within 16 tokens.
ENDING = [
    "model.ppo.length_params.max_length=16",
    f"model.ppo.sampling_params.end_strings=[{','.join(repr(str(digit)) for digit in range(10))}]",
]


@pytest.mark.extended
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("row", rows_of_the_page())
def test_every_row_of_the_page_learns(tmp_path, tiny_nemo, row, seed):
    """As it is written there, over the recipe of another algorithm."""
    row = row + ENDING if "trainer.ppo.dynamic_sampling.enabled=true" in row else row
    lines = run(tmp_path, tiny_nemo, "rloo_tiny_cpu", f"seed={seed}", *row)
    assert lines[-1]["val_rollouts/accuracy"] > lines[0]["val_rollouts/accuracy"] + 0.4


@pytest.mark.extended
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "reinforce_plus_plus_baseline"])
def test_a_penalty_in_the_reward_does_not_drown_it(tmp_path, tiny_nemo, estimator, seed):
    """GRPO divided the noise of the KL by its own deviation, and ended at 0.03 to 0.2."""
    options = [
        f"trainer.ppo.advantage.estimator={estimator}",
        "trainer.ppo.initial_policy_kl_penalty=0.01",
    ]
    lines = run(tmp_path, tiny_nemo, "rloo_tiny_cpu", f"seed={seed}", *options)
    assert lines[-1]["val_rollouts/accuracy"] > 0.8


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_loss_falls(tmp_path, tiny_nemo, seed):
    lines = run(tmp_path, tiny_nemo, "sft_tiny_cpu", f"seed={seed}")
    assert lines[0]["val_optim/loss"] > 5
    assert lines[-1]["val_optim/loss"] < 2.5


def test_without_a_learning_rate_nothing_is_learned(tmp_path, tiny_nemo):
    options = ["model.optim.lr=1e-12", "trainer.sft.max_steps=5"]
    lines = run(tmp_path, tiny_nemo, "sft_tiny_cpu", *options)
    assert lines[-1]["val_optim/loss"] == pytest.approx(lines[0]["val_optim/loss"], abs=1e-3)
