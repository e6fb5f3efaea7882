"""The app as a script: it opens, takes what it is given, and never answers with a traceback."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from support import app_page, deep_run

import workbench as wb
from circuits import attention_maps, head_scores
from circuits.attention import contribution_maps, head_effects, moved_maps
from workbench.content import content
from workbench.figures import attention_figure, attention_rows, figure_html, style
from workbench.pages import attention_parts, cache, errors, export, pairs, show
from workbench.pages.cache import Entry, Side
from workbench.recipes import load_recipe
from workbench.tasks import load
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


def shown(app, i=0):
    """Titles of the maps in a chart."""
    figure = json.loads(app.get("plotly_chart")[i].proto.spec)
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
    code = export.snippet([Side(entry, SENTENCE), Side(entry, OTHER)], head, 14)
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
    lines = show.as_csv(export.records([(maps, strings)])).splitlines()
    assert len(lines) == 1 + 2 * 5 * 120  # a header; two blocks of four heads and their mean; the lower triangle
    assert float(lines[-1].rpartition(",")[2]) == pytest.approx(maps.patterns[1, 3, 14, 14].item())
    entry = Entry("winograd-2", 0, "winograd", "winograd", "", "held-out 100.0 %", True, run.key, ())
    data = export.arrays([Side(entry, SENTENCE)], run.task.vocabulary.words, [(maps, strings)])
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


def heads_shown(app):
    """The names of the thumbnails in their order, and the texts under them."""
    figure = json.loads(app.get("plotly_chart")[1].proto.spec)
    heads, names = figure["data"]
    return heads["customdata"], names["text"]


def numbers_under_words(app):
    return re.findall(r"<small>([^<]*)</small>", text(app))


def test_cells_weighted_by_value_norm_and_by_a_logit_are_the_librarys():
    run = wb.load("winograd-2")
    a, b = (run.encode(prompt) for prompt in (SENTENCE, OTHER))
    app = opened(cells="× value norm")
    expected = [moved_maps(run.model, tokens).mean[layer, 14] for layer in range(2) for tokens in (a, b)]
    assert numbers_under_words(app) == [f"{value:.2f}" for row in expected for value in row.tolist()]
    app.segmented_control(key="cells").set_value("→ a logit").run()
    assert not app.exception
    animal, street = (run.task.vocabulary.token(word) for word in ("animal", "street"))
    assert app.selectbox(key="logit").value == "animal − street"  # what sets the two answers apart
    maps = [contribution_maps(run.model, tokens, animal, street) for tokens in (a, b)]
    expected = [each.patterns[layer, :, 14].sum(0) for layer in range(2) for each in maps]
    assert numbers_under_words(app) == [style.signed(value) for row in expected for value in row.tolist()]
    assert "adds most to ‘animal’ − ‘street’ from" in text(app) and "block 1 · sum of 4 heads · A" in shown(app)
    app.selectbox(key="logit").set_value("street").run()
    alone = contribution_maps(run.model, a, street).patterns[0, :, 14].sum(0)
    assert numbers_under_words(app)[:15] == [style.signed(value) for value in alone.tolist()]


def test_the_logit_follows_the_prompt_unless_chosen():
    app = opened(cells="→ a logit", pair=pairs.NONE)
    assert app.selectbox(key="logit").value == "animal"
    app.text_area(key="prompt").set_value(OTHER).run()
    assert app.selectbox(key="logit").value == "street"
    app.selectbox(key="logit").set_value("tired").run()
    app.text_area(key="prompt").set_value(SENTENCE).run()
    assert app.selectbox(key="logit").value == "tired" and not app.exception


def test_who_looks_at_a_word_is_its_column():
    app = opened(way="who looks at it", at="tired", pair=pairs.NONE, head="0.1")
    run = wb.load("winograd-2")
    column = attention_maps(run.model, run.encode(SENTENCE)).patterns[0, 1, 11:, 11]
    assert numbers_under_words(app) == [f"{value:.2f}" for value in column.tolist()]
    assert "At 11 ‘tired’, block 1 · head 0.1 looks most from" in text(app)


def test_heads_are_ranked_by_their_effect_on_this_prediction():
    app = opened()
    assert heads_shown(app)[0] == [f"{layer}.{head}" for layer in range(2) for head in range(4)]
    app.selectbox(key="rank").set_value("effect here").run()
    assert not app.exception
    run = wb.load("winograd-2")
    a, b = (run.task.vocabulary.token(word) for word in ("animal", "street"))
    effects = head_effects(run.model, run.encode(SENTENCE), 14, a, b, reference=run.task.held_out)
    order = sorted(range(8), key=lambda i: -float(effects.scores.flatten()[i]))
    names, texts = heads_shown(app)
    assert names == [f"{i // 4}.{i % 4}" for i in order]
    for name, said in zip(names, texts, strict=True):
        one = effects[name]
        assert said.startswith(f"<b>{name}</b> {style.signed(one.value)}<br>")
        assert "…".join(style.signed(float(end)) for end in one.band) in said  # its null beside it
    assert any("what ‘animal’ − ‘street’ loses at 14 ‘the’" in caption.value for caption in app.caption)


def test_heads_are_ranked_by_what_they_do_on_random_sequences():
    app = opened(model="induction-2-attn", rank="induction")
    scores = head_scores(wb.load("induction-2-attn").model, draws=39)["prefix_matching"]
    names, _ = heads_shown(app)
    assert names == sorted(names, key=lambda name: -scores[name].value)
    assert scores[names[0]].value > 0.3  # it has induction heads
    app.selectbox(key="rank").set_value("entropy").run()
    assert any("the sharpest first" in caption.value for caption in app.caption)


def test_a_view_that_a_model_has_not_is_refused_in_a_line(runs):
    recipe = load_recipe(content("models") / "winograd-1-attn" / "recipe.toml")
    small = replace(recipe, name="mine", training=replace(recipe.training, steps=1))
    train(replace(small, model=replace(recipe.model, norm="post")))
    cache._entries.clear()
    app = opened(model="mine", cells="→ a logit", pair=pairs.NONE)
    assert "LayerNorm after each addition" in app.info[0].value and app.info[0].value.endswith("Shown is attention.")
    maps = attention_maps(wb.load("mine").model, wb.load("mine").encode(SENTENCE))
    assert numbers_under_words(app) == [f"{value:.2f}" for value in maps.mean[0, 14].tolist()]


def test_role_means_are_the_mean_over_the_held_out_sentences():
    app, run = opened(roles="true", head="1.2"), wb.load("winograd-2")
    figure = json.loads(app.get("plotly_chart")[2].proto.spec)
    _, found = run.model.run_with_cache(run.task.held_out[:, :15])
    mean = found["blocks.1.attn.hook_pattern"][:, 2].mean(0)
    (panel,) = figure["data"]
    for i, destination in enumerate((1, 6, 11, 14)):
        for j, source in enumerate((1, 6, 11, 14)[: i + 1]):
            assert panel["text"][i][j] == f"{float(mean[destination, source]):.2f}"
    assert any("over 36 clusters" in caption.value for caption in app.caption)
    assert len(opened().get("plotly_chart")) == 2  # not computed before it is asked for


def test_the_errors_are_the_wrong_held_out_sentences_and_a_click_shows_one():
    run = wb.load("winograd-1")
    task = run.task
    said = run.model(task.held_out[:, :15])[:, 14].detach().softmax(-1)
    wrong = (said.argmax(-1) != task.held_out[:, 15]).nonzero().flatten().tolist()
    assert len(wrong) == round(288 * (1 - run.held_out_accuracy)) > 0
    expected = {task.decode(task.held_out[i, :15]) for i in wrong}
    found = errors.mistakes(run, 10_000)
    assert (found.n, found.wrong) == (288, len(wrong)) and {m.prompt for m in found.listed} == expected
    surest = max(wrong, key=lambda i: float(said[i].max()))
    first = found.listed[0]
    assert first.prompt == task.decode(task.held_out[surest, :15])
    assert first.said == task.vocabulary.words[int(said[surest].argmax())]
    assert first.answer_probability == pytest.approx(float(said[surest, task.held_out[surest, 15]]), abs=1e-5)

    app = opened(model="winograd-1", wrong="true", at="tired")
    assert any(caption.value.startswith(f"A: {len(wrong)} of 288") for caption in app.caption)
    app.button(key="mistake 0").click().run()
    assert app.session_state.view.prompt == first.prompt and app.session_state.view.destination == 14


def test_a_model_without_errors_says_so():
    app = opened(wrong="true")
    assert any("right on all 288 held-out sequences" in caption.value for caption in app.caption)


def test_two_checkpoints_of_one_prompt_side_by_side():
    run, before = wb.load("induction-2-attn"), wb.load("induction-2-attn", step=0)
    app = opened(model="induction-2-attn", pair=pairs.CHECKPOINT, step_b="0", head="1.0")
    tokens = run.encode(app.session_state.view.prompt)
    assert shown(app) == ["block 2 · head 1.0 · A · end", "B · step 0", "B − A"]
    rows = [attention_maps(one.model, tokens).patterns[1, 0, -1].tolist() for one in (run, before)]
    assert [n for n in numbers_under_words(app) if n != "&nbsp;"] == [
        f"{value:.2f}" for row in rows for value in row if len(row) <= style.MAX_TOUCH or value >= 0.005
    ]


def test_two_seeds_of_one_prompt_side_by_side(runs):
    recipe = load_recipe(content("models") / "winograd-1-attn" / "recipe.toml")
    small = replace(recipe, name="mine", training=replace(recipe.training, steps=2))
    for seed in (0, 3):
        train(replace(small, seeds=replace(recipe.seeds, initialisation=seed)))
    cache._entries.clear()
    app = opened(model="mine", pair=pairs.SEED, seed_b="3")
    assert shown(app) == ["block 1 · mean of 4 heads · A · seed 0", "B · seed 3", "B − A"]
    tokens = wb.load("mine").encode(SENTENCE)
    rows = [attention_maps(wb.load("mine", seed).model, tokens).mean[0, 14] for seed in (0, 3)]
    assert numbers_under_words(app) == [f"{value:.2f}" for row in rows for value in row.tolist()]
    app.selectbox(key="model").set_value("winograd-1-attn").run()  # which has one seed
    assert not app.exception and app.session_state.view.against == OTHER


@pytest.mark.parametrize(
    ("sides", "options"),
    [
        ([SENTENCE, OTHER], {"direction": "to", "measure": "moved"}),
        ([SENTENCE], {"measure": "logit", "target": cache.Target(1, 5), "what": "‘animal’ − ‘street’", "layers": [1]}),
    ],
)
def test_the_python_of_every_view_makes_its_figure(sides, options):
    run = wb.load("winograd-2")
    (entry,) = (e for e in cache.entries()[0] if e.name == "winograd-2")
    code = export.snippet([Side(entry, prompt) for prompt in sides], None, 11, **options)
    *lines, last = code.strip().splitlines()
    scope: dict = {}
    exec("\n".join([*lines, f"figure = {last}"]), scope)
    given = []
    for prompt in sides:
        tokens = run.encode(prompt)
        moved = options["measure"] == "moved"
        maps = moved_maps(run.model, tokens) if moved else contribution_maps(run.model, tokens, 1, 5)
        given += [maps, run.str_tokens(tokens)]
    drawn = {name: options[name] for name in ("direction", "what", "layers") if name in options}
    expected = attention_figure(
        *given, destination=11, vocabulary=run.task.vocabulary.words, roles=run.task.roles, **drawn
    )
    assert scope["figure"].to_json() == expected.to_json()
    two = export.snippet([Side(entry, SENTENCE), Side(entry, SENTENCE, 0)], None, 14, letters=("A · end", "B · step 0"))
    assert 'other = wb.load("winograd-2", step=0)' in two and two.count("run.encode(") == 1


@pytest.fixture
def text_run(made_up_text, runs):
    """A text model of byte pairs; afterwards the text may be taken away."""
    folder = runs / "recipe"
    folder.mkdir(parents=True)
    (folder / "plays.toml").write_text(
        'task = "shakespeare"\n[model]\nn_layers = 1\nn_heads = 2\nd_model = 16\nd_mlp = 0\n[training]\nsteps = 1\n'
    )
    train(load_recipe(folder / "plays.toml"))
    cache._entries.clear()
    return wb.load("plays")


def test_a_text_keeps_its_blanks_and_shows_them(text_run):
    prompt = "The king.\n  His fool"
    app = opened(model="plays", prompt=prompt)
    tokens = text_run.encode(prompt)
    assert app.session_state.view.prompt == prompt and not app.error
    assert app.session_state.view.destination == tokens.shape[1] - 1
    tokens_shown = [style.escaped(token) for token in text_run.str_tokens(tokens)]
    assert any("↵" in token for token in tokens_shown) and any(token.startswith("·") for token in tokens_shown)
    assert all(f">{token}</span>" in text(app) for token in tokens_shown)
    next(b for b in app.button if b.label == "shuffle").click().run()
    assert not app.exception and not app.error and app.session_state.view.prompt in pairs.examples(text_run.task)
    app.text_area(key="prompt").set_value("").run()
    assert app.error[0].value == "the prompt is empty; write some text"


def test_a_text_that_is_not_here_is_said_in_one_line(text_run, monkeypatch, tmp_path):
    monkeypatch.delenv("WORKBENCH_SHAKESPEARE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    load._load.cache_clear()
    cache.run_of.clear()
    missing = "the text of shakespeare is not here; run: workbench data fetch shakespeare"
    app = opened(model="plays", wrong="true", pair=pairs.NEXT, rank="effect here")
    assert [e.value.startswith(missing) or e.value.startswith(f"B: {missing}") for e in app.error] == [True, True]
    assert shown(app) and heads_shown(app)
    next(b for b in app.button if b.label == "shuffle").click().run()
    assert not app.exception and app.error[0].value.startswith(missing)


def test_a_deep_model_and_a_long_prompt_stay_usable(tmp_path, runs):
    deep_run(tmp_path, 256)
    app = opened(model="deep")
    assert len(shown(app)) == 3 and len(heads_shown(app)[0]) == 144  # three blocks at once, all heads at a glance
    assert "effect here" not in app.selectbox(key="rank").options
    assert all(len(chart.proto.spec) < 4e6 for chart in app.get("plotly_chart"))
    app.selectbox(key="head").set_value("7.3").run()
    assert shown(app) == ["block 8 · head 7.3"]
