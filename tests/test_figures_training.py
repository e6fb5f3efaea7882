"""The figure of what was logged: its lines are the numbers of metrics.jsonl."""

from typing import Any

import numpy as np
import pytest

from workbench.errors import BadRun
from workbench.figures.dynamics import START
from workbench.figures.training import metrics_curves, metrics_figure

ONE = [
    {"step": 0, "loss": None, "held_out_loss": 4.0, "held_out_accuracy": 0.1},
    {"step": 10, "loss": 3.0, "held_out_loss": 2.0, "held_out_accuracy": 0.4},
    {"step": 100, "loss": 1.0, "held_out_loss": 0.5, "held_out_accuracy": 1.0},
]
OTHER = [line | {"held_out_loss": line["held_out_loss"] + 1} for line in ONE]


def lines_of(figure, axis):
    """The solid lines on one panel, without what is only in the key."""
    return [
        trace for trace in figure.data if trace.yaxis == axis and trace.line.dash != "dot" and trace.x[0] is not None
    ]


def test_each_seed_is_a_line_and_their_median_another():
    figure: Any = metrics_figure("m", {0: ONE, 3: OTHER}, cursor=10)
    first, second, median = lines_of(figure, "y2")
    assert list(first.x) == [START, 10, 100] and list(first.y) == [4.0, 2.0, 0.5] and list(second.y) == [5.0, 3.0, 1.5]
    assert list(median.y) == [4.5, 2.5, 1.0] and "seed 3" in second.hovertemplate
    loss = lines_of(figure, "y")[0]
    assert np.isnan(loss.y[0]) and list(loss.y[1:]) == [3.0, 1.0]  # nothing was trained at step 0
    assert figure.layout.shapes[-1].x0 == 10 and "training loss" in figure.layout.annotations[0].text
    assert not [trace for trace in figure.data if trace.line.dash == "dot"]


def test_chance_is_a_dotted_line_on_the_accuracy():
    figure: Any = metrics_figure("m", {0: ONE}, chance=0.25)
    (dotted,) = [trace for trace in figure.data if trace.line.dash == "dot"]
    assert dotted.yaxis == "y3" and list(dotted.y) == [0.25, 0.25] and list(dotted.x) == [START, 100]


def test_of_two_lines_of_a_step_the_later_holds_and_what_is_no_number_is_a_gap():
    curves = metrics_curves("m", 0, [*ONE, {"step": 10, "loss": "high", "held_out_loss": True}])
    assert curves.steps.tolist() == [0, 10, 100]
    assert np.isnan(curves.loss[1]) and np.isnan(curves.held_out_loss[1]) and np.isnan(curves.held_out_accuracy[1])


@pytest.mark.parametrize("lines", [[], ONE[:1]])
def test_without_a_step_of_training_there_is_nothing_to_draw(lines):
    with pytest.raises(BadRun, match="m has no logged step of a training"):
        metrics_figure("m", {0: lines})
