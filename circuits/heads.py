"""What each head does on data: where it looks, whether it copies, and what a head like it would do by chance.

All pattern scores are means over destinations of attention A[destination, source] on random tokens that repeat, each
sequence with a period of its own. Destination 0 has no choice and is left out.

- previous_token: A[i, i − 1]. current_token: A[i, i].
- duplicate_token: attention to the earlier occurrences of the destination's token, summed over them.
- prefix_matching: attention to the tokens that *followed* the earlier occurrences, summed over them; the induction
  score of *In-context Learning and Induction Heads* (2022).
- entropy of a row, in nats; entropy_share: as a share of its maximum log(i + 1).
- distance: destination − source, in tokens.
- copying: what the head moves from each source (its value without what is constant, W_O, the final LayerNorm's gain,
  W_U, the mean over the vocabulary subtracted, negative logits cut off): the share of it on the source's own token,
  weighted by attention. 0 … 1; the paper's −1 … 1 is 2 · share − 1. The gain is that of the raw weights (folded
  ones have it in W_U); LayerNorm's scale does not matter to a share.

**The control.** A head that looks a fixed distance back, or everywhere, also meets earlier occurrences. For
duplicate_token and prefix_matching the attention at exactly the same places on sequences that do not repeat there is
subtracted; `…_raw` and `…_control` hold the two parts.

**The null** turns the head's query weights at random in the space they read, W_Q → R W_Q with R a random rotation
(for copying: W_O in the space it writes): same spectra, same keys, same inputs, same positions of the keys, but no
alignment. Under it a freshly initialised head is one more draw, so p is exact there.
"""

import html
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuits.attention import exclusive
from circuits.errors import NoSuchPart, NoSurface, Undefined
from circuits.nulls import random_frames
from circuits.scores import DRAWS, LEAST_DRAWS, Scores, from_draws, without_dead
from circuits.sequences import (
    BUDGET,
    MEASURES,
    Run,
    clean_run,
    default_length,
    measured,
    normed,
    places,
    repeated_sequences,
)
from circuits.sequences import in_context_learning_score as in_context_learning_score
from circuits.sequences import pattern_scores as pattern_scores
from circuits.surface import Weights, check_stream, head_name, read

if TYPE_CHECKING:
    from pandas import DataFrame

ROLES = {
    "previous-token": "previous_token", "current-token": "current_token",
    "duplicate-token": "duplicate_token", "induction": "prefix_matching",
}  # fmt: skip
EFFECT = 0.3  # the least score that gives a head a role
VOCABULARY = 1024  # logits that the copying score looks at; the others are estimated from them
NULL_PATTERN = "query weights turned at random in the space they read, spectra kept; drawn"
NULL_COPYING = "output weights turned at random in the space they write, spectra kept; drawn"


@dataclass(frozen=True, repr=False)
class HeadScores:
    """Every measure of every head; `scores["prefix_matching"]` is one of them.

    A head whose W_Q W_Kᵀ is 0 still attends (evenly, or by position alone): its pattern scores are shown, but it is
    marked dead, since nothing in them is the head's own. Dead for copying: W_V W_O = 0, and the score is 0.
    """

    measures: dict[str, Scores]
    """[layer, head] each."""
    standard_error: dict[str, Float[Tensor, "layer head"]]
    """Of each score, over the sequences: what other sequences would change."""
    sequences: int
    length: int
    draws: int

    def __getitem__(self, measure: str) -> Scores:
        """One measure, by its name or that of its role ("induction" is prefix_matching). Raises: NoSuchPart."""
        measure = ROLES.get(measure, measure)
        if measure not in self.measures:
            raise NoSuchPart(f"no measure {measure!r}; expected one of {', '.join(self.measures)}")
        return self.measures[measure]

    def to_frame(self) -> "DataFrame":
        """One row for each head and measure, with its null, and its standard error over the sequences (se)."""
        from pandas import concat

        frames = [
            scores.to_frame().assign(measure=name, se=self.standard_error[name].flatten().tolist())
            for name, scores in self.measures.items()
        ]
        return concat(frames, ignore_index=True)

    def table(self) -> "DataFrame":
        """One row for each head; for each measure a column with its score and one with its z."""
        from pandas import DataFrame

        layers, heads = self["entropy"].scores.shape
        columns: dict[str, Any] = {"head": [head_name(i, j) for i in range(layers) for j in range(heads)]}
        for name, scores in self.measures.items():
            columns |= {name: scores.scores.flatten().tolist(), f"{name} z": scores.z.flatten().tolist()}
        return DataFrame(columns)

    def roles(self) -> dict[str, tuple[str, ...]]:
        """The heads of each role: previous-token, current-token, duplicate-token, induction.

        A head has a role if its score is at least 0.3 and above every draw of its null. Induction and duplicate-token
        go by the score with the control subtracted. The name says where a head looks on repeated random tokens, not
        what the model uses it for: that needs a cut.
        """
        return {role: self._above(measure) for role, measure in ROLES.items()}

    def _above(self, measure: str) -> tuple[str, ...]:
        scores = self[measure]
        beyond_all = (scores.p * (self.draws + 1) < 3) & (
            scores.scores > scores.null_mean
        )  # never so where dead: p is 1
        return tuple(head_name(*at) for at in (beyond_all & (scores.scores >= EFFECT)).nonzero().tolist())

    def __repr__(self) -> str:
        return f"{self._heading}\n{self._shown.to_string(index=False, float_format='{:.2f}'.format)}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._heading)}</p>{self._shown.to_html(index=False, float_format='{:.2f}'.format)}"

    @property
    def _shown(self) -> "DataFrame":
        names = [*ROLES.values(), "copying"]
        return self.table().filter(["head", *(column for name in names for column in (name, f"{name} z"))])

    @property
    def _heading(self) -> str:
        roles = "; ".join(f"{role}: {', '.join(heads)}" for role, heads in self.roles().items() if heads)
        return (
            f"Head scores on {self.sequences} repeated sequences of {self.length} tokens (behaviour); "
            f"{roles or 'no roles'}. Null: {NULL_PATTERN} {self.draws} times (copying: output weights)"
        )


def head_scores(
    model: Any, *, sequences: int = 12, length: int | None = None, draws: int = DRAWS, seed: int = 0
) -> HeadScores:
    """Every head's scores on `sequences` repeated sequences of `length` tokens (default 64, or what the model has).

    With 12 sequences a score's standard error is about .01 (`HeadScores.standard_error`). The cost is that of
    2 · `sequences` · `draws` forward passes of one sequence. Raises: Undefined where vocabulary or context are too
    small, or with fewer than 39 draws or 2 sequences; BadModel for attention that is not finite; NoSurface for a model
    whose queries are not its attention input times W_Q.
    """
    if sequences < 2 or draws < LEAST_DRAWS:
        raise Undefined(f"{sequences} sequences and {draws} draws; expected at least 2 and {LEAST_DRAWS}")
    weights, n_ctx = read(model), model.cfg.n_ctx
    length = default_length(n_ctx, weights.d_vocab) if length is None else length
    if length > n_ctx:
        raise Undefined(f"{length} tokens, but this model has a context of {n_ctx}; give a smaller length")
    generator = torch.Generator().manual_seed(seed)
    tokens, controls = repeated_sequences(weights.d_vocab, sequences, length, generator)
    run = clean_run(model, torch.cat([tokens, controls]), weights)
    where = places(run.tokens[:sequences])
    each = weights.W_E.new_zeros(sequences, weights.n_layers, weights.n_heads, len(MEASURES))
    for layer, pattern in enumerate(run.patterns):
        each[:, layer] = measured(pattern, where)[:, 0]
    drawn = _drawn_patterns(model, run, weights, where, draws, generator)
    moved, moved_drawn = _copying(model, run, weights, sequences, draws, generator)

    quiet = _silent(weights.W_Q, weights.W_K.mT)
    made = {
        name: _still(_scored(name, each[..., i], drawn[..., i], NULL_PATTERN), quiet) for i, name in enumerate(MEASURES)
    }
    dead = _silent(weights.W_V, weights.W_O)
    made["copying"] = _scored("copying", moved, moved_drawn, NULL_COPYING, dead)
    every = torch.cat([each, moved[..., None]], dim=-1)
    errors = ((every - every.mean(0)).pow(2).sum(0) / (sequences * (sequences - 1))).sqrt()
    return HeadScores(made, dict(zip(made, errors.unbind(-1), strict=True)), sequences, length, draws)


def qk_trace(
    model: Any, *, previous: Float[Tensor, "layer head"] | None = None, fold: bool = True, seed: int = 0
) -> Scores:
    """How well a head's QK circuit matches a token with what earlier previous-token heads moved: [layer, head].

    Σ over earlier heads h of prev(h) · tr(W_E W_QK (W_OV^h)ᵀ W_Eᵀ), prev(h) the previous-token score (`previous`, or
    measured on 12 repeated sequences). The null turns what each earlier head writes at random in the written space:
    mean 0, variance Σ prev(h)² ‖X_h‖²_F / width with X_h the matrix under the trace without the turn; p from the
    normal distribution. Undefined for heads of layer 0. With rotary positions it is the trace at distance 0. Raises:
    Undefined where folding is, or without a residual stream.
    """
    check_stream(model)
    w = read(model, fold)
    if previous is None:
        previous = _previous_token(model, w, seed)
    if previous.shape != (w.n_layers, w.n_heads) or not bool(previous.isfinite().all()):
        raise NoSuchPart(
            f"previous-token scores of shape {list(previous.shape)}; expected one finite number for each of "
            f"{w.n_layers} × {w.n_heads} heads"
        )
    gram = w.W_E.T @ w.W_E
    traces, variances = w.W_E.new_zeros(w.n_layers, w.n_heads), w.W_E.new_zeros(w.n_layers, w.n_heads)
    for layer in range(1, w.n_layers):
        q, k = gram @ w.W_Q[layer], w.W_K[layer]
        v, o = w.W_V[:layer].flatten(0, 1), w.W_O[:layer].flatten(0, 1)
        weight = previous[:layer].flatten().to(gram)
        matched = torch.einsum("hmd, rme -> hrde", v, q)  # earlier head h, reader r: V_hᵀ W_EᵀW_E Q_r
        carried = torch.einsum("hdm, rme -> hrde", o, k)  # O_h K_r
        traces[layer] = torch.einsum("h, hrde, hrde -> r", weight, matched, carried)
        sizes = (((o @ o.mT)[:, None] @ matched @ (k.mT @ k)) * matched).sum((2, 3))  # ‖X_h‖²_F
        variances[layer] = (weight[:, None] ** 2 * sizes).sum(0) / w.width
    sd = variances.clamp(min=0).sqrt()
    defined = torch.ones_like(sd, dtype=torch.bool)
    defined[:1] = False
    p = torch.special.erfc((traces / sd.clamp(min=1e-30)).abs() / 2**0.5)
    return without_dead(Scores(
        "QK trace", traces, torch.zeros_like(sd), sd, torch.stack([-1.959964 * sd, 1.959964 * sd]), p, ("head",),
        "what earlier heads write turned at random in the written space; closed form, normal", w.basis, defined,
        sd == 0,
    ))  # fmt: skip


def _drawn_patterns(
    model: Any, run: Run, w: Weights, where: Tensor, draws: int, generator: torch.Generator
) -> Float[Tensor, "draw layer head measure"]:
    """The measures under turned queries. Keys and inputs stay the clean run's, so one pass serves all layers."""
    W_Q, b_Q = w.W_Q, w.b_Q
    fixed = []  # of each query: what is not turned
    for layer, query in enumerate(run.queries):
        turnable = torch.einsum("bpm, hmd -> bphd", run.inputs[layer], W_Q[layer])
        error = (turnable + b_Q[layer] - query).abs().max() / query.abs().max().clamp(min=1)
        if error > (0.05 if run.keys[layer].dtype in (torch.bfloat16, torch.float16) else 1e-4):
            raise NoSurface(f"queries of layer {layer} are not its input times W_Q plus b_Q: off by {error.item():.1g}")
        fixed.append(query - turnable)
    batch, length = run.tokens.shape
    drawn = W_Q.new_zeros(draws, w.n_layers, w.n_heads, len(MEASURES))
    size = max(1, BUDGET // max(batch * w.n_heads * length**2, W_Q.numel()))
    for rows in torch.arange(draws).split(size):
        turned = _turned(W_Q, w.written, len(rows), generator)
        into, hooks = drawn[rows[0] : rows[-1] + 1], []
        for layer in range(w.n_layers):
            hooks += _hooks(run, layer, turned[:, layer], fixed[layer], where, into[:, layer])
        with exclusive(model), torch.no_grad():
            model.run_with_hooks(run.tokens.repeat_interleave(len(rows), 0), fwd_hooks=hooks, return_type=None)
    return drawn


def _hooks(
    run: Run,
    layer: int,
    turned: Float[Tensor, "draw head d_model d_head"],
    fixed: Tensor,
    where: Tensor,
    into: Float[Tensor, "draw head measure"],
) -> list[tuple[str, Any]]:
    """Turned queries, clean keys, and what is measured written `into` a table; the batch is (sequence, draw)."""

    def query(q: Tensor, hook: Any) -> Tensor:
        new = torch.einsum("bpm, nhmd -> bnphd", run.inputs[layer], turned) + fixed[:, None]
        return new.flatten(0, 1).to(q)

    def key(k: Tensor, hook: Any) -> Tensor:
        return run.keys[layer].repeat_interleave(len(turned), 0)

    def pattern(p: Tensor, hook: Any) -> None:
        into.copy_(measured(p.to(fixed), where).mean(0))

    at = f"blocks.{layer}.attn.hook_"
    return [(f"{at}q", query), (f"{at}k", key), (f"{at}pattern", pattern)]


def _turned(
    matrices: Float[Tensor, "layer head d_model d_head"],
    frame: Float[Tensor, "d_model width"],
    n: int,
    generator: torch.Generator,
) -> Float[Tensor, "draw layer head d_model d_head"]:
    """R W for random rotations R of the frame's span, one for each draw and head: with W = Q₀ T, it is Q′ T for a
    uniformly random orthonormal Q′."""
    triangle = torch.linalg.qr(frame.T @ matrices).R  # [layer, head, rank, d_head]
    layers, heads, rank, _ = triangle.shape
    frames = random_frames(n * layers * heads, frame.shape[1], rank, generator).to(frame)
    return frame @ frames.mT.unflatten(0, (n, layers, heads)) @ triangle


def _copying(
    model: Any, run: Run, w: Weights, sequences: int, draws: int, generator: torch.Generator
) -> tuple[Float[Tensor, "sequence layer head"], Float[Tensor, "draw layer head"]]:
    """The copying score of each sequence, and its mean over them with W_O turned at random."""
    tokens = run.tokens[:sequences]
    unembed, W_O = _unembedding(model, w), w.W_O
    seen = torch.randperm(w.d_vocab, generator=generator)[:VOCABULARY].to(tokens.device)
    own, others = unembed[:, tokens], unembed[:, seen]
    attended = [pattern[:sequences, :, 1:].mean(2) for pattern in run.patterns]
    among = torch.isin(tokens, seen).to(unembed)
    scale = (w.d_vocab - 1) / (len(seen) - among).clamp(min=1)

    def score(layer: int, W_O: Float[Tensor, "draw head d_head d_model"]) -> Float[Tensor, "sequence draw head"]:
        v = moved[layer]
        raised = torch.einsum("nhdm, mbp -> nbphd", W_O, own)
        right = torch.einsum("bphd, nbphd -> bnhp", v, raised).clamp(min=0)
        every = torch.einsum("bphd, nhdv -> bnhpv", v, W_O @ others).clamp_(min=0).sum(-1)
        wrong = (every - right * among[:, None, None]).clamp(min=0) * scale[:, None, None]
        return (attended[layer][:, None] * right / (right + wrong).clamp(min=1e-30)).sum(-1)

    values = [v[:sequences].repeat_interleave(w.n_heads // v.shape[2], dim=2) for v in run.values]
    moved = [v - _constant_value(model, w, layer) for layer, v in enumerate(values)]
    each, drawn = W_O.new_zeros(sequences, *W_O.shape[:2]), W_O.new_zeros(draws, *W_O.shape[:2])
    for layer in range(w.n_layers):
        each[:, layer] = score(layer, W_O[layer][None])[:, 0]
    size = max(1, BUDGET // max(tokens.numel() * w.n_heads * max(len(seen), w.W_O.shape[2]), W_O.numel()))
    for rows in torch.arange(draws).split(size):
        turned = _turned(W_O.mT, w.written, len(rows), generator).mT
        for layer in range(w.n_layers):
            drawn[rows, layer] = score(layer, turned[:, layer]).mean(0)
    return each, drawn


def _constant_value(model: Any, w: Weights, layer: int) -> Float[Tensor, "head d_head"]:
    """What a value holds whatever is attended to: b_V, and LayerNorm's bias through W_V (`folded` moves both)."""
    constant = w.b_V[layer]
    if normed(model):
        with torch.no_grad():
            bias = model.blocks[layer].ln1(model.W_E.new_zeros(1, 1, len(w.written))).to(constant)[0, 0]
        constant = constant + torch.einsum("m, hmd -> hd", bias, w.W_V[layer])
    return constant


def _unembedding(model: Any, w: Weights) -> Float[Tensor, "d_model d_vocab"]:
    """From what a head writes to logits about their mean, up to LayerNorm's positive scale."""
    unembed = w.W_U
    gain = getattr(getattr(model, "ln_final", None), "w", None)
    if normed(model) and w.basis == "raw" and isinstance(gain, Tensor):
        unembed = gain.detach().to(unembed)[:, None] * model.W_U.detach().to(unembed)
        if not model.cfg.normalization_type.startswith("RMS"):
            unembed = unembed - unembed.mean(0)
    return unembed - unembed.mean(1, keepdim=True)


def _silent(
    left: Float[Tensor, "layer head m d"], right: Float[Tensor, "layer head d n"]
) -> Bool[Tensor, "layer head"]:
    """Where the product is 0, up to the rounding of weights as large as the layer's largest."""
    size = left.norm(dim=(2, 3)).amax(1, keepdim=True) * right.norm(dim=(2, 3)).amax(1, keepdim=True)
    gram = (left.mT @ left).mT * (right @ right.mT)
    return gram.sum((2, 3)).clamp(min=0).sqrt() <= 1e-6 * size


def _scored(
    name: str, each: Tensor, drawn: Float[Tensor, "draw layer head"], null: str, dead: Tensor | None = None
) -> Scores:
    scores = each.mean(0)
    if not scores.numel():  # a model without layers
        band, none = torch.stack([scores, scores]), scores.bool()
        return Scores(name, scores, scores, scores, band, scores, ("head",), null, "behaviour", none, none)
    return from_draws(name, scores, drawn, parts=("head",), null=null, basis="behaviour", dead=dead)


def _still(scores: Scores, quiet: Bool[Tensor, "layer head"]) -> Scores:
    """The same, where `quiet` with a null that is the score itself: the draws there differ by rounding only."""
    held = {name: torch.where(quiet, scores.scores, getattr(scores, name)) for name in ("null_mean", "band")}
    sd, p = scores.null_sd.masked_fill(quiet, 0), scores.p.masked_fill(quiet, 1)
    return replace(scores, **held, null_sd=sd, p=p, dead=quiet)


def _previous_token(model: Any, w: Weights, seed: int) -> Float[Tensor, "layer head"]:
    length = default_length(model.cfg.n_ctx, w.d_vocab)
    tokens, _ = repeated_sequences(w.d_vocab, 12, length, torch.Generator().manual_seed(seed))
    patterns = clean_run(model, tokens, w).patterns
    if not patterns:
        return w.W_E.new_zeros(0, w.n_heads)
    return pattern_scores(torch.stack(patterns, 1), tokens)["previous_token"].mean(0)
