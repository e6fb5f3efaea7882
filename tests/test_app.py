"""What stands on every page: it opens, takes what it is given, and never answers with a traceback."""

from pathlib import Path

import pytest
from support import OTHER_SENTENCE, SENTENCE, app_page, opened, shown, text

import workbench as wb
from workbench.content import content
from workbench.pages import attention_parts, cache, pairs
from workbench.recipes import load_recipe
from workbench.training import train

SHIPPED = [path.parent.name for path in content("models").glob("*/run.json")]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_model_opens(name):
    app = opened(model=name)
    assert app.session_state.view.entry.name == name
    assert not app.error
    assert bool(app.get("plotly_chart")) == bool(app.session_state.view.entry.heads)


def test_a_page_that_fails_says_why_and_the_frame_stands(monkeypatch, caplog):
    monkeypatch.setattr(attention_parts, "read", lambda view: 1 / 0)
    app = opened()
    (error,) = (e.value for e in app.error)
    assert "could not be computed (ZeroDivisionError: division by zero)" in error
    assert app.title[0].value == "Attention" and app.session_state.view.prompt == SENTENCE
    assert "division by zero" in caplog.text and "attention_parts" not in error
    monkeypatch.undo()
    assert not app.run().error


@pytest.mark.parametrize("name", ["tables", "circuits", "heads"])
def test_a_page_that_reads_no_prompt_is_shown_whatever_stands_there(name):
    app = app_page(name, prompt="the zebra did")
    assert not app.error and app.get("plotly_chart")


@pytest.mark.parametrize(
    ("name", "query", "charts"),
    [("heads", {"head_page": "1.0"}, ["head_scores"]), ("training", {}, ["training_panels_chart"])],
)
def test_of_a_page_that_reads_the_prompt_in_one_place_the_rest_stands_without_it(name, query, charts):
    query |= {"model": "induction-2-attn", "prompt": "t0 zebra t1"}
    app = app_page(name, **query)
    (error,) = (e.value for e in app.error)
    assert error.startswith("unknown word 'zebra'")
    assert [chart.proto.id.rpartition("-")[2] for chart in app.get("plotly_chart")] == charts
    whole = app_page(name, **query | {"prompt": "t0 t1 t0"})
    assert not whole.error and len(whole.get("plotly_chart")) > len(charts)


def test_without_the_second_prompt_training_shows_the_first():
    app = app_page("training", model="induction-2-attn", prompt="t0 t1 t0", pair=pairs.TEXT, against="zebra")
    assert [e.value for e in app.error] == ["B: unknown word 'zebra'; nearest: t0, t1, t10, t11, t12, t13, t14, t15"]
    assert shown(app, 1) == ["block 1 · mean of 4 heads", "block 2 · mean of 4 heads"]


def test_a_refusal_quotes_words_that_are_no_letters():
    (error,) = (e.value for e in opened(prompt="zebra").error)
    assert error.startswith("unknown word 'zebra'; nearest: ',', '.', 'animal', ")


def test_roles_are_marked_only_in_a_prompt_of_the_tasks_form():
    said = "background:#D6409F"  # the key's mark of x
    assert said in text(opened()) and said in text(opened(prompt="the animal did", pair=pairs.NONE))
    for prompt in ("animal the did not", "the animal did not cross the street because it was too tired tired"):
        app = opened(prompt=prompt, pair=pairs.NONE)
        assert not app.error and said not in text(app) and "border-color" not in text(app)
    assert said not in text(opened(pair=pairs.TEXT, against="street street"))


def test_what_other_pages_need_is_imported_once_behind_the_first_page(monkeypatch):
    started, imported = [], []

    class Timer:
        daemon = False

        def __init__(self, seconds, function):
            self.then = function

        def start(self):
            started.append(self)

    monkeypatch.setattr(cache.threading, "Timer", Timer)
    monkeypatch.setattr(cache, "import_module", imported.append)
    cache.prepare.clear()
    opened().run()
    (timer,) = started
    assert timer.daemon and not imported
    timer.then()
    assert imported == ["transformer_lens.weight_processing", "workbench.head_table"]


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


def test_of_an_endless_word_a_refusal_quotes_both_ends():
    (error,) = (e.value for e in opened(prompt="x" * 10_000).error)
    assert error.startswith("unknown word 'xxx") and "x … x" in error and "x'; nearest:" in error and len(error) < 700


def test_a_bad_second_prompt_leaves_the_first():
    app = opened(pair=pairs.TEXT, against="the zebra")
    assert app.error[0].value.startswith("B: unknown word 'zebra'")
    assert shown(app) == ["block 1 · mean of 4 heads", "block 2 · mean of 4 heads"]


def test_a_permalink_is_restored():
    app = opened(model="winograd-2", prompt=OTHER_SENTENCE, pair=pairs.NOUNS, at="tired", head="1.2")
    assert app.session_state.view.prompt == OTHER_SENTENCE
    assert app.session_state.view.against == OTHER_SENTENCE.replace("animal", "?").replace("street", "animal").replace(
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
    assert pairs.counterpart(task, SENTENCE, pairs.ADJECTIVE) == OTHER_SENTENCE
    assert pairs.counterpart(task, OTHER_SENTENCE, pairs.ADJECTIVE) == SENTENCE
    nouns = pairs.counterpart(task, SENTENCE, pairs.NOUNS)
    assert nouns and nouns.startswith("the street did not cross the animal")
    assert pairs.counterpart(task, nouns, pairs.NOUNS) == SENTENCE
    assert pairs.counterpart(task, "the animal did", pairs.ADJECTIVE) is None
    assert pairs.counterpart(task, "the animal did", pairs.NOUNS) is None
    assert pairs.counterpart(task, SENTENCE, pairs.NONE) is None
    induction = wb.load_task("induction")
    every = pairs.examples(induction)
    assert pairs.counterpart(induction, every[-1], pairs.NEXT) == every[0]


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
