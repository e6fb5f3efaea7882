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

LOGITS_AT_ONCE = 2**18
"""1 MiB: a core's own cache."""


def next_token_loss(
    residual: Float[Tensor, "row d_model"],
    W_U: Float[Tensor, "d_model d_vocab"],
    b_U: Float[Tensor, "d_vocab"],
    targets: Int[Tensor, "row"],
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats of the words `targets`, given what the unembedding reads; differentiable once."""
    if residual.device.type != "cpu" or len(residual) * W_U.shape[1] <= LOGITS_AT_ONCE:
        return F.cross_entropy(torch.addmm(b_U, residual, W_U), targets)
    return _NextTokenLoss.apply(residual, W_U, b_U, targets)  # pyright: ignore[reportReturnType]


class _NextTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, W_U: Tensor, b_U: Tensor, targets: Tensor) -> Tensor:
        """∂loss/∂logits is softmax − one-hot, over the number of rows; so the gradients are ready with the loss."""
        rows = max(1, LOGITS_AT_ONCE // W_U.shape[1])
        losses, to_residual, to_W_U, to_b_U = [], [], 0, 0
        for x, target in zip(residual.split(rows), targets[:, None].split(rows), strict=True):
            log_probs = torch.addmm(b_U, x, W_U).log_softmax(dim=-1)
            losses.append(-log_probs.gather(1, target).sum())
            gradient = log_probs.exp_().scatter_add_(1, target, log_probs.new_full((1, 1), -1).expand_as(target))
            gradient /= len(targets)
            to_residual.append(gradient @ W_U.T)
            to_W_U += x.T @ gradient
            to_b_U += gradient.sum(dim=0)
        ctx.save_for_backward(torch.cat(to_residual), to_W_U, to_b_U)
        return torch.stack(losses).sum() / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return *(factor * gradient for gradient in ctx.saved_tensors), None
