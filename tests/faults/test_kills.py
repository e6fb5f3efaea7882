"""Trainings that are killed outright, at every step of writing and at any other moment: going on ends in the same bits.

A kill leaves what a crash would: files half written, temporaries, a lock file that nobody holds.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from breaking import (
    CHECKPOINTS,
    advised,
    begin_and_finish,
    contents,
    delete,
    die,
    finish,
    finish_with_the_clock_set_back,
    intact,
    killed,
    steps_of_training,
    unfinished,
    wait_for,
    wait_in_training,
)  # fmt: skip
from safetensors import safe_open
from support import counted

from workbench import cli
from workbench.runs import checkpoint_name

ALL = {checkpoint_name(step) for step in CHECKPOINTS}


def chosen(steps: list[str], short: int, full: int) -> list[tuple[int, str]]:
    """Moments to be killed at: before every step, half-way through those that have a half, and after the last."""
    moments = [(at, "before") for at in range(len(steps))] + [(len(steps) - 1, "after")]
    moments += [(at, "half") for at, name in enumerate(steps) if name in ("write", "replace")]
    return random.Random(0).sample(moments, min(counted(short, full), len(moments)))


def test_a_training_killed_at_any_step_of_writing_ends_in_the_same_bits(pool, recipe, reference, tmp_path):
    same, steps = contents(reference[0]), reference[1]
    assert len(steps) > 120 and {*steps} == {"mkdir", "open", "write", "fsync", "replace", "unlink"}
    half_written, moments = 0, chosen(steps, 12, 1000)
    folders = [tmp_path / f"{at}-{when}" / "run" for at, when in moments]
    for folder, (at, when) in zip(folders, moments, strict=True):
        assert killed(die, recipe, folder, at, when) == -signal.SIGKILL, folder
        left = contents(folder)
        half_written += any(name.endswith(".tmp") for name in left)
        assert torn(steps, at, when) or ALL & left.keys() == intact(folder, same), folder
    assert half_written > 2
    goes_on(pool, recipe, folders, [torn(steps, *moment) for moment in moments], same)


def test_going_on_killed_at_any_step_of_writing_goes_on_again(pool, recipe, reference, tmp_path):
    same, start = contents(reference[0]), tmp_path / "start" / "run"
    unfinished(recipe, start, tmp_path / "there")
    shutil.copytree(start, tmp_path / "counted" / "run")
    steps = pool.submit(steps_of_training, recipe, tmp_path / "counted" / "run").result()
    assert len(steps) > 40 and contents(tmp_path / "counted" / "run") == same
    moments = chosen(steps, 6, 1000)
    folders = [tmp_path / f"{at}-{when}" / "run" for at, when in moments]
    for folder, (at, when) in zip(folders, moments, strict=True):
        shutil.copytree(start, folder)
        assert killed(die, recipe, folder, at, when) == -signal.SIGKILL, folder
        assert intact(folder, same) == ALL, folder
    goes_on(pool, recipe, folders, [torn(steps, *moment) for moment in moments], same)


def torn(steps: list[str], at: int, when: str) -> bool:
    """A power cut on a disk that renames a file before it has written it."""
    return steps[at] == "replace" and when == "half"


def goes_on(pool, recipe, folders, torn, same) -> None:
    """All end in the same bits; where a file may be torn, after the one was deleted that is said to be damaged."""
    refused = 0
    for folder, may_refuse, going_on in zip(
        folders, torn, [pool.submit(finish, recipe, folder) for folder in folders], strict=True
    ):
        said = going_on.result()
        if may_refuse and said:
            refused += 1
            assert "\n" not in said
            delete(advised(said))
            said = pool.submit(finish, recipe, folder).result()
        assert said == "" and contents(folder) == same, (folder, said)
    assert refused >= sum(torn) // 4


def test_runs_killed_again_and_again_at_random_moments_end_in_the_same_bits(pool, recipe, tmp_path):
    """Nothing that was there once is lost: checkpoints stay, and the saved step never goes back."""
    longer = replace(recipe, training=replace(recipe.training, steps=64, save_every=3))
    began = time.monotonic()
    assert pool.submit(finish, longer, tmp_path / "reference").result() == ""
    span, same, moments = time.monotonic() - began, contents(tmp_path / "reference"), random.Random(1)
    kills = runs = 0
    while kills < counted(5, 50):
        runs += 1
        folder, there = tmp_path / str(runs) / "run", tmp_path / f"{runs}.begun"
        kept, step = set(), 0

        def watch(there=there):
            wait_for(there)
            time.sleep(moments.uniform(0, span))
            there.unlink()

        while not (folder / "run.json").exists():
            kills += killed(begin_and_finish, longer, folder, there, watch=watch) == -signal.SIGKILL
            assert intact(folder, same) >= kept
            kept, before = intact(folder, same), step
            if (folder / "trainer.safetensors").exists():
                with safe_open(folder / "trainer.safetensors", framework="pt") as state:
                    step = int(state.metadata()["step"])
            assert step >= before
        assert pool.submit(finish, longer, folder).result() == "" and contents(folder) == same


def test_a_training_killed_on_the_command_line_goes_on_there(pool, recipe, tmp_path, runs, monkeypatch, capsys):
    longer = replace(recipe, training=replace(recipe.training, steps=200))
    assert pool.submit(finish, longer, tmp_path / "reference").result() == ""
    (tmp_path / "tiny.toml").write_text(longer.to_toml())
    shutil.copy(recipe.task, tmp_path)
    folder, command = runs / "tiny" / "seed-0", ["train", str(tmp_path / "tiny.toml")]

    def called(*arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["workbench", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr().err

    for _ in range(counted(1, 2)):
        with subprocess.Popen([sys.executable, "-m", "workbench", *command], stdout=subprocess.DEVNULL) as process:
            wait_for(folder / "trainer.safetensors")
            process.kill()
        assert process.returncode == -signal.SIGKILL and not (folder / "run.json").exists()
        refused = f"{folder} is unfinished; add --resume to go on, or delete it to start over\n"
        assert called(*command) == (2, refused)
        assert called(*command, "--resume") == (0, "")
        assert contents(folder) == contents(tmp_path / "reference")
        shutil.rmtree(folder)


def test_two_trainings_of_one_run_at_once_are_one_and_a_killed_one_leaves_no_lock(pool, recipe, reference, tmp_path):
    folder, there = tmp_path / "runs" / "run", tmp_path / "there"
    said = []

    def meanwhile():
        wait_for(there)
        before = contents(folder)
        said.extend(pool.submit(finish, recipe, folder).result() for _ in range(2))
        assert contents(folder) == before

    assert killed(wait_in_training, recipe, folder, 12, there, watch=meanwhile) == -signal.SIGKILL
    assert said == [f"another process is training {folder}; wait for it"] * 2
    assert (folder.parent / ".run.lock").exists()  # the file stays, and means nothing
    assert pool.submit(finish, recipe, folder).result() == "" and contents(folder) == contents(reference[0])


def test_two_trainings_that_race_make_one_run(pool, recipe, reference, tmp_path):
    for case in range(counted(4, 30)):
        folder = tmp_path / str(case) / "run"
        both = [pool.submit(finish, recipe, folder) for _ in range(2)]
        said = sorted(one.result() for one in both)
        assert said[0] == "" and said[1] in ("", f"another process is training {folder}; wait for it")
        assert contents(folder) == contents(reference[0])


def test_a_clock_that_is_set_back_changes_nothing(pool, recipe, reference, tmp_path):
    folder = tmp_path / "run"
    unfinished(recipe, folder, tmp_path / "there")
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (2**32, 2**32))  # written in the future
    assert pool.submit(finish_with_the_clock_set_back, recipe, folder).result() == ""
    assert contents(folder) == contents(reference[0])
    assert 0 <= json.loads((folder / "run.json").read_text())["seconds"] < 1000
