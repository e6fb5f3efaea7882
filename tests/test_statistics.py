"""Intervals: against published values, against coverage by simulation, and at the edges."""

import numpy as np
import pytest

from workbench.statistics import interval, wilson


@pytest.mark.parametrize(
    ("successes", "n", "expected"),
    [
        (288, 288, (0.9868, 1.0)),
        (36, 36, (0.9036, 1.0)),
        (0, 36, (0.0, 0.0964)),
        (81, 263, (0.2553, 0.3662)),  # Newcombe 1998, Table I, method 3
        (15, 148, (0.0624, 0.1605)),
    ],
)
def test_wilson_agrees_with_published_values(successes, n, expected):
    assert wilson(successes, n) == pytest.approx(expected, abs=5e-5)


def seeds_of(right):
    """right [seed, cluster] of eight sentences each."""
    return [{f"pair {c}": (8, float(a)) for c, a in enumerate(row)} for row in right]


def test_where_no_sentence_is_wrong_the_bound_is_wilsons_over_pairs():
    assert interval(seeds_of(np.ones((5, 36)))) == pytest.approx(wilson(36, 36))
    assert interval(seeds_of(np.zeros((5, 36)))) == pytest.approx(wilson(0, 36))


def test_one_failed_seed_of_five_widens_the_interval_beyond_what_pairs_say():
    right = np.ones((5, 36))
    right[0] = 0.5
    low, high = interval(seeds_of(right))
    assert low < 0.85 and high == 1.0  # 5 seeds drawn from {.5, 1, 1, 1, 1}


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Both pairs and seeds vary; 200 simulated tables of 10 seeds; a percentile bootstrap is a little narrow."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        pairs, seeds = rng.normal(0, 0.7, 36), rng.normal(0, 0.5, (10, 1))
        right = rng.binomial(8, 1 / (1 + np.exp(-(pairs + seeds)))) / 8
        low, high = interval(seeds_of(right), draws=500)
        covered += low <= 0.5 <= high
    assert 0.85 <= covered / 200 <= 0.99


def test_treating_sentences_as_independent_would_be_too_narrow():
    rng = np.random.default_rng(1)
    right = np.repeat(rng.random((1, 36)) < 0.7, 3, axis=0).astype(float)  # a pair is right or wrong as a whole
    low, high = interval(seeds_of(right))
    naive = wilson(right.mean() * 288 * 3, 288 * 3)
    assert high - low > 2 * (naive[1] - naive[0])


def test_seeds_with_pairs_of_their_own_are_resampled_within_the_seed():
    rng = np.random.default_rng(2)
    right = rng.random((4, 36)).round(1)
    named = [{f"seed {s} pair {c}": (8, float(a)) for c, a in enumerate(row)} for s, row in enumerate(right)]
    low, high = interval(named)
    assert low < right.mean() < high
    assert high - low < interval(seeds_of(right))[1] - interval(seeds_of(right))[0] + 0.02
