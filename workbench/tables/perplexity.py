"""A loss and its perplexity over seeds, with the error that text and seeds give them."""

import math
from collections.abc import Sequence

import numpy as np

from workbench.runs import Run
from workbench.statistics import Z_95
from workbench.tables.table import Row, mean

NOTE = (
    "95 %: mean ± 1.96 standard errors of the loss; the error is that of the text (neighbouring windows go together) "
    "and, with several seeds, of the seeds; with one seed it says nothing about other seeds"
)


def nats(losses: Sequence[float], errors: Sequence[float]) -> Row:
    """Losses [seed], or differences of losses, and the text's standard error of each: mean, 95 % interval, per seed."""
    error = mean(errors)
    if len(losses) > 1:
        error = math.hypot(error, float(np.std(losses, ddof=1)) / math.sqrt(len(losses)))
    centre = mean(losses)
    return {"mean": centre, "interval": [centre - Z_95 * error, centre + Z_95 * error], "per_seed": list(losses)}


def perplexity(losses: Sequence[float], errors: Sequence[float]) -> Row:
    """The same as exp(loss): the mean is exp of the mean loss."""
    loss = nats(losses, errors)
    return {
        "mean": math.exp(loss["mean"]),
        "interval": [math.exp(end) for end in loss["interval"]],
        "per_seed": [math.exp(one) for one in loss["per_seed"]],
    }


def held_out_perplexity(runs: Sequence[Run]) -> Row:
    """Of finished runs on a text, from what they were scored at the end of training."""
    scores = [run.results["held_out"] for run in runs]
    return perplexity([s["loss"] for s in scores], [s["measures"]["loss_standard_error"] for s in scores])


def interval_of(figure: Row) -> str:
    low, high = figure["interval"]
    return f"{low:.2f}–{high:.2f}"


def seeds_of(figure: Row) -> str:
    return " ".join(f"{value:.2f}" for value in figure["per_seed"])
