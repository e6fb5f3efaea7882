"""What the stream would say at each place, which component adds what, and what a patched activation restores."""

import html
import math
from collections.abc import Iterator, Sequence
from typing import Any

import plotly.graph_objects as go

from circuits.lens import Attribution, Patching, StreamWords
from workbench.figures import style

MOST = 24
"""Components that get a bar of their own."""
ROW, SIDE = 30, 26  # pixels of a line
HEAD, GAP, FOOT = 58, 44, 100  # pixels: the colour key and a title, between two grids, the words under them
BEHIND_WORDS: style.Scale = [[0, style.rgba(style.INDIGO, 0.0)], [1, style.rgba(style.INDIGO, style.SHADE)]]
PARTS = {"resid_pre": "the stream before a block", "attn_out": "what attention writes", "mlp_out": "what neurons write"}


def lens_figure(
    found: StreamWords, tokens: Sequence[str], vocabulary: Sequence[str], destination: int = -1
) -> go.Figure:
    """A row for each place of the stream, the input below and the model's own prediction on top; a column a position.

    The word that the stream would say, if it ended there; shaded by its probability. In a prompt of more than 20 words
    the words are in the hover alone. The destination's column is framed.
    """
    p = found.probabilities[..., : len(vocabulary)]
    best, length = p.max(-1), len(tokens)
    says = [[str(vocabulary[t]) for t in row] for row in best.indices.tolist()]
    top = p.topk(min(3, p.shape[-1]), dim=-1)
    hover = [
        [
            f"{html.escape(place)}<br>at {j} ‘{style.escaped(tokens[j])}’<br>"
            + "<br>".join(
                f"‘{style.escaped(str(vocabulary[t]))}’ {100 * share:.1f} %"
                for t, share in zip(top.indices[i, j].tolist(), top.values[i, j].tolist(), strict=True)
            )
            for j in range(length)
        ]
        for i, place in enumerate(found.places)
    ]
    shown = length <= style.MAX_TICKS
    cell = 9
    heat: dict[str, Any] = {
        "type": "heatmap", "z": best.values.tolist(),
        "customdata": hover, "hovertemplate": "%{customdata}<extra></extra>", "xgap": _gap(length), "ygap": 1,
        "coloraxis": "coloraxis", "name": "stream",
    }  # fmt: skip
    if shown:
        cut = [
            [word if len(word) <= cell else word[: cell - 1] + "…" for word in map(style.visible, row)] for row in says
        ]
        heat |= {"text": [[html.escape(word, quote=False) for word in row] for row in cut], "texttemplate": "%{text}",
                 "textfont": {"size": 12, "family": style.MONOSPACE}}  # fmt: skip
    at = range(length)[destination]
    frame = {"type": "rect", "x0": at - 0.5, "x1": at + 0.5, "y0": -0.5, "y1": len(found.places) - 0.5,
             "line": {"color": style.GREY, "width": 1.5}}  # fmt: skip
    height = HEAD + len(found.places) * ROW + FOOT
    layout = style.layout(
        height, shapes=[frame], margin={"l": 150, "r": 8, "t": 0, "b": 0}, xaxis=_words(tokens),
        yaxis=_rows(found.places, reverse=False) | {"domain": [FOOT / height, 1 - HEAD / height]}, coloraxis={
            "colorscale": BEHIND_WORDS, "cmin": 0, "cmax": 1,
            "colorbar": _key("probability of the word", 0, 1, ["0", "1"]),
        },
    )  # fmt: skip
    return go.Figure([heat], layout)


def attribution_figure(found: Attribution, what: str) -> go.Figure:
    """A bar for each component, in the order of the model, brown towards the answer and teal towards the foil.

    Of more than 24 components the largest have bars, the others together one. `what` names answer − foil.
    """
    named = [
        (component_words(name), value) for name, value in zip(found.components, found.values.tolist(), strict=True)
    ]
    if len(named) > MOST:
        large = set(sorted(range(len(named)), key=lambda i: -abs(named[i][1]))[: MOST - 1])
        rest = [value for i, (_, value) in enumerate(named) if i not in large]
        named = [pair for i, pair in enumerate(named) if i in large] + [(f"{len(rest)} others", sum(rest))]
    values = [value for _, value in named]
    reach = max([0.01, *map(abs, values)])
    bars = {
        "type": "bar", "orientation": "h", "x": values, "y": list(range(len(named))), "name": "components",
        "marker": {"color": [style.rgba(style.BROWN if v > 0 else style.TEAL, 0.85) for v in values]}, "width": 0.7,
        "text": [style.signed(value) for value in values], "textposition": "outside", "cliponaxis": False,
        "customdata": [name for name, _ in named], "hovertemplate": "%{customdata}: %{x:+.3f} logits<extra></extra>",
    }  # fmt: skip
    layout = style.layout(
        60 + 24 * len(named), margin={"l": 150, "r": 50, "t": 6, "b": 46}, yaxis=_rows([name for name, _ in named]),
        xaxis={
            "range": [-1.2 * reach, 1.2 * reach], "fixedrange": True, "showgrid": False, "zeroline": True,
            "zerolinecolor": style.GREY, "tickfont": {"size": 13}, "nticks": 7,
            "title": {"text": f"logits of {html.escape(what, quote=False)}", "font": {"size": 13}},
        },
    )  # fmt: skip
    return go.Figure([bars], layout)


def patching_figure(
    found: Patching, tokens: Sequence[str], other: Sequence[str], *, normalised: bool = True, clickable: bool = False
) -> go.Figure:
    """Grids, a column a position: the stream before each block, what attention and neurons write, and each head.

    Cells: what one clean activation makes of the corrupted run's answer − foil; `normalised` 0 as corrupted and 1 as
    clean, else the change of logits. Columns where the prompts differ are framed. `clickable` lays an invisible marker
    over each cell, its customdata the part, row and position. Raises: Undefined if normalised and nothing differs.
    """
    both = [s if s == t else f"{s} | {t}" for s, t in zip(tokens, other, strict=True)]
    grids = [
        (PARTS[name], values, [f"block {i + 1}" for i in range(len(values))]) for name, values in found.parts.items()
    ]
    if found.heads.shape[-1] == len(tokens):
        names = [f"{layer}.{head}" for layer in range(found.heads.shape[0]) for head in range(found.heads.shape[1])]
        grids.append(("what one head has gathered", found.heads.flatten(0, 1), names))
    cells = [found.restored(values) if normalised else values - found.corrupted for _, values, _ in grids]
    top = 1.0 if normalised else 0.0
    top = max([top, 1e-6, *(float(values.abs().max()) for values in cells)])
    unit = "restored" if normalised else "change in logits"
    heights = [len(rows) * _row(len(rows)) for _, _, rows in grids]
    height = HEAD + sum(heights) + GAP * (len(grids) - 1) + FOOT
    data: list[dict[str, Any]] = []
    layout = style.layout(height, margin={"l": 92, "r": 8, "t": 0, "b": 0}, shapes=[], annotations=[])
    layout["coloraxis"] = {
        "colorscale": style.DIFFERENCE, "cmin": -top, "cmax": top,
        "colorbar": _key(unit, -top, top, [style.signed(-top), style.signed(top)]),
    }  # fmt: skip
    upper = 1 - HEAD / height
    for k, ((title, _, rows), values) in enumerate(zip(grids, cells, strict=True)):
        number, size = str(k + 1) if k else "", heights[k] / height
        axes = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
        write = [[style.signed(value) for value in row] for row in values.tolist()]
        said = [
            [
                f"{title}, {rows[i]}<br>at {j} ‘{style.escaped(both[j])}’: {write[i][j]} {unit}"
                for j in range(len(tokens))
            ]
            for i in range(len(rows))
        ]
        data.append({
            "type": "heatmap", "z": values.tolist(), "coloraxis": "coloraxis", "name": title,
            "xgap": _gap(len(tokens)), "ygap": 1,
            "customdata": said, "hovertemplate": "%{customdata}<extra></extra>", **axes,
        })  # fmt: skip
        if clickable and len(tokens) <= style.MAX_TOUCH:
            data.append(_touch(title, rows, said, axes))
        last = k == len(grids) - 1
        layout[f"xaxis{number}"] = _words(tokens) | {"anchor": f"y{number}", "showticklabels": last}
        layout[f"yaxis{number}"] = _rows(rows) | {"anchor": f"x{number}", "domain": [upper - size, upper]}
        layout["annotations"].append({
            "text": title, "x": 0, "y": upper, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
            "yshift": 5, "showarrow": False, "font": {"size": 14},
        })  # fmt: skip
        layout["shapes"].append({
            "type": "rect", "x0": -0.5, "x1": len(tokens) - 0.5, "y0": -0.5, "y1": len(rows) - 0.5,
            "xref": f"x{number}", "yref": f"y{number}", "line": {"color": style.FAINT, "width": 1},
        })  # fmt: skip
        layout["shapes"] += [
            {"type": "rect", "x0": j - 0.5, "x1": j + 0.5, "y0": -0.5, "y1": len(rows) - 0.5, "xref": f"x{number}",
             "yref": f"y{number}", "line": {"color": style.GREY, "width": 1, "dash": "dot"}}
            for j in style.differing(tokens, other)
        ]  # fmt: skip
        upper -= size + GAP / height
    return go.Figure(data, layout)


def stream_records(found: StreamWords, tokens: Sequence[str], vocabulary: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What the stream would say at each place and position, and the probability of that word."""
    best = found.probabilities[..., : len(vocabulary)].max(-1)
    for place, words, shares in zip(found.places, best.indices.tolist(), best.values.tolist(), strict=True):
        for j, (word, share) in enumerate(zip(words, shares, strict=True)):
            yield {"place": place, "position": j, "token": tokens[j], "says": str(vocabulary[word]),
                   "probability": share}  # fmt: skip


def attribution_records(found: Attribution) -> Iterator[dict[str, Any]]:
    """What each component adds straight to answer − foil, in logits."""
    for name, value in zip(found.components, found.values.tolist(), strict=True):
        yield {"component": component_words(name), "adds to answer − foil": value}


def patching_records(found: Patching, tokens: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every cell, raw: logits of answer − foil with that activation patched, beside both runs' own."""
    ends = {"corrupted": found.corrupted, "clean": found.clean}
    for part, values in found.parts.items():
        for layer, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                yield {"part": part, "block": layer + 1, "head": "", "position": j, "token": tokens[j],
                       "answer − foil": value, **ends}  # fmt: skip
    everywhere = found.heads.shape[-1] != len(tokens)
    for layer, heads in enumerate(found.heads.tolist()):
        for head, row in enumerate(heads):
            for j, value in enumerate(row):
                where = {"position": "all", "token": ""} if everywhere else {"position": j, "token": tokens[j]}
                yield {"part": "head", "block": layer + 1, "head": f"{layer}.{head}", **where,
                       "answer − foil": value, **ends}  # fmt: skip


def component_words(component: str) -> str:
    """A component's name as it is read."""
    layer, _, part = component.partition(".")
    if part == "mlp":
        return f"neurons of block {int(layer) + 1}"
    names = {"embed": "embedding", "pos": "position", "bias": "output biases", "last norm": "last norm's bias"}
    return f"head {component}" if part else names[component]


def _gap(length: int) -> int:
    """Pixels between two columns: none where they are narrow."""
    return 1 if length <= 2 * style.MAX_TOUCH else 0


def _row(n: int) -> int:
    """Pixels of a line: many heads are drawn thinner."""
    return SIDE if n <= 16 else 14


def _touch(title: str, rows: Sequence[str], said: list[list[str]], axes: dict[str, str]) -> dict[str, Any]:
    """An invisible marker on each cell: Streamlit hears only those."""
    cells = [(i, j) for i in range(len(rows)) for j in range(len(said[0]))]
    return {
        "type": "scatter", "mode": "markers", "x": [j for _, j in cells], "y": [i for i, _ in cells],
        "marker": {"symbol": "square", "size": _row(len(rows)) - 2, "opacity": 0}, "name": title,
        "selected": {"marker": {"opacity": 0}}, "unselected": {"marker": {"opacity": 0}},
        "customdata": [[title, rows[i], j] for i, j in cells], "hovertext": [said[i][j] for i, j in cells],
        "hovertemplate": "%{hovertext}<extra></extra>", **axes,
    }  # fmt: skip


def _key(title: str, low: float, high: float, ends: list[str]) -> dict[str, Any]:
    return {
        "orientation": "h", "thickness": 8, "lenmode": "pixels", "len": 150, "outlinewidth": 0.5, "xpad": 0, "ypad": 0,
        "outlinecolor": style.FAINT, "tickvals": [low, high], "ticktext": ends, "ticklen": 0, "tickfont": {"size": 13},
        "title": {"text": title, "side": "top", "font": {"size": 13}}, "x": 0, "xanchor": "left",
        "yref": "container", "y": 1, "yanchor": "top",
    }  # fmt: skip


def _words(tokens: Sequence[str]) -> dict[str, Any]:
    at, labels = style.tick_positions(len(tokens)), style.tick_labels(tokens)
    return {
        "tickmode": "array", "tickvals": at, "ticktext": [labels[i] for i in at], "tickangle": -90, "fixedrange": True,
        "tickfont": {"family": style.MONOSPACE, "size": 13}, "showgrid": False, "zeroline": False, "ticks": "",
        "range": [-0.5, len(tokens) - 0.5], "ticklabelstandoff": 6,
    }  # fmt: skip


def _rows(names: Sequence[str], reverse: bool = True) -> dict[str, Any]:
    step = math.ceil(len(names) / 36)
    at = list(range(0, len(names), step))
    span = [len(names) - 0.5, -0.5] if reverse else [-0.5, len(names) - 0.5]
    return {
        "tickmode": "array", "tickvals": at, "ticktext": [names[i] for i in at], "tickfont": {"size": 13}, "ticks": "",
        "range": span, "fixedrange": True, "showgrid": False, "zeroline": False, "ticklabelstandoff": 6,
    }  # fmt: skip
