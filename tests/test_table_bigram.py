"""The bigram table: its figures on a tiny budget against loops over the matrix, a model that is the truth exactly, and
the committed table."""

import csv
import io
import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from workbench.recipes import load_recipe
from workbench.runs import Run, load
from workbench.tables import order
from workbench.tables.bigram import LIKELY, compared, deviation, discussion, measure
from workbench.tables.engine import Quick
from workbench.tasks import load_task
from workbench.tasks.generated import Bigram

COMMITTED = Path(__file__).parent.parent / "docs" / "results" / "bigram.json"


def chain() -> Bigram:
    task = load_task("bigram")
    assert isinstance(task, Bigram)
    return task


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def table(kept):
    """1 % of the steps, two seeds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(kept))
        patch.setattr("workbench.tables.bigram.QUICK", Quick(0.01))
        return order("bigram", 2, "quick").make(jobs=1)


def test_the_row_gives_its_budget_and_seeds_and_the_figures_of_its_runs(table, kept):
    (row,) = table.data["rows"]
    assert (row["model"], row["budget"], row["seeds"], row["steps"]) == ("bigram-0", "quick", [0, 1], 60)
    truth = chain().transition.tolist()
    for i, path in enumerate(sorted(kept.glob("bigram-0-*/seed-*"))):
        model = load(path).model
        logits = (model.W_E @ model.W_U).double().tolist()
        kl, right = [], 0
        for p, z in zip(truth, logits, strict=True):
            total = math.log(sum(math.exp(value) for value in z))
            kl.append(sum(a * (math.log(a) - b + total) for a, b in zip(p, z, strict=True)))
            right += z.index(max(z)) == p.index(max(p))
        assert row["mean_kl"]["per_seed"][i] == pytest.approx(sum(kl) / 32, abs=1e-6)
        assert row["worst_kl"]["per_seed"][i] == pytest.approx(max(kl), abs=1e-6)
        assert row["argmax"]["per_seed"][i] == right / 32
    for name in ("mean_kl", "worst_kl", "deviation", "excess"):
        values = row[name]["per_seed"]
        assert (row[name]["min"], row[name]["max"]) == (min(values), max(values))
        assert row[name]["mean"] == pytest.approx(sum(values) / 2)


def test_the_excess_is_the_loss_less_that_of_the_true_matrix(table):
    (row,) = table.data["rows"]
    task = chain()
    steps = [(a, b) for tokens in task.held_out.tolist() for a, b in pairwise(tokens)]
    true_loss = -sum(math.log(task.transition[a, b]) for a, b in steps) / len(steps)
    assert row["true_loss"]["per_seed"] == pytest.approx([true_loss] * 2)
    for i in range(2):  # the run's own loss, as training wrote it
        assert row["excess"]["per_seed"][i] == pytest.approx(row["held_out_loss"]["per_seed"][i] - true_loss, abs=1e-5)


def test_the_blind_predictor_is_the_stationary_distribution(table):
    """Rows weigh alike, as in the mean KL beside it."""
    (row,), task = table.data["rows"], chain()
    rows = [sum(p * math.log(p / q) for p, q in zip(r, task.stationary, strict=True)) for r in task.transition]
    assert row["blind_kl"] == pytest.approx(sum(rows) / 32)
    likely = [(i, j) for i in range(32) for j in range(32) if task.transition[i, j] >= LIKELY]
    assert row["likely_entries"] == len(likely)
    assert row["likely_share"] == pytest.approx(sum(task.stationary[i] * task.transition[i, j] for i, j in likely))


def test_a_deviation_ignores_a_constant_for_each_row_and_nothing_else():
    truth = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    shifted = truth.log() + torch.tensor([[3.0], [-1.0]], dtype=torch.float64)
    assert deviation(shifted, truth).abs().max() < 1e-12
    shifted[1, 0] += 1  # the mean under the row (.25, .75) rises by .25
    assert deviation(shifted, truth)[1].tolist() == pytest.approx([0.75, -0.25])


def test_a_model_that_is_the_matrix_has_no_error_and_leaves_the_null():
    """W_E picks a row, W_U holds log P."""
    run = load("bigram-0")
    model = load("bigram-0").model
    with torch.no_grad():
        model.W_E.zero_()[:, :32] = torch.eye(32)
        model.W_U.zero_()[:32] = torch.from_numpy(chain().transition).log().float()
    exact = Run(run.path, run.recipe, run.results)
    exact.__dict__["model"] = model
    row = measure([exact])
    assert row["mean_kl"]["max"] < 1e-10 and abs(row["excess"]["max"]) < 1e-6
    assert row["deviation_all"]["max"] < 1e-4 and row["argmax"]["min"] == 1
    assert row["deviation_turned"]["min"] > 1 and row["deviation_p"]["max"] <= 0.01
    assert row["argmax_turned"]["max"] < 0.3 and row["argmax_p"]["max"] <= 0.01


def test_all_faces_show_the_row_and_its_words_follow_its_figures(table):
    (row,) = table.data["rows"]
    assert json.loads(table.json()) == table.data
    (line,) = csv.DictReader(io.StringIO(table.csv()))
    assert float(line["mean_kl.mean"]) == row["mean_kl"]["mean"]
    assert f"| bigram-0 | {row['mean_kl']['mean']:.5f} |" in table.markdown()
    assert f"bigram-0 & {row['mean_kl']['mean']:.5f} &" in table.tex()
    assert [comparison.agrees for comparison in compared([row])] == [False] * 3  # 60 steps are not enough
    assert discussion([row])[0].startswith("**Not yet the table**")
    assert compared([]) == [] and discussion([]) == []


@pytest.fixture(scope="module")
def committed():
    return json.loads(COMMITTED.read_text())


def test_the_committed_table_is_of_todays_recipe_and_reaches_the_figures(committed):
    (row,) = committed["rows"]
    assert row["recipe_sha256"] == load_recipe("bigram-0").experiment
    assert row["budget"] == "full" and len(row["seeds"]) >= 5
    assert row["mean_kl"]["max"] <= 0.001 and row["worst_kl"]["max"] <= 0.1
    assert row["argmax"]["mean"] >= 0.95 and row["deviation"]["max"] <= 0.05
    assert all(comparison.agrees for comparison in compared([row]))
    assert discussion([row])[0].startswith("**The weights are the table.**")
