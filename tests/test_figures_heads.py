"""The table of heads and its figures: every dot where the number is, hollow inside the null, rows in order."""

import json
from typing import Any

import numpy as np
import pytest

import workbench as wb
from circuits import copying_score, head_scores
from circuits.ablation import head_ablations
from workbench.errors import UnknownName
from workbench.figures import headings_figure, heads_figure, scores_figure
from workbench.figures.heads import plus, said, written
from workbench.figures.listing import Cell, listing, number, token
from workbench.head_table import Column, HeadTable, History, read_heads


@pytest.fixture(scope="module")
def induction():
    return read_heads(wb.load("induction-2-attn"))


def by_name(figure, name) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def small(histories=None):
    """Two heads, two columns, by hand: 0.0 outside its null in both, 0.1 inside."""
    a, b = (
        Column(
            key, key, "0 … 1", np.array(v), np.array([0.1, 0.1]), np.array([0.3, 0.4]), np.array([True, False]), span
        )
        for key, v, span in (("x", [0.9, 0.2], (0.0, 1.0)), ("entropy_share", [0.5, 0.35], (-1.0, 1.0)))
    )
    cost = Column("cost", "without it", "nats", np.array([1.0, 0.001]), np.array([0.5, -0.1]), np.array([1.5, 0.1]),
                  np.array([True, False]), (-0.3, 1.0), interval=True)  # fmt: skip
    return HeadTable(("0.0", "0.1"), (a, b, cost), {"0.0": "induction", "0.1": ""}, histories or {})


def test_numbers_are_the_librarys(induction):
    run = wb.load("induction-2-attn")
    scores = head_scores(run.model, draws=39)
    for key in ("previous_token", "prefix_matching", "entropy_share", "copying"):
        column = induction.column(key)
        np.testing.assert_allclose(column.values, scores[key].scores.flatten(), atol=1e-6)
        np.testing.assert_allclose([column.low, column.high], scores[key].band.flatten(1), atol=1e-6)
        assert column.sure.tolist() == scores[key].outside.flatten().tolist()
    spectrum = copying_score(run.model, draws=39).eigenvalue.scores.flatten()
    np.testing.assert_allclose(induction.column("copying.eigenvalue").values, spectrum, atol=1e-5)
    assert induction.roles["0.0"] == "previous-token" and induction.roles["1.2"] == "induction"
    tokens = run.task.held_out[: induction.cut_on]
    cut = head_ablations(run.model, tokens, positions=list(run.task.scored), clusters=run.task.clusters(tokens))
    np.testing.assert_allclose(induction.column("cost").values, cut.cost.flatten(), atol=1e-9)
    assert induction.clean[1] > 0.98 and induction.column("cost").values.argmax() == 0  # head 0.0 feeds all four
    assert min(induction.accuracy_change) == induction.accuracy_change[0] < -0.2


def test_histories_are_those_of_the_probes(induction):
    history = induction.histories["1.0"]
    assert history.what == "induction" and induction.histories["0.0"].what == "previous"
    lines = [json.loads(line) for line in (wb.load("induction-2-attn").path / "probes.jsonl").read_text().splitlines()]
    assert list(history.steps) == [line["step"] for line in lines]
    assert history.values[-1] == lines[-1]["series"]["prefix_matching"]["score"][1][0]


def test_dots_stand_where_the_numbers_are_and_are_hollow_inside_the_null():
    figure = heads_figure(small())
    full, hollow = by_name(figure, "outside"), by_name(figure, "inside")
    assert list(full["y"]) == [0, 0, 0] and list(hollow["y"]) == [1, 1, 1]
    bars = by_name(figure, "null")["x"]
    left = bars[0] - (full["x"][0] - bars[0]) / (0.9 - 0.1) * 0.1  # where 0 of the first column lies
    width = (bars[1] - bars[0]) / (0.3 - 0.1)
    assert full["x"][0] == pytest.approx(left + 0.9 * width) and hollow["x"][0] == pytest.approx(left + 0.2 * width)
    assert hollow["marker"]["color"] == "rgba(0,0,0,0)" and full["marker"]["color"] != hollow["marker"]["color"]
    assert len(by_name(figure, "interval")["x"]) == 6  # of what a head costs, its own
    touch = by_name(figure, "heads")
    assert set(touch["customdata"]) == {"0.0", "0.1"}
    assert any("0.90, by chance 0.10 … 0.30 (outside)" in text for text in touch["hovertext"])


def test_order():
    table = small()
    assert table.order() == [0, 1] and table.order("x") == [0, 1]
    assert table.order("entropy_share") == [1, 0]  # the sharpest first
    assert by_name(heads_figure(table, "entropy_share"), "text")["text"] == ("<b>0.1</b>", "<b>0.0</b>")
    with pytest.raises(UnknownName, match="column 'y'"):
        heads_figure(table, "y")


def test_lines_over_training():
    history = History("induction", [0, 10, 100], [0.0, 0.1, 1.0])
    figure = heads_figure(small(histories={"0.1": history}))
    line = by_name(figure, "over training")
    assert line["x"][1] - line["x"][0] == pytest.approx((line["x"][2] - line["x"][0]) * np.log(11) / np.log(101))
    assert line["y"][0] > line["y"][1] > line["y"][2] and 0.5 < line["y"][2] < line["y"][0] < 1.5  # in the second row
    assert any("+1.00 at step 100" in text for text in by_name(figure, "heads")["hovertext"])


def test_headings_that_stay_stand_where_the_tables_own_do():
    table = small(histories={"0.1": History("induction", [0, 10], [0.0, 1.0])})
    whole, above, below = heads_figure(table), headings_figure(table), heads_figure(table, headings=False)
    place = [(note.x, note.text) for note in whole.layout.annotations]  # pyright: ignore
    assert place and place == [(note.x, note.text) for note in above.layout.annotations]  # pyright: ignore
    assert not below.layout.annotations and below.layout.height < whole.layout.height  # pyright: ignore
    assert {figure.layout.xaxis.range for figure in (whole, above, below)} == {whole.layout.xaxis.range}  # pyright: ignore


def test_one_heads_scores():
    figure: Any = scores_figure(small(), "0.1")
    assert len(by_name(figure, "outside")["x"]) == 0 and list(by_name(figure, "inside")["x"]) == [0.2, 0.35]
    texts = [note.text for note in figure.layout.annotations]
    assert any("<b>0.20</b>" in text and "by chance 0.10 … 0.40, inside" in text for text in texts)
    with pytest.raises(UnknownName, match=r"head '7\.7'"):
        scores_figure(small(), "7.7")


def test_a_table_without_heads_is_empty():
    table = read_heads(wb.load("bigram-0"))
    assert table.names == () and "no layers" in table.missing[0]
    assert heads_figure(table).data


def test_how_numbers_are_written():
    assert [plus(0.0), plus(-0.001), plus(-0.5), plus(0.0004, 3)] == ["0.00", "0.00", "−0.50", "0.000"]
    x, entropy, cost = small().columns
    assert written(x, 0.5) == "0.50" and written(entropy, -0.5) == "−0.50" and written(cost, 0.5) == "+0.500"
    assert said(cost, 0) == "+1.000 nats, 95 % interval +0.500 … +1.500"


def test_listings_show_what_they_are_given():
    html = listing(("a", "b"), [[token(" <b>\n"), number("+1.0", True)], [Cell("x", "Q"), Cell("y")]], "t", "n")
    assert "·&lt;b&gt;↵" in html and '<td class="number inside">+1.0</td>' in html
    assert "#0072B2" in html and "<caption>t</caption>" in html and '<p class="wb-note">n</p>' in html
