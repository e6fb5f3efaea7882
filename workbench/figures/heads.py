"""All heads of a model as one table of dots: each score beside its null, what the head is worth, how it came about.

A row is a head, a column a measure with a scale of its own. The grey bar is the middle 95 % of the null; a dot outside
it is full, inside it hollow. What the head's cut costs has no null but 0 and is drawn with its own interval: full where
that leaves out 0. The lines at the right are one score over training, on a logarithmic axis of steps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import UnknownName
from workbench.figures import style
from workbench.head_table import Column, HeadTable, History

ROW, HEAD, FOOT = 30, 46, 6  # pixels: a line, the headings, the space below
NAME, ROLE, CELL, NUMBER, LINE, GAP = 42, 132, 56, 50, 96, 8  # of a width of about 1,000: the parts of a line
SIZE = 8  # pixels: a dot
LEFT_OUT = ("current_token",)
"""For want of room; it is on a head's own page."""


def heads_figure(table: HeadTable, by: str | None = None, headings: bool = True) -> go.Figure:
    """The table, a line a head: by one of its columns, or block by block; without its headings where
    `headings_figure` stands above it.

    Every cell answers a click with the head's name as customdata. Raises: UnknownName for a column.
    """
    above = HEAD if headings else FOOT
    names, histories = table.names, table.histories
    columns, at, lines_at, width = _columns(table)
    order = table.order(by)
    rows = [names[i] for i in order]
    height = above + ROW * max(len(rows), 1) + FOOT
    layout = style.layout(
        height, margin={"l": 0, "r": 0, "t": above, "b": FOOT}, shapes=[],
        xaxis={"visible": False, "range": [0, width], "fixedrange": True},
        yaxis={"visible": False, "range": [len(rows) - 0.5, -0.5], "fixedrange": True},
        annotations=_headings(columns, at, lines_at if histories else None) if headings else [],
    )  # fmt: skip
    layout["shapes"] += _rules(rows, width)
    data = [_text([0] * len(rows), range(len(rows)), [f"<b>{name}</b>" for name in rows], mono=True)]
    called = [table.roles.get(name, "") for name in rows]
    data.append(_text([NAME] * len(rows), range(len(rows)), called))
    bars, dots, hollow, numbers = [], [], [], []
    touch: list[tuple[float, float, str, str]] = []
    for column, left in zip(columns, at, strict=True):
        x = _scale(column.span, left)
        zero = x(0.0)
        if column.span[0] < 0 and rows:
            layout["shapes"].append(_upright(zero, len(rows)))
        for row, i in enumerate(order):
            low, high = sorted((x(float(column.low[i])), x(float(column.high[i]))))
            bars.append((low, max(high, low + 1), row, column.interval))
            (dots if column.sure[i] else hollow).append((x(float(column.values[i])), row))
            text = written(column, float(column.values[i]))
            text = text if column.sure[i] else f'<span style="color:{style.GREY}">{text}</span>'
            numbers.append((left + CELL + 8, row, text))
            hover = (
                f"head {names[i]}<br>{style.escaped(column.title)} ({style.escaped(column.unit)}): {said(column, i)}"
            )
            touch += [(left + CELL * 0.3, row, names[i], hover), (left + CELL + NUMBER * 0.5, row, names[i], hover)]
    data += [_bars(bars, False), _bars(bars, True), _dots(dots, True), _dots(hollow, False)]
    data.append(_text([x for x, *_ in numbers], [row for _, row, _ in numbers], [text for *_, text in numbers]))
    if histories:
        data += _histories(rows, histories, lines_at, touch)
    for row, name in enumerate(rows):
        hover = f"head {name}" + (f": {style.escaped(called[row])}" if called[row] else "") + "<br>click: its own page"
        touch += [(NAME * 0.4, row, name, hover), (NAME + ROLE * 0.4, row, name, hover)]
    data.append(_touch(touch))
    return go.Figure(data, layout)


def headings_figure(table: HeadTable) -> go.Figure:
    """The headings of `heads_figure` alone: they stay where the table scrolls."""
    columns, at, lines_at, width = _columns(table)
    layout = style.layout(
        HEAD, margin={"l": 0, "r": 0, "t": HEAD - 1, "b": 0},
        annotations=_headings(columns, at, lines_at if table.histories else None),
        xaxis={"visible": False, "range": [0, width], "fixedrange": True},
        yaxis={"visible": False, "range": [0, 1], "fixedrange": True},
    )  # fmt: skip
    return go.Figure([_text([], [], [])], layout)


def scores_figure(table: HeadTable, head: str) -> go.Figure:
    """One head's scores, a line a measure, on one axis −1 … 1: dot and null band, and both in numbers.

    What it costs to cut it is in other units and left out. Raises: UnknownName.
    """
    if head not in table.names:
        raise UnknownName("head", head, table.names)
    i, shown = table.names.index(head), [column for column in table.columns if not column.interval]
    left, right = 150, 250  # pixels: the names, the numbers
    layout = style.layout(
        24 + ROW * len(shown) + 30, margin={"l": left, "r": right, "t": 24, "b": 30}, annotations=[], shapes=[],
        xaxis={"range": [-1.04, 1.04], "fixedrange": True, "zeroline": False, "showgrid": False, "ticks": "outside",
               "tickvals": [-1, -0.5, 0, 0.5, 1], "ticktext": ["−1", "−0.5", "0", "0.5", "1"], "ticklen": 4,
               "tickcolor": style.FAINT, "linecolor": style.FAINT, "showline": True, "tickfont": {"size": 13}},
        yaxis={"visible": False, "range": [len(shown) - 0.5, -0.5], "fixedrange": True},
    )  # fmt: skip
    layout["shapes"].append(_upright(0, len(shown)))
    for row, column in enumerate(shown):
        for x, anchor, shift, text in (
            (0, "right", -12, f"{column.title} {column.unit.partition(',')[0] if ',' in column.unit else ''}"),
            (1, "left", 10, f"<b>{written(column, float(column.values[i]))}</b>  {_by_chance(column, i)}"),
        ):
            layout["annotations"].append({
                "x": x, "xref": "paper", "y": row, "xanchor": anchor, "xshift": shift, "text": text.strip(),
                "showarrow": False, "font": {"size": 13},
            })  # fmt: skip
    bars = [(float(c.low[i]), max(float(c.high[i]), float(c.low[i]) + 0.01), row, False) for row, c in enumerate(shown)]
    full, hollow = ([(float(c.values[i]), row) for row, c in enumerate(shown) if bool(c.sure[i]) is yes]
                    for yes in (True, False))  # fmt: skip
    touch = [(float(c.values[i]), row, c.key, f"{c.title}: {said(c, i)}") for row, c in enumerate(shown)]
    return go.Figure([_bars(bars, False), _dots(full, True), _dots(hollow, False), _touch(touch)], layout)


def written(column: Column, value: float) -> str:
    """Two decimals (nats three), with a sign where the measure has one."""
    return plus(value, 3 if column.interval else 2) if column.span[0] < 0 else f"{value:.2f}"


def plus(value: float, digits: int = 2) -> str:
    """With a sign and a true minus, but for 0."""
    text = f"{value:+.{digits}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def said(column: Column, i: int) -> str:
    """A head's number with its null or interval, in words."""
    ends = f"{written(column, float(column.low[i]))} … {written(column, float(column.high[i]))}"
    if column.interval:
        return f"{written(column, float(column.values[i]))} nats, 95 % interval {ends}"
    where = "outside" if column.sure[i] else "inside"
    return f"{written(column, float(column.values[i]))}, by chance {ends} ({where})"


def _by_chance(column: Column, i: int) -> str:
    low, high = written(column, float(column.low[i])), written(column, float(column.high[i]))
    where = "" if column.sure[i] else ", inside"
    return f'<span style="color:{style.GREY}">by chance {low} … {high}{where}</span>'


def _scale(span: tuple[float, float], left: float) -> Callable[[float], float]:
    low, high = span

    def place(value: float) -> float:
        return left + CELL * min(1.0, max(0.0, (value - low) / (high - low)))

    return place


def _columns(table: HeadTable) -> tuple[list[Column], list[float], float, float]:
    """Those that are shown, where each begins, where the lines over training do, and the width of it all."""
    columns = [column for column in table.columns if column.key not in LEFT_OUT]
    each = CELL + NUMBER + GAP
    at = [float(NAME + ROLE + k * each) for k in range(len(columns))]
    end = NAME + ROLE + len(columns) * each
    return columns, at, end, end + (LINE if table.histories else 0)


def _headings(columns: Sequence[Column], at: Sequence[float], lines_at: float | None) -> list[dict[str, Any]]:
    """`lines_at`: where the lines over training begin, if there are any."""
    found = [part for c, left in zip(columns, at, strict=True) for part in _heading(c.title, c.unit, left)]
    return found if lines_at is None else [*found, *_heading("training", "log steps", lines_at)]


def _heading(title: str, unit: str, left: float) -> list[dict[str, Any]]:
    text = f'<b>{style.escaped(title)}</b><br><span style="font-size:11px;color:{style.GREY}">{style.escaped(unit)}'
    return [{
        "x": left, "xref": "x", "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "align": "left",
        "text": f"{text}</span>", "showarrow": False, "font": {"size": 13}, "yshift": 4,
    }]  # fmt: skip


def _rules(rows: Sequence[str], width: float) -> list[dict[str, Any]]:
    """A hairline over the lines, and where a block ends and the next begins."""
    ends = [-0.5, *(i - 0.5 for i in range(1, len(rows)) if rows[i].split(".")[0] != rows[i - 1].split(".")[0])]
    in_order = [int(row.split(".")[0]) for row in rows]
    shown = ends if in_order == sorted(in_order) else ends[:1]
    return [
        {"type": "line", "x0": 0, "x1": width, "y0": y, "y1": y, "line": {"color": style.FAINT, "width": 1}}
        for y in shown
    ]


def _upright(x: float, rows: int) -> dict[str, Any]:
    return {"type": "line", "x0": x, "x1": x, "y0": -0.5, "y1": rows - 0.5, "layer": "below",
            "line": {"color": style.FAINT, "width": 1, "dash": "dot"}}  # fmt: skip


def _bars(bars: Sequence[tuple[float, float, int, bool]], interval: bool) -> dict[str, Any]:
    """Null bands as broad bars, intervals as thin lines."""
    xs, ys = [], []
    for low, high, row, own in bars:
        if own == interval:
            xs += [low, high, None]
            ys += [row, row, None]
    line = {"color": style.rgba(style.INDIGO, 0.9), "width": 2} if interval else {"color": style.FAINT, "width": 8}
    return {"type": "scatter", "mode": "lines", "x": xs, "y": ys, "line": line, "hoverinfo": "skip",
            "name": "interval" if interval else "null"}  # fmt: skip


def _dots(places: Sequence[tuple[float, int]], full: bool) -> dict[str, Any]:
    """Hollow ones carry the page's own colour in no place: their ring is grey, their middle clear."""
    color = style.rgba(style.INDIGO, 1) if full else style.GREY
    marker = {"size": SIZE, "color": color if full else "rgba(0,0,0,0)", "line": {"color": color, "width": 1.6}}
    return {"type": "scatter", "mode": "markers", "x": [x for x, _ in places], "y": [y for _, y in places],
            "marker": marker, "hoverinfo": "skip", "name": "outside" if full else "inside"}  # fmt: skip


def _text(xs: Sequence[float], ys: Sequence[float], texts: Sequence[str], mono: bool = False) -> dict[str, Any]:
    font: dict[str, Any] = {"size": 13} | ({"family": style.MONOSPACE} if mono else {})
    return {"type": "scatter", "mode": "text", "x": list(xs), "y": list(ys), "text": list(texts), "textfont": font,
            "textposition": "middle right", "hoverinfo": "skip", "cliponaxis": False, "name": "text"}  # fmt: skip


def _histories(
    rows: Sequence[str],
    histories: Mapping[str, History],
    left: float,
    touch: list[tuple[float, float, str, str]],
) -> list[dict[str, Any]]:
    xs, ys, ends = [], [], []
    low = min([0.0, *(v for history in histories.values() for v in history.values if v == v)])
    for row, name in enumerate(rows):
        history = histories.get(name)
        if history is None or not len(history.steps):
            continue
        steps = np.log1p(np.asarray(history.steps, dtype=float))
        x = left + (LINE - 12) * steps / max(float(steps[-1]), 1e-9)
        y = row + 0.36 - 0.72 * (np.asarray(history.values, dtype=float) - low) / (1 - low)
        xs += [*x.tolist(), None]
        ys += [*y.tolist(), None]
        ends.append((float(x[-1]), float(y[-1])))
        hover = (
            f"head {name}<br>{style.escaped(history.what)} over training: {style.signed(float(history.values[0]))} at "
            f"step {history.steps[0]:,}, {style.signed(float(history.values[-1]))} at step {history.steps[-1]:,}"
        )
        touch += [(left + LINE * share, row, name, hover) for share in (0.2, 0.6)]
    line = {"type": "scatter", "mode": "lines", "x": xs, "y": ys, "hoverinfo": "skip", "name": "over training",
            "line": {"color": style.rgba(style.INDIGO, 0.8), "width": 1.5}}  # fmt: skip
    marker = {"size": 4, "color": style.rgba(style.INDIGO, 1)}
    dots = {"type": "scatter", "mode": "markers", "x": [x for x, _ in ends], "y": [y for _, y in ends],
            "marker": marker, "hoverinfo": "skip", "name": "end"}  # fmt: skip
    return [line, dots]


def _touch(places: Sequence[tuple[float, float, str, str]]) -> dict[str, Any]:
    """What answers hover and click: clear squares over the cells, customdata the head."""
    clear = {"marker": {"opacity": 0}}
    return {
        "type": "scatter", "mode": "markers", "x": [x for x, *_ in places], "y": [y for _, y, *_ in places],
        "marker": {"symbol": "square", "size": ROW - 2, "opacity": 0}, "selected": clear, "unselected": clear,
        "customdata": [name for *_, name, _ in places], "hovertext": [said for *_, said in places],
        "hovertemplate": "%{hovertext}<extra></extra>", "name": "heads",
    }  # fmt: skip
