"""What the commands write: tables that are whole at every width, and progress with and without a terminal."""

import io
import json
import re
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import pytest
from rich.console import Console

from workbench import terminal
from workbench.recipes import load_recipe
from workbench.tables import TABLES
from workbench.tables.table import Column, Table
from workbench.terminal import Bars, fitting, print_table, show

RESULTS = Path(__file__).parent.parent / "docs" / "results"
NARROW = re.compile(r"· this terminal is too narrow for: (.*); --md, --csv, --tex and --json have everything")


def as_wide_as(columns: int, patch: pytest.MonkeyPatch) -> None:
    """Output is a terminal of so many columns from now on."""
    patch.setattr("rich.console.Console", partial(Console, force_terminal=True, width=columns, color_system=None))


@cache
def committed(name: str) -> Table:
    data = json.loads((RESULTS / f"{name}.json").read_text())
    return Table(data | {"notes": []}, import_module(f"workbench.tables.{name.replace('-', '_')}").COLUMNS)


@pytest.mark.parametrize("columns", [80, 100, 160, 280, None])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_shows_whole_cells_and_says_which_columns_are_missing(name, columns, monkeypatch, capsys):
    """`None` is a pipe, where none is missing."""
    if columns is not None:
        as_wide_as(columns, monkeypatch)
    table = committed(name)
    show(table)
    heading, rule, *lines = capsys.readouterr().out.splitlines()
    left_out = NARROW.fullmatch(lines[-1])
    missing = left_out[1].split(" · ") if left_out else []
    assert {each.heading for each in table.columns} >= set(missing) and not {"budget", "what", "seed"} & set(missing)
    shown = [each for each in table.columns if each.heading not in missing]
    assert re.split(r" {3,}", heading.strip()) == [each.heading for each in shown]
    rows = lines[: len(table.data["rows"])]
    assert [re.split(r" {3,}", line.strip()) for line in rows] == [
        [cell for cell in cells if cell] for cells in table.cells(shown)
    ]
    assert len(lines) == len(rows) + bool(missing) and set(rule) == {"─"}
    assert columns is None or max(map(len, [heading, rule, *rows])) <= columns
    assert not missing or columns is not None


def column(heading: str, essential: bool = False) -> Column:
    return Column(heading, lambda row: "", essential)


def test_essential_columns_come_first_in_their_order_and_the_others_fill_the_line():
    columns = [column("a"), column("label", True), column("b"), column("c", True), column("d", True), column("budget")]
    widths = [2, 5, 4, 7, 4, 6]

    def at(room: int) -> list[str]:
        return [each.heading for each in fitting(columns, widths, room)]

    assert at(1) == at(18) == ["label", "budget"]  # 5 + 3 + 6 are 14; a with its gap takes 5 more, d 7, c 10
    assert at(19) == ["a", "label", "budget"]
    assert at(21) == ["label", "d", "budget"]  # c does not fit
    assert at(24) == ["label", "c", "budget"]
    assert at(31) == ["label", "c", "d", "budget"]
    assert at(36) == ["a", "label", "c", "d", "budget"]
    assert at(43) == [each.heading for each in columns]


def test_the_last_column_of_a_list_wraps_between_words_and_nothing_is_cropped(monkeypatch, capsys):
    rows = [["1.25", "x" * 30, "a few words that go on and on"], ["10.5", "y", "unbreakable" * 2]]
    as_wide_as(40, monkeypatch)
    print_table(["n", "name", "about"], rows, right={0})
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["1.25", "x" * 30, "a", "few", "words", "that", "go", "on"]
    assert lines[3].split() == ["and", "on"]
    assert lines[4].split() == ["10.5", "y", "unbreakable" * 2]
    print_table(["n", "name"], [])
    assert capsys.readouterr().out.split() == ["n", "name", "─" * 8]


# Progress.


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(terminal, "monotonic", clock)
    return clock


def line(step: int) -> dict:
    return {"step": step, "loss": 1.5, "held_out_accuracy": 0.25}


def test_the_time_left_is_estimated_from_lines_that_are_minutes_apart(monkeypatch, clock):
    """As the ladder's: 250 steps in four minutes; after 750 of 3,000, 36 minutes are left."""
    as_wide_as(200, monkeypatch)
    with Bars([load_recipe("shakespeare-1")]) as bars:
        bars.progress.stop()
        bars.progress.get_time = clock
        for step in range(250, 1000, 250):
            for _ in range(480):  # looked at twice a second
                clock.now += 0.5
                bars.watch(0, line(step))
        for task in (bars.total, bars.bars[0]):
            assert bars.progress.tasks[task].time_remaining == 36 * 60


def test_steps_of_an_earlier_time_are_no_part_of_the_speed(monkeypatch, clock, runs):
    """Two runs go on from step 1,000 of 3,000; each makes 250 steps in four minutes."""
    as_wide_as(200, monkeypatch)
    recipes = [load_recipe("shakespeare-1").with_seed(seed) for seed in (0, 1)]
    for seed in (0, 1):
        folder = runs / "shakespeare-1" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps(line(1000)) + "\n")
    with Bars(recipes) as bars:
        bars.progress.stop()
        bars.progress.get_time = clock
        for step in range(1000, 2000, 250):
            clock.now += 240
            for index in (0, 1):
                bars.watch(index, line(step))
        # 2,500 of 6,000 steps are left; 500 are made in 240 s, of which the first line counts for none
        assert bars.progress.tasks[bars.total].time_remaining == pytest.approx(2500 / (1250 / 480), abs=1)


def test_metrics_that_are_damaged_count_for_nothing(runs):
    folder = runs / "shakespeare-1" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step"\n{"step": 500}\n')
    assert Bars([load_recipe("shakespeare-1")]).steps == [0]


def test_with_nothing_to_train_no_bar_is_left(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr(
        "rich.console.Console", lambda stderr: Console(file=written, force_terminal=True, color_system=None, width=100)
    )
    with Bars([]):
        pass
    assert "all" not in written.getvalue() and "0/" not in written.getvalue()
    with Bars([load_recipe("winograd-2").with_seed(1)]):
        pass
    assert "all" in written.getvalue()


def test_without_a_terminal_there_is_a_line_a_minute_on_each_training(clock, capsys):
    with Bars([load_recipe("shakespeare-1"), load_recipe("shakespeare-2")]) as bars:
        for second in range(0, 241):
            clock.now = 1000.0 + second
            bars.watch(0, line(250 * (second // 100)))  # logs every 100 s
            bars.watch(1, line(second))  # logs every second
    out, err = capsys.readouterr()
    first = [each for each in err.splitlines() if "shakespeare-1" in each]
    second = [each for each in err.splitlines() if "shakespeare-2" in each]
    said = [f"shakespeare-1 seed 0: step {n} of 3,000  loss 1.500  held-out 25.0" for n in (250, 500)]
    assert [each.removesuffix(" %") for each in first] == said
    assert [each.split()[4] for each in second] == ["60", "120", "180", "240"]
    assert out == "" and len(first) + len(second) == len(err.splitlines())
