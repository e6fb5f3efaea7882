"""What the documents say is what was measured: their tables repeat the committed results, their code runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import workbench as wb
from workbench.recipes import load_recipe, recipe_names
from workbench.tables.table import Table, percent
from workbench.tables.winograd import COLUMNS

ROOT = Path(__file__).parent.parent
RESULTS = json.loads((ROOT / "docs" / "results" / "winograd.json").read_text())


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_tables_in_prose_repeat_the_committed_table(page):
    text = (ROOT / page).read_text()
    for row in RESULTS["rows"]:
        accuracy = row["held_out_accuracy"]
        low, high = map(percent, accuracy["interval"])
        seeds = " ".join(map(percent, accuracy["per_seed"]))
        assert f"{percent(accuracy['mean'])} | {low}–{high} | {seeds} |" in text, row["model"]


def test_the_committed_markdown_is_the_committed_json():
    assert (ROOT / "docs" / "results" / "winograd.md").read_text() == Table(RESULTS, COLUMNS).markdown()


def test_the_readme_lists_every_shipped_model_with_its_own_words():
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
