"""How much of the prediction is direct, how much one head's, how much two heads' in turn: term importance.

The algorithm of *A Mathematical Framework for Transformer Circuits* (2021): run once and keep the attention patterns
and every LayerNorm's scale, the final one's included; then, with those held fixed, feed forward only what has come
through at most n heads, and take the loss. Order 0 is the direct path and all biases, order 1 adds what single heads
move, order 2 the virtual heads of two, … With as many orders as layers it is the model.

**What it does not show: Q- and K-composition hide in the frozen patterns.** A head that only decides where a later
head looks is in no term, and yet the later head's term owes everything to it: in an induction model virtual heads
"add" next to nothing, and it does not work without its previous-token head. For that, cut (`circuits.cuts`).

**Feed-forward layers** are nodes of the order they are reached at: one is computed anew, scale frozen, from what has
come through at most n heads, and what it writes more for n than for n − 1 is of order n. So nothing that attention
moved is in order 0. (In `circuits.decompose` a feed-forward layer is a source, with all that it wrote.)

Orders are fed forward side by side: a layer turns the stream of order n into that of order n + 1, and no path is ever
written out.
"""

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from scipy.special import stdtrit
from torch import Tensor

from circuits.errors import Undefined
from circuits.frozen import FROZEN, freeze
from circuits.sequences import predicted
from circuits.surface import Head, head_name

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class TermImportance:
    """Losses in nats, each for every sequence, so that every difference is paired by sequence."""

    orders: Float[Tensor, "order sequence"]
    """The loss with all terms up to order 0, 1, …, the number of layers."""
    model: Float[Tensor, "sequence"]
    """The loss of the model itself."""
    heads: tuple[Head, ...]
    head_added: Float[Tensor, "head sequence"]
    """Change of the loss when one head's order-1 term alone is added to order 0. Negative: it helps."""
    head_removed: Float[Tensor, "head sequence"]
    """Change of the loss when it is taken from the sum of everything. Positive: it helps."""
    pairs: tuple[tuple[Head, Head], ...]
    """The virtual heads: first head, then the one that moves on what it moved."""
    pair_added: Float[Tensor, "pair sequence"]
    """The same for their order-2 term, added to all terms up to order 1."""
    pair_removed: Float[Tensor, "pair sequence"]
    d_vocab: int

    @property
    def uniform(self) -> float:
        """ln d_vocab, the loss of knowing nothing."""
        return math.log(self.d_vocab)

    def to_frame(self) -> "DataFrame":
        """One row for each number: kind ("order", "head", "pair", "model", "uniform"), part ("0", "0.2",
        "0.2 → 1.1"), measure ("loss", "change" from the order before, "added", "removed"), nats, standard_error
        over the sequences, and the 95 % interval of Student's t, low and high. With many heads and pairs, one interval
        in twenty misses by chance. Sequences count as independent: where several share their content (sentences of
        one noun pair), the errors are too small."""
        from pandas import DataFrame

        half = float(stdtrit(len(self.model) - 1, 0.975))
        rows = []
        for kind, part, measure, losses in self._numbers():
            mean, error = losses.mean().item(), losses.std().item() / math.sqrt(len(losses))
            rows.append((kind, part, measure, mean, error, mean - half * error, mean + half * error))
        rows.append(("uniform", "uniform", "loss", self.uniform, 0.0, self.uniform, self.uniform))
        return DataFrame(rows, columns=["kind", "part", "measure", "nats", "standard_error", "low", "high"])

    def __repr__(self) -> str:
        return f"{self._heading}\n{self._shown.to_string(index=False, float_format='{:.4f}'.format)}"

    def _repr_html_(self) -> str:
        shown = self._shown.to_html(index=False, float_format="{:.4f}".format)
        return f"<p>{html.escape(self._heading)}</p>{shown}"

    @property
    def _shown(self) -> "DataFrame":
        """All orders, and the ten largest changes by a head or pair alone."""
        frame = self.to_frame()
        nats = frame["nats"].tolist()
        alone = [i for i, measure in enumerate(frame["measure"]) if measure in ("added", "removed")]
        largest = sorted(alone, key=lambda i: -abs(nats[i]))[:10]
        return frame.iloc[[i for i in range(len(frame)) if i not in set(alone)] + largest]

    @property
    def _heading(self) -> str:
        return (
            f"Loss (nats) with only the paths through at most n heads, {len(self.model)} sequences: {FROZEN}. A term "
            "that adds little may still decide where a later head looks"
        )

    def _numbers(self) -> Iterator[tuple[str, str, str, Tensor]]:
        for order, losses in enumerate(self.orders):
            yield "order", str(order), "loss", losses
        for order, losses in enumerate(self.orders.diff(dim=0), 1):
            yield "order", str(order), "change", losses
        yield "model", "model", "loss", self.model
        names = [head_name(*head) for head in self.heads]
        pairs = [f"{head_name(*first)} → {head_name(*second)}" for first, second in self.pairs]
        for kind, parts, added, removed in (
            ("head", names, self.head_added, self.head_removed), ("pair", pairs, self.pair_added, self.pair_removed),
        ):  # fmt: skip
            for measure, changes in (("added", added), ("removed", removed)):
                for part, losses in zip(parts, changes, strict=True):
                    yield kind, part, measure, losses


def term_importance(
    model: Any,
    tokens: Tensor,
    positions: slice | Sequence[int] | None = None,
    *,
    pairs: bool = True,
) -> TermImportance:
    """The loss after each order, and what each head and each virtual head of two is worth on its own.

    `tokens`: whole numbers [sequence, position]. `positions`: those whose *next* token is predicted, counted from 0,
    such as slice(24, None); all of them if not given. The loss of a sequence is the mean over them. A head's or pair's
    own term is what it moves of the stream of order 0, straight to the logits: what later feed-forward layers make of
    it is in the orders alone. `pairs=False` leaves out the virtual heads, of which a large model has many.

    Q- and K-composition hide in the frozen patterns and are in none of these numbers.

    Raises: Undefined where the paths do not add up to the model (LayerNorm after the addition, sub-layers that replace
    the token, active dropout), or attention and feed-forward layer stand side by side; ValueError for fewer than two
    sequences or tokens, or no positions.
    """
    chosen = predicted(tokens, positions)
    target = tokens[:, chosen + 1]
    f = freeze(model, tokens)
    if f.mlps and not f.mlp_norms:
        raise Undefined("term importance is undefined where attention and feed-forward layer stand side by side")
    streams = f.streams(f.n_layers, frozen_mlps=False)
    end = streams[-1].cumsum(0)[:-1]  # its last row, more heads than layers, is empty
    f.agree(f.unembed(end[-1], chosen), chosen)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(1)

    orders = torch.stack([loss(f.unembed(stream, chosen)) for stream in end])

    def changes(terms: Tensor, order: int) -> tuple[list[Tensor], list[Tensor]]:
        """Each term of this order added to the orders below, and taken from everything."""
        below, whole = end[order - 1], end[-1]
        added = [loss(f.unembed(below + term, chosen)) - orders[order - 1] for term in terms]
        return added, [loss(f.unembed(whole - term, chosen)) - orders[-1] for term in terms]

    singles, doubles, found = ([], []), ([], []), []
    for layer in range(f.n_layers):
        moved = f.heads(streams[layer][0], layer)
        for kept, new in zip(singles, changes(moved, 1), strict=True):
            kept += new
        for head, once in enumerate(moved if pairs else ()):
            for later in range(layer + 1, f.n_layers):
                for kept, new in zip(doubles, changes(f.heads(once, later), 2), strict=True):
                    kept += new
                found += [((layer, head), (later, h)) for h in range(f.weights.n_heads)]
    heads = tuple((layer, head) for layer in range(f.n_layers) for head in range(f.weights.n_heads))

    def stacked(losses: list[Tensor]) -> Tensor:
        return torch.stack(losses) if losses else orders.new_zeros(0, len(tokens))

    return TermImportance(
        orders, loss(f.logits[:, chosen]), heads, stacked(singles[0]), stacked(singles[1]), tuple(found),
        stacked(doubles[0]), stacked(doubles[1]), f.weights.d_vocab,
    )  # fmt: skip
