"""A table of results as data, and its four faces: JSON, CSV, Markdown, terminal.

The JSON is the table; the others are views of it. Rates lie from 0 to 1 there, and are percentages in the views.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError
from workbench.recipes import Recipe, load_recipe

Row = dict[str, Any]
BUDGETS = {"quick": 0.4, "full": 1.0}
"""Share of the recipe's steps."""


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[Row], str]
    essential: bool = False
    """Shown on a narrow terminal too."""


@dataclass(frozen=True)
class Table:
    data: dict[str, Any]
    """{"table", "command", "versions", "notes", "rows"}."""
    columns: tuple[Column, ...]

    def json(self) -> str:
        return json.dumps(self.data, indent=1, ensure_ascii=False) + "\n"

    def csv(self) -> str:
        """One line a row; nested fields as held_out_accuracy.mean, seeds and their values in one cell each."""
        lines = [dict(_flat(row)) for row in self.data["rows"]]
        out = io.StringIO()
        writer = csv.DictWriter(out, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue()

    def markdown(self) -> str:
        head = [column.heading for column in self.columns]
        rows = [[column.cell(row) for column in self.columns] for row in self.data["rows"]]
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
        versions = ", ".join(f"{name} {version}" for name, version in self.data["versions"].items())
        notes = "\n".join(f"- {note}" for note in self.data["notes"])
        return (
            f"# {self.data['title']}\n\n    {self.data['command']}\n\n"
            + "\n".join(lines)
            + f"\n\n{notes}\n- {versions}\n"
        )


def scaled(models: Iterable[str], seeds: int, budget: str, split_per_seed: bool = False) -> dict[str, list[Recipe]]:
    """The recipes of shipped models at a budget; a model without training has one seed, since all would be the same.

    Raises: WorkbenchError for a seed count below 1 or an unknown budget.
    """
    if seeds < 1:
        raise WorkbenchError(f"--seeds {seeds}: expected at least 1")
    if budget not in BUDGETS:
        raise WorkbenchError(f"--budget {budget}: expected one of {', '.join(BUDGETS)}")
    wanted = {}
    for name in models:
        recipe = load_recipe(name)
        steps = round(recipe.training.steps * BUDGETS[budget])
        at_budget = recipe if budget == "full" or not steps else recipe.with_steps(steps)
        numbers = range(seeds if recipe.training.steps else 1)
        wanted[name] = [at_budget.with_seed(seed, split=split_per_seed) for seed in numbers]
    return wanted


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}"


def _flat(row: Row, prefix: str = "") -> Any:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, " ".join(str(v) for v in value) if isinstance(value, list) else value
