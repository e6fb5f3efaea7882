"""Eigenvalues by chance: the null of the spectra of a head's circuits between tokens, drawn by turning.

What a head writes (OV) or what its queries read (QK) is turned at random within the written space; every spectrum of
the weights stays as it is. What the eigenvalues of the circuit between tokens are then is their null.
"""

from typing import Any

import torch
from jaxtyping import Complex
from torch import Tensor

from circuits.entries import Which
from circuits.nulls import turned_writes
from circuits.scores import DRAWS, Scores, from_draws
from circuits.spectra import eigenvalues, positivity
from circuits.surface import Head, Weights, head_of, read

NULLS = {
    "OV": "what the head writes, turned at random in the written subspace; spectra kept; {draws} draws",
    "QK": "what the queries read, turned at random in the written subspace; spectra kept; {draws} draws",
}


def turned_eigenvalues(
    model: Any, head: str | Head, circuit: Which = "OV", *, fold: bool = True, draws: int = DRAWS, seed: int = 0
) -> Complex[Tensor, "draw d_head"]:
    """Eigenvalues of one head's circuit between tokens, as `circuits.eigenvalues` gives them, under the null.

    Raises: NoSuchPart; Undefined where folding is.
    """
    w = read(model, fold)
    return _turned(w, head_of(head, w), circuit, draws, torch.Generator().manual_seed(seed))


def spectrum_scores(
    model: Any, circuit: Which = "OV", *, fold: bool = True, draws: int = DRAWS, seed: int = 0
) -> Scores:
    """Σ Re λ / Σ |λ| of every head's circuit between tokens, −1 … 1, [layer, head].

    OV near 1: it copies, raising what it attends to (`circuits.copying_score` has two more measures of that). QK near
    1: it matches, a destination looks for its own token. Without biases; with rotary positions QK holds at distance 0.
    Raises: Undefined where folding is.
    """
    w = read(model, fold)
    shape = (w.n_layers, w.n_heads)
    heads = [(layer, head) for layer in range(w.n_layers) for head in range(w.n_heads)]
    measure, null = f"positivity of {circuit}", NULLS[circuit].format(draws=draws)
    if not heads:
        none = w.W_E.new_zeros(shape)
        blank = none.bool()
        return Scores(
            measure, none, none, none, none.new_zeros(2, *shape), none, ("head",), null, w.basis, blank, blank
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([positivity(_turned(w, at, circuit, draws, generator)) for at in heads], 1)
    left, right = (w.W_V, w.W_O) if circuit == "OV" else (w.W_Q, w.W_K)
    dead = torch.tensor([not (bool(left[at].any()) and bool(right[at].any())) for at in heads])
    return from_draws(
        measure, positivity(eigenvalues(model, circuit, fold=fold)).to(w.W_E), drawn.to(w.W_E).view(-1, *shape),
        parts=("head",), null=null, basis=w.basis, dead=dead.view(shape),
    )  # fmt: skip


def _turned(
    w: Weights, at: Head, circuit: Which, draws: int, generator: torch.Generator
) -> Complex[Tensor, "draw d_head"]:
    if circuit == "OV":
        turned = turned_writes(w, w.W_O[at], draws, generator).double()
        return torch.linalg.eigvals(turned @ (w.W_U.double() @ (w.W_E.double() @ w.W_V[at].double())))
    turned = turned_writes(w, w.W_Q[at].T, draws, generator).double()
    keys = (w.W_E.double().T @ (w.W_E.double() @ w.W_K[at].double())).T
    return torch.linalg.eigvals(keys @ turned.mT)
