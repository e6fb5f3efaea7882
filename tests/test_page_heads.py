"""The page on heads: the numbers are the library's, a link opens a head, claims are checked when asked."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support import app_page, text

import workbench as wb
from circuits import composition_scores
from circuits.entries import token_circuit
from workbench.content import content
from workbench.figures import heads_figure, scores_figure
from workbench.figures.heads import plus
from workbench.head_table import read_heads
from workbench.pages import cache, heads_parts
from workbench.recipes import load_recipe
from workbench.training import train


@pytest.fixture(scope="module")
def table():
    return read_heads(wb.load("induction-2-attn"))


def spec(figure):
    return json.loads(str(figure.to_json()))


def chart(app, i=0):
    return json.loads(app.get("plotly_chart")[i].proto.spec)


def test_opens_on_the_table_of_all_heads(table):
    app = app_page("heads", model="induction-2-attn")
    assert app.title[0].value == "Heads" and not app.error
    assert chart(app) == spec(heads_figure(table))
    assert "1.0, 1.1, 1.2, 1.3 induction" in text(app) and "Worth most alone is 0.0" in text(app)
    cost = table.column("cost")
    assert f"loss changes by {plus(cost.values[0], 3)} nats" in text(app).replace("\\", "")


def test_sorted_by_a_column(table):
    app = app_page("heads", model="induction-2-attn", heads_sort="induction")
    assert chart(app) == spec(heads_figure(table, "prefix_matching"))
    app.selectbox(key="heads_sort").set_value("what it is worth").run()
    order = np.argsort(-table.column("cost").values, kind="stable")
    assert chart(app)["data"][0]["text"] == [f"<b>{table.names[i]}</b>" for i in order]


def test_a_link_opens_one_head(table):
    app = app_page("heads", model="induction-2-attn", head_page="1.2")
    assert not app.error and chart(app) == spec(scores_figure(table, "1.2"))
    assert "called induction" in text(app)
    run = wb.load("induction-2-attn")
    circuit = token_circuit(run.model, "1.2", "OV")
    (row,), (column,), (value,) = circuit.circuit.top(1)
    words = run.task.vocabulary.words
    assert f'token">{words[row]}</td><td class="token">{words[column]}</td><td class="number">{plus(float(value))}' in (
        text(app)
    )
    z = float(composition_scores(run.model, "K")["0.0", "1.2"].z)
    assert f'K</span> reads</td><td class="token">0.0</td><td class="number">+{z:.1f}' in text(app)
    assert chart(app, 1)["data"][0]["name"] == "block 2 · head 1.2"  # its map on the prompt
    app.pills(key="head_page").set_value("all heads").run()
    assert chart(app) == spec(heads_figure(table))


def test_claims_are_untested_until_they_are_checked():
    app = app_page("heads", model="induction-2-attn", head_page="1.1")
    assert '<td class="">–</td>' in text(app) and "✓" not in text(app).partition("wb-list")[2]
    app.toggle(key="heads_check").set_value(True).run()
    assert not app.error
    listed = text(app)
    assert '✓</td><td class="">the keys of 1.0, 1.1, 1.2, 1.3 read head 0.0</td>' in listed
    assert '✗</td><td class="">the values of 1.1 read head' in listed
    assert "head 1.2 looks" not in listed  # of another head


def test_what_a_claim_speaks_of():
    key = next(e for e in cache.entries()[0] if e.name == "induction-2-attn").at()
    found = {claim.text: claim for claim in heads_parts.said(key, False)}
    assert found["head 0.0 looks at the token before"].heads == ("0.0",)
    assert found["the keys of 1.0, 1.1, 1.2, 1.3 read head 0.0"].heads == ("0.0", "1.0", "1.1", "1.2", "1.3")
    assert {claim.mark for claim in found.values()} == {"–"}


@pytest.mark.parametrize("query", [{"head_page": "9.9"}, {"heads_sort": "nonsense"}, {"heads_check": "x"}])
def test_a_stale_link_opens_the_table(query, table):
    app = app_page("heads", model="induction-2-attn", **query)
    assert not app.error and chart(app) == spec(heads_figure(table))


@pytest.mark.parametrize("name", ["winograd-1-hand", "winograd-average", "latin-square-1-head"])
def test_other_models_have_a_sensible_page(name):
    app = app_page("heads", model=name)
    assert not app.error and not app.exception and app.get("plotly_chart")


def test_a_model_without_layers_says_so():
    app = app_page("heads", model="bigram-0")
    assert not app.error and "has no layers" in text(app) and not app.get("plotly_chart")


def test_the_first_visit_shows_what_is_quick_before_heads_are_cut(monkeypatch):
    early = []
    monkeypatch.setattr(heads_parts, "preview", lambda table, head: early.append((table, head)))
    heads_parts._cut_before.clear()
    app = app_page("heads", model="induction-2-attn", head_page="1.2")
    ((table, head),) = early
    assert head == "1.2" and "prefix_matching" in [column.key for column in table.columns] and not table.cut_on
    assert heads_parts.table(app.session_state.view.entry.at(), True).cut_on
    app.run()
    assert len(early) == 1


def test_what_a_model_has_not_is_said_in_a_line(runs):
    recipe = load_recipe(content("models") / "winograd-1-attn" / "recipe.toml")
    small = replace(recipe, training=replace(recipe.training, steps=1))
    train(replace(small, name="post", model=replace(recipe.model, norm="post")))
    train(replace(small, name="many", model=replace(recipe.model, n_heads=32, d_head=2)))
    cache._entries.clear()
    app = app_page("heads", model="post", head_page="0.1")
    assert not app.error and any("LayerNorm after each addition" in caption.value for caption in app.caption)
    app = app_page("heads", model="many")
    assert not app.error and not any(c.interval for c in heads_parts.table(_key("many"), False).columns)
    app.toggle(key="heads_cut").set_value(True).run()
    assert "without it the held-out loss" in text(app) or "No head alone is surely worth" in text(app)


def _key(name):
    return next(e for e in cache.entries()[0] if e.name == name).at()


def test_the_python_shown_makes_the_figure_shown(table):
    key, scope = _key("induction-2-attn"), {}
    for rank, head in ((None, None), ("copying", None), (None, "1.0")):
        *lines, last = heads_parts.snippet(key, rank, head).strip().splitlines()
        again = [line for line in lines if "read_heads(" not in line or "table" not in scope]  # the same each time
        exec("\n".join([*again, f"figure = {last}"]), scope)
        expected = heads_figure(table, rank) if head is None else scores_figure(table, head)
        assert scope["figure"].to_json() == expected.to_json()


def test_downloads_hold_every_number(table):
    rows = heads_parts.records(table)
    assert len(rows) == 8 * len(table.columns) and json.dumps(rows)
    row = next(r for r in rows if r["head"] == "1.3" and r["measure"] == "prefix_matching")
    assert row["value"] == table.column("prefix_matching").values[7] and row["role"] == "induction" and row["outside"]
