"""Small models to cut, and their forward pass without some paths, written out: what a cut is checked against."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from support import gpt2_bridge, native_bridge
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

from circuits.cuts import Path
from workbench.positions import alibi, rotate
from workbench.recipes import ModelConfig
from workbench.transformer import LayerNorm, Transformer

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 6, 5, 3, 5, 1], [0, 0, 2, 6, 4, 4]])
PATHS = [Path("0.1", "K", "1.0"), Path("0.0", "Q", "2.1"), Path("0.1", "Q", "2.1"), Path("1.0", "V", "2.1")]
PATHS += [Path("0.0", "K", "2.0"), Path("1.1", "K", "2.0"), Path("0.0", "V", "1.1")]
SIZES: dict[str, Any] = {
    "n_layers": 3, "n_heads": 2, "d_model": 12, "d_head": 4, "d_mlp": 7, "n_ctx": 6, "d_vocab": 7
}  # fmt: skip


def build(**options: Any) -> Transformer:
    """Three layers of two heads in float64, every weight and bias random and large enough to matter."""
    model = Transformer(ModelConfig(**SIZES | options)).eval().double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.4, generator=generator)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            nn.init.normal_(module.w, 1, 0.3, generator=generator)
    return model


def native(**options: Any) -> TransformerBridge:
    return native_bridge(**SIZES | options).double()


def gpt2() -> TransformerBridge:
    return gpt2_bridge(n_layers=3, n_heads=3, d_model=12, n_ctx=6, d_vocab=7)


def n_hooks(model: Any) -> int:
    points = [module for module in model.modules() if hasattr(module, "fwd_hooks")]
    return sum(len(point.fwd_hooks) + len(point._forward_hooks) for point in points)


def by_hand(model: Transformer, tokens: Tensor, paths: list[Path], replacement: str) -> Tensor:
    """Logits of the model with these paths cut, from its weights."""
    config: Any = model.config

    def read(x: Tensor, norm: Any) -> Tensor:
        if config.norm == "none":
            return x
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.w + norm.b

    x, written, blocks = model.W_E[tokens], {}, cast(Any, model.blocks)
    positions = cast(Any, model).pos_embed.W_pos[: tokens.shape[1]] if hasattr(model, "pos_embed") else 0
    if config.positions == "learned":
        x = x + positions
    for layer, block in enumerate(blocks):
        attention, parts, out = block.attn, {}, torch.zeros_like(x)
        for kind in "QKV":
            heads = []
            for head in range(config.n_heads):
                stream = x
                for path in paths:
                    if (path.reader, path.kind) == ((layer, head), kind):
                        old = written[path.writer]
                        stream = stream - old + (old.mean(0) if replacement == "mean" else 0)
                stream = read(stream, getattr(block, "ln1", None))
                if config.positions == "shortformer" and kind != "V":
                    stream = stream + positions
                heads.append(stream @ getattr(attention, f"W_{kind}")[head] + getattr(attention, f"b_{kind}")[head])
            parts[kind] = torch.stack(heads, dim=2)
        if config.positions == "rotary":
            parts["Q"], parts["K"] = rotate(parts["Q"]), rotate(parts["K"])
        for head in range(config.n_heads):
            q, k, v = (parts[kind][:, :, head] for kind in "QKV")
            scores = q @ k.mT / math.sqrt(config.d_head)
            if config.positions == "alibi":
                scores = scores + alibi(config.n_heads, tokens.shape[1])[head]
            scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -math.inf)
            written[layer, head] = scores.softmax(-1) @ v @ attention.W_O[head]
            out = out + written[layer, head]
        x = x + out + attention.b_O
        if config.d_mlp:
            hidden = F.gelu(read(x, getattr(block, "ln2", None)) @ block.mlp.W_in + block.mlp.b_in)
            x = x + hidden @ block.mlp.W_out + block.mlp.b_out
    return read(x, model.ln_final) @ model.W_U
