"""The residual stream as memory: who writes how much of it, who reads whom, and what is erased again.

Every part of a transformer talks through one stream of d_model dimensions, and far more is written than fits. A part
can free room by erasing: a head whose output is the opposite of what it reads (negative eigenvalues of W_OV) and that
attends to itself, or a neuron whose output weights are opposite to its input weights (cosine near −1). Source: *A
Mathematical Framework for Transformer Circuits*, "residual stream bandwidth".
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from scipy.special import betainc, betaincinv
from torch import Tensor

from circuits.heads import HeadScores, head_scores
from circuits.nulls import Beta, turned_writes
from circuits.scores import DRAWS, LEVEL, Scores, from_draws, without_dead
from circuits.spectra import positivity
from circuits.surface import RANK_TOLERANCE, Basis, Weights, head_name, input_factor, output_factor, read

if TYPE_CHECKING:
    from pandas import DataFrame

ERASING = "what the head writes, turned at random in the written subspace; spectra kept; {draws} draws"
OPPOSED = "output weights in a random direction of the written subspace; closed form"
OVERLAP = "the writer turned at random in the written subspace, its spectrum kept; closed form"


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

        every = [self.erasing, self.current_token, *([] if self.neurons is None else [self.neurons])]
        return concat([scores.to_frame() for scores in every], ignore_index=True)

    def __repr__(self) -> str:
        every = [self.erasing, self.current_token, *([] if self.neurons is None else [self.neurons])]
        return f"erasing heads: {', '.join(self.erasers) or 'none'}\n" + "\n".join(map(repr, every))


def memory_management(
    model: Any, *, heads: HeadScores | None = None, fold: bool = True, draws: int = DRAWS, seed: int = 0
) -> MemoryManagement:
    """Heads that erase what they read at their own position, and neurons whose two sides oppose.

    `heads` are `head_scores(model)` if you have them already; else they are measured. Raises: Undefined where folding
    or head scores are.
    """
    w = read(model, fold)
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
class Bandwidth:
    """How much of the residual stream each part writes or reads, and how much of a writer a reader can see."""

    width: int
    """Dimensions of the stream that anything is written into."""
    used: dict[str, tuple[int, float]]
    """Part → (rank, effective dimensions): "embed", "pos", heads "0.3" and "0.mlp" write, "0.3.Q", "0.3.K", "0.3.V",
    "1.mlp.in" and "unembed" read. Effective is the participation ratio (Σσ²)² / Σσ⁴ of the singular values.
    Heads go by W_OV and W_QK, so that it does not matter how these are split into factors."""
    overlap: dict[tuple[str, str], Scores]
    """(writer, later reader) → share of the writer's squared norm inside the reader's row space, 0…1, one number each.
    By chance it is the reader's rank / width."""
    basis: Basis

    def to_frame(self) -> "DataFrame":
        """One row for each part: rank, effective dimensions, and both as shares of the width."""
        from pandas import DataFrame

        return DataFrame([
            {"part": part, "rank": rank, "effective": effective, "rank share": rank / self.width,
             "effective share": effective / self.width, "basis": self.basis}
            for part, (rank, effective) in self.used.items()
        ])  # fmt: skip

    def overlaps(self) -> "DataFrame":
        """One row for each pair of a writer and a later reader."""
        from pandas import concat

        frames = [s.to_frame().assign(writer=a, reader=b) for (a, b), s in self.overlap.items()]
        return concat(frames, ignore_index=True).loc[:, ["writer", "reader", *frames[0].columns[:-2]]]

    def __repr__(self) -> str:
        stream = f"residual stream of {self.width} dimensions, {self.basis} weights"
        return f"{stream}\n{self.to_frame().to_string(index=False)}"

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False)


def bandwidth(model: Any, *, fold: bool = True) -> Bandwidth:
    """What share of the stream's dimensions each part uses, and the overlap of each writer with each later reader."""
    w = read(model, fold)
    writers, readers = _parts(w)
    bases = {name: _rank_and_basis(W.T) for name, (_, W) in readers.items()}
    used = {name: (_rank_and_basis(W)[0], _effective(W)) for name, (_, W) in writers.items()}
    used |= {name: (bases[name][0], _effective(W.T)) for name, (_, W) in readers.items()}
    overlap = {}
    for a, (written_at, W) in writers.items():
        gram = (W.double() @ W.double().T) if len(W) <= W.shape[1] else (W.double().T @ W.double())
        unequal = gram.pow(2).sum() / gram.trace().clamp(min=1e-300) ** 2 - 1 / w.width
        for b, (read_at, _) in readers.items():
            if written_at < read_at:
                overlap[a, b] = _overlap(W, *bases[b], unequal, w)
    return Bandwidth(w.width, used, overlap, w.basis)


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


def _parts(w: Weights) -> tuple[dict[str, tuple[float, Tensor]], dict[str, tuple[float, Tensor]]]:
    """Writers, rows in the stream, and readers, columns in it; each with when it writes or reads."""
    inside = w.written @ w.written.T
    writers = {"embed": (-1.0, w.W_E - w.W_E.mean(0))}
    if w.W_pos is not None:
        writers["pos"] = (-1.0, w.W_pos - w.W_pos.mean(0))
    readers: dict[str, tuple[float, Tensor]] = {}
    for layer in range(w.n_layers):
        for head in range(w.n_heads):
            q, k, v, o = (W[layer, head] for W in (w.W_Q, w.W_K, w.W_V, w.W_O))
            for kind, factors in (("Q", (q, k.T)), ("K", (k, q.T)), ("V", (v, o))):
                readers[f"{layer}.{head}.{kind}"] = (2 * layer - 0.5, input_factor(*factors).T)
            writers[head_name(layer, head)] = (2 * layer, output_factor(v, o))
        if w.W_in is not None and w.W_out is not None:
            readers[f"{layer}.mlp.in"] = (2 * layer + 0.5, w.W_in[layer])
            writers[f"{layer}.mlp"] = (2 * layer + 1, w.W_out[layer])
    readers["unembed"] = (float("inf"), w.W_U)
    return {name: (at, W @ inside) for name, (at, W) in writers.items()}, readers


def _rank_and_basis(rows: Tensor) -> tuple[int, Float[Tensor, "rank d_model"]]:
    """Rank, and an orthonormal basis of the row space."""
    _, s, vh = torch.linalg.svd(rows.double() if len(rows) <= 4 * rows.shape[1] else torch.linalg.qr(rows.double()).R,
                                full_matrices=False)  # fmt: skip
    rank = int((s > s[:1].clamp(min=1e-300) * RANK_TOLERANCE).sum())
    return rank, vh[:rank]


def _effective(rows: Tensor) -> float:
    """Participation ratio of the squared singular values: how many equal ones would spread as far; 0 for no weights."""
    gram = rows.double().T @ rows.double() if len(rows) > rows.shape[1] else rows.double() @ rows.double().T
    return (gram.trace() ** 2 / gram.pow(2).sum().clamp(min=1e-300)).item()


def _overlap(writer: Tensor, rank: int, rows: Tensor, unequal: Tensor, w: Weights) -> Scores:
    """Share of the writer's squared norm in the reader's row space."""
    total = writer.double().pow(2).sum()
    dead = torch.as_tensor(rank == 0 or bool(total == 0))
    share = (writer.double() @ rows.T).pow(2).sum() / total.clamp(min=1e-300)
    rank = max(rank, 1)
    # the squared composition score of the writer and the projector onto the reader's row space, times the rank
    variance = 2 * unequal.clamp(min=0) * (1 / rank - 1 / w.width) / max((w.width - 1) * (w.width + 2), 1)
    null = Beta.of(1 / w.width, variance)
    return without_dead(Scores(
        "overlap", share, rank * null.mean, rank * null.sd, rank * null.band(), null.p(share / rank), (), OVERLAP,
        w.basis, torch.ones((), dtype=torch.bool), dead,
    ))  # fmt: skip
