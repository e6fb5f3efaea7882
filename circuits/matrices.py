"""Circuits as matrices: what a head matches, what it moves, and what any part writes for any later part to read.

Rows are what comes in, columns what comes out, as in `x @ W`:

    W_QK = W_Q W_Kᵀ                    destination's stream × source's stream
    W_OV = W_V W_O                     source's stream × what is written at the destination
    qk_circuit = W_E W_QK W_Eᵀ         destination token × source token
    ov_circuit = W_E W_OV W_U          source token × output token
    direct_path = W_E W_U              token × next token

A score is x_destination W_QK x_sourceᵀ / √d_head: W_QK and qk_circuit are without the 1/√d_head. All are kept as their
two thin factors (`Circuit`); a vocabulary × vocabulary matrix is built only by `.dense()`.

With no LayerNorm these are exact. With one, read `folded(model)`: then they are exact up to the positive scale that
LayerNorm divides each position by. Source: *A Mathematical Framework for Transformer Circuits* (2021).
"""

import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens import FactoredMatrix

from circuits.errors import NoSuchPart, Undefined
from circuits.surface import Basis, Head, Weights, check_stream, head_of, positions, read

if TYPE_CHECKING:
    from pandas import DataFrame

CHUNK = 2**25  # entries of a dense matrix at a time: 128 MiB of float32
Side = Literal["token", "position"]


@dataclass(frozen=True, repr=False)
class Circuit:
    """A matrix kept as its two factors."""

    left: Float[Tensor, "row rank"]
    right: Float[Tensor, "rank column"]
    rows: str
    """What a row is, such as "destination token"."""
    columns: str
    basis: Basis

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    def dense(self) -> Float[Tensor, "row column"]:
        """The whole matrix: with a vocabulary of 50,257 that is 9.4 GiB."""
        return self.left @ self.right

    def __getitem__(self, at: Any) -> Tensor:
        """Entries by row and column, each a number, a slice, a list or a tensor: circuit[5], circuit[5, :10]."""
        row, column = at if isinstance(at, tuple) else (at, slice(None))
        try:
            return self.left[row] @ self.right[:, column]
        except IndexError:
            raise NoSuchPart(f"{at} lies outside this circuit of {self.shape[0]} × {self.shape[1]}") from None

    def chunks(self) -> Iterator[tuple[int, Float[Tensor, "some column"]]]:
        """(first row, dense rows) one after the other; none holds more than 128 MiB."""
        size = max(1, CHUNK // max(self.shape[1], 1))
        for start in range(0, self.shape[0], size):
            yield start, self.left[start : start + size] @ self.right

    def diagonal(self) -> Float[Tensor, "row"]:
        """Entries (i, i) of a square circuit."""
        self._check_square()
        return (self.left * self.right.T).sum(1)

    def eigenvalues(self) -> Tensor:
        """Complex [rank]: all eigenvalues that can differ from zero, of a square circuit, in double precision."""
        self._check_square()
        return torch.linalg.eigvals((self.right @ self.left).double())

    def top(self, n: int = 20, *, largest: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, columns, values), [n] each: the largest (or smallest) entries of all, in order."""
        if n < 1:
            raise NoSuchPart(f"the {n} largest entries: expected at least 1")
        sign = 1 if largest else -1
        best = torch.empty(0).to(self.left)
        where = torch.empty(0, dtype=torch.int64, device=self.left.device)
        for start, dense in self.chunks():
            values, flat = (sign * dense).flatten().topk(min(n, dense.numel()))
            best, where = torch.cat([best, values]), torch.cat([where, flat + start * self.shape[1]])
            best, order = best.topk(min(n, len(best)))
            where = where[order]
        return where // self.shape[1], where % self.shape[1], sign * best

    def to_frame(self, n: int = 20) -> "DataFrame":
        """The n largest and the n smallest entries: row, column, value."""
        from pandas import DataFrame

        ends = [self.top(n), self.top(n, largest=False)]
        row, column, value = (torch.cat([high, low.flip(0)]).tolist() for high, low in zip(*ends, strict=True))
        return DataFrame({self.rows: row, self.columns: column, "value": value, "basis": self.basis})

    def _check_square(self) -> None:
        if self.shape[0] != self.shape[1]:
            raise Undefined(f"a circuit of {self.shape[0]} × {self.shape[1]} has no diagonal and no eigenvalues")

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.to_frame(5).to_html(index=False)}"

    def __repr__(self) -> str:
        size = f"{self.rows} [{self.shape[0]}] × {self.columns} [{self.shape[1]}]"
        return f"Circuit {size}, rank ≤ {self.left.shape[1]}, {self.basis} weights"


def W_QK(model: Any, head: str | Head | None = None) -> FactoredMatrix:
    """W_Q W_Kᵀ of one head [d_model, d_model], or of all [layer, head, d_model, d_model], as TransformerLens' factored
    matrix. Scores divide by √d_head. With rotary positions it is what matches at distance 0."""
    w = read(model, inside=False)
    at = () if head is None else head_of(head, w)
    return FactoredMatrix(w.W_Q[at], w.W_K[at].mT)


def W_OV(model: Any, head: str | Head | None = None) -> FactoredMatrix:
    """W_V W_O of one head [d_model, d_model], or of all [layer, head, d_model, d_model]."""
    w = read(model, inside=False)
    at = () if head is None else head_of(head, w)
    return FactoredMatrix(w.W_V[at], w.W_O[at])


def qk_circuit(model: Any, head: str | Head, *, destination: Side = "token", source: Side = "token") -> Circuit:
    """How strongly a head's destination matches a source, [destination, source], each a token or a position.

    Token × token is (W_E W_Q + b_Q)(W_E W_K + b_K)ᵀ; a position takes W_pos for W_E and leaves the biases to the
    tokens, so that in a model of one layer without LayerNorm the four together, divided by √d_head, are the scores.
    With rotary positions token × token holds at distance 0, and with ALiBi its slope comes on top. Raises: Undefined
    for a position side where positions are not added to what queries and keys are made from; NoSuchPart.
    """
    w = read(model)
    at = head_of(head, w)
    sides = []
    for side, W, b in ((destination, w.W_Q[at], w.b_Q[at]), (source, w.W_K[at], w.b_K[at])):
        if side not in ("token", "position"):
            raise NoSuchPart(f"{side!r} is no side of a QK circuit; expected token or position")
        sides.append(w.W_E @ W + b if side == "token" else _position_rows(model, w) @ W)
    return Circuit(sides[0], sides[1].T, f"destination {destination}", f"source {source}", w.basis)


def ov_circuit(model: Any, head: str | Head) -> Circuit:
    """What attending to a source token adds to the logit of an output token, [source token, output token].

    W_E W_OV W_U. The value bias is not in it: attention sums to 1, so it reaches every destination alike, whatever is
    attended to, and belongs to the output bias.
    """
    w = read(model)
    at = head_of(head, w)
    return Circuit(w.W_E @ w.W_V[at], w.W_O[at] @ w.W_U, "source token", "output token", w.basis)


def direct_path(model: Any) -> Circuit:
    """What a token says about the next one without any head, [token, next token]: W_E W_U + b_U, bigrams.

    A model without layers is exactly this: its softmax is the table of bigram probabilities. Raises: Undefined where
    sub-layers replace the token, so that nothing passes them by.
    """
    check_stream(model)
    w = read(model)
    ones = w.W_E.new_ones(len(w.W_E), 1)
    return Circuit(torch.cat([w.W_E, ones], 1), torch.cat([w.W_U, w.b_U[None]]), "token", "next token", w.basis)


def virtual_weights(model: Any, writer: str, reader: str) -> Circuit:
    """W_write W_read: how a part's input reaches a later part straight through the residual stream.

    `writer`: "embed" [d_vocab], "pos" [n_ctx], a head "0.3" (its input, [d_model]; through W_OV) or a neuron
    "0.mlp.17" [1]. `reader`: a head's "1.2.Q", "1.2.K" or "1.2.V" [d_head], a neuron "1.mlp.17" [1], or "unembed"
    [d_vocab]. Raises: NoSuchPart where there is no such part, or the reader comes before the writer; Undefined
    where sub-layers replace the token.
    """
    check_stream(model)
    w = read(model, inside=False)
    written, when_written = _writer(model, w, writer)
    reads, when_read = _reader(model, w, reader)
    if when_read <= when_written:
        raise NoSuchPart(f"{reader} reads the residual stream before {writer} has written to it")
    left, right = written if isinstance(written, tuple) else (written, None)
    return Circuit(
        left, reads if right is None else right @ reads, f"input of {writer}", f"output of {reader}", w.basis
    )


def _position_rows(model: Any, w: Weights) -> Float[Tensor, "n_ctx d_model"]:
    kind = positions(model)
    if kind == "shortformer":
        return model.W_pos.detach().to(w.W_E)
    if w.W_pos is None:
        why = {"none": "has no positions"}.get(
            kind, f"has {kind} positions, which are in the scores and not in the stream"
        )
        raise Undefined(f"a positional QK circuit is undefined: this model {why}")
    return w.W_pos


def _writer(model: Any, w: Weights, name: str) -> tuple[Any, float]:
    """(rows, or both factors of a head's W_OV; when it writes). Layer l's heads write at 2l, its neurons at 2l + 1."""
    if name == "embed":
        return w.W_E, -1
    if name == "pos":
        if w.W_pos is None:
            raise Undefined(f"positions are not written to the residual stream of this model ({positions(model)})")
        return w.W_pos, -1
    if ".mlp." in name:
        layer, neuron = _neuron(w, name)
        return w.W_out[layer, neuron][None], 2 * layer + 1  # pyright: ignore[reportOptionalSubscript]
    at = head_of(name, w)
    return (w.W_V[at], w.W_O[at]), 2 * at[0]


def _reader(model: Any, w: Weights, name: str) -> tuple[Tensor, float]:
    """(columns; when it reads). Layer l's heads read at 2l − ½, its neurons at 2l + ½, or both at once in a model whose
    attention and feed-forward layer stand side by side."""
    if name == "unembed":
        return w.W_U, float("inf")
    if ".mlp." in name:
        layer, neuron = _neuron(w, name)
        beside = getattr(model.cfg, "parallel_attn_mlp", False)
        return w.W_in[layer, :, neuron][:, None], 2 * layer + (-0.5 if beside else 0.5)  # pyright: ignore[reportOptionalSubscript]
    head, _, part = name.rpartition(".")
    if part not in ("Q", "K", "V"):
        raise NoSuchPart(
            f"{name!r} reads nothing; expected a head's part such as 1.2.Q, a neuron such as 0.mlp.17, unembed"
        )
    at = head_of(head, w)
    return {"Q": w.W_Q, "K": w.W_K, "V": w.W_V}[part][at], 2 * at[0] - 0.5


def _neuron(w: Weights, name: str) -> tuple[int, int]:
    if w.W_in is None:
        raise NoSuchPart(f"no neuron {name}: this model is attention-only")
    try:
        layer, neuron = (int(part) for part in name.split(".mlp."))
    except ValueError:
        raise NoSuchPart(f"{name!r} is no neuron; a neuron is written layer.mlp.number, such as 0.mlp.17") from None
    if not (0 <= layer < len(w.W_in) and 0 <= neuron < w.W_in.shape[2]):
        raise NoSuchPart(f"no neuron {name}: this model has {len(w.W_in)} layers of {w.W_in.shape[2]} neurons")
    return layer, neuron
