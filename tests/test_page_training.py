"""The training page: curves, the cursor, the map at a checkpoint, and runs that lack some of it."""

import base64
import hashlib
import json
import shutil
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from support import SENTENCE, app_page

import workbench as wb
from circuits import attention_maps
from workbench.content import content
from workbench.dynamics import PROBES, read_dynamics
from workbench.pages import cache, frame, training_parts
from workbench.recipes import load_recipe
from workbench.runs import write_results
from workbench.training import train


@pytest.fixture(autouse=True)
def fresh():
    """Runs of the test before are not those of this one."""
    cache._entries.clear()
    training_parts._unfinished.clear()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two seeds of a small model, trained for 30 steps with three checkpoints and one probe."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.toml").write_text(
        'task = "induction"\n[model]\nn_layers = 2\nn_heads = 2\nd_model = 8\nd_mlp = 0\n'
        '[training]\nsteps = 30\nbatch = 4\nlog_every = 10\ncheckpoints = 3\nprobes = ["in-context"]\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(folder))
        for seed in (0, 1):
            train(load_recipe(folder / "small.toml").with_seed(seed))
    return folder / "small"


@pytest.fixture
def small(trained, runs):
    shutil.copytree(trained, runs / "small")
    return runs / "small"


def captions(app):
    return [caption.value for caption in app.caption]


def html(app) -> str:
    return " ".join(element.proto.body for element in app.get("html"))


def charts(app):
    return [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]


def array(packed) -> np.ndarray:
    """A number array as Plotly sends it."""
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"]).reshape(
        [int(n) for n in packed["shape"].split(",")]
    )


def cursor(figure):
    return next(shape["x0"] for shape in reversed(figure["layout"]["shapes"]) if shape["type"] == "line")


def shown_python(app):
    *lines, last = next(code.value for code in app.code if "_figure(" in code.value).strip().splitlines()
    scope: dict = {}
    exec("\n".join([*lines, f"figure = {last}"]), scope)
    return json.loads(scope["figure"].to_json())


@pytest.mark.parametrize("step", [116, 481])
def test_the_cursor_and_the_map_are_those_of_the_chosen_checkpoint(step):
    app = app_page("training", model="induction-2-attn", training_step=str(step))
    assert not app.error and app.select_slider(key="training_step").value == step
    panels, maps, thumbnails = charts(app)
    assert cursor(panels) == step
    run = wb.load("induction-2-attn", step=step)
    tokens = run.encode(app.session_state.view.prompt)
    expected = attention_maps(run.model, tokens)
    heats = [trace for trace in maps["data"] if trace["type"] == "heatmap"]
    for layer, heat in enumerate(heats):
        shown = array(heat["z"])
        assert np.nan_to_num(shown) == pytest.approx(expected.mean[layer].numpy(), abs=1e-6)
    assert len(thumbnails["data"][0]["customdata"]) == 8
    dynamics = read_dynamics("induction-2-attn")
    at = dynamics.steps.tolist().index(step)
    curve = dynamics.curve("prefix_matching")
    said = app.markdown[0].value
    assert (
        f"At step {step} of 2,000, induction-2-attn seed 0: held-out loss {dynamics.held_out_loss[at]:.2f} nats" in said
    )
    assert f"the highest of 8 heads, {curve.values[at]:.2f}, {'above' if step == 481 else 'within'} what chance" in said


def test_it_opens_where_the_first_phase_change_begins_and_ends_at_the_last_step():
    app = app_page("training", model="induction-2-attn")
    assert app.select_slider(key="training_step").value == 481
    table = html(app).partition("phase change")[2]
    assert ">prefix matching<" in table and "1 of 1" in table
    app.select_slider(key="training_step").set_value(2000).run()
    assert not app.exception and "at the end)" not in app.markdown[0].value
    assert cursor(charts(app)[0]) == 2000 and any("Attention at the end" in m.value for m in app.markdown)


def test_the_python_shown_makes_the_figure_shown():
    app = app_page("training", model="induction-2-attn", training_step="116")
    assert shown_python(app) == charts(app)[0]
    app = app_page("training", model="winograd-2", training_step="700")
    assert shown_python(app) == charts(app)[0]


def test_panels_are_chosen():
    app = app_page("training", model="induction-2-attn")
    app.pills(key="training_panels").set_value(["held_out_loss", "composition.Q"]).run()
    assert not app.exception
    titles = [note["text"] for note in charts(app)[0]["layout"]["annotations"]]
    assert titles[:2] == ["held-out loss, nats", "Q-composition beyond K and V, the highest pair, z"]


def test_a_run_without_probes_shows_what_was_logged():
    app = app_page("training", model="winograd-2", training_step="700")
    assert not app.error and len(charts(app)) == 1
    line = next(line for line in wb.load("winograd-2").metrics if line["step"] == 700)
    end = wb.load("winograd-2").metrics[-1]
    assert (
        f"At step 700 of 1,500, winograd-2 seed 0: held-out loss {line['held_out_loss']:.2f} nats "
        f"({end['held_out_loss']:.2f} at the end); held-out accuracy {100 * line['held_out_accuracy']:.1f} % "
        f"({100 * end['held_out_accuracy']:.1f} % at the end, 50.0 % by chance)"
    ) in app.markdown[0].value


def test_a_model_written_by_hand_was_not_trained():
    app = app_page("training", model="winograd-1-hand")
    assert not app.error and not charts(app) and "its weights are written by hand" in app.markdown[0].value


def test_a_run_of_which_nothing_was_logged_says_what_there_is(runs):
    folder = runs / "winograd-1-attn" / "seed-0"
    shutil.copytree(content("models") / "winograd-1-attn", folder)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    app = app_page("training", model="winograd-1-attn")
    assert not app.error and not charts(app) and "nothing was logged" in app.markdown[0].value
    assert any("metrics.jsonl is damaged: its hash is not the recorded one" in caption for caption in captions(app))
    (folder / "metrics.jsonl").unlink()
    app = app_page("training", model="winograd-1-attn")
    assert not app.error and any("metrics.jsonl is missing; delete" in caption for caption in captions(app))
    assert any("workbench train winograd-1-attn --seeds 0-4" in code.value for code in app.code)


def test_seeds_without_probes_are_named(small):
    app = app_page("training", model="small")
    assert not app.error and app.pills(key="training_seeds").value == [0, 1]
    assert not any("Without probes" in caption for caption in captions(app))
    (small / "seed-1" / PROBES).unlink()
    app = app_page("training", model="small")
    told = next(caption for caption in captions(app) if "Without probes" in caption)
    assert "not drawn: seed 1;" in told and "workbench dynamics small --all-seeds --probe" in told
    app.pills(key="training_seeds").set_value([1]).run()
    assert not app.exception and not app.error
    assert charts(app)[0]["layout"]["annotations"][0]["text"].startswith("training loss")
    results = json.loads((small / "seed-1" / "run.json").read_text())
    files = {name: sha256 for name, sha256 in results["files"].items() if not name.startswith("checkpoints/")}
    write_results(small / "seed-1", results | {"files": files})
    app = app_page("training", model="small")
    assert any("they kept no checkpoints to read them from" in caption for caption in captions(app))
    app.pills(key="training_seeds").set_value([]).run()
    assert not app.exception and not app.error  # none chosen: the one of the side bar


def test_damaged_probes_are_told_and_what_was_logged_is_drawn(small):
    file = small / "seed-0" / PROBES
    file.write_text(file.read_text()[:-40])
    app = app_page("training", model="small", training_seeds="0")
    assert not app.error and any("probes.jsonl is damaged: its hash is not" in caption for caption in captions(app))
    assert charts(app)[0]["layout"]["annotations"][0]["text"].startswith("training loss")


def test_a_run_that_is_not_finished_is_listed(small):
    folder = small / "seed-7"
    shutil.copytree(small / "seed-1", folder)
    (folder / "run.json").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(lines[:-1]) + '\n{"step": 3')
    app = app_page("training", model="winograd-2")
    step = json.loads(lines[-2])["step"]
    assert f'<th scope="row">small</th><td class="wb-figure">1</td><td class="wb-figure">{step}</td>' in html(app)
    assert not app.error and any(m.value == "**Not finished**" for m in app.markdown)


@pytest.mark.parametrize(
    "query",
    [{"training_step": "99999"}, {"training_step": "x"}, {"training_seeds": "99"}, {"training_panels": "nonsense"}],
)
def test_a_stale_link_opens_the_usual_view(query):
    app = app_page("training", model="induction-2-attn", **query)
    assert not app.error and app.select_slider(key="training_step").value == 481 and len(charts(app)) == 3


def test_another_model_keeps_no_step_of_the_last():
    app = app_page("training", model="induction-2-attn", training_step="116", head="1.3")
    app.selectbox(key="task").set_value("winograd").run()
    assert not app.exception and not app.error and charts(app)


def test_a_pair_is_read_at_the_checkpoint_too(tmp_path, runs):
    recipe = load_recipe("winograd-1-attn")
    training = replace(recipe.training, steps=20, checkpoints=3)
    train(replace(recipe, name="mine", training=training))
    cache._entries.clear()
    step = wb.load("mine").checkpoints[-1]
    app = app_page("training", model="mine", training_step=str(step), prompt=SENTENCE)
    assert not app.error
    names = [trace["name"] for trace in charts(app)[1]["data"] if trace["type"] == "heatmap"]
    assert names[1:] == ["B", "B − A"]
    app = app_page("training", model="mine", training_step=str(step), prompt="the", pair="none")
    assert not app.error and len(charts(app)) == 3


def test_lines_without_a_figure_leave_a_dash(runs):
    folder = runs / "winograd-1-attn" / "seed-0"
    shutil.copytree(content("models") / "winograd-1-attn", folder)
    line = b'{"step": 1500, "loss": 0.5}'
    (folder / "metrics.jsonl").write_bytes(line)
    results = wb.load("winograd-1-attn").results
    results["files"]["metrics.jsonl"] = hashlib.sha256(line).hexdigest()
    write_results(folder, results)
    app = app_page("training", model="winograd-1-attn")
    assert not app.error and "held-out loss – nats; held-out accuracy – (50.0 % by chance)" in app.markdown[0].value


@pytest.mark.parametrize(
    "options",
    ['norm = "post"', "residual = false", "n_layers = 0", "n_layers = 5\nn_heads = 6\nd_model = 24\nd_mlp = 0"],
)
def test_models_of_every_kind_have_a_page(tmp_path, options):
    (tmp_path / "odd.toml").write_text(
        f'task = "induction"\n[model]\n{options}\n[training]\nsteps = 2\nbatch = 2\ncheckpoints = 2\n'
        'probes = ["composition", "in-context"]\n'
    )
    train(load_recipe(tmp_path / "odd.toml"))
    cache._entries.clear()
    app = app_page("training", model="odd", training_step="1")
    assert not app.error and len(charts(app)) == (1 if options == "n_layers = 0" else 3)
    assert shown_python(app) == charts(app)[0]


def test_the_command_trains_this_recipe(small):
    shipped = wb.load("winograd-2")
    assert training_parts.commands(shipped).splitlines()[0].startswith("workbench train winograd-2 --seeds 0-4")
    assert "--steps 150 " in training_parts.commands(shipped).splitlines()[1]
    own = training_parts.commands(wb.load("small"))
    assert own == f"workbench train {small / 'seed-0' / 'recipe.toml'} --seeds 0-4"
    assert load_recipe(str(small / "seed-0" / "recipe.toml")).experiment == wb.load("small").recipe.experiment


def test_every_number_drawn_is_in_the_file():
    run = read_dynamics("induction-2-attn")
    lines = list(training_parts.records([run], ["held_out_loss", "prefix_matching", "lost"]))
    assert len(lines) == 2 * len(run.steps)
    last, curve = lines[-1], run.curve("prefix_matching")
    assert last["step"] == 2000 and last["value"] == curve.values[-1] and last["chance"] == curve.bound[-1]
    assert lines[0]["chance"] is None and lines[0]["value"] == run.held_out_loss[0]


def test_what_stays_while_the_page_scrolls_has_the_pages_own_paper():
    config = tomllib.loads((content(".streamlit/config.toml")).read_text())["theme"]
    paper = f"light-dark({config['light']['backgroundColor']}, {config['dark']['backgroundColor']})"
    assert frame.LOOK.count("position: sticky") == frame.LOOK.count(paper) > 0
