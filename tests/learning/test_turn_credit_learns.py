"""A game whose turns do not depend on each other is learned sooner with credit of turns."""

import statistics

import pytest

from benchmarks.turn_credit import CREDITS, MEASURES, ahead, curve, table

SEEDS = (1, 2, 3, 4, 5)


@pytest.mark.extended
def test_turn_credit_is_ahead_of_trajectory_credit_over_five_seeds(tiny_nemo):
    curves = {
        credit: [curve(str(tiny_nemo), credit, seed, 100) for seed in SEEDS] for credit in CREDITS
    }
    print(table(curves, SEEDS))
    at_the_end, over_all = MEASURES.values()
    means = {credit: statistics.fmean(map(at_the_end, each)) for credit, each in curves.items()}
    assert means["turn"] > 0.7
    assert means["turn"] > means["trajectory"]
    assert ahead(curves, over_all) >= 4
