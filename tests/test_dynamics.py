"""Phase changes on curves whose answer is known, files that are damaged, and the figure's own numbers."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from workbench.dynamics import (
    PROBES,
    Curve,
    Dynamics,
    Series,
    phase_change,
    phase_changes,
    read_dynamics,
    read_lines,
)
from workbench.dynamics_report import dynamics_report, sparkline
from workbench.errors import BadRun, UnknownName
from workbench.figures.dynamics import START, dynamics_figure
from workbench.recipes import ModelConfig, Recipe, TrainingConfig
from workbench.training import train

STEPS = np.array(sorted({0, *(round(2000 ** (i / 32)) for i in range(33))}))
SEEDS = range(100)


def sigmoid(middle: float, width: float, low: float = 0.0, high: float = 0.9) -> np.ndarray:
    """In the logarithm of the step: 10 % of the rise at middle / 9^width, 90 % at middle · 9^width."""
    return low + (high - low) / (1 + (np.maximum(STEPS, 0.1) / middle) ** (-1 / width))


def curve(values, measure="prefix_matching", sd=0.02, parts=4):
    return Curve(measure, np.asarray(values), np.zeros(len(STEPS)), np.full(len(STEPS), sd), parts)


def noisy(values, seed, sd=0.02):
    return values + sd * np.random.default_rng(seed).standard_normal(len(STEPS))


def grid(step: float) -> int:
    """The number of the first probed step from this one on."""
    return int(np.searchsorted(STEPS, step))


@pytest.mark.parametrize("middle", [40, 300, 700])
def test_a_rise_is_found_within_one_probed_step_of_where_it_crosses(middle):
    begin, end = middle / 9**0.15, middle * 9**0.15  # a tenth and nine tenths of .9, far outside four heads' chance
    misses = []
    for seed in SEEDS:
        found = phase_change(STEPS, curve(noisy(sigmoid(middle, 0.15), seed)), seed)
        assert found is not None and found.before < found.begins <= found.ends
        misses += [grid(found.begins) - grid(begin), grid(found.ends) - grid(end)]
        assert found.plateau == pytest.approx(0.9, abs=0.06)
    assert np.mean(np.abs(misses) <= 1) > 0.97


@pytest.mark.parametrize("measure", ["prefix_matching", "composition.K", "in_context"])
def test_noise_has_no_phase_change(measure):
    size = {"prefix_matching": 0.1, "composition.K": 1.0, "in_context": 0.05}[measure]
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        highest = size * rng.standard_normal((len(STEPS), 16)).max(axis=1)
        assert phase_change(STEPS, curve(highest, measure, size, 16)) is None


@pytest.mark.parametrize(
    "values",
    [
        sigmoid(300, 0.15, high=0.25),  # sure, but smaller than what counts
        sigmoid(100, 0.1) - sigmoid(400, 0.1),  # comes and goes
        np.full(len(STEPS), 0.8),  # was never in its null
        sigmoid(1990, 0.02),  # one step at the very end is no plateau
    ],
)
def test_what_is_no_phase_change_is_none(values):
    for seed in SEEDS:
        assert phase_change(STEPS, curve(noisy(values, seed))) is None


def test_one_odd_step_neither_begins_nor_ends_a_change():
    clean = sigmoid(300, 0.1)
    odd = clean.copy()
    odd[12], odd[-2] = 0.9, 0.0
    before, after = (phase_change(STEPS, curve(values)) for values in (clean, odd))
    assert before is not None and after is not None
    assert (before.begins, before.ends) == (after.begins, after.ends)


def test_a_null_that_grows_with_training_delays_the_beginning():
    values, moving = sigmoid(300, 0.3), np.zeros(len(STEPS))
    early = phase_change(STEPS, Curve("prefix_matching", values, moving, np.full(len(STEPS), 0.01), 4))
    moving = np.where((STEPS > 100) & (STEPS < 350), 0.5, 0.0)
    late = phase_change(STEPS, Curve("prefix_matching", values, moving, np.full(len(STEPS), 0.01), 4))
    assert early is not None and late is not None and early.begins < 200 and late.begins > 350


def test_the_bound_is_the_quantile_of_the_largest_of_so_many():
    bound = curve(sigmoid(300, 0.1), sd=1.0, parts=16).bound[0]
    largest = np.random.default_rng(0).standard_normal((200_000, 16)).max(axis=1)
    assert (largest > bound).mean() == pytest.approx(0.0247, abs=0.002)  # 1 − (1 − .05 / 32)^16
    assert curve(sigmoid(300, 0.1), sd=1.0, parts=1).bound[0] == pytest.approx(1.959964, abs=1e-5)


def dynamics(seed: int, middle: float | None, model="made", more=()) -> Dynamics:
    """One head whose prefix matching rises at `middle`, beside one that never does."""
    head = np.zeros(len(STEPS)) if middle is None else sigmoid(middle, 0.05)
    scores = np.stack([np.full(len(STEPS), 0.01), head], axis=1).reshape(-1, 1, 2)
    series = {"prefix_matching": Series("prefix_matching", scores, 0 * scores, 0 * scores + 0.01)}
    loss, none = np.linspace(4, 1, len(STEPS)), np.full(len(STEPS), np.nan)
    series |= {name: Series(name, -loss, 0 * loss, 0 * loss + 0.1) for name in more}
    return Dynamics(
        model, seed, PATH, STEPS, none, loss, 1 - loss / 4, np.zeros((len(STEPS), 3)), series, {}, ()
    )  # fmt: skip


PATH = Path("made")


def test_over_seeds_the_middle_one_counts_and_those_without_are_told():
    (found,) = phase_changes([dynamics(i, m) for i, m in enumerate((200, 250, 300, 500, None))], ["prefix_matching"])
    begins = sorted(change.begins for change in found.changes)
    assert (found.found, found.seeds) == (4, 5) and found.begins == (begins[1] + begins[2]) / 2
    assert found.begin_interval is not None and found.begin_interval[1] == begins[-1]
    assert found.begin_interval[0] == STEPS[grid(begins[0]) - 1]
    assert "4 of 5" in repr(found)


@pytest.mark.parametrize(("n", "k"), [(5, 1), (6, 1), (9, 2), (20, 6), (30, 10)])
def test_the_interval_is_that_of_the_order_statistics_of_a_median(n, k):
    """k from the tables of the sign test: n = 6: 1, 9: 2, 20: 6, 30: 10 cover the median with at least 95 %."""
    middles = 40.0 * 1.12 ** np.arange(n)
    (found,) = phase_changes([dynamics(i, m) for i, m in enumerate(middles)], ["prefix_matching"])
    begins = sorted(change.begins for change in found.changes)
    assert found.begin_interval is not None and found.begin_interval[1] == begins[n - k]


def test_models_are_kept_apart_and_what_was_not_probed_is_told():
    changes = phase_changes([dynamics(0, 300, "one"), dynamics(0, None, "other")], ["prefix_matching", "composition.K"])
    told = {(change.model, change.measure): (change.found, change.seeds) for change in changes}
    assert told["one", "prefix_matching"] == (1, 1) and told["other", "prefix_matching"] == (0, 1)
    assert told["one", "composition.K"] == (0, 0) and repr(changes[-1]).endswith("not probed")
    assert repr(next(c for c in changes if c.model == "other")) == "other: prefix_matching: none in 1"


def test_pairs_are_counted_in_the_right_order_only():
    scores = np.zeros((3, 2, 4, 2, 4))
    assert Series("composition.K", scores, scores, scores).parts == 16
    assert Series("prefix_matching", *[scores[:, :, :, 0, 0]] * 3).parts == 8


def drawn(figure: go.Figure) -> list[Any]:
    return list(figure.data)


def test_composition_counts_only_beyond_what_all_kinds_share():
    """One pair, standard deviations 1: K rises alone, or with Q and V, or while they fall."""
    up, flat = np.linspace(0, 12, len(STEPS)), np.zeros(len(STEPS))

    def highest(q, k, v):
        pairs = {f"composition.{kind}": x.reshape(-1, 1, 1, 1, 1) for kind, x in zip("QKV", (q, k, v), strict=True)}
        series = {name: Series(name, x, 0 * x, 0 * x + 1) for name, x in pairs.items()}
        return replace(dynamics(0, 300), series=series).curve("composition.K")

    np.testing.assert_allclose(highest(flat, up, flat).values, up)
    np.testing.assert_allclose(highest(-up, up, flat).values, up)
    np.testing.assert_allclose(highest(up, up, up).values, flat)
    np.testing.assert_allclose(highest(up, up, flat).values, up / 2)
    assert highest(flat, up, flat).null_sd[0] == pytest.approx(1.5**0.5)  # of x − (y + z) / 2


def test_edges_are_what_their_cut_costs():
    change = -sigmoid(300, 0.1, high=4.0)
    series = {"edges.x→1.all→answer": Series("edges.x→1.all→answer", change, 0 * change, 0 * change + 0.1)}
    run = replace(dynamics(0, 300), series=series)
    np.testing.assert_allclose(run.curve("edges.x→1.all→answer").values, -change)
    (found,) = phase_changes(run, ["edges.x→1.all→answer"])
    assert found.begins is not None and 200 < found.begins < 300
    titles = [note.text for note in dynamics_figure([run], panels=list(series)).layout.annotations]
    assert titles == ["what cutting x → 1.all → answer costs, nats of answer − foil"]


# Files


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    recipe = Recipe(
        "tiny", "induction", model=ModelConfig(n_heads=2, d_model=16, d_mlp=0),
        training=TrainingConfig(steps=6, batch=4, probes=("heads", "in-context")),
    )  # fmt: skip
    return train(recipe, tmp_path_factory.mktemp("dynamics") / "run")


@pytest.fixture
def folder(trained, tmp_path):
    """A copy to damage."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in trained.path.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


@pytest.fixture
def begun(folder):
    """One that is still training: no hash covers its probes yet."""
    (folder / "run.json").unlink()
    return folder


def test_a_sound_file_is_read_whole(trained):
    read = read_dynamics(trained)
    assert read.steps.tolist() == [0, 1, 2, 3, 4, 5, 6] and read.faults == () and read.seed == 0
    assert read["prefix_matching"].scores.shape == (7, 2, 2) and read["in_context"].scores.shape == (7,)
    assert np.isnan(read.loss[0]) and not np.isnan(read.loss[1:]).any()
    assert read.loss_by_position.shape == (7, 47)
    with pytest.raises(UnknownName, match=r"unknown probe 'prefix'.*nearest: prefix_matching"):
        read["prefix"]


def test_probes_of_a_finished_run_are_those_that_were_written(folder):
    file = folder / PROBES
    text = file.read_text()
    file.write_text(text.replace('"held_out_loss": 4', '"held_out_loss": 3', 1))
    assert file.read_text() != text
    with pytest.raises(BadRun, match=r"probes.jsonl is damaged: its hash is not the recorded one; delete .* and train"):
        read_dynamics(folder)
    file.write_text(text)
    assert read_dynamics(folder).faults == ()


def test_a_torn_last_line_is_left_out_and_named(begun):
    file = begun / PROBES
    file.write_bytes(file.read_bytes()[:-50])
    read = read_dynamics(begun)
    assert read.steps.tolist() == [0, 1, 2, 3, 4, 5] and "line 7 is torn or no probe; left out" in read.faults[0]


def test_steps_out_of_order_or_doubled_are_sorted_and_named(begun):
    file = begun / PROBES
    lines = file.read_text().splitlines()
    late = json.loads(lines[2]) | {"held_out_loss": 9.0}
    file.write_text("\n".join([*lines[:2], *lines[:1:-1], json.dumps(late)]) + "\n")
    read = read_dynamics(begun)
    assert read.steps.tolist() == [0, 1, 2, 3, 4, 5, 6] and read.held_out_loss[2] == 9.0
    assert "out of order or doubled" in read.faults[0] and len(read.faults) == 2


@pytest.mark.parametrize(
    "line", ["[]", "null", '{"step": "3", "series": {}}', '{"step": 3}', "\x00\x00", '{"step": 3, "series": 1}']
)
def test_lines_of_another_kind_are_left_out(folder, line):
    with (folder / PROBES).open("a") as file:
        file.write(line + "\n")
    lines, faults = read_lines(folder)
    assert len(lines) == 7 and len(faults) == 1 and "line 8" in faults[0]


def test_a_step_with_fewer_probes_is_a_gap_and_one_of_another_shape_is_left_out(begun):
    lines = [json.loads(line) for line in (begun / PROBES).read_text().splitlines()]
    del lines[3]["series"]["in_context"]
    lines[4]["series"]["copying"]["score"] = [[0.0]]
    (begun / PROBES).write_text("\n".join(map(json.dumps, lines)) + "\n")
    read = read_dynamics(begun)
    assert np.flatnonzero(np.isnan(read["in_context"].scores)).tolist() == [3]
    assert "copying" not in read.series and "prefix_matching" in read.series
    assert any("some steps lack in_context" in fault for fault in read.faults)
    assert any("copying has other shapes at other steps" in fault for fault in read.faults)
    assert np.isfinite(drawn(dynamics_figure([read], panels=["prefix_matching"]))[0]["y"]).all()


def test_a_run_without_probes_says_what_to_do(folder):
    (folder / PROBES).unlink()
    with pytest.raises(BadRun, match=r"has no probes; nor checkpoints .* train it anew with probes in its recipe"):
        read_dynamics(folder)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "step-000001.safetensors").write_bytes(b"")
    with pytest.raises(BadRun, match=r"workbench dynamics .*copy --probe reads them from its checkpoints"):
        read_dynamics(folder)
    (folder / PROBES).write_text("torn")
    with pytest.raises(BadRun, match=r"damaged.*; delete it, and workbench dynamics .*copy --probe reads them from"):
        read_dynamics(folder)
    (folder / "run.json").unlink()
    with pytest.raises(BadRun, match="holds no probed step"):
        read_dynamics(folder)


def test_a_run_that_is_still_training_is_shown_so_far(begun):
    lines = (begun / PROBES).read_text().splitlines()
    (begun / PROBES).write_text("\n".join(lines[:4]) + "\n")
    read = read_dynamics(begun)
    assert read.steps.tolist() == [0, 1, 2, 3] and "is at step 3 or further of 6" in read.faults[0]


def test_what_cannot_be_read_does_not_hide_the_rest(trained, begun):
    lines = [json.loads(line) for line in (begun / PROBES).read_text().splitlines()]
    for line in lines:
        del line["series"]["in_context"]
    (begun / PROBES).write_text("\n".join(map(json.dumps, lines[:-1])) + "\n")
    report = dynamics_report([trained.path, begun, "winograd-1"])
    assert len(report.runs) == 2 and len({row[2] for row in report.rows}) == 5
    assert any("winograd-1 has no probes" in fault for fault in report.faults)
    with pytest.raises(BadRun, match="no probes"):
        dynamics_report(["winograd-1"])


def test_runs_of_one_model_that_were_probed_otherwise_are_named(monkeypatch):
    from workbench import dynamics_report as module

    made = iter([dynamics(0, 300), dynamics(1, 300, more=("in_context",))])
    monkeypatch.setattr(module, "read_dynamics", lambda name, seed: next(made))
    report = dynamics_report(["a", "b"])
    assert report.faults == ["made seed 1 was probed otherwise than seed 0: has in_context"]
    assert {row[2] for row in report.rows} >= {"prefix_matching", "in_context"}


READ = """
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from workbench.dynamics_report import dynamics_report
report = dynamics_report([sys.argv[1]])
assert report.rows and not {"torch", "transformer_lens", "plotly", "scipy", "pandas"} & set(sys.modules), "heavy"
print(len(report.lines()))
"""


def test_reading_needs_no_torch(trained):
    done = subprocess.run(
        [sys.executable, "-c", READ, str(trained.path)], capture_output=True, text=True, env=os.environ
    )
    assert done.stdout.strip() == "1" and done.stderr == ""


# What is shown


def test_a_sparkline_goes_from_low_to_high():
    assert sparkline(np.array([0.0, 0.5, 1.0, np.nan, 0.13]), 0.0, 1.0) == "▁▅█ ▂"
    assert sparkline(np.array([3.0, 3.0]), 3.0, 3.0) == "▁▁"


def test_the_report_is_what_the_curves_say(monkeypatch):
    from workbench import dynamics_report as module

    made = iter([dynamics(0, 300), dynamics(1, 350), dynamics(0, None, "flat")])
    monkeypatch.setattr(module, "read_dynamics", lambda name, seed: next(made))
    report = dynamics_report(["a", "b", "c"])
    told = "\n".join(report.lines())
    assert "made: prefix_matching: begins at" in told and "in 2 of 2 seeds" in told
    assert "flat: no phase change in prefix_matching (1 seed)" in told
    flat = next(row for row in report.rows if row[0] == "flat" and row[2] == "prefix_matching")
    assert set(flat[3]) == {"▁"} and flat[4:] == ["0.01", "0.01"]
    data = json.loads(json.dumps(report.data))
    assert data["phase_changes"][0]["found"] == 2 and len(
        data["runs"][0]["curves"]["prefix_matching"]["values"]
    ) == len(STEPS)


def test_the_figure_draws_each_seed_their_median_and_the_change():
    runs = [dynamics(i, middle) for i, middle in enumerate((200, 300, 400))]
    (change,) = phase_changes(runs, ["prefix_matching"])
    figure = dynamics_figure(runs, [change], panels=["prefix_matching", "held_out_loss", "in_context"], cursor=0)
    thin = [line for line in drawn(figure) if line["line"]["width"] == 1 and line["customdata"] is not None]
    thick = [line for line in drawn(figure) if line["line"]["width"] == 2.5]
    assert len(thin) == 6 and len(thick) == 2  # in_context was not probed
    np.testing.assert_allclose(thick[0]["y"], np.median([run.curve("prefix_matching").values for run in runs], axis=0))
    assert thin[0]["x"][0] == START and list(thin[0]["x"][1:]) == list(STEPS[1:])
    inner, outer, cursor = figure.layout.shapes
    assert (inner.x0, inner.x1) == (change.begins, change.ends)
    assert change.begin_interval and change.end_interval
    assert (outer.x0, outer.x1) == (change.begin_interval[0], change.end_interval[1])
    assert cursor.x0 == START and "step 0" in [note.text for note in figure.layout.annotations]
    with pytest.raises(BadRun, match="none of the runs has in_context; they have prefix_matching"):
        dynamics_figure(runs, panels=["in_context"])


def test_two_models_have_two_colours_and_a_page_without_network(trained):
    runs = [dynamics(0, 300), dynamics(0, None, "flat")]
    figure = dynamics_figure(runs, panels=["prefix_matching"])
    named = {line["name"]: line["line"]["color"] for line in drawn(figure) if line["name"]}
    assert list(named) == ["made, seed 0", "flat, seed 0"] and len(set(named.values())) == 2
    page = dynamics_report([trained.path]).html()
    assert "<title>dynamics-run</title>" in page and "cdn.plot.ly" not in page.split("<script")[0]
