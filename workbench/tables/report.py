"""docs/results.md, written from the tables: our figures beside the published ones, and in words where they differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.tables import TABLES
from workbench.tables.engine import Order
from workbench.tables.table import NOT_RUN, Row, Table, markdown_table

HEAD = """# Results, beside the published figures

`{command}` wrote this page and the tables it is drawn from. Every figure is from those files; an empty cell in the
column *source* means that none is published. A figure *agrees* by the rule that stands above each comparison.
"""


def report(made: Mapping[str, tuple[Order, Table]], command: str) -> str:
    """The page, in Markdown: for each table its question, the comparison, the discussion, and what was not run."""
    return "\n".join([HEAD.format(command=command), *(_section(*each) for each in made.values())])


def command(seeds: int | None, budget: str | None, split_per_seed: bool, trained: bool, folder: Path | None) -> str:
    """The command that writes the page."""
    flags = f" --seeds {seeds}" * (seeds is not None) + f" --budget {budget}" * (budget is not None)
    flags += " --split-per-seed" * split_per_seed
    return f"workbench table all{flags}" + " --trained" * trained + f" --folder {folder}" * (folder is not None)


def _section(order: Order, table: Table) -> str:
    module, rows = order.module, [row for row in table.data["rows"] if row["budget"] != NOT_RUN]
    parts = [
        f"## {module.TITLE}",
        f"{TABLES[order.name][0].upper()}{TABLES[order.name][1:]}. `{table.data['command']}` → "
        f"[{order.name}.md](results/{order.name}.md), [{order.name}.json](results/{order.name}.json).",
        _budgets(table.data["rows"]),
    ]
    compared = module.compared(rows) if rows else []
    if compared:
        cells = [
            [each.what, each.source, each.ours, {True: "agrees", False: "**differs**", None: ""}[each.agrees]]
            for each in compared
        ]
        parts += [rule(module), markdown_table(["", "source", "ours", ""], cells)]
    parts += module.discussion(rows) if rows else []
    return "\n\n".join(part for part in parts if part) + "\n"


def rule(module: Any) -> str:
    """What "agrees" means here: the first paragraph of what the comparison says of itself."""
    return " ".join((module.compared.__doc__ or "").strip().split("\n\n")[0].split())


def _budgets(rows: Sequence[Row]) -> str:
    """Which rows have which budget, where it is not the full one for all."""
    missing = [" ".join(str(v) for k, v in row.items() if k != "budget") for row in rows if row["budget"] == NOT_RUN]
    smaller = {row["budget"] for row in rows} - {NOT_RUN, "full", "exact"}
    said = [f"Not run: {', '.join(missing)}."] if missing else []
    said += [f"Some rows have the budget {', '.join(sorted(smaller))}."] if smaller else []
    return " ".join(said)
