"""Log-probs from hidden states against the full-vocabulary formula in float64."""

import math

import pytest
import torch
from hidden_logprobs import logprobs_of, reference_logprobs

from aligner.distributed import model_utils
from aligner.errors import ConfigError
from aligner.logprobs import output_layer
from aligner.logprobs.top_k_top_p import TrainingSamplingParams, threshold

VOCAB, PADDING, HIDDEN, TOKENS, LIMIT = 301, 11, 8, 13, 20
SAMPLING = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.7},
    {"cap": 2.0},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.7, "cap": 3.0},
]


def _inputs(dtype=torch.float64, seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB + PADDING, HIDDEN, generator=generator, dtype=torch.float64)
    target = torch.randint(0, VOCAB, (tokens,), generator=generator)
    target[:2] = torch.tensor([0, VOCAB - 1])[:tokens]
    return hidden.requires_grad_(), weight.to(dtype).requires_grad_(), target


def _reference(hidden, weight, target, **sampling):
    logits = hidden.double() @ weight.double()[:VOCAB].t()
    return reference_logprobs(logits, target, **sampling)


@pytest.fixture(params=[4 * 2**20, 13 * 64 * 8], ids=["one_tile", "many_tiles"])
def _tile(request, monkeypatch):
    monkeypatch.setitem(output_layer._TILE_BYTES, "cpu", request.param)


@pytest.mark.usefixtures("_tile")
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("chunk_size", [None, 1, 5])
def test_values_and_gradients(sampling, chunk_size):
    hidden, weight, target = _inputs()
    generator = torch.Generator().manual_seed(9)
    g, e = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    options = {"chunk_size": chunk_size, "with_entropy": True, **sampling}
    logprobs, entropy = logprobs_of(hidden, weight, target, VOCAB, **options)
    expected = _reference(hidden, weight, target, **sampling)
    torch.testing.assert_close((logprobs, entropy), expected)
    for outputs, references in [
        ([logprobs @ g], [expected[0] @ g]),
        ([entropy @ e], [expected[1] @ e]),
        ([logprobs @ g, entropy @ e], [expected[0] @ g, expected[1] @ e]),
    ]:
        actual = torch.autograd.grad(sum(outputs), (hidden, weight), retain_graph=True)
        wanted = torch.autograd.grad(sum(references), (hidden, weight), retain_graph=True)
        torch.testing.assert_close(actual, wanted)


def test_padding_rows_take_no_part_and_no_tokens_are_fine():
    hidden, weight, target = _inputs()
    with torch.no_grad():
        weight[VOCAB:] = 1e4  # would swallow the softmax
    logprobs, _ = logprobs_of(hidden, weight, target, VOCAB)
    torch.testing.assert_close(logprobs, _reference(hidden, weight, target)[0])
    logprobs.sum().backward()
    assert (weight.grad[VOCAB:] == 0).all()
    hidden, weight, target = _inputs(tokens=0)
    for sampling in SAMPLING:
        logprobs, entropy = logprobs_of(
            hidden, weight, target, VOCAB, with_entropy=True, **sampling
        )
        assert logprobs.shape == entropy.shape == (0,)
        actual = torch.autograd.grad(logprobs.sum(), (hidden, weight))
        assert all((gradient == 0).all() for gradient in actual)


@pytest.mark.usefixtures("_tile")
@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
def test_bfloat16_accumulates_in_float32(sampling):
    """Inputs rounded to bfloat16, arithmetic exact: float32's error, not bfloat16's (4e-3)."""
    hidden, weight, target = _inputs(torch.bfloat16)
    logprobs, entropy = logprobs_of(hidden, weight, target, VOCAB, with_entropy=True, **sampling)
    expected = _reference(hidden, weight, target, **sampling)
    assert logprobs.dtype == torch.float32
    found = logprobs.double(), entropy.double()
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    actual = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    wanted = torch.autograd.grad(expected[0].sum(), (hidden, weight))
    for a, b in zip(actual, wanted, strict=True):
        assert a.dtype == torch.bfloat16
        # One rounding to bfloat16 (2^-9), of the result.
        torch.testing.assert_close(a.double(), b.double(), rtol=2**-8, atol=1e-4)


def _recorded_sets():
    """Sets of 1 to LIMIT tokens, the target first, as int32 [N, LIMIT] with -1 behind."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.full((TOKENS, LIMIT), -1, dtype=torch.int32)
    for row in range(TOKENS):
        count = 1 + row % LIMIT
        kept[row, :count] = torch.randperm(VOCAB, generator=generator)[:count].int()
    return kept, kept[:, 0].long()


@pytest.mark.usefixtures("_tile")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_over_a_recorded_set(temperature):
    (hidden, weight, _), (kept, target) = _inputs(), _recorded_sets()
    generator = torch.Generator().manual_seed(9)
    g, e = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    options = {"vocab_size": VOCAB, "temperature": temperature, "top_p": 0.8, "kept_ids": kept}
    found = logprobs_of(hidden, weight, target, **options, with_entropy=True)
    logprobs, entropies = [], []
    for row in range(TOKENS):
        ids = kept[row][kept[row] >= 0].long()
        log_softmax = (weight[ids] @ hidden[row] / temperature).log_softmax(0)
        logprobs.append(log_softmax[0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum())
    expected = torch.stack(logprobs), torch.stack(entropies)
    torch.testing.assert_close(found, expected)
    slopes = [
        torch.autograd.grad((g * pair[0] + e * pair[1]).sum(), (hidden, weight))
        for pair in (found, expected)
    ]
    torch.testing.assert_close(*slopes)


@pytest.mark.usefixtures("_tile")
def test_what_was_not_recorded_is_found_again():
    (hidden, weight, _), (kept, target) = _inputs(), _recorded_sets()
    options = {"vocab_size": VOCAB, "top_k": 4, "with_entropy": True}
    own = logprobs_of(hidden, weight, target, **options)
    recorded = logprobs_of(hidden, weight, target, kept_ids=kept, **options)
    kept[5] = -1
    mixed = logprobs_of(hidden, weight, target, kept_ids=kept, **options)
    for found, again, before in zip(mixed, own, recorded, strict=True):
        assert found[5] == again[5]
        assert found[5] != before[5]
        rest = [row for row in range(TOKENS) if row != 5]
        assert torch.equal(found[rest], before[rest])


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    weight = torch.tensor([[300.0], [-300.0], [0.0]], requires_grad=True)
    logprobs, entropy = logprobs_of(
        hidden, weight, torch.tensor([0, 0]), vocab_size=3, with_entropy=True
    )
    assert logprobs.tolist() == [0.0, -600.0]
    assert entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.tolist() == [[0.0], [600.0]]
    assert weight.grad.tolist() == [[-1.0], [1.0], [0.0]]


def test_one_frozen_input():
    hidden, weight, target = _inputs()
    logprobs, _ = logprobs_of(hidden, weight, target, VOCAB)
    both = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    for frozen in (0, 1):
        inputs = [hidden.detach(), weight.detach()]
        inputs[1 - frozen].requires_grad_()
        logprobs_of(*inputs, target, VOCAB)[0].sum().backward()
        torch.testing.assert_close(inputs[1 - frozen].grad, both[1 - frozen])
        assert inputs[frozen].grad is None


def test_kept_sets_by_hand():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])  # probabilities .643 .237 .087 .032
    for top_k, top_p, count in [
        (2, 1.0, 2),
        (0, 0.6, 1),
        (0, 0.65, 2),
        (2, 0.74, 2),  # of the first two alone: .731 .269
        (2, 0.73, 1),
        (9, 1.0, 4),
    ]:
        kept = logits >= threshold(logits.clone(), top_k, top_p)
        assert kept[0].tolist() == [index < count for index in range(4)], (top_k, top_p)
    equal = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    assert (equal >= threshold(equal.clone(), 2, 1.0)).tolist() == [[True, True, True, False]]
    # Logits 3, 2, 1, 0, top-k 2, target 3: the set is {0, 1, 3}.
    logprobs, _ = logprobs_of(torch.ones(1, 1), logits.t(), torch.tensor([3]), 4, top_k=2)
    assert logprobs.item() == pytest.approx(-math.log(math.exp(3) + math.exp(2) + 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be positive"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -2}, "top_k=-2"),
    ],
)
def test_bad_sampling_is_refused(options, message):
    assert model_utils.TrainingSamplingParams is TrainingSamplingParams  # the published name
    with pytest.raises(ConfigError, match=message):
        TrainingSamplingParams(**options)
