"""Every path through a frozen forward pass, written out one at a time: what `circuits` is checked against."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


class ByHand:
    """A frozen forward pass of ours, from the cached stream and patterns, one path of one prompt at a time."""

    def __init__(self, model: Any, tokens: Tensor):
        self.model, self.length = model, tokens.shape[1]
        self.layers, self.n_heads = len(model.blocks), model.config.n_heads
        with torch.no_grad():
            self.logits, self.cache = model.run_with_cache(tokens)

    def norm(self, x: Tensor, stream: str, module: Any) -> Tensor:
        if self.model.config.norm == "none":
            return x
        read = self.cache[stream][0]
        scale = (read.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return (x - x.mean(-1, keepdim=True)) / scale * module.w

    def head(self, x: Tensor, layer: int, head: int) -> Tensor:
        attention = self.model.blocks[layer].attn
        read = self.norm(x, f"blocks.{layer}.hook_resid_pre", getattr(self.model.blocks[layer], "ln1", None))
        pattern = self.cache[f"blocks.{layer}.attn.hook_pattern"][0, head]
        return pattern @ (read @ attention.W_V[head]) @ attention.W_O[head]

    def end(self, x: Tensor) -> Tensor:
        last = f"blocks.{self.layers - 1}.hook_resid_post"
        return self.norm(x, last, self.model.ln_final) @ self.model.W_U

    def bias(self, layer: int) -> Tensor:
        """What the attention of a layer adds whatever it reads."""
        block, total = self.model.blocks[layer], self.model.blocks[layer].attn.b_O
        for head in range(self.n_heads):
            shift = block.ln1.b if hasattr(block, "ln1") else torch.zeros(self.model.config.d_model).double()
            total = total + (shift @ block.attn.W_V[head] + block.attn.b_V[head]) @ block.attn.W_O[head]
        return total.expand(self.length, -1)

    def injected(self) -> Iterator[tuple[str, int, Tensor]]:
        """(source, the first layer that can read it, what is in the stream)."""
        yield "embed", 0, self.cache["hook_embed"][0]
        if "hook_pos_embed" in self.cache:
            yield "pos", 0, self.cache["hook_pos_embed"][0]
        for layer in range(self.layers):
            yield "bias", layer + 1, self.bias(layer)
            if self.model.config.d_mlp:
                yield f"{layer}.mlp", layer + 1, self.cache[f"blocks.{layer}.hook_mlp_out"][0]

    def terms(self) -> dict[str, Tensor]:
        """Name → logits [position, d_vocab], for all paths there are."""
        found: dict[str, Tensor] = {}
        for source, first, stream in self.injected():
            for order in range(self.layers + 1):
                for layers in combinations(range(first, self.layers), order):
                    for heads in product(range(self.n_heads), repeat=order):
                        x = stream
                        for layer, head in zip(layers, heads, strict=True):
                            x = self.head(x, layer, head)
                        path = [f"{layer}.{head}" for layer, head in zip(layers, heads, strict=True)]
                        name = " → ".join([source, *path])
                        found[name] = found.get(name, 0) + self.end(x)
        constant = self.model.unembed.b_U
        if self.model.config.norm == "pre":
            constant = constant + self.model.ln_final.b @ self.model.W_U
        return found | {"bias": found["bias"] + constant}
