"""One attention score as a table of what it is made of: parts of the destination's stream × parts of the source's."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from circuits.score_terms import ScoreTerms
from workbench.figures import style
from workbench.figures.numbers import head_name

REST = "the rest"
MOST = 10
"""Components that are shown by name on each side; the others are added up, which is exact."""
CELL, LEFT, TOP, BOTTOM = 40, 74, 86, 62  # pixels


def score_terms_figure(terms: ScoreTerms, source: int, tokens: Sequence[str]) -> go.Figure:
    """What each part of the destination's stream (row) makes of each part of the source's (column).

    In units of the score before the softmax, each cell minus its mean over all sources, since what is the same for
    every source moves no attention; all cells together are the score minus its mean. Of many components those with the
    largest cells are shown, the others as one. `source`: a position. Raises: ValueError for one that terms lack.
    """
    names, cells = named_terms(terms, source)
    top = float(np.abs(cells).max()) or 1.0
    n = len(names)
    where = f"{head_name(terms.head)} from {_word(terms.destination, tokens)}"
    hover = [
        [f"{where}: {a} × {b} of {_word(source, tokens)}: {style.signed(float(cells[i, j]))}"
         for j, b in enumerate(names)] for i, a in enumerate(names)
    ]  # fmt: skip
    heat = {
        "type": "heatmap", "z": cells.tolist(), "customdata": hover, "hovertemplate": "%{customdata}<extra></extra>",
        "text": [[style.signed(v) if abs(v) >= 0.05 * top else "" for v in row] for row in cells.tolist()],
        "texttemplate": "%{text}", "textfont": {"size": 13}, "xgap": 1, "ygap": 1, "coloraxis": "coloraxis",
        "name": "score",
    }  # fmt: skip
    ticks: dict[str, Any] = {
        "tickmode": "array", "tickvals": list(range(n)), "ticktext": names, "ticks": "", "showgrid": False,
        "zeroline": False, "fixedrange": True, "tickfont": {"family": style.MONOSPACE, "size": 13},
        "ticklabelstandoff": 4,
    }  # fmt: skip
    titles = [
        {"text": text, "x": 0, "xref": "paper", "xanchor": "left", "y": y, "yref": "paper", "yanchor": anchor,
         "yshift": shift, "showarrow": False, "font": {"size": 13}}
        for text, y, anchor, shift in (
            (f"row: part of {_word(terms.destination, tokens)}, in the query", 1, "bottom", 4),
            (f"column: part of {_word(source, tokens)}, in the key", 0, "top", -34),
        )
    ]  # fmt: skip
    layout = style.layout(
        TOP + CELL * n + BOTTOM, margin={"l": LEFT, "r": 8, "t": TOP, "b": BOTTOM}, annotations=titles,
        shapes=[{"type": "rect", "x0": -0.5, "x1": n - 0.5, "y0": -0.5, "y1": n - 0.5,
                 "line": {"color": style.FAINT, "width": 1}}],
        xaxis=ticks | {"range": [-0.5, n - 0.5], "tickangle": 0 if n <= MOST + 1 else -45},
        yaxis=ticks | {"range": [n - 0.5, -0.5]},
        coloraxis={
            "colorscale": style.DIFFERENCE, "cmin": -top, "cmax": top,
            "colorbar": {
                "orientation": "h", "thickness": 8, "lenmode": "pixels", "len": 130, "outlinewidth": 0.5,
                "outlinecolor": style.FAINT, "tickvals": [-top, top], "ticklen": 0, "tickfont": {"size": 13},
                "ticktext": [style.signed(-top), style.signed(top)], "xpad": 0, "ypad": 0, "yref": "container",
                "title": {"text": "adds to the score", "side": "top", "font": {"size": 13}}, "y": 1, "yanchor": "top",
                "x": 0, "xanchor": "left",
            },
        },
    )  # fmt: skip
    return go.Figure([heat], layout)


def named_terms(terms: ScoreTerms, source: int) -> tuple[list[str], Float[np.ndarray, "destination_part source_part"]]:
    """Names and cells of one source, components beyond the largest added up as "the rest"."""
    cells = terms.values[:, :, terms.sources.index(source)].double().numpy()
    if len(cells) <= MOST + 1:
        return list(terms.components), cells
    size = np.maximum(np.abs(cells).max(0), np.abs(cells).max(1))
    kept = sorted(np.argsort(-size, kind="stable")[:MOST].tolist())
    others = [i for i in range(len(cells)) if i not in kept]
    rows = np.concatenate([cells[kept], cells[others].sum(0, keepdims=True)])
    both = np.concatenate([rows[:, kept], rows[:, others].sum(1, keepdims=True)], axis=1)
    return [*(terms.components[i] for i in kept), REST], both


def score_records(terms: ScoreTerms, tokens: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every pair of components and source as a row."""
    for row in terms.to_frame().to_dict("records"):
        where = {"head": head_name(terms.head), "destination": terms.destination, "source_token": tokens[row["source"]]}
        yield where | {str(key): value for key, value in row.items()}


def _word(position: int, tokens: Sequence[str]) -> str:
    return f"{position} ‘{style.escaped(tokens[position])}’"
