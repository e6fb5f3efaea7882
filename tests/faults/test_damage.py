"""Runs whose files were damaged: each answers as before, or refuses in one line; no answer is another one."""

import dataclasses
import os
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from breaking import advised, answer_of_probes, answers, contents, delete, finish, unfinished
from support import counted

import workbench as wb
from workbench import cli
from workbench.errors import BadRun
from workbench.runs import list_runs
from workbench.training import train

Damage = Callable[[Path, random.Random], None]


def truncated(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def flipped(file: Path, chance: random.Random) -> None:
    """One bit."""
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def overwritten(file: Path, chance: random.Random) -> None:
    """A block of the disk."""
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    data[at : at + 64] = chance.choice([bytes(64), chance.randbytes(64)])[: len(data) - at]
    file.write_bytes(data)


def lengthened(file: Path, chance: random.Random) -> None:
    file.write_bytes(file.read_bytes() + chance.randbytes(chance.randrange(1, 100)))


def emptied(file: Path, _: random.Random) -> None:
    file.write_bytes(b"")


def deleted(file: Path, _: random.Random) -> None:
    file.unlink()


def a_folder(file: Path, _: random.Random) -> None:
    file.unlink()
    file.mkdir()


def a_loop(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to(file)


def a_pipe(file: Path, _: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def a_device(file: Path, _: random.Random) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def a_link(file: Path, _: random.Random) -> None:
    """To the very file, elsewhere: no damage."""
    moved = file.parents[2] / f"{file.parent.name}-{file.name}"
    shutil.move(file, moved)
    file.symlink_to(moved)


def swapped(file: Path, chance: random.Random) -> None:
    """With another file of the run."""
    files = sorted(path for path in file.parent.rglob("*") if path.is_file() and path != file)
    shutil.copy(chance.choice(files), file)


RANDOM = (truncated, flipped, overwritten, lengthened)
ONCE = (emptied, deleted, a_folder, a_loop, a_pipe, a_device, a_link, swapped)


def damages(folder: Path, short: int, full: int) -> list[tuple[str, Damage, int]]:
    """File, damage, seed: of each kind that is always the same one a file, and random ones in equal parts."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    fixed = [(file, damage, 0) for file in files for damage in ONCE]
    drawn = [(file, damage, seed) for seed in range(12) for damage in RANDOM for file in files]
    cases, n = random.Random(0).sample(fixed, len(fixed)) + drawn, counted(short, full)
    return random.Random(0).sample(cases, n) if n < len(fixed) else cases[:n]


@pytest.fixture(scope="session")
def sound(pool, recipe, reference):
    """What an undamaged run answers."""
    said = pool.submit(answers, recipe, reference[0]).result()
    assert {kind for kind, _ in said.values()} == {"says"} and len(said) == 11
    return said


def damaged(start: Path, to: Path, short: int, full: int) -> dict[Path, tuple[str, Damage, int]]:
    """Copies of a run, each damaged in one place."""
    cases = {to / str(number) / "run": case for number, case in enumerate(damages(start, short, full))}
    for folder, (file, damage, seed) in cases.items():
        shutil.copytree(start, folder)
        damage(folder / file, random.Random(seed))
    return cases


def test_a_damaged_run_says_what_it_said_or_refuses_in_one_line(pool, recipe, reference, sound, tmp_path):
    cases = damaged(reference[0], tmp_path, 30, 400)
    asked = {folder: pool.submit(answers, recipe, folder) for folder in cases}
    refused = 0
    for folder, (file, damage, seed) in cases.items():
        said = asked[folder].result(timeout=300)
        for question, (kind, answer) in said.items():
            told = (file, damage.__name__, seed, question, answer)
            assert kind in ("says", "refuses"), told
            assert kind == "refuses" or answer == sound[question][1], told
            assert kind == "says" or (answer and "\n" not in answer and len(answer) < 600), told
        refused += any(kind == "refuses" for kind, _ in said.values())
    assert refused > len(cases) / 2


def test_an_unfinished_run_that_was_damaged_goes_on_to_the_same_bits_or_refuses(pool, recipe, reference, tmp_path):
    """Where it refuses and tells what to delete, that helps."""
    same, start = contents(reference[0]), tmp_path / "start" / "run"
    unfinished(recipe, start, tmp_path / "there")
    cases = damaged(start, tmp_path, 20, 300)
    going_on = {folder: pool.submit(finish, recipe, folder) for folder in cases}
    refused = 0
    for folder, (file, damage, seed) in cases.items():
        told, said = (file, damage.__name__, seed), going_on[folder].result(timeout=300)
        assert "\n" not in said and len(said) < 600, (told, said)
        if "; delete " in said:
            refused += 1
            delete(advised(said))
            said = pool.submit(finish, recipe, folder).result()
            assert said == "" or (damage is a_folder and "Is a directory" in said), (told, said)
        if not said:
            assert contents(folder) == same, told
    assert refused > len(cases) / 4


def test_curves_of_an_unfinished_run_that_was_damaged_are_drawn_or_refused(pool, recipe, tmp_path):
    """Nothing covers them yet but what a line must look like."""
    start, chance = tmp_path / "start" / "run", random.Random(0)
    unfinished(recipe, start, tmp_path / "there")
    folders = [tmp_path / str(case) / "run" for case in range(counted(20, 300))]
    for folder in folders:
        shutil.copytree(start, folder)
        chance.choice(RANDOM)(folder / "probes.jsonl", chance)
    for folder, said in zip(folders, pool.map(answer_of_probes, folders), strict=True):
        assert said == "", folder


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("recipe.toml", ["inspect", "tiny"]),
        ("run.json", ["inspect", "tiny"]),
        ("model.safetensors", ["inspect", "tiny"]),
        ("checkpoints/step-000004.safetensors", ["inspect", "tiny", "--step", "4"]),
        ("probes.jsonl", ["dynamics", "tiny"]),
        ("model.safetensors", ["train", "tiny.toml"]),
    ],
)
def test_the_command_line_says_in_one_line_what_is_damaged(recipe, reference, runs, name, command, monkeypatch, capsys):
    shutil.copytree(reference[0], runs / "tiny" / "seed-0")
    file = runs / "tiny" / "seed-0" / name
    os.truncate(file, file.stat().st_size // 2)
    (runs / "tiny.toml").write_text(recipe.to_toml())
    shutil.copy(recipe.task, runs)
    monkeypatch.chdir(runs)
    monkeypatch.setattr(sys, "argv", ["workbench", *command])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, said = capsys.readouterr()
    assert (stop.value.code, out) == (2, "") and said.count("\n") == 1 and said.startswith(str(file)), said


def test_a_recipe_changed_under_an_unfinished_run_is_refused(pool, recipe, tmp_path):
    """Also where the changed recipe is the one in the run's own folder, which the state alone contradicts."""
    folder = tmp_path / "runs" / "run"
    unfinished(recipe, folder, tmp_path / "there")
    changed = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, lr=2e-3))
    assert "was made from another recipe (training.lr = 0.001 there, 0.002 here)" in finish(changed, folder)
    (folder / "recipe.toml").write_text(changed.to_toml())
    before = contents(folder)
    assert finish(changed, folder).startswith(f"the recipe was changed since {folder} was begun; change it back, or ")
    assert "was made from another recipe" in finish(recipe, folder) and contents(folder) == before
    assert advised(finish(changed, folder)) == folder / "trainer.safetensors"
    delete(folder / "trainer.safetensors")
    assert finish(changed, folder) == "" and contents(folder) == contents(train(changed, tmp_path / "anew").path)


def test_a_task_changed_under_a_training_does_not_become_its_own(recipe, tmp_path):
    """The run keeps the task that it was trained on, and the hash of that one."""
    task = tmp_path / "mine.toml"
    before = Path(recipe.task).read_text()
    task.write_text(before)
    mine = dataclasses.replace(recipe, task=str(task))

    def change(line):
        task.write_text(before.replace("tokens = 8", "tokens = 7"))

    run = train(mine, tmp_path / "run", progress=change)
    assert len(run.task.vocabulary) == 8 and contents(run.path)["mine.toml"] == before.encode()
    assert wb.load(run.path).held_out_accuracy == run.held_out_accuracy
    with pytest.raises(BadRun, match=r"the task .*mine.toml was changed since .* was trained"):
        train(mine, tmp_path / "run")


def test_one_damaged_run_does_not_hide_the_others(pool, recipe, reference, runs):
    """Whichever file it is, and whatever stands in its place."""
    files = sorted(contents(reference[0]))
    cases = [(file, damage) for file in files for damage in ONCE]
    for number, (file, damage) in enumerate(cases):
        shutil.copytree(reference[0], runs / "tiny" / f"seed-{number}")
        damage(runs / "tiny" / f"seed-{number}" / file, random.Random(0))
    shutil.copytree(reference[0], runs / "sound" / "seed-0")
    found, faults = list_runs()
    assert "sound" in {run.name for run in found} and 10 < len(faults) < len(cases)
    assert all("\n" not in str(fault) for fault in faults)
