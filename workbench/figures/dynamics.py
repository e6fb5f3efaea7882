"""Training you can watch: one panel a score, all on one logarithmic axis of steps.

Thin lines are seeds, the thick one is their median; the dotted line is what chance allows the largest of so many heads
or pairs. A phase change is shaded from where it begins to where it ends (medians over seeds), and fainter as far as
the intervals of the two reach. Step 0 has no place on a logarithmic axis and stands at the left edge.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from workbench.dynamics import CHANGES, EDGES, Dynamics, PhaseChange
from workbench.errors import BadRun
from workbench.figures import style

COLORS = (style.INDIGO, style.BROWN, style.TEAL)
"""One a model, in turn."""
TITLES = {
    "held_out_loss": "held-out loss, nats",
    "held_out_accuracy": "held-out accuracy, 0 … 1",
    "previous_token": "attention to the previous token, the highest head, 0 … 1",
    "current_token": "attention to the token itself, the highest head, 0 … 1",
    "duplicate_token": "attention to earlier occurrences, the highest head, −1 … 1",
    "prefix_matching": "prefix matching (attention to what followed earlier occurrences), the highest head, −1 … 1",
    "copying": "share of what is moved that is on its own token, the highest head, 0 … 1",
    "composition.Q": "Q-composition beyond K and V, the highest pair, z",
    "composition.K": "K-composition beyond Q and V, the highest pair, z",
    "composition.V": "V-composition beyond Q and K, the highest pair, z",
    "copying.eigenvalue": "copying, Σ Re λ / Σ |λ|, the highest head, −1 … 1",
    "copying.argmax": "copying, tokens that raise themselves most, the highest head, 0 … 1",
    "in_context": "in-context learning: loss late in the context below loss early, nats",
}
PANELS = ("held_out_loss", *CHANGES)
HEIGHT, TITLE, GAP, LEFT = 112, 22, 12, 56  # pixels: of a panel, its title, the space below it, the numbers at its left
TOP, BOTTOM = 48, 44  # pixels: the key and the name of the step under it, the steps
START = 0.6  # where step 0 stands


def dynamics_figure(
    runs: Sequence[Dynamics],
    changes: Sequence[PhaseChange] = (),
    *,
    panels: Sequence[str] = PANELS,
    cursor: int | None = None,
) -> go.Figure:
    """Panels of one or more models, each with its seeds; `changes` as `workbench.dynamics.phase_changes` gives them.

    `panels`: "held_out_loss", "held_out_accuracy" and names of series; those that no run has are left out. `cursor`:
    the step of one checkpoint. Raises: BadRun if no run has any of the panels.
    """
    shown = [panel for panel in panels if any(run.has(panel) for run in runs)]
    if not shown:
        raise BadRun(f"none of the runs has {', '.join(panels)}; they have {', '.join(runs[0].series) or 'no probes'}")
    pitch = TITLE + HEIGHT + GAP
    height = TOP + pitch * len(shown) + BOTTOM
    plot = height - TOP - BOTTOM
    data: list[dict[str, Any]] = []
    legend = {"orientation": "h", "x": 0, "y": 1, "yanchor": "top", "yref": "container", "font": {"size": 13}}
    margin = {"l": LEFT, "r": 12, "t": TOP, "b": BOTTOM}
    layout = style.layout(height, margin=margin, showlegend=True, legend=legend, shapes=[], annotations=[])
    models = list(dict.fromkeys(run.model for run in runs))
    last = max(int(run.steps[-1]) for run in runs)
    for i, panel in enumerate(shown):
        number = str(i + 1) if i else ""
        top = 1 - (i * pitch + TITLE) / plot
        domain = [top - HEIGHT / plot, top]
        for color, model in zip(_colors(len(models)), models, strict=True):
            group = [run for run in runs if run.model == model]
            data += _lines(group, panel, number, color, first=i == 0, several=len(models) > 1)
            layout["shapes"] += [
                shape
                for change in changes
                if change.model == model and change.measure == panel
                for shape in _shades(change, number, color)
            ]
        layout["annotations"].append({
            "text": _title(panel), "x": 0, "y": domain[1], "xref": "paper",
            "yref": "paper", "xanchor": "left", "yanchor": "bottom", "yshift": 2, "showarrow": False,
            "font": {"size": 13},
        })  # fmt: skip
        layout[f"yaxis{number}"] = _axis() | {"domain": domain, "anchor": f"x{number}", "nticks": 4}
        layout[f"xaxis{number}"] = _axis() | _steps(last, i == len(shown) - 1) | {"anchor": f"y{number}"}
        layout[f"xaxis{number}"] |= {"matches": "x"} if i else {}
    if cursor is not None:
        layout["shapes"].append({
            "type": "line", "x0": max(cursor, START), "x1": max(cursor, START), "xref": "x", "y0": 0, "y1": 1,
            "yref": "paper", "line": {"color": style.GREY, "width": 1.5},
        })  # fmt: skip
        layout["annotations"].append({
            "text": f"step {cursor:,}", "x": np.log10(max(cursor, START)), "xref": "x", "y": 1, "yref": "paper",
            "yanchor": "bottom", "showarrow": False, "font": {"size": 13}, "xanchor": "right",
        })  # fmt: skip
    return go.Figure(data, layout)


def _title(panel: str) -> str:
    if panel.startswith(EDGES):
        return f"what cutting {panel.removeprefix(EDGES).replace('→', ' → ')} costs, nats of answer − foil"
    return TITLES.get(panel, panel)


def _lines(
    runs: Sequence[Dynamics], panel: str, axis: str, color: tuple[int, int, int], *, first: bool, several: bool
) -> list[dict[str, Any]]:
    """Each seed, their median, and what chance allows."""
    drawn = [(run, run.curve(panel).values) for run in runs if run.has(panel)]
    if not drawn:
        return []
    at = {"type": "scatter", "mode": "lines", "xaxis": f"x{axis}", "yaxis": f"y{axis}"}
    lines = []
    for run, values in drawn:
        alone = len(drawn) == 1
        lines.append(at | {
            "x": np.maximum(run.steps, START), "y": values, "customdata": run.steps, "showlegend": False,
            "line": {"color": style.rgba(color, 1 if alone else 0.4), "width": 2 if alone else 1},
            "hovertemplate": f"{run.model} seed {run.seed}, step %{{customdata:,}}: %{{y:.3g}}<extra></extra>",
        })  # fmt: skip
    steps, median = _median([(run.steps, values) for run, values in drawn])
    if len(drawn) > 1:
        lines.append(at | {
            "x": np.maximum(steps, START), "y": median, "hoverinfo": "skip", "showlegend": False,
            "line": {"color": style.rgba(color, 1), "width": 2.5},
        })  # fmt: skip
    chance = [(run.steps, run.curve(panel).bound) for run, _ in drawn if panel in run.series]
    if chance:
        steps, bound = _median(chance)
        lines.append(at | {
            "x": np.maximum(steps, START), "y": bound, "hoverinfo": "skip", "showlegend": False,
            "line": {"color": style.rgba(color, 0.8) if several else style.GREY, "width": 1, "dash": "dot"},
        })  # fmt: skip
    if first:
        seeds = f"{len(drawn)} seeds" if len(drawn) > 1 else f"seed {drawn[0][0].seed}"
        name = f"{runs[0].model}, {seeds}"
        lines.append(at | {"x": [None], "y": [None], "name": name, "line": {"color": style.rgba(color, 1), "width": 3}})
        if not several:
            dotted = {"color": style.GREY, "width": 1, "dash": "dot"}
            lines.append(at | {"x": [None], "y": [None], "name": "chance", "line": dotted})
    return lines


def _median(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[Float[np.ndarray, "step"], Float[np.ndarray, "step"]]:
    """At the steps that all curves have."""
    steps = sorted(set.intersection(*(set(at.tolist()) for at, _ in curves)))
    rows = [[dict(zip(at.tolist(), values.tolist(), strict=True))[step] for step in steps] for at, values in curves]
    return np.array(steps, dtype=float), np.median(np.array(rows), axis=0)


def _shades(change: PhaseChange, axis: str, color: tuple[int, int, int]) -> list[dict[str, Any]]:
    if change.begins is None or change.ends is None or change.begin_interval is None or change.end_interval is None:
        return []
    spans = ((change.begins, change.ends, 0.16), (change.begin_interval[0], change.end_interval[1], 0.08))
    return [
        {
            "type": "rect", "x0": max(x0, START), "x1": max(x1, START), "y0": 0, "y1": 1, "xref": f"x{axis}",
            "yref": f"y{axis} domain", "fillcolor": style.rgba(color, alpha), "line": {"width": 0}, "layer": "below",
        }
        for x0, x1, alpha in spans
    ]  # fmt: skip


def _axis() -> dict[str, Any]:
    return {
        "showgrid": False, "zeroline": False, "showline": True, "linecolor": style.FAINT, "linewidth": 1,
        "ticks": "outside", "ticklen": 4, "tickcolor": style.FAINT, "tickfont": {"size": 13}, "fixedrange": True,
    }  # fmt: skip


def _steps(last: int, labelled: bool) -> dict[str, Any]:
    """The axis of steps: 0, then 1, 3, 10, 30 …"""
    round_steps = [digit * 10**n for n in range(len(str(last))) for digit in (1, 3) if digit * 10**n <= last]
    axis = {
        "type": "log", "range": [np.log10(START) - 0.03, np.log10(last) + 0.03], "tickmode": "array",
        "tickvals": [START, *round_steps], "ticktext": ["0", *(f"{step:,}" for step in round_steps)],
        "showticklabels": labelled,
    }  # fmt: skip
    return axis | ({"title": {"text": "step of training", "font": {"size": 13}}} if labelled else {})


def _colors(n: int) -> list[tuple[int, int, int]]:
    return [COLORS[i % len(COLORS)] for i in range(n)]
