"""Thousands of forward passes for the price of one: only the answer's row of every layer, for many sets of kept edges.

Edges into the answer's position change the residual stream there and nowhere before it, and nothing behind it is
looked at. So keys and values of all other positions are those of the clean pass, and what remains is one row: query,
scores, sums, feed-forward layer. Sets that keep the same edges in the first layer share its row, and so do those that
keep the same edges in the first two; the second layer's query, and its own key and value at the answer, are computed
anew for each of them. It is the same function as `cut` around the model, edge by edge, and tests say so.

Written out for heads that read the (normalised) stream and positions that are added to it. Whether that describes the
model is tried: if the clean row does not give the model's own logits, `Slow` runs the whole model for each set.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from circuits.attention import exclusive
from circuits.cuts import cut
from circuits.edges import Edge, Reference, Resolved, edge_hooks, replacements, resolve
from circuits.examples import ANSWER, Examples
from circuits.hooks import on
from circuits.paths import what_is_read

ROWS = 16384  # rows of a feed-forward layer at a time, which then fit the processor's cache
TOLERANCE = 1e-4  # of the largest logit


def keeper(
    model: Any, examples: Examples, universe: Sequence[Edge], replacement: str, taken_from: Reference
) -> "Rows | Slow":
    """Whatever evaluates "only these edges of the universe" fastest for this model. Raises: what `cut` raises."""
    with cut(model, universe, replacement, reference=taken_from, roles=examples.roles):
        pass  # raises where there is nothing to cut
    edges = resolve(model, universe, examples.roles)
    into_answer = all(bool((edge.destination == examples.at(ANSWER)).all()) for edge in edges)
    if into_answer and _readable(model):
        rows = Rows(model, examples, edges, replacement, taken_from)
        if rows.agrees():
            return rows
    return Slow(model, examples, universe, replacement, taken_from)


class Slow:
    """The whole model, once for each set."""

    def __init__(
        self, model: Any, examples: Examples, universe: Sequence[Edge], replacement: str, taken_from: Reference
    ):
        self.model, self.examples, self.universe = model, examples, tuple(universe)
        self.replacement, self.taken_from = replacement, taken_from

    @torch.no_grad()
    def logits(
        self, kept: Bool[Tensor, "set edge"], chosen: Int[Tensor, "chosen"]
    ) -> Float[Tensor, "set chosen d_vocab"]:
        """At the answer, with only these edges of the universe, for some of the examples."""
        some, source = self.examples.take(chosen), self.taken_from
        if self.replacement == "resample":
            source = source.take(chosen)
        edges, found = resolve(self.model, self.universe, some.roles), []
        for row in kept.tolist():
            gone = [edge for edge, keeps in zip(edges, row, strict=True) if not keeps]
            hooks = edge_hooks(self.model, gone, "contribution", self.replacement, source)
            with exclusive(self.model), on(hooks):
                found.append(self.model(some.tokens)[torch.arange(len(some)), some.at(ANSWER)])
        return torch.stack(found)


class Rows:
    """The answer's row alone, all sets at once."""

    def __init__(self, model: Any, examples: Examples, edges: list[Resolved], replacement: str, taken_from: Reference):
        self.model, self.examples = model, examples
        layers, rows, at = range(model.cfg.n_layers), torch.arange(len(examples)), examples.at(ANSWER)
        names = [f"blocks.{layer}.attn.hook_{kind}" for layer in layers for kind in "kv"] + ["blocks.0.hook_resid_pre"]
        with exclusive(model), torch.no_grad():
            logits, cache = model.run_with_cache(examples.tokens, names_filter=names)
        self.clean, self.start = logits[rows, at], cache["blocks.0.hook_resid_pre"][rows, at]
        self.keys, self.values = ([cache[f"blocks.{layer}.attn.hook_{kind}"] for layer in layers] for kind in "kv")
        self.own = torch.nn.functional.one_hot(at, examples.tokens.shape[1]).bool()
        self.later = torch.arange(examples.tokens.shape[1]) > at[:, None]
        self.edges = [[i for i, edge in enumerate(edges) if edge.edge.layer == layer] for layer in layers]
        self.sources = [
            torch.stack([at.new_zeros(len(at)), *(edges[i].source.expand(len(at)) for i in own)], 1)[:, 1:]
            for own in self.edges
        ]
        self.heads = [torch.zeros(len(own), model.cfg.n_heads) for own in self.edges]
        self.instead = []
        for own, heads, values in zip(self.edges, self.heads, self.values, strict=True):
            instead = values.new_zeros(len(examples), len(own), *values.shape[2:])
            for place, i in enumerate(own):
                heads[place, list(edges[i].heads)] = 1
                if replacement != "zero":
                    instead[:, place, list(edges[i].heads)] = replacements(
                        edges[i], "contribution", replacement, taken_from
                    )
            self.instead.append(instead)
        self.n_edges = len(edges)

    def agrees(self) -> bool:
        """Whether the row without any cut gives the model's own logits."""
        kept, every = torch.ones(1, self.n_edges, dtype=torch.bool), torch.arange(len(self.examples))
        worst = (self.logits(kept, every)[0] - self.clean).abs().max()
        return bool(worst <= TOLERANCE * self.clean.abs().max().clamp(min=1))

    @torch.no_grad()
    def logits(
        self, kept: Bool[Tensor, "set edge"], chosen: Int[Tensor, "chosen"]
    ) -> Float[Tensor, "set chosen d_vocab"]:
        """At the answer, with only these edges of the universe, for some of the examples."""
        with exclusive(self.model):
            stream, state = self.start[chosen][None], torch.zeros(len(kept), dtype=torch.long)
            for layer in range(self.model.cfg.n_layers):
                cuts = torch.cat([state[:, None], (~kept[:, self.edges[layer]]).long()], 1)
                cuts, state = cuts.unique(dim=0, return_inverse=True)  # sorted: those with one parent are neighbours
                stream = self._layer(layer, stream, cuts[:, 0], cuts[:, 1:].to(stream), chosen)
            model = self.model
            return model.unembed(model.ln_final(stream))[state]

    def _layer(
        self, layer: int, stream: Float[Tensor, "parent chosen d_model"], parents: Int[Tensor, "state"],
        cuts: Float[Tensor, "state edge"], chosen: Int[Tensor, "chosen"],
    ) -> Float[Tensor, "state chosen d_model"]:  # fmt: skip
        """The stream behind this layer, for each state: its parent's stream, and what is cut in this layer."""
        sums, changes = self._attention(layer, stream, chosen)
        counts = torch.bincount(parents, minlength=len(stream)).tolist()
        z = torch.cat([
            own + torch.einsum("se, nehd -> snhd", some, change)
            for own, some, change in zip(sums, cuts.split(counts), changes, strict=True)
        ])  # fmt: skip
        W_O = self.model.blocks[layer].attn.W_O
        after = stream[parents] + torch.einsum("snhd, hdm -> snm", z, W_O) + self.model.b_O[layer]
        block = self.model.blocks[layer]
        if getattr(self.model.cfg, "attn_only", False):
            return after
        flat, normed = rearrange(after, "s n m -> 1 (s n) m"), self.model.cfg.normalization_type is not None
        hidden = [block.mlp(block.ln2(rows) if normed else rows) for rows in flat.split(ROWS, dim=1)]
        return after + torch.cat(hidden, 1).view_as(after)

    def _attention(
        self, layer: int, stream: Float[Tensor, "parent chosen d_model"], chosen: Int[Tensor, "chosen"]
    ) -> tuple[Float[Tensor, "parent chosen head d_head"], Float[Tensor, "parent chosen edge head d_head"]]:
        """What heads sum up at the answer, and by what each edge's cut would change that."""
        model, own = self.model, self.own[chosen]
        read = what_is_read(model, model.blocks[layer], stream)
        q, k, v = (
            torch.einsum("snm, hmd -> snhd", read, getattr(model, f"W_{kind}")[layer])
            + getattr(model, f"b_{kind}")[layer]
            for kind in "QKV"
        )
        keys, values = self.keys[layer][chosen], self.values[layer][chosen]
        scores = torch.einsum("snhd, nphd -> snhp", q, keys)
        scores = torch.where(own[:, None], (q * k).sum(-1, keepdim=True), scores) / math.sqrt(model.cfg.d_head)
        pattern = scores.masked_fill(self.later[chosen][:, None], -math.inf).softmax(-1)
        to_self = (pattern * own[:, None]).sum(-1, keepdim=True)
        others = values * ~own[..., None, None]
        sums = torch.einsum("snhp, nphd -> snhd", pattern, others) + to_self * v
        sources = self.sources[layer][chosen]
        rows = torch.arange(len(chosen))[:, None]
        attention = pattern.transpose(2, 3)[:, rows, sources]  # [parent, chosen, edge, head]
        value = torch.where(own[rows, sources][None, ..., None, None], v[:, :, None], values[rows, sources][None])
        changes = self.instead[layer][chosen] - attention[..., None] * value
        return sums, changes * self.heads[layer][..., None]


def _readable(model: Any) -> bool:
    """Whether the row's formulas can be tried on this model at all."""
    own = all(len(block.attn.W_V) == len(block.attn.W_K) == model.cfg.n_heads for block in model.blocks)
    config = getattr(model, "config", None)
    known = getattr(config, "norm", "pre") != "post" and getattr(config, "residual", True)
    return own and known and all(hasattr(model, name) for name in ("b_Q", "b_K", "b_V", "b_O", "unembed", "ln_final"))
