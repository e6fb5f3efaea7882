"""The table of scaling: random vectors against theory, a softmax against its Jacobian, a head against its weights."""

import json
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from support import committed_rows

from workbench.runs import build_model, load, run_folder
from workbench.tables import order, scaling
from workbench.tables.engine import Quick
from workbench.tables.scaling import (
    FRESH,
    PRODUCT,
    SOURCE_COST,
    TRAINED,
    WIDTHS,
    fresh_pattern,
    head_statistics,
    measure_fresh,
    measure_product,
    standard_error,
    statistics,
)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_variance_of_q_k_is_the_width(width):
    found = measure_product([], width)["variance"]
    assert found["mean"] == pytest.approx(width, rel=0.02)
    assert found["band"][0] < found["mean"] < found["band"][1] and len(found["per_seed"]) == scaling.DRAWS


def test_the_band_is_that_of_drawing_again():
    """The s.d. of 2,000 sample variances, each of 500 pairs, drawn by numpy; its own error is 1.6 %."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2000, 500, 4))
    assert np.std((q * k).sum(-1).var(axis=1, ddof=1)) == pytest.approx(standard_error(4, 500), rel=0.08)


def test_statistics_of_known_patterns():
    uniform, one = torch.full((3, 64), 1 / 64).double(), torch.eye(64).double()
    assert statistics(uniform) == pytest.approx(
        {"entropy": math.log(64), "effective_tokens": 64, "jacobian": 1 - 1 / 64, "one_token": 0}
    )
    assert statistics(one) == pytest.approx({"entropy": 0, "effective_tokens": 1, "jacobian": 0, "one_token": 1})


def test_the_jacobian_s_trace_is_autograd_s():
    scores = torch.randn(9, generator=torch.Generator().manual_seed(1)).double()
    jacobian = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), scores)
    assert isinstance(jacobian, torch.Tensor)
    assert statistics(scores.softmax(-1)[None])["jacobian"] == pytest.approx(jacobian.trace().item(), abs=1e-12)


def test_a_row_on_one_token_is_frozen():
    """With more than .99 on one token, 1 − Σp² < 1 − .99² < .02."""
    pattern = fresh_pattern(1024, False, 0)
    on_one = pattern[pattern.amax(-1) > scaling.ONE_TOKEN]
    assert len(on_one) > 1000 and (1 - on_one.pow(2).sum(-1)).max() < 0.02


def test_the_division_keeps_a_fresh_softmax_as_it_is(monkeypatch):
    monkeypatch.setattr(scaling, "DRAWS", 1)
    rows = {scaled: measure_fresh([], 256, scaled) for scaled in (True, False)}
    assert rows[True]["jacobian"]["mean"] == pytest.approx(0.96, abs=0.005)  # published
    assert rows[False]["effective_tokens"]["mean"] < 1.5
    expected = math.exp(math.log(64) - 0.5)  # E exp(x) = √e over many keys: entropy log n − 1/2 for scores of N(0, 1)
    assert math.exp(rows[True]["entropy"]["mean"]) == pytest.approx(expected, rel=0.03)


@pytest.fixture
def tiny(made_up_text, monkeypatch):
    monkeypatch.setattr(scaling, "QUICK", Quick(steps=0.002, batch=0.06))
    monkeypatch.setattr(scaling, "HEADS", (8, 32))
    monkeypatch.setattr(scaling, "WIDTHS", (4, 16))
    monkeypatch.setattr(scaling, "DRAWS", 2)
    return order("scaling", 1, "quick")


def test_every_row_and_face(tiny):
    made = tiny.make(jobs=1)
    rows = made.data["rows"]
    assert [row["what"] for row in rows] == [PRODUCT] * 2 + [FRESH] * 4 + [TRAINED] * 4
    for row, plan in zip(rows, tiny.plans, strict=True):
        assert row["budget"] == ("quick" if row["what"] == TRAINED else "exact")
        if row["what"] == TRAINED:
            run = load(run_folder(plan.recipes[0]))
            assert run.recipe.model.d_head == row["width"] and row["steps"] == 3
            assert (run.recipe.model.attention == "softmax") == row["scaled"]
            assert row["held_out_perplexity"]["mean"] == pytest.approx(math.exp(run.results["held_out"]["loss"]))
            assert row["score_sd"]["per_seed"] == [head_statistics(run.model, run)["score_sd"]]
            fresh = build_model(run.recipe, run.task).eval()
            assert row["before"]["score_sd"]["mean"] == head_statistics(fresh, run)["score_sd"]
    for face in (made.json(), made.csv(), made.markdown(), made.tex()):
        assert "trained" in face and "softmax" in face
    assert json.loads(made.json()) == made.data
    for some in ([], rows[:3], rows[-1:], rows[-3:], rows):
        assert all(isinstance(said, str) for said in scaling.discussion(some))
    costs = [each for each in scaling.compared(rows) if each.what.startswith("cost of not dividing")]
    assert [each.what for each in costs] == [f"cost of not dividing, width {width}, points" for width in (8, 32)]


def test_a_head_s_scores_are_those_of_its_weights(tiny):
    """By hand, from embeddings and the two matrices, with a loop over windows and destinations."""
    plan = tiny.plans[-1]
    tiny.make(jobs=1)
    run = load(run_folder(plan.recipes[0]))
    model, windows = run.model, run.task.held_out[:, :-1]
    scores, entropies = [], []
    for window in windows:
        x = (model.W_E[window] + model.W_pos).double().detach()
        q, k = (x @ W[0, 0].double().detach() for W in (model.W_Q, model.W_K))
        for destination in range(64, 128):
            row = q[destination] @ k[: destination + 1].T
            scores.append(row)
            p = row.softmax(-1)
            entropies.append(-(p * p.clamp(min=1e-300).log()).sum().item())
    found = head_statistics(model, run)
    assert found["score_sd"] == pytest.approx(torch.cat(scores).std().item(), rel=1e-4)
    assert found["entropy"] == pytest.approx(sum(entropies) / len(entropies), rel=1e-3)


def trained(costs: Mapping[int, float]) -> list[dict]:
    def row(width: int, scaled: bool, perplexity: float) -> dict:
        after = 3.44 if scaled else 5147.0
        figures = {"score_sd": after, "one_token": 0.0 if scaled else 0.999, "entropy": 2.0}
        return {
            "what": TRAINED, "width": width, "scaled": scaled, "held_out_perplexity": {"mean": perplexity},
            "before": {"score_sd": {"mean": 0.66 if scaled else 21.0}},
            **{name: {"mean": value} for name, value in figures.items()},
        }  # fmt: skip

    return [row(w, s, 50.0 + (0 if s else cost)) for w, cost in costs.items() for s in (True, False)]


def test_published_costs_agree_with_themselves_and_no_longer_when_off():
    right = scaling.compared(trained(SOURCE_COST))
    assert [each.agrees for each in right] == [True] * 7
    wrong = scaling.compared(trained({32: 9.0, 256: 5.0, 1024: 40.0}))
    assert [each.agrees for each in wrong][:3] == [False] * 3
    said = " ".join(scaling.discussion(trained(SOURCE_COST)))
    assert "run away" in said and "as well off" in said and "Where it differs" not in said
    assert "Where it differs" in " ".join(scaling.discussion(trained({32: 9.0})))


def test_the_committed_table_shows_where_dividing_pays():
    """As published: no cost at a width of 32, at least 10 points at 256, and at 1,024 the scores run away."""
    rows = committed_rows("scaling")
    products = {row["width"]: row["variance"]["mean"] for row in rows if row["what"] == PRODUCT}
    assert products == {width: pytest.approx(width, rel=0.02) for width in WIDTHS}
    by = {(row["width"], row["scaled"]): row for row in rows if row["what"] == TRAINED}
    perplexity = {key: row["held_out_perplexity"]["mean"] for key, row in by.items()}
    assert abs(perplexity[32, False] - perplexity[32, True]) < 2
    assert perplexity[256, False] - perplexity[256, True] >= 10
    wide = by[1024, False]
    assert wide["score_sd"]["mean"] > 5 * wide["before"]["score_sd"]["mean"] and wide["one_token"]["mean"] > 0.9
