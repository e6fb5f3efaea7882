"""The residual stream as memory: who writes how much of it, who reads whom, and what is erased again.

Every part of a transformer talks through one stream of d_model dimensions, and far more is written than fits. A part
can free room by erasing: a head whose output is the opposite of what it reads (negative eigenvalues of W_OV) and that
attends to itself, or a neuron whose output weights are opposite to its input weights (cosine near −1). Source: *A
Mathematical Framework for Transformer Circuits*, "residual stream bandwidth".
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import betainc, betaincinv
from torch import Tensor

from circuits.errors import NoSuchPart
from circuits.heads import HeadScores, head_scores
from circuits.nulls import Beta, turned_writes
from circuits.scores import DRAWS, LEVEL, Scores, from_draws, without_dead
from circuits.spectra import positivity
from circuits.surface import (
    RANK_TOLERANCE,
    Basis,
    Weights,
    check_stream,
    head_name,
    input_factor,
    output_factor,
    read,
)

if TYPE_CHECKING:
    from pandas import DataFrame

ERASING = "what the head writes, turned at random in the written subspace; spectra kept; {draws} draws"
OPPOSED = "output weights in a random direction of the written subspace; closed form"
OVERLAP = "the writer turned at random in the written subspace, its spectrum kept; closed form"
GAUSSIAN = 39  # draws of random factors: the least that reach the ends of a 95 % band


@dataclass(frozen=True, repr=False)
class MemoryManagement:
    """What frees room in the residual stream."""

    erasing: Scores
    """[layer, head]: Σ Re λ / Σ |λ| of W_OV in the residual stream. Near −1: the head writes the opposite of what it
    reads, whatever it attends to."""
    current_token: Scores
    """[layer, head]: mean attention of a token to itself, on random sequences."""
    neurons: Scores | None
    """[layer, neuron]: cosine of each neuron's input and output weights. None in an attention-only model."""

    @property
    def erasers(self) -> list[str]:
        """Heads below the band of `erasing` and above that of `current_token`, with more than half of each."""
        heads = (self.erasing.outside & (self.erasing.scores < -0.5)) & (
            self.current_token.outside & (self.current_token.scores > 0.5)
        )
        return [head_name(*at) for at in heads.nonzero().tolist()]

    def to_frame(self) -> "DataFrame":
        """One row for each head and measure, then each neuron."""
        from pandas import concat

        return concat([scores.to_frame() for scores in self._every], ignore_index=True)

    def __repr__(self) -> str:
        return "\n".join([self._heading, *map(repr, self._every)])

    def _repr_html_(self) -> str:
        return "".join([f"<p>{self._heading}</p>", *(scores._repr_html_() for scores in self._every)])

    @property
    def _every(self) -> list[Scores]:
        return [self.erasing, self.current_token, *([] if self.neurons is None else [self.neurons])]

    @property
    def _heading(self) -> str:
        return f"erasing heads: {', '.join(self.erasers) or 'none'}"


def memory_management(
    model: Any, *, heads: HeadScores | None = None, fold: bool = True, draws: int = DRAWS, seed: int = 0
) -> MemoryManagement:
    """Heads that erase what they read at their own position, and neurons whose two sides oppose.

    `heads` are `head_scores(model)` if you have them already; else they are measured. Raises: Undefined where folding
    or head scores are, or without a residual stream; NoSuchPart for head scores of another shape.
    """
    check_stream(model)
    w = read(model, fold)
    if heads is not None and (shape := tuple(heads["current_token"].scores.shape)) != (w.n_layers, w.n_heads):
        raise NoSuchPart(
            f"head scores of {shape[0]} layers of {shape[1]} heads; this model has {w.n_layers} of {w.n_heads}: pass "
            "head_scores of this model, or none"
        )
    generator = torch.Generator().manual_seed(seed)
    values, null = w.W_E.new_zeros(w.n_layers, w.n_heads), w.W_E.new_zeros(draws, w.n_layers, w.n_heads)
    for layer in range(w.n_layers):
        for head in range(w.n_heads):
            W_V, W_O = w.W_V[layer, head].double(), w.W_O[layer, head]
            turned = turned_writes(w, W_O, draws, generator).double()
            values[layer, head] = positivity(torch.linalg.eigvals(W_O.double() @ W_V)).to(values)
            null[:, layer, head] = positivity(torch.linalg.eigvals(turned @ W_V)).to(values)
    dead = ~(w.W_V.flatten(2).any(-1) & w.W_O.flatten(2).any(-1))
    erasing = from_draws(
        "erasing, eigenvalues of W_OV", values, null, parts=("head",), null=ERASING.format(draws=draws), basis=w.basis,
        dead=dead,
    )  # fmt: skip
    heads = head_scores(model, draws=draws, seed=seed) if heads is None else heads
    return MemoryManagement(erasing, heads["current_token"], None if w.W_in is None else _opposed(w))


@dataclass(frozen=True, repr=False)
class Overlap(Mapping[tuple[str, str], Scores]):
    """(writer, later reader) → share of the writer's squared norm inside the reader's row space, 0…1, one number each.

    By chance it is the reader's rank / width; a reader of everything leaves nothing to align.
    """

    every: Scores
    """[pair]: all of them."""
    at: dict[tuple[str, str], int]
    """Where each pair stands in it."""

    def __getitem__(self, pair: tuple[str, str]) -> Scores:
        """The number of one pair: overlap["0.3", "1.1.K"]. Raises: KeyError."""
        i, every = self.at[pair], self.every
        one = {name: getattr(every, name)[i] for name in ("scores", "null_mean", "null_sd", "p", "defined", "dead")}
        return replace(every, **one, band=every.band[:, i])

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.at)

    def __len__(self) -> int:
        return len(self.at)

    def __repr__(self) -> str:
        return f"overlap of {len(self)} pairs of a writer and a later reader"


@dataclass(frozen=True, repr=False)
class Bandwidth:
    """How much of the residual stream each part writes or reads, and how much of a writer a reader can see."""

    width: int
    """Dimensions of the stream that anything is written into."""
    used: dict[str, tuple[int, float]]
    """Part → (rank, effective dimensions): "embed", "pos", heads "0.3" and "0.mlp" write, "0.3.Q", "0.3.K", "0.3.V",
    "1.mlp.in" and "unembed" read. Effective is the participation ratio (Σσ²)² / Σσ⁴ of the singular values.
    Heads go by W_OV and W_QK, so that it does not matter how these are split into factors."""
    random: dict[str, tuple[int, float, float, float]]
    """Part → the reference: rank and effective dimensions (mean, and both ends of the 95 % band) of random Gaussian
    factors of its shape; GAUSSIAN draws."""
    overlap: Overlap
    basis: Basis

    def to_frame(self) -> "DataFrame":
        """One row for each part: rank, effective dimensions, both as shares of the width, and the random reference."""
        from pandas import DataFrame

        return DataFrame([
            {"part": part, "rank": rank, "random rank": random, "effective": effective, "random effective": mean,
             "random low": low, "random high": high, "rank share": rank / self.width,
             "effective share": effective / self.width, "basis": self.basis}
            for (part, (rank, effective)), (random, mean, low, high) in zip(
                self.used.items(), self.random.values(), strict=True)
        ])  # fmt: skip

    def overlaps(self) -> "DataFrame":
        """One row for each pair of a writer and a later reader."""
        from pandas import DataFrame

        frame = self.overlap.every.to_frame().drop(columns=["measure", "basis"])
        return DataFrame(list(self.overlap), columns=["writer", "reader"]).join(frame)

    def __repr__(self) -> str:
        return f"{self._heading}\n{self.to_frame().to_string(index=False, float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        return f"<p>{self._heading}</p>{self.to_frame().to_html(index=False, float_format='{:.3f}'.format)}"

    @property
    def _heading(self) -> str:
        return (
            f"residual stream of {self.width} dimensions, {self.basis} weights. Random: Gaussian factors of the same "
            f"shapes, {GAUSSIAN} draws"
        )


def bandwidth(model: Any, *, fold: bool = True) -> Bandwidth:
    """What share of the stream's dimensions each part uses, and the overlap of each writer with each later reader.

    Raises: Undefined where folding is, or without a residual stream.
    """
    check_stream(model)
    w = read(model, fold)
    writers, readers = _parts(w)
    ranks, bases = zip(*[_rank_and_basis(part.rows) for part in readers.values()], strict=True)
    used = {name: (_rank_and_basis(part.rows)[0], _effective(_gram(part.rows))) for name, part in writers.items()}
    used |= {name: (rank, _effective(_gram(readers[name].rows))) for name, rank in zip(readers, ranks, strict=True)}
    shapes = {name: part.shape for name, part in (writers | readers).items()}
    by_shape = {shape: _random(*shape) for shape in set(shapes.values())}
    random = {name: by_shape[shape] for name, shape in shapes.items()}
    return Bandwidth(w.width, used, random, _overlap(w, writers, readers, torch.tensor(ranks), bases), w.basis)


def _opposed(w: Weights) -> Scores:
    """Cosine of W_in[:, n] and W_out[n]; that of a random direction has cos² ~ beta(½, (width − 1)/2)."""
    assert w.W_in is not None and w.W_out is not None
    W_in, norms = w.W_in.mT, w.W_in.mT.norm(dim=-1) * w.W_out.norm(dim=-1)
    cosine = (W_in * w.W_out).sum(-1) / norms.clamp(min=1e-30)
    b = max((w.width - 1) / 2, 1e-6)
    tail = 1 - torch.as_tensor(betainc(0.5, b, cosine.double().pow(2).clamp(max=1).cpu().numpy())).to(cosine)
    edge = float(betaincinv(0.5, b, 1 - LEVEL)) ** 0.5
    same = torch.ones_like(cosine)
    return without_dead(Scores(
        "neuron input · output", cosine, 0 * same, same / w.width**0.5, torch.stack([-edge * same, edge * same]),
        tail, ("neuron",), OPPOSED, w.basis, same.bool(), norms == 0,
    ))  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """What one part writes or reads, as rows in the stream."""

    time: float
    """When: a reader sees every writer before it."""
    rows: Float[Tensor, "row d_model"]
    shape: tuple[int, ...]
    """Sizes of its factors within what is written: (n, width) for n × width, (width, d_head, width) for a product."""


def _parts(w: Weights) -> tuple[dict[str, _Part], dict[str, _Part]]:
    """Writers and readers, in the order of time."""
    inside, width = w.written @ w.written.T, w.width
    head = width, w.d_head, width
    writers = {"embed": _Part(-1, (w.W_E - w.W_E.mean(0)) @ inside, (len(w.W_E) - 1, width))}
    if w.W_pos is not None:
        writers["pos"] = _Part(-1, (w.W_pos - w.W_pos.mean(0)) @ inside, (len(w.W_pos) - 1, width))
    readers: dict[str, _Part] = {}
    for layer in range(w.n_layers):
        for i in range(w.n_heads):
            q, k, v, o = (W[layer, i] for W in (w.W_Q, w.W_K, w.W_V, w.W_O))
            for kind, factors in (("Q", (q, k.T)), ("K", (k, q.T)), ("V", (v, o))):
                readers[f"{layer}.{i}.{kind}"] = _Part(2 * layer - 0.5, input_factor(*factors), head)
            writers[head_name(layer, i)] = _Part(2 * layer, output_factor(v, o) @ inside, head)
        if w.W_in is not None and w.W_out is not None:
            readers[f"{layer}.mlp.in"] = _Part(2 * layer + 0.5, w.W_in[layer].T, (w.W_in.shape[2], width))
            writers[f"{layer}.mlp"] = _Part(2 * layer + 1, w.W_out[layer] @ inside, (w.W_out.shape[1], width))
    outs = w.W_U.shape[1] - (w.basis == "folded")  # folding centres them
    readers["unembed"] = _Part(float("inf"), w.W_U.T, (outs, width))
    return writers, readers


def _rank_and_basis(rows: Tensor) -> tuple[int, Float[Tensor, "rank d_model"]]:
    """Rank, and an orthonormal basis of the row space."""
    _, s, vh = torch.linalg.svd(_short(rows.double()), full_matrices=False)
    rank = int((s > s[:1].clamp(min=1e-300) * RANK_TOLERANCE).sum())
    return rank, vh[:rank].to(rows)


def _short(rows: Float[Tensor, "row d_model"]) -> Float[Tensor, "least d_model"]:
    """No more rows than dimensions, with the same Gram matrix."""
    return rows if len(rows) <= rows.shape[1] else torch.linalg.qr(rows, mode="r").R


def _gram(rows: Tensor) -> Float[Tensor, "least least"]:
    """Of rows or columns, whichever are fewer."""
    rows = rows.double()
    return rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows


def _effective(product: Float[Tensor, "size size"]) -> float:
    """Participation ratio of its eigenvalues: how many equal ones would spread as far; 0 for no weights."""
    return (product.trace() ** 2 / (product * product.T).sum().clamp(min=1e-300)).item()


def _random(*shape: int) -> tuple[int, float, float, float]:
    """Rank, and the effective dimensions' mean and ends of the band, of random Gaussian factors.

    They are those of a product of Wishart matrices, drawn by Bartlett's decomposition: a lower triangle of normal
    numbers with a diagonal of chi, so that a large vocabulary costs nothing.
    """
    size, drawn = min(shape), []
    rng = np.random.default_rng(0)
    for _ in range(GAUSSIAN):
        product = torch.eye(size, dtype=torch.float64)
        for degrees in (max(shape[:2]), *shape[2:]):
            lower = np.tril(rng.standard_normal((size, size)), -1)
            np.fill_diagonal(lower, rng.chisquare(degrees - np.arange(size)) ** 0.5)
            product = product @ torch.from_numpy(lower @ lower.T)
        drawn.append(_effective(product))
    return size, sum(drawn) / GAUSSIAN, min(drawn), max(drawn)


def _overlap(
    w: Weights, writers: dict[str, _Part], readers: dict[str, _Part], ranks: Tensor, bases: tuple[Tensor, ...]
) -> Overlap:
    """Share of every writer's squared norm in every later reader's row space.

    It is the squared composition score of the writer and the projector onto that space, times its rank.
    """
    rows = torch.cat(bases)
    reader = torch.arange(len(ranks)).repeat_interleave(ranks).to(rows.device)  # of each row
    times = torch.tensor([part.time for part in readers.values()])
    at, shares, sizes, unequal, dead = {}, [], [], [], []
    for name, part in writers.items():
        later = int((times <= part.time).sum())  # the first of those readers
        start = int(ranks[:later].sum())
        gram = _gram(part.rows)
        total = gram.trace()
        energy = (_short(part.rows) @ rows[start:].T).double().square().sum(0)
        share = energy.new_zeros(len(ranks)).index_add(0, reader[start:], energy)[later:] / total.clamp(min=1e-300)
        shares.append(share)
        sizes.append(ranks[later:])
        unequal.append((1 / max(_effective(gram), 1e-300) - 1 / w.width) * torch.ones_like(share))
        dead.append((ranks[later:] == 0) | bool(total == 0))
        at |= {(name, other): len(at) + i for i, other in enumerate([*readers][later:])}
    share, rank = torch.cat(shares), torch.cat(sizes).to(rows.device).clamp(min=1)
    variance = 2 * torch.cat(unequal).clamp(min=0) * (1 / rank - 1 / w.width) / max((w.width - 1) * (w.width + 2), 1)
    share = torch.where(rank >= w.width, 1.0, share.clamp(0, 1))  # a reader of everything
    null = Beta.of(1 / w.width, variance.clamp(min=0))
    return Overlap(without_dead(Scores(
        "overlap", share, rank * null.mean, rank * null.sd, rank * null.band(), null.p(share / rank), (), OVERLAP,
        w.basis, torch.ones_like(share, dtype=torch.bool), torch.cat(dead).to(rows.device),
    )), at)  # fmt: skip
