"""Steps on the screen are the steps' own numbers, and text is shown as text."""

import re
from dataclasses import replace

import pytest
import torch
from support import build

from circuits.scaling import random_scores
from circuits.steps import answer_plane, step_by_step
from workbench.figures import plane_figure, scaling_figure, step_records, steps_html, style, told_html
from workbench.figures.steps import COLUMNS, columns_of

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
WORDS = ["the", "<b>", "the", " cat\n", "a&b", "x", "y", "z"]


def cells(html, line):
    """What stands in the cells of one line."""
    row = re.search(rf'<tr class="r-{line}">(.*?)</tr>', html)
    assert row is not None
    return re.findall(r"<td[^>]*>([^<]*)</td>", row[1])


def written(values):
    return [f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−") for value in values]


def test_every_line_holds_the_numbers_of_its_step():
    steps = step_by_step(build(), TOKENS, "1.1", 5)
    page = steps_html(steps, WORDS)
    assert cells(page, "dot") == written(steps.products.tolist())
    assert cells(page, "scale") == written(steps.divided.tolist())
    assert cells(page, "mask") == ["0"] * 6 + ["−∞"] * 2
    assert cells(page, "soft") == written(steps.pattern.tolist())
    query = re.search(r'class="line r-q">.*?class="numbers">(.*?)</div>', page)
    assert query is not None and re.findall(r">([^<]+)</b>", query[1]) == written(steps.query.tolist())
    assert "÷ √8 = 2.828" in page and page.count('tabindex="0"') == 8
    assert "script" not in page and "<b>the" not in page and "&lt;b&gt;" in page and "·cat↵" in page


def test_what_is_switched_off_is_struck_out():
    steps = replace(step_by_step(build(), TOKENS, "1.1", 5), scaled=False, masked=False)
    page = steps_html(steps, WORDS)
    assert "<s>÷ √8" in page and "<s>+ mask</s>" in page and "−∞" not in page
    assert cells(page, "scale") == cells(page, "dot") == written(steps.products.tolist())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"positions": "rotary"}, ["q, turned by 5", "each turned by its position"]),
        ({"positions": "alibi"}, ["· distance", "ALiBi"]),
        ({"positions": "shortformer"}, ["for queries and keys only", "(x̂<sub>s</sub> + p<sub>s</sub>)"]),
        ({"attention": "softmax-unscaled"}, ["this model does not scale"]),
        ({"norm": "post"}, ["LayerNorm(x<sub>5</sub> + Δ + rest)", "k<sub>s</sub> = x<sub>s</sub>"]),
        ({"norm": "none"}, ["k<sub>s</sub> = x<sub>s</sub>"]),
        ({"residual": False}, ["the token is replaced"]),
    ],
)
def test_a_step_that_works_differently_is_shown_as_it_is(options, said):
    page = steps_html(step_by_step(build(**options), TOKENS, "1.1", 5), WORDS)
    plain = steps_html(step_by_step(build(), TOKENS, "1.1", 5), WORDS)
    for words in said:
        assert words in page and words not in plain


def test_long_prompts_show_the_words_with_most_attention():
    tokens = torch.arange(40)[None] % 20
    steps = step_by_step(build(n_ctx=40), tokens, "0.0", 35)
    words = [f"w{i}" for i in range(40)]
    page = steps_html(steps, words, follow=2)
    shown = [int(i) for i in re.findall(r"</small>w(\d+)</th>", page)]
    assert len(shown) == COLUMNS and shown == sorted(shown) and {2, 35} <= set(shown)
    left = [i for i in range(40) if i not in shown]
    assert cells(page, "soft")[-1] == f"{float(steps.pattern[left].sum()):.2f}"
    assert float(steps.pattern[left].max()) <= sorted(steps.pattern[shown].tolist())[2]


def test_long_words_leave_room_for_fewer_columns():
    steps = step_by_step(build(n_ctx=40), torch.arange(40)[None] % 20, "0.0", 35)
    most = [i for i in steps.pattern.argsort(descending=True, stable=True).tolist() if i not in (2, 35)]
    # four of 155 pixels each in 724 less the column of the others
    assert columns_of(steps, ["otorhinolaryngology"] * 40, 2) == sorted([2, 35, *most[:2]])
    assert columns_of(step_by_step(build(), TOKENS, "1.1", 5), ["ear"] * 8) == list(range(8))


def test_the_arithmetic_of_one_source_is_spelled_out():
    steps = step_by_step(build(), TOKENS, "1.1", 5)
    told = told_html(steps, WORDS, 1)
    product, score, weight = float(steps.products[1]), float(steps.scores[1]), float(steps.pattern[1])
    terms = re.findall(r"\((−?[\d.]+)\)\((−?[\d.]+)\)", told)
    assert len(terms) == 8
    total = sum(float(a.replace("−", "-")) * float(b.replace("−", "-")) for a, b in terms)
    assert abs(total - product) < 0.1  # factors have two decimals
    assert f"= {written([product])[0]}<br>" in told and f"/ √8 = {written([score])[0]}" in told
    assert f"= {weight:.4f}, with" in told and "1 ‘&lt;b&gt;’" in told
    assert "cannot be seen" in told_html(steps, WORDS, 7)


def test_arrows_run_from_zero_to_all_of_delta():
    model = build()
    plane = answer_plane(model, TOKENS, step_by_step(model, TOKENS, "0.1", 6), 3, 7)
    figure = plane_figure(plane, WORDS, "<i>", "street")
    arrows = [a for a in figure.layout.annotations if a.showarrow]  # pyright: ignore
    single, total = arrows[:-1], arrows[-1]
    assert (single[0].ax, single[0].ay) == (0, 0) and (total.ax, total.ay) == (0, 0)
    assert [(a.x, a.y) for a in single[:-1]] == [(a.ax, a.ay) for a in single[1:]]
    assert (total.x, total.y) == pytest.approx(tuple(plane.total.tolist()), abs=1e-5)
    lengths = [(a.x - a.ax) ** 2 + (a.y - a.ay) ** 2 for a in single]
    assert lengths[0] == pytest.approx(float(plane.sources.norm(dim=-1).max()) ** 2, rel=1e-4)
    texts = " ".join(a.text for a in figure.layout.annotations)  # pyright: ignore
    assert "&lt;i&gt;" in texts and "<i>" not in texts
    dead = replace(plane, sources=torch.zeros(8, 2))
    assert len([a for a in plane_figure(dead, WORDS, "a", "b").layout.annotations if a.showarrow]) == 0  # pyright: ignore


def test_records_are_the_numbers():
    steps = step_by_step(build(), TOKENS, "1.1", 5)
    records = list(step_records(steps, WORDS))
    pattern = [r["value"] for r in records if r["step"] == "pattern"]
    assert pattern == steps.pattern.tolist()
    keys = [r["value"] for r in records if r["step"] == "keys" and r["source"] == 3]
    assert keys == steps.keys[3].tolist()
    assert {r["source_token"] for r in records if r["source"] == 3} == {" cat\n"}


def test_scaling_panels():
    found = random_scores([4, 16], keys=8, rows=20, pairs=100)
    figure = scaling_figure(found, 8)
    lines = [(trace.name, list(trace.y)) for trace in figure.data]  # pyright: ignore
    assert lines[0] == ("q·k", [scores.variance for scores in found])
    assert lines[3] == ("q·k / √d_k", [scores.scaled.effective_tokens for scores in found])
    assert lines[4] == ("q·k", [scores.unscaled.jacobian for scores in found])
    assert figure.data[3].line.color == style.rgba(style.INDIGO, 1)  # pyright: ignore
    assert figure.layout.yaxis2.range == (0, 8)  # pyright: ignore
