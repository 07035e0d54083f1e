"""A game whose turns do not depend on each other is learned sooner with credit of turns."""

import statistics

import pytest

from benchmarks.turn_credit import CREDITS, LAST, MEASURES, ahead, curve, settings_with, table

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


def test_an_option_stands_in_the_place_of_the_games():
    found = settings_with(["model.optim.lr=1.0"])
    assert found[-1] == "model.optim.lr=1.0"
    assert sorted(found[:-1]) == sorted(set(settings_with([])) - {"model.optim.lr=3.0e-3"})


def test_the_table_of_both_credits():
    curves = {"turn": [[0.0, *[0.5] * LAST], [0.25] * 6], "trajectory": [[0.25] * 6, [0.5] * 6]}
    assert table(curves, (1, 2)).splitlines() == [
        "| credit | seed 1 | seed 2 | mean |",
        "|---|---:|---:|---:|",
        "| turn, last 5 steps | 0.500 | 0.250 | 0.375 |",
        "| trajectory, last 5 steps | 0.250 | 0.500 | 0.375 |",
        "| turn, all steps | 0.417 | 0.250 | 0.333 |",
        "| trajectory, all steps | 0.250 | 0.500 | 0.375 |",
    ]
    assert [ahead(curves, measure) for measure in MEASURES.values()] == [1, 1]
