"""A circuit between tokens as a heat map, and one row of a table of probabilities as dots beside the truth."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from torch import Tensor

from circuits.entries import Entries
from workbench.figures import style
from workbench.figures.heads import plus

LARGEST = 64  # tokens along a map whose cells are still told apart
LABELS = 52  # tokens of which each is labelled
CELL = 16  # pixels
KEY, LEFT, BOTTOM = 84, 108, 92  # pixels: the colour key, the labels
ROW = 24  # pixels: a line of dots


def matrix_figure(
    entries: Entries,
    rows: Sequence[str],
    columns: Sequence[str],
    names: tuple[str, str] = ("source", "output"),
    unit: str = "logits",
    *,
    all_entries: bool = False,
) -> go.Figure:
    """Entries of a circuit: brown more than the mean of the row, teal less.

    Those inside the middle 95 % of their null are left blank, unless `all_entries`; the hover has every number with
    its band. `names`: what rows and columns are.
    """
    values, low, high = (x.double().numpy() for x in (entries.values, entries.low, entries.high))
    outside = entries.outside.numpy()
    most = float(np.abs(values).max(initial=0)) or 1.0
    hover = [
        [
            f"{names[0]} ‘{style.escaped(rows[i])}’ → {names[1]} ‘{style.escaped(columns[j])}’: "
            f"{plus(values[i, j])} {unit}<br>by chance {plus(low[i, j])} … {plus(high[i, j])}"
            f"{'' if outside[i, j] else ', inside'}"
            for j in range(len(columns))
        ]
        for i in range(len(rows))
    ]
    data = {
        "type": "heatmap", "z": np.where(outside | all_entries, values, 0.0), "customdata": hover,
        "hovertemplate": "%{customdata}<extra></extra>", "coloraxis": "coloraxis", "name": "entries",
    }  # fmt: skip
    return go.Figure(data, _layout(rows, columns, names) | {"coloraxis": _key(f"{unit}, less the row's mean", most)})


def tables_figure(
    tables: Sequence[tuple[str, Float[Tensor, "token next"]]], words: Sequence[str], what: str = "probability"
) -> go.Figure:
    """Tables of probabilities side by side on one scale from 0: token × next token."""
    top = max(float(table.max()) for _, table in tables)
    width, data = 1 / len(tables), []
    layout = _layout(words, words, ("token", "next"))
    side = layout["height"] - KEY - BOTTOM
    layout |= {"height": KEY + round(side * 0.62) + BOTTOM, "annotations": []}
    for k, (title, table) in enumerate(tables):
        number, values = str(k + 1) if k else "", table.double().numpy()
        hover = [
            [f"after ‘{style.escaped(words[i])}’, ‘{style.escaped(words[j])}’: {values[i, j]:.3f} ({title})"
             for j in range(len(words))] for i in range(len(words))
        ]  # fmt: skip
        data.append({
            "type": "heatmap", "z": values, "customdata": hover, "hovertemplate": "%{customdata}<extra></extra>",
            "coloraxis": "coloraxis", "name": title, "xaxis": f"x{number}", "yaxis": f"y{number}",
        })  # fmt: skip
        few = range(0, len(words), max(1, -(-len(words) // style.MAX_TICKS)))
        ticks = {"tickmode": "array", "tickvals": list(few), "ticktext": [style.tick_labels(words)[i] for i in few]}
        layout[f"xaxis{number}"] = layout["xaxis"] | ticks | {
            "domain": [k * width, (k + 0.94) * width], "anchor": f"y{number}",
        }  # fmt: skip
        layout[f"yaxis{number}"] = layout["yaxis"] | ticks | {
            "anchor": f"x{number}", "showticklabels": not k, "scaleanchor": f"x{number}",
        }  # fmt: skip
        layout["annotations"] += [{
            "text": f"{style.escaped(title)}: row = token, column = next", "x": k * width, "y": 1, "xref": "paper",
            "yref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 6, "showarrow": False,
            "font": {"size": 13},
        }]  # fmt: skip
    scale = {"colorscale": style.ATTENTION, "cmin": 0, "cmax": top, "colorbar": _bar(what, [0, top])}
    return go.Figure(data, layout | {"coloraxis": scale})


def next_figure(rows: Sequence[tuple[str, float, float]], truth: str = "truth") -> go.Figure:
    """What follows one token: the model's probability as a full dot, the true one as a ring; (word, model, truth) each.

    Where the two meet, the dot fills the ring.
    """
    most = max([0.01, *(max(model, true) for _, model, true in rows)])
    y = list(range(len(rows)))
    lines = {"x": [v for _, m, t in rows for v in (m, t, None)], "y": [v for i in y for v in (i, i, None)]}
    at = {"type": "scatter", "mode": "markers", "y": y, "hovertemplate": "%{customdata}<extra></extra>"}
    said = [f"‘{style.escaped(word)}’: model {m:.3f}, {truth} {t:.3f}" for word, m, t in rows]
    data = [
        {"type": "scatter", "mode": "lines", **lines, "hoverinfo": "skip", "name": "gap", "showlegend": False,
         "line": {"color": style.FAINT, "width": 2}},
        at | {"x": [t for *_, t in rows], "name": truth, "customdata": said,
              "marker": {"size": 13, "color": "rgba(0,0,0,0)", "line": {"color": style.GREY, "width": 1.8}}},
        at | {"x": [m for _, m, _ in rows], "name": "model", "customdata": said,
              "marker": {"size": 8, "color": style.rgba(style.INDIGO, 1)}},
    ]  # fmt: skip
    layout = style.layout(
        30 + ROW * len(rows) + 44, margin={"l": LEFT + 24, "r": 12, "t": 30, "b": 44}, showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "font": {"size": 13}},
        xaxis=_axis() | {"range": [-0.02 * most, 1.05 * most], "nticks": 6, "ticks": "outside", "showline": True,
                         "title": {"text": "probability of the next token", "font": {"size": 13}}},
        yaxis=_axis() | {"range": [len(rows) - 0.5, -0.5], "tickmode": "array", "tickvals": y,
                         "ticktext": [style.escaped(word) for word, *_ in rows]},
    )  # fmt: skip
    return go.Figure(data, layout)


def _layout(rows: Sequence[str], columns: Sequence[str], names: tuple[str, str]) -> dict[str, Any]:
    height = KEY + max(CELL * len(rows), 200) + BOTTOM
    over = {"x": 0, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 6}
    text = f"row = {names[0]}, column = {names[1]}"
    note = over | {"text": text, "showarrow": False, "font": {"size": 13}}
    return style.layout(
        height, margin={"l": LEFT, "r": 8, "t": KEY, "b": BOTTOM}, annotations=[note],
        yaxis=_ticks(rows) | {"range": [len(rows) - 0.5, -0.5], "scaleanchor": "x",
                                          "constraintoward": "top"},
        xaxis=_ticks(columns) | {"tickangle": -90, "constraintoward": "left"},
    )  # fmt: skip


def _ticks(words: Sequence[str]) -> dict[str, Any]:
    shown = list(range(0, len(words), max(1, -(-len(words) // LABELS))))
    labels = style.tick_labels(words)
    return _axis() | {
        "tickmode": "array",
        "tickvals": shown,
        "ticktext": [labels[i] for i in shown],
        "constrain": "domain",
    }


def _axis() -> dict[str, Any]:
    return {"tickmode": "auto", "ticks": "", "showgrid": False, "zeroline": False, "fixedrange": True,
            "linecolor": style.FAINT, "tickfont": {"family": style.MONOSPACE, "size": 13},
            "ticklabelstandoff": 4}  # fmt: skip


def _key(title: str, most: float) -> dict[str, Any]:
    return {"colorscale": style.DIFFERENCE, "cmin": -most, "cmax": most, "colorbar": _bar(title, [-most, 0, most])}


def _bar(title: str, values: Sequence[float]) -> dict[str, Any]:
    return {
        "orientation": "h", "thickness": 8, "lenmode": "pixels", "len": 190, "outlinewidth": 0.5,
        "outlinecolor": style.FAINT, "tickvals": list(values), "ticklen": 0, "tickfont": {"size": 13},
        "ticktext": [plus(v) if values[0] < 0 else f"{v:.2f}" for v in values],
        "title": {"text": title, "side": "top", "font": {"size": 13}}, "xpad": 0, "ypad": 0,
        "x": 0, "xanchor": "left", "yref": "container", "y": 1, "yanchor": "top",
    }  # fmt: skip
