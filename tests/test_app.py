"""The app as a script: it opens, takes what it is given, and never answers with a traceback."""

import json
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import workbench as wb
from circuits import attention_maps
from workbench.content import content
from workbench.figures import attention_figure, attention_rows, figure_html
from workbench.pages import cache, export, pairs
from workbench.pages.cache import Entry
from workbench.recipes import load_recipe
from workbench.training import train

SENTENCE = "the animal did not cross the street because it was too tired , so the"
OTHER = "the animal did not cross the street because it was too wet , so the"
SHIPPED = [path.parent.name for path in content("models").glob("*/run.json")]


def opened(**query):
    app = AppTest.from_file(str(content("app.py")), default_timeout=60)
    for key, value in query.items():
        app.query_params[key] = value
    app.run()
    assert not app.exception
    return app


def shown(app):
    """Titles and values of the chart's maps."""
    figure = json.loads(app.get("plotly_chart")[0].proto.spec)
    return [trace["name"] for trace in figure["data"] if trace["type"] == "heatmap"]


def text(app):
    return " ".join([*(m.value for m in app.markdown), *(h.proto.body for h in app.get("html"))])


def test_opens_on_a_minimal_pair():
    app = opened()
    assert app.title[0].value == "Attention"
    assert app.session_state.view.prompt == SENTENCE and app.session_state.view.against == OTHER
    assert app.session_state.view.entry.name == "winograd-2" and app.session_state.view.destination == 14
    assert shown(app)[:3] == ["block 1 · mean of 4 heads · A", "B", "B − A"] and len(shown(app)) == 6
    assert "From 14 ‘the’, block 1 looks most at" in text(app)


def test_shaded_words_show_the_models_numbers():
    app, run = opened(), wb.load("winograd-2")
    for prompt in (SENTENCE, OTHER):
        tokens = run.encode(prompt)
        for _, weights in attention_rows(attention_maps(run.model, tokens), run.str_tokens(tokens)):
            for weight in weights:
                assert f"<small>{weight:.2f}</small>" in text(app)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_model_opens(name):
    app = opened(model=name)
    assert app.session_state.view.entry.name == name
    assert not app.error
    assert bool(app.get("plotly_chart")) == bool(app.session_state.view.entry.heads)


def test_a_model_without_layers_says_so_and_still_predicts():
    app = opened(model="bigram-0")
    assert "bigram-0 has no layers" in text(app) and "▸" in text(app)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("the zebra did", "unknown word 'zebra'"),
        ("   ", "the prompt is empty"),
        (" ".join(["the"] * 400), "400 tokens"),
    ],
)
def test_a_bad_prompt_is_answered_in_the_librarys_words(prompt, message):
    with pytest.raises(wb.WorkbenchError) as error:
        wb.load("winograd-2").encode(prompt)
    app = opened()
    app.text_area(key="prompt").set_value(prompt).run()
    assert not app.exception
    assert [e.value for e in app.error] == [str(error.value)] and message in app.error[0].value
    app.text_area(key="prompt").set_value(SENTENCE).run()  # the page stands
    assert not app.error and len(shown(app)) == 6


def test_a_bad_second_prompt_leaves_the_first():
    app = opened(pair=pairs.TEXT, against="the zebra")
    assert app.error[0].value.startswith("B: unknown word 'zebra'")
    assert shown(app) == ["block 1 · mean of 4 heads", "block 2 · mean of 4 heads"]


def test_prompts_of_different_lengths_have_no_difference():
    app = opened(pair=pairs.TEXT, against="the animal did")
    assert shown(app)[:2] == ["block 1 · mean of 4 heads · A", "B"] and "B − A" not in shown(app)
    caption = next(c.value for c in app.caption if "positions do not correspond" in c.value)
    assert "A has 15 words and B 3" in caption and "last position, 2 ‘did’" in caption


def test_one_word_and_no_pair():
    app = opened(prompt="the", pair=pairs.NONE)
    assert app.session_state.view.destination == 0
    assert shown(app) == ["block 1 · mean of 4 heads", "block 2 · mean of 4 heads"]


def test_a_permalink_is_restored():
    app = opened(model="winograd-2", prompt=OTHER, pair=pairs.NOUNS, at="tired", head="1.2")
    assert app.session_state.view.prompt == OTHER
    assert app.session_state.view.against == OTHER.replace("animal", "?").replace("street", "animal").replace(
        "?", "street"
    )
    assert app.session_state.view.destination == 14  # ‘tired’ is not in this prompt
    assert shown(app)[0] == "block 2 · head 1.2 · A"
    assert opened(at="tired").session_state.view.destination == 11


@pytest.mark.parametrize(
    "query", [{"at": "99 zzz"}, {"head": "9.9"}, {"pair": "nonsense"}, {"seed": "77"}, {"seed": "x"}]
)
def test_a_stale_permalink_opens_the_usual_view(query):
    app = opened(**query)
    assert app.session_state.view.destination == 14 and len(shown(app)) == 6


def test_an_unknown_model_is_named():
    app = opened(model="winograd-99")
    assert app.warning[0].value == "No model is called 'winograd-99' here; this is winograd-2."


def test_changing_the_task_takes_its_own_example():
    app = opened(head="1.2")
    app.selectbox(key="task").set_value("induction").run()
    assert not app.exception and not app.error
    assert app.session_state.view.run.task.name == "induction" and app.session_state.view.against is None
    assert app.session_state.head == "mean"


def test_shuffle_takes_a_held_out_example():
    app = opened()
    next(b for b in app.button if b.label == "shuffle").click().run()
    assert app.session_state.view.prompt in pairs.examples(wb.load_task("winograd"))


def test_position_follows_the_prompt_unless_chosen():
    app = opened()
    app.text_area(key="prompt").set_value("the animal did").run()
    assert app.session_state.view.destination == 2
    app.text_area(key="prompt").set_value(SENTENCE).run()
    assert app.session_state.view.destination == 14


def test_a_run_that_cannot_be_read_is_named_quietly(runs):
    folder = runs / "mine" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text('task = "winograd"\n')
    (folder / "run.json").write_text("{")
    app = opened()
    assert any(str(Path("mine") / "seed-0") in caption.value for caption in app.caption) and not app.error


def test_pairs_change_one_thing_and_twice_is_back():
    task = wb.load_task("winograd")
    assert pairs.counterpart(task, SENTENCE, pairs.ADJECTIVE) == OTHER
    assert pairs.counterpart(task, OTHER, pairs.ADJECTIVE) == SENTENCE
    nouns = pairs.counterpart(task, SENTENCE, pairs.NOUNS)
    assert nouns and nouns.startswith("the street did not cross the animal")
    assert pairs.counterpart(task, nouns, pairs.NOUNS) == SENTENCE
    assert pairs.counterpart(task, "the animal did", pairs.ADJECTIVE) is None
    assert pairs.counterpart(task, "the animal did", pairs.NOUNS) is None
    assert pairs.counterpart(task, SENTENCE, pairs.NONE) is None
    induction = wb.load_task("induction")
    every = pairs.examples(induction)
    assert pairs.counterpart(induction, every[-1], pairs.NEXT) == every[0]


@pytest.mark.parametrize("head", [None, (1, 2)])
def test_the_python_shown_makes_the_figure_shown(head):
    run = wb.load("winograd-2")
    (entry,) = (e for e in cache.entries()[0] if e.name == "winograd-2")
    code = export.snippet(entry, [SENTENCE, OTHER], head, 14)
    *lines, last = code.strip().splitlines()
    scope: dict = {}
    exec("\n".join([*lines, f"figure = {last}"]), scope)
    a, b = (run.encode(prompt) for prompt in (SENTENCE, OTHER))
    maps_a, maps_b = attention_maps(run.model, a), attention_maps(run.model, b)
    expected = attention_figure(
        maps_a, run.str_tokens(a), maps_b, run.str_tokens(b), head, 14,
        vocabulary=run.task.vocabulary.words, roles=run.task.roles,
    )  # fmt: skip
    assert scope["figure"].to_json() == expected.to_json()


def test_downloads_hold_every_number_and_need_no_network():
    run = wb.load("winograd-2")
    tokens = run.encode(SENTENCE)
    maps, strings = attention_maps(run.model, tokens), run.str_tokens(tokens)
    lines = export.numbers_csv([(maps, strings)]).splitlines()
    assert len(lines) == 1 + 2 * 5 * 120  # a header; two blocks of four heads and their mean; the lower triangle
    assert float(lines[-1].rpartition(",")[2]) == pytest.approx(maps.patterns[1, 3, 14, 14].item())
    entry = Entry("winograd-2", 0, "winograd", "winograd", "", "held-out 100.0 %", True, run.key, ())
    data = json.loads(export.numbers_json(entry, run.task.vocabulary.words, [(maps, strings)]))
    assert data["prompts"][0]["tokens"] == strings
    assert data["prompts"][0]["patterns"][1][3][14] == maps.patterns[1, 3, 14].tolist()
    page = figure_html(attention_figure(maps, strings), "title")
    assert "<title>title</title>" in page and 'src="http' not in page and len(page) > 1_000_000


def test_runs_on_one_task_stand_in_one_list_wherever_their_copies_of_it_lie(tmp_path, runs):
    task = tmp_path / "my-task.toml"
    task.write_text((content("datasets") / "winograd.toml").read_text())
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text('task = "my-task.toml"\n[training]\nsteps = 1')
        train(load_recipe(tmp_path / f"{name}.toml"))
    cache._entries.clear()
    assert {entry.name: entry.task for entry in cache.entries()[0] if not entry.shipped} == {
        "one": "my-task",
        "two": "my-task",
    }
    task.write_text(task.read_text().replace("tired", "thirsty"))
    (tmp_path / "three.toml").write_text('task = "my-task.toml"\n[training]\nsteps = 1')
    train(load_recipe(tmp_path / "three.toml"))
    cache._entries.clear()
    tasks = {entry.name: entry.task for entry in cache.entries()[0] if not entry.shipped}
    assert tasks["one"] == tasks["two"] != tasks["three"] and tasks["three"].startswith("my-task ")
