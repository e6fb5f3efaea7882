"""The induction table: its figures on a tiny budget against loops over patterns and losses, the trap by arithmetic, and
the committed table."""

import csv
import io
import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from circuits import composition_scores, head_scores
from workbench.recipes import load_recipe
from workbench.runs import load
from workbench.tables import order
from workbench.tables.engine import Quick
from workbench.tables.induction import FIXED, MODELS, ONE, TRAP, TWO, compared, discussion, looking_back
from workbench.tasks import load_task
from workbench.tasks.generated import Induction

COMMITTED = Path(__file__).parent.parent / "docs" / "results" / "induction.json"
DRAWS = 39


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def table(kept):
    """Ten steps, two seeds, the fewest draws of the null; the shortcuts' own tests are tests/test_tasks.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(kept))
        patch.setattr("workbench.tables.induction.QUICK", Quick(0.005))
        patch.setattr("workbench.tables.induction.head_scores", partial(head_scores, draws=DRAWS))
        patch.setattr(
            "workbench.tables.induction.shortcut_accuracies",
            lambda task: {"fixed look-back": looking_back(task, 16), "bag of words": 0.0},
        )
        return order("induction", 2, "quick").make(jobs=1)


@pytest.fixture(scope="module")
def rows(table):
    return {row["model"]: row for row in table.data["rows"]}


@pytest.fixture(scope="module")
def models(kept, table):
    """Model name → its two seeds."""
    return {name: [load(path).model for path in sorted(kept.glob(f"{name}-*/seed-*"))] for name in MODELS}


def test_every_row_gives_every_seed_and_its_budget(rows):
    assert list(rows) == list(MODELS)
    for name, row in rows.items():
        assert (row["budget"], row["seeds"], row["steps"]) == ("quick", [0, 1], 10)
        assert row["layers"] == load_recipe(name).model.n_layers
        for key in ("held_out_accuracy", "loss", "varied_accuracy", "prefix_matching", "naive", "in_context"):
            values = row[key]["per_seed"]
            assert len(values) == 2 and row[key]["mean"] == pytest.approx(sum(values) / 2)
            assert (row[key]["min"], row[key]["max"]) == (min(values), max(values))


def test_accuracy_on_both_tasks_is_that_of_the_guesses(rows, models):
    for task_name, key in (("induction", "varied_accuracy"), ("induction-fixed", "fixed_accuracy")):
        task = load_task(task_name)
        for name, row in rows.items():
            own = "fixed_accuracy" if name == FIXED else "varied_accuracy"
            assert row[own]["per_seed"] == pytest.approx(row["held_out_accuracy"]["per_seed"])
            for model, found in zip(models[name], row[key]["per_seed"], strict=True):
                with torch.no_grad():
                    guesses = model(task.held_out[:, :-1]).argmax(-1)
                right = [(guesses[:, at] == task.held_out[:, at + 1]).double().mean() for at in task.scored]
                assert found == pytest.approx(float(sum(right) / len(right)), abs=1e-6)
    assert rows[FIXED]["held_out_accuracy"]["interval"] is None  # one period, one cluster
    low, high = rows[ONE]["held_out_accuracy"]["interval"]
    assert low <= rows[ONE]["held_out_accuracy"]["mean"] <= high


def test_the_naive_score_is_attention_15_and_31_back(rows, models):
    """With a period of 16 the token that followed the earlier occurrence stands 15 back, and 31 back too later on."""
    tokens = load_task("induction-fixed").held_out[:TRAP]
    for name, row in rows.items():
        for i, model in enumerate(models[name]):
            _, cache = model.run_with_cache(tokens)
            best = {}
            for layer in range(row["layers"]):
                pattern = cache["pattern", layer]
                for head in range(4):
                    rows_of = [pattern[:, head, at, at - 15] for at in range(16, 48)]
                    rows_of += [pattern[:, head, at, at - 31] for at in range(32, 48)]
                    best[f"{layer}.{head}"] = float(sum(x.sum() for x in rows_of)) / TRAP / 32
            assert row["naive"]["per_seed"][i] == pytest.approx(max(best.values()), abs=1e-5)
            assert best[row["naive"]["heads"][i]] == max(best.values())


def test_the_best_heads_are_the_highest_of_all_with_their_own_null(rows, models):
    for name, row in rows.items():
        for i, model in enumerate(models[name]):
            scores = head_scores(model, draws=DRAWS)
            found, controlled = row["prefix_matching"], scores["prefix_matching"]
            assert found["per_seed"][i] == pytest.approx(float(controlled.scores.max()))
            best = controlled[found["heads"][i]]
            assert (found["low"][i], found["high"][i]) == pytest.approx(tuple(best.band.tolist()))
            assert found["p"][i] == pytest.approx(float(best.p))
            raw = scores["prefix_matching_raw"][found["heads"][i]].value
            assert row["prefix_matching_raw"]["per_seed"][i] == pytest.approx(raw)
            same = controlled[row["naive"]["heads"][i]]
            assert row["naive_controlled"]["per_seed"][i] == pytest.approx(same.value)
            first = scores["previous_token"].scores[0]
            assert row["previous_token"]["per_seed"][i] == pytest.approx(float(first.max()))


def test_composition_is_the_best_pair_of_two_layers_and_undefined_for_one(rows, models):
    assert rows[ONE]["k_composition"] is None and rows[FIXED]["k_composition"] is None
    found = rows[TWO]["k_composition"]
    for i, model in enumerate(models[TWO]):
        best = composition_scores(model, "K").to_frame().sort_values("z").iloc[-1]
        assert found["z"]["per_seed"][i] == pytest.approx(best["z"], abs=1e-5)
        assert found["p"][i] == pytest.approx(best["p"], abs=1e-6)
        assert found["pairs"][i] == f"{best['writer']}→K→{best['reader']}"


def test_the_in_context_score_is_the_loss_of_the_second_half_less_that_of_tokens_3_to_5(rows, models):
    for name, row in rows.items():
        tokens = load_task(row["task"]).held_out
        assert row["in_context_places"] == {"early": [3, 6], "late": [24, 48]}
        for i, model in enumerate(models[name]):
            with torch.no_grad():
                log_p = model(tokens[:, :-1]).log_softmax(-1)
            losses = [-log_p[:, at - 1].gather(1, tokens[:, at : at + 1])[:, 0] for at in range(1, 48)]  # of token at
            each = torch.stack(losses[23:]).mean(0) - torch.stack(losses[2:5]).mean(0)
            assert row["in_context"]["per_seed"][i] == pytest.approx(float(each.mean()), abs=1e-5)
            error = float(each.std()) / len(tokens) ** 0.5
            assert row["in_context"]["standard_error"][i] == pytest.approx(error, rel=1e-4)


def test_looking_16_back_is_right_where_the_period_divides_16(rows):
    task = load_task("induction")
    assert isinstance(task, Induction)
    periods = [row.index(row[0], 1) for row in task.held_out.tolist()]
    share = sum(16 % period == 0 for period in periods) / len(periods)
    assert rows[FIXED]["varied_look_back"] == pytest.approx(share) == pytest.approx(looking_back(task, 16))
    assert rows[ONE]["guess_loss"] == pytest.approx(sum(map(math.log, periods)) / len(periods))
    assert rows[FIXED]["guess_loss"] == pytest.approx(math.log(16))
    assert rows[FIXED]["look_back"] == 1


def test_all_faces_show_the_rows_and_any_subset_has_its_words(table, rows):
    assert json.loads(table.json()) == table.data
    lines = list(csv.DictReader(io.StringIO(table.csv())))
    assert [float(line["naive.mean"]) for line in lines] == [row["naive"]["mean"] for row in rows.values()]
    one = f"{100 * rows[ONE]['held_out_accuracy']['mean']:.1f}"
    assert f"| {ONE} | {one} |" in table.markdown() and f"{ONE} & {one} &" in table.tex()
    assert "mean loss at tokens 24–47, the second half, less that at tokens 3–5" in table.data["notes"][0]
    for part in ([], *([row] for row in rows.values()), [rows[ONE], rows[TWO]], list(rows.values())):
        assert len(compared(part)) == sum({ONE: 2, TWO: 5, FIXED: 2}[row["model"]] for row in part)
        assert not any("Two layers, not one" in said or "The trap" in said for said in discussion(part))


@pytest.fixture(scope="module")
def committed():
    return json.loads(COMMITTED.read_text())


def test_the_committed_table_reaches_the_figures(committed):
    one, two, fixed = committed["rows"]
    assert two["held_out_accuracy"]["min"] >= 0.94
    assert one["held_out_accuracy"]["min"] >= 0.17 and one["held_out_accuracy"]["max"] <= 0.30
    assert max(two["k_composition"]["p"]) < 0.05 / 16 and two["prefix_matching"]["min"] > 0.6
    assert one["prefix_matching"]["max"] < 0.3
    # the trap: right, by a head that passes for an induction head, on this period alone
    assert fixed["held_out_accuracy"]["min"] >= 0.995 and fixed["naive"]["min"] >= 0.75
    assert max(map(abs, fixed["naive_controlled"]["per_seed"])) < 0.05
    assert fixed["varied_accuracy"]["per_seed"] == pytest.approx([fixed["varied_look_back"]] * 5, abs=0.02)
    said = " ".join(discussion(committed["rows"]))
    assert "Two layers, not one" in said and "The trap" in said
