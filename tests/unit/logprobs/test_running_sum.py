"""Running sums by matrix products, which a GPU takes where operations that repeat were chosen."""

import pytest
import torch

from aligner.config import SamplingParams
from aligner.kernels.linear_product import running_sum, sum_by_products
from aligner.logprobs import top_k_top_p
from aligner.models.gpt.decode import sampling


def probabilities(columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randn(6, columns, generator=generator) * 3
    rows[:, ::3] = -torch.inf  # what a filter leaves out
    rows[:, 1] = 1.0
    return rows.softmax(1).to(dtype)


@pytest.mark.parametrize("columns", [1, 259, 2048, 2049, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_sums(columns, dtype):
    values = probabilities(max(2, columns), dtype)[:, :columns]
    sums = sum_by_products(values)
    assert (sums - values.double().cumsum(1)).abs().max() < 1e-12
    assert sums.dtype == torch.float64
    if columns <= 2048:  # one product: sums never fall, and zeros change nothing
        steps = sums.diff(dim=1)
        assert (steps >= 0).all()
        assert (steps[values[:, 1:] == 0] == 0).all()
    assert torch.equal(running_sum(values, torch.float64), values.cumsum(1, dtype=torch.float64))


@pytest.mark.parametrize("vocabulary", [259, 4096])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.8}])
def test_the_same_tokens_are_drawn(monkeypatch, vocabulary, options):
    logits = torch.randn(64, vocabulary, generator=torch.Generator().manual_seed(1)) * 4
    uniforms = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def draw():
        return sampling.sample_tokens(
            logits.clone(), uniforms, SamplingParams(**options), greedy=False
        )

    expected = draw()

    def by_products(values, dtype=None):
        return sum_by_products(values).to(dtype or values.dtype)

    for module in (sampling, top_k_top_p):
        monkeypatch.setattr(module, "running_sum", by_products)
    drawn = draw()
    assert torch.equal(drawn.tokens, expected.tokens)
    assert torch.allclose(drawn.logprobs, expected.logprobs, atol=1e-5)
