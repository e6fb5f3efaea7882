"""Loss and accuracy over training, of runs that were not probed: panels as those of workbench.figures.dynamics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float

from workbench.dynamics import Dynamics, Series
from workbench.errors import BadRun
from workbench.figures import style
from workbench.figures.dynamics import START, dynamics_figure

PANELS = ("loss", "held_out_loss", "held_out_accuracy")
LOSS = "training loss, mean since the last logged step, nats"
Lines = Sequence[Mapping[str, Any]]
"""Of metrics.jsonl: one a logged step."""


def metrics_figure(
    model: str, metrics: Mapping[int, Lines], *, chance: float | None = None, cursor: int | None = None
) -> go.Figure:
    """Training loss, held-out loss and held-out accuracy of one model. Thin lines: seeds; the thick one: median.

    `metrics`: seed → lines as `Run.metrics` gives them. `chance`: of the accuracy, dotted. `cursor`: the step of one
    checkpoint. Raises: BadRun if nothing was trained.
    """
    curves = [metrics_curves(model, seed, lines) for seed, lines in metrics.items()]
    if not any(len(each.steps) and each.steps[-1] for each in curves):
        raise BadRun(f"{model} has no logged step of a training")
    figure: Any = dynamics_figure(curves, panels=PANELS, cursor=cursor)
    figure.data = [trace for trace in figure.data if trace.line.dash != "dot"]  # nothing here has a null drawn
    figure.layout.annotations[0].text = LOSS
    if chance is not None:
        dotted = {"color": style.GREY, "width": 1, "dash": "dot"}
        ends = [START, max(int(each.steps[-1]) for each in curves)]
        figure.add_scatter(x=ends, y=[chance] * 2, mode="lines", line=dotted, name=f"chance, {chance:.3g}",
                           hoverinfo="skip", xaxis="x3", yaxis="y3")  # fmt: skip
    return figure


def metrics_curves(model: str, seed: int, lines: Lines) -> Dynamics:
    """What metrics.jsonl says, as the probes would say it, with the training loss as a series without a null.

    Of two lines of one step the later holds; what is no number is NaN.
    """
    by_step = {line["step"]: line for line in lines}
    steps = sorted(by_step)
    loss, held_out_loss, accuracy = (_numbers([by_step[step].get(name) for step in steps]) for name in PANELS)
    nothing = np.full(len(steps), np.nan)
    return Dynamics(
        model, seed, Path(), np.array(steps, dtype=int), loss, held_out_loss, accuracy, np.zeros((len(steps), 0)),
        {"loss": Series("loss", loss, nothing, nothing)}, {}, (),
    )  # fmt: skip


def _numbers(values: Sequence[Any]) -> Float[np.ndarray, "step"]:
    return np.array([float(value) if type(value) in (int, float) else np.nan for value in values], dtype=float)
