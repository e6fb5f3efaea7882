"""The page on circuits: each part shows the library's numbers with their nulls, and a link restores it."""

import itertools
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import app_page

import workbench as wb
from circuits import copying_score, factoring_bugs, folded, head_skip_trigrams, singular_directions, skip_trigrams
from circuits.entries import token_circuit
from workbench.bigrams import bigrams, direct_probabilities, rows_of
from workbench.content import content
from workbench.figures import matrix_figure, next_figure, positivity_figure
from workbench.figures.heads import plus
from workbench.pages import cache, circuits_parts, circuits_text
from workbench.positivity import head_points, pair_points
from workbench.recipes import load_recipe
from workbench.tasks.generated import Bigram, SkipTrigram
from workbench.tasks.text import Text
from workbench.training import train


def text(app):
    return " ".join([*(m.value for m in app.markdown), *(h.proto.body for h in app.get("html"))]).replace("\\", "")


def spec(figure):
    return json.loads(str(figure.to_json()))


def chart(app, i=0):
    return json.loads(app.get("plotly_chart")[i].proto.spec)


def run_snippet(app):
    """What the Python of the page makes."""
    code = next(code.value for code in app.code if "import workbench" in code.value)
    *lines, last = code.strip().splitlines()
    scope: dict = {}
    exec("\n".join([*lines, f"made = {last}"]), scope)
    return scope["made"]


def test_the_ov_circuit_with_its_null():
    app = app_page("circuits", model="winograd-2", circuits_head="1.2")
    assert not app.error
    run = wb.load("winograd-2")
    words, circuit = run.task.vocabulary.words, token_circuit(run.model, "1.2", "OV")
    expected = matrix_figure(circuit.at(), words, words, ("source", "output"), "logits")
    assert chart(app) == spec(expected) == spec(run_snippet(app))
    values = circuit.at().values
    best = float(values.max())
    assert f"by {plus(best)} logits" in text(app)
    share = f"{100 * circuit.at().outside.float().mean():.1f} %"
    assert f"{share} of all 36 × 36 entries leave their band" in text(app)


def test_a_token_is_looked_up():
    app = app_page("circuits", model="winograd-2", circuits_what="QK", circuits_head="0.0", circuits_token="tired")
    run = wb.load("winograd-2")
    tired = run.task.vocabulary.token("tired")
    row = token_circuit(run.model, "0.0", "QK").at([tired]).values[0]
    assert "‘tired’ as destination: most" in text(app)
    first = run.task.vocabulary.words[int(row.argmax())]
    assert f'<td class="token">tired</td><td class="token">{first}</td><td class="number' in text(app)
    assert plus(float(row.max())) in text(app) and not app.error
    app.toggle(key="circuits_all").set_value(True).run()
    drawn = np.array(run_snippet(app).data[0].z)
    np.testing.assert_allclose(drawn, token_circuit(run.model, "0.0", "QK").at().values, atol=1e-5)


def test_eigenvalues_say_whether_a_head_copies():
    app = app_page("circuits", model="induction-2-attn", circuits_what="eigenvalues", circuits_head="1.0")
    score = copying_score(wb.load("induction-2-attn").model, draws=39).eigenvalue["1.0"].value
    assert f"circuit is {plus(score)} (by chance" in text(app) and "it mostly copies" in text(app)
    assert chart(app) == spec(run_snippet(app))
    app.segmented_control(key="circuits_side").set_value("QK").run()
    assert not app.error and "’s QK circuit" in text(app)


def test_the_plane_of_pairs_and_of_heads():
    app = app_page("circuits", model="induction-2-attn", circuits_what="OV × QK")
    points = pair_points(wb.load("induction-2-attn").model)
    assert chart(app) == spec(positivity_figure(points)) == spec(run_snippet(app))
    assert len(points) == 16 and f"{sum(p.sure and p.ov > 0.5 and p.qk > 0.5 for p in points)} of 16 pairs" in text(app)
    best = max(points, key=lambda p: p.qk)
    assert best.name.startswith("0.") and best.qk == pytest.approx(1, abs=0.02) and best.ov > 0.9
    one = app_page("circuits", model="induction-1-attn", circuits_what="OV × QK")
    heads = head_points(wb.load("induction-1-attn").model)
    assert chart(one) == spec(positivity_figure(heads, "head itself")) and "4 heads" in text(one)


def test_skip_trigrams_with_their_bugs():
    app = app_page("circuits", model="latin-square-1-head", circuits_what="skip-trigrams")
    run = wb.load("latin-square-1-head")
    assert isinstance(run.task, SkipTrigram)
    rules = run.task.rules
    found = factoring_bugs(run.model, rules)
    counts = re.search(r"Of (\d+) bugs .* invites, (\d+) are head-level .* and (\d+) behavioural", text(app))
    assert counts and [int(n) for n in counts.groups()] == [
        len(found.tokens), int(found.head_level.sum()), int(found.behavioural.sum()),
    ]  # fmt: skip
    assert int(found.behavioural.sum()) > 0 and ">behavioural</td>" in text(app)
    words = run.task.vocabulary.words
    listed = skip_trigrams(run.model, source=sorted({s for s, _ in rules}), n=24, names=words).to_frame()
    right = sum((s, d) in rules and rules[s, d] == o for s, d, o in listed[["source", "destination", "out"]].to_numpy())
    assert f"{right} are rules of the task" in text(app)
    assert run_snippet(app).equals(listed)


def test_a_deeper_model_shows_what_one_head_does():
    app = app_page("circuits", model="winograd-2", circuits_what="skip-trigrams", circuits_head="0.1")
    run = wb.load("winograd-2")
    expected = head_skip_trigrams(run.model, "0.1", 24, names=run.task.vocabulary.words).to_frame()
    assert run_snippet(app).equals(expected) and f"{expected['product'][0]:.2f} logits" in text(app) and not app.error


def test_bigrams_against_the_true_matrix():
    app = app_page("circuits", model="bigram-0")
    run = wb.load("bigram-0")
    assert isinstance(run.task, Bigram)
    found = bigrams(run)
    with torch.no_grad():
        said = run.model(torch.arange(len(found.model))[:, None])[:, 0].softmax(-1)
    torch.testing.assert_close(found.model, said, atol=1e-5, rtol=1e-4)  # without layers it is the model
    truth = torch.from_numpy(run.task.transition)
    kl = (truth * (truth / said).log()).sum(1)
    stationary = torch.from_numpy(run.task.stationary)
    assert found.mean_kl == pytest.approx(float((stationary * kl).sum()), abs=1e-5) and found.mean_kl < 0.001
    assert found.null_kl > 100 * found.mean_kl
    assert f"is {found.mean_kl:.4f} nats a token (KL) from the task’s transition matrix" in text(app)
    at = int(found.share.argmax())
    words = run.task.vocabulary.words
    rows = [(words[i], model, true) for i, model, true in rows_of(found, at)]
    expected = next_figure(rows, "the true matrix")
    assert chart(app, 1) == spec(expected) == spec(run_snippet(app))
    assert not app.error and [p.options for p in app.pills if p.key == "circuits_what"] == [["bigrams"]]


def test_bigrams_are_counted_where_there_is_no_matrix():
    run = wb.load("winograd-2")
    found = bigrams(run)
    the, words = run.task.vocabulary.token("the"), run.task.vocabulary.words
    rows = run.task.train.tolist()
    followers = [b for row in rows for a, b in itertools.pairwise(row) if a == the]
    dog = words.index("dog")
    assert float(found.truth[the, dog]) == pytest.approx(followers.count(dog) / len(followers))
    assert not found.exact and float(found.share.sum()) == pytest.approx(1)
    # of a model with LayerNorm: what it says if nothing is written after the embedding
    model = folded(run.model)
    silent = ["blocks.0.hook_attn_out", "blocks.0.hook_mlp_out", "blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"]
    hooks: list[Any] = [(name, lambda x, hook: 0 * x) for name in [*silent, "hook_pos_embed"]]
    logits = model.run_with_hooks(torch.arange(36)[:, None], fwd_hooks=hooks)
    torch.testing.assert_close(direct_probabilities(run.model), logits[:, 0].softmax(-1), atol=1e-4, rtol=1e-3)
    app = app_page("circuits", model="winograd-2", circuits_what="bigrams")
    assert not app.error and "how often each token followed in training" in text(app)


def test_singular_directions_with_their_null():
    app = app_page("circuits", model="winograd-2", circuits_what="singular directions", circuits_head="1.2")
    run = wb.load("winograd-2")
    found = singular_directions(run.model, "1.2", "OV")
    low, high = found.share_by_chance[0].tolist()
    assert f"holds {100 * float(found.share[0]):.1f} % of its squared singular values" in text(app)
    assert f"(by chance {100 * low:.1f} % … {100 * high:.1f} %)" in text(app)
    assert run_snippet(app).equals(found.to_frame(run.task.vocabulary.words)) and not app.error


@pytest.mark.parametrize(
    "query", [{"circuits_what": "x"}, {"circuits_head": "9.9"}, {"circuits_token": "zebra"}, {"circuits_side": "x"}]
)
def test_a_stale_link_opens_the_usual_view(query):
    app = app_page("circuits", model="winograd-2", **query)
    assert not app.error and app.session_state.circuits_what == "OV" and app.session_state.circuits_head == "0.0"


@pytest.fixture
def unusual(runs):
    recipe = load_recipe(content("models") / "winograd-1-attn" / "recipe.toml")
    small = replace(recipe, training=replace(recipe.training, steps=1))
    train(replace(small, name="post", model=replace(recipe.model, norm="post")))
    train(replace(small, name="replacing", model=replace(recipe.model, residual=False)))
    train(replace(small, name="rotary", model=replace(recipe.model, positions="rotary", n_heads=32, d_head=2)))
    cache._entries.clear()


def test_every_part_of_an_unusual_model_shows_or_says_why(unusual):
    parts = list(circuits_text.EXPLANATIONS)
    for name in ("post", "replacing", "rotary"):
        app = app_page("circuits", model=name)
        for what in parts:
            app.pills(key="circuits_what").set_value(what).run()
            assert not app.exception and len(app.error) <= 1
            assert not app.error or "This page could not" not in app.error[0].value
    assert len(circuits_parts.points(_key("rotary"))[0]) == 32


def _key(name):
    return next(e for e in cache.entries()[0] if e.name == name).at()


def test_a_large_vocabulary_is_searched(made_up_text, runs):
    (runs / "recipe").mkdir(parents=True)
    sizes = "n_layers = 1\nn_heads = 2\nd_model = 16\nd_mlp = 0\n[training]\nsteps = 1\n"
    (runs / "recipe" / "text.toml").write_text(f'task = "shakespeare"\n[model]\n{sizes}')
    train(load_recipe(runs / "recipe" / "text.toml"))
    cache._entries.clear()
    app = app_page("circuits", model="text")
    assert not app.error and not app.get("plotly_chart") and "Raised most" in text(app)
    words = wb.load("text").task.vocabulary.words
    word = next(w for w in words if w.strip() == "king")
    app.selectbox(key="circuits_token").set_value(word.replace(" ", "·")).run()
    assert not app.error and "king’ as source: most" in text(app)
    assert "value" in run_snippet(app).columns
    app.pills(key="circuits_what").set_value("bigrams").run()
    assert not app.error and "how often each token followed" in text(app)
    followed = list(itertools.pairwise(wb.load("text").task.vocabulary.encode(made_up_text)[: len(_training("text"))]))
    found = bigrams(wb.load("text"))
    first, second = followed[0]
    of_first = [b for a, b in followed if a == first]
    assert float(found.truth[first, second]) == pytest.approx(of_first.count(second) / len(of_first))


def _training(name):
    task = wb.load(name).task
    assert isinstance(task, Text)
    return task.parts[0]
