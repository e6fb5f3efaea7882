"""What a head moves between two answers, arrow after arrow."""

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

from circuits.steps import AnswerPlane
from workbench.figures import style

MOST = 12
"""Arrows."""


def plane_figure(plane: AnswerPlane, tokens: Sequence[str], answer: str, foil: str) -> go.Figure:
    """What each source moves in the plane of two answers, arrow after arrow, from 0 to all of Δ.

    Horizontal: logits of answer − foil that go straight to the output; vertical: the rest of the plane, in the same
    unit. Two rays point to the answers. Sources come in the order of their size; those of less than a tenth of the
    largest are drawn as one arrow.
    """
    sizes = plane.sources.norm(dim=-1)
    order = [i for i in sizes.argsort(descending=True, stable=True).tolist() if sizes[i] > 0]
    large = [i for i in order if float(sizes[i]) >= 0.1 * float(sizes.max())][:MOST]
    moves = [(f"{i} ‘{style.visible(str(tokens[i]))}’", plane.sources[i].tolist()) for i in large]
    if len(order) > len(large):
        rest = plane.sources[[i for i in order if i not in large]].sum(0).tolist()
        moves.append((f"{len(order) - len(large)} others", rest))
    points, ends = [(0.0, 0.0)], []
    for name, (x, y) in moves:
        points.append((points[-1][0] + x, points[-1][1] + y))
        ends.append((name, x, y))
    reach = 0.8 * max([1e-6, *(math.hypot(*point) for point in points)])
    rays: list[tuple[str, list[float]]] = [(answer, plane.answer.tolist()), (foil, plane.foil.tolist())]
    arrows = [_arrow(a, b, style.rgba(style.INDIGO, 0.85), 2) for a, b in pairwise(points) if a != b]
    if len(moves) > 1:
        arrows.append(_arrow(points[0], points[-1], style.GREY, 1.5))
    names = [
        {
            "x": reach * x, "y": reach * y, "text": f"→ {html.escape(style.visible(word), quote=False)}",
            "showarrow": False, "font": {"size": 13, "family": style.MONOSPACE}, "xref": "x", "yref": "y",
            "xanchor": "left" if x >= 0 else "right", "yanchor": "bottom" if y >= 0 else "top",
        }
        for word, (x, y) in rays
    ]  # fmt: skip
    data: list[dict[str, Any]] = [
        {
            "type": "scatter", "x": [0, reach * x], "y": [0, reach * y], "mode": "lines", "hoverinfo": "skip",
            "line": {"color": style.GREY, "width": 1, "dash": "dot"}, "name": word,
        }
        for word, (x, y) in rays
    ]  # fmt: skip
    longest = max((math.hypot(x, y) for _, x, y in ends), default=0)
    middle = [((a[0] + b[0]) / 2, (a[1] + b[1]) / 2) for a, b in pairwise(points)]
    labels = [html.escape(n, quote=False) if math.hypot(x, y) > 0.2 * longest else "" for n, x, y in ends]
    beside = ["top center" if abs(x) > abs(y) else f"middle {'left' if at < 0 else 'right'}"
              for (_, x, y), (at, _) in zip(ends, middle, strict=True)]  # fmt: skip
    data.append({
        "type": "scatter", "mode": "markers+text", "x": [x for x, _ in middle], "y": [y for _, y in middle],
        "marker": {"size": 12, "opacity": 0}, "text": labels, "textposition": beside, "name": "sources",
        "textfont": {"size": 13, "family": style.MONOSPACE},
        "hovertext": [f"{html.escape(n, quote=False)}: {style.signed(x)} answer − foil" for n, x, _ in ends],
        "hovertemplate": "%{hovertext}<extra></extra>",
    })  # fmt: skip
    total = points[-1]
    data.append({
        "type": "scatter", "mode": "markers", "x": [total[0]], "y": [total[1]], "name": "Δ",
        "marker": {"size": 9, "color": style.rgba(style.INDIGO, 1)},
        "hovertemplate": f"Δ, all sources: {style.signed(total[0])} answer − foil<extra></extra>",
    })  # fmt: skip
    seen = [*points, *((reach * x, reach * y) for _, (x, y) in rays)]
    pad = 0.25 * reach
    spans = [[min(p[i] for p in seen) - pad, max(p[i] for p in seen) + pad] for i in range(2)]
    side = {"fixedrange": True, "showgrid": False, "zeroline": True,
            "zerolinecolor": style.FAINT, "tickfont": {"size": 13}, "nticks": 7, "ticks": ""}  # fmt: skip
    pair = " − ".join(html.escape(style.visible(word), quote=False) for word in (answer, foil))
    layout = style.layout(
        420, annotations=[*arrows, *names], margin={"l": 60, "r": 16, "t": 10, "b": 48},
        xaxis=side | {"range": spans[0], "title": {"text": f"logits of {pair}", "font": {"size": 13}}},
        yaxis=side | {"range": spans[1], "scaleanchor": "x",
                      "title": {"text": "rest of the plane (same unit)", "font": {"size": 13}}},
    )  # fmt: skip
    return go.Figure(data, layout)


def _arrow(start: tuple[float, float], end: tuple[float, float], color: str, width: float) -> dict[str, Any]:
    return {
        "x": end[0], "y": end[1], "ax": start[0], "ay": start[1], "xref": "x", "yref": "y", "axref": "x", "ayref": "y",
        "showarrow": True, "arrowhead": 2, "arrowsize": 1, "arrowwidth": width, "arrowcolor": color, "text": "",
    }  # fmt: skip
