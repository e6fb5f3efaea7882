"""Hooks of a cut: they come after everybody else's, survive `reset_hooks`, and go when the cut ends."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from circuits.errors import NoSuchPart, NoSurface, Undefined
from circuits.surface import Head, head_name


class Hook:
    """One hook on one hook point, which can be put on anew behind all others. Permanent: reset_hooks leaves it."""

    def __init__(self, model: Any, name: str, function: Callable[..., Any]):
        self.point, self.function, self.handle = model.hook_dict[name], function, None

    def put(self) -> None:
        self.remove()
        self.handle = self.point.add_hook(self.function, is_permanent=True)

    def remove(self) -> None:
        if self.handle is not None:
            self.handle.hook.remove()
            self.point.fwd_hooks = [other for other in self.point.fwd_hooks if other is not self.handle]


def coming_last(model: Any, layer: int, noting: Sequence[Hook]) -> Hook:
    """Puts these hooks behind all others whenever a forward pass reaches the layer: what they note is final."""

    def come_last(stream: torch.Tensor, hook: Any) -> None:
        for late in noting:
            late.put()

    return Hook(model, f"blocks.{layer}.hook_resid_pre", come_last)


@contextmanager
def on(hooks: Sequence[Hook]) -> Iterator[None]:
    """Inside, they are on the model; afterwards, and after an exception, none is."""
    try:
        for hook in hooks:
            hook.put()
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_heads(model: Any, heads: set[Head]) -> None:
    """Raises: NoSurface, NoSuchPart for heads that the model lacks, Undefined while dropout is active."""
    if not hasattr(model, "cfg") or not hasattr(model, "hook_dict"):
        raise NoSurface(f"{type(model).__name__} has no cfg and hooks; expected a model with TransformerLens' surface")
    layers, per_layer = model.cfg.n_layers, model.cfg.n_heads
    for layer, head in sorted(heads):
        if not (0 <= layer < layers and 0 <= head < per_layer):
            raise NoSuchPart(
                f"no head {head_name(layer, head)}: this model has {layers} layers of {per_layer} heads, from 0.0"
            )
    if any(isinstance(m, torch.nn.Dropout) and m.training and m.p > 0 for m in model.modules()):
        raise Undefined("a cut is undefined in a model in training mode with dropout (call eval())")


def check_own_weights(model: Any, layer: int, kind: str) -> None:
    """Raises: Undefined where several heads share this kind of weight ("Q", "K", "V")."""
    if len(getattr(model.blocks[layer].attn, f"W_{kind}")) != model.cfg.n_heads:
        raise Undefined("a cut is undefined in a model whose heads share keys and values")
