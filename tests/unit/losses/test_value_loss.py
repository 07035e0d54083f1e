"""Clipped value loss: by hand, against a plain Python loop, and its invariances."""

import statistics

import pytest
import torch

from aligner.errors import ConfigError
from aligner.losses.value import PPOValueLoss
from aligner.types import Denominators, TokenOutputs


def _denominators(batch):
    tokens = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)).sum()
    return Denominators(tokens.clamp(min=1), batch["sample_mask"].sum().clamp(min=1))


def _row(*values):
    return torch.tensor([values], dtype=torch.float64)


def test_hand_worked():
    """Clip 0.2, rollout value 0.

    V 1,  R 2: free (1-2)²=1,      near .2: (.2-2)²=3.24, the larger, no gradient;
    V 1,  R 0: free 1,             near .2: .04 -> free, gradient 2·½·(1-0);
    V .1, R 1: within the range: both .81, gradient .1-1.
    """
    values = _row(1.0, 1.0, 0.1).requires_grad_()
    batch = {
        "values": _row(0.0, 0.0, 0.0),
        "returns": _row(2.0, 0.0, 1.0),
        "token_mask": _row(1.0, 1.0, 1.0),
        "sample_mask": torch.ones(1),
    }
    loss, metrics = PPOValueLoss(0.2)(TokenOutputs(values), batch, _denominators(batch))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 * (3.24 + 1 + 0.81) / 3)
    torch.testing.assert_close(values.grad, _row(0.0, 1.0, -0.9) / 3)
    assert metrics["clip_fraction"].item() == pytest.approx(1 / 3)


def test_rounding_clips_nothing():
    """Within the range the clipped value is the value itself, to the last bit."""
    generator = torch.Generator().manual_seed(0)
    before, predicted, returns = torch.rand(3, 1, 5000, generator=generator) / 5
    ones = torch.ones(1, 5000)
    batch = {"values": before, "returns": returns, "token_mask": ones, "sample_mask": ones[:, 0]}
    _, metrics = PPOValueLoss(0.2)(TokenOutputs(predicted), batch, _denominators(batch))
    assert metrics["clip_fraction"].item() == 0


def test_without_clipping_the_rollout_values_are_not_needed():
    batch = {"returns": _row(3.0), "token_mask": _row(1.0), "sample_mask": torch.ones(1)}
    loss, _ = PPOValueLoss(None)(TokenOutputs(_row(1.0)), batch, _denominators(batch))
    assert loss.item() == 2.0


def _random_batch(seed):
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(6, 9, generator=generator, dtype=torch.float64)

    values = normal()
    batch = {
        "values": values + 0.3 * normal(),
        "returns": values + normal(),
        "token_mask": (torch.rand(6, 9, generator=generator) < 0.6).double(),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 1], dtype=torch.float64),
    }
    batch["token_mask"][3] = 0
    return values, batch


def _kept(tensor, batch):
    mask = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)).bool()
    return tensor[mask].tolist()


def test_against_a_loop():
    values, batch = _random_batch(0)
    columns = (_kept(x, batch) for x in (values, batch["values"], batch["returns"]))
    terms = []
    for v, before, r in zip(*columns, strict=True):
        near = before + min(max(v - before, -0.2), 0.2)
        terms.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
    loss, _ = PPOValueLoss(0.2)(TokenOutputs(values), batch, _denominators(batch))
    assert loss.item() == pytest.approx(statistics.fmean(terms))


def test_gradients_against_differences():
    values, batch = _random_batch(1)
    assert torch.autograd.gradcheck(
        lambda v: PPOValueLoss(0.2)(TokenOutputs(v), batch, _denominators(batch))[0],
        (values.requires_grad_(),),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
def test_micro_batches_change_nothing(size):
    values, batch = _random_batch(2)

    def run(size):
        leaf, totals = values.clone().requires_grad_(), {}
        for start in range(0, 6, size):
            part = slice(start, start + size)
            micro = {name: value[part] for name, value in batch.items()}
            loss, metrics = PPOValueLoss()(TokenOutputs(leaf[part]), micro, _denominators(batch))
            loss.backward()
            totals = {k: totals.get(k, 0) + v for k, v in metrics.items()}
        return leaf.grad, totals

    gradient, metrics = run(size)
    whole_gradient, whole_metrics = run(6)
    torch.testing.assert_close(gradient, whole_gradient)
    torch.testing.assert_close(metrics, whole_metrics)


def test_masked_positions_may_hold_anything():
    values, batch = _random_batch(4)
    clean, _ = PPOValueLoss()(TokenOutputs(values), batch, _denominators(batch))
    dropped = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) == 0
    dirty = dict(batch)
    for name in ("values", "returns"):
        dirty[name] = torch.where(dropped, 1e200, batch[name])
    leaf = torch.where(dropped, -1e200, values).requires_grad_()
    loss, _ = PPOValueLoss()(TokenOutputs(leaf), dirty, _denominators(batch))
    loss.backward()
    assert loss.item() == clean.item()
    assert (leaf.grad[dropped] == 0).all()
    assert leaf.grad.isfinite().all()


def test_micro_batch_without_a_valid_token():
    values, batch = _random_batch(5)
    batch["sample_mask"] = torch.zeros(6, dtype=torch.float64)
    leaf = values.requires_grad_()
    loss, metrics = PPOValueLoss()(TokenOutputs(leaf), batch, _denominators(batch))
    loss.backward()
    assert loss.item() == 0
    assert (leaf.grad == 0).all()
    assert metrics["clip_fraction"].item() == 0


def test_bad_clip_is_refused():
    with pytest.raises(ConfigError, match="value_clip: must be greater than 0, got 0"):
        PPOValueLoss(0)
