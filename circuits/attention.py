"""Where each head looks, and what it moves from there: maps of one prompt, and their means over a task.

A pattern is A = softmax(q kᵀ / √d_head + mask): row = destination, the position that attends; column = source, the
position attended to. Every row of every head sums to 1 over the sources up to the destination, and is 0 after it. So
the mean over a whole map is always 1 / position and says nothing; means over heads, or over rows of several prompts,
do say something.

A weight says how much is read, not what. Two measures weigh it by that, with v W_O what a head would write if it
looked at one source alone (value bias included):

- moved: A ‖v W_O‖, the norm of what goes from source to destination (Kobayashi et al. 2020, *Attention is not only a
  weight*). Attention that rests on a source with nothing to say is small here.
- logit: A v W_O through the final LayerNorm, its scale frozen, onto a direction of W_U: what goes straight to a logit
  of the destination (*A Mathematical Framework for Transformer Circuits*, 2021). Over heads and sources they add up to
  what attention adds to that logit directly; what later layers make of it is not in them. Both are descriptions of
  this run, and neither is an effect: for that, `head_effects` takes a head away.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from circuits.errors import BadModel, NoSuchPart
from circuits.examples import clustered_error
from circuits.nulls import turned_writes
from circuits.scores import LEAST_DRAWS, Scores, from_draws
from circuits.surface import check_surface, read

_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_lock_of_locks = threading.Lock()

Measure = Literal["attention", "moved", "logit"]
OTHER = "other words"
BUDGET = 2**22  # numbers in one layer's patterns at a time
NULL_EFFECT = "what the head's cut changes, turned at random in the space that is written, size kept; drawn"


@dataclass(frozen=True)
class AttentionMaps:
    """The attention of every head on one prompt, or one of the other two measures in its place."""

    patterns: Float[Tensor, "layer head destination source"]
    """Attention: weights from 0 to 1, after the softmax; each row sums to 1. Moved: norms, 0 or more. Logit: signed,
    in logits. What lies after the destination is 0."""
    probabilities: Float[Tensor, "position d_vocab"]
    """Probability of every token as the next one, at each position; rows sum to 1."""
    measure: Measure = "attention"

    @property
    def mean(self) -> Float[Tensor, "layer destination source"]:
        """The mean over the heads of each layer. Rows of attention still sum to 1."""
        return self.patterns.mean(dim=1)

    @property
    def together(self) -> Float[Tensor, "layer destination source"]:
        """The heads of each layer in one map: their mean; for contributions to a logit, which add up, their sum."""
        return self.patterns.sum(dim=1) if self.measure == "logit" else self.mean

    @property
    def n_layers(self) -> int:
        return self.patterns.shape[0]

    @property
    def n_heads(self) -> int:
        """Heads of a layer."""
        return self.patterns.shape[1]


def attention_maps(model: Any, tokens: Tensor) -> AttentionMaps:
    """Every head's pattern and every position's next-token probabilities, by one forward pass.

    `model`: any with TransformerLens' surface (`cfg`, `run_with_cache`, `blocks.N.attn.hook_pattern`). `tokens`:
    whole numbers [1, position]. A model without layers gives patterns [0, head, position, position]. Threads that
    share a model take turns. Raises: ValueError unless tokens are one prompt of at least one token.
    """
    return _run(model, tokens)[0]


def moved_maps(model: Any, tokens: Tensor) -> AttentionMaps:
    """As `attention_maps`, each weight times the norm of what the head would write from that source: A ‖v W_O‖.

    In the units of the residual stream, value biases included; source: Kobayashi et al. 2020. Raises: ValueError as
    `attention_maps`.
    """
    maps, values = _run(model, tokens)
    W_O = read(model, inside=False).W_O
    norms = [(values[layer] @ W_O[layer]).norm(dim=-1) for layer in range(maps.n_layers)]  # [head, source] each
    weighted = [maps.patterns[layer] * norm[:, None] for layer, norm in enumerate(norms)]
    return AttentionMaps(_stacked(weighted, maps), maps.probabilities, "moved")


def contribution_maps(model: Any, tokens: Tensor, answer: int, foil: int | None = None) -> AttentionMaps:
    """As `attention_maps`, each weight times what one unit of it adds to the destination's logit of `answer`, minus
    that of `foil`; without a foil minus the mean over all tokens, since adding one number to every logit changes
    nothing. In logits; exact along the direct path, the final LayerNorm's scale frozen.

    Raises: ValueError as `attention_maps`; NoSuchPart for a token; Undefined where logits are no sum of paths.
    """
    from circuits.frozen import freeze  # which imports this module

    maps, values = _run(model, tokens)
    frozen = freeze(model, tokens)
    W_O, norm = frozen.weights.W_O, frozen.norms[-1]
    _check_tokens(frozen.weights.d_vocab, answer, foil)
    column = norm.gain * _logit(frozen.weights.W_U, answer, foil)
    if norm.centring:
        column = column - column.mean()
    scale = norm.scale[0]  # [destination, 1]
    worth = [values[layer] @ (W_O[layer] @ column)[..., None] for layer in range(maps.n_layers)]  # [head, source, 1]
    weighted = [maps.patterns[layer] * each.mT / scale for layer, each in enumerate(worth)]
    return AttentionMaps(_stacked(weighted, maps), maps.probabilities, "logit")


def head_effects(
    model: Any,
    tokens: Tensor,
    position: int,
    answer: int,
    foil: int | None = None,
    *,
    reference: Int[Tensor, "example length"] | None = None,
    draws: int = LEAST_DRAWS,
    seed: int = 0,
) -> Scores:
    """What each head is worth to one prediction: the logit of `answer` (minus that of `foil`, or minus the mean over
    all tokens) at `position`, with the head and without it. `Scores` [layer, head], in logits; positive: it helps.

    Without it: at every position, in place of what the head writes, the mean of what it writes there on `reference`
    (prompts at least as long), or nothing if there is none. All that comes after is computed anew. The null turns the
    change that this makes at random in the space that is written (one rotation for all positions, size kept): what
    the prediction loses when it is hit as hard in a direction of no meaning. One prompt: another may say otherwise,
    and a head whose work another takes over shows little. The cost is that of heads × (draws + 1) forward passes.
    Raises: ValueError as `attention_maps` or for a shorter reference; NoSuchPart for position or token; Undefined for
    fewer than 39 draws.
    """
    _one_prompt(tokens)
    length, w = tokens.shape[1], read(model, inside=False)
    written = read(model)
    if not -length <= position < length:
        raise NoSuchPart(f"no position {position}: the prompt has {length} tokens, from 0")
    if reference is not None and reference.shape[1] < length:
        raise ValueError(f"reference prompts of {reference.shape[1]} tokens; expected at least {length}")
    _check_tokens(w.d_vocab, answer, foil)
    generator = torch.Generator().manual_seed(seed)
    names = [f"blocks.{layer}.attn.hook_z" for layer in range(w.n_layers)]
    found = w.W_E.new_zeros(draws + 1, w.n_layers, w.n_heads)
    dead = torch.zeros(w.n_layers, w.n_heads, dtype=torch.bool)
    size = max(1, BUDGET // (w.n_heads * length**2))
    with exclusive(model), torch.no_grad():
        logits, cache = model.run_with_cache(tokens, names_filter=names)
        clean = _logit(logits[:, position], answer, foil)
        usual = None if reference is None else model.run_with_cache(reference[:, :length], names_filter=names)[1]
        for layer, name in enumerate(names):
            z = cache[name][0].to(w.W_O)
            change = (-z if usual is None else usual[name].to(z).mean(0) - z).transpose(0, 1)  # [head, position, d]
            for head in range(w.n_heads):
                W_O = w.W_O[layer, head]
                dead[layer, head] = not bool((change[head] @ W_O).any())
                every = torch.cat([W_O[None], turned_writes(written, W_O, draws, generator)])
                for rows in torch.arange(draws + 1).split(size):
                    added = change[head] @ every[rows]

                    def add(out: Tensor, hook: Any, added: Tensor = added) -> Tensor:
                        return out + added.to(out)

                    hooks = [(f"blocks.{layer}.hook_attn_out", add)]
                    cut = model.run_with_hooks(tokens.expand(len(rows), -1), fwd_hooks=hooks)
                    found[rows, layer, head] = clean - _logit(cut[:, position], answer, foil)
    measure = f"effect on the logit of {answer}" + ("" if foil is None else f" − {foil}")
    return from_draws(measure, found[0], found[1:], parts=("head",), null=NULL_EFFECT, basis="behaviour", dead=dead)


@dataclass(frozen=True)
class RoleAttention:
    """How much named positions look at each other over a task, example by example."""

    roles: tuple[str, ...]
    """Named destinations, first to last. Sources are the same and then `OTHER`: all remaining positions together."""
    positions: tuple[int, ...]
    attention: Float[Tensor, "example layer head role source"]
    """Sums to 1 over sources. 0 for sources after the destination."""
    cluster: Int[Tensor, "example"]

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.roles, OTHER)

    @property
    def even(self) -> Float[Tensor, "role source"]:
        """What attention gives that is spread evenly over the positions up to the destination."""
        seen = torch.tensor([[s <= d for s in self.positions] for d in self.positions]).float()
        length = torch.tensor(self.positions)[:, None] + 1
        return torch.cat([seen, length - seen.sum(1, keepdim=True)], dim=1) / length

    def mean(
        self, layer: int, head: int | None = None
    ) -> tuple[Float[Tensor, "role source"], Float[Tensor, "role source"]]:
        """Mean over the examples, and its standard error, clustered; of one head, or of the mean over a layer's."""
        values = self.attention[:, layer].mean(1) if head is None else self.attention[:, layer, head]
        error = clustered_error(values.flatten(1).T.double(), self.cluster).float()
        return values.mean(0), error.unflatten(0, values.shape[1:])


def role_attention(
    model: Any,
    tokens: Int[Tensor, "example position"],
    roles: Mapping[str, int],
    clusters: Sequence[str] = (),
) -> RoleAttention:
    """The attention between named positions (name → position) on many prompts. Names of one position are joined.

    `clusters`: of each example, for the standard error; by default each is its own. Raises: NoSuchPart without roles
    or for one that is no position here; ValueError without examples.
    """
    check_surface(model)
    n, length = tokens.shape
    if not n or not length:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; expected at least one example of one token")
    if not roles or not all(0 <= position < length for position in roles.values()):
        raise NoSuchPart(f"roles are {dict(roles)}; expected at least one, each at one of 0 … {length - 1}")
    at = sorted(set(roles.values()))
    names = tuple(" = ".join(name for name, position in roles.items() if position == p) for p in at)
    layers, heads = model.cfg.n_layers, model.cfg.n_heads
    wanted = [f"blocks.{layer}.attn.hook_pattern" for layer in range(layers)]
    found = torch.zeros(n, layers, heads, len(at), len(at) + 1)
    for rows in torch.arange(n).split(max(1, BUDGET // (heads * length**2))):
        with exclusive(model), torch.no_grad():
            _, cache = model.run_with_cache(tokens[rows], names_filter=wanted, return_type=None)
        for layer, name in enumerate(wanted):
            seen = cache[name][:, :, at].detach().float().cpu()  # [example, head, role, source]
            found[rows, layer, :, :, :-1] = seen[..., at]
            found[rows, layer, :, :, -1] = seen.sum(-1) - seen[..., at].sum(-1)
    number = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    cluster = torch.tensor([number[name] for name in clusters]) if clusters else torch.arange(n)
    return RoleAttention(names, tuple(at), found, cluster)


@contextmanager
def exclusive(model: Any) -> Iterator[None]:
    """One thread at a time in this model.

    Hooks belong to the model, not to the thread that put them there: while one browser session's hooks are on a
    shared model, another's forward pass would run through them. Whoever hooks a shared model does it inside this.
    The same thread may enter again.
    """
    with _lock_of_locks:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield


def _run(model: Any, tokens: Tensor) -> tuple[AttentionMaps, list[Float[Tensor, "head source d_head"]]]:
    """Patterns and probabilities, and each layer's values, those of grouped heads repeated."""
    _one_prompt(tokens)
    check_surface(model)
    layers, heads = range(model.cfg.n_layers), model.cfg.n_heads
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in layers]
    values = [f"blocks.{layer}.attn.hook_v" for layer in layers]
    with exclusive(model), torch.no_grad():
        logits, cache = model.run_with_cache(tokens, names_filter=[*names, *values])
    if not bool(logits.isfinite().all()):
        raise BadModel("the model's logits are not finite; it diverged in training, or its file is damaged")
    length = tokens.shape[1]
    patterns = [cache[name][0].detach() for name in names]
    maps = AttentionMaps(
        patterns=torch.stack(patterns) if patterns else logits.new_zeros(0, heads, length, length),
        probabilities=logits[0].detach().float().softmax(dim=-1),
    )
    moved = [cache[name][0].detach().float().transpose(0, 1) for name in values]
    return maps, [value.repeat_interleave(heads // len(value), dim=0) for value in moved]


def _one_prompt(tokens: Tensor) -> None:
    if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] == 0:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; expected one prompt, [1, position]")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens are {tokens.dtype}; expected whole numbers")


def _check_tokens(d_vocab: int, answer: int, foil: int | None) -> None:
    for token in (answer, answer if foil is None else foil):
        if not 0 <= token < d_vocab:
            raise NoSuchPart(f"no token {token}: the vocabulary has {d_vocab}, from 0")


def _logit(logits: Float[Tensor, "*axes d_vocab"], answer: int, foil: int | None) -> Float[Tensor, "*axes"]:
    """The answer's logit minus the foil's, or minus the mean of all."""
    logits = logits.float()
    return logits[..., answer] - (logits.mean(-1) if foil is None else logits[..., foil])


def _stacked(
    layers: list[Float[Tensor, "head destination source"]], maps: AttentionMaps
) -> Float[Tensor, "layer head destination source"]:
    return torch.stack(layers) if layers else maps.patterns
