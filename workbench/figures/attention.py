"""The attention map: row = who looks (destination), column = at what (source).

Side by side for two prompts: A, B, and B − A. Cells after the destination are gaps, not zeros, and a thin staircase
shows where the gaps begin; for attention the ranges are fixed, 0 … 1 and −1 … +1, so that one colour means one number
in every figure. Norms and contributions to a logit have no largest value: their range is the figure's own, from 0 or
about it. Axes are numeric with words as tick text: repeated words keep their own column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from circuits.attention import AttentionMaps
from workbench.errors import BadPrompt
from workbench.figures import style
from workbench.figures.numbers import Direction, Head, check_destination, predictions, views

SIDES = {1: 440, 2: 392, 3: 276}  # pixels: the side of a map, by the number of maps on a line
TOP, TITLE, GAP = 44, 28, 16  # pixels: the colour keys, the title over a map, the space under a row of maps
LARGEST_CELL = 44  # pixels
SPACE = 0.028  # of the width: between two maps
CHARACTER = 8  # pixels: the width of one monospaced character of a tick label


@dataclass(frozen=True)
class _Panel:
    """One map: its cells with gaps above the diagonal, and the words along it."""

    title: str
    measure: str
    difference: bool
    cells: Float[np.ndarray, "destination source"]
    tokens: list[str]
    ticks: list[str]
    predicted: list[str]
    """At every position, or empty."""

    @property
    def signed(self) -> bool:
        return self.difference or self.measure == "logit"

    @property
    def hover(self) -> list[list[str]]:
        """One line a cell on or below the diagonal; row i has i + 1 of them."""
        names = [f"{i} ‘{style.escaped(token)}’" for i, token in enumerate(self.tokens)]
        says = [f", predicts ‘{style.escaped(word)}’" for word in self.predicted] or [""] * len(self.tokens)
        write = style.signed if self.signed else "{:.2f}".format
        return [
            [f"at {names[i]} → {names[j]}: {write(row[j])}{says[i]}" for j in range(i + 1)]
            for i, row in enumerate(self.cells.tolist())
        ]


def attention_figure(
    maps_a: AttentionMaps,
    tokens_a: Sequence[str],
    maps_b: AttentionMaps | None = None,
    tokens_b: Sequence[str] | None = None,
    head: Head | None = None,
    destination: int = -1,
    *,
    vocabulary: Sequence[str] | None = None,
    roles: Mapping[str, int] | None = None,
    layers: Sequence[int] | None = None,
    direction: Direction = "from",
    what: str = "the logit",
    letters: tuple[str, str] = ("A", "B"),
    clickable: bool = False,
) -> go.Figure:
    """Attention maps of one prompt, or of two (or two models' of one) side by side with their difference B − A.

    `head` is (layer, head); None means one map a layer, its heads together, for all `layers` or those given.
    `destination` is the position that is framed, with direction "from" the row of what it looks at, with "to" the
    column of who looks at it; negative ones count from the end. Maps of another measure are drawn as well as those of
    attention (`circuits.attention`); `what` names the logit. `letters` name the two sides. `vocabulary` (token →
    word) lets the hover say what the model predicts; `roles` (name → position) marks named words on the axes. B − A is
    left out where the lengths differ. `clickable` lays an invisible marker over each cell of a prompt of at most
    style.MAX_TOUCH tokens; its customdata is the destination. A model without layers gives a figure without maps.
    Raises: UnknownName for a head, BadPrompt for a destination that is not there, or tokens that do not fit the maps.
    """
    at = check_destination(tokens_a, destination)
    prompts = [_Prompt.of(maps_a, tokens_a, vocabulary)]
    if maps_b is not None and tokens_b is not None:
        prompts.append(_Prompt.of(maps_b, tokens_b, vocabulary))
    rows = [_row(prompts, layer, which, title, letters) for layer, which, title in views(maps_a, head, layers)]
    if len(prompts) == 1:  # nothing to compare: layers side by side
        flat = [panel for row in rows for panel in row]
        per_line = 3 if len(tokens_a) <= style.MAX_TOUCH else 2
        rows = [flat[i : i + per_line] for i in range(0, len(flat), per_line)]
    differing = style.differing(prompts[0].tokens, prompts[-1].tokens)
    return _draw(rows, at, differing, roles or {}, clickable, direction, what)


def figure_html(figure: go.Figure, title: str) -> str:
    """A page of its own that needs no network: Plotly is in it."""
    page = figure.to_html(include_plotlyjs=True, config={"displaylogo": False})
    return page.replace("<head>", f"<head><title>{title}</title>", 1)


@dataclass(frozen=True)
class _Prompt:
    maps: AttentionMaps
    tokens: list[str]
    predicted: list[str]
    """The word the model says next at every position; empty where the vocabulary is not known."""

    @classmethod
    def of(cls, maps: AttentionMaps, tokens: Sequence[str], vocabulary: Sequence[str] | None) -> "_Prompt":
        if len(tokens) != len(maps.probabilities):
            raise BadPrompt(f"{len(tokens)} tokens, but the maps are of {len(maps.probabilities)} positions")
        return cls(maps, list(tokens), predictions(maps, vocabulary) if vocabulary is not None else [])


def _row(prompts: list[_Prompt], layer: int, head: int | None, title: str, letters: tuple[str, str]) -> list[_Panel]:
    """The maps of one layer or head: A, or A, B and B − A."""
    cells, panels, measure = [], [], prompts[0].maps.measure
    for letter, prompt in zip(letters, prompts, strict=False):
        pattern = prompt.maps.together[layer] if head is None else prompt.maps.patterns[layer, head]
        cells.append(_gapped(pattern.cpu().float().numpy()))
        heading = title if len(prompts) == 1 else letter if panels else f"{title} · {letter}"
        ticks = style.tick_labels(prompt.tokens)
        panels.append(_Panel(heading, measure, False, cells[-1], prompt.tokens, ticks, prompt.predicted))
    if len(prompts) == 2 and len(prompts[0].tokens) == len(prompts[1].tokens):
        a, b = prompts
        tokens = [s if s == t else f"{s} | {t}" for s, t in zip(a.tokens, b.tokens, strict=True)]
        predicted = [p if p == q else f"{p} | {q}" for p, q in zip(a.predicted, b.predicted, strict=True)]
        ticks = style.tick_labels(a.tokens)
        panels.append(_Panel("B − A", measure, True, cells[1] - cells[0], tokens, ticks, predicted))
    return panels


def _gapped(pattern: Float[np.ndarray, "destination source"]) -> Float[np.ndarray, "destination source"]:
    """NaN above the diagonal: what a position cannot see is a gap."""
    return np.where(np.tri(len(pattern), dtype=bool), pattern, np.float32(np.nan))


def _draw(
    rows: list[list[_Panel]],
    at: int,
    differing: list[int],
    roles: Mapping[str, int],
    clickable: bool,
    direction: Direction,
    what: str,
) -> go.Figure:
    """All panels on one sheet; built as plain data, which Plotly checks once."""
    n_columns = max((len(row) for row in rows), default=1)
    panels = [panel for row in rows for panel in row]
    longest = max((_width(tick) for panel in panels for tick in panel.ticks), default=0)
    side = min(SIDES[n_columns], LARGEST_CELL * max((len(panel.ticks) for panel in panels), default=1))
    pitch = TITLE + side + longest + GAP  # pixels from one row of maps to the next
    height = TOP + pitch * len(rows)
    width = (1 - SPACE * (n_columns - 1)) / n_columns
    data, shapes, titles = [], [], []
    margin = {"l": longest + 8, "r": 8, "t": 0, "b": 0}
    layout = style.layout(height, margin=margin, shapes=shapes, annotations=titles)
    for difference in (False, True):
        shown = [panel for panel in panels if panel.difference == difference]
        if shown or not difference:
            place = {"x": 2 * (width + SPACE) if difference else 0, "xanchor": "left"}
            layout["coloraxis2" if difference else "coloraxis"] = _scale(shown, difference, what, place)
    for i, row in enumerate(rows):
        top = 1 - (TOP + i * pitch + TITLE) / height
        for j, panel in enumerate(row):
            number = str(i * n_columns + j + 1) if i or j else ""  # Plotly calls its first axes x and y
            left = j * (width + SPACE)
            domain = {"x": [left, left + width], "y": [top - side / height, top]}
            show_words = j == 0 or len(panel.ticks) != len(row[0].ticks)
            data += _map(panel, number, clickable)
            layout |= _axes(panel, number, domain, show_words)
            shapes += _marks(len(panel.ticks), number, at, differing, roles, direction)
            titles.append({
                "text": panel.title, "x": left, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left",
                "yanchor": "bottom", "yshift": 5, "showarrow": False, "font": {"size": 14},
            })  # fmt: skip
    return go.Figure(data, layout)


def _width(tick: str) -> int:
    """Roughly the width of a tick label in pixels."""
    text = tick.split("</span> ")
    return CHARACTER * (len(text[-1]) + (3 if len(text) > 1 else 0)) + 10


def _scale(panels: list[_Panel], difference: bool, what: str, place: dict[str, Any]) -> dict[str, Any]:
    """A range that all these maps share, with a small key above them; of attention it is always the same."""
    measure = panels[0].measure if panels else "attention"
    title = "B − A" if difference else {"moved": "norm moved", "logit": f"adds to {what}"}.get(measure, measure)
    largest = max((float(np.nanmax(np.abs(panel.cells))) for panel in panels), default=1.0)
    high = 1.0 if measure == "attention" else largest or 1.0
    about_zero = difference or measure == "logit"
    low = -high if about_zero else 0.0
    ends = ["0", "1"] if high == 1 else ["0", f"{high:.2f}"]
    if about_zero:
        ends = ["−1", "+1"] if high == 1 else [style.signed(low), style.signed(high)]
    return {
        "colorscale": style.DIFFERENCE if about_zero else style.ATTENTION, "cmin": low, "cmax": high,
        "colorbar": {
            "orientation": "h", "thickness": 8, "lenmode": "pixels", "len": 130, "outlinewidth": 0.5,
            "outlinecolor": style.FAINT, "tickvals": [low, high], "ticktext": ends, "ticklen": 0,
            "tickfont": {"size": 13}, "title": {"text": title, "side": "top", "font": {"size": 13}},
            "xpad": 0, "ypad": 0, "yref": "container", "y": 1, "yanchor": "top", **place,
        },
    }  # fmt: skip


def _map(panel: _Panel, number: str, clickable: bool) -> list[dict[str, Any]]:
    """The heat map, and where cells are to answer clicks an invisible marker on each: Streamlit hears only those."""
    length, axes = len(panel.ticks), {"xaxis": f"x{number}", "yaxis": f"y{number}"}
    gap = 0.5 if length <= 2 * style.MAX_TOUCH else 0
    heat = {
        "type": "heatmap", "z": panel.cells, "name": panel.title, "xgap": gap, "ygap": gap, "hoverongaps": False,
        "coloraxis": "coloraxis2" if panel.difference else "coloraxis", **axes,
    }  # fmt: skip
    if length > 2 * style.MAX_TOUCH:  # a text for each of 20,000 cells would be megabytes: axis labels speak instead
        says = [[style.escaped(word)] * (i + 1) for i, word in enumerate(panel.predicted)]
        value = "%{z:+.2f}" if panel.signed else "%{z:.2f}"
        template = f"at %{{y}} → %{{x}}: {value}{', predicts ‘%{customdata}’' if says else ''}<extra></extra>"
        return [heat | {"hovertemplate": template} | ({"customdata": says} if says else {})]
    hover = panel.hover
    if not clickable or length > style.MAX_TOUCH:
        return [heat | {"customdata": hover, "hovertemplate": "%{customdata}<extra></extra>"}]
    cells = [(i, j) for i in range(length) for j in range(i + 1)]
    touch = {
        "type": "scatter", "x": [j for _, j in cells], "y": [i for i, _ in cells], "mode": "markers",
        "marker": {"symbol": "square", "size": min(LARGEST_CELL, max(6, SIDES[3] / length)), "opacity": 0},
        "selected": {"marker": {"opacity": 0}}, "unselected": {"marker": {"opacity": 0}},
        "customdata": [i for i, _ in cells], "hovertext": [hover[i][j] for i, j in cells],
        "hovertemplate": "%{hovertext}<extra></extra>", "name": panel.title, **axes,
    }  # fmt: skip
    return [heat | {"hoverinfo": "skip"}, touch]


def _axes(panel: _Panel, number: str, domain: dict[str, list[float]], show_words: bool) -> dict[str, Any]:
    length = len(panel.ticks)
    at = style.tick_positions(length)
    common = {
        "showgrid": False, "zeroline": False, "showline": False, "ticks": "", "fixedrange": True,
        "constrain": "domain", "tickfont": {"family": style.MONOSPACE, "size": 13}, "ticklabelstandoff": 6,
    }  # fmt: skip
    if length > 2 * style.MAX_TOUCH:  # as every label has an alias, the hover finds words between the ticks too
        common |= {"tick0": 0, "dtick": at[1], "labelalias": {str(i): tick for i, tick in enumerate(panel.ticks)}}
    else:
        common |= {"tickmode": "array", "tickvals": at, "ticktext": [panel.ticks[i] for i in at]}
    x = {"domain": domain["x"], "anchor": f"y{number}", "range": [-0.5, length - 0.5], "tickangle": -90,
         "constraintoward": "left"}  # fmt: skip
    y = {"domain": domain["y"], "anchor": f"x{number}", "range": [length - 0.5, -0.5], "scaleanchor": f"x{number}",
         "constraintoward": "top", "showticklabels": show_words}  # fmt: skip
    return {f"xaxis{number}": common | x, f"yaxis{number}": common | y}


def _marks(
    length: int, number: str, at: int, differing: list[int], roles: Mapping[str, int], direction: Direction
) -> list[dict[str, Any]]:
    """The staircase where gaps begin, a frame around the position's row or column, the words that differ, the roles."""
    x, y = f"x{number}", f"y{number}"
    on_map = {"xref": x, "yref": y}
    stairs = "M -0.5,-0.5 " + " ".join(f"L {i + 0.5},{i - 0.5} L {i + 0.5},{i + 0.5}" for i in range(length))
    marks = [
        {
            "type": "path",
            "path": f"{stairs} L -0.5,{length - 0.5} Z",
            "line": {"color": style.FAINT, "width": 1},
            **on_map,
        }
    ]
    dotted = {"color": style.GREY, "width": 1, "dash": "dot"}
    marks += [
        {"type": "rect", "x0": i - 0.5, "x1": i + 0.5, "y0": i - 0.5, "y1": length - 0.5, "line": dotted, **on_map}
        for i in differing
    ]
    if at < length:
        frame = {"color": style.GREY, "width": 1.5}
        row = {"x0": -0.5, "x1": at + 0.5, "y0": at - 0.5, "y1": at + 0.5}
        column = {"x0": at - 0.5, "x1": at + 0.5, "y0": at - 0.5, "y1": length - 0.5}
        marks.append({"type": "rect", **(row if direction == "from" else column), "line": frame, **on_map})
    for role, position in roles.items():
        if position < length:
            bar = {"type": "rect", "name": role, "fillcolor": style.role_color(role), "line": {"width": 0}}
            low, high, near, far = position - 0.4, position + 0.4, -0.009, -0.02
            marks.append(bar | {"xref": f"{x} domain", "x0": far, "x1": near, "yref": y, "y0": low, "y1": high})
            marks.append(bar | {"yref": f"{y} domain", "y0": far, "y1": near, "xref": x, "x0": low, "x1": high})
    return marks
