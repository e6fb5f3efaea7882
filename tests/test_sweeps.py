"""Progress of many trainings: it shows what there is, and stops none of them."""

import json

import pytest

from workbench.recipes import ModelConfig, Recipe, TrainingConfig
from workbench.runs import METRICS
from workbench.sweeps import newest_line, train_many
from workbench.terminal import Bars
from workbench.training import train

TINY = Recipe(
    name="tiny", task="bigram", model=ModelConfig(d_model=16, n_layers=0),
    training=TrainingConfig(steps=20, batch=8, log_every=10),
)  # fmt: skip


def test_a_finished_run_whose_metrics_are_damaged_stops_no_other():
    recipes = [TINY.with_seed(seed) for seed in range(3)]
    (train(recipes[0]).path / METRICS).write_text('{"step": 20}\n')
    bars, seen = Bars(recipes), set()

    def watch(index, line):
        seen.add(index)
        bars.watch(index, line)

    assert bars.progress.tasks[0].completed == 20  # of 60: what was trained before
    assert [run.seed for run in train_many(recipes, jobs=2, watch=watch)] == [0, 1, 2]
    assert seen == {1, 2} and bars.progress.tasks[0].completed == bars.progress.tasks[0].total == 60


def test_the_newest_line_of_metrics(tmp_path):
    assert newest_line(tmp_path) == []
    lines = [json.dumps({"step": step}) for step in (0, 10)]
    for text, expected in {
        "\n".join(lines): [{"step": 10}],
        "\n".join([*lines, '{"st']): [{"step": 10}],  # torn by a crash
        "\n".join([lines[0], "damaged", lines[1]]): [],
    }.items():
        (tmp_path / METRICS).write_text(text)
        assert newest_line(tmp_path) == expected


@pytest.mark.parametrize(
    ("line", "completed", "shown"),
    [
        ({"step": 10, "loss": 1.5, "held_out_accuracy": 0.25}, 10, "loss 1.500  held-out 25.0 %"),
        ({"step": 0, "loss": None, "held_out_accuracy": 0.25}, 0, "held-out 25.0 %"),
        ({"step": 10}, 10, ""),
        ({"step": 10, "loss": "low", "held_out_accuracy": [1]}, 10, ""),
        ({"step": 10, "loss": float("nan"), "held_out_accuracy": 10**400}, 10, ""),
        ({"step": "10", "loss": 1.5, "held_out_accuracy": 0.25}, None, ""),
    ],
)
def test_a_bar_shows_the_numbers_that_a_line_holds(line, completed, shown):
    bars = Bars([TINY])
    bars.watch(0, line)
    made = [(task.completed, task.fields["scores"]) for task in bars.progress.tasks[2:]]
    assert made == ([] if completed is None else [(completed, shown)])
