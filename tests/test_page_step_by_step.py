"""The page step by step: its numbers are the model's, its switches do what the model would, and it never breaks."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from support import SENTENCE, app_page, deep_run

import workbench as wb
from circuits.steps import answer_plane, predicted, step_by_step
from workbench.figures import plane_figure, steps_html, told_html
from workbench.recipes import ModelConfig, Recipe, TrainingConfig
from workbench.training import train
from workbench.wording import percent


def html(app: AppTest) -> str:
    return " ".join(block.proto.body for block in app.get("html"))


def trained(**options: Any) -> None:
    """A model of two steps, as a run of its own."""
    sizes: dict[str, Any] = {"n_layers": 1, "d_model": 16, "n_heads": 2}
    recipe = Recipe("other", "winograd", "", ModelConfig(**sizes | options), TrainingConfig(steps=2, batch=4))
    train(recipe)


def test_the_page_shows_the_steps_of_the_head_that_writes_most():
    app, run = app_page("step_by_step"), wb.load("winograd-2")
    tokens = run.encode(SENTENCE)
    sizes = {
        f"{layer}.{head}": float(step_by_step(run.model, tokens, (layer, head)).own.norm())
        for layer in range(2) for head in range(4)
    }  # fmt: skip
    best = max(sizes, key=sizes.__getitem__)
    steps = step_by_step(run.model, tokens, best)
    assert not app.error and app.title[0].value == "Step by step"
    assert steps_html(steps, run.str_tokens(tokens)) in html(app)
    said = app.markdown[0].value
    assert f"head {best} looks most at" in said and f"norm {float(steps.result.norm()):.2f}" in said
    without = predicted(run.model, tokens, steps, 0.0).softmax(-1)
    answer = int(steps.logits.argmax())
    assert percent(float(steps.logits.softmax(-1)[answer])) in said and percent(float(without[answer])) in said


def test_switches_words_and_strengths_change_what_the_head_does():
    query = {"steps_head": "0.2", "steps_scale": "false", "steps_follow": "tired", "steps_size": "0.5",
             "steps_gain": "2.0"}  # fmt: skip
    app, run = app_page("step_by_step", **query), wb.load("winograd-2")
    tokens = run.encode(SENTENCE)
    own = step_by_step(run.model, tokens, "0.2")
    steps = replace(own, scaled=False)
    words = run.str_tokens(tokens)
    assert steps_html(steps, words, 11) in html(app) and told_html(steps, words, 11) in html(app)
    changed = own.stretched(predicted(run.model, tokens, steps, 0.5), 2.0).softmax(-1)
    line = html(app).split("as changed on this page")[1]
    shown = re.findall(r"<b>([^<]*)</b> ([\d.]+ %)", line)
    assert shown
    for word, share in shown:
        assert share == percent(float(changed[run.task.vocabulary.words.index(word)]))


def test_the_python_that_is_shown_makes_the_figure(capsys):
    app, run = app_page("step_by_step", steps_head="1.1", at="tired"), wb.load("winograd-2")
    figure = json.loads(app.get("plotly_chart")[0].proto.spec)
    code = app.code[-1].value.rstrip().splitlines()
    space: dict = {}
    exec("\n".join([*code[:-1], f"figure = {code[-1]}"]), space)
    assert json.loads(str(space["figure"].to_json()))["data"] == figure["data"]
    tokens = run.encode(SENTENCE)
    plane = answer_plane(run.model, tokens, step_by_step(run.model, tokens, "1.1", 11), *space_target(space))
    words = run.task.vocabulary.words
    again = plane_figure(plane, run.str_tokens(tokens), *(str(words[t]) for t in space_target(space)))
    assert json.loads(str(again.to_json()))["data"] == figure["data"]


def space_target(space):
    """The two answers of the snippet: the likeliest words at its position."""
    steps = space["steps"]
    return steps.logits.topk(2).indices.tolist()


@pytest.mark.parametrize(
    "query",
    [
        {"steps_head": "9.9"}, {"steps_follow": "zebra"}, {"steps_size": "x"}, {"steps_gain": "77"},
        {"steps_scale": "maybe"}, {"steps_shape": "GPT-9", "steps_count": "true"},
        {"steps_n": "-3", "steps_cost": "true"}, {"prompt": "the", "pair": "none"},
        {"prompt": "the the the", "steps_edit": "true"},
    ],
)  # fmt: skip
def test_stale_and_odd_links_give_a_page(query):
    app = app_page("step_by_step", **query)
    assert not app.error and 'class="sb"' in html(app)


def test_what_needs_no_model_stands_in_expanders():
    app = app_page("step_by_step", steps_count="true", steps_cost="true", steps_shape="GPT-2 small", steps_n="100",
                   steps_d="512")  # fmt: skip
    assert not app.error
    assert any(m.value.startswith("**124,439,808** =") for m in app.markdown)
    rows = app.dataframe[1].value
    assert rows["operations"].tolist()[:2] == [f"{100 * 100 * 512:,}", f"{100 * 512 * 512:,}"]


@pytest.mark.parametrize("name", ["bigram-0", "winograd-average", "winograd-1-hand", "skip-trigram-1-attn"])
def test_shipped_models_of_other_kinds(name):
    app = app_page("step_by_step", model=name)
    if name == "bigram-0":
        assert "has no layers" in app.markdown[0].value and not app.error
    elif name == "winograd-average":  # attention in place of the token: no way straight to the logits
        assert [e.value for e in app.error] == [e.value for e in app.error if "there is no plane to move in" in e.value]
        assert "averages uniformly" in " ".join(c.value for c in app.caption)
    else:
        assert not app.error and 'class="sb"' in html(app)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"norm": "post"}, "LayerNorm after each addition"),
        ({"residual": False}, "sub-layers that replace the token"),
    ],
)
def test_a_model_without_a_way_straight_to_the_logits_says_so_in_place(options, said):
    trained(**options)
    app = app_page("step_by_step", model="other")
    assert len(app.error) == 1 and said in app.error[0].value
    assert 'class="sb"' in html(app) and "What comes next" in html(app)


def test_without_layer_norm_there_is_no_gain_to_change():
    trained(norm="none", positions="alibi", bias_qkv=False)
    app = app_page("step_by_step", model="other", steps_gain="2.0")
    assert not app.error and "as changed on this page" not in html(app)
    assert any("γ and β do not apply" in c.value for c in app.caption)
    assert "ALiBi" in html(app)


def test_a_deep_model_and_a_long_prompt_stay_usable(tmp_path):
    deep_run(tmp_path, 256)
    for page, charts in (("step_by_step", 1), ("lens", 2)):
        app = app_page(page, model="deep", pair="next example", steps_edit="true", lens_patching="true")
        assert not app.error and len(app.get("plotly_chart")) == charts
        said = " ".join([*(c.value for c in app.caption), *(i.value for i in app.info)])
        assert ("the 15 words with most attention" in said) == (page == "step_by_step")
        assert ("choose a shorter prompt" in said) == (page == "lens")
        assert all(len(chart.proto.spec) < 4e6 for chart in app.get("plotly_chart"))
