"""Eigenvalues of a head's circuit in the complex plane beside those of its null, and every head's positivity.

A dot's area is proportional to |λ|, since small eigenvalues weigh little in Σ Re λ / Σ |λ|. The grey haze is what the
same circuit has by chance. As in *A Mathematical Framework for Transformer Circuits*: dots at the right copy (OV) or
match (QK), dots at the left do the opposite.
"""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Complex
from torch import Tensor

from circuits.scores import Scores
from workbench.figures import style
from workbench.figures.heads import plus

SIDE, TOP, BOTTOM = 400, 30, 46  # pixels
ROW = 24
LARGEST = 26  # pixels: the dot of the largest eigenvalue
HAZE = 2_000  # dots of the null that are drawn


def spectrum_figure(
    values: Complex[Tensor, "d_head"],
    drawn: Complex[Tensor, "draw d_head"],
    scores: Scores,
    head: str,
    names: Sequence[str],
) -> go.Figure:
    """One head's eigenvalues, with `drawn` from its null, and the positivity of all heads with their bands.

    `scores`: [layer, head], as `circuits.turned.spectrum_scores`; `names`: of the heads, block by block. Both parts of
    an eigenvalue are divided by the largest |λ|.
    """
    real, imaginary = values.real.numpy(), values.imag.numpy()
    haze = drawn.flatten()[:HAZE]
    size, null_size = np.hypot(real, imaginary), haze.abs().numpy()
    top = float(size.max(initial=0)) or 1.0
    reach = max(1.0, float(np.quantile(null_size / top, 0.99)) if len(haze) else 1.0) * 1.08
    height = TOP + max(SIDE, ROW * len(names)) + BOTTOM
    data = [
        {"type": "scatter", "mode": "markers", "x": haze.real.numpy() / top, "y": haze.imag.numpy() / top,
         "hoverinfo": "skip", "name": "by chance",
         "marker": {"size": np.maximum(2, LARGEST / 2 * np.sqrt(np.minimum(null_size / top, 1))), "opacity": 0.16,
                    "color": style.GREY}},
        {"type": "scatter", "mode": "markers", "x": real / top, "y": imaginary / top, "name": f"head {head}",
         "marker": {"size": np.maximum(4, LARGEST * np.sqrt(size / top)), "color": style.rgba(style.INDIGO, 0.55),
                    "line": {"color": style.rgba(style.INDIGO, 1), "width": 1}},
         "customdata": [f"λ = {plus(a, 3)} {'+' if b >= 0 else '−'} {abs(b):.3f} i, |λ| {c:.3f}"
                        for a, b, c in zip(real, imaginary, size, strict=True)],
         "hovertemplate": "%{customdata}<extra></extra>"},
        *_positivities(scores, head, names),
    ]  # fmt: skip
    line = {"showgrid": False, "zeroline": True, "zerolinecolor": style.FAINT, "zerolinewidth": 1, "fixedrange": True,
            "tickfont": {"size": 13}, "ticks": "", "tickvals": [-1, 0, 1]}  # fmt: skip
    layout = style.layout(
        height, margin={"l": 40, "r": 8, "t": TOP, "b": BOTTOM},
        xaxis=line | {"domain": [0, 0.46], "range": [-reach, reach], "ticktext": ["−1", "0", "1"],
                      "constrain": "domain", "title": {"text": "Re λ / largest |λ|", "font": {"size": 13}}},
        yaxis=line | {"range": [-reach, reach], "scaleanchor": "x", "constrain": "domain", "constraintoward": "top",
                      "ticktext": ["−1", "0", "1"], "title": {"text": "Im λ / largest |λ|", "font": {"size": 13}}},
        xaxis2=line | {"domain": [0.6, 1], "range": [-1.05, 1.05], "anchor": "y2", "ticktext": ["−1", "0", "1"],
                       "title": {"text": "Σ Re λ / Σ |λ|", "font": {"size": 13}}},
        yaxis2={"anchor": "x2", "range": [max(len(names), SIDE / ROW) - 0.5, -0.5], "fixedrange": True, "ticks": "",
                "showgrid": False, "zeroline": False, "tickvals": list(range(len(names))),
                "ticktext": [f"<b>▸ {name}</b>" if name == head else name for name in names],
                "tickfont": {"family": style.MONOSPACE, "size": 13}},
        shapes=[{"type": "circle", "x0": -1, "x1": 1, "y0": -1, "y1": 1, "layer": "below",
                 "line": {"color": style.FAINT, "width": 1, "dash": "dot"}}],
    )  # fmt: skip
    return go.Figure(data, layout)


def _positivities(scores: Scores, head: str, names: Sequence[str]) -> list[dict]:
    values, low, high = (x.flatten().tolist() for x in (scores.scores, *scores.band))
    outside = scores.outside.flatten().tolist()
    at = {"type": "scatter", "xaxis": "x2", "yaxis": "y2"}
    bars = at | {
        "mode": "lines", "hoverinfo": "skip", "name": "null", "line": {"color": style.FAINT, "width": 8},
        "x": [v for a, b in zip(low, high, strict=True) for v in (a, b, None)],
        "y": [v for i in range(len(names)) for v in (i, i, None)],
    }  # fmt: skip
    color = [style.rgba(style.INDIGO, 1) if yes else "rgba(0,0,0,0)" for yes in outside]
    ring = [style.rgba(style.INDIGO, 1) if yes else style.GREY for yes in outside]
    dots = at | {
        "mode": "markers", "x": values, "y": list(range(len(names))), "name": "positivity", "customdata": list(names),
        "marker": {"size": 9, "color": color, "line": {"color": ring, "width": 1.6}},
        "hovertext": [f"head {n}: {plus(v)}, by chance {plus(a)} … {plus(b)}"
                      for n, v, a, b in zip(names, values, low, high, strict=True)],
        "hovertemplate": "%{hovertext}<extra></extra>", "selected": {"marker": {"opacity": 1}},
        "unselected": {"marker": {"opacity": 1}},
    }  # fmt: skip
    return [bars, dots]
