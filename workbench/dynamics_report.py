"""What `workbench dynamics` prints: each score over training as a line of blocks, and when it changes phase."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from workbench.dynamics import EDGES, EFFECTS, PROBES, Dynamics, PhaseChange, phase_changes, read_dynamics
from workbench.errors import WorkbenchError
from workbench.recipes import recipe_names
from workbench.runs import load, runs_folder

BLOCKS = "▁▂▃▄▅▆▇█"
SHOWN = (
    "held_out_loss", "held_out_accuracy", "previous_token", "composition.K", "prefix_matching", "copying.eigenvalue",
    "in_context",
)  # fmt: skip
"""Rows of the table, with the edges."""


@dataclass(frozen=True)
class DynamicsReport:
    runs: list[Dynamics]
    changes: list[PhaseChange]
    faults: list[str]
    """What could not be read, and why; the rest is shown."""

    @property
    def data(self) -> dict[str, Any]:
        """Everything in plain numbers."""
        return {
            "runs": [
                {
                    "model": run.model, "seed": run.seed, "steps": run.steps.tolist(), "loss": _plain(run.loss),
                    "held_out_loss": _plain(run.held_out_loss), "held_out_accuracy": _plain(run.held_out_accuracy),
                    "curves": {name: {"values": _plain(curve.values), "chance": _plain(curve.bound)}
                               for name in run.series for curve in [run.curve(name)]},
                    "undefined": run.undefined,
                }
                for run in self.runs
            ],
            "phase_changes": [asdict(change) | {"found": change.found} for change in self.changes],
            "faults": self.faults,
        }  # fmt: skip

    headings = ("model", "seed", "measure", "over training", "first", "last")

    @property
    def rows(self) -> list[list[str]]:
        """One a score and run, a block a probed step; the seeds of a model on one scale."""
        rows = []
        for model in dict.fromkeys(run.model for run in self.runs):
            group = [run for run in self.runs if run.model == model]
            edges = dict.fromkeys(name for run in group for name in run.series if name.startswith(EDGES))
            for measure in (*SHOWN, *edges):
                curves = [(run, run.curve(measure).values) for run in group if run.has(measure)]
                known = np.concatenate([values[~np.isnan(values)] for _, values in curves]) if curves else np.zeros(0)
                for run, values in curves if len(known) else ():
                    low = float(known.min())  # what counts as no change is drawn as none
                    line = sparkline(values, low, max(float(known.max()), low + EFFECTS.get(measure, 0.0)))
                    ends = [f"{value:.2f}" for value in values[[0, -1]]]
                    rows.append([model, str(run.seed), measure.removeprefix(EDGES), line, *ends])
        return rows

    def lines(self) -> list[str]:
        """The phase changes in words, then what is undefined."""
        lines = []
        for model in dict.fromkeys(change.model for change in self.changes):
            group = [change for change in self.changes if change.model == model]
            found = [change for change in group if change.found]
            none = [change.measure for change in group if change.seeds and not change.found]
            seeds = max(change.seeds for change in group)
            for change in found:
                lines.append(f"{repr(change).removesuffix(f', {change.found} of {change.seeds}')} "
                             f"in {change.found} of {change.seeds} seeds")  # fmt: skip
            if none:
                lines.append(
                    f"{model}: no phase change in {', '.join(none)} ({seeds} {'seeds' if seeds > 1 else 'seed'})"
                )
        undefined = {(run.model, probe): why for run in self.runs for probe, why in run.undefined.items()}
        return lines + [f"{model}: no {probe}: {why}" for (model, probe), why in undefined.items()]

    def html(self, cursor: int | None = None) -> str:
        """The figure as a page of its own, which needs no network."""
        from workbench.figures.attention import figure_html
        from workbench.figures.dynamics import PANELS, dynamics_figure

        edges = dict.fromkeys(name for run in self.runs for name in run.series if name.startswith(EDGES))
        figure = dynamics_figure(self.runs, self.changes, panels=(*PANELS, *edges), cursor=cursor)
        return figure_html(figure, f"dynamics-{self.runs[0].model}")


def dynamics_report(
    names: Sequence[str | Path], seed: int | None = None, *, every_seed: bool = False, probe: bool = False
) -> DynamicsReport:
    """Read runs by name or folder; `every_seed` takes all that are trained of each name.

    `probe` reads the probes of runs that have none from their checkpoints first, which needs torch and some seconds.
    What cannot be read is named, and the rest is shown. Raises: what the first fault says if nothing can be read.
    """
    runs, errors = [], []
    wanted = [(name, each) for name in names for each in (_seeds(name) if every_seed else [seed])]
    for name, each in wanted:
        try:
            if probe:
                _probe(name, each)
            runs.append(read_dynamics(name, each))
        except WorkbenchError as error:
            errors.append(error)
    if not runs:
        raise errors[0]
    faults = [*map(str, errors), *(fault for run in runs for fault in run.faults), *_differences(runs)]
    return DynamicsReport(runs, phase_changes(runs), faults)


def sparkline(values: Float[np.ndarray, "step"], low: float, high: float) -> str:
    """A block for each value, from low to high; a blank where there is none."""
    span = high - low or 1.0
    return "".join(
        " " if np.isnan(value) else BLOCKS[min(int((value - low) / span * len(BLOCKS)), len(BLOCKS) - 1)]
        for value in values
    )


def _seeds(name: str | Path) -> list[int | None]:
    """The trained seeds of a model, by number; the shipped one where there are no others."""
    folders = (runs_folder() / name).glob("seed-*") if Path(name).name == str(name) else ()
    numbers = sorted(int(f.name.removeprefix("seed-")) for f in folders if f.name.removeprefix("seed-").isdecimal())
    if 0 not in numbers and name in recipe_names():
        numbers = [0, *numbers]
    return [*numbers] or [None]


def _probe(name: str | Path, seed: int | None) -> None:
    run = load(name, seed)
    if not (run.path / PROBES).exists():
        from workbench.probes import probe_checkpoints

        probe_checkpoints(run)


def _differences(runs: Sequence[Dynamics]) -> list[str]:
    """Runs of one model that were not probed alike."""
    told = []
    for model in dict.fromkeys(run.model for run in runs):
        first, *others = [run for run in runs if run.model == model]
        for run in others:
            lacks = [name for name in first.series if name not in run.series]
            more = [name for name in run.series if name not in first.series]
            words = [f"{word} {', '.join(names)}" for word, names in (("lacks", lacks), ("has", more)) if names]
            if words:
                told.append(f"{model} seed {run.seed} was probed otherwise than seed {first.seed}: {'; '.join(words)}")
            if run.steps.tolist() != first.steps.tolist():
                told.append(f"{model} seed {run.seed} was probed at other steps than seed {first.seed}")
    return told


def _plain(values: Float[np.ndarray, "step"]) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in values]
