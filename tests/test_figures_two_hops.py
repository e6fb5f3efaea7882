"""The figures of two hops, without Streamlit: what is drawn where, how thick, and what is left to the background."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from support import build

from circuits import compositions, decompose_attention_scores, two_hops
from circuits.attention import AttentionMaps, attention_maps
from circuits.chains import Chain, TwoHops
from workbench.figures import (
    arcs_figure,
    chain_records,
    chains_that_matter,
    composition_figure,
    composition_records,
    score_records,
    score_terms_figure,
    style,
)
from workbench.figures.arcs import THICKEST, THINNEST, chain_words, looks_at, one_decimal
from workbench.figures.composition import z_text
from workbench.figures.score_terms import MOST, REST, named_terms

Q = Chain("Q", 1, (0, 0), "answer", (1, 1))
K = Chain("K", 0, (0, 1), 2, (1, 0))
V = Chain("V", 2, (0, 1), 2, (1, 0))
SMALL = Chain("V", 0, (0, 0), 0, (1, 0))
WORDS = ["the", "<b>", "of", "the"]


def hops() -> TwoHops:
    """Four chains: 5 for the answer, 2 against it, 3 and 0.1 for it; answer − foil is 10."""
    values = torch.tensor([[5.0], [-2.0], [3.0], [0.1]])
    return TwoHops((Q, K, V, SMALL), values, torch.tensor([10.0]), torch.tensor([4.0]))


def maps() -> AttentionMaps:
    """All look evenly, but head 1.1, which looks from 3 at 2 with 0.7."""
    even = torch.ones(4, 4).tril() / torch.arange(1, 5)[:, None]
    patterns = even.repeat(2, 2, 1, 1)
    patterns[1, 1, 3] = torch.tensor([0.1, 0.1, 0.7, 0.1])
    return AttentionMaps(patterns, torch.full((4, 3), 1 / 3))


def draw(**options: Any) -> Any:
    return arcs_figure(hops(), WORDS, maps(), 3, answer="x<y", foil="z", **options)


def by_name(figure: Any) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_only_chains_that_matter_and_the_largest_first() -> None:
    assert chains_that_matter(hops(), 0.05) == [(Q, 5.0), (V, 3.0), (K, -2.0)]
    assert chains_that_matter(hops(), 0.25) == [(Q, 5.0), (V, 3.0)]
    assert chains_that_matter(hops(), 0.001, "V") == [(V, 3.0), (SMALL, pytest.approx(0.1))]
    assert chains_that_matter(hops(), 0.0, most=1) == [(Q, 5.0)]


def test_colour_says_the_kind_width_the_worth_dash_the_measure_and_a_hollow_marker_the_sign() -> None:
    traces = by_name(draw())
    assert set(map(str, (Q, K, V))) <= set(traces) and str(SMALL) not in traces
    for chain, value in ((Q, 5.0), (K, -2.0), (V, 3.0)):
        line, marker = traces[str(chain)].line, traces[f"top of {chain}"].marker
        assert line.color == style.COMPOSITION[chain.kind]
        assert line.width == pytest.approx(THINNEST + (THICKEST - THINNEST) * abs(value) / 10)
        assert (line.dash == "solid") == (chain.kind == "V")
        assert (marker.symbol == "circle-open") == (value < 0)
    legend = {trace.name for trace in draw().data if trace.showlegend}
    assert legend == {
        "query: effect of the cut", "key: effect of the cut", "value: exact contribution", "against the answer",
    }  # fmt: skip


def test_arcs_stand_on_their_words_below_and_above() -> None:
    figure: Any = draw()
    texts = {trace.text[0].rpartition("</span> ")[2]: trace.x[0] for trace in figure.data if trace.mode == "text"}
    first = [trace for trace in figure.data if trace.name == str(K)]
    below, above = first if first[0].y[1] < 0 else first[::-1]
    assert all(y < 0 for y in below.y) and all(y > 0 for y in above.y)
    half = THICKEST
    first_word = next(t.x[0] for t in figure.data if t.mode == "text" and "0</span>" in t.text[0])
    assert below.x[0] == pytest.approx(first_word, abs=half)
    assert below.x[-1] == pytest.approx(texts["of"], abs=half)
    assert above.x[0] == pytest.approx(texts["of"], abs=half)
    answer = next(t.x[0] for t in figure.data if t.mode == "text" and ">3</span>" in t.text[0])
    assert above.x[-1] == pytest.approx(answer, abs=half)
    query = [trace for trace in figure.data if trace.name == str(Q)]
    over = next(trace for trace in query if trace.y[1] > 0)
    assert over.x[0] == pytest.approx(texts["of"], abs=half)  # where 1.1 looks most, from 3
    assert looks_at(maps(), Q, 3) == 2 and looks_at(maps(), K, 3) == 2


def test_the_line_says_what_chains_are_of_and_tokens_are_text() -> None:
    said = [trace.text[0] for trace in draw().data if trace.mode == "text"]
    assert "<b>→ x&lt;y − z = +10.0</b>" in said
    assert "V-chains sum: +3.1 of +10.0" in said
    assert "V-chains sum: +7.0 of +10.0" in [t.text[0] for t in draw(v_sum=7.0).data if t.mode == "text"]
    assert "&lt;b&gt;" in said and not any("<b>" in text and "→" not in text for text in said)
    assert "1.1  query +5.0" in said and "1.0  value +3.0 …" in said
    assert {"block 1", "block 2"} <= set(said)
    hover = by_name(draw())[f"top of {Q}"].hovertext[0]
    assert "without it answer − foil loses +5.00 logits" in hover and "looks most at 2 ‘of’ (0.70)" in hover
    assert "exact contribution to answer − foil: +3.00 logits" in by_name(draw())[f"top of {V}"].hovertext[0]
    assert chain_words(Q, WORDS, 3) == "1 ‘<b>’ → 0.0 → 3 ‘the’ → query of 1.1"
    assert [one_decimal(v) for v in (6.24, -0.27, 0.04, -0.04)] == ["+6.2", "−0.3", "0.0", "0.0"]


def test_words_that_no_arc_touches_make_room_in_a_long_line() -> None:
    words = [f"word{i}" for i in range(200)]
    chain = Chain("K", 40, (0, 0), 41, (1, 0))
    found = TwoHops((chain,), torch.tensor([[5.0]]), torch.tensor([10.0]), torch.tensor([5.0]))
    patterns = torch.ones(2, 2, 200, 200).tril() / torch.arange(1, 201)[:, None]
    figure: Any = arcs_figure(found, words, AttentionMaps(patterns, torch.ones(200, 2) / 2), 199, answer="a", foil="b")
    shown = [t.text[0] for t in figure.data if t.mode == "text" and t.textfont.family == style.MONOSPACE]
    assert shown == ["word0", "…", "word40", "word41", "…", "word199"]
    assert figure.layout.xaxis.range[1] == 864


def test_labels_of_a_crowd_are_neither_covered_nor_outside() -> None:
    """Heads that all connect the same words: every label on a line of its own, the picture as high as they need."""
    chains = [Chain("Q", 0, (0, i), "answer", (1, j)) for i in range(3) for j in range(4)]
    values = torch.arange(12, 0, -1.0)[:, None]
    found = TwoHops(tuple(chains), values, torch.tensor([12.0]), torch.tensor([5.0]))
    patterns = torch.ones(2, 4, 4, 4).tril() / torch.arange(1, 5)[:, None]
    figure: Any = arcs_figure(found, WORDS, AttentionMaps(patterns, torch.ones(4, 2) / 2), 3, answer="a", foil="b")
    labels = [t.y[0] for t in figure.data if t.mode == "text" and t.text[0][:2] in ("0.", "1.")]
    assert len(labels) == 7
    for sign in (1, -1):
        side = sorted(y for y in labels if y * sign > 0)
        assert all(b - a >= 13 for a, b in pairwise(side))
    low, high = figure.layout.yaxis.range
    assert low < min(labels) and max(labels) < high


def test_records_say_how_each_chain_was_measured() -> None:
    rows = list(chain_records(hops(), WORDS, 3, [Q]))
    assert [row["logits"] for row in rows] == pytest.approx([5, 3, -2, 0.1])
    assert [row["measured"] for row in rows] == [
        "effect of the cut", "exact contribution", "effect of the cut", "exact contribution",
    ]  # fmt: skip
    assert [row["drawn"] for row in rows] == [True, False, False, False]
    assert (rows[0]["middle"], rows[0]["middle_token"], rows[0]["source_token"]) == (3, "the", "<b>")


def test_inside_its_null_a_pair_is_the_background() -> None:
    scores = compositions(build(n_layers=3, n_heads=2))
    figure: Any = composition_figure(scores, ("K", (0, 1), (2, 0)))
    assert [trace.name for trace in figure.data] == ["Q", "K", "V"]
    for trace in figure.data:
        one = scores[trace.name]
        for i in range(4):
            for j in range(4):
                writer, reader = divmod(i, 2), (1 + j // 2, j % 2)
                pair = (*writer, *reader)
                if writer[0] >= reader[0]:
                    assert math.isnan(trace.z[i][j]) and trace.customdata[i][j] == ""
                    continue
                z = float(one.z[pair])
                outside = not float(one.band[(0, *pair)]) <= float(one.scores[pair]) <= float(one.band[(1, *pair)])
                assert trace.z[i][j] == (pytest.approx(z, abs=1e-4) if outside else 0)
                assert trace.text[i][j] == (z_text(z) if outside else "")
                assert f"z {z_text(z)}" in trace.customdata[i][j]
                assert ("inside it" in trace.customdata[i][j]) == (not outside)
    scale = figure.layout.coloraxis
    assert scale.cmin == -scale.cmax and scale.colorscale[1][1].endswith("0)")
    frames = [shape for shape in figure.layout.shapes if shape.line.width == 3]
    assert [(f.xref, f.x0, f.y0, f.line.color) for f in frames] == [("x2", 1.5, 0.5, style.COMPOSITION["K"])]
    rows = list(composition_records(scores))
    assert len(rows) == 3 * (2 * 4 + 2 * 2) and {"kind", "writer", "reader", "score", "z", "p"} <= set(rows[0])
    assert [z_text(v) for v in (2.34, -17.2, 0.0)] == ["+2.3", "−17", "+0.0"]


def test_a_score_is_the_sum_of_its_cells() -> None:
    model = build(n_layers=2)
    tokens = torch.randint(20, (1, 6), generator=torch.Generator().manual_seed(0))
    words = [f"t{i}" for i in tokens[0].tolist()]
    terms = decompose_attention_scores(model, tokens, "1.0", 5)
    figure: Any = score_terms_figure(terms, 2, words)
    (heat,) = figure.data
    assert np.sum(heat.z) == pytest.approx(float(terms.total[2]), abs=1e-5)
    names = list(figure.layout.xaxis.ticktext)
    assert heat.z[names.index("embed")][names.index("0.1")] == pytest.approx(float(terms["embed", "0.1"][2]), abs=1e-6)
    assert figure.layout.coloraxis.cmin == -figure.layout.coloraxis.cmax
    rows = list(score_records(terms, words))
    assert len(rows) == len(names) ** 2 * 6 and rows[0]["head"] == "1.0" and rows[0]["source_token"] == words[0]


def test_many_components_are_added_up_and_nothing_is_lost() -> None:
    model = build(n_layers=4, n_heads=4)
    tokens = torch.randint(20, (1, 6), generator=torch.Generator().manual_seed(0))
    terms = decompose_attention_scores(model, tokens, "3.1", 5)
    names, cells = named_terms(terms, 1)
    assert len(terms.components) > MOST + 1 == len(names) and names[-1] == REST
    assert cells.sum() == pytest.approx(float(terms.total[1]), abs=1e-4)
    every = terms.values[:, :, 1]
    row, column = divmod(int(every.abs().argmax()), len(terms.components))
    kept = [terms.components[i] for i in (row, column)]
    assert cells[names.index(kept[0]), names.index(kept[1])] == pytest.approx(float(every[row, column]), abs=1e-6)


def test_a_real_model_draws_what_two_hops_ranks() -> None:
    model = build(n_layers=2)
    tokens = torch.randint(20, (1, 6), generator=torch.Generator().manual_seed(0))
    found = two_hops(model, tokens, 5, 1, 2)
    figure: Any = arcs_figure(found, ["w"] * 6, attention_maps(model, tokens), 5, answer="a", foil="b", share=0.01)
    drawn = {trace.customdata[0] for trace in figure.data if trace.customdata is not None}
    least = 0.01 * abs(float(found.clean))
    assert drawn == {str(chain) for chain, value in found.ranked()[:12] if abs(value) >= least}
