"""Positions that are computed, not learned: rotary, ALiBi, sinusoids."""

import torch
from jaxtyping import Float
from torch import Tensor


def rotate(x: Float[Tensor, "batch position head d_head"], base: float = 10_000.0) -> Tensor:
    """Rotary positions: turn the adjacent pair (2i, 2i + 1) at position p by the angle p · base^(−2i / d_head).

    Su et al. 2021, RoFormer, eq. 15; pairs are adjacent as there and in TransformerLens' native model.
    """
    position, width = x.shape[1], x.shape[3]
    frequency = base ** (-torch.arange(0, width, 2, device=x.device) / width)
    angle = (torch.arange(position, device=x.device)[:, None] * frequency)[:, None]  # [position, 1, d_head / 2]
    cos, sin = angle.cos().to(x), angle.sin().to(x)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def alibi(n_heads: int, length: int) -> Float[Tensor, "head destination source"]:
    """−slope · distance for every head; slopes 2^(−8/n), 2^(−16/n), … (Press et al. 2022, ALiBi, §3).

    For n not a power of two: the slopes of the next lower power, then every second one of the next higher, as there.
    """

    def slopes(n: int) -> list[float]:
        if n & (n - 1) == 0:
            return [2 ** (-8 * (i + 1) / n) for i in range(n)]
        low = 1 << (n.bit_length() - 1)
        return slopes(low) + slopes(2 * low)[0::2][: n - low]

    position = torch.arange(length)
    distance = (position[:, None] - position[None, :]).clamp(min=0)
    return -torch.tensor(slopes(n_heads))[:, None, None] * distance


def sinusoids(length: int, width: int) -> Float[Tensor, "position d_model"]:
    """sin and cos of p / 10000^(2i / d_model) in turn (Vaswani et al. 2017, §3.5)."""
    frequency = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None] * frequency
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :width]
