"""What the documents say is what was measured: their tables repeat the committed results, their code runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench as wb
from workbench.recipes import load_recipe, recipe_names
from workbench.tables import TABLES, order
from workbench.tables.report import report
from workbench.tables.table import NOT_RUN, Table, percent

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def committed(name: str) -> Table:
    return Table(json.loads((RESULTS / f"{name}.json").read_text()), order(name).module.COLUMNS)


def test_the_readme_repeats_the_committed_table():
    text = (ROOT / "README.md").read_text()
    for row in committed("winograd").data["rows"]:
        accuracy = row["held_out_accuracy"]
        low, high = map(percent, accuracy["interval"])
        seeds = " ".join(map(percent, accuracy["per_seed"]))
        assert f"| {row['model']} | {percent(accuracy['mean'])} | {low}–{high} | {seeds} |" in text, row["model"]


@pytest.mark.parametrize("name", TABLES)
def test_a_committed_table_is_of_today_s_recipes_and_its_faces_agree(name):
    made = committed(name)
    assert made.markdown() == (RESULTS / f"{name}.md").read_text()
    asked = order(name, int(re.findall(r"--seeds (\d+)", made.data["command"])[0]))
    assert made.data["command"] == asked.command("--trained" in made.data["command"])
    for plan, row in zip(asked.plans, made.data["rows"], strict=True):
        assert {key: row[key] for key in plan.label} == plan.label
        if row["budget"] == NOT_RUN:
            assert row.keys() == {*plan.label, "budget"}
            continue
        if plan.recipes:
            assert row["recipe_sha256"] == plan.recipes[0].experiment and row["seeds"] == [
                recipe.seeds.initialisation for recipe in plan.recipes
            ]
        trains = any(recipe.training.steps for recipe in plan.recipes)
        assert row["budget"] == (asked.asked.budget if trains else "exact")


def test_the_page_of_results_is_drawn_from_the_committed_tables():
    page = (ROOT / "docs" / "results.md").read_text()
    command = re.findall(r"`(workbench table all .*?)`", page)[0]
    assert page == report({name: (order(name), committed(name)) for name in TABLES}, command)


def test_the_readme_lists_every_table():
    text = (ROOT / "README.md").read_text()
    assert all(f"| {name} | {about} |" in text for name, about in TABLES.items())


def test_the_readme_lists_every_recipe_with_its_own_words():
    text = (ROOT / "README.md").read_text()
    for name in recipe_names():
        recipe = load_recipe(name)
        assert f"| {name} | {recipe.task} | {recipe.about} |" in text


def test_the_readmes_python_runs_as_it_stands(capsys):
    names = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        exec(code, names)  # in the order of the page
    first, second = capsys.readouterr().out.split("tensor", 2)[1:]
    weights = [float(x) for x in re.findall(r"\d\.\d+(?:e-\d+)?", first)]
    assert len(weights) == 15 and sum(weights) == pytest.approx(1, abs=1e-3)
    assert second.startswith("([True, True, True, True])\n")
    assert "adjective→0.all→answer, x→1.all→answer, y→1.all→answer (smallest of 30 edges" in second


def test_the_example_prints_the_models_own_numbers(tmp_path):
    script = ROOT / "examples" / "minimal_pair.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = wb.load("winograd-2").model
    for line in done.stdout.splitlines():
        found = re.fullmatch(r"head (\d)\.(\d): ([+-]\d\.\d\d) on (\d+) ‘\w+’", line)
        assert found
        layer, head, source = int(found[1]), int(found[2]), int(found[4])
        patterns = [model.run_with_cache(wb.load("winograd-2").encode(SENTENCE.format(a)))[1]["pattern", layer]
                    for a in ("tired", "wet")]  # fmt: skip
        change = patterns[1][0, head, 14, source] - patterns[0][0, head, 14, source]
        assert float(found[3]) == pytest.approx(change.item(), abs=0.006)
    assert len(done.stdout.splitlines()) == 6 and "plotly" in (tmp_path / "minimal_pair.html").read_text().lower()


def test_the_tour_prints_what_the_circuits_page_says():
    script = ROOT / "examples" / "circuits_tour.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "circuits.md").read_text()
    for said, printed in {
        "mean KL .0004 nats, worst row .0008": "mean KL 0.00044 nats, worst row 0.0008",
        "best of the six sources of the factorable rules are exactly these 24 rules; 20 of them": "20 of them are read",
        "54 of 72 such bugs are head-level (16 % of other tokens": "54 head-level (16.1% of other tokens",
        "| 0.0→K→1.0 | +.009 | −.60, confirmed |": "0.0→K→1.0 0.0018  0.0089",
        "| 0.0→K→1.0 … 1.3 together | +1.55, confirmed |": "0.0→K→1.3 0.0018  1.5488",
    }.items():
        assert said in page
        assert printed in done.stdout
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, {})


SENTENCE = "the animal did not cross the street because it was too {} , so the"


def test_every_link_between_our_pages_leads_somewhere():
    for page in ROOT.glob("**/*.md"):
        if ".venv" not in page.parts:
            for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
                assert target.startswith("http") or (page.parent / target).exists(), (page, target)
