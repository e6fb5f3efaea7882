"""The training loss without the logits of a whole batch in memory.

On a text, logits are most of what a step reads and writes: a number for each word of the vocabulary at each position.
Here they are made, scored, turned into their own gradient and forgotten, some rows at a time, while they lie in the
processor's cache. The result is that of `F.cross_entropy(residual @ W_U + b_U, targets)` and its backward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from workbench.short import fusible

LOGITS_AT_ONCE = 2**18
"""1 MiB: a core's own cache."""


def next_token_loss(
    residual: Float[Tensor, "row d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
    b_U: Float[Tensor, "d_vocab"],
    targets: Int[Tensor, "row"],
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats of the words `targets`, given what the unembedding reads; differentiable once."""
    if not fusible(residual) or len(residual) * W_U.shape[1] <= LOGITS_AT_ONCE:
        return F.cross_entropy(torch.addmm(b_U, residual, W_U), targets)
    return _NextTokenLoss.apply(residual, W_U, b_U, targets)  # pyright: ignore[reportReturnType]


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, W_U: Tensor, b_U: Tensor, targets: Tensor) -> Tensor:
        """∂loss/∂logits is softmax − one-hot, over the number of rows; so the gradients are ready with the loss."""
        rows, n = max(1, LOGITS_AT_ONCE // W_U.shape[1]), len(targets)
        to_residual, to_W_U, to_b_U = torch.empty_like(residual), torch.zeros_like(W_U), torch.zeros_like(b_U)
        loss, minus_one, ones = residual.new_zeros(()), residual.new_tensor(-1), residual.new_ones(rows)
        parts = (x.split(rows) for x in (residual, targets[:, None], to_residual))
        for x, target, to_x in zip(*parts, strict=True):
            logits = torch.addmm(b_U, x, W_U)
            loss += (logits.amax(1) - logits.gather(1, target)[:, 0]).sum()
            gradient = logits.softmax(1)
            loss -= gradient.amax(1).log().sum()  # what the largest logit lacks to the sum of all
            gradient.scatter_add_(1, target, minus_one.expand_as(target))
            torch.addmm(to_x, gradient, W_U.T, beta=0, alpha=1 / n, out=to_x)
            to_W_U.addmm_(x.T, gradient, alpha=1 / n)
            to_b_U.addmv_(gradient.T, ones[: len(x)], alpha=1 / n)
        ctx.save_for_backward(to_residual, to_W_U, to_b_U)
        return loss / n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *(factor * gradient for gradient in ctx.saved_tensors), None
