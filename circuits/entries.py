"""Single entries of a head's circuit between tokens, each beside what it would be by chance.

Only differences within a row count: the softmax does not see what is added to all scores of a destination, nor to all
logits. So both circuits are shown less the mean of their rows:

    OV   (x_s W_V W_O) · (u_o − ū)                  source token × output token, in logits
    QK   (x_d W_Q + b_Q) · (k_s − k̄) / √d_head      destination token × source token, in scores before the softmax

An entry is a scalar product of two vectors of the written space, a_i · b_j (plus b_Q · (k_s − k̄) / √d_head for QK). The
null turns one against the other at random: then (a_i · b_j)² / (‖a_i‖² ‖b_j‖²) has the distribution
beta(½, (d − 1)/2), d the width of that space, so mean and band are exact and need no draws. One entry in twenty leaves
its band by chance, and entries of a row go together: what counts is how many do.

With LayerNorm, exact up to the positive scale that it divides each token by; in later layers it is the part that comes
straight from the embedding. With rotary positions QK holds at distance 0. Source of the circuits: *A Mathematical
Framework for Transformer Circuits* (2021).
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from scipy.special import betaincinv
from torch import Tensor

from circuits.errors import NoSuchPart
from circuits.matrices import Circuit
from circuits.scores import LEVEL
from circuits.surface import Head, head_of, read

Which = Literal["OV", "QK"]


@dataclass(frozen=True)
class Entries:
    """Some entries with the middle 95 % of their null."""

    values: Float[Tensor, "row column"]
    low: Float[Tensor, "row column"]
    high: Float[Tensor, "row column"]

    @property
    def outside(self) -> Bool[Tensor, "row column"]:
        """Whether an entry leaves its band; never where nothing is left to turn."""
        room = 1e-6 * self.values.abs().amax() if self.values.numel() else 0.0
        return (self.values < self.low - room) | (self.values > self.high + room)


@dataclass(frozen=True)
class TokenCircuit:
    """A head's OV or QK circuit between tokens, less the mean of each row, as its two factors."""

    circuit: Circuit
    row_size: Float[Tensor, "row"]
    """‖a_i‖."""
    column_size: Float[Tensor, "column"]
    """‖b_j‖."""
    null_mean: Float[Tensor, "column"]
    width: int
    """Dimensions that a and b are turned in."""

    @property
    def reach(self) -> float:
        """The |cosine| of two random directions stays below it in 95 % of cases."""
        return 1.0 if self.width < 2 else sqrt(float(betaincinv(0.5, (self.width - 1) / 2, 1 - LEVEL)))

    def at(self, rows: Any = slice(None), columns: Any = slice(None)) -> Entries:
        """These rows and columns: slices or lists of tokens. Raises: NoSuchPart for a token that is not there."""
        try:
            values = self.circuit.left[rows] @ self.circuit.right[:, columns]
            half = self.reach * self.row_size[rows][:, None] * self.column_size[columns]
            mean = self.null_mean[columns].expand_as(half)
        except IndexError:
            raise NoSuchPart(f"this circuit has {self.circuit.shape[0]} × {self.circuit.shape[1]} tokens") from None
        return Entries(values, mean - half, mean + half)

    def share_outside(self) -> float:
        """Of all entries, 0 to 1; 0.05 is what chance gives."""
        rows, columns = self.circuit.shape
        return sum(int(self.at(some).outside.sum()) for some in _blocks(rows)) / (rows * columns)


def token_circuit(model: Any, head: str | Head, which: Which = "OV", *, fold: bool = True) -> TokenCircuit:
    """A head's circuit between tokens with the null of every entry.

    `fold` as in `circuits.composition_scores`. Raises: NoSuchPart; Undefined where folding is.
    """
    w = read(model, fold)
    at = head_of(head, w)
    if which == "OV":
        moved = w.W_V[at] @ w.W_O[at]
        outs = w.W_U - w.W_U.mean(1, keepdim=True)
        circuit = Circuit(w.W_E @ w.W_V[at], w.W_O[at] @ outs, "source token", "output token", w.basis)
        row_size, column_size = (w.W_E @ moved).norm(dim=1), (w.written.T @ outs).norm(dim=0)
        return TokenCircuit(circuit, row_size, column_size, torch.zeros_like(column_size), w.width)
    if which == "QK":
        unscaled = getattr(getattr(model, "config", None), "attention", None) == "softmax-unscaled"
        keys = w.W_E @ w.W_K[at] + w.b_K[at]
        keys = ((keys - keys.mean(0)) / (1 if unscaled else w.d_head**0.5)).T
        circuit = Circuit(w.W_E @ w.W_Q[at] + w.b_Q[at], keys, "destination token", "source token", w.basis)
        row_size, column_size = (w.W_E @ w.written).norm(dim=1), (w.written.T @ w.W_Q[at] @ keys).norm(dim=0)
        return TokenCircuit(circuit, row_size, column_size, w.b_Q[at] @ keys, w.width)
    raise NoSuchPart(f"{which!r} is no circuit here; expected OV or QK")


def _blocks(n: int, size: int = 512) -> list[slice]:
    return [slice(start, start + size) for start in range(0, n, size)]
