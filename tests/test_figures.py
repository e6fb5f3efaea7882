"""Figures show the maps' own numbers, cell by cell, and text as text."""

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import workbench as wb
from circuits import AttentionMaps
from circuits.attention import RoleAttention
from circuits.scores import from_draws
from workbench.figures import (
    attention_figure,
    attention_records,
    attention_rows,
    next_words,
    roles_figure,
    style,
    thumbnails,
    thumbnails_figure,
    words,
)
from workbench.figures.numbers import ranked, summary

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
    assert style.rgba(style.INDIGO, style.SHADE * 0.75) in html


def test_a_prompt_line_says_what_comes_next():
    line = words.prompt_line(["a", "<b>"], 1, [("<i>", 0.996), ("u", 0.001)], "A", ["c", "<b>"])
    assert "▸ <b>&lt;i&gt;</b> 99.6 %" in line and "<span>u 0.1 %</span>" in line
    assert line.count("wb-differs") == 1 and line.count("wb-at") == 1


@pytest.mark.parametrize(("value", "text"), [(0.481, "+0.48"), (-0.27, "−0.27"), (0.001, "0.00"), (-0.001, "0.00")])
def test_signed_numbers(value, text):
    assert style.signed(value) == text


def of_measure(measure, seed=0, **options):
    """Maps of another measure: norms, or contributions of either sign."""
    a = maps(seed=seed, **options)
    noise = torch.randn(a.patterns.shape, generator=torch.Generator().manual_seed(seed + 9))
    return AttentionMaps(a.patterns * (3 * noise if measure == "logit" else 3 * noise.abs()), a.probabilities, measure)


@pytest.mark.parametrize("measure", ["moved", "logit"])
def test_maps_of_another_measure_have_a_range_of_their_own(measure):
    a, b = of_measure(measure), of_measure(measure, seed=1)
    figure = drawn(a, WORDS, b, WORDS, what="‘x’")
    panels = heatmaps(figure)
    shown = torch.stack([a.together, b.together])
    assert panels[0].name.startswith("block 1 · sum of 3" if measure == "logit" else "block 1 · mean of 3")
    assert np.allclose(np.nan_to_num(panels[4].z), b.together[1].numpy())
    top = float(shown.abs().max())
    assert figure.layout.coloraxis.cmax == pytest.approx(top)
    assert figure.layout.coloraxis.cmin == pytest.approx(-top if measure == "logit" else 0)
    change = float((b.together - a.together).abs().max())
    assert (figure.layout.coloraxis2.cmin, figure.layout.coloraxis2.cmax) == pytest.approx((-change, change))
    value = float(a.together[0, 3, 1])
    assert f": {style.written(value, measure)}" in panels[0].customdata[3][1]
    assert ("‘x’" in figure.layout.coloraxis.colorbar.title.text) == (measure == "logit")


def test_who_looks_at_a_position_is_its_column():
    a = maps()
    rows = attention_rows(a, WORDS, head=(1, 2), destination=1, direction="to")
    assert rows[0][1] == a.patterns[1, 2, 1:, 1].tolist()
    framed = [s for s in drawn(a, WORDS, destination=1, direction="to", head=(1, 2)).layout.shapes if s.type == "rect"]
    assert [(s.x0, s.x1, s.y0, s.y1) for s in framed] == [(0.5, 1.5, 0.5, 4.5)]
    assert summary([("block 1 · mean of 2 heads", [0.25, 0.75])], ["x", "y", "z"], direction="to") == (
        "At 1 ‘y’, block 1 looks most from ‘z’ (0.75)."
    )
    added = [("block 2 · head 1.0", [-0.25, 1.5])]
    assert summary(added, ["x", "y"], measure="logit", what="the logit of ‘u’") == (
        "At 1 ‘y’, block 2 · head 1.0 adds most to the logit of ‘u’ from ‘y’ (+1.50)."
    )


def test_words_are_shaded_from_the_position_that_is_looked_at():
    html = words.shaded_words(WORDS, [0.5, -1.0, 0.25], direction="to", measure="logit", top=2.0)
    assert html.count("wb-later") == 2 and html.index("wb-at") > html.index("wb-later")
    assert "+0.50" in html and "−1.00" in html
    assert style.rgba(style.BROWN, style.SHADE * 0.25) in html and style.rgba(style.TEAL, style.SHADE * 0.5) in html


def decoded(figure: Any):
    """The thumbnails' image, by Pillow."""
    data = base64.b64decode(figure.layout.images[0].source.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)))


def scored(values, low=-1.0, high=1.0):
    values = torch.tensor(values)
    draws = torch.linspace(low, high, 199)[:, None, None].expand(-1, *values.shape)
    return from_draws("a score", values, draws, parts=("head",), null="", basis="behaviour")


def test_thumbnails_are_the_patterns_paler_where_the_position_does_not_matter():
    a = maps(length=6, n_layers=2, n_heads=2)
    tokens = [f"t{i}" for i in range(6)]
    figure = thumbnails_figure(a, tokens, 4)
    picture = decoded(figure)
    involved = a.patterns[:, :, 4, :4].amax(-1)
    pitch = thumbnails.PIXELS / thumbnails.SIDE
    for k, (layer, head) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        strength = 0.25 + 0.75 * float(involved[layer, head] / involved.max())
        for i in range(6):
            for j in range(6):
                pixel = picture[16 * i + 8, round(k * pitch) + 16 * j + 8]
                assert tuple(pixel[:3]) == style.INDIGO
                assert int(pixel[3]) == pytest.approx(
                    255 * strength * float(a.patterns[layer, head, i, j]) ** 0.5, abs=0.51
                )
    touch: Any = figure.data[0]
    assert list(touch.customdata) == ["0.0", "0.1", "1.0", "1.1"]
    assert len(figure.layout.images) == 1 and not figure.layout.xaxis.visible


def test_a_long_prompt_keeps_thin_lines_and_stays_small():
    long = AttentionMaps(torch.eye(256).roll(-3, 1).tril().expand(12, 12, -1, -1), torch.ones(256, 2) / 2)
    small = thumbnails.strongest(long.patterns[0, 0].numpy(), thumbnails.LARGEST)
    assert small.shape == (43, 43)  # 6 × 6 cells each
    for i in range(43):
        for j in range(43):
            block = long.patterns[0, 0, 6 * i : 6 * i + 6, 6 * j : 6 * j + 6]
            assert small[i, j] == float(block.max())
    signed = np.array([[0.5, -2.0], [0.0, 1.0]], dtype=np.float32)
    assert thumbnails.strongest(signed, 1).tolist() == [[-2.0]]
    figure: Any = thumbnails_figure(long, [f"t{i}" for i in range(256)])
    assert len(figure.data[0].x) == 144 and len(figure.to_json()) < 1e6


def test_heads_stand_by_their_score_beside_its_null():
    a, scores = maps(n_layers=2, n_heads=2), scored([[0.5, 3.0], [-2.0, 0.75]])
    figure: Any = thumbnails_figure(a, WORDS, scores=scores, chosen=(1, 0))
    assert list(figure.data[0].customdata) == ["0.1", "1.1", "0.0", "1.0"]
    assert ranked(a, scores, ascending=True)[0] == (1, 0)
    low, high = (style.signed(float(end)) for end in scores.band[:, 0, 1])
    assert figure.data[1].text[0].startswith("<b>0.1</b> +3.00<br>") and f"{low}…{high}" in figure.data[1].text[0]
    assert "outside it, z" in figure.data[0].hovertext[0] and "inside it, z" in figure.data[0].hovertext[1]
    solid, dotted, chosen = figure.layout.shapes
    assert (solid.path.count("M"), dotted.path.count("M"), chosen.path.count("M")) == (2, 2, 1)
    assert dotted.line.dash == "dot" and solid.line.dash is None
    assert "M 3," in chosen.path  # 1.0 stands last


def test_role_means_are_drawn_with_their_error_and_what_is_even():
    attention = torch.rand(10, 1, 2, 2, 3, generator=torch.Generator().manual_seed(0))
    attention[..., 0, 1] = 0
    attention = attention / attention.sum(-1, keepdim=True)
    found = RoleAttention(("x", "answer"), (1, 3), attention, torch.arange(10))
    figure = roles_figure(found, (0, 1))
    (panel,) = heatmaps(figure)
    expected = attention[:, 0, 1].mean(0)
    assert np.isnan(panel.z[0][1]) and np.allclose(np.nan_to_num(panel.z), expected.numpy())
    assert panel.name == "block 1 · head 0.1"
    error = attention[:, 0, 1, 1, 0].std() / 10**0.5
    said = f"at answer → x: {float(expected[1, 0]):.2f} ± {float(error):.2f}, even 0.25"
    assert panel.customdata[1][0] == said
    assert heatmaps(roles_figure(found))[0].name == "block 1 · mean of 2 heads"


@pytest.mark.parametrize(
    ("token", "shown"), [(" the", "·the"), ("  ", "··"), ("\n", "↵"), ("\n\n", "↵↵"), ("a b", "a b"), ("", "∅")]
)
def test_blanks_are_visible(token, shown):
    assert style.visible(token) == shown
