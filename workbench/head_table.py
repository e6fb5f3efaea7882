"""Every head of a run in numbers: scores beside their nulls, what the task loses without it, how it came about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from circuits.ablation import Ablations, head_ablations
from circuits.errors import CircuitError
from circuits.heads import HeadScores, head_scores
from circuits.scores import LEAST_DRAWS, Scores
from circuits.turned import spectrum_scores
from workbench.dynamics import read_dynamics
from workbench.errors import BadRun, NoCorpus, UnknownName
from workbench.runs import Run

SEQUENCES, FEWEST = 256, 16  # held-out ones that heads are cut on, at most and at least
CUTS = 2**25  # heads × tokens × tokens of the vocabulary up to which all of them are taken
COST = "cost"
MEASURES = {
    "previous_token": ("previous", "token, 0 … 1"),
    "current_token": ("its own", "token, 0 … 1"),
    "duplicate_token": ("duplicate", "token, −1 … 1"),
    "prefix_matching": ("induction", "−1 … 1"),
    "copying": ("copying", "share, 0 … 1"),
    "copying.eigenvalue": ("spectrum", "of OV, −1 … 1"),
    "entropy_share": ("entropy", "of even, 0 … 1"),
}
"""What is shown of `circuits.head_scores` and `circuits.turned.spectrum_scores`, as a page calls it, and the unit."""
SIGNED = ("duplicate_token", "prefix_matching", "copying.eigenvalue")
ROLE_MEASURE = {
    "previous-token": "previous_token", "current-token": "current_token",
    "duplicate-token": "duplicate_token", "induction": "prefix_matching",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One number for each head, block by block."""

    key: str
    title: str
    unit: str
    values: Float[np.ndarray, "head"]
    low: Float[np.ndarray, "head"]
    high: Float[np.ndarray, "head"]
    """Ends of the null's middle 95 %, or of the value's own 95 % interval."""
    sure: Bool[np.ndarray, "head"]
    """Outside its null, or its interval leaves out 0."""
    span: tuple[float, float]
    """Of the axis."""
    interval: bool = False
    """Whether low … high is the value's own interval."""

    @classmethod
    def of_scores(cls, scores: Scores, key: str) -> "Column":
        """One of MEASURES."""
        values, low, high = (x.flatten().double().numpy() for x in (scores.scores, *scores.band))
        span = (-1.0 if key in SIGNED else 0.0, 1.0)
        return cls(key, *MEASURES[key], values, low, high, scores.outside.flatten().numpy(), span)

    @classmethod
    def of_costs(cls, ablations: Ablations) -> "Column":
        """By how many nats the loss rises when the head is at its mean."""
        values, low, high = (x.flatten().double().numpy() for x in (ablations.cost, *ablations.cost_interval))
        most = max(0.1, float(np.abs(values).max(initial=0)))
        sure = (low > 0) | (high < 0)
        return cls(
            COST, "without it", "loss rises, nats", values, low, high, sure, (-0.3 * most, 1.08 * most), interval=True
        )


@dataclass(frozen=True)
class History:
    """One score of one head over training."""

    what: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True)
class HeadTable:
    """All heads of one run."""

    names: tuple[str, ...]
    columns: tuple[Column, ...]
    roles: Mapping[str, str]
    """Name → the roles of that head, in words."""
    histories: Mapping[str, History]
    """Of the score of its first role, else of induction; empty for a run without probes."""
    missing: tuple[str, ...] = ()
    """What this run has not, and why."""
    cut_on: int = 0
    """Held-out sequences that heads were cut on."""
    clusters: int = 0
    clean: tuple[float, float] = (0.0, 0.0)
    """Loss (nats) and accuracy (0 … 1) on them without a cut."""
    accuracy_change: Sequence[float] = ()
    """By head, −1 … 1."""

    def column(self, key: str) -> Column:
        """Raises: UnknownName."""
        found = next((column for column in self.columns if column.key == key), None)
        if found is None:
            raise UnknownName("column", key, [column.key for column in self.columns])
        return found

    def order(self, by: str | None = None) -> list[int]:
        """Rows by a column, the highest first (of entropy the lowest, the sharpest); None: block by block.

        Raises: UnknownName.
        """
        if by is None:
            return list(range(len(self.names)))
        sign = 1 if by == "entropy_share" else -1
        values = self.column(by).values
        return sorted(range(len(self.names)), key=lambda i: sign * float(values[i]))


def read_heads(run: Run, scores: HeadScores | str | None = None, *, cut: bool = True) -> HeadTable:
    """Every measure that this run has. `scores`: those of `circuits.head_scores`, or why there are none; by default
    measured with the fewest draws. `cut`: whether every head is cut, one after the other, on held-out sequences."""
    model, missing = run.model, []
    config = run.recipe.model
    names = tuple(f"{layer}.{head}" for layer in range(config.n_layers) for head in range(config.n_heads))
    if not names:
        return HeadTable((), (), {}, {}, (f"{run.name} has no layers, so it has no heads",))
    try:
        scores = head_scores(model, draws=LEAST_DRAWS) if scores is None else scores
    except CircuitError as error:
        scores = str(error)
    found: dict[str, Scores] = {}
    roles: dict[str, list[str]] = {name: [] for name in names}
    if isinstance(scores, str):
        missing.append(f"where heads look: {scores}")
    else:
        found |= {key: scores[key] for key in MEASURES if key in scores.measures}
        for role, heads in scores.roles().items():
            for head in heads:
                roles[head].append(role)
    try:
        found["copying.eigenvalue"] = spectrum_scores(model, "OV", draws=LEAST_DRAWS)
    except CircuitError as error:
        missing.append(f"spectrum of OV: {error}")
    columns = [Column.of_scores(found[key], key) for key in MEASURES if key in found]
    cuts: dict[str, Any] = {}
    try:
        if cut:
            column, cuts = _cut(run, len(names))
            columns.append(column)
    except (CircuitError, NoCorpus) as error:
        missing.append(f"what a head is worth: {error}")
    called = {name: ", ".join(each) for name, each in roles.items()}
    return HeadTable(names, tuple(columns), called, _histories(run, names, roles), tuple(missing), **cuts)


def _cut(run: Run, n_heads: int) -> tuple[Column, dict[str, Any]]:
    """What each head is worth, and on what it was cut. Raises: CircuitError; NoCorpus."""
    held_out = run.task.held_out
    tokens = held_out[
        : max(FEWEST, min(SEQUENCES, CUTS // (n_heads * held_out[0].numel() * max(256, run.model.cfg.d_vocab))))
    ]
    clusters = run.task.clusters(tokens)
    found = head_ablations(run.model, tokens, positions=list(run.task.scored), clusters=clusters)
    clean = float(found.clean_loss.mean()), float(found.clean_right.mean())
    changes = found.accuracy_change.flatten().tolist()
    return Column.of_costs(found), {
        "cut_on": len(tokens), "clusters": len(set(clusters)), "clean": clean, "accuracy_change": changes,
    }  # fmt: skip


def _histories(run: Run, names: Sequence[str], roles: Mapping[str, Sequence[str]]) -> dict[str, History]:
    """Of each head the score of its role, where the run was probed."""
    try:
        dynamics = read_dynamics(run)
    except BadRun:
        return {}
    histories = {}
    for name in names:
        key = next((ROLE_MEASURE[role] for role in roles[name]), "prefix_matching")
        if key in dynamics.series:
            layer, head = (int(part) for part in name.split("."))
            values = dynamics.series[key].scores[:, layer, head]
            known = ~np.isnan(values)
            histories[name] = History(MEASURES[key][0], dynamics.steps[known].tolist(), values[known].tolist())
    return histories
