"""The plane in which induction heads sit in one corner: what a head copies against what it matches.

Horizontal: OV positivity of the head, Σ Re λ / Σ |λ|: at the right it raises what it attends to. Vertical: QK
positivity. Of a pair, that of the K-composed matrix between tokens: at the top the reader looks for what an earlier
head moved that is equal to its own token. Source: *A Mathematical Framework for Transformer Circuits*, where all
induction heads lie at the top right.
"""

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.figures import style
from workbench.figures.heads import plus
from workbench.positivity import Point

SIDE, LEFT, BOTTOM = 520, 56, 52  # pixels
APART = 0.07  # of two names, in the plane
LABELLED = 8
"""Most points whose names stand beside them: those furthest into the corner."""


def positivity_figure(points: Sequence[Point], of: str = "K-composed pair") -> go.Figure:
    """Dots full where both numbers lie outside their nulls, hollow where one does not; the grey bars cross the middle:
    the mean of all bands. Customdata of a dot is the reader's name."""
    labels = _labels(points)
    data = [
        {
            "type": "scatter", "mode": "markers+text", "x": [p.ov for p in some], "y": [p.qk for p in some],
            "text": [labels.get(p.name, "") for p in some], "textposition": "middle left",
            "textfont": {"size": 13, "family": style.MONOSPACE}, "customdata": [p.reader for p in some],
            "marker": {"size": 10, "color": style.rgba(style.INDIGO, 0.75) if sure else "rgba(0,0,0,0)",
                       "line": {"width": 1.6, "color": style.rgba(style.INDIGO, 1) if sure else style.GREY}},
            "hovertext": [_hover(p) for p in some], "hovertemplate": "%{hovertext}<extra></extra>",
            "name": "outside both nulls" if sure else "inside a null", "selected": {"marker": {"opacity": 1}},
            "unselected": {"marker": {"opacity": 1}},
        }
        for sure in (True, False)
        if (some := [p for p in points if p.sure is sure])
    ]  # fmt: skip
    axis = {"range": [-1.08, 1.08], "showgrid": False, "zeroline": True, "zerolinecolor": style.FAINT, "ticks": "",
            "zerolinewidth": 1, "fixedrange": True, "tickvals": [-1, -0.5, 0, 0.5, 1],
            "ticktext": ["−1", "−0.5", "0", "0.5", "1"], "tickfont": {"size": 13}, "constrain": "domain"}  # fmt: skip
    layout = style.layout(
        SIDE + BOTTOM, margin={"l": LEFT, "r": 8, "t": 8, "b": BOTTOM}, shapes=_bands(points),
        xaxis=axis | {"constraintoward": "left",
                      "title": {"text": "OV positivity of the head (copies →)", "font": {"size": 13}}},
        yaxis=axis | {"scaleanchor": "x", "constraintoward": "top",
                      "title": {"text": f"QK positivity of the {of} (matches equal tokens →)", "font": {"size": 13}}},
    )  # fmt: skip
    return go.Figure(data, layout)


def _labels(points: Sequence[Point]) -> dict[str, str]:
    """Point → what stands beside it: names furthest into the corner first; of those that would cover each other one,
    and how many more."""
    near: dict[str, list[Point]] = {}
    first: list[Point] = []
    for point in sorted((p for p in points if p.sure), key=lambda p: -(p.ov + p.qk)):
        covering = next((f for f in first if abs(f.qk - point.qk) < APART and abs(f.ov - point.ov) < 6 * APART), None)
        if covering is not None:
            near[covering.name].append(point)
        elif len(first) < LABELLED:
            first.append(point)
            near[point.name] = []
    return {name: f"{name} and {len(others)} more" if others else name for name, others in near.items()}


def _bands(points: Sequence[Point]) -> list[dict]:
    if not points:
        return []
    x0, x1, y0, y1 = (
        sum(values) / len(points) for values in zip(*((*p.ov_band, *p.qk_band) for p in points), strict=True)
    )
    box = {"type": "rect", "fillcolor": "rgba(138, 143, 152, 0.14)", "line": {"width": 0}, "layer": "below"}
    return [box | {"x0": x0, "x1": x1, "y0": -1.08, "y1": 1.08}, box | {"x0": -1.08, "x1": 1.08, "y0": y0, "y1": y1}]


def _hover(p: Point) -> str:
    return (
        f"{p.name}<br>OV {plus(p.ov)}, by chance {plus(p.ov_band[0])} … {plus(p.ov_band[1])}"
        f"<br>QK {plus(p.qk)}, by chance {plus(p.qk_band[0])} … {plus(p.qk_band[1])}"
    )
