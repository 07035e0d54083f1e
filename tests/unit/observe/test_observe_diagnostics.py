"""Diagnostics against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.observe.diagnostics import (
    explained_variance,
    gap_verdict,
    gap_warnings,
    repeated_ngram_fraction,
    reward_length_correlation,
    rollout_metrics,
    statistics,
)
from aligner.observe.metrics import METRICS


def test_explained_variance_and_reward_length_correlation_by_hand():
    # Counted: returns 1 2 3 4 (variance 1.25), errors 0.5 -0.5 0.5 -0.5 (variance 0.25): 1 - 0.2.
    returns = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 99.0]])
    values = torch.tensor([[7.0, 0.5, 2.5], [2.5, 4.5, -99.0]])
    mask = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    assert explained_variance(values, returns, mask).item() == pytest.approx(0.8)
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(torch.zeros(2, 3), returns, mask).item() == 0.0
    rounded = torch.ones(2, 3) + torch.tensor([0.0, 0.0, 1.2e-7])
    for constant in (torch.ones(2, 3), rounded, torch.zeros(2, 3)):
        assert math.isnan(explained_variance(values, constant, mask).item())
    # x = -1 0 1, y = -1 1 0 about their means 2 and 5: 1 / sqrt(2 * 2).
    rewards, lengths = torch.tensor([1.0, 2.0, 3.0, 50.0]), torch.tensor([4, 6, 5, 1])
    kept = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert reward_length_correlation(rewards, lengths, kept).item() == pytest.approx(0.5)
    assert math.isnan(reward_length_correlation(rewards, torch.ones(4)).item())
    assert reward_length_correlation(rewards, 3 * rewards).item() == pytest.approx(1.0)


def test_ngrams_of_a_large_vocabulary_are_told_apart():
    ids = torch.arange(128_256 - 4096, 128_256).reshape(4, 1024)
    lengths = torch.full((4,), 1024)
    assert repeated_ngram_fraction(ids, torch.zeros(4, dtype=torch.int64), lengths, 8).item() == 0


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_repeated_ngrams_equal_a_loop_over_sets(data):
    n, length = data.draw(st.integers(1, 4)), 12
    row = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    rows = data.draw(st.lists(row, min_size=1, max_size=4))
    bounds = st.tuples(st.integers(0, length), st.integers(0, length))
    spans = [sorted(data.draw(bounds)) for _ in rows]
    shares = []
    for row, (start, end) in zip(rows, spans, strict=True):
        grams = [tuple(row[i : i + n]) for i in range(start, end - n + 1)]
        if grams:
            shares.append(1 - len(set(grams)) / len(grams))
    bounds = torch.tensor(spans)
    got = repeated_ngram_fraction(torch.tensor(rows), bounds[:, 0], bounds[:, 1], n).item()
    assert math.isnan(got) if not shares else got == pytest.approx(sum(shares) / len(shares))


def test_statistics_of_counted_entries():
    found = statistics(torch.tensor([1, 2, 3, 100]), torch.tensor([1, 1, 1, 0]))
    numbers = {name: value.item() for name, value in found.items()}
    assert numbers == {"mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0}
    assert statistics(torch.tensor([4.0]))["std"].item() == 0.0
    assert math.isnan(statistics(torch.zeros(0))["mean"].item())


def test_rollout_metrics_have_registered_names_and_the_expected_numbers():
    batch = {
        "input_ids": torch.tensor([[9, 1, 1, 1, 1], [9, 9, 2, 0, 0]]),
        "prompt_lengths": torch.tensor([1, 2]),
        "input_lengths": torch.tensor([5, 3]),
        "is_end": torch.tensor([False, True]),
        "rewards": torch.tensor([0.0, 1.0]),
        "sample_mask": torch.tensor([0.0, 1.0]),
    }
    found = rollout_metrics(batch)
    for prefix in ("train_rollouts/", "val_rollouts/"):
        assert all(prefix + name in METRICS for name in found)
    assert found["rewards"] == 0.5
    assert found["rewards_std"] == pytest.approx(math.sqrt(0.5))
    assert found["generation_length"] == 2.5
    assert (found["generation_length_min"], found["generation_length_max"]) == (1.0, 4.0)
    assert found["prompt_length"] == 1.5
    assert found["fraction_of_samples_properly_ended"] == 0.5
    assert found["reward_length_correlation"] == pytest.approx(-1.0)
    assert found["repeated_ngram_fraction"] == 0.5
    assert (found["num_samples"], found["generated_tokens"]) == (2, 5)


@pytest.mark.parametrize(
    ("gap", "precision", "is_rounding"),
    [
        (1e-4, "32", True),
        (1.1e-4, "32", False),
        (0.05, "bf16", True),
        (0.06, "bf16", False),
        (9.0, "64", None),
        (math.nan, "32", None),
    ],
)
def test_a_gap_is_rounding_or_the_console_says_so(gap, precision, is_rounding):
    verdict = gap_verdict(gap, precision)
    assert (verdict and verdict[0]) is is_rounding
    said = gap_warnings({"sampler/logprob_gap_mean": gap}, precision)
    assert len(said) == (is_rounding is False)
    if said:
        assert f"logprob_gap_mean={gap:.2g}, more than rounding" in said[0]
        assert verdict[1] in said[0]
    assert gap_warnings({}, precision) == ()
