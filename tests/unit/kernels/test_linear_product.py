"""Products of the linear layers on CPU, in training and packed for decoding."""

import pytest
import torch
import torch.nn.functional as F

from aligner.kernels import linear_product as products
from aligner.kernels.linear_product import GatedProduct, Origin, Product, linear_product

INPUTS, OUTPUTS = 48, 80
LONG_SUMS = pytest.mark.xfail(
    torch.__version__ < "2.11", reason="oneDNN 3.7 splits long sums by the number of rows"
)


@pytest.fixture(params=[0, 2**30], ids=["packed", "in cache"])
def cached_bytes(request, monkeypatch):
    monkeypatch.setattr("aligner.kernels.linear_product._CACHED_BYTES", request.param)


def leaves(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("least_work", [0, 2**40], ids=["onednn", "mkl"])
@pytest.mark.parametrize("rows", [(7,), (3, 5), (0, 4)])
def test_product_and_gradients(rows, least_work, monkeypatch):
    monkeypatch.setattr(products, "_LEAST_WORK", least_work)
    x, weight = leaves((*rows, INPUTS), (OUTPUTS, INPUTS))
    grad = torch.randn(*rows, OUTPUTS)
    out = linear_product(x, weight)
    expected = F.linear(x.double(), weight.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    ours = torch.autograd.grad(out, (x, weight), grad)
    plain = torch.autograd.grad(expected, (x, weight), grad.double())
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def test_what_an_input_was_made_of_is_kept_in_its_place():
    source, other, weight = leaves((7, INPUTS), (INPUTS,), (OUTPUTS, INPUTS))
    x = (source * other).detach().requires_grad_()
    origin = Origin(torch.mul, (source.detach(), other.detach()))
    out, plain = linear_product(x, weight, origin), linear_product(x, weight)
    kept = {tensor.data_ptr() for tensor in out.grad_fn.saved_tensors}
    assert kept == {tensor.data_ptr() for tensor in (weight, source, other)}
    grad = torch.randn(7, OUTPUTS)
    slopes = (torch.autograd.grad(each, (x, weight), grad) for each in (out, plain))
    assert torch.equal(out, plain)
    assert all(torch.equal(*pair) for pair in zip(*slopes, strict=True))
    for given in (None, origin):  # a frozen weight needs no input
        frozen = linear_product(x, weight.detach(), given)
        saved = [tensor for tensor in frozen.grad_fn.saved_tensors if tensor is not None]
        assert [tensor.shape for tensor in saved] == [weight.shape]


def test_only_the_tensor_itself_has_an_origin():
    made = torch.ones(2, 3)
    origin = Origin(torch.clone, (made.clone(),))
    assert Origin.of(made) is None
    assert origin.note(made) is made
    assert Origin.of(made) is origin
    assert all(Origin.of(other) is None for other in (made.view(3, 2), made.clone(), made * 1))


def test_large_products_are_onednn_s(monkeypatch):
    assert products.has_onednn(torch.zeros(1))
    monkeypatch.setattr(products, "_LEAST_WORK", 7 * INPUTS * OUTPUTS)
    called = []
    monkeypatch.setattr(products, "has_onednn", lambda weight: called.append(weight))
    for rows in (6, 7):
        products.multiply(torch.zeros(rows, INPUTS), torch.zeros(OUTPUTS, INPUTS))
    assert len(called) == 1


# Where many terms are added up, oneDNN has another way for a single row.
@pytest.mark.usefixtures("cached_bytes")
@pytest.mark.parametrize("inputs", [INPUTS, pytest.param(1536, marks=LONG_SUMS)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_in_any_company(gated, inputs):
    torch.manual_seed(1)
    x, weight = torch.randn(70, inputs), torch.randn(2 * OUTPUTS, inputs) / inputs**0.5
    product = GatedProduct(weight) if gated else Product(weight)
    together = product(x)
    plain = F.linear(x.double(), weight.double())
    if gated:
        gate, up = plain.chunk(2, dim=-1)
        plain = F.silu(gate) * up
    torch.testing.assert_close(together.double(), plain, atol=2e-5, rtol=1e-5)
    for count in (1, 2, 15, 16, 17, 64, 69):
        assert torch.equal(product(x[:count]), together[:count]), count


@pytest.mark.usefixtures("cached_bytes")
@pytest.mark.parametrize("inputs", [INPUTS, 1536])
def test_added_to_a_residual(inputs):
    torch.manual_seed(2)
    x, weight = torch.randn(9, inputs), torch.randn(OUTPUTS, inputs) / inputs**0.5
    product, residual = Product(weight), torch.randn(9, OUTPUTS)
    expected = residual.double() + F.linear(x.double(), weight.double())
    sums = product.added_to(residual, x)
    torch.testing.assert_close(sums.double(), expected, atol=1e-5, rtol=1e-5)
    for count in (1, 2, 8):
        assert torch.equal(product.added_to(residual[:count], x[:count]), sums[:count]), count


def test_a_weight_is_packed_when_first_multiplied_with(monkeypatch):
    monkeypatch.setattr("aligner.kernels.linear_product._CACHED_BYTES", 0)
    weight = torch.randn(OUTPUTS, INPUTS)
    product, x = Product(weight), torch.randn(3, INPUTS)
    weight.mul_(2.0)
    first = product(x)
    torch.testing.assert_close(first, F.linear(x, weight))
    weight.mul_(2.0)  # too late
    assert torch.equal(product(x), first)
