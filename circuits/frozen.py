"""One forward pass with everything that is not linear held fixed: a transformer as a sum of paths.

Three things stand between the embedding and the logits that are not linear: the softmax of attention, the division in
LayerNorm, the feed-forward layers. Take the attention patterns A and every LayerNorm's scale s from one run, the final
one's included, and hold them fixed; then what a head moves is linear in what it reads,

    head(x)[destination] = Σ_source A[destination, source] · (x[source] − mean) / s[source] · w  W_V W_O,

so that the logits are a sum over paths: which source, through which heads in turn. Source: *A Mathematical Framework
for Transformer Circuits* (2021). What is constant is a source of its own, "bias": b_O, and b_V and LayerNorm's b as
far as heads pass them on (attention sums to 1, so they reach every destination alike); a feed-forward layer's b_out
belongs to its output.

The sum is exact for this run and for no other: a change of the input would change the patterns and the scales too.
Q- and K-composition hide in them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.attention import exclusive
from circuits.errors import NoSuchPart, NoSurface, Undefined
from circuits.surface import Head, Weights, positions, read

FROZEN = "exact with the patterns and LayerNorm scales of this run, in which Q- and K-composition hide"


@dataclass(frozen=True, repr=False)
class Norm:
    """LayerNorm (or RMSNorm, which subtracts no mean) with its scale held fixed; where there is none, the identity."""

    scale: Float[Tensor, "batch position 1"]
    gain: Float[Tensor, "d_model"]
    bias: Float[Tensor, "d_model"]
    centring: bool

    def turn(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """Its linear part but for the division: the same at every position."""
        return (x - x.mean(-1, keepdim=True) if self.centring else x) * self.gain

    def linear(self, x: Float[Tensor, "*axes batch position d_model"]) -> Float[Tensor, "*axes batch position d_model"]:
        """Its linear part; only the bias is missing."""
        return self.turn(x) / self.scale


@dataclass(frozen=True, repr=False)
class Frozen:
    """What a run leaves behind."""

    model: Any
    weights: Weights
    embed: Float[Tensor, "batch position d_model"]
    pos: Float[Tensor, "batch position d_model"] | None
    """None where positions are not added to the residual stream."""
    apart: Float[Tensor, "position d_model"] | None
    """Shortformer's positions, which enter queries and keys behind LayerNorm."""
    norms: tuple[Norm, ...]
    """Before the heads of each layer, then the final one."""
    mlp_norms: tuple[Norm, ...]
    """Before each feed-forward layer; none in an attention-only model."""
    patterns: tuple[Float[Tensor, "batch head destination source"], ...]
    written: tuple[Float[Tensor, "batch position head d_model"], ...]
    """What each head wrote, its value bias included."""
    mlps: tuple[Float[Tensor, "batch position d_model"], ...]
    """What each feed-forward layer wrote."""
    b_O: Float[Tensor, "layer d_model"]
    logits: Float[Tensor, "batch position d_vocab"]

    @property
    def n_layers(self) -> int:
        return self.weights.n_layers

    def heads(
        self, x: Float[Tensor, "batch position d_model"], layer: int
    ) -> Float[Tensor, "head batch position d_model"]:
        """What each head of a layer moves of x, without biases."""
        z = self.patterns[layer] @ torch.einsum("bpm, hmd -> bhpd", self.norms[layer].linear(x), self._of("W_V", layer))
        return torch.einsum("bhpd, hdm -> hbpm", z, self._of("W_O", layer))

    def attend(
        self, x: Float[Tensor, "order batch position d_model"], layer: int
    ) -> Float[Tensor, "order batch position d_model"]:
        """What all heads of a layer move of x, without biases."""
        read = self.norms[layer].linear(x)
        z = self.patterns[layer] @ torch.einsum("obpm, hmd -> obhpd", read, self._of("W_V", layer))
        return torch.einsum("obhpd, hdm -> obpm", z, self._of("W_O", layer))

    def bias(self, layer: int) -> Float[Tensor, "batch position d_model"]:
        """What the attention of a layer writes whatever it reads."""
        value = torch.einsum("m, hmd -> hd", self.norms[layer].bias, self._of("W_V", layer)) + self._of("b_V", layer)
        constant = torch.einsum("hd, hdm -> hm", value, self._of("W_O", layer))
        return torch.einsum("bhqk, hm -> bqm", self.patterns[layer], constant) + self.b_O[layer]

    def streams(self, orders: int, frozen_mlps: bool) -> list[Float[Tensor, "order batch position d_model"]]:
        """The residual stream before each layer and at the end, by how many heads its parts have come through:
        0, 1, …, `orders`, and in the last row more than that. Rows sum to the stream.

        Heads turn order n into n + 1. With `frozen_mlps`, what a feed-forward layer wrote in the run is of order 0.
        Without, it is computed anew, scale frozen, from what has come through at most n heads, for each n; what it
        writes more for n than for n − 1 is of order n.
        """
        first = self.embed if self.pos is None else self.embed + self.pos
        stream = torch.stack([first, *[torch.zeros_like(first)] * (orders + 1)])
        streams = [stream]
        for layer in range(self.n_layers):
            moved = self.attend(stream, layer)
            stream = torch.cat([stream[:1] + self.bias(layer), stream[1:] + moved[:-1]])
            stream[-1] += moved[-1]
            if self.mlps and frozen_mlps:
                stream[0] += self.mlps[layer]
            elif self.mlps:
                out = torch.stack([self._mlp(x, layer) for x in stream.cumsum(0)])
                stream += out.diff(dim=0, prepend=torch.zeros_like(out[:1]))
            streams.append(stream)
        return streams

    def unembed(
        self, stream: Float[Tensor, "batch position d_model"], at: Any = slice(None)
    ) -> Float[Tensor, "batch chosen d_vocab"]:
        """Logits at the chosen positions, all biases included."""
        norm = self.norms[-1]
        read = norm.turn(stream[:, at]) / norm.scale[:, at] + norm.bias
        return read @ self.weights.W_U + self.weights.b_U

    def row(self, heads: tuple[Head, ...], position: int) -> Float[Tensor, "source"]:
        """The weight of each source position on the way through these heads to one position of the first sequence:
        products of attention, each divided by LayerNorm's scale where it is read."""
        row = torch.zeros_like(self.norms[-1].scale[0, :, 0])
        row[position] = 1 / self.norms[-1].scale[0, position, 0]
        for layer, head in reversed(heads):
            row = row @ self.patterns[layer][0, head] / self.norms[layer].scale[0, :, 0]
        return row

    def through(self, heads: tuple[Head, ...], x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        """What `row` has gathered, through the matrices of these heads up to W_U."""
        for layer, head in heads:
            x = self.norms[layer].turn(x) @ self.weights.W_V[layer, head] @ self.weights.W_O[layer, head]
        return self.norms[-1].turn(x)

    def sources(self, layer: int) -> dict[str, Float[Tensor, "position d_model"]]:
        """What stands in the stream before a layer and has come through no head, in the first sequence."""
        found = {"embed": self.embed[0]} | ({} if self.pos is None else {"pos": self.pos[0]})
        found |= {f"{i}.mlp": out[0] for i, out in enumerate(self.mlps[:layer])}
        bias = sum((self.bias(i)[0] for i in range(layer)), torch.zeros_like(self.embed[0]))
        return found | ({"bias": bias} if layer == self.n_layers or bool(bias.any()) else {})

    def agree(self, logits: Float[Tensor, "batch chosen d_vocab"], at: Any = slice(None)) -> None:
        """Raises: Undefined where the sum of all paths is not the logits of the run."""
        given = self.logits[:, at]
        if float((logits - given).abs().max()) > 1e-3 * (1 + float(given.abs().max())):
            raise Undefined(
                "the paths do not add up to this model's logits: it does something between its parts that is not "
                "attention, LayerNorm or a feed-forward layer, or a hook changes what they compute"
            )

    def _mlp(self, x: Tensor, layer: int) -> Float[Tensor, "batch position d_model"]:
        norm = self.mlp_norms[layer]
        with exclusive(self.model), torch.no_grad():
            return self.model.blocks[layer].mlp(norm.linear(x) + norm.bias).detach()

    def _of(self, name: str, layer: int) -> Tensor:
        return getattr(self.weights, name)[layer]


def freeze(model: Any, tokens: Tensor) -> Frozen:
    """Run once and keep what is needed. `tokens`: whole numbers [batch, position].

    Raises: ValueError for other tokens; Undefined for LayerNorm after the addition, sub-layers that replace the token,
    norms behind attention, active dropout; NoSurface, BadModel.
    """
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype == torch.bool or tokens.is_floating_point():
        raise ValueError(f"tokens are {tokens.dtype} {list(tokens.shape)}; expected whole numbers [batch, position]")
    w = read(model, inside=False)
    _check(model)
    layers, mlps, kind = range(w.n_layers), w.W_in is not None, positions(model)
    normed, beside = model.cfg.normalization_type is not None, getattr(model.cfg, "parallel_attn_mlp", False)
    parts = ["attn.hook_pattern", "attn.hook_z", *["ln1.hook_scale"] * normed, *["hook_mlp_out"] * mlps]
    parts += ["ln2.hook_scale"] * (normed and mlps and not beside)
    names = ["hook_embed", *[f"blocks.{i}.{part}" for i in layers for part in parts], *["ln_final.hook_scale"] * normed]
    names += {"shortformer": ["hook_shortformer_pos"]}.get(kind, ["hook_pos_embed"] * (w.W_pos is not None))
    with exclusive(model), torch.no_grad():
        logits, cache = model.run_with_cache(tokens, names_filter=names)
    kept = {name: cache[name].detach().to(w.W_E.dtype) for name in names}
    bias = getattr(model, "b_O", None)

    def norm(name: str) -> Norm:
        if not normed:
            width = w.W_E.shape[1]
            one, zero = w.W_E.new_ones(width), w.W_E.new_zeros(width)
            return Norm(kept["hook_embed"].new_ones(*tokens.shape, 1), one, zero, False)
        module = model.get_submodule(name)
        gain, shift = (getattr(module, part, None) for part in ("w", "b"))
        return Norm(
            kept[f"{name}.hook_scale"],
            w.W_E.new_ones(w.W_E.shape[1]) if gain is None else gain.detach(),
            w.W_E.new_zeros(w.W_E.shape[1]) if shift is None else shift.detach(),
            not str(model.cfg.normalization_type).startswith("RMS"),
        )

    z = [kept[f"blocks.{i}.attn.hook_z"] for i in layers]
    embed = kept["hook_embed"]
    pos = kept.get("hook_pos_embed")
    return Frozen(
        model, w, embed, None if pos is None else pos.expand_as(embed), kept.get("hook_shortformer_pos"),
        (*[norm(f"blocks.{i}.ln1") for i in layers], norm("ln_final")),
        () if not mlps or beside else tuple(norm(f"blocks.{i}.ln2") for i in layers),
        tuple(kept[f"blocks.{i}.attn.hook_pattern"] for i in layers),
        tuple(torch.einsum("bphd, hdm -> bphm", z[i], w.W_O[i]) for i in layers),
        tuple(kept[f"blocks.{i}.hook_mlp_out"] for i in layers) if mlps else (),
        w.W_E.new_zeros(w.n_layers, w.W_E.shape[1]) if bias is None else bias.detach(), logits.detach(),
    )  # fmt: skip


def position_of(position: int, length: int) -> int:
    """From 0; negative ones count from the end. Raises: NoSuchPart."""
    if not -length <= position < length:
        raise NoSuchPart(f"no position {position}: the prompt has {length} tokens, from 0")
    return position % length


def one_prompt(tokens: Tensor) -> Tensor:
    """Raises: ValueError unless there is one prompt."""
    if tokens.ndim != 2 or len(tokens) != 1:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; expected one prompt, [1, position]")
    return tokens


def _check(model: Any) -> None:
    if not hasattr(model, "blocks") or not hasattr(model, "run_with_cache"):
        raise NoSurface(f"{type(model).__name__} has no blocks and hooks; expected TransformerLens' surface")
    config = getattr(model, "config", None)
    reasons = {
        "with LayerNorm after each addition": getattr(config, "norm", None) == "post",
        "whose sub-layers replace the token": not getattr(config, "residual", True),
        "with a norm behind attention": any(hasattr(block, "ln1_post") for block in model.blocks),
        "in training mode with dropout (call eval())": any(
            isinstance(module, torch.nn.Dropout) and module.training and module.p > 0 for module in model.modules()
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise Undefined(f"a decomposition into paths is undefined for a model {reason}: the paths do not add up")
