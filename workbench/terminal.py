"""What the commands write: tables and progress on a terminal, files, and lines about what went wrong."""

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from workbench.errors import BadRun, WorkbenchError
from workbench.wording import percent

if TYPE_CHECKING:
    from workbench.recipes import Recipe
    from workbench.tables.table import Column, Table

GAP = 3  # characters between the columns of a table
PERIOD = 3600  # seconds that an estimate of the time left looks back: lines of metrics may be minutes apart
EVERY = 60  # seconds between two lines on one training, where there is no terminal


class Bars:
    """A progress bar a training, with loss, held-out score and the time left; where there is no terminal, now and then
    a line on stderr instead."""

    def __init__(self, recipes: "list[Recipe]"):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.recipes = recipes
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[scores]}"),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal, speed_estimate_period=PERIOD,
        )  # fmt: skip
        self.steps = [_made(recipe) for recipe in recipes]
        """Made of each recipe's training."""
        self.said = [monotonic()] * len(recipes)
        """When a line on it was last due."""
        total = sum(r.training.steps for r in recipes)
        self.total = self.progress.add_task("all", total=total, completed=sum(self.steps), scores="", visible=total > 0)
        self.rows = self.progress.add_task("rows", total=1, scores="", visible=False)
        self.bars: dict[int, Any] = {}

    def __enter__(self) -> "Bars":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def watch(self, index: int, line: dict[str, Any]) -> None:
        """Show what a line of metrics holds of it: the line was read from a file."""
        recipe = self.recipes[index]
        name = f"{recipe.name} seed {recipe.seeds.initialisation}"
        step, loss, accuracy = (_number(line.get(key)) for key in ("step", "loss", "held_out_accuracy"))
        if step is None:
            return
        new = step != self.steps[index]
        self.steps[index] = int(step)
        self.progress.update(self.total, completed=sum(self.steps))
        if index not in self.bars:
            self.bars[index] = self.progress.add_task(name, total=recipe.training.steps, scores="")
        shown = [] if loss is None else [f"loss {loss:.3f}"]
        shown += [] if accuracy is None else [f"held-out {percent(accuracy)}"]
        self.progress.update(
            self.bars[index], completed=step, scores="  ".join(shown), visible=step < recipe.training.steps
        )
        if self.progress.disable and new and monotonic() - self.said[index] >= EVERY:
            self.said[index] = monotonic()
            say("  ".join([f"{name}: step {int(step):,} of {recipe.training.steps:,}", *shown]))

    def measured(self, done: int, of: int) -> None:
        self.progress.update(self.rows, completed=done, total=of, visible=True)


def _made(recipe: "Recipe") -> int:
    """The steps of its training that were made before, as its metrics say: they are no part of today's speed."""
    from workbench.runs import RESULTS, read_metrics, run_folder

    folder = run_folder(recipe)
    if (folder / RESULTS).exists():
        return recipe.training.steps
    try:
        lines = read_metrics(folder)[-1:]
    except BadRun:  # who goes on with it says so
        return 0
    return sum(int(_number(line["step"]) or 0) for line in lines)


def _number(value: Any) -> float | None:
    """A finite number, or None."""
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def show(made: "Table") -> None:
    from rich.console import Console

    terminal = Console()
    columns = made.columns
    if terminal.is_terminal:
        columns = fitting(columns, _widths([column.heading for column in columns], made.cells()), terminal.width)
    right = {i for i, column in enumerate(columns) if not column.text}
    print_table([column.heading for column in columns], made.cells(columns), right)
    for note in made.data["notes"]:
        print(f"· {note}")
    if len(columns) < len(made.columns):
        left_out = " · ".join(column.heading for column in made.columns if column not in columns)
        print(f"· this terminal is too narrow for: {left_out}; --md, --csv, --tex and --json have everything")


def fitting(columns: "Sequence[Column]", widths: Sequence[int], room: int) -> "tuple[Column, ...]":
    """The columns to show where a line has `room` characters: the first essential one and the budget in any case, and
    as many of the others as fit whole, the essential ones before the rest."""
    label = next(i for i, column in enumerate(columns) if column.essential)
    always = {i for i, column in enumerate(columns) if i == label or column.heading == "budget"}
    shown: set[int] = set()
    for i in sorted(range(len(columns)), key=lambda i: (i not in always, not columns[i].essential, i)):
        if i in always or _total([widths[j] for j in shown | {i}]) <= room:
            shown.add(i)
    return tuple(columns[i] for i in sorted(shown))


def _widths(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Of columns that hold their heading and cells whole, in characters."""
    from rich.cells import cell_len

    return [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def print_table(headings: list[str], rows: list[list[str]], right: set[int] | None = None) -> None:
    """Cells are whole, however narrow the terminal: only the last column wraps there, between words."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    widths = _widths(headings, rows)
    words = [word for cell in (headings[-1], *(row[-1] for row in rows)) for word in cell.split()]
    least = [*widths[:-1], *_widths([""], [[word] for word in words])]
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for i, heading in enumerate(headings):
        align = "right" if i in (right or ()) else "left"
        last = i == len(headings) - 1
        shown.add_column(heading, justify=align, no_wrap=not last, overflow="fold", min_width=least[i])
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    terminal = Console()
    console = Console(width=max(terminal.width, _total(least)) if terminal.is_terminal else _total(widths))
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().strip("\n").split("\n") if line.strip()))


def check_writable(file: Path | None) -> None:
    """Before the work is done, not after."""
    if file is not None and (file.is_dir() or not file.name):
        raise WorkbenchError(f"{str(file)!r} is a folder; give a file to write to")
    if file is None or str(file) == "-":
        return
    if not file.resolve().parent.is_dir():
        raise WorkbenchError(f"{file}: no such folder {file.parent}; make it first")
    if not os.access(file.resolve().parent, os.W_OK):
        raise WorkbenchError(f"{file}: the folder {file.parent} cannot be written to; choose another")


def write_file(file: Path, text: str) -> None:
    if str(file) == "-":
        print(text, end="")
        return
    from workbench.files import write_atomic

    try:
        write_atomic(file, text.encode())
    except OSError as error:
        raise WorkbenchError(f"cannot write {file}: {error.strerror}") from None


def say(message: str) -> None:
    print(message, file=sys.stderr)
