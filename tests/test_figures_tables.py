"""The dot plot of a table's seeds and the printed table: values, nulls and markup, told by hand."""

import math
from typing import Any

import pytest

from workbench.errors import UnknownName
from workbench.figures.journal import journal_html, notes_html
from workbench.figures.seeds import measure_title, row_labels, seed_lines, seed_measures, seeds_figure, written

ACCURACY = {"mean": 0.7, "min": 0.5, "max": 0.9, "interval": [0.6, 0.8], "per_seed": [0.5, 0.9]}
ROWS = [
    {"model": "one", "lr": 0.1, "budget": "full", "seeds": [0, 3], "held_out_accuracy": ACCURACY, "chance": 0.5},
    {"model": "two", "lr": 0.1, "budget": "full", "seeds": [0, 3], "chance": 0.25, "held_out_accuracy": {
        "mean": 0.3, "interval": None, "per_seed": [0.28, 0.32]}},
]  # fmt: skip
BANDED = {
    "model": "one", "budget": "full", "seeds": [0, 1, 2],
    "matching": {"mean": 0.3, "per_seed": [0.1, 0.2, 0.6], "low": [0.0, 0.3, 0.0], "high": [0.2, 0.4, 0.5]},
    "deep": {"precision": {"mean": 0.5, "per_seed": [0.4, 0.5, 0.6], "chance": 0.2, "p": [0.2, 0.051, 0.01]}},
    "composition": {"pairs": ["a"], "z": {"mean": 2.0, "per_seed": [1.9, -1.97, 6.0]}, "p": [0.1]},
    "words": {"per_seed": ["a", "b", "c"], "mean": 1.0}, "sure_p": {"mean": 0.1, "per_seed": [0.1]},
}  # fmt: skip


def wilson_holds(value: float, n: int, chance: float) -> bool:
    """The score test that Wilson's interval inverts: |p − p₀| ≤ 1.96 √(p₀ (1 − p₀) / n)."""
    return abs(value - chance) <= 1.959964 * math.sqrt(chance * (1 - chance) / n)


@pytest.mark.parametrize("n", [4, 5, 20, 36, 5_000])
def test_a_seed_is_hollow_where_its_score_test_keeps_chance(n):
    for line, row in zip(seed_lines(ROWS, "held_out_accuracy", [n, n]), ROWS, strict=True):
        expected = [wilson_holds(value, n, row["chance"]) for value in line.values]
        assert list(line.inside) == expected
    assert seed_lines(ROWS, "held_out_accuracy")[0].inside == (False, False)  # nothing says how many clusters
    own = [row | {"held_out_pairs": 4} for row in ROWS]
    assert seed_lines(own, "held_out_accuracy") == seed_lines(ROWS, "held_out_accuracy", [4, 4])


def test_a_band_of_each_seed_a_p_and_a_z_are_nulls():
    inside = {name: seed_lines([BANDED], name)[0].inside for name in seed_measures([BANDED])}
    assert inside == {
        "matching": (True, False, False), "deep.precision": (True, True, False), "composition.z": (True, False, False),
    }  # fmt: skip
    assert seed_lines([BANDED], "deep.precision")[0].chance == 0.2


def test_an_accuracy_is_held_against_the_look_back_where_that_is_what_is_known():
    row = {"model": "m", "budget": "full", "held_out_accuracy": ACCURACY, "look_back": 0.9}
    (line,) = seed_lines([row], "held_out_accuracy", [10])
    assert line.against == "the best fixed look-back" and line.inside == (False, True)


def test_what_is_drawn_are_the_seeds_their_mean_and_interval():
    figure: Any = seeds_figure(ROWS, "held_out_accuracy", [36, 36])
    traces = {trace.name: trace for trace in figure.data}
    assert list(traces["seeds"].x) == [50.0, 90.0, 28.000000000000004, 32.0]
    assert list(traces["seeds"].marker.symbol) == ["circle-open", "circle", "circle-open", "circle-open"]
    above, below = traces["seeds"].y[:2]
    assert above < 0 < below and above == -below  # each seed on a line of its own, about the row
    assert list(traces["mean"].x) == [70.0, 30.0] and list(traces["mean"].y) == [0, 1]
    assert list(traces["interval"].x) == [60.0, 80.0, None]  # the second row has none
    assert list(traces["chance"].x) == [50.0, 50.0, None, 25.0, 25.0, None]
    assert list(figure.layout.yaxis.ticktext) == ["one", "two"]
    assert (
        traces["seeds"].hovertext[1] == "one<br>seed 3: 90.0 %<br>mean 70.0 %, 95 % 60.0 % … 80.0 %<br>chance: 50.0 %"
    )
    assert traces["seeds"].hovertext[0].endswith("inside what chance allows")


def test_the_grey_band_is_the_widest_of_the_seeds_bands():
    figure: Any = seeds_figure([BANDED], "matching")
    null = next(trace for trace in figure.data if trace.name == "null")
    assert (min(null.x), max(null.x)) == (0.0, 0.5)


def test_perplexities_far_apart_stand_on_a_logarithmic_axis():
    def axis(*values):
        rows = [{"model": str(v), "budget": "full", "perplexity": {"mean": v, "per_seed": [v]}} for v in values]
        figure: Any = seeds_figure(rows, "perplexity")
        return figure.layout.xaxis.type

    assert axis(40.0, 250.0) == "log" and axis(40.0, 60.0) is None


def test_words_are_shown_not_obeyed():
    row = {"model": "<b>x</b>", "budget": "full", "a": {"mean": 1.0, "per_seed": [1.0]}}
    figure: Any = seeds_figure([row, row | {"model": "y"}], "a")
    assert figure.layout.yaxis.ticktext[0] == "&lt;b&gt;x&lt;/b&gt;"
    html = journal_html(["<i>"], [["<script>"]], caption='"&')
    assert "<i>" not in html and "<script>" not in html and 'aria-label="&quot;&amp;"' in html
    assert notes_html(["a `b` <c>"]) == '<div class="wb-notes"><div>a <code>b</code> &lt;c&gt;</div></div>'


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([{"model": "a", "rung": "x"}, {"model": "b", "rung": "y"}], ["a", "b"]),
        ([{"model": "a", "lr": 0.1, "n": 1500}, {"model": "a", "lr": 0.1, "n": 3000}], ["1,500", "3,000"]),
        (
            [{"model": "a", "seed": 0}, {"model": "a", "seed": 1}, {"model": "b", "seed": 0}],
            ["a · 0", "a · 1", "b · 0"],
        ),
        ([{"what": "a"}], ["a"]),
        ([{"what": "a"}, {"what": "a"}], ["row 1", "row 2"]),
    ],
)
def test_rows_are_called_by_what_tells_them_apart(labels, expected):
    assert row_labels([{**label, "budget": "full", "value": i} for i, label in enumerate(labels)]) == expected


def test_values_are_written_with_their_unit():
    assert written(0.996, "held_out_accuracy") == "99.6 %" and written(37.905, "held_out_perplexity") == "37.91"
    assert written(-3.84, "in_context") == "−3.84"
    assert measure_title("held_out_accuracy") == "held-out accuracy, %" and measure_title("mean_kl") == "mean kl, nats"


def test_a_measure_that_no_row_has_is_named():
    with pytest.raises(UnknownName, match="unknown measure 'lost' of these rows; nearest: held_out_accuracy"):
        seed_lines(ROWS, "lost")


def test_a_printed_table_has_its_figures_to_the_right_and_names_its_rows():
    html = journal_html(["model", "held-out"], [["a", "1.0"]], {1}, "T")
    assert '<caption>T</caption><thead><tr><th scope="col">model</th>' in html
    assert '<tr><th scope="row">a</th><td class="wb-figure">1.0</td></tr>' in html
