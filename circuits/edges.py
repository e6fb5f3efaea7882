"""Edges: what one head, or all heads of a layer, move from a source to a destination, and the ways to cut that.

At destination t a head adds Σ_s A[t,s] v_s W_O to the residual stream. An edge is one term of that sum. Kinds of cut
differ in what they leave, and so in what they can see:

    contribution   A[t,s] v_s  →  r,          r = 0 | mean over the reference of A[t,s] v_s | that of another prompt
    value          A[t,s] v_s  →  A[t,s] r,   r = 0 | mean of v_s | v_s of another prompt; only as t sees it
    pattern        A[t,s] v_s  →  r v_s,      r = 0 | mean of A[t,s] | A[t,s] of another prompt; not renormalised
    knock-out      score[t,s]  →  −∞,         the rest of the row is renormalised; there is nothing to put in its place

With "zero" the first three are the same. With means they are not: a value that never varies but is attended to now
more, now less, has a contribution and a pattern to cut and no value; a value that varies under fixed attention has a
contribution and a value and no pattern. Only knock-out changes what the *other* sources of the row contribute, and so
only it sees what passes through the softmax's denominator: a source whose own term is constant, or harmless, yet whose
score takes attention away from another.

The sum is edited where heads meet it (`hook_z`, `hook_pattern`), so positions may be learned, rotary or ALiBi.
Renormalising a row without some sources is the softmax without them. A row without any source reads nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits.attention import exclusive
from circuits.errors import NoSuchPart, Undefined
from circuits.examples import Examples, Place, position_of
from circuits.hooks import Hook, check_heads, check_own_weights, coming_last

What = Literal["contribution", "value", "pattern", "knock-out"]
WHAT: tuple[What, ...] = ("contribution", "value", "pattern", "knock-out")
REPLACEMENTS = ("mean", "zero", "resample")


@dataclass(frozen=True, init=False, repr=False)
class Edge:
    """What a head moves from a source to a destination. Printed as x→1.3→answer, all heads of layer 1 as x→1.all→…"""

    layer: int
    head: int | None
    """None for all heads of the layer."""
    destination: Place
    source: Place

    def __init__(self, layer: int, head: int | str | None, destination: Place, source: Place):
        """`head`: a number, or "all" or None. `destination`, `source`: positions from 0, or names of roles.

        Raises: NoSuchPart, also for a source behind its destination.
        """
        head = None if head == "all" else head
        if isinstance(head, str):
            raise NoSuchPart(f"{head!r} is no head of layer {layer}; expected a number or all")
        for place in (destination, source):
            if isinstance(place, int) and place < 0:
                raise NoSuchPart(f"{place} is no position; they are counted from 0")
        if isinstance(destination, int) and isinstance(source, int) and source > destination:
            raise NoSuchPart(f"no edge from {source} to {destination}: attention looks back, not ahead")
        for name, value in (("layer", layer), ("head", head), ("destination", destination), ("source", source)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"{self.source}→{self.layer}.{'all' if self.head is None else self.head}→{self.destination}"


@dataclass(frozen=True, repr=False)
class Reference:
    """Patterns and values of prompts that a cut's replacement is taken from."""

    patterns: dict[int, Float[Tensor, "example head destination source"]]
    values: dict[int, Float[Tensor, "example source head d_head"]]
    roles: Mapping[str, Any]

    def take(self, indices: Int[Tensor, "chosen"]) -> "Reference":
        """Some of the prompts, in this order."""
        patterns, values = ({n: x[indices] for n, x in each.items()} for each in (self.patterns, self.values))
        roles = {name: p[indices] if isinstance(p, Tensor) and p.ndim else p for name, p in self.roles.items()}
        return Reference(patterns, values, roles)

    def __repr__(self) -> str:
        layers = sorted(self.patterns)
        return f"Reference({len(self.patterns[layers[0]]) if layers else 0} prompts, layers {layers})"


def reference(
    model: Any, prompts: Examples | Int[Tensor, "example position"], roles: Mapping[str, Any] | None = None
) -> Reference:
    """One forward pass over prompts, to take replacements from: once for many cuts. Examples bring their own roles."""
    tokens, own = (prompts.tokens, prompts.roles) if isinstance(prompts, Examples) else (prompts, roles or {})
    layers = range(model.cfg.n_layers)
    names = [f"blocks.{layer}.attn.hook_{kind}" for layer in layers for kind in ("pattern", "v")]
    with exclusive(model), torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=names)
    patterns, values = (
        {layer: cache[f"blocks.{layer}.attn.hook_{kind}"].detach() for layer in layers} for kind in ("pattern", "v")
    )
    return Reference(patterns, values, own)


@dataclass(frozen=True, eq=False)
class Resolved:
    """An edge with its positions and heads worked out."""

    edge: Edge
    heads: tuple[int, ...]
    destination: Int[Tensor, "_"]
    source: Int[Tensor, "_"]

    def __and__(self, other: "Resolved") -> bool:
        """Whether they share a term in some example."""
        if self.edge.layer != other.edge.layer or not set(self.heads) & set(other.heads):
            return False
        sizes = {len(at) for edge in (self, other) for at in (edge.destination, edge.source)} - {1}
        if len(sizes) > 1:
            return False  # no batch fits both
        return bool(((self.destination == other.destination) & (self.source == other.source)).any())


def resolve(model: Any, edges: Sequence[Edge], roles: Mapping[str, Any]) -> list[Resolved]:
    """Raises: NoSuchPart for heads or roles that are not there, a source behind its destination; Undefined for edges
    that share a term."""
    found: list[Resolved] = []
    for edge in edges:
        heads = tuple(range(model.cfg.n_heads)) if edge.head is None else (edge.head,)
        check_heads(model, {(edge.layer, head) for head in heads})
        places = position_of(edge.destination, roles), position_of(edge.source, roles)
        if bool((places[1] > places[0]).any()):
            raise NoSuchPart(f"no edge {edge}: its source stands behind its destination; attention looks back")
        found.append(Resolved(edge, heads, *places))
    for i, one in enumerate(found):
        for other in found[:i]:
            if one & other:
                raise Undefined(f"{other.edge} and {one.edge} share a term; cut it once")
    return found


def edge_hooks(
    model: Any, edges: Sequence[Resolved], what: str, replacement: str, taken_from: Reference | None
) -> list[Hook]:
    """In the order of the forward pass: come last, note values and patterns, change patterns or sums."""
    layers = sorted({edge.edge.layer for edge in edges})
    hooks: list[Hook] = []
    for layer in layers:
        own = [edge for edge in edges if edge.edge.layer == layer]
        name = f"blocks.{layer}.attn.hook_"
        if what != "knock-out":
            check_own_weights(model, layer, "V")
        if what in ("pattern", "knock-out"):
            change = partial(_knocked_out if what == "knock-out" else _other_pattern, edges=own)
            replaced = {} if what == "knock-out" else {"replacement": replacement, "taken_from": taken_from}
            hooks.append(Hook(model, f"{name}pattern", partial(change, **replaced)))
            continue
        noted: dict[str, Tensor] = {}
        noting = [Hook(model, f"{name}{kind}", partial(_note, noted=noted, kind=kind)) for kind in ("v", "pattern")]
        sums = partial(_other_sums, edges=own, noted=noted, what=what, replacement=replacement, taken_from=taken_from)
        hooks += [coming_last(model, layer, noting), *noting, Hook(model, f"{name}z", sums)]
    return hooks


def forcing_hook(model: Any, edge: Resolved) -> Hook:
    """All of the destination's attention on the edge's source."""

    def force_row(pattern: Tensor, hook: Any) -> Tensor:
        rows, t, s, heads = _index(edge, len(pattern), pattern.shape[-1])
        pattern = pattern.clone()
        pattern[rows, heads, t] = 0
        pattern[rows, heads, t, s] = 1
        return pattern

    return Hook(model, f"blocks.{edge.edge.layer}.attn.hook_pattern", force_row)


def check_replacement(what: str, replacement: str, taken_from: Reference | None) -> None:
    """Raises: NoSuchPart for another kind or replacement; Undefined for resampling from nothing."""
    if what not in WHAT:
        raise NoSuchPart(f"{what!r} is no kind of cut; expected one of {', '.join(WHAT)}")
    if replacement not in REPLACEMENTS:
        raise NoSuchPart(f"{replacement!r} is no replacement; expected one of {', '.join(REPLACEMENTS)}")
    if replacement == "resample" and what != "knock-out" and taken_from is None:
        raise Undefined("resample takes another prompt's; give reference, a prompt of this shape for each example")


def _index(edge: Resolved, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Example, destination, source [example, 1] and heads [1, head], to index with together."""
    for at in (edge.destination, edge.source):
        if len(at) not in (1, batch):
            raise NoSuchPart(f"{edge.edge} has positions for {len(at)} examples, the batch has {batch}")
        if int(at.max()) >= length:
            raise NoSuchPart(f"{edge.edge} is at position {int(at.max())}; this prompt has 0 … {length - 1}")
    t, s = (at.expand(batch)[:, None] for at in (edge.destination, edge.source))
    return torch.arange(batch)[:, None], t, s, torch.tensor(edge.heads)[None]


def _terms(
    edge: Resolved, pattern: Tensor, values: Tensor
) -> tuple[Float[Tensor, "example head 1"], Float[Tensor, "example head d_head"]]:
    """A[t,s] and v_s."""
    rows, t, s, heads = _index(edge, len(pattern), pattern.shape[-1])
    return pattern[rows, heads, t, s][..., None], values[rows, s, heads]


def replacements(
    edge: Resolved, what: str, replacement: str, taken_from: Reference
) -> Float[Tensor, "example_or_one head width"]:
    """What stands in for an edge's term: the mean over the reference, or that of each of its prompts."""
    places = (position_of(place, taken_from.roles) for place in (edge.edge.destination, edge.edge.source))
    layer = edge.edge.layer
    terms = _terms(Resolved(edge.edge, edge.heads, *places), taken_from.patterns[layer], taken_from.values[layer])
    return _chosen(*terms, what, replacement)


def _chosen(attention: Tensor, value: Tensor, what: str, replacement: str) -> Float[Tensor, "example head width"]:
    term = attention * value if what == "contribution" else value if what == "value" else attention
    return term.mean(0, keepdim=True) if replacement == "mean" else term


def _stand_in(
    edge: Resolved, attention: Tensor, value: Tensor, what: str, replacement: str, taken_from: Reference | None
) -> Tensor:
    """The same, where the reference may be this very batch, whose terms are given."""
    batch = len(attention)
    if replacement == "zero":
        return attention.new_zeros(())
    if taken_from is None:
        if batch == 1:
            raise Undefined(
                'the mean over a batch of one is what stands there; give more, reference, or replacement="zero"'
            )
        return _chosen(attention, value, what, replacement)
    found = replacements(edge, what, replacement, taken_from)
    if len(found) not in (1, batch) or (replacement == "resample" and len(found) != batch):
        raise Undefined(f"resample takes one other prompt for each example; there are {len(found)} for {batch}")
    return found


def _note(tensor: Tensor, hook: Any, noted: dict[str, Tensor], kind: str) -> None:
    noted[kind] = tensor


def _other_sums(
    z: Tensor, hook: Any, edges: list[Resolved], noted: dict[str, Tensor], what: str, replacement: str,
    taken_from: Reference | None,
) -> Tensor:  # fmt: skip
    z, pattern, values = z.clone(), noted["pattern"], noted["v"]
    for edge in edges:
        rows, t, _, heads = _index(edge, len(z), pattern.shape[-1])
        attention, value = _terms(edge, pattern, values)
        instead = _stand_in(edge, attention, value, what, replacement, taken_from)
        z[rows, t, heads] += (instead if what == "contribution" else attention * instead) - attention * value
    return z


def _other_pattern(
    pattern: Tensor, hook: Any, edges: list[Resolved], replacement: str, taken_from: Reference | None
) -> Tensor:
    changed = pattern.clone()
    for edge in edges:
        rows, t, s, heads = _index(edge, len(pattern), pattern.shape[-1])
        attention = pattern[rows, heads, t, s][..., None]
        instead = _stand_in(edge, attention, attention, "pattern", replacement, taken_from)
        changed[rows, heads, t, s] = instead.expand_as(attention)[..., 0]
    return changed


def _knocked_out(pattern: Tensor, hook: Any, edges: list[Resolved]) -> Tensor:
    gone = torch.zeros_like(pattern, dtype=torch.bool)
    for edge in edges:
        rows, t, s, heads = _index(edge, len(pattern), pattern.shape[-1])
        gone[rows, heads, t, s] = True
    return without(pattern, gone)


def without(
    pattern: Float[Tensor, "*axes source"], gone: Bool[Tensor, "*axes source"]
) -> Float[Tensor, "*axes source"]:
    """The softmax without some sources; rows that lose none stay as they are, those that lose all are 0."""
    rest = pattern.masked_fill(gone, 0)
    total = rest.sum(-1, keepdim=True)
    renormalised = torch.where(total > 0, rest / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
    return torch.where(gone.any(-1, keepdim=True), renormalised, pattern)
