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

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.errors import NoSuchPart
from circuits.matrices import Circuit
from circuits.nulls import Beta
from circuits.scores import Scores, without_dead
from circuits.surface import Head, Weights, check_stream, head_name, head_of, pair_of, read

if TYPE_CHECKING:
    from pandas import DataFrame

Kind = Literal["Q", "K", "V"]
KINDS: tuple[Kind, ...] = ("Q", "K", "V")
ROWS, COLUMNS = 64, 256  # of the Gram matrices at a time: of all heads together they stay in a processor's cache
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
    check_stream(model)
    w = read(model, fold)
    writers, readers = _grams(w, kinds)
    norms = _norms_squared(writers, readers, w.n_layers)
    shape = max(w.n_layers - 1, 0), len(kinds), w.n_heads  # readers by layer, kind, head: all kinds in one product
    by_kind = [x.unflatten(-1, shape).unbind(-2) for x in (readers.trace, readers.unequal, norms)]
    spectra = writers.trace, writers.unequal
    return {
        kind: _scores(w, kind, spectra, (trace.flatten(), unequal.flatten()), squared.flatten(1))
        for kind, trace, unequal, squared in zip(kinds, *by_kind, strict=True)
    }


def composed(model: Any, kind: Kind, writer: str | Head, reader: str | Head, *, fold: bool = True) -> Circuit:
    """The composed matrix of one pair between tokens, [d_vocab, d_vocab], of rank d_head.

    Q: W_E W_OV¹ W_QK² W_Eᵀ and K: W_E W_QK² W_OV¹ᵀ W_Eᵀ, [destination token, source token]; the token that head 1
    moved stands on the query side for Q and on the key side for K. V: W_E W_OV¹ W_OV² W_U, [source token, output
    token], the virtual head. What it does on its own is in its eigenvalues (`circuits.spectra.composition_spectrum`):
    K-composition that matches tokens has positive ones. Raises: NoSuchPart.
    """
    check_stream(model)
    w = read(model, fold)
    first, second = pair_of(writer, reader, w)
    moved, q, k = (w.W_V[first], w.W_O[first]), w.W_Q[second], w.W_K[second]
    token, own = ("destination token", "source token"), ("source token", "output token")
    if kind == "Q":
        return Circuit(w.W_E @ moved[0], moved[1] @ q @ k.T @ w.W_E.T, *token, w.basis)
    if kind == "K":
        return Circuit(w.W_E @ q, k.T @ moved[1].T @ moved[0].T @ w.W_E.T, *token, w.basis)
    if kind == "V":
        right = moved[1] @ w.W_V[second] @ w.W_O[second] @ w.W_U
        return Circuit(w.W_E @ moved[0], right, *own, w.basis)
    raise NoSuchPart(f"{kind!r} is no kind of composition; expected one of Q, K, V")


@dataclass(frozen=True, repr=False)
class VirtualHead:
    """Two heads in a row, on one prompt: what head 2 moves of what head 1 moved."""

    pattern: Float[Tensor, "destination source"]
    """A² A¹: rows sum to 1, since both patterns' do."""
    ov: Circuit
    """W_OV¹ W_OV²: from the stream at head 1's source to what head 2 writes."""
    writer: Head
    reader: Head

    def to_frame(self) -> "DataFrame":
        """One row for each destination and source: what the two patterns move in a row."""
        from pandas import DataFrame

        at = torch.ones_like(self.pattern).tril().nonzero()
        weights = self.pattern[at[:, 0], at[:, 1]].tolist()
        return DataFrame({"destination": at[:, 0].tolist(), "source": at[:, 1].tolist(), "weight": weights})

    def __repr__(self) -> str:
        pair = f"{head_name(*self.writer)} → {head_name(*self.reader)}"
        return f"virtual head {pair} on {len(self.pattern)} tokens, {self.ov.basis} weights"


def virtual_heads(
    model: Any, tokens: Tensor, writers: list[str | Head] | None = None, readers: list[str | Head] | None = None
) -> Iterator[VirtualHead]:
    """The virtual head of every pair (or of the pairs chosen), for one prompt [1, position].

    With the patterns and LayerNorm's scales frozen, what passes through both heads is A² A¹ x W_OV¹ W_OV². From the
    weights as they are; pass `folded(model)` for folded ones. Raises: NoSuchPart; ValueError for more than one prompt.
    """
    from circuits.attention import attention_maps

    check_stream(model)
    w = read(model, inside=False)
    every: list[str | Head] = [(layer, head) for layer in range(w.n_layers) for head in range(w.n_heads)]
    patterns = attention_maps(model, tokens).patterns
    for h1 in [head_of(name, w) for name in (every if writers is None else writers)]:
        for h2 in [head_of(name, w) for name in (every if readers is None else readers)]:
            if h1[0] < h2[0]:
                ov = Circuit(w.W_V[h1], w.W_O[h1] @ w.W_V[h2] @ w.W_O[h2], "source", "written", w.basis)
                yield VirtualHead(patterns[h2] @ patterns[h1], ov, h1, h2)


@dataclass(frozen=True)
class _Grams:
    """Gram matrices G = F S Fᵀ, [d_model, d_model], in factors: of every writer, or of every reader."""

    outer: Float[Tensor, "part d_model d_head"]
    """F: W_Oᵀ of writers, W_Q, W_K or W_V of readers."""
    small: Float[Tensor, "part d_head d_head"]
    """S, the small Gram matrix of what stands on the other side: W_VᵀW_V of writers."""
    trace: Float[Tensor, "part"]
    unequal: Float[Tensor, "part"]
    """How unequal the eigenvalues of G are: ‖G‖²/trace² − 1/width."""


def _grams(w: Weights, kinds: tuple[Kind, ...]) -> tuple[_Grams, _Grams]:
    """AᵀA of the writers of all layers but the last; BBᵀ of the readers of all but the first, by layer, kind and head.

    With M = FᵀF, trace G = tr(S M) and ‖G‖² = tr(S M S M), so that only matrices of d_head × d_head are multiplied.
    """
    outer = {"O": w.W_O.mT, "Q": w.W_Q, "K": w.W_K, "V": w.W_V}
    other = {"O": "V", "Q": "K", "K": "Q", "V": "O"}
    small = {x: outer[x].mT @ outer[x] for x in {"O", "V", *kinds, *(other[x] for x in kinds)}}

    def grams(names: tuple[str, ...], layers: slice) -> _Grams:
        F, S, M = (
            parts[0].flatten(0, 1) if len(parts) == 1 else torch.stack(parts, 1).flatten(0, 2)
            for parts in (
                [outer[x][layers] for x in names],
                [small[other[x]][layers] for x in names],
                [small[x][layers] for x in names],
            )
        )
        product = S @ M
        trace = product.diagonal(dim1=1, dim2=2).double().sum(1).clamp(min=0)
        size = (product * product.mT).double().sum((1, 2))
        return _Grams(F, S, trace, (size / trace.clamp(min=1e-300) ** 2 - 1 / w.width).clamp(min=0))

    return grams(("O",), slice(0, max(w.n_layers - 1, 0))), grams(kinds, slice(1, None))


def _norms_squared(writers: _Grams, readers: _Grams, n_layers: int) -> Float[Tensor, "writer reader"]:
    """⟨AᵀA, BBᵀ⟩ for every pair with an earlier writer; 0 elsewhere."""
    both, (parts, width, d_head) = (writers, readers), writers.outer.shape
    total = writers.outer.new_zeros(parts, len(readers.outer))
    blocks = _earlier(n_layers, *(len(grams.outer) // max(n_layers - 1, 1) for grams in both))
    rooms = [total.new_empty(2, len(grams.outer) * max(ROWS, d_head) * COLUMNS) for grams in both]
    for first in range(0, width, COLUMNS):
        columns = slice(first, first + COLUMNS)
        scaled = [_product(g.small, g.outer[:, columns].mT, room[0]) for g, room in zip(both, rooms, strict=True)]
        for start in range(0, min(first + COLUMNS, width), ROWS):
            rows, behind = slice(start, start + ROWS), max(start - first, 0)
            left, right = (
                _product(g.outer[:, rows], part[:, :, behind:], room[1])
                for g, part, room in zip(both, scaled, rooms, strict=True)
            )
            # what stands behind the diagonal stands for two equal entries
            left[:, :, max(0, start + ROWS - first - behind) :] *= 2
            left, right = left.flatten(1), right.flatten(1)
            for earlier, later in blocks:
                total[earlier, later].addmm_(left[earlier], right[later].T)
    return total


def _product(left: Tensor, right: Tensor, room: Float[Tensor, "entries"]) -> Float[Tensor, "part row column"]:
    """left @ right, written into `room`: getting new memory for it would take as long again."""
    shape = len(left), left.shape[1], right.shape[2]
    return torch.bmm(left, right, out=room[: math.prod(shape)].view(shape))


def _earlier(n_layers: int, writers: int, readers: int) -> list[tuple[slice, slice]]:
    """Blocks of (writers, readers) that together hold every pair in the right order, and no other: halves, then
    halves of halves, so that few and large products do it. So many of each in a layer; readers count from layer 1."""

    def blocks(first: int, last: int) -> list[tuple[slice, slice]]:
        if last - first < 2:
            return []
        half = (first + last) // 2
        here = slice(first * writers, half * writers), slice((half - 1) * readers, (last - 1) * readers)
        return [here, *blocks(first, half), *blocks(half, last)]

    return blocks(0, n_layers)


def _scores(
    w: Weights, kind: Kind, writers: tuple[Tensor, Tensor], readers: tuple[Tensor, Tensor], squared: Tensor
) -> CompositionScores:
    """From trace and unequality of every writer's and reader's Gram matrix, and ‖A B‖² of every pair."""
    layer = torch.arange(w.n_layers, device=squared.device).repeat_interleave(w.n_heads)
    defined = layer[:, None] < layer[None]
    first, second = defined.nonzero(as_tuple=True)
    behind = second - w.n_heads  # readers count from layer 1
    a, b = writers[0][first], readers[0][behind]
    share = squared[first, behind].double() / (a * b).clamp(min=1e-300)
    variance = 2 * writers[1][first] * readers[1][behind] / max((w.width - 1) * (w.width + 2), 1)
    null = Beta.of(1 / w.width, variance)

    def all_pairs(values: Tensor) -> Tensor:
        whole = torch.zeros(defined.shape, dtype=values.dtype if values.dtype == torch.bool else squared.dtype)
        whole = whole.to(squared.device)
        whole[first, second] = values.to(whole)
        return whole.reshape((w.n_layers, w.n_heads) * 2)

    made = CompositionScores(
        f"{kind}-composition", all_pairs(share.sqrt()), all_pairs(null.root_mean), all_pairs(null.root_sd),
        torch.stack([all_pairs(end) for end in null.band().sqrt()]), all_pairs(null.p(share)), ("writer", "reader"),
        NULL, w.basis, all_pairs(torch.ones_like(first, dtype=torch.bool)), all_pairs((a == 0) | (b == 0)), kind,
    )  # fmt: skip
    return cast(CompositionScores, without_dead(made))
