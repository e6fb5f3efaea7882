"""A table of results as data, and its faces: JSON, CSV, Markdown, LaTeX, terminal.

The JSON is the table; the others are views of it. Rates lie from 0 to 1 there, and are percentages in the views.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
NOT_RUN = "not run"
"""The budget of a row whose models are not trained; it has no figures."""
EXACT = "exact"
"""The budget of a row for which nothing is trained."""


@dataclass(frozen=True)
class Column:
    heading: str
    cell: Callable[[Row], str]
    essential: bool = False
    """Shown on a narrow terminal too."""
    text: bool = False
    """Words, not figures: set to the left, and known of a row that was not run too."""


@dataclass(frozen=True)
class Table:
    data: dict[str, Any]
    """{"table", "title", "command", "versions", "trained_with", "notes", "rows"}"""
    columns: tuple[Column, ...]

    def cells(self, columns: Sequence[Column] | None = None) -> list[list[str]]:
        """The rows as text. A row that was not run says so, and has its label and no figures."""

        def cell(column: Column, row: Row) -> str:
            try:
                return column.cell(row)
            except KeyError:
                if row["budget"] != NOT_RUN:
                    raise
                return ""

        return [[cell(column, row) for column in columns or self.columns] for row in self.data["rows"]]

    def json(self) -> str:
        return json.dumps(self.data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def csv(self) -> str:
        """One line a row; nested fields as held_out_accuracy.mean, seeds and their values in one cell each."""
        lines = [dict(_flat(row)) for row in self.data["rows"]]
        out = io.StringIO()
        writer = csv.DictWriter(out, list(dict.fromkeys(key for line in lines for key in line)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue()

    def markdown(self) -> str:
        notes = "\n".join(f"- {note}" for note in self.data["notes"])
        lines = markdown_table([column.heading for column in self.columns], self.cells())
        versions = "\n".join(f"- {line}" for line in self._versions())
        return f"# {self.data['title']}\n\n    {self.data['command']}\n\n{lines}\n\n{notes}\n{versions}\n"

    def tex(self) -> str:
        """A table for LaTeX with the package booktabs; command, notes and versions as comments."""
        head = [column.heading for column in self.columns]
        body = "\n".join(" & ".join(map(_tex, cells)) + r" \\" for cells in self.cells())
        align = "".join("l" if column.text else "r" for column in self.columns)
        comments = [self.data["title"], self.data["command"], *self.data["notes"], *self._versions()]
        return (
            "".join(f"% {line}\n" for line in comments)
            + f"\\begin{{tabular}}{{{align}}}\n\\toprule\n{' & '.join(map(_tex, head))} \\\\\n\\midrule\n"
            + f"{body}\n\\bottomrule\n\\end{{tabular}}\n"
        )

    def _versions(self) -> list[str]:
        """What it was tabulated with, and what its runs were trained with where that is something else."""
        made = in_words(self.data["versions"])
        trained = self.data["trained_with"]
        return [made, f"trained with {'; '.join(trained)}"] if set(trained) - {made} else [made]


@dataclass(frozen=True)
class Compared:
    """One of our figures beside the published one."""

    what: str
    source: str
    """Empty where the source states none."""
    ours: str
    agrees: bool | None
    """None where there is nothing to agree with."""


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def in_words(versions: Mapping[str, str]) -> str:
    """Such as "workbench 0.3.0, python 3.11.7"."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def percent(rate: float) -> str:
    return f"{100 * rate:.1f}"


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def over_seeds(values: Sequence[float]) -> Row:
    """Every seed's value, and what they have in common."""
    return {"mean": mean(values), "min": min(values), "max": max(values), "per_seed": list(values)}


def _flat(row: Row, prefix: str = "") -> Any:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, " ".join(str(v) for v in value) if isinstance(value, list) else value


_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "−": "$-$",
        "×": r"$\times$", "→": r"$\to$", "←": r"$\leftarrow$", "≤": r"$\leq$", "≥": r"$\geq$", "±": r"$\pm$",
        "√": r"$\surd$", "²": "$^2$", "·": r"$\cdot$", "∞": r"$\infty$"}  # fmt: skip
_TEX |= {letter: "\\" + letter for letter in "&%$#_{}"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in text)
