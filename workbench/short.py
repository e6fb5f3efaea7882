"""Causal attention over a few words as one operation, its gradient written out: for training, where nobody looks.

For twenty words the products of a head are so small that what surrounds them costs as much: packing the heads' weights,
taking the result apart, and both again for the gradient. Here that is done once each way, and the pattern is kept for
the gradient. Torch's fused attention makes it anew, which is quicker where it is large.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

FEW = 32
"""Words up to which this is quicker (with a batch of 64); at 64 it no longer is."""


def fusible(x: Tensor) -> bool:
    """Whether what is done to `x` may be one operation with its gradient written out: such are for the processor, and
    torch's transforms and autocast cannot enter them."""
    transformed = torch._C._are_functorch_transforms_active() or torch.is_autocast_enabled("cpu")
    return x.device.type == "cpu" and not transformed


def attend_to_few(
    x: Float[Tensor, "batch position d_model"],
    weights: Sequence[Float[Tensor, "head d_model d_head"]],
    biases: Sequence[Float[Tensor, "head d_head"]],
    scale: float,
) -> Float[Tensor, "batch position head d_head"]:
    """z: softmax(q kᵀ · scale) v over the positions up to each one's own; differentiable once.

    `weights` and `biases`: those of queries, keys and values.
    """
    return _Attend.apply(x, *weights, *biases, scale)  # pyright: ignore[reportReturnType]


def packed(
    weights: Sequence[Float[Tensor, "head d_model d_head"]], biases: Sequence[Float[Tensor, "head d_head"]]
) -> tuple[Float[Tensor, "d_model columns"], Float[Tensor, "columns"]]:
    """The matrices of all heads' queries, keys and values side by side, so that one product makes them; biases too."""
    W = torch.cat(tuple(weights))
    return W.transpose(0, 1).reshape(W.shape[1], -1), torch.cat(tuple(biases)).flatten()


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, b_Q: Tensor, b_K: Tensor, b_V: Tensor, scale: float
    ) -> Tensor:
        (batch, n, m), (h, _, d) = x.shape, W_V.shape
        W, b = packed((W_Q, W_K, W_V), (b_Q, b_K, b_V))
        rows = x.reshape(batch * n, m)
        qkv = torch.addmm(b, rows, W).view(batch, n, 3, h, d).permute(2, 0, 3, 1, 4).reshape(3, batch * h, n, d)
        q, k, v = qkv
        later = q.new_full((n, n), -torch.inf).tril(-1)
        # [batch·head, source, destination]: over the last axis torch's softmax takes twice as long
        pattern = torch.baddbmm(later, k, q.transpose(1, 2), alpha=scale).softmax(1)
        ctx.save_for_backward(rows, W, qkv, pattern)
        ctx.scale = scale
        return torch.bmm(pattern.transpose(1, 2), v).view(batch, h, n, d).transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, W, qkv, pattern = ctx.saved_tensors
        (batch, n, h, d), m = dz.shape, len(W)
        q, k, v = qkv
        dz = dz.transpose(1, 2).reshape(batch * h, n, d)
        dqkv = torch.empty_like(qkv)
        dq, dk, dv = dqkv
        torch.bmm(pattern, dz, out=dv)
        dpattern = torch.bmm(v, dz.transpose(1, 2))
        dscores = torch.ops.aten._softmax_backward_data(dpattern, pattern, 1, pattern.dtype)
        torch.baddbmm(dq, dscores.transpose(1, 2), k, beta=0, alpha=ctx.scale, out=dq)
        torch.baddbmm(dk, dscores, q, beta=0, alpha=ctx.scale, out=dk)
        by_row = dqkv.view(3, batch, h, n, d).permute(1, 3, 0, 2, 4).reshape(batch * n, 3 * h * d)
        dx = (by_row @ W.T).view(batch, n, m)
        dW = (rows.T @ by_row).view(m, 3, h, d).permute(1, 2, 0, 3)
        db = (by_row.new_ones(1, batch * n) @ by_row).view(3, h, d)  # a product is quicker than a sum of so few columns
        return dx, *dW, *db, None
