"""The tables that there are: committed with the workbench, written by you, or only their rows kept.

Where they lie:

    docs/results/NAME.json              committed; in an installed wheel inside the package
    $WORKBENCH_RUNS/tables/NAME/*.json  the rows that `workbench table NAME` kept, each by all that it depends on
    $WORKBENCH_RUNS/tables/*.json       yours, by `workbench table NAME --json`
    $WORKBENCH_RUNS/results/*.json      yours, by `workbench table all --folder $WORKBENCH_RUNS`
    results/*.json                      yours, by `workbench table all` where the app was started

A file is untrusted: it is read up to a size, checked, and what cannot be shown is one line. Kept rows are shown only if
today's code made them from today's recipes and weights; the others are counted.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import streamlit as st

from workbench.content import content
from workbench.errors import WorkbenchError
from workbench.figures.seeds import row_labels, seed_lines, seed_measures
from workbench.runs import runs_folder
from workbench.tables import BUDGETS, TABLES, order
from workbench.tables.engine import kept_row
from workbench.tables.report import rule
from workbench.tables.table import EXACT, NOT_RUN, Compared, Row, Table

COMMITTED = "committed"
LARGEST = 4 * 2**20
"""Bytes of a file that is read; the committed ones have 70 KB at most."""
PARTS = {
    "table": str, "title": str, "command": str, "versions": dict, "trained_with": list, "notes": list, "rows": list
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A table that can be shown."""

    table: str
    label: str
    """Where it comes from, in words: committed; yours: 2 seeds, quick; yours: results/winograd.json."""
    data: dict[str, Any]
    path: str | None
    """Of its file; None where only its rows are kept."""


@dataclass(frozen=True)
class Shown:
    """A table in plain values, with what its module says of its rows."""

    headings: list[str]
    cells: list[list[str]]
    figures: list[int]
    """Columns of figures, set to the right."""
    essential: list[int]
    compared: list[Compared]
    rule: str
    """What "agrees" means."""
    discussion: list[str]
    measures: list[str]
    """What can be drawn seed by seed."""
    clusters: list[int | None]
    """For each row that was run, how many groups of examples err together."""
    outdated: list[str]
    """Rows whose recipes have changed since."""
    fault: str | None
    """Why not all of it could be made."""

    @property
    def agreeing(self) -> tuple[int, int]:
        """How many figures agree with the published ones, of how many that are published."""
        judged = [each.agrees for each in self.compared if each.agrees is not None]
        return sum(judged), len(judged)


def files() -> tuple[list[Source], list[str]]:
    """Every table in a file, the committed ones first; and a line on each file of yours that is no table."""
    found, faults = [], []
    for file, label in _files():
        try:
            data = _read(str(file), file.stat().st_mtime_ns, file.stat().st_size)
            found.append(Source(data["table"], label, data, str(file)))
        except (WorkbenchError, OSError) as error:
            faults.append(str(error))
    return found, faults


def names(found: Sequence[Source]) -> list[str]:
    """The tables that there is something of: a file, or rows that were kept."""
    filed = {source.table for source in found}
    return [name for name in TABLES if name in filed or any((runs_folder() / "tables" / name).glob("*.json"))]


def kept(name: str) -> tuple[list[Source], list[str]]:
    """The tables that the kept rows of this one make up; or a line on why there are none."""
    folder = runs_folder() / "tables" / name
    tables, n = _kept(name, str(folder), folder.stat().st_mtime_ns if folder.is_dir() else 0)
    if n and not tables:
        rows = f"{n} rows of this table are kept in {folder}, made by other code, from other recipes or weights"
        return [], [f"{rows}; `workbench table {name}` measures them again"]
    return [Source(name, label, data, None) for label, data in tables], []


def make(data: dict[str, Any]) -> Table:
    """The table with the columns of its module."""
    return Table(data, _module(data).COLUMNS)


def run_rows(data: dict[str, Any]) -> list[Row]:
    return [row for row in data["rows"] if row["budget"] != NOT_RUN]


@st.cache_data(max_entries=32, show_spinner=False)
def read(text: str) -> Shown:
    """Everything that is shown of a table, from its JSON. Where the comparison or the plot of the seeds cannot be made
    of its rows, `fault` says so.

    Raises: WorkbenchError if its rows have not the columns of today.
    """
    data = json.loads(text)
    table, rows, module = make(data), run_rows(data), _module(data)
    columns, fault = table.columns, None
    try:
        cells = table.cells()
    except Exception as error:  # rows of a file may be anything
        raise WorkbenchError(_other(data, error, "cannot be shown")) from None
    compared, discussion, measures, outdated = [], [], [], []
    clusters: list[int | None] = [None] * len(rows)
    try:
        outdated = [name for name, other in zip(row_labels(rows), _outdated(data["table"], rows), strict=True) if other]
        clusters = [_clusters(row) for row in rows]
        measures = [measure for measure in seed_measures(rows) if seed_lines(rows, measure, clusters)]
        if rows:
            compared, discussion = module.compared(rows), module.discussion(rows)
    except Exception as error:
        fault = _other(data, error, "cannot all be read")
    return Shown(
        [column.heading for column in columns], cells, [i for i, column in enumerate(columns) if not column.text],
        [i for i, column in enumerate(columns) if column.essential], compared, rule(module), discussion, measures,
        clusters, outdated, fault,
    )  # fmt: skip


def _other(data: dict[str, Any], error: Exception, what: str) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:120]
    return (
        f"the rows of this table {what}: they are not what {_module(data).__name__} makes today ({reason}); make it "
        f"again: {data['command']}"
    )


def _module(data: dict[str, Any]) -> Any:
    return import_module(f"workbench.tables.{data['table'].replace('-', '_')}")


def _files() -> Iterator[tuple[Path, str]]:
    """Of the committed ones those whose name is a table's; of yours all, once each."""
    committed = content("docs/results").resolve()
    yield from ((path, COMMITTED) for name in TABLES if (path := committed / f"{name}.json").exists())
    seen = {committed}
    for folder in (runs_folder() / "tables", runs_folder() / "results", Path("results").resolve()):
        if folder.resolve() not in seen:
            seen.add(folder.resolve())
            yield from ((path, f"yours: {folder.name}/{path.name}") for path in sorted(folder.glob("*.json")))


@st.cache_data(max_entries=128, show_spinner=False)
def _read(path: str, _modified: int, _size: int) -> dict[str, Any]:
    """A table's file. Raises: WorkbenchError."""
    wanted = "expected what `workbench table NAME --json` writes"
    size = Path(path).stat().st_size
    if size > LARGEST:
        raise WorkbenchError(f"{path}: {size / 2**20:.1f} MB is too large for a table; {wanted}")
    try:
        data = json.loads(Path(path).read_bytes(), parse_constant=_refuse)
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:80]
        raise WorkbenchError(f"{path} is damaged or half written ({reason}); {wanted}") from None
    if not isinstance(data, dict) or not all(isinstance(data.get(key), kind) for key, kind in PARTS.items()):
        raise WorkbenchError(f"{path} is no table; {wanted}")
    if data["table"] not in TABLES:
        raise WorkbenchError(f"{path}: no table is called {data['table'][:40]!r}; {wanted}")
    if not all(isinstance(row, dict) and isinstance(row.get("budget"), str) for row in data["rows"]):
        raise WorkbenchError(f"{path} has rows without a budget; {wanted}")
    data["notes"] = [str(note) for note in data["notes"]]
    data["trained_with"] = [str(each) for each in data["trained_with"]]
    return data


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of a table")


@st.cache_data(max_entries=64, ttl=60, show_spinner=False)
def _kept(name: str, folder: str, modified: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
    """For each budget the table of most seeds, with its label; and how many rows there are."""
    paths = Path(folder).glob("*.json") if modified else ()
    rows = {path.stem: row for path in paths if (row := _row(path)) is not None}
    tables: dict[str, dict[str, Any]] = {}
    for budget, seeds in _asked(list(rows.values())):
        if any(label.startswith(f"yours: {budget}") for label in tables):
            continue
        made = order(name, seeds, budget)
        shown = made.kept(rows.get)
        if (EXACT if seeds is None else budget) in {row["budget"] for row in shown}:
            n = made.asked.seeds
            label = "yours: exact" if seeds is None else f"yours: {budget}, {n} seed{'s' * (n > 1)}"
            tables[label] = made.tabulate(shown).data
    return list(tables.items()), len(rows)


def _row(path: Path) -> Row | None:
    try:
        return kept_row(path) if path.stat().st_size <= LARGEST else None
    except OSError:
        return None


def _asked(rows: Sequence[Row]) -> list[tuple[str, int | None]]:
    """The budgets and numbers of seeds that these rows may have been asked for with, the largest number first.

    Rows that no training precedes are those of any; where there are no others, of the table as it is by default.
    """
    if not rows:
        return []
    asked = {
        (BUDGETS.index(row["budget"]), max(row["seeds"]) + 1)
        for row in rows
        if row["budget"] in BUDGETS and isinstance(row.get("seeds"), list) and row["seeds"]
    }
    return [(BUDGETS[budget], seeds) for budget, seeds in sorted(asked, reverse=True)] or [("full", None)]


def _clusters(row: Row) -> int | None:
    """How many groups of held-out examples err together, where an accuracy is held against chance."""
    if "held_out_pairs" in row:
        return row["held_out_pairs"]
    if "held_out_accuracy" not in row or not {"chance", "look_back"} & row.keys():
        return None
    from workbench.recipes import load_recipe
    from workbench.tasks import load_task

    task = load_task(load_recipe(row["model"]).task)
    return len(set(task.clusters(task.held_out)))


def _outdated(name: str, rows: Sequence[Row]) -> list[bool]:
    """For each row, whether today's recipe of it is another one."""
    seeds = max((max(row["seeds"]) + 1 for row in rows if "recipe_sha256" in row), default=0)
    if not seeds:
        return [False] * len(rows)
    plans = {budget: order(name, seeds, budget).plans for budget in {_budget(row) for row in rows}}

    def current(row: Row) -> bool:
        plan = next(p for p in plans[_budget(row)] if all(row.get(key) == value for key, value in p.label.items()))
        return bool(plan.recipes) and plan.recipes[0].experiment == row["recipe_sha256"]

    return ["recipe_sha256" in row and not current(row) for row in rows]


def _budget(row: Row) -> str:
    return "full" if row["budget"] == EXACT else row["budget"]
