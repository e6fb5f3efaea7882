"""The page Lens: its numbers are those of circuits.lens, and where there is nothing to show it says why."""

import json
import re
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest
from support import OTHER_SENTENCE, SENTENCE, app_page

import workbench as wb
from circuits.lens import attribution, neurons, patching, stream_words
from workbench.figures import attribution_figure, lens_figure, patching_figure, style
from workbench.recipes import ModelConfig, Recipe, TrainingConfig
from workbench.training import train


def figures(app: AppTest) -> list[Any]:
    """The charts' traces, top to bottom."""
    return [json.loads(chart.proto.spec)["data"] for chart in app.get("plotly_chart")]


def traces(figure: Any) -> Any:
    return json.loads(str(figure.to_json()))["data"]


def trained(**options: Any) -> None:
    """A model of two steps, as a run of its own."""
    sizes: dict[str, Any] = {"n_layers": 1, "d_model": 16, "n_heads": 2}
    train(Recipe("other", "winograd", "", ModelConfig(**sizes | options), TrainingConfig(steps=2, batch=4)))


def test_the_page_shows_what_the_tools_say():
    app, run = app_page("lens", lens_patching="true", lens_neurons="true"), wb.load("winograd-2")
    assert not app.error and app.title[0].value == "Lens"
    tokens, other = run.encode(SENTENCE), run.encode(OTHER_SENTENCE)
    words, vocabulary = run.str_tokens(tokens), run.task.vocabulary.words
    animal, street = vocabulary.index("animal"), vocabulary.index("street")
    what = "‘animal’ − ‘street’"
    found = attribution(run.model, tokens, 14, animal, street)
    grids = patching(run.model, tokens, other, 14, animal, street)
    shown = figures(app)
    assert shown[0] == traces(lens_figure(stream_words(run.model, tokens), words, vocabulary, 14))
    assert shown[1] == traces(attribution_figure(found, what))
    assert shown[2] == traces(patching_figure(grids, words, run.str_tokens(other), clickable=True))
    said = app.markdown[0].value
    assert f"of the {style.signed(found.total)} logits of {what}" in said and "says ‘animal’" in said
    best = stream_words(run.model, tokens).probabilities[:, 14].argmax(-1).tolist()
    assert [word == animal for word in best] == [False, False, False, True, True]
    assert "as the stream does from “block 2, attention” on" in said
    labels = [button.label for button in app.get("download_button")]  # pyright: ignore[reportAttributeAccessIssue]
    assert labels == [
        "figure (HTML)", "numbers (CSV)", "numbers (JSON)", "components (CSV)", "patching (CSV)",
    ]  # fmt: skip
    listed = next(html.proto.body for html in app.get("html") if "wb-list" in html.proto.body)
    assert f"adds to {what}, logits" in listed
    rows = re.findall(r"<tr><td.*?</tr>", listed)
    expected = neurons(run.model, tokens, 14, animal, street)
    assert [re.findall(r">([^<>]*)</td>", row)[:3] for row in rows] == [
        [f"{n.layer}.{n.index}", style.signed(n.activation), style.signed(n.adds)] for n in expected
    ]
    raw = app_page("lens", lens_patching="true", lens_cells="in logits", lens_answer="street", lens_foil="dog")
    grids = patching(run.model, tokens, other, 14, street, vocabulary.index("dog"))
    drawn = patching_figure(grids, words, run.str_tokens(other), normalised=False, clickable=True)
    assert figures(raw)[2] == traces(drawn)


def test_the_python_that_is_shown_makes_the_figure():
    app = app_page("lens", at="tired")
    code = app.code[-1].value.rstrip().splitlines()
    space: dict = {}
    exec("\n".join([*code[:-1], f"figure = {code[-1]}"]), space)
    assert traces(space["figure"]) == figures(app)[0]


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ({"pair": "none"}, "choose a pair under “Compared with”"),
        ({"pair": "free text", "against": "the animal did"}, "A has 15 words and B 3"),
        ({"model": "bigram-0"}, "has no layers"),
    ],
)
def test_where_there_is_no_grid_the_page_says_why(query, why):
    app = app_page("lens", lens_patching="true", **query)
    assert not app.error and any(why in info.value for info in app.info)
    assert len(app.get("plotly_chart")) == 2  # the stream and the components stand


@pytest.mark.parametrize(
    "query",
    [
        {"lens_answer": "zebra"}, {"lens_foil": ""}, {"lens_cells": "x", "lens_patching": "true"},
        {"prompt": "the", "pair": "none"}, {"prompt": "the the the", "pair": "none", "lens_neurons": "true"},
        {"lens_answer": "dog", "lens_foil": "dog", "lens_patching": "true"}, {"at": "99 x"},
    ],
)  # fmt: skip
def test_stale_and_odd_links_give_a_page(query):
    app = app_page("lens", **query)
    assert len(app.get("plotly_chart")) >= 2
    assert not app.error or ("nothing to restore" in app.error[0].value and query["lens_answer"] == "dog")


@pytest.mark.parametrize("name", ["winograd-1-hand", "skip-trigram-1-attn", "induction-2-attn"])
def test_models_of_other_kinds(name):
    app = app_page("lens", model=name, lens_patching="true", lens_neurons="true")
    assert not app.error and len(app.get("plotly_chart")) >= 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"norm": "post"}, "LayerNorm after each addition"),
        ({"residual": False}, "sub-layers that replace the token"),
    ],
)
def test_what_is_no_sum_is_refused_in_place(options, why):
    trained(**options)
    app = app_page("lens", model="other", lens_patching="true", lens_neurons="true")
    assert [why in error.value for error in app.error] == [True, True]  # components and neurons
    assert len(app.get("plotly_chart")) == 2  # the stream and the grid stand
