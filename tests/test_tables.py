"""The engine of the tables: shape, provenance, faces, what is kept and what is made anew; on tiny budgets."""

import csv
import hashlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import reduce
from pathlib import Path

import pytest
from filelock import FileLock

from workbench.errors import UnknownName, WorkbenchError
from workbench.recipes import load_recipe, read_recipe
from workbench.statistics import interval
from workbench.tables import TABLES, engine, order, winograd
from workbench.tables.engine import Order, Quick
from workbench.tables.report import report
from workbench.tables.table import Column, Table
from workbench.tasks import load_task
from workbench.tasks.shortcuts import shortcut_accuracies

ROW_KEYS = {
    "model", "task", "budget", "seeds", "held_out_accuracy", "wrong_noun", "other_word", "train_accuracy",
    "parameters", "steps", "seconds", "recipe_sha256", "chance", "shortcuts",
}  # fmt: skip
ROOT = Path(__file__).parent.parent
RESULTS, SHIPPED = ROOT / "docs" / "results", ROOT / "models"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the runs of the table lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def made(kept):
    """The Winograd table, every row at 1 % of its steps, two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(kept))
        return tiny("winograd", patch).make(jobs=2)


def tiny(name: str, patch: pytest.MonkeyPatch, seeds: int = 2, steps: float = 0.01) -> Order:
    patch.setattr(f"workbench.tables.{name}.QUICK", Quick(steps))
    return order(name, seeds, "quick")


def test_every_row_gives_every_seed_its_budget_and_what_it_was_made_from(made):
    assert [row["model"] for row in made.data["rows"]] == list(winograd.MODELS)
    for row in made.data["rows"]:
        assert row.keys() >= ROW_KEYS
        accuracy = row["held_out_accuracy"]
        n_seeds = 1 if row["model"] == "winograd-1-hand" else 2
        assert len(accuracy["per_seed"]) == len(row["seeds"]) == n_seeds
        assert accuracy["mean"] == pytest.approx(sum(accuracy["per_seed"]) / n_seeds)
        assert accuracy["interval"][0] <= accuracy["mean"] <= accuracy["interval"][1]
        assert row["wrong_noun"] + row["other_word"] + accuracy["mean"] == pytest.approx(1)
        full = load_recipe(row["model"]).training.steps
        assert row["budget"] == ("quick" if full else "exact") and row["steps"] == round(full * 0.01)


def test_every_figure_is_that_of_the_runs(made, kept):
    for row in made.data["rows"]:
        if row["budget"] == "exact":
            continue
        folders = [kept / folder for folder in os.listdir(kept) if folder.startswith(row["model"])]
        files = [json.loads((load_path(folders, row, seed) / "run.json").read_text()) for seed in row["seeds"]]
        assert row["held_out_accuracy"]["per_seed"] == [file["held_out"]["accuracy"] for file in files]
        assert row["train_accuracy"] == pytest.approx(mean(files, "train", "accuracy"))
        assert row["wrong_noun"] == pytest.approx(mean(files, "held_out", "rates", "wrong_noun"))
        assert row["other_word"] == pytest.approx(mean(files, "held_out", "rates", "other_word"))
        assert row["seconds"] == pytest.approx(mean(files, "seconds"))
        assert {file["parameters"] for file in files} == {row["parameters"]}
        by_seed = [{k: (n, a) for k, (n, a) in file["held_out"]["by_cluster"].items()} for file in files]
        assert row["held_out_accuracy"]["interval"] == list(interval(by_seed))
        assert row["shortcuts"] == shortcut_accuracies(load_task(row["task"]))


def mean(files, *keys):
    """Of one figure of several run.json."""
    return sum(reduce(dict.__getitem__, keys, file) for file in files) / len(files)


def load_path(folders, row, seed):
    """The one run of this row and seed: names of changed recipes end in a hash."""
    for folder in folders:
        recipe = read_recipe(folder / f"seed-{seed}" / "recipe.toml") if (folder / f"seed-{seed}").exists() else None
        if recipe and recipe.experiment == row["recipe_sha256"]:
            return folder / f"seed-{seed}"
    raise AssertionError(f"no run of {row['model']}, seed {seed}")


def test_the_faces_show_the_same_figures(made):
    data = json.loads(made.json())
    assert data == made.data
    lines = list(csv.DictReader(io.StringIO(made.csv())))
    assert len(lines) == len(data["rows"])
    row, line = data["rows"][2], lines[2]
    assert float(line["held_out_accuracy.mean"]) == row["held_out_accuracy"]["mean"]
    assert [float(v) for v in line["held_out_accuracy.per_seed"].split()] == row["held_out_accuracy"]["per_seed"]
    markdown, tex = made.markdown(), made.tex()
    figure = f"{100 * row['held_out_accuracy']['mean']:.1f}"
    assert f"| {row['model']} | {figure} |" in markdown and f"\n{row['model']} & {figure} &" in tex
    assert tex.count(r"\\") == len(data["rows"]) + 1 and tex.count("&") == (len(made.columns) - 1) * (len(lines) + 1)
    for face in (markdown, tex):
        assert data["command"] in face and "percentile bootstrap over seeds and noun pairs" in face


def test_a_row_is_kept_with_the_hash_of_its_fields(made, kept):
    for file in (kept / "tables" / "winograd").glob("*.json"):
        row = json.loads(file.read_text())
        sha256 = row.pop("sha256")
        assert row in made.data["rows"] and engine.kept_row(file) == row
        assert sha256 == hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def test_a_table_says_what_its_runs_were_trained_with(made, kept, tmp_path, monkeypatch):
    here = ", ".join(f"{name} {version}" for name, version in made.data["versions"].items())
    hand = json.loads((SHIPPED / "winograd-1-hand" / "run.json").read_text())["versions"]
    before = ", ".join(f"{name} {version}" for name, version in hand.items())
    assert made.data["trained_with"] == sorted({before, here})  # all others are trained here
    assert made.markdown().endswith(f"\n- {here}\n- trained with {'; '.join(sorted({before, here}))}\n")
    assert f"\n% trained with {'; '.join(sorted({before, here}))}\n" in made.tex()
    table = Table(made.data | {"trained_with": [here]}, made.columns)
    assert table.markdown().endswith(f"\n- {here}\n") and "trained with" not in table.markdown() + table.tex()


def test_versions_of_rows_that_were_not_run_are_none_of_the_table(monkeypatch):
    asked = tiny("winograd", monkeypatch)
    rows = [{**plan.label, "budget": "not run"} for plan in asked.plans]
    assert asked.tabulate(rows).data["trained_with"] == []


def test_the_note_on_seconds_stands_where_the_column_is(made, monkeypatch):
    assert engine.SECONDS in made.data["notes"]
    columns = tuple(column for column in winograd.COLUMNS if column.heading != "seconds")
    monkeypatch.setattr(winograd, "COLUMNS", columns)
    asked = tiny("winograd", monkeypatch)
    rows = [row if row["budget"] == "exact" else {"model": row["model"], "budget": "not run"}
            for row in made.data["rows"]]  # fmt: skip
    assert engine.SECONDS not in asked.tabulate(rows).data["notes"]
    monkeypatch.undo()
    assert engine.SECONDS in asked.tabulate(rows).data["notes"]


@pytest.mark.parametrize("name", TABLES)
def test_every_letter_of_the_committed_tables_is_one_that_latex_knows(name):
    data = json.loads((RESULTS / f"{name}.json").read_text())
    lines = Table(data, order(name, 1, "quick").module.COLUMNS).tex().splitlines()
    assert [line for line in lines if not line.startswith("%") and not line.isascii()] == []


def test_latex_is_escaped():
    column = Column("50 % of a_b", lambda row: row["text"])
    data = {
        "title": "t",
        "command": "c",
        "notes": [],
        "versions": {},
        "trained_with": [],
        "rows": [{"text": "x & y → {1}", "budget": "full"}],
    }
    tex = Table(data, (column,)).tex()
    assert r"50 \% of a\_b" in tex and r"x \& y $\to$ \{1\}" in tex


def test_one_split_serves_all_seeds_unless_asked():
    for split, seeds in ((False, [0, 0, 0]), (True, [0, 1, 2])):
        plan = next(p for p in order("winograd", 3, split_per_seed=split).plans if p.label["model"] == "winograd-2")
        assert [recipe.seeds.split for recipe in plan.recipes] == seeds


def test_half_is_half_of_the_steps():
    for budget, share in (("full", 1), ("half", 0.5), ("quick", 0.4)):
        plan = next(p for p in order("winograd", 1, budget).plans if p.label["model"] == "winograd-2")
        assert plan.recipes[0].training.steps == share * load_recipe("winograd-2").training.steps


@pytest.mark.parametrize(("name", "seeds", "budget", "message"), [
    ("winograd", 0, "full", "--seeds 0: expected 1 to 10,000"),
    ("winograd", 10_001, "full", "--seeds 10001: expected 1 to 10,000"),
    ("winograd", 1, "huge", "--budget huge: expected one of quick, half, full"),
    ("winogrand", 1, "full", "unknown table 'winogrand'; nearest: winograd"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused(name, seeds, budget, message):
    with pytest.raises((WorkbenchError, UnknownName), match=message):
        order(name, seeds, budget)


# What is kept, and what is made anew.


def counted(monkeypatch) -> tuple[list, list]:
    """What is trained and what is measured from now on, in this process."""
    trained, measured = [], []
    measure = engine._measure
    monkeypatch.setattr("workbench.training.Trainer.run", lambda self, progress: trained.append(self.recipe.name))
    monkeypatch.setattr(engine, "_measure", lambda *of: (measured.append(of[0].label["model"]), measure(*of))[1])
    return trained, measured


def test_a_second_time_nothing_is_trained_or_measured_again(made, kept, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNS", str(kept))
    trained, measured = counted(monkeypatch)
    again = tiny("winograd", monkeypatch).make(jobs=1)
    assert again.data == made.data and not trained and not measured


def test_a_damaged_row_is_measured_again_and_said(made, kept, monkeypatch, capsys):
    monkeypatch.setenv("WORKBENCH_RUNS", str(kept))
    trained, measured = counted(monkeypatch)
    files = sorted((kept / "tables" / "winograd").glob("*.json"))
    whole = [json.loads(file.read_text()) for file in files]
    other = whole[4]["held_out_accuracy"] | {"mean": 0.123}  # a figure that was edited
    damaged = dict(zip(files, [
        files[0].read_bytes()[:100],
        b"[]",
        b'{"what": "x", "budget": "exact"}',
        json.dumps(whole[3] | {"sha256": 3}).encode(),
        json.dumps(whole[4] | {"held_out_accuracy": other}).encode(),
    ], strict=False))  # fmt: skip
    for file, data in damaged.items():
        file.write_bytes(data)
    again = tiny("winograd", monkeypatch).make(jobs=1)
    assert again.data == made.data and not trained and len(measured) == len(damaged)
    said = capsys.readouterr().err
    for file in damaged:
        assert f"{file} is damaged; the row is measured again" in said
        assert json.loads(file.read_text())["budget"] in ("quick", "exact")


def test_other_code_measures_again_and_another_recipe_never_shows_the_old_figure(made, kept, monkeypatch):
    monkeypatch.setenv("WORKBENCH_RUNS", str(kept))
    trained, measured = counted(monkeypatch)
    monkeypatch.setattr(engine, "_source_sha256", lambda: "of changed code")
    assert tiny("winograd", monkeypatch).make(jobs=1).data == made.data
    assert not trained and measured == list(winograd.MODELS)
    monkeypatch.setattr(winograd, "plans", lambda asked: [
        engine.Plan({"model": "winograd-2"}, asked.recipes("winograd-2", lr=2e-3), winograd.measure)
    ])  # fmt: skip
    other = tiny("winograd", monkeypatch)
    assert [recipe.training.lr for recipe in other.untrained] == [2e-3, 2e-3]
    row = other.make(trained_only=True).data["rows"][0]
    assert row == {"model": "winograd-2", "budget": "not run"}


def test_what_is_not_trained_says_so_in_every_face(monkeypatch):
    made = tiny("winograd", monkeypatch).make(trained_only=True)
    by_model = {row["model"]: row for row in made.data["rows"]}
    assert by_model["winograd-2"] == {"model": "winograd-2", "budget": "not run"}
    assert by_model["winograd-1-hand"]["held_out_accuracy"]["mean"] == 1  # shipped, and needs no training
    assert made.data["command"].endswith("--trained")
    cells = "| winograd-2 " + "|  " * (len(made.columns) - 2) + "| not run |"
    assert cells in made.markdown()
    assert "not run" in made.csv() and r"not run \\" in made.tex()


def test_a_shipped_model_serves_as_its_seed_0(monkeypatch):
    names = {recipe.name for recipe in order("winograd", 1).untrained}
    assert names == {"winograd-average-half"}  # the one row that ships no weights


KILLED = """
import os
from workbench.tables import engine, order, winograd
from workbench.tables.engine import Quick
winograd.QUICK, winograd.MODELS = Quick(0.03), winograd.MODELS[:4]
order("winograd", 2, "quick").make(jobs=2, watch=lambda index, line: print(index, line["step"], flush=True))
"""


def test_killed_and_started_again_it_goes_on(runs, monkeypatch):
    """Killed once two runs are finished: these are not trained again, and the table is whole."""
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(list(runs.glob("*/*/run.json"))) >= 2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in runs.glob("*/*/run.json")}
    monkeypatch.setattr(winograd, "MODELS", winograd.MODELS[:4])
    made = tiny("winograd", monkeypatch, steps=0.03)
    assert 0 < len(made.untrained) < sum(len(plan.recipes) for plan in made.plans)
    table = retried(made)
    assert all(row["budget"] in ("quick", "exact") for row in table.data["rows"])
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def retried(asked: Order) -> Table:
    """The killed driver's workers end by themselves, but not at once: until then their runs are locked."""
    for _ in range(100):
        try:
            return asked.make(jobs=2)
        except WorkbenchError as error:
            assert "another process" in str(error)
            time.sleep(0.2)
    raise AssertionError("the killed process still holds its lock")


def until(what) -> None:
    for _ in range(1200):
        if what():
            return
        time.sleep(0.05)
    raise AssertionError("waited in vain")


def test_two_of_the_same_table_at_once(runs, monkeypatch):
    runs.joinpath("tables").mkdir(parents=True)
    with (
        FileLock(runs / "tables" / ".winograd.lock"),
        pytest.raises(WorkbenchError, match=r"another process is making the table winograd in .*; wait for it"),
    ):
        tiny("winograd", monkeypatch).make(trained_only=True)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "file"))
    before = multiprocessing.active_children()
    with pytest.raises(WorkbenchError, match=r"cannot write to .*file.tables .*; set WORKBENCH_RUNS to another"):
        tiny("winograd", monkeypatch).make(trained_only=True)
    assert set(multiprocessing.active_children()) <= set(before)


# The page about all tables.


def test_every_table_has_what_the_engine_and_the_page_need():
    for name in TABLES:
        asked = order(name, 1, "quick")
        module = asked.module
        assert module.SEEDS >= 1 and module.TITLE and module.NOTES
        assert module.compared.__doc__ and module.compared([]) == []
        assert all(isinstance(said, str) for said in module.discussion([]))
        assert {"budget"} <= {column.heading for column in module.COLUMNS if column.essential}
        labels = [json.dumps(plan.label) for plan in asked.plans]
        assert len(set(labels)) == len(labels)


def test_the_page_says_what_agrees_what_differs_and_what_was_not_run(made, monkeypatch):
    asked = tiny("winograd", monkeypatch)
    page = report({"winograd": (asked, made)}, "workbench table all")
    assert "`workbench table all` wrote this page" in page and "Some rows have the budget quick." in page
    rows = {
        line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| winograd")
    }
    for each in winograd.compared(made.data["rows"]):
        ending = {True: "| agrees |", False: "| **differs** |", None: "|  |"}[each.agrees]
        assert rows[each.what].endswith(ending) and each.ours in rows[each.what]
    assert {each.agrees for each in winograd.compared(made.data["rows"])} >= {False, None}
    rows = [*made.data["rows"], {"model": "winograd-9", "budget": "not run"}]
    longer = Table({**made.data, "rows": rows}, made.columns)
    assert "Not run: winograd-9." in report({"winograd": (asked, longer)}, "workbench table all")


# The committed table: what the command wrote, and the figures that it must reach.


@pytest.fixture(scope="module")
def committed():
    return {row["model"]: row for row in json.loads((RESULTS / "winograd.json").read_text())["rows"]}


def test_the_committed_table_is_of_the_recipes_as_they_are_now(committed):
    assert list(committed) == list(winograd.MODELS)
    for name, row in committed.items():
        hand = name == "winograd-1-hand"
        assert row["recipe_sha256"] == load_recipe(name).experiment and row["budget"] == ("exact" if hand else "full")
        assert len(row["seeds"]) == (1 if hand else 5)


def test_two_blocks_solve_the_task_on_every_seed(committed):
    for name in ("winograd-2", "winograd-2-attn"):
        accuracy = committed[name]["held_out_accuracy"]
        assert accuracy["mean"] >= 0.995 and accuracy["min"] >= 0.98


def test_one_block_does_worse_and_attention_alone_stays_on_its_plateau(committed):
    assert committed["winograd-1"]["held_out_accuracy"]["mean"] < committed["winograd-2"]["held_out_accuracy"]["mean"]
    assert 0.45 <= committed["winograd-1-attn"]["held_out_accuracy"]["mean"] <= 0.60
    assert committed["winograd-1-attn-long"]["held_out_accuracy"]["mean"] >= 0.98
    assert committed["winograd-1-hand"]["held_out_accuracy"]["mean"] == 1.0


def test_the_average_names_the_wrong_noun_and_solves_the_leaky_sentence(committed):
    assert committed["winograd-average"]["held_out_accuracy"]["mean"] <= 0.55
    assert committed["winograd-average"]["wrong_noun"] >= 0.40
    assert committed["winograd-leaky-average"]["held_out_accuracy"]["mean"] >= 0.99


def test_no_model_of_the_committed_table_took_more_than_a_minute(committed):
    assert all(row["seconds"] <= 60 for row in committed.values())
