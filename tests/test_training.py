"""Training: the same recipe twice gives the same bits, and so does going on after being stopped anywhere."""

import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import interrupted

from workbench.content import content
from workbench.errors import BadRecipe, BadRun, WorkbenchError
from workbench.recipes import ModelConfig, Recipe, Seeds, TrainingConfig, load_recipe
from workbench.runs import build_model, load
from workbench.sweeps import train_many
from workbench.tasks import load_task
from workbench.training import Trainer, check_step, checkpoint_steps, evaluate, train
from workbench.transformer import Transformer

TINY = Recipe(
    name="tiny",
    task="winograd",
    model=ModelConfig(n_layers=1, n_heads=2, d_model=16, dropout=0.1),
    training=TrainingConfig(steps=30, batch=16, warmup=5, schedule="cosine", log_every=7, save_every=10, checkpoints=4),
)


def files(folder):
    """What must not depend on interruptions: every file but run.json's seconds, and so its hash."""
    contents = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    results = json.loads(contents.pop("run.json"))
    del results["seconds"], results["sha256"]
    return contents | {"run.json": results}


@pytest.fixture
def reference(tmp_path):
    return files(train(TINY, tmp_path / "reference").path)


def test_the_same_recipe_gives_bit_identical_runs_whatever_the_random_state(tmp_path, reference):
    torch.manual_seed(12345)
    before = torch.random.get_rng_state()
    assert files(train(TINY, tmp_path / "again").path) == reference
    assert torch.equal(torch.random.get_rng_state(), before)
    other = files(train(TINY.with_seed(1), tmp_path / "other").path)
    assert other["model.safetensors"] != reference["model.safetensors"]


@pytest.mark.parametrize("stop", [0, 1, 9, 10, 11, 20, 25, 29])
def test_a_run_stopped_after_any_step_and_resumed_ends_in_the_same_bits(tmp_path, reference, stop):
    with interrupted(before=stop):
        train(TINY, tmp_path / "run")
    if stop > 10:
        with pytest.raises(BadRun, match="unfinished; add --resume to go on"):
            train(TINY, tmp_path / "run")
    assert files(train(TINY, tmp_path / "run", resume=True).path) == reference


KILLED = """
import sys, pathlib, workbench.training as training
from tests_recipe import TINY
training.train(TINY, pathlib.Path(sys.argv[1]), resume=True, progress=lambda line: print(line["step"], flush=True))
"""


def test_a_run_killed_outright_and_resumed_ends_in_the_same_bits(tmp_path, reference):
    (tmp_path / "tests_recipe.py").write_text(f"from workbench.recipes import *\nTINY = {TINY!r}\n")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        for line in process.stdout:
            if int(line) >= 14:
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "run" / "run.json").exists()
    assert files(train(TINY, tmp_path / "run", resume=True).path) == reference


def test_a_torn_metrics_line_is_dropped_and_written_again_on_resuming(tmp_path, reference):
    with interrupted():
        train(TINY, tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-20])
    assert files(train(TINY, tmp_path / "run", resume=True).path) == reference


def test_training_a_finished_run_again_does_nothing(tmp_path):
    run = train(TINY, tmp_path / "run")
    changed = run.path / "model.safetensors"
    before = changed.stat().st_mtime_ns
    assert train(TINY, tmp_path / "run").results == run.results and changed.stat().st_mtime_ns == before


def test_a_folder_with_another_recipe_or_other_files_is_left_alone(tmp_path):
    train(TINY, tmp_path / "run")
    with pytest.raises(BadRun, match=r"another recipe \(training.steps = 30 there, 40 here\)"):
        train(TINY.with_steps(40), tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(BadRun, match="holds other files and no run"):
        train(TINY, tmp_path / "mine")
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["thesis.txt"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkbenchError, match=r"cannot write to .* \(Not a directory\); what was saved is kept"):
        train(TINY, tmp_path / "file" / "run")


def test_a_damaged_trainer_state_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_finish", lambda self: None)
    with pytest.raises(BadRun):
        train(TINY, tmp_path / "run")
    state = tmp_path / "run" / "trainer.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(BadRun, match=r"trainer.safetensors is damaged: its hash .*; delete .*trainer.safetensors to"):
        train(TINY, tmp_path / "run", resume=True)


def test_metrics_hold_the_scores_of_the_steps_they_name(tmp_path):
    run = train(TINY, tmp_path / "run")
    assert [line["step"] for line in run.metrics] == [0, 7, 14, 21, 28, 30]
    assert run.metrics[0]["loss"] is None and run.metrics[1]["loss"] > run.metrics[-1]["loss"]
    assert run.metrics[-1]["held_out_accuracy"] == run.held_out_accuracy
    assert evaluate(run.model, run.task).loss == pytest.approx(run.results["held_out"]["loss"], abs=1e-6)


def test_checkpoints_are_log_spaced_and_load_as_models(tmp_path):
    run = train(TINY, tmp_path / "run")
    assert run.checkpoints == checkpoint_steps(TINY.training) == [0, 1, 2, 5, 13]
    assert checkpoint_steps(dataclasses.replace(TINY.training, checkpoints=0)) == []
    start = load(run.path, step=0).model
    fresh = build_model(TINY, load_task("winograd"))
    assert all(torch.equal(a, b) for a, b in zip(start.parameters(), fresh.parameters(), strict=True))
    with pytest.raises(BadRun, match="no checkpoint at step 3; it has 0, 1, 2, 5, 13"):
        _ = load(run.path, step=3).model


@pytest.mark.parametrize(
    "options",
    [{}, {"beta1": 0.8, "beta2": 0.95}, {"weight_decay": 0.3}, {"clip": 0.2}],
    ids=["defaults", "betas", "decay", "clip"],
)
def test_adamw_steps_equal_torchs_on_the_same_batches(tmp_path, monkeypatch, options):
    """One plain loop in torch, written out: rate, decay on matrices only, clipping, loss over all positions.

    Ours draws seven batches at a time, of 30.
    """
    monkeypatch.setattr("workbench.training.TOKENS_AT_ONCE", 7 * 16 * load_task("winograd").n_ctx)
    training = dataclasses.replace(TINY.training, **options)
    recipe = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, dropout=0.0), training=training)
    run = train(recipe, tmp_path / "run")
    task, model = load_task("winograd"), build_model(recipe, load_task("winograd"))
    matrices = [p for n, p in model.named_parameters() if n.split(".")[-1][0] == "W"]
    others = [p for n, p in model.named_parameters() if n.split(".")[-1][0] != "W"]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    betas = (options.get("beta1", 0.9), options.get("beta2", 0.999))
    optimizer = torch.optim.AdamW(groups, betas=betas, weight_decay=options.get("weight_decay", 0.01))
    for step in range(30):
        for group in optimizer.param_groups:
            group["lr"] = recipe.training.learning_rate(step)
        optimizer.zero_grad()
        model(task.batch(0, step, 16), return_type="loss").backward()
        if "clip" in options:
            norm = sum(float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None) ** 0.5
            for p in model.parameters():
                assert p.grad is not None
                p.grad *= min(1.0, options["clip"] / norm)
        optimizer.step()
    for (name, ours), theirs in zip(run.model.named_parameters(), model.parameters(), strict=True):
        if not name.endswith("b_K"):  # softmax cancels it: its gradient is rounding noise, which Adam blows up
            torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=0, msg=name)


def test_training_a_shipped_recipe_again_gives_the_shipped_weights(tmp_path):
    """Bit for bit on the machine that made them; other processors round otherwise."""
    shipped = load("winograd-average")
    again = train(load_recipe("winograd-average"), tmp_path / "again")
    assert again.held_out_accuracy == pytest.approx(shipped.held_out_accuracy, abs=0.02)
    for ours, theirs in zip(again.model.parameters(), shipped.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=0)


def test_seconds_add_up_over_interruptions(tmp_path, monkeypatch):
    """By a clock that ticks once at every look."""
    ticks = itertools.count()
    monkeypatch.setattr("workbench.training.time.perf_counter", lambda: float(next(ticks)))
    whole = train(TINY, tmp_path / "whole").results["seconds"]
    with interrupted():
        train(TINY, tmp_path / "run")
    assert train(TINY, tmp_path / "run", resume=True).results["seconds"] >= whole > 2


def test_dropout_follows_the_seed_of_the_batches():
    def loss(seed):
        trainer = Trainer.build(dataclasses.replace(TINY, seeds=Seeds(batches=seed)), Path("unused"))
        trainer.task = dataclasses.replace(trainer.task, train=trainer.task.train[:1])  # the same batch for every seed
        trainer._update()
        return trainer.losses[0]

    assert loss(1) == loss(1) != loss(2)


def wild(steps: int, model: dict | None = None, **options) -> Recipe:
    training = dataclasses.replace(TINY.training, **{"steps": steps, "lr": 1e38, "warmup": 0} | options)
    return dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, **model or {}), training=training)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (wild(30), r"the loss of step \d+ is (nan|inf); lower lr, add warmup, or clip the gradient$"),
        (wild(1), "the held-out loss of step 1 is (nan|inf); lower lr, add warmup, or clip the gradient$"),
        (wild(1, probes=("heads",)), "the held-out loss of step 1 is (nan|inf); lower lr"),
        (wild(0, {"init_scale": 1e30}), "the held-out loss of step 0 is (nan|inf); lower init_scale$"),
    ],
)
def test_a_training_that_diverges_is_stopped_and_stands_in_no_others_way(tmp_path, recipe, said):
    for _ in range(2):
        with pytest.raises(WorkbenchError, match=f"^tiny diverged: {said}"):
            train(recipe, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    assert train(TINY.with_steps(2), tmp_path / "run").results["steps"] == 2


def test_a_training_that_diverges_keeps_what_others_put_into_its_folder(tmp_path):
    """Its recipe too, where it was trained from that very file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(wild(1).to_toml())
    (tmp_path / "run" / "notes.txt").write_text("precious")
    with pytest.raises(WorkbenchError, match="diverged"):
        train(wild(1), tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["notes.txt", "recipe.toml"]


def test_a_training_that_diverges_after_a_save_keeps_it_and_says_so(tmp_path, monkeypatch):
    """At the last update, after which no loss is computed; and what was saved is kept."""
    update = Trainer._update

    def diverge(trainer):
        update(trainer)
        if trainer.step == 30:
            torch.nn.init.constant_(trainer.model.W_E, float("inf"))

    monkeypatch.setattr(Trainer, "_update", diverge)
    with pytest.raises(WorkbenchError, match=rf"step 30 is nan; lower lr.*, and move {tmp_path / 'run'} away$"):
        train(TINY, tmp_path / "run")
    there = {p.name for p in (tmp_path / "run").iterdir()}
    assert there == {"recipe.toml", "metrics.jsonl", "checkpoints", "trainer.safetensors"}


def test_a_score_that_is_not_finite_is_no_result(tmp_path, monkeypatch):
    """On the sequences trained on, say, whose loss is computed at the very end only."""
    monkeypatch.setattr("workbench.training._figures", lambda scores: [scores["loss"], float("inf")])
    with pytest.raises(WorkbenchError, match="tiny diverged: the score of step 2 is inf"):
        train(TINY.with_steps(2), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"n_ctx": 10}, "n_ctx = 10 is too small: winograd has sequences of 18 tokens"),
        ({"d_vocab": 40}, "d_vocab = 40, but winograd has 36 words; leave it out"),
        ({"d_model": 1_000_000, "n_heads": 1, "d_mlp": 0}, "tiny does not fit into memory"),
    ],
)
def test_a_model_that_cannot_be_built_leaves_nothing_behind(tmp_path, model, message):
    recipe = dataclasses.replace(TINY, model=ModelConfig(**{"n_layers": 1, "n_heads": 2, "d_model": 16} | model))
    with pytest.raises(WorkbenchError, match=message):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_task_changed_before_resuming_is_noticed(tmp_path):
    task = tmp_path / "mine.toml"
    task.write_text((content("datasets") / "winograd.toml").read_text())
    recipe = dataclasses.replace(TINY, task=str(task))
    with interrupted():
        train(recipe, tmp_path / "run")
    task.write_text(task.read_text().replace("tired", "thirsty"))
    with pytest.raises(BadRun, match=r"mine.toml was changed since .* was begun"):
        train(recipe, tmp_path / "run", resume=True)


def test_one_process_at_a_time_trains_a_run(tmp_path):
    def meanwhile(line):
        with pytest.raises(BadRun, match="another process is training"):
            train(TINY, tmp_path / "run", resume=True)

    train(TINY, tmp_path / "run", progress=meanwhile)


def test_two_links_to_one_folder_are_one_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "up").symlink_to(".")

    def meanwhile(line):
        for path in ("run", "up/link"):
            with pytest.raises(BadRun, match="another process is training"):
                train(TINY, tmp_path / path, resume=True)

    assert train(TINY, tmp_path / "link", progress=meanwhile).path == tmp_path / "run"


def test_links_in_a_circle_are_no_folder(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(WorkbenchError, match=r"cannot write to .*loop") as error:
        train(TINY, tmp_path / "loop" / "run")
    assert "\n" not in str(error.value)


def test_training_does_not_write_through_a_link_to_checkpoints(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(TINY.to_toml())
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRun, match=r"run/checkpoints is a link, .*; put a folder in its place"):
        train(TINY, tmp_path / "run")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_no_batch_is_drawn_that_no_step_trains_on(tmp_path, monkeypatch):
    drawn, kind = [], type(load_task("winograd"))
    batch = kind.batch

    def counted(task, seed, step, size):
        if size == TINY.training.batch:  # not the one that is asked for its length
            drawn.append(step)
        return batch(task, seed, step, size)

    monkeypatch.setattr(kind, "batch", counted)
    train(TINY, tmp_path / "run")
    assert drawn == list(range(30))


@pytest.mark.parametrize(
    ("options", "widest"),
    [
        ({}, 36), ({"d_mlp": 100_000}, 100_000), ({"n_heads": 512, "d_head": 1}, 512 * 15),
        ({"n_heads": 2, "d_head": 10_000}, 60_000), ({"d_mlp": 1_000_000}, 1_000_000),
        ({"n_layers": 0, "d_mlp": 100_000}, 36),
    ],
)  # fmt: skip
def test_scoring_takes_as_many_sequences_at_once_as_fit(monkeypatch, options, widest):
    """All 512 of a small model; never more than 2**24 numbers of the widest of what is computed, but one sequence."""
    task, seen = load_task("winograd"), []
    config = ModelConfig(**{"n_layers": 1, "n_heads": 1, "d_model": 2} | options)
    model = build_model(dataclasses.replace(TINY, model=config), task)

    def forward(model, tokens):
        seen.append(len(tokens))
        return torch.zeros(*tokens.shape, len(task.vocabulary))

    monkeypatch.setattr(Transformer, "forward", forward)
    evaluate(model, task)
    length = max(task.scored) + 1
    assert max(seen) == min(512, len(task.held_out), max(1, 2**24 // (length * widest)))
    assert sum(seen) == len(task.held_out)


def test_memory_that_does_not_suffice_is_said_in_one_line_and_what_was_saved_is_kept(tmp_path, monkeypatch, reference):
    """Whatever asks for it; here for more than any machine can address."""
    update = Trainer._update
    asked = [lambda: torch.empty(2**46), lambda: bytearray(2**62)]

    def hungry(trainer):
        if trainer.step == 15:
            asked.pop()()
        update(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_update", hungry)
        while asked:
            with pytest.raises(BadRecipe, match=r"^tiny does not fit into memory; give a smaller .*; what .* is kept$"):
                train(TINY, tmp_path / "run", resume=True)
    assert files(train(TINY, tmp_path / "run", resume=True).path) == reference


def test_other_errors_of_torch_are_not_taken_for_want_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_update", lambda trainer: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        train(TINY, tmp_path / "run")


def test_a_step_holds_what_is_trained_four_times(monkeypatch):
    """Weights, gradients and Adam's two moments; a machine with a byte less than that is too small."""
    task, cpu = load_task("winograd"), torch.device("cpu")
    model = build_model(TINY, task)
    trained = sum(p.numel() for p in model.parameters())
    needed = 4 * (4 * trained + model.config.numbers_of_step(16, 17, few=32))
    monkeypatch.setattr("workbench.training.machine_bytes", lambda device: needed)
    check_step(TINY, model.config, 17, cpu, trained)
    monkeypatch.setattr("workbench.training.machine_bytes", lambda device: needed - 1)
    check_step(TINY, model.config, 17, cpu)
    with pytest.raises(BadRecipe, match="give a smaller batch or model"):
        check_step(TINY, model.config, 17, cpu, trained)
    with pytest.raises(BadRecipe, match="give a smaller batch or model"):
        Trainer.build(TINY, Path("unused"))


def test_a_seed_that_may_not_run_stops_none_that_may(runs):
    (runs / "tiny" / "seed-1").mkdir(parents=True)
    (runs / "tiny" / "seed-1" / "thesis.txt").write_text("precious")
    with pytest.raises(BadRun, match="holds other files"):
        train_many([TINY, TINY.with_seed(1)], jobs=2)
    assert not (runs / "tiny" / "seed-0").exists()


def test_seeds_are_kept_apart():
    task = load_task("winograd")
    one = build_model(TINY, task)
    batches = build_model(dataclasses.replace(TINY, seeds=Seeds(batches=5)), task)
    other = build_model(dataclasses.replace(TINY, seeds=Seeds(initialisation=5)), task)
    assert torch.equal(one.W_E, batches.W_E) and not torch.equal(one.W_E, other.W_E)


def test_several_trainings_side_by_side_equal_the_same_ones_alone(runs, tmp_path):
    recipes = [TINY.with_seed(seed) for seed in range(3)]
    seen = []
    made = train_many(recipes, jobs=2, watch=lambda index, line: seen.append((index, line["step"])))
    assert [run.seed for run in made] == [0, 1, 2] and made[2].path == runs / "tiny" / "seed-2"
    assert {index for index, _ in seen} == {0, 1, 2}
    assert files(made[1].path) == files(train(recipes[1], tmp_path / "alone").path)


def test_a_script_without_a_main_guard_may_train_side_by_side(tmp_path, runs):
    """multiprocessing runs the caller's script again in every worker, unless it is kept from it."""
    script = tmp_path / "script.py"
    script.write_text(
        "from workbench.recipes import *\nfrom workbench.sweeps import train_many\n"
        f"print([r.seed for r in train_many([{TINY!r}.with_seed(s) for s in range(2)], jobs=2)])\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "[0, 1]\n", done.stderr


def test_what_goes_wrong_in_a_process_is_said_in_the_first(runs):
    bad = dataclasses.replace(TINY, task="winogrand")
    with pytest.raises(WorkbenchError, match="unknown task 'winogrand'; nearest: winograd"):
        train_many([bad, TINY], jobs=2)


def test_a_worker_that_dies_is_said_in_one_line(runs):
    others = set(multiprocessing.active_children())

    def kill_a_worker(index, line):
        workers = set(multiprocessing.active_children()) - others
        os.kill(next(p.pid for p in workers if p.pid), signal.SIGKILL)

    slow = dataclasses.replace(TINY, training=dataclasses.replace(TINY.training, steps=100_000))
    with pytest.raises(WorkbenchError, match="a process was killed; what was saved is kept"):
        train_many([slow, slow.with_seed(1)], jobs=2, watch=kill_a_worker)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_workers_end_with_a_killed_driver(tmp_path, runs):
    slow = dataclasses.replace(TINY, training=dataclasses.replace(TINY.training, steps=100_000))
    script = (
        "import multiprocessing\nfrom workbench.recipes import *\nfrom workbench.sweeps import train_many\n"
        "tell = lambda *_: print(*[p.pid for p in multiprocessing.active_children()], flush=True)\n"
        f"train_many([{slow!r}.with_seed(s) for s in range(2)], jobs=2, watch=tell)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout
        workers = driver.stdout.readline().split()
        driver.kill()

    def alive(pid: str) -> bool:
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    assert len(workers) == 2
    for _ in range(600):  # they notice at once; the bound keeps a failure from hanging
        if not any(alive(pid) for pid in workers):
            break
        time.sleep(0.1)
    assert not any(alive(pid) for pid in workers)


def test_weights_on_disk_are_the_models_own(tmp_path):
    run = train(TINY, tmp_path / "run")
    tensors = load_file(run.path / "model.safetensors")
    assert tensors.keys() == run.model.state_dict().keys()
    assert "blocks.0.attn.W_Q" in tensors and tensors["blocks.0.attn.W_Q"].shape == (2, 16, 8)
