"""Token sequences that repeat, controls that do not repeat at the same places, and what is measured on them.

A pattern's scores are sums of attention over places (destination, source), and so one matrix product for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from scipy.special import stdtr, stdtrit
from torch import Tensor

from circuits.attention import exclusive
from circuits.errors import BadModel, Undefined
from circuits.scores import LEVEL, Scores
from circuits.surface import Weights, positions

PLACES = ("previous_token", "current_token", "duplicate_token", "prefix_matching", "distance")
PURE = (*PLACES, "entropy", "entropy_share")
CONTROLLED = ("duplicate_token", "prefix_matching")
MEASURES = (*PURE, *(f"{name}_{part}" for name in CONTROLLED for part in ("raw", "control")))
BUDGET = 2**22  # numbers in one layer's patterns, in logits or in turned weights, at a time
SHORTEST_PERIOD = 3  # at shorter ones "the token before" and "the token that followed" are the same place


def repeated_sequences(
    d_vocab: int, sequences: int, length: int, generator: torch.Generator
) -> tuple[Int[Tensor, "sequence position"], Int[Tensor, "sequence position"]]:
    """Sequences that repeat with a period of their own each, and for each a control that does not.

    A sequence is one segment over and over, its tokens drawn without replacement. The period is drawn evenly from
    max(3, length / d_vocab) … min(d_vocab, length / 2): with one period for all, a head that looks a fixed distance
    back would pass for an induction head. Wherever a sequence has the same token at two places, its control has two
    different ones there. With a vocabulary of at least `length` the control is drawn without replacement, otherwise
    from left to right among the tokens allowed. Raises: Undefined where length or vocabulary are too small.
    """
    low, high = max(SHORTEST_PERIOD, -(-length // d_vocab)), min(d_vocab, length // 2)
    if low > high:
        raise Undefined(
            f"{length} tokens from a vocabulary of {d_vocab} cannot repeat and have a control that does not; expected "
            f"at least {2 * SHORTEST_PERIOD} tokens, a vocabulary of at least {SHORTEST_PERIOD}, length ≤ vocabulary²"
        )
    periods = torch.randint(low, high + 1, (sequences,), generator=generator).tolist()
    place = torch.arange(length)
    rows = [torch.randperm(d_vocab, generator=generator)[:period][place % period] for period in periods]
    controls = [_control(d_vocab, length, period, generator) for period in periods]
    return torch.stack(rows), torch.stack(controls)


def default_length(n_ctx: int, d_vocab: int) -> int:
    """64 tokens, fewer where the context is shorter or a small vocabulary leaves no choice of periods."""
    return min(n_ctx, 64, max(2 * SHORTEST_PERIOD, d_vocab**2 // 2))


def places(
    tokens: Int[Tensor, "sequence position"],
) -> Float[Tensor, "sequence measure destination source"]:
    """What the attention at each place counts for each of PLACES, so that the sum over all places is the score.

    Means over the destinations that have such a place; destination 0, which can only attend to itself, is left out.
    Raises: Undefined for one token, or a sequence without a repeated token.
    """
    length = tokens.shape[1]
    if length < 2:
        raise Undefined(f"sequences of {length} tokens; expected at least 2")
    earlier = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    alone = ~earlier.flatten(1).any(1)
    if bool(alone.any()):
        raise Undefined(f"no token of sequence {int(alone.nonzero()[0])} occurs twice; give sequences that repeat")
    followed = earlier.roll(1, dims=2)  # nothing wraps round: the last place is earlier than none
    place = torch.arange(length, device=tokens.device)
    back = (place[:, None] - place[None]).tril()
    itself = torch.diag(place > 0)
    previous, current, distance = (x.expand(len(tokens), -1, -1) for x in (back == 1, itself, back))
    counts = torch.stack([previous, current, earlier, followed, distance], dim=1).float()
    destinations = (counts > 0).any(3).sum(2)
    destinations[:, -1] = length - 1
    return counts / destinations[:, :, None, None]


def pattern_scores(
    patterns: Float[Tensor, "batch layer head destination source"], tokens: Int[Tensor, "batch position"]
) -> dict[str, Float[Tensor, "batch layer head"]]:
    """The pattern scores of each sequence, nothing subtracted and without a null.

    duplicate_token and prefix_matching are means over the destinations whose token occurred before. Raises: Undefined
    for a sequence of one token or without a repeated token; BadModel for patterns that are not finite.
    """
    if not bool(patterns.isfinite().all()):
        raise BadModel("patterns hold values that are not finite")
    found = _pure(rearrange(patterns, "b l h d s -> (b l) h d s"), places(tokens))
    return {name: found[..., i] for i, name in enumerate(PURE)}


def measured(
    pattern: Float[Tensor, "all head destination source"], where: Float[Tensor, "sequence place destination source"]
) -> Float[Tensor, "sequence draw head measure"]:
    """MEASURES of the first half of the batch, of which the second half is the control. Batch: (sequence, draw)."""
    half, at = len(pattern) // 2, [PLACES.index(name) for name in CONTROLLED]
    measures = _pure(pattern[:half], where)
    control = _counted(pattern[half:], where[:, at])
    raw = measures[..., at].clone()
    measures[..., at] -= control
    return torch.cat([measures, torch.stack([raw, control], dim=-1).flatten(-2)], dim=-1)


@dataclass(frozen=True)
class Run:
    """One clean forward pass, float32 or float64; one entry a layer."""

    tokens: Int[Tensor, "batch position"]
    inputs: list[Float[Tensor, "batch position d_model"]]
    """What queries are computed from."""
    queries: list[Float[Tensor, "batch position head d_head"]]
    keys: list[Float[Tensor, "batch position key_head d_head"]]
    """In the model's own precision; fewer heads where keys are grouped."""
    values: list[Float[Tensor, "batch position key_head d_head"]]
    patterns: list[Float[Tensor, "batch head destination source"]]


def clean_run(model: Any, tokens: Tensor, w: Weights) -> Run:
    """Raises: BadModel for patterns that are not finite."""
    tokens = tokens.to(w.W_E.device)
    layers = range(w.n_layers)
    wanted = ("hook_resid_pre", "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_pattern")
    names = [f"blocks.{layer}.{name}" for layer in layers for name in wanted]
    with exclusive(model), torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=names, return_type=None)
        streams, queries, keys, values, patterns = (
            [cache[f"blocks.{layer}.{name}"].detach() for layer in layers] for name in wanted
        )
        inputs = [model.blocks[i].ln1(x) if normed(model) else x for i, x in enumerate(streams)]
        if positions(model) == "shortformer":
            inputs = [x + model.W_pos[: tokens.shape[1]] for x in inputs]
    inputs, queries, values, patterns = ([x.to(w.W_E) for x in part] for part in (inputs, queries, values, patterns))
    for layer, pattern in enumerate(patterns):
        if not bool(pattern.isfinite().all()):
            raise BadModel(f"attention in layer {layer} is not finite; the model diverged in training")
    return Run(tokens, inputs, queries, keys, values, patterns)


def normed(model: Any) -> bool:
    """Whether a LayerNorm stands before each layer."""
    return getattr(model.cfg, "normalization_type", None) is not None


def in_context_learning_score(
    model: Any,
    tokens: Int[Tensor, "sequence position"],
    early: tuple[int, int] | None = None,
    late: tuple[int, int] | None = None,
) -> Scores:
    """How much lower the loss is late in a sequence than early: mean late − mean early, nats; negative = learns.

    A place i stands for the prediction of token i from the i tokens before it. `late` (start, stop) are the places
    T/2 … T and `early` T/16 … T/8, unless given: single positions, as in the 2022 paper, are too noisy in short
    contexts. The null is no difference; null_sd is the standard error over the sequences (at least two), band and p
    are Student's t. Raises: Undefined for one sequence or places outside 1 … T; BadModel for losses not finite.
    """
    n, length = tokens.shape
    early, late = early or (length // 16, length // 8), late or (length // 2, length)
    for name, (start, stop) in {"early": early, "late": late}.items():
        if not 1 <= start < stop <= length:
            raise Undefined(
                f"{name} = {start} … {stop} in sequences of {length} tokens; expected 1 ≤ start < stop ≤ {length} "
                "(the default needs at least 16 tokens)"
            )
    if n < 2:
        raise Undefined(f"{n} sequence has no standard error; give at least 2")
    losses = torch.cat([_losses(model, part) for part in tokens.split(max(1, BUDGET // (length * model.cfg.d_vocab)))])
    each = losses[:, late[0] - 1 : late[1] - 1].mean(1) - losses[:, early[0] - 1 : early[1] - 1].mean(1)
    score, error = each.mean(), each.std() / n**0.5
    half = error * float(stdtrit(n - 1, 1 - LEVEL / 2))
    p = 2 * float(stdtr(n - 1, -float(score.abs() / error))) if error > 0 else 1.0
    no = torch.tensor(False)
    return Scores(
        "in-context learning", score, torch.zeros_like(score), error, torch.stack([-half, half]), score.new_tensor(p),
        (), f"no difference; standard error over {n} sequences, Student's t", "behaviour", ~no, no,
    )  # fmt: skip


def predicted(tokens: Tensor, positions: slice | Sequence[int] | None) -> Int[Tensor, "chosen"]:
    """The positions chosen of those whose next token is predicted; all of them by default. Raises: ValueError."""
    if tokens.ndim != 2 or min(tokens.shape) < 2:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; expected at least two sequences of two tokens")
    every = torch.arange(tokens.shape[1] - 1)
    try:
        chosen = every if positions is None else every[positions if isinstance(positions, slice) else list(positions)]
    except IndexError:
        chosen = every[:0]
    if not len(chosen):
        raise ValueError(f"positions hold none of 0 … {len(every) - 1}, whose next token is predicted, or go beyond")
    return chosen


def _control(d_vocab: int, length: int, period: int, generator: torch.Generator) -> Int[Tensor, "position"]:
    if d_vocab >= length:
        return torch.randperm(d_vocab, generator=generator)[:length]
    tokens: list[int] = []
    for i in range(length):
        allowed = sorted(set(range(d_vocab)) - set(tokens[i % period :: period]))
        tokens.append(allowed[int(torch.randint(len(allowed), (), generator=generator))])
    return torch.tensor(tokens)


def _pure(
    pattern: Float[Tensor, "all head destination source"], where: Float[Tensor, "sequence place destination source"]
) -> Float[Tensor, "sequence draw head measure"]:
    entropy = -(pattern * pattern.clamp(min=1e-37).log()).sum(-1)[..., 1:]
    largest = torch.arange(2, pattern.shape[-1] + 1).to(pattern).log()
    entropies = torch.stack([entropy.mean(-1), (entropy / largest).mean(-1)], dim=-1)
    return torch.cat([_counted(pattern, where), rearrange(entropies, "(b n) h m -> b n h m", b=len(where))], dim=-1)


def _counted(
    pattern: Float[Tensor, "all head destination source"], where: Float[Tensor, "sequence place destination source"]
) -> Float[Tensor, "sequence draw head place"]:
    rows = rearrange(pattern, "(b n) h d s -> b (n h) (d s)", b=len(where))
    sums = rows @ rearrange(where.to(rows), "b m d s -> b (d s) m")
    return rearrange(sums, "b (n h) m -> b n h m", h=pattern.shape[1])


def _losses(model: Any, tokens: Int[Tensor, "sequence position"]) -> Float[Tensor, "sequence position-1"]:
    """Next-token losses in nats. Raises: BadModel where they are not finite."""
    with exclusive(model), torch.no_grad():
        logits = model(tokens.to(model.W_E.device))[:, :-1].float()
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(logits.device), reduction="none")
    if not bool(losses.isfinite().all()):
        raise BadModel("losses are not finite; the model diverged in training")
    return losses.view(len(tokens), -1)
