"""Why scores are divided by √d_k, on random vectors; and what a layer costs. No model is needed.

q·k of entries with variance 1 has variance d_k (Vaswani et al. 2017, footnote 4). Scores that far apart make the
softmax a maximum: all weight on one token, and a Jacobian diag(p) − ppᵀ, through which queries and keys would learn, of
nearly zero.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.errors import Undefined

FROZEN = 0.01
"""Trace of the softmax's Jacobian below which a row counts as frozen; its largest value is 1 − 1/keys."""


@dataclass(frozen=True)
class Rows:
    """What the softmax makes of rows of random scores, means over the rows."""

    effective_tokens: float
    """exp(entropy): from 1, everything on one key, to the number of keys."""
    jacobian: float
    """Trace of the softmax's Jacobian, 1 − Σ p²."""
    frozen: float
    """Share of rows whose trace is below FROZEN."""


@dataclass(frozen=True)
class RandomScores:
    """Queries and keys of independent N(0, 1) entries, of one width."""

    width: int
    variance: float
    """Of q·k over independent pairs; in theory the width."""
    scaled: Rows
    unscaled: Rows


def random_scores(
    widths: Iterable[int], keys: int = 64, rows: int = 500, pairs: int = 20_000, seed: int = 0
) -> list[RandomScores]:
    """Scores of random queries and keys, divided by √width and not, for each width d_k.

    Every row has `keys` keys of its own; the variance is over other, independent pairs. Standard errors: of the
    variance √(2/pairs) of it, of a share at most 0.5/√rows. Raises: Undefined for a width, a number of keys, rows or
    pairs below 1 (pairs: 2).
    """
    widths = list(widths)
    if min(*widths, keys, rows, pairs - 1, 1) < 1:
        raise Undefined("random scores need widths, keys and rows of at least 1, and 2 pairs")
    found, generator = [], torch.Generator().manual_seed(seed)
    for width in widths:
        q, k = (torch.randn(pairs, width, generator=generator) for _ in range(2))
        variance = float((q * k).sum(-1).var())
        products = torch.cat([_products(len(part), keys, width, generator) for part in torch.arange(rows).split(64)])
        found.append(RandomScores(width, variance, _rows(products / math.sqrt(width)), _rows(products)))
    return found


def _products(rows: int, keys: int, width: int, generator: torch.Generator) -> Float[Tensor, "row key"]:
    q = torch.randn(rows, width, generator=generator)
    return torch.einsum("rd, rkd -> rk", q, torch.randn(rows, keys, width, generator=generator))


def _rows(scores: Float[Tensor, "row key"]) -> Rows:
    p = scores.softmax(-1)
    entropy = -torch.xlogy(p, p).sum(-1)
    trace = 1 - p.pow(2).sum(-1)
    return Rows(float(entropy.exp().mean()), float(trace.mean()), float((trace < FROZEN).float().mean()))


@dataclass(frozen=True)
class LayerCost:
    """A kind of layer: operations, steps that cannot run side by side, steps between the two ends of the sequence."""

    kind: str
    formulas: tuple[str, str, str]
    """The three in n positions, width d, kernel k, window r, as the paper has them, without constant factors."""
    operations: int
    sequential: int
    path: int


def layer_costs(n: int, d: int, kernel: int = 3, window: int = 64) -> list[LayerCost]:
    """Table 1 of Vaswani et al. 2017 for n positions of width d: orders of growth with every constant taken as 1.

    `kernel`: of the convolution, dilated. `window`: how many neighbours restricted attention sees, at most n. Raises:
    Undefined for a number below 1, or a kernel below 2, whose path would never end.
    """
    if min(n, d, window) < 1 or kernel < 2:
        raise Undefined("a layer's cost needs n, d and window of at least 1 and a kernel of at least 2")
    r = min(window, n)
    return [
        LayerCost("self-attention", ("n²·d", "1", "1"), n * n * d, 1, 1),
        LayerCost("recurrent", ("n·d²", "n", "n"), n * d * d, n, n),
        LayerCost("convolutional", ("k·n·d²", "1", "log_k(n)"), kernel * n * d * d, 1, _hops(n, kernel)),
        LayerCost("self-attention, restricted", ("r·n·d", "1", "n/r"), r * n * d, 1, -(-n // r)),
    ]


def _hops(n: int, kernel: int) -> int:
    """log_kernel(n) rounded up, at least 1, in whole numbers."""
    hops, reach = 1, kernel
    while reach < n:
        hops, reach = hops + 1, reach * kernel
    return hops
