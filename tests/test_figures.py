"""Figures show the maps' own numbers, cell by cell, and text as text."""

from typing import Any

import numpy as np
import pytest
import torch

import workbench as wb
from circuits import AttentionMaps
from workbench.figures import attention_figure, attention_records, attention_rows, next_words, style, words
from workbench.figures.numbers import summary

WORDS = ["the", "<b>", "the", " cat\n", "a&b"]


def maps(length=5, n_layers=2, n_heads=3, seed=0, d_vocab=5):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(n_layers, n_heads, length, length, generator=generator)
    patterns = (scores + torch.full((length, length), -torch.inf).triu(1)).softmax(dim=-1)
    return AttentionMaps(patterns, torch.randn(length, d_vocab, generator=generator).softmax(dim=-1))


def drawn(*args: Any, **options: Any) -> Any:
    return attention_figure(*args, **options)


def heatmaps(figure: Any) -> list[Any]:
    return [trace for trace in figure.data if trace.type == "heatmap"]


def test_cells_are_the_numbers_of_the_maps():
    a, b = maps(seed=1), maps(seed=2)
    panels = heatmaps(drawn(a, WORDS, b, WORDS))
    assert [panel.name for panel in panels] == ["block 1 · mean of 3 heads · A", "B", "B − A",
                                                "block 2 · mean of 3 heads · A", "B", "B − A"]  # fmt: skip
    for layer in range(2):
        expected = [a.mean[layer], b.mean[layer], b.mean[layer] - a.mean[layer]]
        for panel, values in zip(panels[3 * layer :], expected, strict=False):
            cells = np.asarray(panel.z)
            below = np.tri(5, dtype=bool)
            assert np.array_equal(cells[below], values.numpy()[below])
            assert np.isnan(cells[~below]).all()
            assert panel.hoverongaps is False


def test_one_head_is_one_row():
    a = maps()
    (panel,) = heatmaps(drawn(a, WORDS, head=(1, 2)))
    assert panel.name == "block 2 · head 1.2"
    assert np.array_equal(np.nan_to_num(panel.z), a.patterns[1, 2].numpy())


def test_ranges_are_fixed_and_scales_begin_at_the_page():
    figure = drawn(maps(), WORDS, maps(seed=1), WORDS)
    scales = [figure.layout[panel.coloraxis] for panel in heatmaps(figure)[:3]]
    assert [(scale.cmin, scale.cmax) for scale in scales] == [(0, 1), (0, 1), (-1, 1)]
    attention, difference = figure.layout.coloraxis.colorscale, figure.layout.coloraxis2.colorscale
    assert attention[0][1].endswith(" 0)") and attention[-1][1].endswith(" 1)")
    assert {color for at, color in difference if at == 0.5} == {
        style.rgba(style.TEAL, 0.0),
        style.rgba(style.BROWN, 0.0),
    }
    assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert figure.layout.font.color is None  # text takes the page's colour


def test_rows_are_drawn_from_the_top_and_every_word_keeps_its_own_column():
    figure = drawn(maps(), WORDS, head=(0, 0))
    assert figure.layout.yaxis.range == (4.5, -0.5) and figure.layout.xaxis.range == (-0.5, 4.5)
    assert list(figure.layout.xaxis.tickvals) == [0, 1, 2, 3, 4]
    ticks = list(figure.layout.xaxis.ticktext)
    assert len(set(ticks)) == 5
    assert ticks[0].endswith(">0</span> the") and ticks[2].endswith(">2</span> the")
    assert ticks[1] == "&lt;b&gt;" and ticks[3] == "·cat↵" and ticks[4] == "a&amp;b"


def test_hover_names_both_ends_the_value_and_the_prediction():
    a = maps()
    (panel,) = heatmaps(drawn(a, WORDS, head=(0, 1), vocabulary=["u", "v", "w", "<i>", "z"]))
    said = ["u", "v", "w", "&lt;i&gt;", "z"][int(a.probabilities[4].argmax())]
    value = f"{a.patterns[0, 1, 4, 1]:.2f}"
    assert panel.customdata[4][1] == f"at 4 ‘a&amp;b’ → 1 ‘&lt;b&gt;’: {value}, predicts ‘{said}’"
    assert [len(row) for row in panel.customdata] == [1, 2, 3, 4, 5]


def test_the_hover_of_a_difference_carries_its_sign():
    a, b = maps(seed=1), maps(seed=2)
    panel = heatmaps(drawn(a, WORDS, b, WORDS, head=(1, 0)))[2]
    for destination, source in ((3, 1), (4, 4), (2, 0)):
        value = float(b.patterns[1, 0, destination, source] - a.patterns[1, 0, destination, source])
        assert f": {'+' if value > 0 else '−'}{abs(value):.2f}" in panel.customdata[destination][source]


def test_roles_mark_their_own_row_and_column():
    figure = drawn(maps(), WORDS, head=(0, 0), roles={"x": 1, "answer": 4})
    spans = {"x": set(), "answer": set()}
    for shape in figure.layout.shapes:
        if shape.name in spans:
            along = ("x0", "x1") if "domain" in shape.yref else ("y0", "y1")
            spans[shape.name].add((along[0][0], *(shape[end] for end in along)))
    assert spans["x"] == {("x", 0.6, 1.4), ("y", 0.6, 1.4)}
    assert spans["answer"] == {("x", 3.6, 4.4), ("y", 3.6, 4.4)}


def test_only_the_layers_asked_for_are_drawn():
    a = maps(n_layers=5)
    panels = heatmaps(drawn(a, WORDS, layers=[1, 3]))
    assert [panel.name for panel in panels] == ["block 2 · mean of 3 heads", "block 4 · mean of 3 heads"]
    assert np.array_equal(np.nan_to_num(panels[1].z), a.mean[3].numpy())


def test_cells_that_answer_clicks_carry_their_destination():
    figure = drawn(maps(), WORDS, head=(0, 0), clickable=True)
    heat, touch = figure.data
    assert heat.hoverinfo == "skip"
    assert list(zip(touch.y, touch.x, strict=True)) == [(i, j) for i in range(5) for j in range(i + 1)]
    assert list(touch.customdata) == list(touch.y)
    assert touch.marker.opacity == touch.selected.marker.opacity == touch.unselected.marker.opacity == 0


@pytest.mark.parametrize("length", [1, 20, 21, 32, 48, 65, 200])
def test_at_most_twenty_labels_an_axis_and_clicks_only_on_short_prompts(length):
    tokens = [f"t{i % 7}" for i in range(length)]
    long = maps(length, n_layers=1)
    figure = drawn(long, tokens, long, tokens, vocabulary="abcde", clickable=True)
    axis = figure.layout.xaxis
    shown = len(axis.tickvals) if axis.tickvals is not None else -(-length // axis.dtick)
    assert 1 <= shown <= style.MAX_TICKS
    assert sum(trace.type == "scatter" for trace in figure.data) == (3 if length <= 32 else 0)
    if axis.labelalias:
        assert len(axis.labelalias) == length and axis.labelalias["13"].endswith(">13</span> t6")
    assert len(figure.to_json()) < 4e6


def test_a_difference_needs_equal_lengths():
    panels = heatmaps(drawn(maps(5), WORDS, maps(4), WORDS[:4], head=(0, 0)))
    assert [panel.name for panel in panels] == ["block 1 · head 0.0 · A", "B"]
    assert np.asarray(panels[1].z).shape == (4, 4)


def test_marks_show_destination_roles_and_the_word_that_differs():
    other = [*WORDS[:3], "dog", WORDS[4]]
    figure = drawn(maps(), WORDS, maps(seed=1), other, (0, 0), 2, roles={"x": 1, "answer": 9})
    shapes = figure.layout.shapes
    framed = [
        s for s in shapes if s.type == "rect" and s.line.color == style.GREY and s.line.dash is None and not s.name
    ]
    assert [(s.y0, s.y1, s.x1) for s in framed] == [(1.5, 2.5, 2.5)] * 3
    dotted = [s for s in shapes if s.line.dash == "dot"]
    assert [(s.x0, s.x1) for s in dotted] == [(2.5, 3.5)] * 3
    assert [s.fillcolor for s in shapes if s.name == "x"] == [style.ROLES["x"]] * 6  # two axes of three maps
    assert not [s for s in shapes if s.name == "answer"]  # beyond this prompt


def test_where_nearly_all_words_differ_none_is_marked():
    tokens, other = [f"a{i}" for i in range(9)], [f"b{i}" for i in range(9)]
    figure = drawn(maps(9), tokens, maps(9), other, head=(0, 0))
    assert not [s for s in figure.layout.shapes if s.line.dash == "dot"]


def test_no_layers_no_maps():
    assert heatmaps(drawn(maps(n_layers=0), WORDS)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": (2, 0)}, "unknown head '2.0'"),
        ({"head": (0, 3)}, "unknown head '0.3'"),
        ({"destination": 5}, "position 5: this prompt has positions 0 to 4"),
        ({"destination": -6}, "position -6"),
    ],
)
def test_what_is_not_there_is_named(options, message):
    with pytest.raises(wb.WorkbenchError, match=message):
        drawn(maps(), WORDS, **options)


def test_tokens_must_fit_the_maps():
    with pytest.raises(wb.WorkbenchError, match="4 tokens, but the maps are of 5 positions"):
        drawn(maps(), WORDS[:4])


def test_colours_of_roles_scales_and_composition_differ():
    scales = ["#{:02X}{:02X}{:02X}".format(*color) for color in (style.INDIGO, style.TEAL, style.BROWN)]
    colors = [c.upper() for c in (*style.ROLES.values(), *style.COMPOSITION.values(), *scales)]
    assert len(set(colors)) == len(colors)


def test_rows_are_what_the_destination_sees():
    a = maps()
    rows = attention_rows(a, WORDS, destination=-2)
    assert [title for title, _ in rows] == ["block 1 · mean of 3 heads", "block 2 · mean of 3 heads"]
    assert rows[1][1] == a.mean[1, 3, :4].tolist() and sum(rows[1][1]) == pytest.approx(1)
    assert attention_rows(a, WORDS, head=(1, 0))[0][1] == a.patterns[1, 0, 4].tolist()


def test_next_words_are_ranked_and_keep_those_asked_for():
    probabilities = torch.tensor([[0.5, 0.05, 0.3, 0.1, 0.05]])
    one = AttentionMaps(torch.ones(1, 1, 1, 1), probabilities)
    assert [word for word, _ in next_words(one, "abcde")] == ["a", "c", "d"]
    assert [word for word, _ in next_words(one, "abcde", also=["e"])] == ["a", "c", "e"]
    assert next_words(one, "abcde", n=1) == [("a", 0.5)]
    assert [word for word, _ in next_words(one, "ab")] == ["a", "b"]  # a vocabulary shorter than the model's


def test_records_are_every_cell_of_every_head():
    a = maps(n_layers=1, n_heads=2)
    records = list(attention_records(a, WORDS, "B"))
    assert len(records) == 3 * 15
    assert records[0] == {"prompt": "B", "block": 1, "head": "mean", "destination": 0, "destination_token": "the",
                          "source": 0, "source_token": "the", "attention": 1.0}  # fmt: skip
    last = records[-1]
    assert (last["head"], last["destination"], last["source"]) == ("0.1", 4, 4)
    assert last["attention"] == a.patterns[0, 1, 4, 4].item()


def test_the_sentence_says_what_is_looked_at_most():
    a, b = [("block 1 · mean of 2 heads", [0.25, 0.75])], [("block 1 · mean of 2 heads", [0.6, 0.4])]
    assert summary(a, ["x", "y"]) == "From 1 ‘y’, block 1 looks most at ‘y’ (0.75)."
    assert (
        summary(a, ["x", "y"], b, ["x", "y"])
        == "From 1 ‘y’, block 1 looks most at ‘y’ (0.75) in A, at ‘x’ (0.60) in B."
    )
    tied = [("block 1 · mean of 2 heads", [0.5, 0.5])]
    assert summary(tied, ["x", "y"]) == "From 1 ‘y’, block 1 looks most at ‘x’ and ‘y’ (0.50 each)."
    even = [("block 1 · mean of 2 heads", [0.25] * 4)]
    assert summary(even, list("wxyz")) == "From 3 ‘z’, block 1 looks most at 4 words alike (0.25 each)."
    shorter = [("block 1 · mean of 2 heads", [1.0])]
    assert summary(a, ["x", "y"], shorter, ["z"]) == (
        "A: From 1 ‘y’, block 1 looks most at ‘y’ (0.75). B: From 0 ‘z’, block 1 looks most at ‘z’ (1.00)."
    )
    assert summary(a, ["x", "x"], a, ["x", "x"]).endswith("looks most at 1 ‘x’ (0.75) in both.")


def test_shaded_words_carry_their_numbers_and_escape_their_text():
    html = words.shaded_words(WORDS, [0.25, 0.75], "A", {"x": 1})
    assert "&lt;b&gt;" in html and "<b>" not in html
    assert "0.25" in html and "0.75" in html and html.count("wb-later") == 3
    assert f"border-color:{style.ROLES['x']}" in html
    assert style.rgba(style.INDIGO, words.SHADE * 0.75) in html


def test_a_prompt_line_says_what_comes_next():
    line = words.prompt_line(["a", "<b>"], 1, [("<i>", 0.996), ("u", 0.001)], "A", ["c", "<b>"])
    assert "▸ <b>&lt;i&gt;</b> 99.6 %" in line and "<span>u 0.1 %</span>" in line
    assert line.count("wb-differs") == 1 and line.count("wb-at") == 1


@pytest.mark.parametrize(("value", "text"), [(0.481, "+0.48"), (-0.27, "−0.27"), (0.001, "0.00"), (-0.001, "0.00")])
def test_signed_numbers(value, text):
    assert style.signed(value) == text
