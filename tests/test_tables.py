"""The Winograd table: its shape and its faces, on tiny budgets; and the committed one, which must reach its figures."""

import csv
import io
import json
import os
from functools import reduce
from pathlib import Path

import pytest

from workbench.errors import WorkbenchError
from workbench.recipes import load_recipe, read_recipe
from workbench.statistics import interval
from workbench.tables import BUDGETS, make_table, table_recipes
from workbench.tables.winograd import MODELS
from workbench.tasks import load_task
from workbench.tasks.shortcuts import shortcut_accuracies

ROW_KEYS = {
    "model", "task", "budget", "seeds", "held_out_accuracy", "wrong_noun", "other_word", "train_accuracy",
    "parameters", "steps", "seconds", "recipe_sha256", "chance", "shortcuts",
}  # fmt: skip
COMMITTED = Path(__file__).parent.parent / "docs" / "results" / "winograd.json"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Where the runs of the table lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def table(kept):
    """Every row at 1 % of its steps, two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(kept))
        patch.setitem(BUDGETS, "quick", 0.01)
        return make_table("winograd", 2, "quick", jobs=2)


def test_every_row_gives_every_seed_its_budget_and_what_it_was_made_from(table):
    assert [row["model"] for row in table.data["rows"]] == list(MODELS)
    for row in table.data["rows"]:
        assert row.keys() >= ROW_KEYS
        accuracy = row["held_out_accuracy"]
        n_seeds = 1 if row["model"] == "winograd-1-hand" else 2
        assert len(accuracy["per_seed"]) == len(row["seeds"]) == n_seeds
        assert accuracy["mean"] == pytest.approx(sum(accuracy["per_seed"]) / n_seeds)
        assert accuracy["interval"][0] <= accuracy["mean"] <= accuracy["interval"][1]
        assert row["wrong_noun"] + row["other_word"] + accuracy["mean"] == pytest.approx(1)
        full = load_recipe(row["model"]).training.steps
        assert row["budget"] == "quick" and row["steps"] == round(full * 0.01)


def test_every_figure_is_that_of_the_runs(table, kept):
    for row in table.data["rows"]:
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


def test_the_four_faces_show_the_same_figures(table):
    data = json.loads(table.json())
    assert data == table.data
    lines = list(csv.DictReader(io.StringIO(table.csv())))
    assert len(lines) == len(data["rows"])
    row, line = data["rows"][1], lines[1]
    assert float(line["held_out_accuracy.mean"]) == row["held_out_accuracy"]["mean"]
    assert [float(v) for v in line["held_out_accuracy.per_seed"].split()] == row["held_out_accuracy"]["per_seed"]
    markdown = table.markdown()
    assert f"| {row['model']} | {100 * row['held_out_accuracy']['mean']:.1f} |" in markdown
    assert data["command"] in markdown and "percentile bootstrap over seeds and noun pairs" in markdown


def test_one_split_serves_all_seeds_unless_asked():
    assert {r.seeds.split for r in table_recipes("winograd", 3, "full")["winograd-2"]} == {0}
    assert [r.seeds.split for r in table_recipes("winograd", 3, "full", split_per_seed=True)["winograd-2"]] == [0, 1, 2]


def test_a_bad_seed_count_or_budget_is_refused():
    with pytest.raises(WorkbenchError, match="--seeds 0: expected at least 1"):
        table_recipes("winograd", 0, "full")
    with pytest.raises(WorkbenchError, match="--budget huge: expected one of quick, full"):
        table_recipes("winograd", 1, "huge")


def test_a_second_time_nothing_is_trained_again(table, kept, monkeypatch):
    trained = []
    monkeypatch.setattr("workbench.training.Trainer.run", lambda self, progress: trained.append(self))
    monkeypatch.setenv("WORKBENCH_RUNS", str(kept))
    monkeypatch.setitem(BUDGETS, "quick", 0.01)
    again = make_table("winograd", 2, "quick", jobs=1)
    assert again.data == table.data and not trained


# The committed table: what the command wrote, and the figures that it must reach.


@pytest.fixture(scope="module")
def committed():
    return {row["model"]: row for row in json.loads(COMMITTED.read_text())["rows"]}


def test_the_committed_table_is_of_the_recipes_as_they_are_now(committed):
    assert list(committed) == list(MODELS)
    for name, row in committed.items():
        assert row["recipe_sha256"] == load_recipe(name).experiment and row["budget"] == "full"
        assert len(row["seeds"]) == (1 if name == "winograd-1-hand" else 5)


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
