"""Skip-trigrams, source … destination → out, and the bugs that a head's factored form makes: read from weights alone.

A one-layer attention-only model is its bigrams (the direct path) plus what each head moves (*A Mathematical Framework
for Transformer Circuits*). Two readings of it, both in a canonical context (`circuits.canonical`):

**What the model says**, `skip_trigrams`: p(out), with positions, direct path, all heads together and LayerNorm.

**What one head does**, `head_skip_trigrams`: attention × OV, two factors with nothing to correct their product.

    attention = softmax over the context of (x_d W_Q + b_Q)(x_s W_K + b_K)ᵀ / √d_head
    OV        = (x_s − x_filler) W_V W_O W_U, less its mean over the outs

What raises one factor raises all its products: a head that serves s … d → o and s … d′ → o′ raises s … d → o′ too, a
*head-level* bug. Whether the model then says o′, a *behavioural* bug, is another question: the direct path and other
heads mostly repair it, and even a single head can, by how *much* it attends. `factoring_bugs` tells the two apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits.canonical import FILLER, Context, Token, blocks_of
from circuits.errors import NoSuchPart, Undefined
from circuits.surface import Head, head_name, head_of

if TYPE_CHECKING:
    from pandas import DataFrame

PAIRS = 20_000  # (source, destination) pairs that are all run through the model
CHOSEN = 1_000  # of more pairs than that, about so many, which the heads choose
ROUNDING = 1e-6  # of a difference of two probabilities in single precision
COMPARABLE = 0.5  # of the right out's OV entry: this much raises another out comparably


@dataclass(frozen=True, repr=False)
class SkipTrigrams:
    """The best skip-trigrams of a model, by p(out) less its mean over the other sources asked about.

    A high rank says that this source tells the out apart from other sources, not that a head reads it: the out may be
    what the model says by default, and the *other* sources that are read. `attended` tells the two apart."""

    tokens: Int[Tensor, "row 3"]
    """Source, destination, out."""
    p: Float[Tensor, "row"]
    """p(out) in the canonical context."""
    p_without_source: Float[Tensor, "row"]
    """The same with the filler in the source's place."""
    p_other_sources: Float[Tensor, "row"]
    """Its mean over the other sources asked about in the source's place; with one source, p_without_source."""
    contributions: Float[Tensor, "row head"]
    """What each head adds to the out's logit, against that of the most probable other token without the source, when
    the source takes the filler's place. In a norm-free model they sum to all of that change; otherwise the final
    LayerNorm's scale is frozen as with the source."""
    attention: Float[Tensor, "row head"]
    """From the destination to the source."""
    uniform: float
    """Attention of a head that looks everywhere alike: 1 / tokens of the context."""
    names: Mapping[int, str] | None = None
    """Of the tokens in the rows."""

    def __len__(self) -> int:
        return len(self.p)

    @property
    def attended(self) -> Bool[Tensor, "row"]:
        """Whether some head attends to the source above uniform. If none does, the out is the model's default."""
        return (self.attention > self.uniform).any(1)

    def to_frame(self) -> "DataFrame":
        """One row each: tokens, names if there are any, the three p, whether the source is attended to, and, of the
        heads that do, the one that contributes most (none: no head, no contribution, the strongest attention)."""
        from pandas import DataFrame

        among = self.contributions.masked_fill(self.attention <= self.uniform, -torch.inf)
        head = torch.where(self.attended, among.argmax(1), self.attention.argmax(1))[:, None]
        contribution = self.contributions.gather(1, head)[:, 0].masked_fill(~self.attended, torch.nan)
        values = {"p": self.p, "p_without_source": self.p_without_source, "p_other_sources": self.p_other_sources}
        columns = _columns(("source", "destination", "out"), self.tokens, self.names)
        columns |= {name: value.tolist() for name, value in (values | {"attended": self.attended}).items()}
        columns["head"] = [head_name(0, int(i)) if yes else "" for i, yes in zip(head, self.attended, strict=True)]
        columns |= {"contribution": contribution.tolist(), "attention": self.attention.gather(1, head)[:, 0].tolist()}
        return DataFrame(columns | {"uniform_attention": self.uniform})

    def __repr__(self) -> str:
        return f"{self._heading}\n{_shown(self.to_frame())}"

    def _repr_html_(self) -> str:
        return f"<p>{self._heading}</p>{_html(self.to_frame())}"

    @property
    def _heading(self) -> str:
        defaults = f"{int((~self.attended).sum())} are defaults: no head attends to the source above uniform"
        return f"{len(self)} skip-trigrams by p(out) less its mean over the other sources asked about; {defaults}"


def skip_trigrams(
    model: Any,
    *,
    source: Token | Iterable[Token] | None = None,
    n: int = 20,
    length: int | None = None,
    names: Sequence[str] | None = None,
) -> SkipTrigrams:
    """The n best skip-trigrams of a one-layer attention-only model, from weights alone.

    They are ranked by p(out) less its mean over the other sources asked about: a plain bigram, destination → out
    whatever the source, gains nothing, and a pair that gains nothing gives no row. What the model says by default,
    unless it reads one of the other sources, gains too: see `attended`. Tokens that training never put there count too.

    `source`: one token, several (numbers or names), or all. With more than PAIRS pairs, about CHOSEN are tried: the
    destinations that attend most in each head (and, if all are asked for, the sources with the highest attention × OV).
    `length`: tokens of the canonical context. `names`: of every token; otherwise the model's own. Memory: blocks of
    BUDGET bytes, never all pairs × outs. The model itself is run, so any kind of positions will do. Raises: NoSuchPart
    for an unknown token or length, or no rows; Undefined with more layers, MLPs or LayerNorm after the addition, and
    with more than PAIRS pairs for rotary, ALiBi or shortformer positions.
    """
    _some(n)
    context = _one_layer(model, length)
    sources, destinations = _candidates(context, source)
    top = torch.zeros(0, 7)  # source, destination, out; p, p_without_source, p_other_sources, gain
    for block in blocks_of(len(destinations), (len(sources) + 1) * context.w.d_vocab * 4):
        some = destinations[block]
        told, untold = context.p([*sources, FILLER], some).split([len(sources), 1])
        others = (told.sum(0) - told) / (len(sources) - 1) if len(sources) > 1 else untold
        gain, at = (told - others).flatten().topk(min(n, told.numel()))
        s, d, o = at = torch.unravel_index(at, told.shape)
        values = [told[at], untold[0, d, o], others.expand_as(told)[at], gain]
        tokens = [torch.tensor(sources)[s.cpu()], torch.tensor(some)[d.cpu()], o]
        rows = torch.stack([column.cpu().double() for column in (*tokens, *values)], dim=1)
        top = torch.cat([top, rows[rows[:, -1] > ROUNDING]])
        top = top[top[:, -1].argsort(descending=True, stable=True)[:n]]
    tokens, p = top[:, :3].long(), top[:, 3:].float()
    contributions, attention = context.heads(tokens)
    return SkipTrigrams(
        tokens, p[:, 0], p[:, 1], p[:, 2], contributions, attention, 1 / context.length, context.named(tokens, names)
    )


@dataclass(frozen=True, repr=False)
class HeadSkipTrigrams:
    """One head's own skip-trigrams: attention × OV, the highest product first."""

    head: Head
    tokens: Int[Tensor, "row 3"]
    """Source, destination, out."""
    attention: Float[Tensor, "row"]
    """From the destination to the source in the canonical context."""
    ov: Float[Tensor, "row"]
    """Logits (before the final LayerNorm divides, if there is one) of the out, less their mean."""
    typical: float
    """The reference: the best product of the median source."""
    uniform: float
    """Attention of a head that looks everywhere alike."""
    names: Mapping[int, str] | None = None

    @property
    def product(self) -> Float[Tensor, "row"]:
        return self.attention * self.ov

    def to_frame(self) -> "DataFrame":
        """One row each: tokens, attention, ov, product, and how many times the median source's best it is
        (infinite where most sources move nothing)."""
        from pandas import DataFrame

        columns = _columns(("source", "destination", "out"), self.tokens, self.names)
        columns |= {"attention": self.attention.tolist(), "ov": self.ov.tolist(), "product": self.product.tolist()}
        columns["times_typical"] = (self.product / self.typical).tolist()
        return DataFrame(columns | {"uniform_attention": self.uniform, "head": head_name(*self.head)})

    def __repr__(self) -> str:
        return (
            f"head {head_name(*self.head)}: attention × OV; the median source's best product is {self.typical:.3g}\n"
            f"{_shown(self.to_frame())}"
        )

    def _repr_html_(self) -> str:
        return _html(self.to_frame())


def head_skip_trigrams(
    model: Any, head: str | Head, n: int = 20, *, length: int | None = None, names: Sequence[str] | None = None
) -> HeadSkipTrigrams:
    """The n triples of tokens with the highest attention × OV in one head of layer 0, exactly, at any vocabulary.

    The best product of each source is its highest attention times its highest OV entry, both streamed; the n best
    triples lie among the n best sources, and only those are looked at closely. A dead head gives no rows. Raises:
    NoSuchPart; Undefined for a head that reads other heads, or where positions enter attention itself
    (rotary, ALiBi, shortformer).
    """
    _some(n)
    context = Context(model, length)
    layer, index = head_of(head, context.w)
    if layer:
        raise Undefined(
            f"head {head_name(layer, index)} reads what layer 0 wrote, not only tokens; ask for a head of layer 0, or "
            "see composition_scores"
        )
    factors = context.factors(index)
    highest, raised = factors.best()
    best = highest * raised
    some = best.topk(min(n, len(best))).indices
    attention, d = factors.attention(some).topk(min(n, len(best)))
    ov, o = factors.ov(some).topk(min(n, factors.right.shape[1]))
    product, at = (attention[:, :, None] * ov[:, None]).flatten().topk(min(n, attention.numel()))
    i, j, k = torch.unravel_index(at[product > 0], (len(some), attention.shape[1], ov.shape[1]))
    tokens = torch.stack([some[i], d[i, j], o[i, k]], dim=1).cpu()
    return HeadSkipTrigrams(
        (0, index), tokens, attention[i, j].cpu(), ov[i, k].cpu(), best.median().item(), 1 / context.length,
        context.named(tokens, names),
    )  # fmt: skip


def source_table(
    model: Any, source: Token, n: int = 10, *, length: int | None = None, names: Sequence[str] | None = None
) -> "DataFrame":
    """Head by head: the destinations that attend to one source most (QK column), and the outs it raises most (OV row).

    Columns: head, kind ("destination" or "out"), rank (1 is the highest), of (how many were ranked, so that what is
    left out can be seen), token and its name, value (attention in the canonical context; logits less their mean),
    median (the reference: that of all ranked). Heads of layer 0. Raises: as `head_skip_trigrams`.
    """
    from pandas import DataFrame, concat

    _some(n)
    context = Context(model, length)
    at = torch.tensor([context.token(source)], device=context.w.W_E.device)
    frames = []
    for head in range(context.w.n_heads):
        factors = context.factors(head)
        for kind, values in (("destination", factors.attention(at)[0]), ("out", factors.ov(at)[0])):
            value, token = values.topk(min(n, len(values)))
            rows = token[:, None].cpu()
            columns = {"head": head_name(0, head), "kind": kind, "rank": range(1, len(rows) + 1), "of": len(values)}
            columns |= _columns(("token",), rows, context.named(rows, names))
            frames.append(DataFrame(columns | {"value": value.tolist(), "median": values.median().item()}))
    return concat(frames, ignore_index=True)


@dataclass(frozen=True, repr=False)
class FactoringBugs:
    """Every rule s … d → o with every other out o′ of a rule of the same source: the factored form raises both."""

    tokens: Int[Tensor, "bug 4"]
    """Source, destination, the right out, the wrong one."""
    p: Float[Tensor, "bug 2"]
    """Of the right and the wrong out in the canonical context."""
    p_control: Float[Tensor, "bug"]
    """The highest p of a token that is no out of this source: the reference for the wrong out's."""
    attention: Float[Tensor, "bug head"]
    """From the destination to the source."""
    ov: Float[Tensor, "bug head 2"]
    """What the OV circuit adds to the right and the wrong out for this source, in logits less their mean."""
    control: Float[Tensor, "bug"]
    """The share of tokens that are no out of this source, yet meet the same head-level criterion."""
    uniform: float
    """Attention of a head that looks everywhere alike."""
    names: Mapping[int, str] | None = None

    @property
    def by_head(self) -> Bool[Tensor, "bug head"]:
        """Attention above uniform, a right out raised by OV, and the wrong one at least COMPARABLE times as much."""
        right, wrong = self.ov.unbind(-1)
        return (self.attention > self.uniform) & (right > 0) & (wrong >= COMPARABLE * right)

    @property
    def head_level(self) -> Bool[Tensor, "bug"]:
        """Some head meets the criterion."""
        return self.by_head.any(1)

    @property
    def behavioural(self) -> Bool[Tensor, "bug"]:
        """The model gives the wrong out a higher p than the right one."""
        return self.p[:, 1] > self.p[:, 0]

    def to_frame(self) -> "DataFrame":
        """One row each, with the head that says the wrong out loudest (attention × OV), chosen among those that meet
        the criterion if any do."""
        from pandas import DataFrame

        passed_over = self.head_level[:, None] & ~self.by_head
        head = (self.attention * self.ov[..., 1]).masked_fill(passed_over, -torch.inf).argmax(1)
        at = torch.arange(len(head)), head
        columns = _columns(("source", "destination", "right", "wrong"), self.tokens, self.names)
        values = {
            "p_right": self.p[:, 0], "p_wrong": self.p[:, 1], "p_control": self.p_control,
            "attention": self.attention[at], "ov_right": self.ov[at][:, 0], "ov_wrong": self.ov[at][:, 1],
            "head_level": self.head_level, "control": self.control, "behavioural": self.behavioural,
        }  # fmt: skip
        columns["head"] = [head_name(0, i) for i in head.tolist()]
        return DataFrame(columns | {name: value.tolist() for name, value in values.items()})

    def __repr__(self) -> str:
        return f"{self._heading}\n{_shown(self.to_frame())}"

    def _repr_html_(self) -> str:
        return f"<p>{self._heading}</p>{_html(self.to_frame())}"

    @property
    def _heading(self) -> str:
        n, control = len(self.tokens), self.control.mean().item() if len(self.control) else 0.0
        return (
            f"{n} bugs that the factored form invites: {int(self.head_level.sum())} head-level ({control:.1%} of other "
            f"tokens meet the same criterion), {int(self.behavioural.sum())} behavioural"
        )


def factoring_bugs(
    model: Any,
    rules: Mapping[tuple[int, int], int],
    *,
    length: int | None = None,
    names: Sequence[str] | None = None,
) -> FactoringBugs:
    """For every two rules with one source, whether the out of one is raised where the other's is right.

    `rules`: (source, destination) → out, as tokens. *Head-level*: some head attends from the destination to
    the source more than 1 / length, its OV circuit raises the right out for this source above the mean out, and raises
    the wrong one at least half as much. *Behavioural*: in the canonical context the model gives the wrong out the
    higher p. Raises: as `skip_trigrams`.
    """
    context = _one_layer(model, length)
    by_source: dict[int, dict[int, int]] = {}
    for (s, d), out in rules.items():
        by_source.setdefault(context.token(s), {})[context.token(d)] = context.token(out)
    heads, found = range(context.w.n_heads), []
    for s, told in by_source.items():
        p = context.p([s], list(told))[0].cpu()
        attention = context.heads(torch.tensor([[s, d, out] for d, out in told.items()]))[1]
        ov = torch.stack([context.ov(head, torch.tensor([s]))[0] for head in heads]).cpu()
        others = torch.ones(p.shape[1], dtype=torch.bool)
        others[list(told.values())] = False
        for i, (d, right) in enumerate(told.items()):
            comparable = (ov[:, [right]] > 0) & (ov >= COMPARABLE * ov[:, [right]])
            alike = ((attention[i, :, None] > 1 / context.length) & comparable).any(0)[others]
            control = alike.float().mean() if len(alike) else torch.tensor(0.0)
            reference = p[i].masked_fill(~others, 0).max()
            for wrong in sorted({*told.values()} - {right}):
                tokens = torch.tensor([s, d, right, wrong])
                found.append((tokens, p[i, [right, wrong]], reference, attention[i], ov[:, [right, wrong]], control))
    sizes = (2,), (), (len(heads),), (len(heads), 2), ()
    empty = (torch.zeros(0, 4, dtype=torch.int64), *(torch.zeros(0, *size) for size in sizes))
    tokens, *values = (torch.stack(part) for part in zip(*found, strict=True)) if found else empty
    return FactoringBugs(tokens, *values, uniform=1 / context.length, names=context.named(tokens, names))


def _one_layer(model: Any, length: int | None) -> Context:
    context = Context(model, length)
    if context.w.n_layers > 1 or context.w.W_in is not None:
        raise Undefined(
            f"skip-trigrams are defined by weights in one layer of attention alone; with {context.w.n_layers} layers"
            f"{'' if context.w.W_in is None else ' and MLPs'}, see head_skip_trigrams for layer 0, path_effects on data"
        )
    return context


def _candidates(context: Context, source: Token | Iterable[Token] | None) -> tuple[list[int], list[int]]:
    """All sources and destinations that are asked for, or those that the heads choose."""
    vocabulary, heads = context.w.d_vocab, context.w.n_heads
    sources = list(range(vocabulary)) if source is None else context.known(source)
    if not sources:
        raise NoSuchPart("no source tokens; give one, several, or None for all")
    if len(sources) * vocabulary <= PAIRS:
        return sources, list(range(vocabulary))
    if source is None:
        each = max(1, isqrt(CHOSEN) // heads)
        best = [torch.mul(*context.factors(head).best()) for head in range(heads)]
        sources = sorted({s for one in best for s in one.topk(min(each, vocabulary)).indices.tolist()})
    each = min(vocabulary, max(1, CHOSEN // len(sources) // heads))
    at = torch.tensor(sources, device=context.w.W_E.device)
    most = [context.factors(head).most(at).topk(each).indices for head in range(heads)]
    return sources, sorted({d for one in most for d in one.tolist()})


def _columns(
    parts: tuple[str, ...], tokens: Int[Tensor, "row part"], names: Mapping[int, str] | None
) -> dict[str, list[Any]]:
    """A column of tokens for each part, then one of names."""
    columns: dict[str, list[Any]] = {part: tokens[:, i].tolist() for i, part in enumerate(parts)}
    if names is not None:
        columns |= {f"{part}_name": [names[token] for token in columns[part]] for part in parts}
    return columns


def _some(n: int) -> None:
    if n < 1:
        raise NoSuchPart(f"n is {n}; expected how many rows to show, at least 1")


def _shown(frame: "DataFrame") -> str:
    return frame.head(20).to_string(index=False, float_format="{:.3f}".format, na_rep="")


def _html(frame: "DataFrame") -> str:
    return frame.to_html(index=False, float_format="{:.3f}".format, na_rep="")
