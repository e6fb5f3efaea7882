"""One head at one destination, one equation after the other, with this run's numbers.

    x̂_s = LayerNorm(x_s)                     what is read at every position s, where LayerNorm comes first
    q = x̂_d W_Q + b_Q,  k_s = x̂_s W_K + b_K   the query of the destination d, the key of every source s
    score_s = q·k_s / √d_head                 −∞ for sources after d, which d cannot see
    A = softmax(score),  v_s = x̂_s W_V + b_V
    z = Σ_s A_s v_s,  Δ = z W_O               what the head adds to the residual stream at d
    x_d + Δ + (other heads, b_O)              with LayerNorm after it where the model has it there

Vaswani et al. 2017, *Attention Is All You Need*, §3.2; LayerNorm's places: Xiong et al. 2020. Rotary positions turn
query and keys before they meet (Su et al. 2021), ALiBi takes slope · distance from each score (Press et al. 2022),
shortformer adds positions to what queries and keys, but not values, are computed from (Press et al. 2021).

Everything after the query is computed from what comes before it, so a copy with another query, other products, no
scale or no mask (`dataclasses.replace`) is what the real head would do with them; `predicted` runs the model on with
what such a head writes at the destination. Nothing here is a statistic, so nothing has a null.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.attention import exclusive
from circuits.errors import NoSuchPart, Undefined
from circuits.frozen import one_prompt, position_of
from circuits.surface import Head, head_name, head_of, positions, post_norm, read, residual


@dataclass(frozen=True)
class Norm:
    """LayerNorm: (x − mean) / scale · gain + bias. RMSNorm has no mean and no bias."""

    gain: Float[Tensor, "d_model"]
    bias: Float[Tensor, "d_model"]
    eps: float
    centring: bool

    def mean(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes"]:
        """Subtracted; 0 for RMSNorm."""
        return x.mean(-1) if self.centring else torch.zeros_like(x[..., 0])

    def scale(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes"]:
        """√(variance + ε)."""
        return ((x - self.mean(x)[..., None]).pow(2).mean(-1) + self.eps).sqrt()

    def __call__(self, x: Float[Tensor, "*axes d_model"]) -> Float[Tensor, "*axes d_model"]:
        return (x - self.mean(x)[..., None]) / self.scale(x)[..., None] * self.gain + self.bias


@dataclass(frozen=True)
class Steps:
    """What one head computes at one destination. Fields are what it starts from, properties what follows from them."""

    head: Head
    destination: int
    stream: Float[Tensor, "position d_model"]
    """The residual stream before the block, x."""
    norm_before: Norm | None
    """LayerNorm that the head reads through; None where there is none, or it comes after the addition."""
    norm_after: Norm | None
    """LayerNorm after the addition, in a post-norm model."""
    positions_added: Float[Tensor, "position d_model"] | None
    """Shortformer: added to what queries and keys are computed from."""
    query: Float[Tensor, "d_head"]
    """The destination's, as it meets the keys."""
    keys: Float[Tensor, "position d_head"]
    unturned: tuple[Float[Tensor, "d_head"], Float[Tensor, "position d_head"]] | None
    """Query and keys before rotary positions turn them; None without those."""
    values: Float[Tensor, "position d_head"]
    divisor: float
    """√d_head, or 1 in a model that does not scale."""
    slope: float
    """ALiBi: taken from a score for each step of distance; 0 in other models."""
    W_O: Float[Tensor, "d_head d_model"]
    own: Float[Tensor, "d_model"]
    """What the head wrote in the run."""
    others: Float[Tensor, "d_model"]
    """What the other heads of the block and b_O wrote in the run, at the destination."""
    adds: bool
    """Whether what is written is added to the stream; else it replaces it."""
    logits: Float[Tensor, "d_vocab"]
    """Of the run, at the destination."""
    constant: Float[Tensor, "d_vocab"]
    """What the bias of the last LayerNorm adds to each logit whatever stands before it; 0 in a model without one."""
    b_U: Float[Tensor, "d_vocab"]
    scaled: bool = True
    """False: as if nothing were divided by √d_head."""
    masked: bool = True
    """False: as if later positions could be seen, with the keys and values that they have in this run."""
    other_products: Float[Tensor, "position"] | None = None
    """Given in place of q·k."""

    @property
    def read(self) -> Float[Tensor, "position d_model"]:
        """What values are computed from, and without shortformer's positions queries and keys too."""
        return self.stream if self.norm_before is None else self.norm_before(self.stream)

    @property
    def read_for_scores(self) -> Float[Tensor, "position d_model"]:
        return self.read if self.positions_added is None else self.read + self.positions_added

    @property
    def products(self) -> Float[Tensor, "position"]:
        """q·k of every source."""
        return self.keys @ self.query if self.other_products is None else self.other_products

    @property
    def divided(self) -> Float[Tensor, "position"]:
        return self.products / self.divisor if self.scaled else self.products

    @property
    def penalty(self) -> Float[Tensor, "position"]:
        """ALiBi's, 0 or less; 0 for later positions, for which it has no distance."""
        distance = self.destination - torch.arange(len(self.keys)).to(self.keys)
        return -self.slope * distance.clamp(min=0)

    @property
    def scores(self) -> Float[Tensor, "position"]:
        """What the softmax gets: −∞ after the destination while masked."""
        scores = self.divided + self.penalty
        later = torch.arange(len(scores), device=scores.device) > self.destination
        return scores.masked_fill(later, -math.inf) if self.masked else scores

    @property
    def pattern(self) -> Float[Tensor, "position"]:
        """Attention of the destination to each source; sums to 1."""
        return self.scores.softmax(-1)

    @property
    def z(self) -> Float[Tensor, "d_head"]:
        """Σ A v."""
        return self.pattern @ self.values

    @property
    def result(self) -> Float[Tensor, "d_model"]:
        """Δ = z W_O."""
        return self.z @ self.W_O

    @property
    def by_source(self) -> Float[Tensor, "position d_model"]:
        """What of Δ comes from each source: A_s v_s W_O."""
        return self.pattern[:, None] * (self.values @ self.W_O)

    def after(self, size: float = 1.0) -> Float[Tensor, "d_model"]:
        """The stream at the destination behind this block's attention, with Δ · size."""
        written = size * self.result + self.others
        stream = self.stream[self.destination] + written if self.adds else written
        return stream if self.norm_after is None else self.norm_after(stream)

    def stretched(
        self, logits: Float[Tensor, "d_vocab"], gain: float = 1.0, bias: float = 1.0
    ) -> Float[Tensor, "d_vocab"]:
        """Logits at the destination as they were with the last LayerNorm's gain and bias multiplied by these numbers.

        (x̂ · gain w + bias b) W_U + b_U is exact and needs no further run. Raises: Undefined without a LayerNorm.
        """
        if not bool(self.constant.isfinite().all()):
            raise Undefined("this model has no LayerNorm before its unembedding, so there are no γ and β to change")
        return gain * (logits - self.constant - self.b_U) + bias * self.constant + self.b_U


def step_by_step(model: Any, tokens: Tensor, head: str | Head, destination: int = -1) -> Steps:
    """Every number between the residual stream and what one head writes at one destination.

    `tokens`: whole numbers [1, position]. `head`: "1.3" or (1, 3). Negative destinations count from the end. Computed
    from the weights and the stream, and compared with the run: Undefined where they disagree, as for attention that is
    made otherwise, active dropout or hooks that edit. Raises too: NoSuchPart; NoSurface, BadModel; ValueError for
    tokens that are not one prompt.
    """
    one_prompt(tokens)
    w = read(model, inside=False)
    layer, number = head_of(head, w)
    at, kind = position_of(destination, tokens.shape[1]), positions(model)
    here, post = f"blocks.{layer}", post_norm(model)
    names = [f"{here}.{name}" for name in ("hook_resid_pre", "hook_attn_out", "attn.hook_pattern", "attn.hook_z")]
    if kind == "alibi":
        names.append(f"{here}.attn.hook_attn_scores")
    if kind == "shortformer":
        names.append("hook_shortformer_pos")
    with exclusive(model), torch.no_grad():
        logits, cache = model.run_with_cache(tokens, names_filter=names)
    kept = {name.removeprefix(f"{here}."): cache[name].detach().to(w.W_E) for name in names}

    def weight(name: str) -> Tensor:
        return getattr(w, name)[layer, number]

    stream, norm = kept["hook_resid_pre"][0], _norm(model, f"{here}.ln1")
    before = None if post else norm
    added = kept["hook_shortformer_pos"] if kind == "shortformer" else None
    plain = stream if before is None else before(stream)
    for_scores = plain if added is None else plain + added
    query = for_scores[at] @ weight("W_Q") + weight("b_Q")
    keys = for_scores @ weight("W_K") + weight("b_K")
    unturned = None
    if kind == "rotary":
        unturned = query, keys
        place = torch.arange(len(keys), device=keys.device)
        query, keys = _turned(query[None], place[at : at + 1])[0], _turned(keys, place)
    unscaled = getattr(getattr(model, "config", None), "attention", None) == "softmax-unscaled"
    divisor, slope = 1.0 if unscaled else math.sqrt(w.d_head), 0.0
    if kind == "alibi" and at:  # of the farthest source, where rounding weighs least
        slope = float(keys[0] @ query / divisor - kept["attn.hook_attn_scores"][0, number, at, 0]) / at
    own = kept["attn.hook_z"][0, at, number] @ weight("W_O")
    last = last_norm(model)
    steps = Steps(
        (layer, number), at, stream, before, norm if post else None, added, query, keys, unturned,
        plain @ weight("W_V") + weight("b_V"), divisor, slope, weight("W_O"), own,
        kept["hook_attn_out"][0, at] - own, residual(model), logits[0, at].detach().to(w.W_E),
        torch.full_like(w.b_U, math.nan) if last is None else last.bias @ w.W_U, w.b_U,
    )  # fmt: skip
    given = kept["attn.hook_pattern"][0, number, at], own
    for computed, seen in zip((steps.pattern, steps.result), given, strict=True):
        if float((computed - seen).abs().max()) > 1e-4 * (1 + float(seen.abs().max())):
            raise Undefined(
                f"these steps do not give what head {head_name(layer, number)} did: this model's attention does "
                "something else too, or a hook changes it"
            )
    return steps


def predicted(model: Any, tokens: Tensor, steps: Steps, size: float = 1.0) -> Float[Tensor, "d_vocab"]:
    """Logits at the destination when the head writes `size` times the Δ of `steps` there; all after it is run anew.

    0 is the model without the head at this position. `steps` may be a changed copy.
    """
    change, at = size * steps.result - steps.own, steps.destination

    def write(out: Tensor, hook: Any) -> Tensor:
        out = out.clone()
        out[:, at] += change.to(out)
        return out

    with exclusive(model), torch.no_grad():
        logits = model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{steps.head[0]}.hook_attn_out", write)])
    return logits[0, at].detach().to(steps.logits)


@dataclass(frozen=True)
class AnswerPlane:
    """The plane that two answers' unembedding directions span; what a head writes, projected onto it.

    Horizontal is answer − foil; angles are true. Unit: logits of answer − foil, along the direct path.
    """

    answer: Float[Tensor, "2"]
    """Unit vector towards the answer's logit."""
    foil: Float[Tensor, "2"]
    sources: Float[Tensor, "position 2"]
    """Horizontally: what A_s v_s W_O adds to the logit of the answer minus that of the foil, straight away."""
    stream: Float[Tensor, "2"]
    """The stream before the block."""
    others: Float[Tensor, "2"]
    """Other heads of the block and b_O."""

    @property
    def total(self) -> Float[Tensor, "2"]:
        """Δ."""
        return self.sources.sum(0)


def answer_plane(model: Any, tokens: Tensor, steps: Steps, answer: int, foil: int) -> AnswerPlane:
    """What the head moves in the plane of two answers, the final LayerNorm's scale of this run held fixed.

    Its gain belongs to the directions: u = w ⊙ W_U[:, token], centred where LayerNorm centres. What later blocks make
    of it is not seen here. Raises: NoSuchPart for a token; Undefined where nothing goes straight to the logits, or
    where the two answers have one direction.
    """
    if not steps.adds or steps.norm_after is not None:
        why = "LayerNorm after each addition" if steps.adds else "sub-layers that replace the token"
        raise Undefined(f"nothing goes straight to the logits in a model with {why}: there is no plane to move in")
    w, norm = read(model, inside=False), last_norm(model)
    for token in (answer, foil):
        if not 0 <= token < w.d_vocab:
            raise NoSuchPart(f"no token {token}: the vocabulary has {w.d_vocab}, from 0")
    u, scale = w.W_U[:, [answer, foil]].T, 1.0
    if norm is not None:
        u = u * norm.gain
        u = u - u.mean(-1, keepdim=True) if norm.centring else u
        name = f"blocks.{w.n_layers - 1}.hook_resid_post"
        with exclusive(model), torch.no_grad():
            _, cache = model.run_with_cache(tokens, names_filter=name)
        scale = float(norm.scale(cache[name][0, steps.destination].detach().to(w.W_E)))
    across = u[0] - u[1]
    up = u.sum(0) - across * (u.sum(0) @ across) / across.pow(2).sum()
    if float(across.norm()) < 1e-6 or float(up.norm()) < 1e-6 * float(across.norm()):
        raise Undefined("the two answers have one direction or opposite ones, so they span no plane")
    axes = torch.stack([across, up * across.norm() / up.norm()], dim=1) / scale  # [d_model, 2]
    toward = torch.nn.functional.normalize(u @ axes, dim=-1)
    at = steps.destination
    return AnswerPlane(toward[0], toward[1], steps.by_source @ axes, steps.stream[at] @ axes, steps.others @ axes)


def _turned(
    x: Float[Tensor, "row d_head"], position: Int[Tensor, "row"], base: float = 10_000.0
) -> Float[Tensor, "row d_head"]:
    """Rotary: adjacent pairs turned by position · base^(−2i / d_head), RoFormer's eq. 15."""
    angle = position[:, None] * base ** (-torch.arange(0, x.shape[1], 2, device=x.device) / x.shape[1])
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle).to(pairs)).flatten(1)


def _norm(model: Any, name: str) -> Norm | None:
    """None where there is no such module, or it is the identity."""
    kind = getattr(model.cfg, "normalization_type", None)
    module = model.get_submodule(name) if kind or post_norm(model) else None
    if module is None:
        return None
    gain, bias = (getattr(module, part, None) for part in ("w", "b"))
    width = model.W_E
    one, zero = width.new_ones(width.shape[1]).detach(), width.new_zeros(width.shape[1]).detach()
    return Norm(
        one if gain is None else gain.detach().to(one), zero if bias is None else bias.detach().to(one),
        float(getattr(model.cfg, "eps", 1e-5)), not str(kind).startswith("RMS"),
    )  # fmt: skip


def last_norm(model: Any) -> Norm | None:
    """The LayerNorm whose output is unembedded."""
    if not post_norm(model):
        return _norm(model, "ln_final")
    last = len(model.blocks) - 1
    return _norm(model, f"blocks.{last}.{'ln1' if model.cfg.attn_only else 'ln2'}")
