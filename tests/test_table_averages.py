"""The table of averages: each writing against numpy or arithmetic, controls that are no rounding, the committed one."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.tables import averages, order
from workbench.tables.averages import (
    ATTENTION,
    COMPARISONS,
    CONSTANT,
    MASKS,
    MEAN,
    SHUFFLE,
    loop,
    masked,
    matrix,
    measure,
    ours,
    softmax,
)

COMMITTED = Path(__file__).parent.parent / "docs" / "results" / "averages.json"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(tmp_path_factory.mktemp("runs")))
        return order("averages", 2, "quick").make(jobs=1)


def test_four_ways_to_the_causal_mean():
    """numpy's running sum over 1, 2, 3 …; float64, so to 1e-14."""
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = np.cumsum(x.numpy(), axis=1) / np.arange(1, 10)[:, None]
    for mean in (loop(x), matrix(x), softmax(x), ours(x, "uniform")):
        np.testing.assert_allclose(mean.numpy(), expected, rtol=0, atol=1e-14)
    np.testing.assert_allclose(softmax(x, causal=False)[:, 0].numpy(), x.mean(1).numpy(), rtol=0, atol=1e-14)


def test_a_row_whose_scores_are_as_low_as_the_constant_sees_what_is_not_there():
    """All scores equal to the constant: filled in, every row is uniform; with −∞ it is the mean of what there is."""
    scores = torch.full((4, 4), CONSTANT)
    torch.testing.assert_close(masked(scores, CONSTANT).softmax(-1), torch.full((4, 4), 0.25))
    expected = torch.tensor([[1, 0, 0, 0], [1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4])
    torch.testing.assert_close(masked(scores, -math.inf).softmax(-1), expected)


def test_every_row_is_measured_in_every_draw(table):
    assert [row["what"] for row in table.data["rows"]] == list(COMPARISONS)
    for row in table.data["rows"]:
        assert row["budget"] == "exact" and row["seeds"] == [0, 1]
        for name in ("float32", "float64"):
            assert len(row[name]["per_draw"]) == 2 and row[name]["max"] == max(row[name]["per_draw"])
        again = measure([], row["what"], [1])
        assert again["float32"]["per_draw"] == row["float32"]["per_draw"][1:]


def test_rounding_is_of_the_precision_and_controls_are_not_rounding(table):
    rows = {row["what"]: row for row in table.data["rows"]}
    for what in (*MEAN, SHUFFLE, *ATTENTION):
        assert 0 < rows[what]["float32"]["max"] <= 1e-6
        assert rows[what]["float64"]["max"] <= 1e-14
        assert rows[what]["control"]["min"] > 0.1
    ordinary, low = (rows[what] for what in MASKS)
    assert ordinary["float32"]["max"] == ordinary["float64"]["max"] == ordinary["on_later_words"] == 0
    assert low["float32"]["max"] > 0.9 and 0.9 < low["on_later_words"] < 1


def test_comparison_and_discussion(table):
    rows = table.data["rows"]
    assert [each.agrees for each in averages.compared(rows)] == [True] * 6 + [None, None]
    assert [each.source for each in averages.compared(rows)][:4] == ["6e-08"] * 3 + ["rounding"]
    assert len(averages.discussion(rows)) == 2
    assert averages.discussion([]) == [] and averages.compared([]) == []
    wrong = [row | {"float32": {"max": 0.01, "per_draw": [0.01]}} for row in rows]
    assert [each.agrees for each in averages.compared(wrong)] == [False] * 6 + [None, None]
    assert not any("Rounding" in paragraph for paragraph in averages.discussion(wrong))


def test_faces(table):
    assert "the mask left out" in table.markdown() and "float32.per_draw" in table.csv()
    assert r"\toprule" in table.tex() and json.loads(table.json()) == table.data


def test_the_committed_table_has_five_draws_and_agrees():
    committed = json.loads(COMMITTED.read_bytes())
    assert committed["command"] == "workbench table averages --seeds 5 --budget full"
    assert [row["what"] for row in committed["rows"]] == list(COMPARISONS)
    assert all(row["seeds"] == [0, 1, 2, 3, 4] for row in committed["rows"])
    assert [each.agrees for each in averages.compared(committed["rows"])] == [True] * 6 + [None, None]
