"""Random scores over widths: what dividing by √d_k keeps."""

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from circuits.scaling import RandomScores
from workbench.figures import style

KEYS = 64


def scaling_figure(found: Sequence[RandomScores], keys: int = KEYS) -> go.Figure:
    """Three panels over the width d_k: variance of q·k beside d_k, effective tokens, trace of the softmax's Jacobian.

    Indigo: scores divided by √d_k; grey: not divided. `keys` is how many each query had.
    """
    widths = [scores.width for scores in found]
    scaled, plain = style.rgba(style.INDIGO, 1), style.GREY

    def line(name: str, values: list[float], color: str, panel: int, written: str) -> dict[str, Any]:
        axis = "" if panel == 1 else panel
        return {
            "type": "scatter", "mode": "lines+markers", "x": widths, "y": values, "name": name, "cliponaxis": False,
            "line": {"color": color, "width": 2}, "marker": {"size": 7}, "xaxis": f"x{axis}", "yaxis": f"y{axis}",
            "hovertemplate": f"d_k = %{{x}}: %{{y:{written}}}<extra>{name}</extra>",
        }  # fmt: skip

    data = [
        line("q·k", [scores.variance for scores in found], plain, 1, ".1f"),
        line("q·k / √d_k", [scores.variance / scores.width for scores in found], scaled, 1, ".3f"),
    ]
    for panel, part in ((2, "effective_tokens"), (3, "jacobian")):
        data.append(line("q·k", [getattr(scores.unscaled, part) for scores in found], plain, panel, ".2f"))
        data.append(line("q·k / √d_k", [getattr(scores.scaled, part) for scores in found], scaled, panel, ".2f"))
    titles = ("variance of the scores", f"effective tokens, of {keys}", "trace of the Jacobian")
    most = max([1.0, *(scores.variance for scores in found)])
    ranges = ([-0.5, math.log10(most) + 0.3], [0, keys], [0, 1])
    layout = style.layout(270, margin={"l": 44, "r": 20, "t": 34, "b": 44}, annotations=[])
    for i, (title, span) in enumerate(zip(titles, ranges, strict=True)):
        axis, left = "" if i == 0 else i + 1, i * 0.355
        layout[f"xaxis{axis}"] = {
            "type": "log", "domain": [left, left + 0.29], "anchor": f"y{axis}", "tickvals": widths, "fixedrange": True,
            "ticktext": [str(width) for width in widths], "showgrid": False, "title": {"text": "d_k", "standoff": 6},
            "tickfont": {"size": 13}, "zeroline": False,
        }  # fmt: skip
        layout[f"yaxis{axis}"] = {
            "anchor": f"x{axis}", "range": span, "fixedrange": True, "gridcolor": style.FAINT, "zeroline": False,
            "tickfont": {"size": 13}, "type": "log" if i == 0 else "linear", "nticks": 5,
        } | ({"dtick": 1, "exponentformat": "none"} if i == 0 else {})  # fmt: skip
        layout["annotations"].append({
            "text": title, "x": left, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "left",
            "yanchor": "bottom", "yshift": 8, "showarrow": False, "font": {"size": 14},
        })  # fmt: skip
    return go.Figure(data, layout)
