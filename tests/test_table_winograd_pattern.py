"""The table of patterns: shares recomputed sentence by sentence, the exact statements and their controls, committed."""

import json
from pathlib import Path

import pytest
import torch

from circuits import attention_maps
from workbench.recipes import load_recipe
from workbench.runs import build_model, load, run_folder
from workbench.tables import order, winograd_pattern
from workbench.tables.engine import Quick
from workbench.tables.winograd_pattern import at_answer, by_pair, shares_by_adjective, untrained_band
from workbench.tasks import load_task
from workbench.tasks.winograd import Winograd

COMMITTED = Path(__file__).parent.parent / "docs" / "results" / "winograd-pattern.json"
LABELS = [
    *((name, seed, block) for name in ("winograd-2", "winograd-2-attn") for seed in (0, 1) for block in (1, 2)),
    ("winograd-1", 0, 1), ("winograd-1", 1, 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The order and the table at 1 % of the steps, two seeds, and the run of each row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setattr(winograd_pattern, "QUICK", Quick(0.01))
        patch.setattr(winograd_pattern, "UNTRAINED", 3)
        asked = order("winograd-pattern", 2, "quick")
        return asked.make(jobs=1), [load(run_folder(plan.recipes[0])) for plan in asked.plans]


@pytest.fixture(scope="module")
def task():
    found = load_task("winograd")
    assert isinstance(found, Winograd)
    return found


def test_a_row_for_every_model_seed_and_block(made):
    rows = made[0].data["rows"]
    assert [(row["model"], row["seed"], row["block"]) for row in rows] == LABELS
    for row, run in zip(rows, made[1], strict=True):
        assert row["budget"] == "quick" and row["seeds"] == [row["seed"]] and row["steps"] == 15
        assert row["held_out_accuracy"] == run.held_out_accuracy
        assert list(row["attention"]) == ["tired", "scared", "slow", "weak", "wet", "wide", "busy", "steep"]
        for shares in (*row["attention"].values(), *row["by_role"].values()):
            assert sum(shares.values()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("number", "adjective", "role"), [(1, "tired", "x"), (6, "wet", "y")])
def test_shares_are_means_over_sentences_and_heads(made, number, adjective, role):
    """Sentence by sentence, through the map that `workbench attention` draws."""
    row, run = made[0].data["rows"][number], made[1][number]
    of_adjective: dict[str, list[list[float]]] = {}
    for sentence in run.task.held_out[:, :15]:
        patterns = attention_maps(run.model, sentence[None]).patterns[row["block"] - 1, :, 14].mean(0).tolist()
        at = [run.task.role(name) for name in ("x", "y", "adjective")]
        shares = [*(patterns[place] for place in at), sum(p for i, p in enumerate(patterns) if i not in at)]
        of_adjective.setdefault(run.task.str_tokens(sentence)[at[2]], []).append(shares)
    means = {name: torch.tensor(found).mean(0).tolist() for name, found in of_adjective.items()}
    assert list(row["attention"][adjective].values()) == pytest.approx(means[adjective], abs=1e-5)
    by_role = torch.tensor([means[name] for name, of in run.task.answer_of.items() if of == role]).mean(0).tolist()
    assert list(row["by_role"][role].values()) == pytest.approx(by_role, abs=1e-5)


def test_block_1_has_one_query_and_moves_only_through_the_adjective(made):
    """And block 2, where neither has to hold, shows that both would be seen."""
    for row in made[0].data["rows"]:
        if row["block"] == 1:
            assert row["query_difference"] <= 1e-6 and row["pattern_change_without_adjective"] <= 1e-6
            assert row["pattern_change"] > 1e-3
        else:
            assert row["query_difference"] > 1e-2 and row["pattern_change_without_adjective"] > 1e-4


def test_the_changes_are_between_two_sentences_of_a_pair(made, task):
    row, run = made[0].data["rows"][1], made[1][1]
    pattern, query = at_answer(run.model, task.held_out, 14, 1)
    rows = {tuple(sentence[[1, 6, 11]].tolist()): p for sentence, p in zip(task.held_out, pattern, strict=True)}
    assert task.roles == {"x": 1, "y": 6, "adjective": 11, "answer": 14}
    change = max(float((rows[one] - rows[other]).abs().max()) for one in rows for other in rows if one[:2] == other[:2])
    assert row["pattern_change"] == pytest.approx(change, abs=1e-7)
    _, of_all = at_answer(run.model, torch.cat([task.held_out, task.train]), 14, 1)
    assert row["query_difference"] == pytest.approx(max(float((q - of_all).abs().max()) for q in of_all[::7]), rel=0.5)
    assert query.shape == (288, 4, 16) and by_pair(pattern, task).shape == (36, 8, 4, 15)


def test_shares_of_a_pattern_that_is_known(task):
    """All attention on x for adjectives of x, on the position before the answer for those of y."""
    pattern = torch.zeros(len(task.held_out), 2, 15)
    for number, sentence in enumerate(task.held_out):
        of = task.answer_of[task.vocabulary.words[int(sentence[11])]]
        pattern[number, :, 1 if of == "x" else 13] = 1
    shares = shares_by_adjective(pattern, task)
    assert shares["tired"] == {"x": 1, "y": 0, "adjective": 0, "rest": 0}
    assert shares["wet"] == {"x": 0, "y": 0, "adjective": 0, "rest": 1}


def test_the_band_of_untrained_models(made, task):
    """Of heads that were never trained: around even attention, and with all of them inside its outermost values."""
    recipe = load_recipe("winograd-1")
    found = []
    for seed in range(3):
        pattern, _ = at_answer(build_model(recipe.with_seed(seed), task).eval(), task.held_out, 14, 0)
        found += [float(pattern[:, :, place].mean()) for place in (1, 6, 11)]
    expected = torch.tensor(found, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    assert untrained_band(recipe, 0, 3) == pytest.approx(tuple(expected.tolist()), abs=1e-6)
    low, high = made[0].data["rows"][-1]["null"]["untrained_95"]
    assert low < 1 / 15 == made[0].data["rows"][-1]["null"]["uniform"] < high


def as_published(row):
    """The published map, in a row's form."""
    shares = {1: {"x": 0.7, "y": 0.1, "adjective": 0.1}, 2: {"x": 0.0, "y": 0.0, "adjective": 1.0}}[row["block"]]
    wet = {1: shares, 2: {"x": 0.1, "y": 0.49, "adjective": 0.2}}[row["block"]]
    return row | {"attention": row["attention"] | {"tired": shares, "wet": wet}}


def test_comparison_and_discussion(made):
    rows = made[0].data["rows"]
    found = winograd_pattern.compared([as_published(row) for row in rows])
    assert [each.agrees for each in found] == [True] * 6 and found[-1].ours == "2 of 2"
    found = winograd_pattern.compared(rows)
    assert [each.agrees for each in found] == [False, False, False, False, True, False]
    said = " ".join(winograd_pattern.discussion(rows))
    assert "Of our 2 seeds of winograd-2 0 read so:" in said and "docs/evidence.md" in said
    shares = {seed: {"x": 0.1, "y": 0.1, "adjective": 0.1, "rest": 0.7 - 0.2 * seed} for seed in (0, 1)}
    said = " ".join(winograd_pattern.discussion([
        row | {"by_role": dict.fromkeys(("x", "y"), shares[row["seed"]])} for row in rows
    ]))  # fmt: skip
    assert "x, y and the adjective together 0.50–0.70; in block 2" in said and "and the rest 0.50–0.70, alth" in said
    for some in ([], *([row] for row in rows)):
        assert all(isinstance(each, str) for each in winograd_pattern.discussion(some))
        assert all(each.source for each in winograd_pattern.compared(some))


def test_every_adjective_is_shown_of_every_block_and_seed(made, task):
    """Four figures each, in the order of the note, and the rest on a narrow terminal too."""
    table, _ = made
    assert tuple(task.answer_of) == winograd_pattern.ADJECTIVES
    head, _, *lines = [line.strip("| ").split(" | ") for line in table.markdown().splitlines() if line[:1] == "|"]
    for row, line in zip(table.data["rows"], lines, strict=True):
        for adjective, shares in row["attention"].items():
            figures = [float(figure) for figure in line[head.index(adjective)].split()]
            assert figures == pytest.approx([shares[at] for at in ("x", "y", "adjective", "rest")], abs=0.0051)
    assert {"of x: rest", "of y: rest"} <= {column.heading for column in table.columns if column.essential}


def test_faces(made):
    table, _ = made
    assert "| winograd-2 | 0 | 1 |" in table.markdown() and "attention.tired.x" in table.csv()
    assert r"\toprule" in table.tex() and json.loads(table.json()) == table.data


def test_the_committed_table_is_of_todays_recipes_and_reaches_its_figures():
    committed = json.loads(COMMITTED.read_bytes())
    asked = order("winograd-pattern", 5, "full")
    assert committed["command"] == asked.command()
    for row, plan in zip(committed["rows"], asked.plans, strict=True):
        assert plan.label.items() <= row.items() and row["budget"] == "full"
        assert row["recipe_sha256"] == plan.recipes[0].experiment
        if row["block"] == 1:
            assert row["query_difference"] <= 1e-6 and row["pattern_change_without_adjective"] <= 1e-6
        if row["model"] != "winograd-1":
            assert row["held_out_accuracy"] > 0.95
    assert {row["seed"] for row in committed["rows"]} == {0, 1, 2, 3, 4}
