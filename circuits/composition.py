"""Which earlier head's output which later head reads: Q-, K- and V-composition of every pair, from weights.

In row vectors, head 1 writes x W_OV¹ and head 2 reads it through W_QK² (query side), its transpose (key side) or W_OV²
(value side). The score of *A Mathematical Framework for Transformer Circuits* is

    ‖A B‖_F / (‖A‖_F ‖B‖_F),   A = W_OV¹ = W_V¹ W_O¹,   B = W_QK² = W_Q² W_K²ᵀ  |  W_QK²ᵀ  |  W_OV².

**Without a d_model × d_model product for each pair.** ‖A B‖²_F = ⟨AᵀA, BBᵀ⟩: the Gram matrices of each writer and
reader are made once, and all pairs are one matrix product of flattened Gram matrices. They are made a block of rows at
a time, so that memory does not grow with d_model², and only above the diagonal, since they are symmetric.

**The null** turns A against B at random and keeps both spectra. With G_A = AᵀA, G_B = BBᵀ, traces a and b, and d the
width of what is written (`Weights.width`), the squared score has mean 1/d and variance

    2 (‖G_A‖² − a²/d) (‖G_B‖² − b²/d) / ((d − 1)(d + 2) a² b²),

from the second moments of a random rotation. A beta distribution with these moments gives band and p: it is exact for
two heads of rank one, and was checked against Monte Carlo. The null of Gaussian factors that is often used ignores
spectra and calls unaligned heads aligned in 6–19 % of cases.

A z says that two heads are not turned against each other at random. It does not say that they compose on any input: in
trained models nearly every pair leaves the band, many of them downwards. Rank by it, then cut (`circuits.cuts`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from circuits.errors import NoSuchPart, Undefined
from circuits.nulls import Beta
from circuits.scores import Scores, without_dead
from circuits.surface import Head, Weights, head_name, head_of, input_factor, output_factor, read

Kind = Literal["Q", "K", "V"]
KINDS: tuple[Kind, ...] = ("Q", "K", "V")
BLOCK = 64  # rows of the Gram matrices at a time
NULL = "writer and reader turned against each other at random, spectra kept; closed form"


@dataclass(frozen=True, repr=False)
class CompositionScores(Scores):
    """[layer, head, layer, head]: writer, then reader. `scores["0.2", "1.1"]` is one pair."""

    kind: Kind

    def ranked(self) -> list[tuple[Head, Head]]:
        """All pairs, the highest z first."""
        order = self.z.masked_fill(~self.defined, -torch.inf).flatten().argsort(descending=True)
        pairs = [torch.unravel_index(i, self.scores.shape) for i in order[: int(self.defined.sum())]]
        return [((int(a), int(b)), (int(c), int(d))) for a, b, c, d in pairs]


def composition_scores(model: Any, kind: Kind, *, fold: bool = True) -> CompositionScores:
    """One kind of composition for every pair of a head and a later one.

    `kind`: "Q", "K" or "V", the part of the reader. `fold` reads `folded(model)`, where LayerNorm and what it would
    subtract no longer hide in the weights; False reads the weights as they are. With rotary positions Q and K are
    those at distance 0. Raises: NoSuchPart for another kind; Undefined where folding is, or without a residual stream.
    """
    return compositions(model, (kind,), fold=fold)[kind]


def compositions(model: Any, kinds: tuple[Kind, ...] = KINDS, *, fold: bool = True) -> dict[Kind, CompositionScores]:
    """Several kinds at once; what the writers need is computed once for all of them."""
    for kind in kinds:
        if kind not in KINDS:
            raise NoSuchPart(f"{kind!r} is no kind of composition; expected one of Q, K, V")
    if not getattr(getattr(model, "config", None), "residual", True):
        raise Undefined("composition is undefined where sub-layers replace the token: nothing is added to a stream")
    weights = read(model, fold)
    writers = _parts(output_factor(weights.W_V, weights.W_O))
    readers = {kind: _parts(input_factor(*_read_by(weights, kind))) for kind in kinds}
    norms = _norms_squared(writers, list(readers.values()), weights.n_layers)
    return {kind: _scores(weights, kind, writers, readers[kind], norms[i]) for i, kind in enumerate(kinds)}


def composed(
    model: Any, kind: Kind, writer: str | Head, reader: str | Head, *, fold: bool = True
) -> tuple[Tensor, Tensor]:
    """The composed matrix of one pair between tokens, as two factors [d_vocab, d_head] and [d_head, d_vocab].

    Q: W_E W_OV¹ W_QK² W_Eᵀ and K: W_E W_QK² W_OV¹ᵀ W_Eᵀ, [destination token, source token]; the token that head 1
    moved stands on the query side for Q and on the key side for K. V: W_E W_OV¹ W_OV² W_U, [source token, output
    token], the virtual head. What it does on its own is in its eigenvalues (`circuits.spectra.composition_spectrum`):
    K-composition that matches tokens has positive ones. Raises: NoSuchPart.
    """
    w = read(model, fold)
    (l1, h1), (l2, h2) = head_of(writer, w), head_of(reader, w)
    if l1 >= l2:
        raise NoSuchPart(f"head {head_name(l2, h2)} does not read head {head_name(l1, h1)}: it is not in a later layer")
    moved = w.W_V[l1, h1], w.W_O[l1, h1]
    q, k = w.W_Q[l2, h2], w.W_K[l2, h2]
    if kind == "Q":
        return w.W_E @ moved[0], moved[1] @ q @ k.T @ w.W_E.T
    if kind == "K":
        return w.W_E @ q, k.T @ moved[1].T @ moved[0].T @ w.W_E.T
    if kind == "V":
        return w.W_E @ moved[0], moved[1] @ w.W_V[l2, h2] @ w.W_O[l2, h2] @ w.W_U
    raise NoSuchPart(f"{kind!r} is no kind of composition; expected one of Q, K, V")


@dataclass(frozen=True)
class VirtualHead:
    """Two heads in a row, on one prompt: what head 2 moves of what head 1 moved."""

    pattern: Float[Tensor, "destination source"]
    """A² A¹: rows sum to 1, since both patterns' do."""
    factors: tuple[Float[Tensor, "d_model d_head"], Float[Tensor, "d_head d_model"]]
    """W_OV¹ W_OV² = factors[0] @ factors[1]."""
    writer: Head
    reader: Head


def virtual_heads(
    model: Any, tokens: Tensor, writers: list[str | Head] | None = None, readers: list[str | Head] | None = None
) -> Iterator[VirtualHead]:
    """The virtual head of every pair (or of the pairs chosen), for one prompt [1, position].

    With the patterns and LayerNorm's scales frozen, what passes through both heads is A² A¹ x W_OV¹ W_OV². From the
    weights as they are; pass `folded(model)` for folded ones. Raises: NoSuchPart; ValueError for more than one prompt.
    """
    from circuits.attention import attention_maps

    w = read(model)
    every: list[str | Head] = [(layer, head) for layer in range(w.n_layers) for head in range(w.n_heads)]
    patterns = attention_maps(model, tokens).patterns
    for h1 in [head_of(name, w) for name in (every if writers is None else writers)]:
        for h2 in [head_of(name, w) for name in (every if readers is None else readers)]:
            if h1[0] < h2[0]:
                right = w.W_O[h1] @ w.W_V[h2] @ w.W_O[h2]
                yield VirtualHead(patterns[h2] @ patterns[h1], (w.W_V[h1], right), h1, h2)


def _read_by(w: Weights, kind: Kind) -> tuple[Tensor, Tensor]:
    """B's two factors: what reads the stream [layer, head, d_model, d_head], and the rest [layer, head, d_head, …]."""
    if kind == "Q":
        return w.W_Q, w.W_K.mT
    if kind == "K":
        return w.W_K, w.W_Q.mT
    return w.W_V, w.W_O


def _parts(factors: Float[Tensor, "layer head rank d_model"]) -> Float[Tensor, "part rank d_model"]:
    return rearrange(factors, "l h d m -> (l h) d m")


def _norms_squared(writers: Tensor, readers: list[Tensor], n_layers: int) -> list[Float[Tensor, "writer reader"]]:
    """⟨PᵀP, NᵀN⟩ for every pair with an earlier writer, for several sets of readers; 0 elsewhere."""
    parts, _, width = writers.shape
    total = [torch.zeros(parts, parts, dtype=writers.dtype, device=writers.device) for _ in readers]
    for start in range(0, width, BLOCK):
        stop = min(start + BLOCK, width)
        left = _gram_rows(writers, start, stop)
        left[:, :, stop - start :] *= 2  # what stands behind the diagonal stands for two equal entries
        left = left.flatten(1)
        for kind, reader in enumerate(readers):
            right = _gram_rows(reader, start, stop).flatten(1)
            for rows, columns in _earlier(n_layers, parts // max(n_layers, 1)):
                total[kind][rows, columns] += left[rows] @ right[columns].T
    return total


def _gram_rows(factors: Tensor, start: int, stop: int) -> Float[Tensor, "part row column"]:
    """Rows start … stop of FᵀF, from the diagonal on."""
    return factors[:, :, start:stop].mT @ factors[:, :, start:]


def _earlier(n_layers: int, heads: int) -> list[tuple[slice, slice]]:
    """Blocks of (writers, readers) that together hold every pair in the right order, and no other: halves, then
    halves of halves, so that few and large products do it."""
    if n_layers < 2:
        return []
    half = n_layers // 2
    first = slice(0, half * heads), slice(half * heads, n_layers * heads)
    behind = [
        (slice(a.start + half * heads, a.stop + half * heads), slice(b.start + half * heads, b.stop + half * heads))
        for a, b in _earlier(n_layers - half, heads)
    ]
    return [first, *_earlier(half, heads), *behind]


def _scores(w: Weights, kind: Kind, writers: Tensor, readers: Tensor, squared: Tensor) -> CompositionScores:
    a, unequal_a = _spectrum(writers, w.width)
    b, unequal_b = _spectrum(readers, w.width)
    layer = torch.arange(w.n_layers, device=writers.device).repeat_interleave(w.n_heads)
    defined = layer[:, None] < layer[None]
    first, second = defined.nonzero(as_tuple=True)
    share = squared[first, second].double() / (a[first] * b[second]).clamp(min=1e-300)
    variance = 2 * unequal_a[first] * unequal_b[second] / max((w.width - 1) * (w.width + 2), 1)
    null = Beta.of(1 / w.width, variance)
    low, high = null.band().sqrt()

    def all_pairs(values: Tensor) -> Tensor:
        whole = torch.zeros(defined.shape, dtype=writers.dtype, device=writers.device)
        whole[first, second] = values.to(whole)
        return whole.reshape((w.n_layers, w.n_heads) * 2)

    scores, mean, sd, p = (
        all_pairs(x) for x in (share.sqrt(), null.root_mean, null.root_sd, null.p(share.clamp(max=1)))
    )
    dead = ((a == 0)[:, None] | (b == 0)[None]) & defined
    made = CompositionScores(
        f"{kind}-composition", scores, mean, sd, torch.stack([all_pairs(low), all_pairs(high)]), p,
        ("writer", "reader"), NULL, w.basis, defined.reshape(scores.shape), dead.reshape(scores.shape), kind,
    )  # fmt: skip
    return cast(CompositionScores, without_dead(made))


def _spectrum(factors: Tensor, width: int) -> tuple[Float[Tensor, "part"], Float[Tensor, "part"]]:
    """The trace a of each Gram matrix, and how unequal its eigenvalues are: ‖G‖²/a² − 1/width."""
    small = (factors @ factors.mT).double()
    trace = small.diagonal(dim1=1, dim2=2).sum(1)
    unequal = small.pow(2).sum((1, 2)) / trace.clamp(min=1e-300) ** 2 - 1 / width
    return trace, unequal.clamp(min=0)
