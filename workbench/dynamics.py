"""When does a model learn what? The curves that a run's probes left, and the phase changes in them. No torch here.

**A phase change** of one run is a curve that leaves its null for good and comes to a plateau. A curve is one number at
each probed step: of a score that every head (or pair) has, the largest one.

    plateau   the median of the last three probed steps
    rise      plateau − null; the null is that of the part that is largest, at its own step
    begins    the first step from which the curve stays above its null by a tenth of the rise, and by more than chance
              allows the largest of so many parts (the normal quantile for 5 % divided by twice their number)
    ends      the first step from which it stays above nine tenths of the rise

The curve is first smoothed by a running median of three, so that one odd step neither begins nor ends a change. There
is none where the rise is smaller than the measure's `EFFECTS` or the plateau within chance (significance alone would
find changes everywhere, since trained weights leave every null a little), nor where the curve never was in its null.
Steps are those that were probed: a change that begins at step 299 began between the step probed before and 299, and
`begin_interval` says so.

**Composition** needs a control. In a model trained on shuffled labels z rises to 4 … 13, for all pairs and all three
kinds alike: whatever is trained comes to read and write a few common directions. So the curve of one kind is its z less
the mean z of the same pair's other two kinds, where that is above 0.

**Over seeds** begin and end are medians of the seeds that have a change. Their interval goes from the step before the
earliest to the latest one of the order statistics that cover the median with at least 95 % (from six seeds on; of five
seeds all, which cover it with 94 %), whatever the distribution.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from workbench.errors import BadRun, UnknownName
from workbench.recipes import Recipe, read_recipe
from workbench.runs import MOST, Run, bytes_in, lines_of, load, read_checked, runs_folder
from workbench.untrusted import is_plain, short

PROBES = "probes.jsonl"
EDGES = "edges."  # what the series of cut edges begin with
EFFECTS = {
    "previous_token": 0.3, "current_token": 0.3, "duplicate_token": 0.3, "prefix_matching": 0.3, "copying": 0.3,
    "composition.Q": 4.0, "composition.K": 4.0, "composition.V": 4.0, "copying.eigenvalue": 0.3, "copying.argmax": 0.3,
    "in_context": 0.15, EDGES: 1.0,
}  # fmt: skip
"""The least rise that counts, by measure: head scores as for a role (circuits.heads), composition in standard
deviations of its null, in-context learning in nats (below .15 is what the 2022 paper has before the change), the cost
of cutting an edge in nats of answer − foil."""
CHANGES = ("previous_token", "composition.K", "prefix_matching", "in_context")
"""What `phase_changes` looks at unless told: the birth of induction."""
KINDS = ("composition.Q", "composition.K", "composition.V")
BEGUN, DONE = 0.1, 0.9
PLATEAU = 3
LEVEL = 0.05


@dataclass(frozen=True)
class Series:
    """One score over training."""

    measure: str
    scores: Float[np.ndarray, "step *axes"]
    """NaN at steps that did not measure it."""
    null_mean: Float[np.ndarray, "step *axes"]
    null_sd: Float[np.ndarray, "step *axes"]

    @property
    def z(self) -> Float[np.ndarray, "step *axes"]:
        """Standard deviations above the null's mean; 0 where the null has none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.null_sd > 0, (self.scores - self.null_mean) / self.null_sd, 0 * self.scores)

    @property
    def parts(self) -> int:
        """Heads, pairs of a head and a later one, or 1."""
        shape = self.scores.shape[1:]
        return shape[1] ** 2 * shape[0] * (shape[0] - 1) // 2 if len(shape) == 4 else int(np.prod(shape))


@dataclass(frozen=True)
class Curve:
    """The largest part of a series at each step, and the null of that part."""

    measure: str
    values: Float[np.ndarray, "step"]
    null_mean: Float[np.ndarray, "step"]
    null_sd: Float[np.ndarray, "step"]
    parts: int
    """How many the largest was chosen among."""

    @property
    def bound(self) -> Float[np.ndarray, "step"]:
        """What the largest of so many parts stays below by chance, in 95 % of cases (one-sided: 97.5 %)."""
        return self.null_mean + NormalDist().inv_cdf(1 - LEVEL / (2 * max(self.parts, 1))) * self.null_sd


@dataclass(frozen=True)
class Dynamics:
    """What one run's probes say."""

    model: str
    seed: int
    path: Path
    steps: Int[np.ndarray, "step"]
    loss: Float[np.ndarray, "step"]
    """Of the last batch, nats; NaN at step 0 and in runs that were probed afterwards."""
    held_out_loss: Float[np.ndarray, "step"]
    held_out_accuracy: Float[np.ndarray, "step"]
    loss_by_position: Float[np.ndarray, "step destination"]
    """Held-out loss of the next token from each position, nats."""
    series: dict[str, Series]
    undefined: dict[str, str]
    """Probe → why this model has none."""
    faults: tuple[str, ...]
    """What is wrong with the file; the rest is shown."""

    def __getitem__(self, measure: str) -> Series:
        """Raises: UnknownName."""
        if measure not in self.series:
            raise UnknownName("probe", measure, self.series, f" in {self.path}")
        return self.series[measure]

    def has(self, measure: str) -> bool:
        """Whether there is a curve of it."""
        return measure in ("held_out_loss", "held_out_accuracy", *self.series)

    def curve(self, measure: str) -> Curve:
        """One number a step of "held_out_loss", "held_out_accuracy" or a series: the highest head or pair.

        In-context learning and edges are turned round: nats by which the loss is lower late than early, and that a cut
        costs. Composition is z, less
        the mean z of the same pair's other kinds where that is above 0. Raises: UnknownName.
        """
        if measure in ("held_out_loss", "held_out_accuracy"):
            nothing = np.full(len(self.steps), np.nan)
            return Curve(measure, getattr(self, measure), nothing, nothing, 1)
        series = self[measure]
        values, mean, sd = series.scores, series.null_mean, series.null_sd
        if measure.startswith("composition."):
            others = [self.series[name].z for name in KINDS if name in self.series and name != measure]
            shared = sum(others) / len(others) if others else np.zeros_like(values)
            values, mean = series.z - np.maximum(shared, 0), np.zeros_like(values)
            sd = np.full_like(values, math.sqrt(1 + 1 / max(len(others), 1)))
        elif measure == "in_context" or measure.startswith(EDGES):
            values, mean = -values, -mean
        values, mean, sd = (x.reshape(len(x), -1) for x in (values, mean, sd))
        best = np.where(np.isnan(values), -np.inf, values).argmax(axis=1)[:, None]
        values, mean, sd = (np.take_along_axis(x, best, 1)[:, 0] for x in (values, mean, sd))
        return Curve(measure, values, mean, sd, series.parts)


@dataclass(frozen=True)
class Change:
    """A phase change of one run."""

    seed: int
    before: int
    """The last probed step at which the curve is still in its null."""
    begins: int
    still: int
    """The last probed step before the plateau."""
    ends: int
    null: float
    plateau: float


@dataclass(frozen=True)
class PhaseChange:
    """A phase change over seeds, or that there is none."""

    model: str
    measure: str
    begins: float | None
    """Step, the median over the seeds that have one; None where none has."""
    ends: float | None
    begin_interval: tuple[int, int] | None
    end_interval: tuple[int, int] | None
    changes: tuple[Change, ...]
    """One for each seed that has one."""
    seeds: int
    """How many were looked at; 0 where none probed this."""

    @property
    def found(self) -> int:
        return len(self.changes)

    def __repr__(self) -> str:
        if self.begins is None or self.begin_interval is None or self.end_interval is None:
            none = f"none in {self.seeds}" if self.seeds else "not probed"
            return f"{self.model}: {self.measure}: {none}"
        low, high = self.begin_interval
        first, last = self.end_interval
        return (
            f"{self.model}: {self.measure}: begins at {self.begins:.0f} [{low} … {high}], ends at {self.ends:.0f} "
            f"[{first} … {last}], {self.found} of {self.seeds}"
        )


def read_dynamics(run: Run | str | Path, seed: int | None = None) -> Dynamics:
    """The probes of a run, or of what `workbench.load` takes; of one that is still training, what is there so far.

    Torn and doubled lines are left out, and named. Raises: BadRun for a run without probes; what `workbench.load`
    raises.
    """
    folder, recipe, finished = (run.path, run.recipe, run) if isinstance(run, Run) else _opened(run, seed)
    file = folder / PROBES
    kept = any(folder.glob("checkpoints/step-*"))
    how = f"workbench dynamics {folder} --probe reads them from its checkpoints"
    if not os.path.exists(file):
        lost = "nor checkpoints to read them from; train it anew with probes in its recipe"
        raise BadRun(f"{folder} has no probes; {how if kept else lost}")
    if finished:
        then = f"delete it, and {how}" if kept else f"delete {folder} and train it again"
        read_checked(file, finished.results["files"].get(PROBES, ""), then)
    lines, faults = read_lines(folder)
    if not lines:
        raise BadRun(f"{file} holds no probed step; delete it and train again")
    if not finished:
        faults.append(f"{folder} is at step {lines[-1]['step']:,} or further of {recipe.training.steps:,}")
    names = list(dict.fromkeys(name for line in lines for name in line["series"]))
    found = {name: _series(name, lines) for name in names}
    faults += [f"{file}: {short(name, 60)} has other shapes at other steps; left out"
               for name, series in found.items() if series is None]  # fmt: skip
    scattered = [name for name in names if not all(name in line["series"] for line in lines)]
    if scattered:
        faults.append(f"{file}: some steps lack {short(', '.join(scattered), 150)}; shown where they are")
    loss, held_out_loss, held_out_accuracy = (
        np.array([np.nan if line.get(key) is None else float(line[key]) for line in lines])
        for key in ("loss", "held_out_loss", "held_out_accuracy")
    )
    return Dynamics(
        recipe.name, recipe.seeds.initialisation, folder, np.array([line["step"] for line in lines]),
        loss, held_out_loss, held_out_accuracy, _stack([line.get("loss_by_position", []) for line in lines]),
        {name: series for name, series in found.items() if series is not None},
        {name: why for line in lines for name, why in line.get("undefined", {}).items()}, tuple(faults),
    )  # fmt: skip


def read_lines(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The lines of probes.jsonl by rising step, and what is wrong with it. Of two lines of one step the later holds.

    Raises: BadRun if it cannot be read.
    """
    file, lines, faults = folder / PROBES, {}, []
    order = []
    try:
        data = bytes_in(file)
    except OSError as error:
        raise BadRun(f"{file} cannot be read ({error.strerror or error})") from None
    for number, line in enumerate(lines_of(data, file), start=1):
        try:
            read = json.loads(line)
            step = read["step"]
            _check_line(read)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            faults.append(f"{file}: line {number} is torn or no probe; left out")
            continue
        order.append(step)
        lines[step] = read
    if order != sorted(set(order)):
        faults.append(f"{file}: steps are out of order or doubled; sorted, the later line of a step holds")
    return [lines[step] for step in sorted(lines)], faults


def _check_line(line: dict[str, Any]) -> None:
    """Raises ValueError, TypeError, KeyError or OverflowError for what is no probed step."""
    if type(line["step"]) is not int or not 0 <= line["step"] <= MOST or type(line["series"]) is not dict:
        raise ValueError
    losses = [line.get(key) for key in ("loss", "held_out_loss", "held_out_accuracy")]
    by_position, undefined = line.get("loss_by_position", []), line.get("undefined", {})
    if type(by_position) is not list or type(undefined) is not dict:
        raise TypeError
    if not all(type(loss) in (int, float) for loss in [*by_position, *(loss for loss in losses if loss is not None)]):
        raise TypeError
    for each in (*losses, *by_position):
        float(each or 0)  # a whole number may be too large for one
    if not all(is_plain(text) for text in (*line["series"], *undefined, *map(str, undefined.values()))):
        raise ValueError


def phase_changes(
    runs: Dynamics | Run | str | Path | Iterable[Dynamics | Run | str | Path], measures: Sequence[str] | None = None
) -> list[PhaseChange]:
    """One for each model and measure (`CHANGES` unless given), found or not, in order of the step at which it begins.

    Runs of one model are its seeds. A run that did not probe a measure is not counted; one for which it is undefined
    has no change.
    """
    given = [runs] if isinstance(runs, Dynamics | Run | str | Path) else list(runs)
    read = [run if isinstance(run, Dynamics) else read_dynamics(run) for run in given]
    made = []
    for model in dict.fromkeys(each.model for each in read):
        group, of_model = [each for each in read if each.model == model], []
        for measure in CHANGES if measures is None else measures:
            asked = [each for each in group if measure in each.series or _probe_of(measure) in each.undefined]
            found = (
                phase_change(each.steps, each.curve(measure), each.seed) for each in asked if measure in each.series
            )
            of_model.append(_over_seeds(model, measure, [change for change in found if change is not None], len(asked)))
        made += sorted(of_model, key=lambda each: (each.begins is None, each.begins or 0))
    return made


def phase_change(steps: Int[np.ndarray, "step"], curve: Curve, seed: int = 0) -> Change | None:
    """The phase change of one curve, or None; the rule is at the top of this module."""
    known = ~np.isnan(curve.values)
    steps, values, mean, bound = (x[known] for x in (steps, curve.values, curve.null_mean, curve.bound))
    if len(values) <= PLATEAU:
        return None
    smooth = np.median(np.stack([np.r_[values[0], values[:-1]], values, np.r_[values[1:], values[-1]]]), axis=0)
    plateau, null = float(np.median(values[-PLATEAU:])), float(np.median(mean[-PLATEAU:]))
    rise = plateau - null
    if rise < EFFECTS.get(EDGES if curve.measure.startswith(EDGES) else curve.measure, 0.0) or plateau <= np.median(
        bound[-PLATEAU:]
    ):
        return None
    begins = _for_good(smooth > np.maximum(bound, mean + BEGUN * rise))
    ends = _for_good(smooth >= null + DONE * rise)
    if not begins or not ends:  # 0: it was never seen in its null
        return None
    before, still = (int(steps[at - 1]) for at in (begins, ends))
    return Change(seed, before, int(steps[begins]), still, int(steps[ends]), null, plateau)


def _opened(name_or_path: str | Path, seed: int | None) -> tuple[Path, Recipe, Run | None]:
    """Folder, recipe, and the run if it is finished."""
    try:
        run = load(name_or_path, seed)
    except BadRun:
        folder = Path(name_or_path)
        if not (folder / "recipe.toml").exists():
            folder = runs_folder() / name_or_path / f"seed-{seed or 0}"
        if (folder / "run.json").exists() or not (folder / PROBES).exists():
            raise
        return folder.resolve(), read_recipe(folder / "recipe.toml"), None
    return run.path, run.recipe, run


def _for_good(above: Bool[np.ndarray, "step"]) -> int | None:
    """The index from which it stays true."""
    below = np.flatnonzero(~above)
    first = int(below[-1]) + 1 if len(below) else 0
    return first if first < len(above) else None


def _probe_of(measure: str) -> str:
    """The probe that gives a measure."""
    if "." in measure:
        return measure.partition(".")[0]
    return "in-context" if measure == "in_context" else "heads"


def _over_seeds(model: str, measure: str, changes: list[Change], seeds: int) -> PhaseChange:
    if not changes:
        return PhaseChange(model, measure, None, None, None, None, (), seeds)
    begins, ends = ([getattr(change, name) for change in changes] for name in ("begins", "ends"))
    return PhaseChange(
        model, measure, float(np.median(begins)), float(np.median(ends)),
        _interval([change.before for change in changes], begins), _interval([change.still for change in changes], ends),
        tuple(changes), seeds,
    )  # fmt: skip


def _interval(before: list[int], at: list[int]) -> tuple[int, int]:
    """From the k-th smallest of the steps before to the k-th largest: k as large as covers the median with 95 %."""
    n = len(at)
    k = 1
    while 2 * sum(math.comb(n, i) for i in range(k + 1)) <= LEVEL * 2**n:
        k += 1
    return sorted(before)[k - 1], sorted(at)[-k]


def _series(name: str, lines: list[dict[str, Any]]) -> Series | None:
    """None where steps do not fit together."""
    parts = []
    for key in ("score", "null_mean", "null_sd"):
        try:
            arrays = [np.array(line["series"][name][key], dtype=float) if name in line["series"] else None
                      for line in lines]  # fmt: skip
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        shapes = {array.shape for array in arrays if array is not None}
        if len(shapes) != 1:
            return None
        shape = shapes.pop()
        parts.append(np.stack([np.full(shape, np.nan) if array is None else array for array in arrays]))
    return Series(name, *parts) if len({part.shape for part in parts}) == 1 else None


def _stack(rows: list[list[float]]) -> Float[np.ndarray, "step destination"]:
    """Rows of one length; shorter ones are filled up with NaN."""
    length = max(map(len, rows), default=0)
    return np.array([[*row, *[np.nan] * (length - len(row))] for row in rows], dtype=float).reshape(len(rows), length)
