"""Intervals that know where the errors come from.

Errors on the Winograd task come in clusters: the eight sentences about one pair of nouns tend to be right or wrong
together, and a seed that has not found the rule is wrong everywhere. So the interval is a percentile bootstrap that
resamples seeds and clusters, both with replacement and independently of each other (they are crossed: every seed is
scored on the same pairs). Near 0 and 1 resampling sees little or no variation and would claim certainty; so the
interval is never narrower than Wilson's with the clusters as the sample and their own variance: for 36 pairs that are
all right it begins at 90.4 %, whatever the number of sentences and seeds.

What it cannot know is a kind of seed that it has not seen. Simulated with five seeds of which each finds the rule with
probability 0.8 and else guesses, it covers the mean in only 64 % of tables, since in a third of them all five succeed.
With seeds that differ by degrees it covers 90 % (84 % with three seeds, 92 % with ten); tests/test_statistics.py holds
the simulations. Where all seeds agree, `seeds_supported` says how much that is worth.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

Z_95 = 1.959964
Clusters = Mapping[str, tuple[int, float]]
"""Cluster → (examples, accuracy) of one seed."""


def wilson(successes: float, n: int, variance: float | None = None, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927), 0 to 1.

    `variance` is that of one observation, p(1 − p) where they are right or wrong; less where they are means.
    """
    p = successes / n
    spread = p * (1 - p) if variance is None else variance
    centre, half = p + z * z / (2 * n), z * math.sqrt(spread / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def interval(by_seed: Sequence[Clusters], draws: int = 10_000, level: float = 0.95) -> tuple[float, float]:
    """The interval of mean accuracy over seeds and clusters, 0 to 1.

    `by_seed`: for each seed, cluster → (examples, accuracy), as `Scores.by_cluster` gives it. If the seeds do not
    share their clusters (each has a held-out split of its own), clusters are resampled within each seed drawn.
    """
    low, high = bootstrap(by_seed, draws, level)
    if _shared(by_seed):
        clusters = np.array([[seed[name][1] for name in by_seed[0]] for seed in by_seed]).mean(axis=0)
    else:
        clusters = np.array([accuracy for seed in by_seed for _, accuracy in seed.values()])
    least, most = wilson(float(clusters.sum()), len(clusters), float(clusters.var()))
    return min(low, least), max(high, most)


def bootstrap(by_seed: Sequence[Clusters], draws: int = 10_000, level: float = 0.95) -> tuple[float, float]:
    """The percentile bootstrap alone: seeds and clusters drawn with replacement."""
    rng = np.random.default_rng(0)
    n_seeds = len(by_seed)
    if _shared(by_seed):  # one drawing of clusters serves all seeds
        names = list(by_seed[0])
        weights = np.array([[seed[name][0] for name in names] for seed in by_seed], dtype=float)
        right = np.array([[seed[name][0] * seed[name][1] for name in names] for seed in by_seed])
        clusters = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
        totals, counts = (clusters @ of.T for of in (right, weights))  # [draw, seed]
        seeds = rng.integers(n_seeds, size=(draws, n_seeds))
        means = np.take_along_axis(totals, seeds, 1).sum(axis=1) / np.take_along_axis(counts, seeds, 1).sum(axis=1)
    else:
        means = np.zeros(draws)
        for draw in range(draws):
            sample = [list(by_seed[s].values()) for s in rng.integers(n_seeds, size=n_seeds)]
            drawn = np.array([seed[c] for seed in sample for c in rng.integers(len(seed), size=len(seed))])
            means[draw] = (drawn[:, 0] * drawn[:, 1]).sum() / drawn[:, 0].sum()
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _shared(by_seed: Sequence[Clusters]) -> bool:
    """Whether all seeds were scored on the same clusters."""
    return all(seed.keys() == by_seed[0].keys() for seed in by_seed)


def seeds_supported(n: int) -> float:
    """The least share of all seeds that behave alike, at 95 %, when n of n did (Wilson's lower bound)."""
    return wilson(n, n)[0]
