"""The tiny recipe, as users run it, learns its task.

The model is random: its first token is a digit in about 4 % of samples, and a run that learns
nothing (learning rate of the policy practically 0) stays there.
"""

import pytest
from recipes import run


def accuracy(folder, nemo, *overrides):
    lines = run(folder, nemo, "ppo_tiny_cpu", *overrides)
    return lines[0]["val_rollouts/accuracy"], lines[-1]["val_rollouts/accuracy"], lines


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.extended) for n in (2, 3))]
)
def test_the_rewarded_token_is_learned(tmp_path, tiny_nemo, seed):
    before, after, lines = accuracy(tmp_path, tiny_nemo, f"seed={seed}")
    assert before < 0.2
    assert after > 0.9
    assert len(lines) == 31
    # The sampler and the trainer are the same model: they must agree on every log-prob.
    assert max(line["sampler/logprob_gap_max"] for line in lines[1:]) < 1e-4


@pytest.mark.extended
def test_several_passes_and_mini_batches_learn_too(tmp_path, tiny_nemo):
    """Off-policy mini-batches: old log-probs, clipping and both KL terms are in play."""
    before, after, lines = accuracy(
        tmp_path,
        tiny_nemo,
        "model.global_batch_size=32",
        "model.ppo.ppo_epochs=2",
        "model.ppo.kl_loss.coef=0.001",
        "trainer.ppo.max_steps=15",
        "model.optim.lr=3e-3",
    )
    assert after > before + 0.3
    assert lines[-1]["train_optim/optimizer_steps"] == 15 * 2 * 2
    assert any(line["train_optim/clip_fraction"] > 0 for line in lines[1:])
