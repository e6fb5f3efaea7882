"""The Attention page as a script: its maps, ranks, pairs and errors are the library's."""

import json
import re
from dataclasses import replace

import pytest
from support import OTHER_SENTENCE, SENTENCE, deep_run, opened, shown, text

import workbench as wb
from circuits import attention_maps, head_scores
from circuits.attention import contribution_maps, head_effects, moved_maps
from workbench.content import content
from workbench.figures import attention_figure, attention_rows, figure_html, style
from workbench.pages import cache, errors, export, pairs, show
from workbench.pages.cache import Entry, Side
from workbench.recipes import load_recipe
from workbench.tasks import load
from workbench.training import train


def test_opens_on_a_minimal_pair():
    app = opened()
    assert app.title[0].value == "Attention"
    assert app.session_state.view.prompt == SENTENCE and app.session_state.view.against == OTHER_SENTENCE
    assert app.session_state.view.entry.name == "winograd-2" and app.session_state.view.destination == 14
    assert shown(app)[:3] == ["block 1 · mean of 4 heads · A", "B", "B − A"] and len(shown(app)) == 6
    assert "From 14 ‘the’, block 1 looks most at" in text(app)


def test_shaded_words_show_the_models_numbers():
    app, run = opened(), wb.load("winograd-2")
    for prompt in (SENTENCE, OTHER_SENTENCE):
        tokens = run.encode(prompt)
        for _, weights in attention_rows(attention_maps(run.model, tokens), run.str_tokens(tokens)):
            for weight in weights:
                assert f"<small>{weight:.2f}</small>" in text(app)


def test_prompts_of_different_lengths_have_no_difference():
    app = opened(pair=pairs.TEXT, against="the animal did")
    assert shown(app)[:2] == ["block 1 · mean of 4 heads · A", "B"] and "B − A" not in shown(app)
    caption = next(c.value for c in app.caption if "positions do not correspond" in c.value)
    assert "A has 15 words and B 3" in caption and "last position, 2 ‘did’" in caption


def test_one_word_and_no_pair():
    app = opened(prompt="the", pair=pairs.NONE)
    assert app.session_state.view.destination == 0
    assert shown(app) == ["block 1 · mean of 4 heads", "block 2 · mean of 4 heads"]


@pytest.mark.parametrize("head", [None, (1, 2)])
def test_the_python_shown_makes_the_figure_shown(head):
    run = wb.load("winograd-2")
    (entry,) = (e for e in cache.entries()[0] if e.name == "winograd-2")
    code = export.snippet([Side(entry, SENTENCE), Side(entry, OTHER_SENTENCE)], head, 14)
    *lines, last = code.strip().splitlines()
    scope: dict = {}
    exec("\n".join([*lines, f"figure = {last}"]), scope)
    a, b = (run.encode(prompt) for prompt in (SENTENCE, OTHER_SENTENCE))
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


def heads_shown(app):
    """The names of the thumbnails in their order, and the texts under them."""
    figure = json.loads(app.get("plotly_chart")[1].proto.spec)
    heads, names = figure["data"]
    return heads["customdata"], names["text"]


def numbers_under_words(app):
    return re.findall(r"<small>([^<]*)</small>", text(app))


def test_cells_weighted_by_value_norm_and_by_a_logit_are_the_librarys():
    run = wb.load("winograd-2")
    a, b = (run.encode(prompt) for prompt in (SENTENCE, OTHER_SENTENCE))
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
    app.text_area(key="prompt").set_value(OTHER_SENTENCE).run()
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
    assert not app.exception and app.session_state.view.against == OTHER_SENTENCE


@pytest.mark.parametrize(
    ("sides", "options"),
    [
        ([SENTENCE, OTHER_SENTENCE], {"direction": "to", "measure": "moved"}),
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
