"""One attention score as an exact sum: which parts of the destination's stream meet which parts of the source's.

A score q kᵀ / √d_head is bilinear in what query and key are made of. With LayerNorm's scales held fixed, every part of
the one stream meets every part of the other, and the scores before the softmax are the sum. Here is Q- and
K-composition on the prompt at hand: which earlier head's output a query or key is made of. What is constant over
sources cancels in the softmax, so from every entry its mean over the sources is taken away.

Exact for this run, and no statistic: there is no null. A term's size is not the effect of its loss; for that, cut
(`circuits.cuts`).
"""

import html
import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from circuits.attention import exclusive
from circuits.errors import NoSuchPart, Undefined
from circuits.frozen import Frozen, freeze, one_prompt, position_of
from circuits.surface import Head, head_name, head_of, positions

if TYPE_CHECKING:
    from pandas import DataFrame

PROBES = 256  # sequences at a time when the model's own attention is asked for scores


@dataclass(frozen=True, repr=False)
class ScoreTerms:
    """One head's attention scores at one destination, as what each part of the query makes of each part of the keys."""

    head: Head
    destination: int
    sources: tuple[int, ...]
    components: tuple[str, ...]
    """"embed", "pos", earlier heads and feed-forward layers, "bias"; with ALiBi "alibi", which meets only itself."""
    values: Float[Tensor, "destination_component source_component source"]
    """Scores before the softmax, divided by √d_head as in the model, each entry minus its mean over all sources."""

    @property
    def total(self) -> Float[Tensor, "source"]:
        """The score minus its mean over the sources up to the destination."""
        return self.values.sum((0, 1))

    def __getitem__(self, pair: tuple[str, str]) -> Float[Tensor, "source"]:
        """What one part of the destination makes of one part of each source: terms["embed", "0.2"]."""
        for name in pair:
            if name not in self.components:
                raise NoSuchPart(f"no component {name!r}; expected one of {', '.join(self.components)}")
        return self.values[self.components.index(pair[0]), self.components.index(pair[1])]

    def to_frame(self) -> "DataFrame":
        """One row for each pair of components and source: destination_component, source_component, source, score."""
        from pandas import DataFrame

        rows = list(product(self.components, self.components, self.sources))
        frame = DataFrame(rows, columns=["destination_component", "source_component", "source"])
        return frame.assign(score=self.values.flatten().tolist())

    def __repr__(self) -> str:
        return f"{self._heading}\n{self._largest().to_string(index=False, float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        shown = self._largest().to_html(index=False, float_format="{:.3f}".format)
        return f"<p>{html.escape(self._heading)}</p>{shown}"

    def _largest(self) -> "DataFrame":
        return self.to_frame().sort_values("score", key=abs, ascending=False, kind="stable").head(10)

    @property
    def _heading(self) -> str:
        return (
            f"Attention scores of head {head_name(*self.head)} at position {self.destination}, minus their mean over "
            f"sources, as {len(self.components)} × {len(self.components)} components, the largest first: exact with "
            "the LayerNorm scales of this run; the size of a term is not the effect of its loss"
        )


def decompose_attention_scores(
    model: Any,
    tokens: Tensor,
    head: str | Head,
    destination: int,
    source: int | None = None,
) -> ScoreTerms:
    """What makes one head attend where it does, at one destination of one prompt, tokens [1, position].

    Components: "embed", "pos" (shortformer's too), each earlier head "0.2" with all that it wrote (value bias included,
    as `circuits.cuts` cuts it), each earlier feed-forward layer "0.mlp", and "bias": output biases, LayerNorm's, b_Q on
    the destination's side and b_K on the source's. ALiBi is one more, "alibi". With rotary positions each pair's score
    is asked of the model's own attention, given these queries and keys. `source` keeps that source alone, still minus
    the mean over all sources up to the destination. Negative positions count from the end.

    Raises: NoSuchPart; Undefined as `decompose_logits`, or where the terms do not give the head's pattern.
    """
    f = freeze(model, one_prompt(tokens))
    layer, number = head_of(head, f.weights)
    at = position_of(destination, tokens.shape[1])
    parts, bias = _components(f, layer)
    q = torch.stack([part[at] for part in parts.values()]) @ f.weights.W_Q[layer, number]
    k = torch.stack([part[: at + 1] for part in parts.values()]) @ f.weights.W_K[layer, number]
    q[bias] += f.weights.b_Q[layer, number]
    k[bias] += f.weights.b_K[layer, number]
    names, kind = list(parts), positions(model)
    if kind == "rotary":
        values = _asked(model, tokens, (layer, number), q, k)
    else:
        unscaled = getattr(getattr(model, "config", None), "attention", None) == "softmax-unscaled"
        values = torch.einsum("id, jsd -> ijs", q, k) / (1 if unscaled else math.sqrt(f.weights.d_head))
    if kind == "alibi":
        names.append("alibi")
        values = F.pad(values, (0, 0, 0, 1, 0, 1))
        values[-1, -1] = _slope(model, tokens, (layer, number), at)
    values = values - values.mean(-1, keepdim=True)
    pattern, total = f.patterns[layer][0, number, at, : at + 1], values.sum((0, 1))
    off = (total.log_softmax(-1) - pattern.clamp(min=1e-30).log())[pattern > 1e-30]  # less has no digits left
    if not len(off) or float(off.abs().max()) > 1e-3 * (1 + float(total.abs().max())):
        raise Undefined(
            f"the terms do not give the pattern of head {head_name(layer, number)}: this model makes scores of more "
            "than queries and keys, or a hook changes them"
        )
    chosen = tuple(range(at + 1)) if source is None else (position_of(source, at + 1),)
    return ScoreTerms((layer, number), at, chosen, tuple(names), values[:, :, list(chosen)])


def _components(f: Frozen, layer: int) -> tuple[dict[str, Float[Tensor, "position d_model"]], int]:
    """What queries and keys of a layer are made from, part by part, and which of them is "bias"."""
    stream = {"embed": f.embed} | ({} if f.pos is None else {"pos": f.pos})
    for i in range(layer):
        stream |= {head_name(i, h): f.written[i][:, :, h] for h in range(f.weights.n_heads)}
        stream |= {f"{i}.mlp": f.mlps[i]} if f.mlps else {}
    stream["bias"] = f.b_O[:layer].sum(0).expand_as(f.embed)
    parts = {name: f.norms[layer].linear(part)[0] for name, part in stream.items()}
    parts["bias"] = parts["bias"] + f.norms[layer].bias
    if f.apart is not None:
        parts["pos"] = f.apart
    return parts, list(parts).index("bias")


def _asked(
    model: Any,
    tokens: Tensor,
    head: Head,
    q: Float[Tensor, "destination_component d_head"],
    k: Float[Tensor, "source_component source d_head"],
) -> Float[Tensor, "destination_component source_component source"]:
    """Each pair's scores, up to a constant over sources, from the model's own attention: the logarithm of the pattern
    that it makes of these queries and keys. They are made small for it, so that no attention rounds to 0, and the
    scores, which are bilinear, large again; a rotation keeps lengths, which says how small is small enough."""
    (layer, number), at, heads = head, k.shape[1] - 1, int(model.cfg.n_heads)
    size = q.norm(dim=-1)[:, None] * k.norm(dim=-1).amax(-1) / math.sqrt(q.shape[-1])
    shrink = torch.where(size > 0, 1 / size.clamp(min=1e-30), 1.0)
    queries = (q[:, None] * shrink[..., None]).flatten(0, 1)  # [pair, d_head]
    keys = k.repeat(len(q), 1, 1)  # [pair, source, d_head]
    patterns: list[Tensor] = []

    def ask(start: int) -> None:
        chunk = slice(start, start + PROBES)

        def give_queries(given: Tensor, hook: Any) -> Tensor:
            given = given.clone()
            given[:, at, number] = queries[chunk]
            return given

        def give_keys(given: Tensor, hook: Any) -> Tensor:
            given = given.clone()
            given[:, : at + 1, number // (heads // given.shape[2])] = keys[chunk]  # grouped queries share a key
            return given

        def note(pattern: Tensor, hook: Any) -> None:
            patterns.append(pattern[:, number, at, : at + 1].detach().clone())

        hooks = {"hook_q": give_queries, "hook_k": give_keys, "hook_pattern": note}
        model.run_with_hooks(
            tokens.expand(len(queries[chunk]), -1),
            fwd_hooks=[(f"blocks.{layer}.attn.{name}", hook) for name, hook in hooks.items()],
        )

    with exclusive(model), torch.no_grad():
        for start in range(0, len(queries), PROBES):
            ask(start)
    scores = torch.cat(patterns).log().unflatten(0, shrink.shape)
    return (scores - scores.mean(-1, keepdim=True)) / shrink[..., None]


def _slope(model: Any, tokens: Tensor, head: Head, at: int) -> Float[Tensor, "source"]:
    """What the model's own attention adds to scores when every query is 0."""
    layer, number = head
    found: list[Tensor] = []
    hooks = [
        (f"blocks.{layer}.attn.hook_q", lambda q, hook: torch.zeros_like(q)),
        (f"blocks.{layer}.attn.hook_attn_scores", lambda scores, hook: found.append(scores[0, number, at, : at + 1])),
    ]
    with exclusive(model), torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    return found[0].detach()
