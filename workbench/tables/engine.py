"""The engine of the tables: from what is asked to rows, training what is not trained yet.

A table is a module of this package:

    TITLE, NOTES, COLUMNS      what it is called, how it is read, how it is shown
    SEEDS                      how many by default
    BUDGET                     optional: the default, where it is not "full"
    QUICK                      what the budget "quick" is here
    plans(asked)               its rows: for each, the recipes to train and the function that measures the row
    compared(rows)             our figures beside the published ones
    discussion(rows)           where they agree, where they do not, and why: paragraphs with figures from the rows
    summary(rows)              optional: notes that are counted from the rows
    OPTIONS                    optional: names of its own options, which are numbers; plans finds them in asked.options

Everything is content-addressed: a run by its recipe, a row by its runs' weights and by the code that measured it. So
nothing is trained or measured twice, a table that was killed goes on where it was, and a changed recipe or a changed
measurement never shows an old figure. The file of a row holds its fields and their hash. Trainings, then rows, run side
by side in processes of one thread.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from workbench.content import content
from workbench.errors import WorkbenchError
from workbench.files import write_atomic
from workbench.recipes import Recipe, load_recipe, shipped_names
from workbench.runs import load, run_folder, runs_folder
from workbench.sweeps import Watch, side_by_side, train_many
from workbench.tables.table import EXACT, NOT_RUN, Row, Table, in_words, mean

BUDGETS = ("quick", "half", "full")
SECONDS = "seconds: mean time of one training by the clock; other work on the machine counts"
Measured = Callable[[int, int], None]
"""Called with how many rows are done, and how many there are."""


@dataclass(frozen=True)
class Quick:
    """The shape of a table in a few minutes."""

    steps: float = 0.4
    """Share of the recipe's steps."""
    batch: float = 1.0
    """Share of its batch."""


@dataclass(frozen=True)
class Asked:
    """What the command line asked for."""

    seeds: int
    budget: str
    quick: Quick
    split_per_seed: bool = False
    options: Mapping[str, float] = field(default_factory=dict)
    """The table's own, as far as they were given."""

    def recipes(self, name: str, **changes: Any) -> tuple[Recipe, ...]:
        """A shipped recipe at this budget, once a seed; once only if it is not trained, since all would be the same.

        `changes` are fields of its model or training, so that a table can vary what is varied nowhere else.
        """
        recipe = load_recipe(name).changed(**changes)
        if not recipe.training.steps:
            return (recipe,)
        if self.budget != "full":
            steps, batch = (self.quick.steps, self.quick.batch) if self.budget == "quick" else (0.5, 1.0)
            recipe = recipe.with_steps(max(1, round(recipe.training.steps * steps)))
            size = max(1, round(recipe.training.batch * batch))
            recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, batch=size))
        return tuple(recipe.with_seed(seed, split=self.split_per_seed) for seed in range(self.seeds))


@dataclass(frozen=True)
class Plan:
    """One row: what must be trained for it, and what measures it."""

    label: dict[str, Any]
    """The fields that say which row it is, such as model and seed; they open the row."""
    recipes: tuple[Recipe, ...]
    """One a seed; none for a row that needs no training."""
    measure: Callable[..., Row]
    """A function of a module: its own fields of the row, from the list of runs (and from `given`, if there is any)."""
    given: tuple[Any, ...] = ()
    """Plain values that it is called with after the runs."""


@dataclass(frozen=True)
class Order:
    """A table that was asked for."""

    name: str
    module: Any
    asked: Asked
    plans: tuple[Plan, ...]

    @property
    def untrained(self) -> list[Recipe]:
        """What has to be trained for it. A recipe that several rows share is there once."""
        missing = {run_folder(r): r for plan in self.plans for r in plan.recipes if not _finished(_folder(r))}
        return list(missing.values())

    def make(
        self, *, trained_only: bool = False, jobs: int | None = None, watch: Watch | None = None,
        measured: Measured | None = None, cluster: str | None = None,
    ) -> Table:  # fmt: skip
        """Train what is not trained yet, measure what is not measured yet, and tabulate.

        `trained_only` trains nothing: rows whose models are not there say "not run". `cluster`: a Dask scheduler whose
        workers train; rows are measured here. Raises: WorkbenchError if another
        process is making the same table.
        """
        with _locked(self.name):
            if not trained_only:
                train_many(self.untrained, jobs=jobs, watch=watch, cluster=cluster)
            rows = self._rows(jobs, measured or (lambda done, of: None))
        return self.tabulate(rows, trained_only)

    def kept(self, row_of: Callable[[str], Row | None]) -> list[Row]:
        """The rows that were measured before, by what they are kept under; those that were not say "not run"."""
        rows = []
        for plan in self.plans:
            folders = tuple(map(_folder, plan.recipes))
            row = row_of(self._key(plan, folders)) if all(map(_finished, folders)) else None
            rows.append(row or {**plan.label, "budget": NOT_RUN})
        return rows

    def tabulate(self, rows: list[Row], trained_only: bool = False) -> Table:
        """The table of these rows, one a plan."""
        made = [row for row in rows if row["budget"] != NOT_RUN]
        summary = self.module.summary(made) if hasattr(self.module, "summary") and made else []
        timed = any("seconds" in row for row in made) and "seconds" in {c.heading for c in self.module.COLUMNS}
        from workbench.training import versions

        data = {
            "table": self.name,
            "title": self.module.TITLE,
            "command": self.command(trained_only and len(made) < len(rows)),
            "versions": versions(),
            "trained_with": self._trained_with(rows),
            "notes": [*summary, *self.module.NOTES, *([SECONDS] if timed else [])],
            "rows": rows,
        }
        return Table(data, self.module.COLUMNS)

    def command(self, trained_only: bool = False) -> str:
        flags = " --split-per-seed" * self.asked.split_per_seed + " --trained" * trained_only
        flags += "".join(f" --{name} {value:g}" for name, value in self.asked.options.items())
        return f"workbench table {self.name} --seeds {self.asked.seeds} --budget {self.asked.budget}{flags}"

    def _trained_with(self, rows: list[Row]) -> list[str]:
        """The versions that made the runs of these rows, each once, in words."""
        made = [plan for plan, row in zip(self.plans, rows, strict=True) if row["budget"] != NOT_RUN]
        folders = {_folder(recipe) for plan in made for recipe in plan.recipes}
        return sorted({in_words(load(folder).results["versions"]) for folder in folders})

    def _rows(self, jobs: int | None, watch: Measured) -> list[Row]:
        """In order: those measured before are read, the others are measured side by side."""
        rows: dict[int, Row] = {}
        waiting: list[int] = []
        folders = [tuple(map(_folder, plan.recipes)) for plan in self.plans]
        files = [runs_folder() / "tables" / self.name / f"{self._key(plan, there)}.json"
                 for plan, there in zip(self.plans, folders, strict=True)]  # fmt: skip
        for index, plan in enumerate(self.plans):
            if not all(map(_finished, folders[index])):
                rows[index] = {**plan.label, "budget": NOT_RUN}
            elif (kept := _read(files[index])) is not None:
                rows[index] = kept
            else:
                waiting.append(index)
        finished = len(rows)
        watch(finished, len(self.plans))
        work = [(self.plans[i], self.asked.budget, folders[i], files[i]) for i in waiting]
        new = side_by_side(
            _measure, work, jobs=jobs, poll=lambda done, _running: watch(finished + len(done), len(self.plans))
        )
        rows |= dict(zip(waiting, new, strict=True))
        return [rows[index] for index in range(len(self.plans))]

    def _key(self, plan: Plan, folders: Sequence[Path]) -> str:
        """Of everything that a row depends on: which row, from which weights, measured by which code."""
        weights = [load(folder).key if _finished(folder) else None for folder in folders]
        code = f"{plan.measure.__module__}.{plan.measure.__qualname__}"
        recipes = [recipe.sha256 for recipe in plan.recipes]
        said = [self.name, plan.label, list(plan.given), code, recipes, weights, _source_sha256()]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def _measure(plan: Plan, budget: str, folders: tuple[Path, ...], file: Path) -> Row:
    """Measure one row and keep it. What every trained row says of its training is added here."""
    from workbench.training import single_thread

    runs = [load(folder) for folder in folders]
    row = {**plan.label, "budget": budget if any(run.recipe.training.steps for run in runs) else EXACT}
    with single_thread():
        row |= plan.measure(runs, *plan.given)
    if runs:
        row |= {
            "seeds": [run.seed for run in runs],
            "parameters": runs[0].results["parameters"],
            "steps": runs[0].results["steps"],
            "seconds": mean([run.results["seconds"] for run in runs]),
            "recipe_sha256": runs[0].recipe.experiment,
        }
    row = json.loads(json.dumps(row, allow_nan=False))  # so that the first table equals the next
    text = json.dumps(row | {"sha256": _sha256(row)}, indent=1, ensure_ascii=False) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text.encode())
    except OSError as error:
        raise WorkbenchError(f"cannot write {file} ({error.strerror}); rows already measured are kept") from None
    return row


def kept_row(file: Path) -> Row | None:
    """The row that is kept in this file; None if its hash is not the one it holds. Raises: OSError."""
    try:
        row = json.loads(file.read_bytes())
        return row if row.pop("sha256") == _sha256(row) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _read(file: Path) -> Row | None:
    """A row that was measured before; None if it was not, or if its file is damaged (then it is measured again)."""
    try:
        row = kept_row(file)
    except FileNotFoundError:
        return None
    except OSError:
        row = None
    if row is None:
        print(f"{file} is damaged; the row is measured again", file=sys.stderr)
    return row


def _sha256(row: Row) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _folder(recipe: Recipe) -> Path:
    """Where its run lies or belongs. A shipped model serves as its recipe's seed 0."""
    own, shipped = run_folder(recipe), content("models") / recipe.name
    ships = recipe.name in shipped_names() and load_recipe(recipe.name).sha256 == recipe.sha256
    return shipped if ships and not own.exists() else own


def _finished(folder: Path) -> bool:
    return (folder / "run.json").exists()


@cache
def _source_sha256() -> str:
    """Of all our code that a measurement may depend on: what draws pages and figures stands above the tables."""
    digest = hashlib.sha256()
    for package in ("circuits", "workbench"):
        root = Path(str(import_module(package).__file__)).parent
        for file in sorted(root.rglob("*.py")):
            if file.parent.name in ("pages", "figures"):
                continue
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


@contextmanager
def _locked(name: str) -> Iterator[None]:
    folder = runs_folder() / "tables"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{name}.lock", timeout=0):
            yield
    except Timeout:
        raise WorkbenchError(f"another process is making the table {name} in {folder}; wait for it") from None
    except OSError as error:
        raise WorkbenchError(f"cannot write to {folder} ({error.strerror}); set WORKBENCH_RUNS to another") from None
