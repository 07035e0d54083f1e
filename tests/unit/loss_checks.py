"""Batches of losses, and a loss with its gradient and metrics."""

import math

import pytest
import torch

from aligner.losses.corrections import second_moment_masks
from aligner.types import Denominators, TokenOutputs

NAN = float("nan")
ROWS, LENGTH, CHOICES = 8, 6, 3


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def grid(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def denominators(batch):
    """As counted over the global batch."""
    counts = batch["sample_mask"]
    tokens = (batch["token_mask"] * counts.unsqueeze(1)).sum() if "token_mask" in batch else 0
    return Denominators(torch.as_tensor(tokens).clamp(min=1), counts.sum().clamp(min=1))


def random_batch():
    """Log-probs, entropies, and a batch with the columns of all losses; one pair is out."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape or (ROWS, LENGTH), generator=generator, dtype=torch.float64)

    logprobs = normal() * 0.5 - 2
    lengths = torch.tensor([6, 3, 2, 5, 6, 6, 1, 4])
    batch = {
        "input_lengths": lengths,
        "token_mask": (torch.rand(ROWS, LENGTH, generator=generator) < 0.6).double(),
        "sample_mask": column(1, 1, 0, 0, 1, 1, 1, 1),
        "advantages": normal(),
        "prev_logprobs": logprobs + normal() * 0.3,
        "ref_logprobs": logprobs + normal() * 0.7,
        "generation_logprobs": logprobs + normal() * 0.3,
        "values": logprobs + normal() * 0.3,
        "returns": logprobs + normal(),
        "teacher_topk_logits": normal(ROWS, LENGTH, CHOICES),
        "ground_truth_rewards": normal(ROWS),
        "desirable": column(1, 0, 1, 0, 0, 1, 1, 0),
        "kl_baseline": torch.full((ROWS,), 0.4, dtype=torch.float64),
        "preference_strengths": column(1, 1, 2, 2, 3, 3, 0.5, 0.5),
        "attributes": normal(ROWS, CHOICES),
        "attribute_mask": column(1, 0, 1).expand(ROWS, -1),
    }
    batch["token_mask"][5] = 0  # a row without a generated token
    batch["second_moment_mask"] = second_moment_masks(batch, 0.04, ROWS).double()
    return logprobs, normal().abs(), batch


def hand_batch(ratios, advantages, gaps=None):
    """One response: each token's ratio of the loss, and of the trainer over the sampler."""
    logprobs = row(*(math.log(ratio) - 1 for ratio in ratios))
    batch = {
        "advantages": row(*advantages),
        "token_mask": torch.ones_like(logprobs),
        "sample_mask": torch.ones(1, dtype=torch.float64),
        "prev_logprobs": torch.full_like(logprobs, -1.0),
    }
    if gaps is not None:
        batch["generation_logprobs"] = row(*(-1 - math.log(gap) for gap in gaps))
    return logprobs, batch


def evaluate(loss_function, outputs, batch, entropy=None):
    """Loss, gradient with respect to ``outputs`` and metrics of a batch in one piece."""
    leaf = outputs.detach().clone().requires_grad_()
    loss, metrics = loss_function(TokenOutputs(leaf, entropy), batch, denominators(batch))
    loss.backward()
    assert not any(value.requires_grad for value in metrics.values())
    assert metrics["loss"].item() == loss.item()
    return loss.item(), leaf.grad, {name: value.item() for name, value in metrics.items()}


def check_by_hand(loss_function, case, loss, gradient):
    """Compare with numbers worked out by hand. ``case``: arguments of `evaluate`.

    Returns the metrics.
    """
    actual, slopes, metrics = evaluate(loss_function, *case)
    assert actual == pytest.approx(loss)
    torch.testing.assert_close(slopes, gradient)
    return metrics
