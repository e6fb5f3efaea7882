"""Where each head looks: the attention patterns of one prompt, and what the model says next at every position.

A pattern is A = softmax(q kᵀ / √d_head + mask): row = destination, the position that attends; column = source, the
position attended to. Every row of every head sums to 1 over the sources up to the destination, and is 0 after it. So
the mean over a whole map is always 1 / position and says nothing; means over heads, or over rows of several prompts,
do say something.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from circuits.errors import BadModel
from circuits.surface import check_surface

_locks: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_lock_of_locks = threading.Lock()


@dataclass(frozen=True)
class AttentionMaps:
    """The attention of every head on one prompt."""

    patterns: Float[Tensor, "layer head destination source"]
    """Weights from 0 to 1, after the softmax; each row sums to 1, what lies after the destination is 0."""
    probabilities: Float[Tensor, "position d_vocab"]
    """Probability of every token as the next one, at each position; rows sum to 1."""

    @property
    def mean(self) -> Float[Tensor, "layer destination source"]:
        """The mean over the heads of each layer. Rows still sum to 1."""
        return self.patterns.mean(dim=1)

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
    if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] == 0:
        raise ValueError(f"tokens have shape {list(tokens.shape)}; expected one prompt, [1, position]")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"tokens are {tokens.dtype}; expected whole numbers")
    check_surface(model)
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    with exclusive(model), torch.no_grad():
        logits, cache = model.run_with_cache(tokens, names_filter=names)
    if not bool(logits.isfinite().all()):
        raise BadModel("the model's logits are not finite; it diverged in training, or its file is damaged")
    length = tokens.shape[1]
    patterns = [cache[name][0].detach() for name in names]
    return AttentionMaps(
        patterns=torch.stack(patterns) if patterns else logits.new_zeros(0, model.cfg.n_heads, length, length),
        probabilities=logits[0].detach().float().softmax(dim=-1),
    )


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
