"""How much the named words of a task look at each other, on average over its sentences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from circuits.attention import RoleAttention
from workbench.figures import style
from workbench.figures.numbers import Head, head_name

CELL, LEFT, TOP, BOTTOM = 52, 92, 30, 84  # pixels
SPACE = 0.04  # of the width


def roles_figure(attention: RoleAttention, head: Head | None = None, layers: Sequence[int] | None = None) -> go.Figure:
    """Mean attention from role (row) to role (column), one map a block (the mean over its heads) or that of a head.

    The last column is all other words together, so that rows sum to 1. In the hover: the mean ± its standard error
    (clustered), and what attention would give that is spread evenly over what the row sees.
    """
    _, n_layers, n_heads = attention.attention.shape[:3]
    chosen = list(range(n_layers)) if layers is None else list(layers)
    which = [(layer, None) for layer in chosen] if head is None else [head]
    how = "its one head" if n_heads == 1 else f"mean of {n_heads} heads"
    n_roles, n_sources = len(attention.roles), len(attention.sources)
    even = attention.even.numpy()
    seen = np.concatenate([np.tri(n_roles, dtype=bool), np.ones((n_roles, 1), dtype=bool)], axis=1)
    width = (1 - SPACE * (len(which) - 1)) / max(len(which), 1)
    data, layout = [], _layout(n_roles)
    for i, (layer, one) in enumerate(which):
        mean, error = (part.numpy() for part in attention.mean(layer, one))
        title = f"block {layer + 1} · " + (how if one is None else f"head {head_name((layer, one))}")
        hover = [
            [
                f"at {attention.roles[d]} → {attention.sources[s]}: {mean[d, s]:.2f} ± {error[d, s]:.2f}, "
                f"even {even[d, s]:.2f}" if seen[d, s] else ""
                for s in range(n_sources)
            ]
            for d in range(n_roles)
        ]  # fmt: skip
        number, left = str(i + 1) if i else "", i * (width + SPACE)
        data.append({
            "type": "heatmap", "z": np.where(seen, mean, np.float32(np.nan)), "customdata": hover, "name": title,
            "text": [[f"{mean[d, s]:.2f}" if seen[d, s] else "" for s in range(n_sources)] for d in range(n_roles)],
            "texttemplate": "%{text}", "textfont": {"size": 13}, "hovertemplate": "%{customdata}<extra></extra>",
            "hoverongaps": False, "xgap": 1, "ygap": 1, "coloraxis": "coloraxis", "xaxis": f"x{number}",
            "yaxis": f"y{number}",
        })  # fmt: skip
        ticks = {"tickmode": "array", "ticks": "", "showgrid": False, "zeroline": False, "fixedrange": True,
                 "constrain": "domain", "tickfont": {"family": style.MONOSPACE, "size": 13},
                 "ticklabelstandoff": 6}  # fmt: skip
        layout[f"xaxis{number}"] = ticks | {
            "domain": [left, left + width], "anchor": f"y{number}", "tickvals": list(range(n_sources)),
            "ticktext": [_coloured(name) for name in attention.sources], "tickangle": -45, "constraintoward": "left",
        }  # fmt: skip
        layout[f"yaxis{number}"] = ticks | {
            "anchor": f"x{number}", "tickvals": list(range(n_roles)), "range": [n_roles - 0.5, -0.5],
            "ticktext": [_coloured(name) for name in attention.roles], "showticklabels": not i,
            "scaleanchor": f"x{number}", "constraintoward": "top",
        }  # fmt: skip
        layout["annotations"].append({
            "text": title, "x": left, "y": 1, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
            "yshift": 6, "showarrow": False, "font": {"size": 14},
        })  # fmt: skip
    return go.Figure(data, layout)


def _layout(n_roles: int) -> dict[str, Any]:
    return style.layout(
        TOP + CELL * n_roles + BOTTOM, annotations=[], margin={"l": LEFT, "r": 8, "t": TOP, "b": BOTTOM},
        coloraxis={"colorscale": style.ATTENTION, "cmin": 0, "cmax": 1, "showscale": False},
    )  # fmt: skip


def _coloured(role: str) -> str:
    """The role with a mark in its colour."""
    return f'<span style="color:{style.role_color(role)}">▍</span>{style.escaped(role)}'
