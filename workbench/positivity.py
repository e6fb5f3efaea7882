"""Every head, or pair of heads, by what it copies and what it matches, each with its null."""

from dataclasses import dataclass
from typing import Any

from circuits.composition import composition_scores
from circuits.scores import LEAST_DRAWS, Scores
from circuits.spectra import composition_spectrum
from circuits.surface import head_name
from circuits.turned import spectrum_scores

PAIRS = 64
"""Most pairs that are looked at: those with the highest K-composition."""


@dataclass(frozen=True)
class Point:
    """A head, or a pair of heads, with both positivities and the middle 95 % of their nulls."""

    name: str
    """ "1.2", or "0.0 → 1.2"."""
    reader: str
    ov: float
    ov_band: tuple[float, float]
    qk: float
    qk_band: tuple[float, float]
    sure: bool
    """Both lie outside their null."""


def head_points(model: Any) -> list[Point]:
    """Every head: positivity of W_E W_OV W_U and of W_E W_QK W_Eᵀ. Raises: Undefined where folding is."""
    ov, qk = (spectrum_scores(model, which, draws=LEAST_DRAWS) for which in ("OV", "QK"))
    layers, heads = ov.scores.shape
    names = [head_name(layer, head) for layer in range(layers) for head in range(heads)]
    return [_point(name, name, ov[name], qk[name]) for name in names]


def pair_points(model: Any, pairs: int = PAIRS) -> list[Point]:
    """Every pair of a head and a later one (the `pairs` with the highest K-composition): OV positivity of the later
    head, and that of the K-composed matrix W_E W_QK (W_OV)ᵀ W_Eᵀ. None for a model of one layer.

    Raises: Undefined where folding is, or without a residual stream.
    """
    ov = spectrum_scores(model, "OV", draws=LEAST_DRAWS)
    points = []
    for writer, reader in composition_scores(model, "K").ranked()[:pairs]:
        qk = composition_spectrum(model, "K", writer, reader, draws=LEAST_DRAWS).positivity
        name = head_name(*reader)
        points.append(_point(f"{head_name(*writer)} → {name}", name, ov[name], qk))
    return points


def _point(name: str, reader: str, ov: Scores, qk: Scores) -> Point:
    ov_band, qk_band = ((float(low), float(high)) for low, high in (ov.band, qk.band))
    return Point(name, reader, ov.value, ov_band, qk.value, qk_band, bool(ov.outside) and bool(qk.outside))
