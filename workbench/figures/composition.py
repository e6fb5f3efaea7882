"""Which earlier head's output which later head reads, as z against the null of random rotations.

Inside the 95 % band of its null a cell is the page's own background: nothing there looks like nothing. One scale for
all maps, symmetric about 0; pairs whose reader is not behind the writer are gaps.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from circuits.composition import CompositionScores, Kind
from workbench.figures import style
from workbench.figures.numbers import Head, head_name

NAMES = {"Q": "query", "K": "key", "V": "value"}
SIDE, LEFT, TOP, BOTTOM = 250, 56, 92, 58  # pixels
SPACE = 0.07  # of the width
NUMBERED = 8  # heads along a map up to which cells carry their number
TICKS = 12  # most head names down an axis
ACROSS = 24  # most characters of them along one


def composition_figure(
    scores: Mapping[Kind, CompositionScores], chosen: tuple[str, Head, Head] | None = None
) -> go.Figure:
    """A map a kind, side by side: writer (row) × reader (column), z where it leaves the 95 % band of its null.

    `scores`: kind → scores [layer, head, layer, head] of a model of two blocks or more, as `circuits.compositions`
    gives them. `chosen` (kind, writer, reader) is framed. The hover says score, null and z of every pair.
    """
    first = next(iter(scores.values())).scores
    layers, heads = first.shape[:2]
    writers = [(layer, head) for layer in range(layers - 1) for head in range(heads)]
    readers = [(layer, head) for layer in range(1, layers) for head in range(heads)]
    n = len(writers)
    width = (1 - SPACE * (len(scores) - 1)) / len(scores)
    far = [float(one.z[one.outside].abs().max()) for one in scores.values() if bool(one.outside.any())]
    top = max(far, default=1.0)
    data: list[dict[str, Any]] = []
    shapes: list[dict[str, Any]] = []
    titles: list[dict[str, Any]] = []
    layout = style.layout(
        TOP + SIDE + BOTTOM, margin={"l": LEFT, "r": 8, "t": TOP, "b": BOTTOM}, shapes=shapes, annotations=titles,
        coloraxis=_scale(top),
    )  # fmt: skip
    for i, (kind, one) in enumerate(scores.items()):
        number, left = str(i + 1) if i else "", i * (width + SPACE)
        seen, outside, z = (_between(getattr(one, name).numpy(), n) for name in ("defined", "outside", "z"))
        shown = np.where(seen, np.where(outside, z, 0.0), np.nan)
        hover = _hover(kind, one, writers, readers) if n <= 4 * NUMBERED else None
        heat: dict[str, Any] = {
            "type": "heatmap", "z": shown.tolist(), "coloraxis": "coloraxis", "xaxis": f"x{number}",
            "yaxis": f"y{number}", "name": kind, "hoverongaps": False, "xgap": 1 if hover else 0,
            "ygap": 1 if hover else 0, "hovertemplate": "%{y} → %{x}: z %{z:+.1f}<extra></extra>",
        }  # fmt: skip
        if hover:
            heat |= {"customdata": hover, "hovertemplate": "%{customdata}<extra></extra>"}
        if n <= NUMBERED:
            heat |= {
                "text": [[z_text(z) if z else "" for z in row] for row in np.nan_to_num(shown).tolist()],
                "texttemplate": "%{text}", "textfont": {"size": 13},
            }  # fmt: skip
        data.append(heat)
        on_map = {"xref": f"x{number}", "yref": f"y{number}", "type": "rect"}
        corners = {"x0": -0.5, "x1": len(readers) - 0.5, "y0": -0.5, "y1": n - 0.5}
        shapes.append({**on_map, **corners, "line": {"color": style.FAINT, "width": 1}})
        layout |= _axes(number, [left, left + width], [head_name(h) for h in writers], [head_name(h) for h in readers])
        titles += [
            _title(f"{kind}: into the {NAMES[kind]}", left, 1, "bottom", 4),
            _title("reader →" if i else "↓ writer   reader →", left, 0, "top", -30),
        ]
        if chosen is not None and chosen[0] == kind:
            a, b = writers.index(chosen[1]), readers.index(chosen[2])
            corners = {"x0": b - 0.5, "x1": b + 0.5, "y0": a - 0.5, "y1": a + 0.5}
            shapes.append({**on_map, **corners, "line": {"color": style.COMPOSITION[kind], "width": 3}})
    return go.Figure(data, layout)


def composition_records(scores: Mapping[Kind, CompositionScores]) -> Iterator[dict[str, Any]]:
    """Every pair of every kind as a row: writer, reader, score, its null, z, p."""
    for kind, one in scores.items():
        for row in one.to_frame().to_dict("records"):
            yield {"kind": kind} | {str(key): value for key, value in row.items() if key != "measure"}


def z_text(z: float) -> str:
    """With a sign; a decimal only where it says something: +2.3, −17."""
    text = f"{z:+.0f}" if abs(z) >= 9.95 else f"{z:+.1f}"
    return text.replace("-", "−")


def _hover(kind: str, scores: CompositionScores, writers: Sequence[Head], readers: Sequence[Head]) -> list[list[str]]:
    """What each pair says; nothing where the reader is not behind the writer."""

    def said(writer: Head, reader: Head) -> str:
        pair = (*writer, *reader)
        low, high = (float(end[pair]) for end in scores.band)
        return (
            f"{NAMES[kind]} of {head_name(reader)} ← {head_name(writer)}: z {z_text(float(scores.z[pair]))}<br>"
            f"score {float(scores.scores[pair]):.3f}, 95 % of its null {low:.3f} … {high:.3f}"
            f"{'' if bool(scores.outside[pair]) else ': inside it'}"
        )

    return [[said(w, r) if bool(scores.defined[(*w, *r)]) else "" for r in readers] for w in writers]


def _between(values: Any, n: int) -> Any:
    """[layer, head, layer, head] → [writer, reader], without the last layer's writers and the first's readers."""
    flat = values.reshape(values.shape[0] * values.shape[1], -1)
    return flat[:n, flat.shape[1] - n :]


def _scale(top: float) -> dict[str, Any]:
    return {
        "colorscale": style.DIFFERENCE, "cmin": -top, "cmax": top,
        "colorbar": {
            "orientation": "h", "thickness": 8, "lenmode": "pixels", "len": 150, "outlinewidth": 0.5,
            "outlinecolor": style.FAINT, "tickvals": [-top, 0, top], "ticklen": 0,
            "ticktext": [z_text(-top), "in its null", z_text(top)],
            "tickfont": {"size": 13}, "title": {"text": "z", "side": "top", "font": {"size": 13}},
            "xpad": 0, "ypad": 0, "yref": "container", "y": 1, "yanchor": "top", "x": 0, "xanchor": "left",
        },
    }  # fmt: skip


def _axes(number: str, domain: list[float], writers: list[str], readers: list[str]) -> dict[str, Any]:
    step, across = -(-len(writers) // TICKS), ACROSS // max(map(len, readers))
    common: dict[str, Any] = {
        "showgrid": False, "zeroline": False, "ticks": "", "fixedrange": True, "constrain": "domain",
        "tickfont": {"family": style.MONOSPACE, "size": 13}, "ticklabelstandoff": 4, "tick0": 0,
    }  # fmt: skip
    names = [{"labelalias": {str(i): name for i, name in enumerate(of)}} for of in (readers, writers)]
    x = {"domain": domain, "anchor": f"y{number}", "range": [-0.5, len(readers) - 0.5], "tickangle": 0,
         "constraintoward": "left", "dtick": -(-len(readers) // across)}  # fmt: skip
    y = {"anchor": f"x{number}", "range": [len(writers) - 0.5, -0.5], "scaleanchor": f"x{number}",
         "constraintoward": "top", "dtick": step}  # fmt: skip
    return {f"xaxis{number}": common | x | names[0], f"yaxis{number}": common | y | names[1]}


def _title(text: str, x: float, y: float, anchor: str, shift: int) -> dict[str, Any]:
    return {
        "text": text, "x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": anchor,
        "yshift": shift, "showarrow": False, "font": {"size": 14 if y else 13},
    }  # fmt: skip
