"""One prediction as an exact sum over paths.

The logits at one position are a sum: embedding, position, a feed-forward layer's output or the biases, straight to the
logits, through one head, through two in turn (a virtual head), … (`circuits.frozen` says how; attention scores are
taken apart in `circuits.score_terms`).

The sum is exact for this run, with its patterns and LayerNorm scales held fixed. It does not say what would happen
without a part: a term is not an effect, since patterns and scales would change, and what a head does by way of a later
head's query or key is in no term at all. For that, cut (`circuits.cuts`). Terms are no statistics and need no null.
"""

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.errors import NoSuchPart
from circuits.frozen import FROZEN, Frozen, freeze, one_prompt, position_of
from circuits.score_terms import ScoreTerms as ScoreTerms
from circuits.score_terms import decompose_attention_scores as decompose_attention_scores
from circuits.surface import Head, head_name

if TYPE_CHECKING:
    from pandas import DataFrame

REMAINDER = "remainder"


@dataclass(frozen=True)
class Term:
    """One path to the logits. Printed as embed → 0.2 → 1.1."""

    source: str
    """ "embed", "pos", "0.mlp", "bias"; "remainder" for all paths that are longer than asked for."""
    heads: tuple[tuple[int, int | None], ...] = ()
    """(layer, head) in the order of the path; head is None where the heads of a layer are taken together."""

    @property
    def name(self) -> str:
        heads = [f"{layer}.all" if head is None else head_name(layer, head) for layer, head in self.heads]
        return " → ".join([self.source, *heads])

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class LogitTerms:
    """The logits at one position as a sum of paths. `terms["embed → 0.2 → 1.1"]` is one of them, [d_vocab]."""

    terms: tuple[Term, ...]
    written: Float[Tensor, "term d_model"]
    """What each path puts before W_U, final LayerNorm included."""
    position: int
    max_order: int
    """Heads that a path may have before it goes into the remainder."""
    frozen: Frozen

    @property
    def values(self) -> Float[Tensor, "term d_vocab"]:
        """What each path adds to every logit. b_U belongs to "bias"."""
        return self._logits(slice(None))

    @property
    def total(self) -> Float[Tensor, "d_vocab"]:
        """The sum of all terms: the model's logits at this position."""
        return self.written.sum(0) @ self.frozen.weights.W_U + self.frozen.weights.b_U

    def __getitem__(self, term: str | Term) -> Float[Tensor, "d_vocab"]:
        """What one path adds to every logit. Raises: NoSuchPart."""
        index = self._index(term)
        value = self.written[index] @ self.frozen.weights.W_U
        return value + self.frozen.weights.b_U if self.terms[index] == Term("bias") else value

    def toward(self, answer: int, foil: int) -> Float[Tensor, "term"]:
        """What each path adds to the logit of `answer` minus that of `foil`. Raises: NoSuchPart."""
        first, second = self._logits([answer, foil]).T
        return first - second

    def by_source(self, terms: Sequence[str | Term]) -> Float[Tensor, "term source d_vocab"]:
        """These terms, each split by the position at which its source stands. The final LayerNorm's bias and b_U stand
        at the position whose logits they are. Raises: NoSuchPart, for the remainder too."""
        f, split = self.frozen, []
        for term in (self.terms[self._index(name)] for name in terms):
            if term.source == REMAINDER:
                raise NoSuchPart("the remainder holds many paths and cannot be split by source; raise max_order")
            source = f.sources(term.heads[0][0] if term.heads else f.n_layers)[term.source]
            every = [range(f.weights.n_heads) if head is None else [head] for _, head in term.heads]
            rows = torch.zeros_like(source)
            for chosen in product(*every):
                heads = tuple((layer, head) for (layer, _), head in zip(term.heads, chosen, strict=True))
                rows += f.through(heads, f.row(heads, self.position)[:, None] * source)
            if term == Term("bias"):
                rows[self.position] += f.norms[-1].bias
            logits = rows @ f.weights.W_U
            if term == Term("bias"):
                logits[self.position] += f.weights.b_U
            split.append(logits)
        return torch.stack(split) if split else f.embed.new_zeros(0, f.embed.shape[1], f.weights.W_U.shape[1])

    def to_frame(
        self, tokens: Sequence[int] = (), *, answer: int | None = None, foil: int | None = None
    ) -> "DataFrame":
        """One row for each term: its name, source, heads, order (number of heads; none for the remainder), what it adds
        to the logits of `tokens` ("logit 5"), and to answer − foil. These are the model's first and second choice
        unless given. Raises: NoSuchPart."""
        from pandas import DataFrame, array

        answer, foil = self._pair(answer, foil)
        logits = self._logits(list(tokens))
        orders = [None if term.source == REMAINDER else len(term.heads) for term in self.terms]
        return DataFrame({
            "term": [term.name for term in self.terms],
            "source": [term.source for term in self.terms],
            "heads": [Term("", term.heads).name.removeprefix(" → ") for term in self.terms],
            "order": array(orders, dtype="Int64"),
            **{f"logit {token}": logits[:, i].tolist() for i, token in enumerate(tokens)},
            "answer − foil": self.toward(answer, foil).tolist(),
        })  # fmt: skip

    def __repr__(self) -> str:
        return f"{self._heading()}\n{self._largest().to_string(index=False, float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        shown = self._largest().to_html(index=False, float_format="{:.3f}".format)
        return f"<p>{html.escape(self._heading())}</p>{shown}"

    def _largest(self) -> "DataFrame":
        frame = self.to_frame().drop(columns=["source", "heads"])
        return frame.sort_values("answer − foil", key=abs, ascending=False, kind="stable").head(10)

    def _heading(self) -> str:
        answer, foil = self._pair(None, None)
        return (
            f"{len(self.terms)} paths to the logits at position {self.position}, the largest for token {answer} minus "
            f"{foil}, the model's first and second choice (logits): {FROZEN}"
        )

    def _logits(self, tokens: list[int] | slice) -> Float[Tensor, "term chosen"]:
        w = self.frozen.weights
        for token in tokens if isinstance(tokens, list) else ():
            if not 0 <= token < w.d_vocab:
                raise NoSuchPart(f"no token {token}: the vocabulary has {w.d_vocab}, from 0")
        values = self.written @ w.W_U[:, tokens]
        values[self._index("bias")] += w.b_U[tokens]
        return values

    def _pair(self, answer: int | None, foil: int | None) -> tuple[int, int]:
        best = self.total.topk(min(2, len(self.frozen.weights.b_U))).indices.tolist()
        answer = best[0] if answer is None else answer
        others = [token for token in best if token != answer] or best
        return answer, others[0] if foil is None else foil

    def _index(self, term: str | Term) -> int:
        names = {each.name: i for i, each in enumerate(self.terms)}
        if str(term) not in names:
            raise NoSuchPart(
                f"no term {term}; expected one such as {self.terms[-1]}, of at most {self.max_order} heads"
            )
        return names[str(term)]


def decompose_logits(
    model: Any,
    tokens: Tensor,
    position: int = -1,
    *,
    max_order: int = 2,
    heads: bool = True,
) -> LogitTerms:
    """Every path from the embedding to the logits at one position of one prompt, as a term.

    `tokens`: whole numbers [1, position]. `position` counts from 0, or from the end if negative. Paths of up to
    `max_order` heads are terms; all longer ones are the one term "remainder", computed by feeding only them forward.
    `heads=False` takes the heads of a layer together ("embed → 0.all → 1.all"). A feed-forward layer is a source: its
    output of this run, not expanded through what it read. Biases that pass through heads are "bias → 1.1". A term that
    is zero by construction is left out.
    With n heads a layer, two layers and order 2 that is about n² terms for each source.

    Raises: Undefined where the logits are no sum of paths (LayerNorm after the addition, sub-layers that replace the
    token, active dropout, or if the paths do not add up); NoSuchPart for the position; ValueError for `max_order` < 0.
    """
    if max_order < 0:
        raise ValueError(f"max_order is {max_order}; expected 0 or more heads")
    f = freeze(model, one_prompt(tokens))
    at = position_of(position, tokens.shape[1])
    kept = {layer: f.sources(layer) for layer in range(f.n_layers + 1)}
    found: dict[Term, Tensor] = {}
    for path in _paths(f, max_order):
        sources = kept[path[0][0] if path else f.n_layers]
        gathered = torch.einsum("p, spm -> sm", f.row(path, at), torch.stack(list(sources.values())))
        for source, moved in zip(sources, f.through(path, gathered), strict=True):
            term = Term(source, path if heads else tuple((layer, None) for layer, _ in path))
            found[term] = found[term] + moved if term in found else moved
    found[Term("bias")] = found[Term("bias")] + f.norms[-1].bias
    if max_order < f.n_layers:
        longer = f.streams(max_order, frozen_mlps=True)[-1][-1]
        found[Term(REMAINDER)] = f.norms[-1].linear(longer)[0, at]
    result = LogitTerms(tuple(found), torch.stack(list(found.values())), at, max_order, f)
    f.agree(result.total[None, None], slice(at, at + 1))
    return result


def chain_contributions(
    model: Any,
    tokens: Tensor,
    position: int,
    direction: Tensor,
    layers: tuple[int, int] = (0, 1),
) -> Float[Tensor, "first second source middle"]:
    """Two hops: what goes from a source through a head of one layer to a middle position, and from there through a
    head of a later layer to the logits at `position`: [head of the first layer, head of the second, source, middle].

    The first head reads the whole stream at the source; with layers[0] = 0 that is embedding and position, so that the
    sum over source and middle is the sum of `decompose_logits`' terms through these two heads. Biases that heads add
    are in neither. `direction` weighs the logits, [d_vocab], such as 1 at the answer and −1 at the foil; or, if it has
    d_model and not d_vocab entries, it is a column of W_U. Exact with patterns and scales frozen.
    Raises: Undefined as `decompose_logits`; NoSuchPart for position or layers; ValueError for the direction.
    """
    f = freeze(model, one_prompt(tokens))
    f.agree(f.unembed(f.streams(0, frozen_mlps=True)[-1].sum(0)))
    at, (first, second), w = position_of(position, tokens.shape[1]), layers, f.weights
    if not 0 <= first < second < f.n_layers:
        raise NoSuchPart(
            f"no chain from layer {first} to layer {second}: there are {f.n_layers}, the first comes first"
        )
    d_model, d_vocab = w.W_U.shape
    if len(direction) not in (d_vocab, d_model):
        raise ValueError(f"direction has {len(direction)} entries; expected {d_vocab} (logits) or {d_model} (d_model)")
    column = w.W_U @ direction.to(w.W_U) if len(direction) == d_vocab else direction.to(w.W_U)
    stream = f.streams(0, frozen_mlps=True)[first].sum(0)
    value = f.norms[first].linear(stream)[0] @ w.W_V[first] @ w.W_O[first]  # [head, source, d_model]
    # What a unit of each direction in the stream at the middle is worth, before the division by LayerNorm's scale
    unit = torch.eye(d_model).to(w.W_U)
    worth = torch.stack([f.through(((second, head),), unit) @ column for head in range(w.n_heads)])
    size = torch.einsum("hsm, km -> hks", value, worth)
    last = f.patterns[second][0, :, at] / f.norms[second].scale[0, :, 0] / f.norms[-1].scale[0, at, 0]
    return torch.einsum("hks, hms, km -> hksm", size, f.patterns[first][0], last)


def _paths(f: Frozen, max_order: int) -> Iterator[tuple[Head, ...]]:
    for order in range(min(max_order, f.n_layers) + 1):
        for layers in combinations(range(f.n_layers), order):
            for heads in product(range(f.weights.n_heads), repeat=order):
                yield tuple(zip(layers, heads, strict=True))
