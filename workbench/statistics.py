"""Intervals that know where the errors come from.

Errors on the Winograd task come in clusters: the eight sentences about one pair of nouns tend to be right or wrong
together, and a seed that has not found the rule is wrong everywhere. So the interval is a percentile bootstrap that
resamples seeds and clusters, both with replacement and independently of each other (they are crossed: every seed is
scored on the same pairs). Where no seed erred, or all erred, resampling sees no variation and would claim certainty;
there the bound is Wilson's, with the clusters as the sample.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

Z_95 = 1.959964


def wilson(successes: float, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927), 0 to 1."""
    p = successes / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def interval(
    by_seed: Sequence[Mapping[str, tuple[int, float]]], draws: int = 10_000, level: float = 0.95
) -> tuple[float, float]:
    """The interval of mean accuracy over seeds and clusters.

    `by_seed`: for each seed, cluster → (examples, accuracy), as `Scores.by_cluster` gives it. If the seeds do not
    share their clusters (each has a held-out split of its own), clusters are resampled within each seed drawn.
    """
    names = list(by_seed[0])
    weights = np.array([[seed[name][0] for name in seed] for seed in by_seed], dtype=float)
    right = np.array([[n * accuracy for n, accuracy in seed.values()] for seed in by_seed])
    n_seeds, n_clusters = right.shape
    if right.sum() in (0.0, weights.sum()):
        return wilson(n_clusters if right.sum() else 0, n_clusters)
    rng = np.random.default_rng(0)
    seeds = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=draws)
    if all(list(seed) == names for seed in by_seed):
        clusters = rng.multinomial(n_clusters, np.full(n_clusters, 1 / n_clusters), size=draws)
        totals = np.einsum("ds, sc, dc -> d", seeds, right, clusters, optimize=True)
        counts = np.einsum("ds, sc, dc -> d", seeds, weights, clusters, optimize=True)
    else:
        clusters = rng.multinomial(n_clusters, np.full(n_clusters, 1 / n_clusters), size=(draws, n_seeds))
        totals = np.einsum("ds, sc, dsc -> d", seeds, right, clusters)
        counts = np.einsum("ds, sc, dsc -> d", seeds, weights, clusters)
    low, high = np.quantile(totals / counts, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
