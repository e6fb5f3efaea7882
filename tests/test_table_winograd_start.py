"""The table of starts: its recipes, every figure against its runs, what it says of outcomes, and the committed one."""

import json
from pathlib import Path

import pytest
from scipy.stats import binomtest

from workbench.recipes import load_recipe
from workbench.runs import read_metrics, run_folder
from workbench.tables import order, winograd_start
from workbench.tables.engine import Quick
from workbench.tables.winograd_start import LONG, SHORT, VARIANTS, reached_at

COMMITTED = Path(__file__).parent.parent / "docs" / "results" / "winograd-start.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The order and the table at 1 % of the steps, two seeds, and the runs' folders of each row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setattr(winograd_start, "QUICK", Quick(0.01))
        asked = order("winograd-start", 2, "quick")
        return asked.make(jobs=1), [[run_folder(recipe) for recipe in plan.recipes] for plan in asked.plans]


def row(init="gpt2", lr=3e-3, steps=4000, accuracies=(1.0, 0.5), reached=(300, None), budget="full"):
    solved = sum(a >= 0.95 for a in accuracies) / len(accuracies)
    spread = {"mean": sum(accuracies) / len(accuracies), "min": min(accuracies), "max": max(accuracies)}
    return {
        "model": SHORT, "init": init, "lr": lr, "full_steps": steps, "steps": steps, "budget": budget,
        "seeds": list(range(len(accuracies))), "reached_at": list(reached),
        "held_out_accuracy": spread | {"interval": [0, 1], "per_seed": list(accuracies)},
        "solved": {"share": solved, "interval": [0, 1]},
    }  # fmt: skip


def test_every_row_is_one_recipe_with_its_start_changed():
    for plan, (_, init, lr, steps) in zip(order("winograd-start", 2, "full").plans, VARIANTS, strict=True):
        for recipe in plan.recipes:
            assert (recipe.model.init, recipe.training.lr, recipe.training.steps) == (init, lr, steps)
            back = {"init": "torch", "lr": 1e-3, "steps": 1500}
            same = order("winograd-start", 2, "full").asked.recipes(recipe.name, **back)[recipe.seeds.initialisation]
            assert same.sha256 == load_recipe(SHORT).with_seed(recipe.seeds.initialisation).sha256
    asked = order("winograd-start", 2, "full").asked
    long = asked.recipes(SHORT, init="gpt2", lr=3e-3, steps=4000)
    assert [recipe.sha256 for recipe in long] == [load_recipe(LONG).with_seed(seed).sha256 for seed in range(2)]


def test_every_figure_is_that_of_the_runs(made):
    table, folders = made
    for found, of_seeds, (_, _, _, steps) in zip(table.data["rows"], folders, VARIANTS, strict=True):
        results = [json.loads((folder / "run.json").read_text()) for folder in of_seeds]
        accuracies = [result["held_out"]["accuracy"] for result in results]
        held_out = found["held_out_accuracy"]
        assert held_out["per_seed"] == accuracies and held_out["mean"] == pytest.approx(sum(accuracies) / 2)
        assert (held_out["min"], held_out["max"]) == (min(accuracies), max(accuracies))
        assert held_out["interval"][0] <= held_out["mean"] <= held_out["interval"][1]
        assert found["seeds"] == [0, 1] and found["budget"] == "quick" and found["steps"] == steps // 100
        assert found["reached_at"] == [None, None] and found["chance"] == 0.5
        wilson = binomtest(0, 2).proportion_ci(method="wilson")
        assert found["solved"]["share"] == 0
        assert found["solved"]["interval"] == pytest.approx([wilson.low, wilson.high], abs=1e-6)


def test_reached_at_is_the_first_logged_step_that_is_high_enough(made, monkeypatch):
    from workbench.runs import load

    run = load(made[1][0][0])
    assert run.metrics == read_metrics(run.path)
    lines = [{"step": step, "held_out_accuracy": a} for step, a in [(0, 0.1), (50, 0.94), (100, 0.95), (150, 0.2)]]
    monkeypatch.setitem(vars(run), "metrics", lines)
    assert reached_at(run) == 100
    monkeypatch.setitem(vars(run), "metrics", lines[:2])
    assert reached_at(run) is None


def test_comparison():
    rows = [
        row("torch", 1e-3, 1500, (0.5, 0.45)), row("gpt2", 1e-3, 1500, (0.5, 1.0)), row("torch", 3e-3, 1500),
        row("torch", 3e-3, 4000, (1.0, 0.6)), row("gpt2", 3e-3, 4000, (1.0, 0.96)),
        row("gpt2", 3e-3, 4000, (1.0, 1.0), budget="quick"),
    ]  # fmt: skip
    found = winograd_start.compared(rows)
    assert [each.agrees for each in found] == [True, False, None, False, True, None]
    assert found[0].source == "42.0–51.0" and found[4].source == "2 of 2 seeds at 100"
    assert found[0].what == "torch, 1e-3, 1,500 steps: held-out %"


def test_the_discussion_says_what_came_out():
    solved = (1.0, 1.0)
    both, longer = row("gpt2", 3e-3, 1500, solved), row("torch", 3e-3, 4000, (0.98, 0.63))
    others = [row("gpt2", 1e-3, 1500), row("torch", 3e-3, 1500, (0.5, 0.5)), row("torch", 1e-3, 1500, (0.5, 0.5))]
    said = " ".join(winograd_start.discussion([row(accuracies=solved), both, longer, *others]))
    assert "One layer of attention can" in said and "solved by 2 of 2 seeds" in said
    assert "small start alone is solved by 1 of 2 seeds" in said and "neither by 0 of 2 seeds" in said
    assert "do not replace" in said and "98.0 63.0 %" in said and "An anecdote" not in said
    other = " ".join(winograd_start.discussion([row(), both, row("torch", 3e-3, 4000, solved)]))
    assert "can" not in other and "do not replace" not in other and "first at step 300, one seed" in other


def test_comparison_and_discussion_of_few_rows(made):
    rows = made[0].data["rows"]
    assert winograd_start.discussion([]) == [] and winograd_start.compared([]) == []
    for some in (rows, *([each] for each in rows)):
        assert len(winograd_start.compared(some)) == len(some)
        assert all(isinstance(paragraph, str) for paragraph in winograd_start.discussion(some))


def test_faces(made):
    table, _ = made
    assert "| winograd-1-attn | torch | 1e-3 | 15 |" in table.markdown() and "– –" in table.markdown()
    assert "held_out_accuracy.per_seed" in table.csv() and r"\toprule" in table.tex()
    assert json.loads(table.json()) == table.data


def test_the_committed_table_is_of_todays_recipes_and_reaches_its_figures():
    committed = json.loads(COMMITTED.read_bytes())
    asked = order("winograd-start", 5, "full")
    assert committed["command"] == asked.command()
    by_variant = {}
    for found, plan in zip(committed["rows"], asked.plans, strict=True):
        assert plan.label.items() <= found.items() and found["budget"] == "full"
        assert found["recipe_sha256"] == plan.recipes[0].experiment and found["seeds"] == [0, 1, 2, 3, 4]
        by_variant[found["init"], found["lr"], found["full_steps"]] = found
    assert by_variant["torch", 1e-3, 1500]["held_out_accuracy"]["max"] < 0.6
    for steps in (1500, 4000):
        small = by_variant["gpt2", 3e-3, steps]
        assert small["solved"]["share"] == 1 and max(small["reached_at"]) <= 1000
    assert by_variant["torch", 3e-3, 4000]["solved"]["share"] < 1
