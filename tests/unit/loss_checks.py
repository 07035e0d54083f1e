"""What every loss must pass: global denominators, micro-batches, and masked garbage."""

import math

import torch

from aligner.types import Denominators, TokenOutputs

NAN, INF = float("nan"), float("inf")


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


def masked_in(outputs, batch):
    """True where ``outputs`` do not count by the masks of the batch, in the shape of outputs."""
    masked = (batch["token_mask"] * batch["sample_mask"][:, None]) == 0
    return masked.reshape(*masked.shape, *[1] * (outputs.ndim - 2)).expand(outputs.shape)


def check_loss(loss_function, outputs, batch, sizes, entropy=None, masked=None, ignored=()):
    """The checks below, with micro-batches of ``sizes``."""
    masked = masked_in(outputs, batch) if masked is None else masked
    check_micro_batches(loss_function, outputs, batch, sizes, entropy)
    check_garbage(loss_function, outputs, batch, masked, ignored, entropy)
    check_nothing_counts(loss_function, outputs, batch, entropy)


def check_micro_batches(loss_function, outputs, batch, sizes, entropy=None):
    """Loss, gradient and metrics do not depend on how rows are cut into micro-batches."""
    _, gradient, metrics = evaluate(loss_function, outputs, batch, entropy)
    counted = denominators(batch)
    for size in sizes:
        leaf = outputs.detach().clone().requires_grad_()
        parts: dict[str, list] = {}
        for start in range(0, len(outputs), size):
            part = slice(start, start + size)
            micro = {name: value[part] for name, value in batch.items()}
            token_outputs = TokenOutputs(leaf[part], None if entropy is None else entropy[part])
            loss, shares = loss_function(token_outputs, micro, counted)
            loss.backward()
            for name, value in shares.items():
                parts.setdefault(name, []).append(value.item())
        torch.testing.assert_close(leaf.grad, gradient)
        totals = {k: max(v) if k.endswith("_max") else sum(v) for k, v in parts.items()}
        assert totals.keys() == metrics.keys()
        for name, total in totals.items():
            torch.testing.assert_close(total, metrics[name], msg=f"{name}, {size} rows")


def check_garbage(loss_function, outputs, batch, masked, ignored=(), entropy=None):
    """NaN and infinity where ``masked`` is True reach neither loss, gradient nor metrics.

    ``masked``: bool, the shape of ``outputs``. ``ignored``: columns [B], spoilt where a row does
    not count.
    """
    expected = evaluate(loss_function, outputs, batch, entropy)
    rows = batch["sample_mask"] == 0
    assert rows.any()
    assert masked.any()
    for value in (NAN, INF, -INF):
        dirty = dict(batch)
        for name, kept in batch.items():
            if kept.shape == masked.shape and name != "token_mask":
                dirty[name] = torch.where(masked, -value, kept)
            elif name in ignored:
                where = rows.reshape(-1, *[1] * (kept.ndim - 1))
                dirty[name] = torch.where(where, value, kept)
        spoilt = None
        if entropy is not None:
            tokens = masked if masked.ndim == entropy.ndim else masked.any(dim=-1)
            spoilt = torch.where(tokens, value, entropy)
        loss, gradient, metrics = evaluate(
            loss_function, torch.where(masked, value, outputs), dirty, spoilt
        )
        assert loss == expected[0], value
        assert torch.equal(gradient, expected[1]), value
        assert (gradient[masked] == 0).all(), value
        assert metrics == expected[2], value


def check_nothing_counts(loss_function, outputs, batch, entropy=None):
    """A batch without a sample that counts has loss 0 and gradient 0."""
    empty = {**batch, "sample_mask": torch.zeros_like(batch["sample_mask"])}
    loss, gradient, metrics = evaluate(loss_function, outputs, empty, entropy)
    assert loss == 0
    assert (gradient == 0).all()
    assert all(value == 0 for value in metrics.values()), metrics
