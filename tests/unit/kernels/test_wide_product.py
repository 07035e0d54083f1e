"""Products of bfloat16 matrices as a GPU makes them, on a CPU that is given the kernel it lacks.

The kernel below is what `torch.mm` with ``out_dtype`` promises: exact products of bfloat16 numbers,
sums and result in float32. Everything around it is the library's own code for GPUs.
"""

from unittest.mock import Mock

import pytest
import torch
from hidden_logprobs import logprobs_of, reference_logprobs

from aligner.kernels import linear_product
from aligner.kernels.linear_product import wide_linear
from aligner.logprobs import output_layer

VOCAB, PADDING, HIDDEN, TOKENS = 301, 11, 24, 13
HALF = 2**-8  # twice the largest relative error of one rounding to bfloat16
SAMPLING = [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 40, "top_p": 0.7}]


def _mm(left, right, out_dtype):
    assert left.dtype == right.dtype == torch.bfloat16
    assert out_dtype == torch.float32
    return left.float() @ right.float()


def _mm_out(left, right, out_dtype, *, out):
    return out.copy_(_mm(left, right, out_dtype))


@pytest.fixture(autouse=True)
def _gpu_products(monkeypatch):
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("mm.dtype", _mm, "CPU")
    kernels.impl("mm.dtype_out", _mm_out, "CPU")
    monkeypatch.setattr(linear_product, "_has_kernel", lambda matrix: True)
    yield
    kernels._destroy()


def _inputs():
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    weight = (0.5 * torch.randn(VOCAB + PADDING, HIDDEN, generator=generator)).bfloat16()
    target = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    scale = torch.randn(2, TOKENS, generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), target, scale


@pytest.mark.parametrize("tile_bytes", [4 * 2**20, 13 * 64 * 4])
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_logprobs_and_gradients(sampling, tile_bytes, monkeypatch):
    """Forward: float32's error. Gradients: each logit's is off by one rounding, then added up."""
    monkeypatch.setitem(output_layer._TILE_BYTES, "cpu", tile_bytes)
    hidden, weight, target, scale = _inputs()
    logprobs, entropy = logprobs_of(
        hidden, weight, target, VOCAB, chunk_size=5, with_entropy=True, **sampling
    )
    assert logprobs.dtype == entropy.dtype == torch.float32
    logits = hidden.double() @ weight.double()[:VOCAB].t()
    expected = reference_logprobs(logits, target, **sampling)
    found = logprobs.double(), entropy.double()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    for both in (False, True):
        value = (logprobs * scale[0]).sum() + both * (entropy * scale[1]).sum()
        wanted = (expected[0] * scale[0]).sum() + both * (expected[1] * scale[1]).sum()
        actual = torch.autograd.grad(value, (hidden, weight), retain_graph=True)
        right = torch.autograd.grad(wanted, (logits, hidden, weight), retain_graph=True)
        size = right[0].abs()  # of each logit's gradient
        bounds = (
            size @ weight.detach().double()[:VOCAB].abs(),
            torch.nn.functional.pad(size.t() @ hidden.detach().double().abs(), (0, 0, 0, PADDING)),
        )
        for found, exact, bound in zip(actual, right[1:], bounds, strict=True):
            assert found.dtype == torch.bfloat16
            error = (found.double() - exact.double()).abs()
            assert (error <= HALF * (bound + exact.abs()) + 1e-5).all()
            assert error.norm() < 0.004 * exact.double().norm()


def test_nothing_becomes_float32_before_it_is_multiplied(monkeypatch):
    """No factor is converted: the kernel is the only place that sees a product."""
    product = Mock(wraps=torch.mm)
    monkeypatch.setattr(torch, "mm", product)
    hidden, weight, target, _ = _inputs()
    logprobs, _ = logprobs_of(hidden, weight, target, VOCAB, temperature=0.5, top_k=7)
    logprobs.sum().backward()
    assert product.call_count == 5  # thresholds, logits, logits again, two gradients
    factors = [factor for call in product.call_args_list for factor in call.args[:2]]
    assert {factor.dtype for factor in factors} == {torch.bfloat16}


def test_wide_linear():
    hidden, weight, _, _ = _inputs()
    product = wide_linear(hidden, weight)
    exact = hidden.double() @ weight.double().t()
    torch.testing.assert_close(product.double(), exact, atol=1e-5, rtol=1e-6)
    grad = torch.randn(product.shape, generator=torch.Generator().manual_seed(4))
    actual = torch.autograd.grad(product, (hidden, weight), grad)
    wanted = torch.autograd.grad(exact, (hidden, weight), grad.double())
    for found, right in zip(actual, wanted, strict=True):
        assert found.dtype == torch.bfloat16
        assert (found.double() - right.double()).norm() < 0.006 * right.double().norm()
