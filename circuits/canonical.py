"""The canonical context, in which a source token, a destination token and a layer of heads are read without data.

    filler filler … source … filler filler destination → out

The source stands in the middle, the destination last. The *filler* is the mean embedding of the quiet half of the
vocabulary: the tokens of which the heads of layer 0 write least, by ‖(x − mean) W_V W_O‖ over all heads. A filler must
move next to nothing, and a mean over all tokens moves a little of every rule. The context ends at the last position
that had a next token in training, n_ctx − 2, so that no learned position in it was left untrained, and is at most
LONGEST tokens long.

`Context` runs the model itself on such embeddings (whatever its positions and LayerNorm); `Factors` are the two
factors of one head in the same context, attention and OV, in closed form.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.attention import exclusive
from circuits.errors import NoSuchPart, Undefined
from circuits.surface import positions, post_norm, read

LONGEST = 16  # tokens of a context
BUDGET = 64 * 2**20  # bytes of one streamed block
FILLER = -1  # stands for the filler where a source token is expected

Token = SupportsIndex | str
"""A token by its number, or by its name if the model knows names."""


@dataclass(frozen=True)
class Factors:
    """One head in the canonical context: attention is sigmoid(keys · queries), OV is values · right."""

    keys: Float[Tensor, "d_vocab extended"]
    """[k, 1] and [q, −log of what the rest of the context weighs], so that one product gives the attention's logit."""
    queries: Float[Tensor, "d_vocab extended"]
    values: Float[Tensor, "d_vocab d_head"]
    """Less the filler's."""
    right: Float[Tensor, "d_head d_vocab"]
    """W_O W_U, every row's mean subtracted."""

    def attention(self, sources: Int[Tensor, "source"]) -> Float[Tensor, "source destination"]:
        """From every destination to these sources: softmax over the context, the source one of its positions."""
        return (self.keys[sources] @ self.queries.T).sigmoid_()

    def ov(self, sources: Int[Tensor, "source"]) -> Float[Tensor, "source out"]:
        """Logits, less their mean, that a full look at these sources adds to that at a filler."""
        return self.values[sources] @ self.right

    def best(self) -> tuple[Float[Tensor, "source"], Float[Tensor, "source"]]:
        """Of every source, the highest attention and the highest OV entry."""
        return _highest(self.keys, self.queries.T).sigmoid(), _highest(self.values, self.right)

    def most(self, sources: Int[Tensor, "source"]) -> Float[Tensor, "destination"]:
        """Every destination's highest attention to any of these sources."""
        blocks = blocks_of(len(sources), len(self.queries) * self.queries.element_size())
        return torch.stack([self.attention(sources[block]).amax(0) for block in blocks]).amax(0)


class Context:
    """The canonical context of one model. Raises: NoSuchPart for a length it cannot have; Undefined without heads."""

    def __init__(self, model: Any, length: int | None = None):
        norm = getattr(model.cfg, "normalization_type", None) if hasattr(model, "cfg") else None
        if post_norm(model) or norm not in (None, "LN", "LNPre"):
            kind = "LayerNorm after each addition" if post_norm(model) else f"normalisation {norm}"
            raise Undefined(
                f"skip-trigrams are undefined for {kind}; expected a model with LayerNorm before sub-layers, or none"
            )
        self.model, self.normed = model, norm is not None
        self.w = read(model, fold=self.normed, inside=False)
        if not self.w.n_layers:
            raise Undefined("a model without layers has no heads; its bigrams are its direct path")
        longest = model.cfg.n_ctx
        self.length = min(LONGEST, max(2, longest - 1)) if length is None else length
        if not 2 <= self.length <= longest:
            raise NoSuchPart(f"a context of {self.length} tokens: this model takes 2 to {longest}, and two are needed")
        self.source = (self.length - 1) // 2  # its position; the destination's is length − 1
        quiet = self._quiet()
        raw = model.W_E.detach()
        self.filler = quiet.to(raw) @ raw / quiet.sum()
        self._filler = quiet.to(self.w.W_E) @ self.w.W_E / quiet.sum()  # the same, of the weights as read

    def token(self, name: Token) -> int:
        """The number of one token. Raises: NoSuchPart."""
        try:
            number = int(self.model.to_single_token(name)) if isinstance(name, str) else index(name)
        except Exception:  # a model without such a name, or without names at all, says so in a way of its own
            raise NoSuchPart(
                f"no token {name!r}; expected its number, or its name where the model knows names"
            ) from None
        if not 0 <= number < self.w.d_vocab:
            raise NoSuchPart(f"no token {number}: this model's vocabulary goes from 0 to {self.w.d_vocab - 1}")
        return number

    def known(self, tokens: Token | Iterable[Token]) -> list[int]:
        """These tokens, or this one, once each. Raises: NoSuchPart."""
        several = isinstance(tokens, Iterable) and not isinstance(tokens, str) and getattr(tokens, "ndim", 1)
        return list(dict.fromkeys(self.token(token) for token in (tokens if several else [tokens])))  # pyright: ignore

    def named(self, tokens: Int[Tensor, "..."], names: Sequence[str] | None) -> dict[int, str] | None:
        """Names of these tokens: the caller's, the model's own, or none. Raises: NoSuchPart."""
        shown = sorted(set(tokens.flatten().tolist()))
        if names is not None:
            if shown and shown[-1] >= len(names):
                raise NoSuchPart(f"{len(names)} names, but token {shown[-1]} needs one; give a name for every token")
            return {token: str(names[token]) for token in shown}
        try:
            return {token: self.model.to_single_str_token(token) for token in shown}
        except Exception:  # a model without a tokenizer says so in a way of its own
            return None

    def run(
        self, sources: Int[Tensor, "row"], destinations: Int[Tensor, "row"], keep: Sequence[str] = ()
    ) -> tuple[Float[Tensor, "row d_vocab"], dict[str, Tensor]]:
        """Logits at the destination, and at it the activations named in `keep`, of all rows at once."""
        raw, kept = self.model.W_E.detach(), {}
        x = self.filler.expand(len(sources), self.length, -1).clone()
        told = sources != FILLER
        x[told, self.source] = raw[sources[told]]
        x[:, -1] = raw[destinations]

        def put(embedded: Tensor, hook: Any) -> Tensor:
            return x.to(embedded)

        def save(name: str, activation: Tensor, hook: Any) -> None:  # a bridge's hook has another name
            kept[name] = activation.detach().float()

        blank = torch.zeros(len(sources), self.length, dtype=torch.int64, device=raw.device)
        hooks = [("hook_embed", put), *((name, partial(save, name)) for name in keep)]
        with exclusive(self.model), torch.no_grad():
            logits = self.model.run_with_hooks(blank, fwd_hooks=hooks)
        return logits[:, -1].detach().float(), kept

    def p(self, sources: Sequence[int], destinations: Sequence[int]) -> Float[Tensor, "source destination d_vocab"]:
        """p(out) of every source (or FILLER) with every destination, in blocks of rows."""
        s, d = torch.tensor(sources), torch.tensor(destinations)
        rows = torch.cartesian_prod(s, d).to(self.w.W_E.device)
        some = [self.run(rows[block, 0], rows[block, 1])[0].softmax(-1) for block in self.rows(len(rows))]
        return torch.cat(some).unflatten(0, (len(s), len(d)))

    def heads(self, tokens: Int[Tensor, "row 3"]) -> tuple[Float[Tensor, "row head"], Float[Tensor, "row head"]]:
        """For each (source, destination, out): what each head adds to the out's logit against its rival's, the most
        probable other token without the source, when the source takes the filler's place (a final LayerNorm's scale
        frozen as with the source); and each head's attention from the destination to the source."""
        names = z, pattern, stream = ["blocks.0.attn.hook_z", "blocks.0.attn.hook_pattern", "blocks.0.hook_resid_post"]
        contributions, attention = [], []
        for block in self.rows(len(tokens)):
            s, d, o = tokens[block].to(self.w.W_E.device).T
            _, told = self.run(s, d, names)
            logits, untold = self.run(torch.full_like(s, FILLER), d, names)
            rival = logits.scatter(1, o[:, None], -torch.inf).argmax(1)
            moved = torch.einsum("rhd, hdm -> rhm", (told[z] - untold[z])[:, -1], self.w.W_O[0].float())
            against = (self.w.W_U[:, o] - self.w.W_U[:, rival]).float()
            scale = self._scale(told[stream][:, -1]) if self.normed else 1.0
            contributions.append(torch.einsum("rhm, mr -> rh", moved, against) / scale)
            attention.append(told[pattern][:, :, -1, self.source])
        empty = torch.zeros(0, self.w.n_heads)
        return torch.cat([empty, *(x.cpu() for x in contributions)]), torch.cat([empty, *(x.cpu() for x in attention)])

    def rows(self, n: int) -> Iterator[slice]:
        """Blocks of rows of a run: its logits at all positions must fit."""
        return blocks_of(n, self.length * self.w.d_vocab * 4)

    def factors(self, head: int) -> Factors:
        """Attention and OV of one head of layer 0. Raises: Undefined where positions enter attention itself."""
        kind = positions(self.model)
        if kind in ("rotary", "alibi", "shortformer"):
            raise Undefined(
                f"with {kind} positions, attention between tokens is not one matrix; skip_trigrams runs the model"
            )
        w, last = self.w, self.length - 1
        q = self._project(w.W_E, last, w.W_Q[0, head]) + w.b_Q[0, head]
        if getattr(getattr(self.model, "config", None), "attention", None) != "softmax-unscaled":
            q = q / w.d_head**0.5
        key, bias = w.W_K[0, head], w.b_K[0, head]
        fillers = [self._project(self._filler[None], at, key) + bias for at in range(last) if at != self.source]
        own = (q * (self._project(w.W_E, last, key) + bias)).sum(1, keepdim=True)
        rest = torch.cat([q @ torch.cat([q.new_zeros(0, w.d_head), *fillers]).T, own], dim=1).logsumexp(1)
        keys = self._project(w.W_E, self.source, key) + bias
        right = w.W_O[0, head] @ w.W_U
        values = self._project(w.W_E, self.source, w.W_V[0, head])
        return Factors(
            torch.cat([keys, torch.ones_like(rest)[:, None]], dim=1), torch.cat([q, -rest[:, None]], dim=1),
            values - self._project(self._filler[None], self.source, w.W_V[0, head]),
            right - right.mean(1, keepdim=True),
        )  # fmt: skip

    def ov(self, head: int, sources: Int[Tensor, "source"]) -> Float[Tensor, "source out"]:
        """As `Factors.ov`, which needs no positions of attention."""
        w = self.w
        ends = torch.cat([w.W_E[sources], self._filler[None]])
        values = self._project(ends, self.source, w.W_V[0, head])
        return (values[:-1] - values[-1]) @ (w.W_O[0, head] @ (w.W_U - w.W_U.mean(1, keepdim=True)))

    def _quiet(self) -> Tensor:
        """True for the half of the vocabulary whose values move least."""
        size = torch.zeros(self.w.d_vocab, dtype=torch.float64, device=self.w.W_E.device)
        for head in range(self.w.n_heads):
            values = self._project(self.w.W_E, self.source, self.w.W_V[0, head])
            values = values - values.mean(0)
            gram = self.w.W_O[0, head] @ self.w.W_O[0, head].T
            size += ((values @ gram) * values).sum(1)
        return size <= size.median()

    def _project(self, x: Tensor, position: int, W: Tensor) -> Float[Tensor, "token d_head"]:
        """What a reader of layer 0 takes from tokens at one position; a block of tokens at a time."""
        at = 0 if self.w.W_pos is None else self.w.W_pos[position]
        return torch.cat([self._behind_norm(part + at) @ W for part in x.split(4096)])

    def _behind_norm(self, x: Tensor) -> Tensor:
        """LayerNorm as it is left by folding: without gain and bias."""
        return (x - x.mean(-1, keepdim=True)) / self._scale(x) if self.normed else x

    def _scale(self, x: Tensor) -> Tensor:
        return (x.var(-1, keepdim=True, correction=0) + getattr(self.model.cfg, "eps", 1e-5)).sqrt()


def blocks_of(n: int, size: int) -> Iterator[slice]:
    """Slices that cover n items of `size` bytes, as many at a time as fit into BUDGET (at least one)."""
    step = max(1, BUDGET // size)
    return (slice(start, start + step) for start in range(0, n, step))


def _highest(left: Float[Tensor, "row inner"], right: Float[Tensor, "inner column"]) -> Float[Tensor, "row"]:
    """The highest entry of each row of left @ right, by tiles that stay in a processor's cache: 5 to 10 × faster."""
    tiles = [tile.contiguous() for tile in right.split(1024, dim=1)]
    rows = [torch.stack([(some @ tile).amax(1) for tile in tiles]).amax(0) for some in left.split(512)]
    return torch.cat(rows)
