"""All-pairs composition against TransformerLens, and what a pair of heads costs as heads grow.

    python benchmarks/composition.py            the ratio for 12 × 12 heads of width 768 / 64, and the cost of a pair
    python benchmarks/composition.py --quick    the same with 6 × 6 heads of width 384 / 64

One thread; both sides in one run, so that only the ratio is quoted, and only from a machine that does nothing else.
TransformerLens' three kinds take about a minute and 10 GB, much of it spent on getting that memory.
"""

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformer_lens import FactoredMatrix
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge.sources import boot_native

from circuits.composition import KINDS, compositions

torch.set_num_threads(1)
torch.set_grad_enabled(False)


def seconds(function: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def against_transformer_lens(layers: int, d_model: int) -> None:
    heads = d_model // 64
    bridge = boot_native(TransformerBridgeConfig(
        n_layers=layers, n_heads=heads, d_model=d_model, d_head=64, n_ctx=8, d_vocab=100, attn_only=True,
        act_fn="gelu", normalization_type=None, architecture="TransformerLensNative",
    )).eval()  # fmt: skip
    ours, found = min((seconds(lambda: compositions(bridge, fold=False)) for _ in range(3)), key=lambda x: x[0])
    theirs, expected = seconds(lambda: {kind: bridge.all_composition_scores(kind).scores for kind in KINDS})
    apart = max((found[kind].scores - expected[kind]).abs().max().item() for kind in KINDS)
    print(f"{layers} × {heads} heads, {d_model}/64, Q, K and V of all pairs")
    print(f"  ours, with nulls {ours:.2f} s, TransformerLens, scores only {theirs:.1f} s: {theirs / ours:.0f} × faster")
    print(f"  largest difference of a score {apart:.0e}")


def cost_of_a_pair(d_model: int, d_head: int) -> None:
    for layers, heads in ((2, 8), (8, 8), (12, 12), (24, 24)):
        shape = (layers, heads, d_model, d_head)
        W_Q, W_K, W_V = (torch.randn(shape) / d_model**0.5 for _ in range(3))
        W_O = torch.randn(layers, heads, d_head, d_model) / d_head**0.5
        model = SimpleNamespace(
            cfg=SimpleNamespace(attn_only=True, positional_embedding_type="none", normalization_type=None),
            W_E=torch.randn(2 * d_model, d_model), W_U=torch.randn(d_model, 2 * d_model), W_Q=W_Q, W_K=W_K, W_V=W_V,
            W_O=W_O, QK=FactoredMatrix(W_Q, W_K.mT), OV=FactoredMatrix(W_V, W_O),
        )  # fmt: skip
        spent = min(seconds(lambda model=model: compositions(model, fold=False))[0] for _ in range(3))
        pairs = layers * (layers - 1) // 2 * heads**2
        print(f"{layers * heads:4d} heads, {d_model}/{d_head}: {spent:6.2f} s for {pairs:6d} pairs × 3 kinds, "
              f"{spent / pairs * 1e6:7.1f} µs a pair")  # fmt: skip


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    against_transformer_lens(*((6, 384) if quick else (12, 768)))
    cost_of_a_pair(*((64, 16) if quick else (256, 32)))
