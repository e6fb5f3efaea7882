"""The smallest set of edges that does the task alone, searched for exhaustively, and tried on examples not seen.

Over a stated universe of edges: which set, if the contribution of every *other* edge of the universe is replaced by its
mean (or another prompt's), still gets the answers right? All sets of up to three edges are tried, so what is found is
the smallest, and all ties are listed. If none suffices, edges are taken away one by one, always that whose loss hurts
least, until every further one costs too much: that set is *minimal*, not smallest. Either is chosen on one set of
examples and judged on another, for every kind of cut: kept alone, and cut alone. Kinds differ (`circuits.edges`), and a
set that suffices need not be needed: another route may do the same. Kept alone by knock-out is the harshest: words
that never vary go too, heads without a source read nothing, and models rest on both.
"""

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuits.attention import exclusive
from circuits.cuts import cut
from circuits.edges import WHAT, Edge, Reference, reference
from circuits.effects import edges_between
from circuits.errors import NoSuchPart
from circuits.examples import Examples
from circuits.rows import Rows, Slow, keeper

if TYPE_CHECKING:
    from pandas import DataFrame

EXHAUSTIVE = 3  # edges
CHUNK = 32  # examples at a time: most sets have failed too often after the first


@dataclass(frozen=True, repr=False)
class SmallestCircuit:
    """A set of edges that alone keeps the accuracy, and what it is worth on held-out examples."""

    edges: tuple[Edge, ...]
    ties: tuple[tuple[Edge, ...], ...]
    """All sets of the same size that suffice on the examples chosen on, `edges` first."""
    smallest: bool
    """True where all smaller sets were tried; False where edges were taken away or added one by one: minimal only."""
    universe: tuple[Edge, ...]
    keep: float
    leave: float
    replacement: str
    chosen_on: tuple[float, float]
    """Accuracy on the examples chosen on, 0 to 1: only these edges kept, only these cut."""
    kept: dict[str, float]
    """Kind of cut → held-out accuracy when all other edges of the universe are cut."""
    cut: dict[str, float]
    """Kind of cut → held-out accuracy when these edges are cut and no others."""
    clean: float
    """Held-out accuracy without any cut."""
    failed: str
    """Why it is no circuit, or empty."""

    @property
    def name(self) -> str:
        return "smallest" if self.smallest else "minimal"

    def to_frame(self) -> "DataFrame":
        """One row for each kind of cut: held-out accuracy kept alone and cut alone."""
        from pandas import DataFrame

        return DataFrame(
            {"what": list(self.kept), "kept_alone": [*self.kept.values()], "cut_alone": [*self.cut.values()]}
        )

    def __repr__(self) -> str:
        return f"{self._heading}\n{self.to_frame().to_string(index=False, float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        return (
            f"<p>{html.escape(self._heading)}</p>{self.to_frame().to_html(index=False, float_format='{:.3f}'.format)}"
        )

    @property
    def _heading(self) -> str:
        if not self.kept:
            return f"No circuit: {self.failed}"
        ties = f", one of {len(self.ties)} of that size" if len(self.ties) > 1 else ""
        found = (
            f"{', '.join(map(repr, self.edges)) or 'no edge at all'} ({self.name} of {len(self.universe)} edges{ties})"
        )
        return found + (f". FAILED: {self.failed}" if self.failed else "")


def smallest_circuit(
    model: Any,
    train_examples: Examples,
    held_out_examples: Examples,
    *,
    universe: Sequence[Edge] | None = None,
    keep: float = 0.95,
    leave: float = 1.0,
    replacement: str = "mean",
) -> SmallestCircuit:
    """The smallest set of edges whose contributions alone keep this accuracy (0 to 1), all others replaced.

    `leave`: and when they alone are replaced, at most this accuracy may be left; 1 asks for no such thing. A set may
    suffice although another route does the same work: then the edges that take that route away are added one by one.
    `universe`: the edges to choose from, by default all heads of every layer together, from every place
    to the answer; whatever is not in it stays as it is. `replacement`:
    "mean" over the training examples, "resample" from another one of the same examples, or "zero". Of sets of one size
    that suffice, that with the largest difference between kept alone and cut alone is named. Raises: what `cut` raises.
    """
    edges = edges_between(train_examples, range(model.cfg.n_layers)) if universe is None else tuple(universe)
    if not edges:
        raise NoSuchPart("the universe holds no edge; give at least one")
    taken_from = reference(model, train_examples.shuffled() if replacement == "resample" else train_examples)
    search = _Search(keeper(model, train_examples, edges, replacement, taken_from), train_examples, keep, leave)
    whole = torch.ones(1, len(edges), dtype=torch.bool)
    accuracy = float(search.accuracy(whole)[0])
    if accuracy < keep:
        failed = f"even with all {len(edges)} edges the accuracy is {accuracy:.1%}, below {keep:.0%}"
        return SmallestCircuit(
            (), (), True, edges, keep, leave, replacement, (accuracy, accuracy), {}, {}, accuracy, failed
        )
    found, smallest = search.find(len(edges))
    kept, without = search.accuracy(found), search.accuracy(~found)
    order = (kept - without).argsort(descending=True, stable=True)
    ties = tuple(tuple(edge for edge, keeps in zip(edges, row, strict=True) if keeps) for row in found[order].tolist())
    if replacement == "resample":
        taken_from = reference(model, held_out_examples.shuffled())
    others = tuple(edge for edge in edges if edge not in ties[0])
    alone, removed = (
        {what: accuracy_without(model, held_out_examples, gone, what, replacement, taken_from) for what in WHAT}
        for gone in (others, ties[0])
    )
    clean = accuracy_without(model, held_out_examples, (), "contribution", replacement, taken_from)
    chosen_on = float(kept[order[0]]), float(without[order[0]])
    failed = _failure(chosen_on, alone["contribution"], removed["contribution"], keep, leave)
    return SmallestCircuit(
        ties[0], ties, smallest, edges, keep, leave, replacement, chosen_on, alone, removed, clean, failed
    )


def _failure(chosen_on: tuple[float, float], kept: float, without: float, keep: float, leave: float) -> str:
    """What the held-out examples say against the circuit; empty if nothing."""
    faults = []
    if kept < keep:
        faults.append(f"it keeps {chosen_on[0]:.1%} on the examples it was chosen on, but only {kept:.1%} held out")
    if without > leave:
        faults.append(f"with it alone cut, {without:.1%} are still right held out: another route does the same")
    return "; ".join(faults)


@torch.no_grad()
def accuracy_without(
    model: Any, examples: Examples, gone: Sequence[Edge], what: str, replacement: str, taken_from: Reference
) -> float:
    """Accuracy with these edges cut, 0 to 1."""
    with (
        exclusive(model),
        cut(model, gone, replacement if gone else "mean", what=what, reference=taken_from, roles=examples.roles),
    ):
        return examples.judge(model(examples.tokens))[0].double().mean().item()


class _Search:
    def __init__(self, keeper: Rows | Slow, examples: Examples, keep: float, leave: float):
        self.keeper, self.examples, self.leave = keeper, examples, leave
        n = len(examples)
        self.most_errors = n - math.ceil(keep * n - 1e-9)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
        self.chunks = order.split(CHUNK)

    def find(self, n_edges: int) -> tuple[Bool[Tensor, "set edge"], bool]:
        """The sets found, and whether all smaller ones were tried."""
        first: Tensor | None = None
        for size in range(min(EXHAUSTIVE, n_edges) + 1):
            sets = torch.tensor(list(itertools.combinations(range(n_edges), size)), dtype=torch.long)
            kept = torch.zeros(len(sets), n_edges, dtype=torch.bool).scatter_(1, sets.reshape(len(sets), size), True)
            found = kept[self.sufficient(kept)[0]]
            first = found if first is None or not len(first) else first
            found = found[self.needed(found)]
            if len(found):
                return found, True
        if first is None or not len(first):
            first = self.pruned(torch.ones(1, n_edges, dtype=torch.bool), needed=False)
        grown = self.grown(first)
        return self.pruned(grown) if bool(self.needed(grown)) else grown, False

    def needed(self, kept: Bool[Tensor, "set edge"]) -> Bool[Tensor, "set"]:
        """Whether at most `leave` remain when only these are cut."""
        if self.leave >= 1 or not len(kept):
            return torch.ones(len(kept), dtype=torch.bool)
        return self.accuracy(~kept) <= self.leave + 1e-6

    def pruned(self, kept: Bool[Tensor, "1 edge"], needed: bool = True) -> Bool[Tensor, "1 edge"]:
        """Without one edge after the other, always that which hurts least, while the rest suffices (and is needed)."""
        while kept.any():
            fewer = kept.repeat(int(kept.sum()), 1)
            fewer[torch.arange(len(fewer)), kept[0].nonzero()[:, 0]] = False
            found, accuracies = self.sufficient(fewer)
            fewer = fewer[found]
            if needed:
                accuracies = accuracies.masked_fill(~self.needed(fewer), -1)
            if not len(fewer) or accuracies.max() < 0:
                break
            kept = fewer[accuracies.argmax()][None]
        return kept

    def grown(self, kept: Bool[Tensor, "set edge"]) -> Bool[Tensor, "1 edge"]:
        """Of these sets, that which leaves least when cut; with further edges while more than `leave` remain, always
        that which takes most away, as long as one does."""
        left = self.accuracy(~kept)
        kept, left = kept[left.argmin()][None], left.min()
        while left > self.leave + 1e-6:
            more = kept.repeat(int((~kept).sum()), 1)
            more[torch.arange(len(more)), (~kept[0]).nonzero()[:, 0]] = True
            more = more[self.sufficient(more)[0]]
            remaining = self.accuracy(~more) if len(more) else left[None]
            if not remaining.min() < left:
                break
            kept, left = more[remaining.argmin()][None], remaining.min()
        return kept

    def sufficient(self, kept: Bool[Tensor, "set edge"]) -> tuple[Tensor, Float[Tensor, "some"]]:
        """Which sets reach the accuracy, and theirs. A set leaves as soon as it has erred too often: that is exact."""
        alive, errors = torch.arange(len(kept)), torch.zeros(len(kept))
        for chunk in self.chunks:
            if not len(alive):
                break
            errors[alive] += self._errors(kept[alive], chunk)
            alive = alive[errors[alive] <= self.most_errors]
        return alive, 1 - errors[alive] / len(self.examples)

    def accuracy(self, kept: Bool[Tensor, "set edge"]) -> Float[Tensor, "set"]:
        errors = torch.stack([self._errors(kept, chunk) for chunk in self.chunks]).sum(0)
        return 1 - errors / len(self.examples)

    def _errors(self, kept: Bool[Tensor, "set edge"], chunk: Tensor) -> Float[Tensor, "set"]:
        said = self.keeper.logits(kept, chunk).argmax(-1)
        return (said != self.examples.answers[chunk]).sum(1).float()
