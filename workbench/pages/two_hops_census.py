"""Which mechanism a seed has, and how many seeds of the census have it: from the committed tables."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.content import content
from workbench.runs import Run

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Census:
    """The committed rows of one experiment, and the one that is this run's."""

    table: str
    command: str
    rows: tuple[dict[str, Any], ...]
    mine: dict[str, Any] | None
    notes: tuple[str, ...]

    def label(self, row: dict[str, Any]) -> str:
        return row["mechanism"] if self.table == "mechanisms" else feeding(row["feeds"])

    @property
    def counts(self) -> list[tuple[str, list[int]]]:
        """Label → its seeds, the most frequent first."""
        seeds: dict[str, list[int]] = {}
        for row in self.rows:
            seeds.setdefault(self.label(row), []).append(row["seed"])
        order = Counter({label: len(of) for label, of in seeds.items()}).most_common()
        return [(label, seeds[label]) for label, _ in order]


def census(run: Run) -> Census | None:
    """What the committed tables say of this run's experiment; None where they are not here or do not speak of it.

    A row is this run's if recipe and seed are: training the same again gives the same.
    """
    for table in ("mechanisms", "induction-heads"):
        try:
            data = json.loads(content(f"docs/results/{table}.json").read_bytes())
        except (OSError, ValueError):
            continue
        rows = [row for row in data["rows"] if row.get("recipe_sha256") == run.recipe.experiment]
        if rows:
            mine = next((row for row in rows if row["seed"] == run.seed), None)
            return Census(table, data["command"], tuple(rows), mine, tuple(data["notes"]))
    return None


def feeding(feeds: Sequence[str]) -> str:
    """How many heads of block 1 feed induction heads' keys, from paths such as 0.0→K→1.1."""
    writers = sorted({path.partition("→")[0] for path in feeds})
    n = len(writers)
    return f"{n} head{'' if n == 1 else 's'} of block 1 feed{'s' if n == 1 else ''} the keys of block 2"


def asks(run: Run) -> bool:
    """Whether a mechanism can be named: a model of two blocks, on a task of two nouns and an adjective."""
    from workbench.tables.mechanisms import ROLES

    return run.model.cfg.n_layers == 2 and all(role in run.task.roles for role in ROLES)
