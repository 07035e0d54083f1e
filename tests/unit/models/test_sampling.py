"""Sampling against hand-worked numbers and exact distributions."""

import math

import pytest
import torch

from aligner.config import SamplingParams
from aligner.errors import NonFiniteError
from aligner.logprobs.top_k_top_p import threshold
from aligner.models.gpt.decode.sampling import (
    _keep_threshold,
    counter_uniforms,
    inverse_cdf,
    sample_tokens,
)

PLAIN = SamplingParams()


def even_uniforms(count):
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


def splitmix64_uniform(seed, sample, position):
    """The same hash in Python's unbounded integers."""
    mask = 2**64 - 1

    def mix(state):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        return state ^ (state >> 31)

    state = seed & mask
    for counter in (sample, position):
        state = mix((state + 0x9E3779B97F4A7C15) & mask) ^ mix(
            (counter + 0xBF58476D1CE4E5B9) & mask
        )
    return (mix(state) >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 1, -7, 2**63 - 1, 2**64 + 5])
def test_uniforms_equal_the_same_hash_in_unbounded_integers(seed):
    samples = torch.tensor([0, 1, 2**40, -3])
    positions = torch.tensor([0, 5, 1000, 2])
    expected = [
        splitmix64_uniform(seed, s, p)
        for s, p in zip(samples.tolist(), positions.tolist(), strict=True)
    ]
    assert counter_uniforms(seed, samples, positions).tolist() == expected


def test_inverse_cdf_by_hand():
    p = torch.zeros(6, 300)
    p[:, 5], p[:, 130], p[:, 299] = 0.25, 0.5, 0.25
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert inverse_cdf(p, u).tolist() == [5, 5, 130, 130, 299, 299]


def test_inverse_cdf_never_returns_a_token_of_probability_zero():
    torch.manual_seed(0)
    p = torch.rand(2000, 517) * (torch.rand(2000, 517) < 0.02)
    p[:, 7] += 1e-30
    u = torch.rand(2000, dtype=torch.float64)
    u[:500], u[500:1000] = 0.0, 1 - 2**-53
    assert (p.gather(1, inverse_cdf(p, u)[:, None]) > 0).all()


@pytest.mark.parametrize(
    ("weights", "sampling", "expected"),
    [
        ((8, 2, 1, 5), PLAIN, (8 / 16, 2 / 16, 1 / 16, 5 / 16)),
        ((1, 4), SamplingParams(temperature=2.0), (1 / 3, 2 / 3)),
        ((1, 6, 2, 3), SamplingParams(top_k=2), (0, 6 / 9, 0, 3 / 9)),
        ((2, 10, 3, 5), SamplingParams(top_p=0.6), (0, 2 / 3, 0, 1 / 3)),  # the one that crosses
        ((2, 10, 3, 5), SamplingParams(top_p=0.4), (0, 1, 0, 0)),
        # After top-k the first two have 4/7 and 3/7: 0.57 does not reach 0.58.
        ((4, 3, 2, 1), SamplingParams(top_k=2, top_p=0.58), (4 / 7, 3 / 7, 0, 0)),
        ((4, 3, 2, 1), SamplingParams(top_k=2, top_p=0.57), (1, 0, 0, 0)),
    ],
)
def test_distributions_by_hand(weights, sampling, expected):
    """Frequencies are exact, because the uniform numbers are midpoints of equal parts."""
    count, expected = 4000, torch.tensor(expected, dtype=torch.float32)
    rows = torch.tensor(weights).log().expand(count, -1)
    drawn = sample_tokens(rows, even_uniforms(count), sampling, greedy=False)
    share = torch.bincount(drawn.tokens, minlength=len(weights)) / count
    assert torch.allclose(share, expected, atol=1 / 4000)
    assert torch.allclose(drawn.logprobs, expected.log()[drawn.tokens], atol=1e-6)
    greedy = sample_tokens(rows[:1].clone(), torch.zeros(1).double(), sampling, greedy=True)
    assert greedy.tokens.item() == max(range(len(weights)), key=weights.__getitem__)
    assert greedy.logprobs.item() == pytest.approx(expected.max().log().item(), abs=1e-6)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 3.0, 10.0])
def test_nucleus_without_a_full_sort_keeps_the_same_tokens(top_p, spread):
    """Flat rows need the sorted path, steep ones do not; both equal the trainer's own."""
    torch.manual_seed(0)
    scores = torch.randn(5, 5000) * spread
    scores[2] *= 0.01
    expected = scores >= threshold(scores.clone(), 0, top_p)[:, None]
    limits, _ = _keep_threshold(scores, 0, top_p, may_wait=True)
    assert torch.equal(scores >= limits[:, None], expected)
    unread, wide = _keep_threshold(scores, 0, top_p, may_wait=False)
    assert bool(wide) == bool((expected.sum(1) >= 1024).any())
    assert bool(wide) or torch.equal(unread, limits)


def test_log_probs_are_exact_over_a_large_vocabulary():
    """A float32 softmax of 49,152 tokens is off by 7e-5 here; the log-probs must not be."""
    torch.manual_seed(0)
    logits = torch.randn(8, 49152) - 8.0
    logits[:, 0] = 9.0
    u = torch.linspace(0, 0.999, 8, dtype=torch.float64)
    drawn = sample_tokens(logits, u, PLAIN, greedy=False)
    exact = logits.double().log_softmax(-1).gather(1, drawn.tokens[:, None]).squeeze(1)
    assert (drawn.logprobs - exact).abs().max() < 2e-6


def test_banned_end_tokens_are_never_drawn_and_only_in_banned_rows():
    logits = torch.zeros(200, 4)
    logits[:, 3] = 50.0
    banned = torch.arange(200) < 100
    drawn = sample_tokens(
        logits, even_uniforms(200), PLAIN, greedy=False, banned=banned, end_ids=torch.tensor([3, 1])
    )
    assert set(drawn.tokens[:100].tolist()) <= {0, 2}
    assert set(drawn.tokens[100:].tolist()) == {3}
    # The policy's own log-probs: exp(0) of exp(50) + 3 exp(0).
    assert drawn.logprobs[:100].tolist() == pytest.approx([-50.0] * 100, abs=1e-5)
    assert drawn.logprobs[100:].tolist() == pytest.approx([0.0] * 100, abs=1e-5)


def test_with_a_kept_set_the_ban_is_part_of_the_log_prob():
    logits = torch.tensor([[0.0, 0.0, -9.0, 50.0]])
    drawn = sample_tokens(
        logits,
        torch.full((1,), 0.7).double(),
        SamplingParams(top_k=2),
        greedy=False,
        banned=torch.ones(1, dtype=torch.bool),
        end_ids=torch.tensor([3]),
    )
    assert drawn.tokens.tolist() == [1]
    assert drawn.logprobs.item() == pytest.approx(math.log(0.5), abs=1e-6)


@pytest.mark.parametrize("columns", [2048, 2049, 5000])
def test_one_level_and_two_find_the_same_tokens(columns):
    generator = torch.Generator().manual_seed(4)
    probabilities = torch.rand(40, columns, generator=generator).softmax(1)
    found = inverse_cdf(probabilities, even_uniforms(40))
    expected = probabilities.double().cumsum(1)
    expected = (expected <= even_uniforms(40)[:, None] * expected[:, -1:]).sum(1)
    assert (found - expected).abs().max() <= (0 if columns <= 2048 else 1)


def test_a_row_does_not_depend_on_the_others():
    torch.manual_seed(0)
    logits, u = torch.randn(9, 1000), torch.rand(9, dtype=torch.float64)
    for sampling in (PLAIN, SamplingParams(temperature=0.7, top_k=30), SamplingParams(top_p=0.8)):
        together = sample_tokens(logits, u, sampling, greedy=False)
        for row in range(9):
            alone = sample_tokens(logits[row : row + 1], u[row : row + 1], sampling, greedy=False)
            assert alone.tokens.item() == together.tokens[row].item()
            assert alone.logprobs.item() == together.logprobs[row].item()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_are_refused(bad):
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    with pytest.raises(NonFiniteError, match=r"rows \[1\]"):
        sample_tokens(logits, torch.full((3,), 0.5).double(), PLAIN, greedy=False)
