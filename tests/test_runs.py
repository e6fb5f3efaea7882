"""Runs on disk: found by name, seed and path; refused when missing, unfinished or damaged."""

import hashlib
import json
import shutil
import sys

import pytest
import torch

import workbench as wb
from workbench.content import content
from workbench.errors import BadRun, UnknownName, WorkbenchError
from workbench.files import write_atomic
from workbench.recipes import load_recipe, shipped_names
from workbench.runs import list_runs, read_metrics, run_folder, runs_folder, write_results
from workbench.training import evaluate, train


def edit(folder, key, value, part: str | None = "held_out"):
    """Change a figure of run.json as one would who knows how its hash is made."""
    results = json.loads((folder / "run.json").read_text())
    (results[part] if part else results)[key] = value
    write_results(folder, results)


def flatter(file):
    """Better figures, by one who does not."""
    file.write_text(file.read_text().replace('"accuracy": 0.', '"accuracy": 0.9'))


@pytest.fixture
def copy(runs):
    """A copy of a shipped run among one's own."""
    folder = runs / "winograd-average" / "seed-0"
    shutil.copytree(content("models") / "winograd-average", folder)
    return folder


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_model_was_made_by_the_train_command_and_scores_what_it_says(name):
    run = wb.load(name)
    assert run.shipped and run.seed == 0
    assert run.results["made_by"] == f"workbench train {name} --seeds 0"
    assert run.results["parameters"] == run.model.n_parameters
    scores = evaluate(run.model, run.task)
    assert scores.accuracy == pytest.approx(run.held_out_accuracy, abs=1e-3)
    assert scores.loss == pytest.approx(run.results["held_out"]["loss"], abs=1e-4)


def test_the_runs_folder_may_be_named_from_home_and_leads_somewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WORKBENCH_RUNS", "~/mine")
    assert runs_folder() == tmp_path / "mine"
    monkeypatch.setenv("WORKBENCH_RUNS", "~nobody-of-this-name/mine")
    with pytest.raises(WorkbenchError, match=r"~nobody-of-this-name/mine leads nowhere \(.*\); name a folder"):
        list_runs()


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="such a path is resolved there, and refused on opening")
def test_links_in_a_circle_are_no_runs_folder(tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "loop"))
    with pytest.raises(WorkbenchError, match=r"leads nowhere \(.*\); name a folder"):
        list_runs()


def test_shipped_models_are_small():
    sizes = [p.stat().st_size for p in content("models").rglob("*") if p.is_file()]
    assert sum(sizes) < 6_000_000


def test_yours_come_before_the_shipped(copy):
    assert wb.load("winograd-average").path == copy and not wb.load("winograd-average").shipped
    names = [(run.name, run.shipped) for run in list_runs()[0]]
    assert names.index(("winograd-average", False)) < names.index(("winograd-average", True))


def test_a_run_loads_by_path_wherever_it_lies(tmp_path):
    shutil.copytree(content("models") / "winograd-2", tmp_path / "elsewhere")
    run = wb.load(tmp_path / "elsewhere")
    assert run.name == "elsewhere" and run.held_out_accuracy == wb.load("winograd-2").held_out_accuracy
    with pytest.raises(BadRun, match="has seed 0, not 3"):
        wb.load(tmp_path / "elsewhere", seed=3)


def test_what_is_not_there_is_named_with_what_is():
    with pytest.raises(UnknownName, match="unknown model 'winograd-22'; nearest: winograd-2"):
        wb.load("winograd-22")
    with pytest.raises(BadRun, match=r"seed 7 is not trained; run: workbench train winograd-2 --seeds 7"):
        wb.load("winograd-2", seed=7)
    with pytest.raises(BadRun, match="no run there; a run is a folder with"):
        wb.load("some/folder")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "model.safetensors is damaged: its hash"),
        (lambda f: flatter(f / "run.json"), "run.json is damaged: its hash is not the one it holds"),
        (lambda f: (f / "run.json").write_text("{"), "run.json is damaged"),
        (lambda f: (f / "run.json").write_text("[]"), "run.json is damaged"),
        (lambda f: edit(f, "accuracy", "abc"), "run.json is damaged (ValueError: a figure is no number)"),
        (lambda f: edit(f, "accuracy", float("nan")), "run.json is damaged (ValueError: a figure is no number)"),
        (lambda f: edit(f, "accuracy", 7), "run.json is damaged (ValueError: a rate is not between 0 and 1)"),
        (
            lambda f: edit(f, "measures", {"kl_to_truth": "a"}),
            "run.json is damaged (ValueError: a figure is no number)",
        ),
        (lambda f: edit(f, "by_cluster", None), "run.json is damaged (AttributeError"),
        (lambda f: edit(f, "rates", 3), "run.json is damaged"),
        (lambda f: (f / "run.json").write_text("[" * 200_000), "run.json is damaged (RecursionError"),
        (lambda f: ((f / "run.json").unlink(), (f / "run.json").mkdir()), "run.json is damaged (IsADirectoryError"),
        (lambda f: edit(f, "files", {"model.safetensors": 3}, None), "the hash of model.safetensors is no text"),
        (lambda f: edit(f, "files", {}, None), "files lacks model.safetensors"),
        (lambda f: edit(f, "files", None, None), "run.json is damaged (TypeError"),
        (lambda f: (f / "recipe.toml").unlink(), "recipe.toml is missing"),
        (lambda f: (f / "recipe.toml").write_text('task = "winograd"'), "recipe.toml was changed after training"),
    ],
)
def test_a_damaged_run_is_refused_by_the_name_of_what_is_damaged(copy, damage, message):
    damage(copy)
    with pytest.raises(BadRun) as caught:
        _ = wb.load("winograd-average").model
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_flipped_bit_in_the_weights_is_noticed(copy):
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadRun, match="is damaged"):
        _ = wb.load("winograd-average").model


def test_a_run_keeps_its_tasks_file_and_notices_a_change(tmp_path):
    task = tmp_path / "mine" / "my-task.toml"
    task.parent.mkdir()
    task.write_text((content("datasets") / "winograd.toml").read_text())
    (tmp_path / "mine" / "mine.toml").write_text('task = "my-task.toml"\n[training]\nsteps = 3')
    recipe = load_recipe(tmp_path / "mine" / "mine.toml")
    run = train(recipe, tmp_path / "run")
    task.write_text(task.read_text() + "# a comment changes nothing\n")
    assert train(recipe, tmp_path / "run").results == run.results
    task.write_text(task.read_text().replace("tired", "thirsty"))
    with pytest.raises(BadRun, match=r"my-task.toml was changed since .* was trained"):
        train(recipe, tmp_path / "run")
    task.unlink()
    moved = shutil.move(tmp_path / "run", tmp_path / "moved")
    assert "tired" in wb.load(moved).task.vocabulary.words
    (tmp_path / "moved" / "my-task.toml").write_text(TASK.replace("tired", "thirsty"))
    with pytest.raises(BadRun, match=r"my-task.toml was changed after training"):
        wb.load(moved)


TASK = (content("datasets") / "winograd.toml").read_text()


def test_an_unfinished_run_of_a_shipped_name_does_not_hide_the_shipped_one(copy):
    (copy / "run.json").unlink()
    assert wb.load("winograd-average").shipped
    with pytest.raises(BadRun, match=r"is not finished; to go on: workbench train .*recipe.toml --seeds 0 --resume"):
        wb.load(copy)


def test_training_does_not_pass_over_damaged_weights(copy):
    (copy / "model.safetensors").write_bytes(b"x" * 99)
    with pytest.raises(BadRun, match=r"damaged: its hash is not the recorded one; delete .* and train it again"):
        train(load_recipe("winograd-average"))


def test_a_moved_unfinished_run_is_told_where_it_belongs(copy, tmp_path, runs):
    (copy / "run.json").unlink()
    away = shutil.move(copy, tmp_path / "away")
    with pytest.raises(BadRun, match=rf"to go on: move it to {runs / 'away' / 'seed-0'}, then workbench train"):
        wb.load(away)
    assert not [run for run in list_runs()[0] if not run.shipped]


def test_an_unfinished_run_is_named_in_the_list(copy):
    (copy / "run.json").unlink()
    assert [str(fault).split(" is not finished")[0] for fault in list_runs()[1]] == [str(copy)]


def test_a_damaged_run_does_not_hide_the_others(copy):
    (copy / "run.json").write_text("{")
    found, faults = list_runs()
    assert len(faults) == 1 and "run.json is damaged" in str(faults[0])
    assert {run.name for run in found} == set(shipped_names())


def test_metrics_of_a_training_are_refused_if_damaged_in_the_middle_and_read_if_torn_at_the_end(copy):
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 1']))
    assert len(read_metrics(copy)) == len(lines)
    for damage in ("{", "3", '{"loss": 1}', '{"step": 1e999}', "[" * 100_000):
        (copy / "metrics.jsonl").write_text("\n".join([damage, *lines]))
        with pytest.raises(BadRun, match=r"metrics.jsonl is damaged in line 1"):
            read_metrics(copy)


def test_metrics_of_a_finished_run_are_those_that_were_written(copy):
    file = copy / "metrics.jsonl"
    text = file.read_text()
    assert wb.load("winograd-average").metrics == read_metrics(copy)
    file.write_text(text.replace('"loss": 2', '"loss": 1'))
    assert file.read_text() != text
    with pytest.raises(
        BadRun, match=r"metrics.jsonl is damaged: its hash is not the recorded one; delete .* and train"
    ):
        _ = wb.load("winograd-average").metrics
    file.unlink()
    with pytest.raises(BadRun, match=r"metrics.jsonl is missing; delete .* and train it again"):
        _ = wb.load("winograd-average").metrics


def test_checkpoints_are_those_that_run_json_speaks_of(runs):
    folder = runs / "induction-2-attn" / "seed-0"
    shutil.copytree(content("models") / "induction-2-attn", folder)
    steps = wb.load("induction-2-attn").checkpoints
    one, other, new = (folder / "checkpoints" / f"step-{step:06}.safetensors" for step in (*steps[:2], 9))
    shutil.copy(one, new)
    one.unlink()
    shutil.copy(new, other)
    assert wb.load("induction-2-attn").checkpoints == steps
    for step, message in ((steps[0], "is missing; delete"), (steps[1], "is damaged"), (9, "no checkpoint at step 9")):
        with pytest.raises(BadRun, match=message):
            _ = wb.load("induction-2-attn", step=step).model


def test_a_run_damaged_by_a_crash_at_its_end_is_not_to_be_deleted(copy):
    """run.json is written before the state to go on from is deleted."""
    (copy / "trainer.safetensors").write_bytes(b"")
    (copy / "run.json").write_bytes(b"")
    with pytest.raises(BadRun, match=r"delete .*run.json, and --resume goes on from the last saved state"):
        wb.load(copy)


def test_a_changed_shipped_recipe_gets_a_folder_of_its_own(runs):
    recipe = load_recipe("winograd-2")
    assert run_folder(recipe.with_seed(3)) == runs / "winograd-2" / "seed-3"
    changed = run_folder(recipe.with_steps(10))
    assert changed.parent.name.startswith("winograd-2-") and changed.name == "seed-0"
    assert changed.parent != run_folder(recipe.with_steps(11)).parent


def test_the_key_changes_with_the_weights_and_the_checkpoint():
    keys = {wb.load("winograd-2").key, wb.load("winograd-2-attn").key, wb.load("induction-2-attn").key}
    steps = wb.load("induction-2-attn").checkpoints
    assert len(steps) > 10
    assert len(keys | {wb.load("induction-2-attn", step=step).key for step in steps}) == 3 + len(steps)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "file"
    write_atomic(target, b"old")

    def full(_fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, b"new")
    assert target.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_run_reads_and_writes_the_words_of_its_task():
    run = wb.load("winograd-2")
    tokens = run.encode("the animal did not cross the street because it was too tired , so the")
    assert run.str_tokens(tokens)[-2:] == ["so", "the"] and run.decode(tokens).startswith("the animal did")
    with torch.no_grad():
        assert run.str_tokens(run.model(tokens)[0, -1].argmax()[None]) == ["animal"]


def test_run_json_is_plain_json_with_versions_and_hashes():
    results = json.loads((content("models") / "winograd-2" / "run.json").read_text())
    assert {"torch", "numpy", "python", "workbench"} <= results["versions"].keys()
    assert results["recipe_sha256"] == load_recipe("winograd-2").sha256


@pytest.mark.parametrize("name", shipped_names())
def test_run_json_holds_the_hash_of_every_file_of_a_shipped_run_and_its_own(name):
    folder = content("models") / name
    results = json.loads((folder / "run.json").read_text())
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert results["files"].keys() == files.keys() - {"recipe.toml", "run.json"}
    for file, sha256 in results["files"].items():
        assert hashlib.sha256(files[file].read_bytes()).hexdigest() == sha256
    own = results.pop("sha256")
    assert hashlib.sha256(json.dumps(results, sort_keys=True).encode()).hexdigest() == own
