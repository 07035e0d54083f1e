"""Batches of losses, and a loss with its gradient and metrics."""

import math

import torch

from aligner.types import Denominators, TokenOutputs

NAN = float("nan")


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def column(*values):
    return torch.tensor(values, dtype=torch.float64)


def denominators(batch):
    """As counted over the global batch."""
    counts = batch["sample_mask"]
    tokens = (batch["token_mask"] * counts.unsqueeze(1)).sum() if "token_mask" in batch else 0
    return Denominators(torch.as_tensor(tokens).clamp(min=1), counts.sum().clamp(min=1))


def policy_batch(seed=0, rows=6, length=9):
    """Log-probs, entropies and a batch for the policy loss, with a row and a sample that is out."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, length, generator=generator, dtype=torch.float64)

    logprobs = normal() * 0.5 - 2
    batch = {
        "advantages": normal(),
        "token_mask": (torch.rand(rows, length, generator=generator) < 0.6).double(),
        "sample_mask": column(1, 1, 0, 1, 1, 1),
        "prev_logprobs": logprobs + normal() * 0.3,
        "ref_logprobs": logprobs + normal() * 0.3,
        "generation_logprobs": logprobs + normal() * 0.3,
    }
    batch["token_mask"][3] = 0  # a row without a generated token
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
