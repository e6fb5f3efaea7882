"""What the commands write: tables and progress on a terminal, files, and lines about what went wrong."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.wording import percent

if TYPE_CHECKING:
    from workbench.recipes import Recipe
    from workbench.tables.table import Table

WIDE = 270  # columns of a terminal that has room for the widest table


class Bars:
    """A progress bar a training, with loss, held-out score and the time left. Only on a terminal."""

    def __init__(self, recipes: "list[Recipe]"):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.recipes = recipes
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[scores]}"),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self.total = self.progress.add_task("all", total=sum(r.training.steps for r in recipes) or 1, scores="")
        self.rows = self.progress.add_task("rows", total=1, scores="", visible=False)
        self.bars: dict[int, Any] = {}
        self.steps = [0] * len(recipes)

    def __enter__(self) -> "Bars":
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def watch(self, index: int, line: dict[str, Any]) -> None:
        recipe = self.recipes[index]
        self.steps[index] = line["step"]
        self.progress.update(self.total, completed=sum(self.steps))
        if index not in self.bars:
            self.bars[index] = self.progress.add_task(
                f"{recipe.name} seed {recipe.seeds.initialisation}", total=recipe.training.steps, scores=""
            )
        loss = "" if line["loss"] is None else f"loss {line['loss']:.3f}  "
        self.progress.update(
            self.bars[index],
            completed=line["step"],
            scores=f"{loss}held-out {percent(line['held_out_accuracy'])}",
            visible=line["step"] < recipe.training.steps,
        )

    def measured(self, done: int, of: int) -> None:
        self.progress.update(self.rows, completed=done, total=of, visible=True)


def show(made: "Table") -> None:
    from rich.console import Console

    terminal = Console()
    columns = made.columns
    if terminal.is_terminal and terminal.width < WIDE:
        columns = tuple(column for column in columns if column.essential)
    right = {i for i, column in enumerate(columns) if not column.text}
    print_table([column.heading for column in columns], made.cells(columns), right)
    for note in made.data["notes"]:
        print(f"· {note}")
    if len(columns) < len(made.columns):
        left_out = ", ".join(column.heading for column in made.columns if not column.essential)
        print(f"· this terminal is too narrow for: {left_out}; --md, --csv, --tex and --json have everything")


def print_table(headings: list[str], rows: list[list[str]], right: set[int] | None = None) -> None:
    """Columns keep their words whole, and the last one wraps on a narrow terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(headings):
        last = i == len(headings) - 1
        width = None if last else max(len(heading), *(len(row[i]) for row in rows)) if rows else len(heading)
        align = "right" if i in (right or ()) else "left"
        shown.add_column(heading, justify=align, no_wrap=not last, overflow="fold", min_width=width)
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    console = Console() if Console().is_terminal else Console(width=2 * WIDE)
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
