"""What a score would be if nothing were aligned: random rotations, drawn or in closed form.

A rotation keeps every spectrum, so that what is left of a score is alignment alone. Turning is always done inside the
subspace that is written (`circuits.surface`), not in directions that nothing uses.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.special import betainc, betaincinv, betaln
from torch import Tensor

from circuits.scores import LEVEL
from circuits.surface import Weights

FIXED = 1e15  # α + β of a beta that is one number
GRID = 512  # betas whose quantiles are computed one by one; of more, a grid


def random_frames(n: int, width: int, size: int, generator: torch.Generator) -> Float[Tensor, "n size width"]:
    """n uniformly random orthonormal frames: `size` rows in `width` dimensions."""
    q, r = torch.linalg.qr(torch.randn(n, width, size, generator=generator))
    return (q * r.diagonal(dim1=1, dim2=2).sign()[:, None]).mT  # without the signs, QR's own choice would show


def turned_writes(
    w: Weights, W_O: Float[Tensor, "d_head d_model"], draws: int, generator: torch.Generator
) -> Float[Tensor, "draw d_head d_model"]:
    """W_O R for random rotations R of the written subspace: the same spectrum, aligned with nothing."""
    _, r = torch.linalg.qr((W_O @ w.written).T)
    return r.T @ random_frames(draws, w.width, len(r), generator).to(W_O) @ w.written.T


@dataclass(frozen=True)
class Beta:
    """A beta distribution for each entry, by its mean and variance, in double precision.

    The squared overlap of two random directions in d dimensions is beta(½, (d − 1)/2); for flatter spectra it comes
    close to a normal distribution, and so does this.
    """

    alpha: Float[Tensor, "*axes"]
    beta: Float[Tensor, "*axes"]

    @classmethod
    def of(cls, mean: float, variance: Float[Tensor, "*axes"]) -> "Beta":
        """Where the variance is 0 (nothing is left to align), or the mean 1, it is that one number."""
        if mean >= 1:
            return cls(torch.full_like(variance.double(), FIXED), torch.zeros_like(variance.double()))
        size = (mean * (1 - mean) / variance.double().clamp(min=1e-18) - 1).clamp(min=1e-6)
        return cls(mean * size, (1 - mean) * size)

    def p(self, x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        """Two-sided."""
        below = self._scipy(betainc, x.double().clamp(0, 1))
        return (2 * torch.minimum(below, 1 - below)).masked_fill(self._fixed, 1)

    def band(self) -> Float[Tensor, "two *axes"]:
        """The middle 95 %. Of many betas with one mean, it is interpolated over their sizes, to .1 % of itself."""
        ends, mean = (LEVEL / 2, 1 - LEVEL / 2), self.mean
        if bool(self._fixed.any()):
            return torch.where(self._fixed, mean, self._varying.band())
        if mean.numel() <= GRID or bool((mean - mean.flatten()[0]).abs().max() > 1e-9):
            return torch.stack([self._scipy(betaincinv, torch.full_like(self.alpha, end)) for end in ends])
        size = (self.alpha + self.beta).log()
        grid = torch.linspace(size.min().item(), size.max().item(), GRID, dtype=torch.float64).to(size).exp()
        known = Beta(mean.flatten()[0] * grid, (1 - mean.flatten()[0]) * grid).band().cpu()
        at = size.cpu(), grid.log().cpu()
        return torch.stack([torch.as_tensor(np.interp(*at, end)).to(size) for end in known])

    @property
    def mean(self) -> Float[Tensor, "*axes"]:
        return self.alpha / (self.alpha + self.beta)

    @property
    def sd(self) -> Float[Tensor, "*axes"]:
        total = self.alpha + self.beta
        return (self.alpha * self.beta / (total**2 * (total + 1))).sqrt().masked_fill(self._fixed, 0)

    @property
    def root_mean(self) -> Float[Tensor, "*axes"]:
        """Mean of the square root."""
        if bool(self._fixed.any()):
            return torch.where(self._fixed, self.mean.sqrt(), self._varying.root_mean)
        a, b = self.alpha.cpu().numpy(), self.beta.cpu().numpy()
        return torch.as_tensor(betaln(a + 0.5, b) - betaln(a, b), device=self.alpha.device).exp()

    @property
    def root_sd(self) -> Float[Tensor, "*axes"]:
        """Standard deviation of the square root."""
        return (self.mean - self.root_mean**2).clamp(min=0).sqrt().masked_fill(self._fixed, 0)

    @property
    def _fixed(self) -> Bool[Tensor, "*axes"]:
        return self.alpha + self.beta >= FIXED

    @property
    def _varying(self) -> "Beta":
        """The same with something harmless where it is one number."""
        return Beta(self.alpha.masked_fill(self._fixed, 1), self.beta.masked_fill(self._fixed, 1))

    def _scipy(self, function, x: Tensor) -> Float[Tensor, "*axes"]:
        a, b = self.alpha.cpu().numpy(), self.beta.cpu().numpy()
        return torch.as_tensor(function(a, b, x.cpu().numpy()), device=self.alpha.device)
