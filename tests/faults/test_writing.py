"""Writing that fails: a full disk, no permission, an error of the disk, at every step that a training writes."""

import errno
import os
import random
import shutil
import tempfile
from pathlib import Path

from breaking import answers, contents, elsewhere, fail, finish, intact, steps_of_training, tiny, unfinished
from support import counted

from workbench.training import train

CODES = (errno.ENOSPC, errno.EACCES, errno.EIO)


def failing(steps: list[str], short: int) -> list[tuple[int, int]]:
    """Every step with one of the errors, in turn; or some of them."""
    cases = [(at, CODES[at % len(CODES)]) for at in range(len(steps))]
    return random.Random(0).sample(cases, counted(short, len(cases)))


def test_a_training_that_cannot_write_says_so_and_goes_on_to_the_same_bits(pool, recipe, reference, tmp_path):
    steps = reference[1]
    cases = {tmp_path / f"{at}" / "run": (at, code) for at, code in failing(steps, 12)}
    fails_and_goes_on(pool, recipe, cases, steps, contents(reference[0]))


def test_going_on_that_cannot_write_keeps_what_was_saved(pool, recipe, reference, tmp_path):
    same, start = contents(reference[0]), tmp_path / "start" / "run"
    unfinished(recipe, start, tmp_path / "there")
    shutil.copytree(start, tmp_path / "counted" / "run")
    steps = pool.submit(steps_of_training, recipe, tmp_path / "counted" / "run").result()
    cases = {tmp_path / f"{at}" / "run": (at, code) for at, code in failing(steps, 8)}
    for folder in cases:
        shutil.copytree(start, folder)
    fails_and_goes_on(pool, recipe, cases, steps, same, kept=3)


def fails_and_goes_on(pool, recipe, cases, steps, same, kept=0) -> None:
    said = {folder: pool.submit(fail, recipe, folder, *case) for folder, case in cases.items()}
    for folder, (at, code) in cases.items():
        line = said[folder].result()
        done_without = steps[at] == "mkdir" or at > len(steps) - 3  # it is there; clearing up after run.json
        assert line == f"cannot write to {folder} ({os.strerror(code)}); what was saved is kept" or (
            line == "" and done_without
        ), (folder, line)
        checkpoints = {name for name in contents(folder) if name.startswith("checkpoints/step")}
        assert checkpoints == intact(folder, same) and len(checkpoints) >= kept, folder
    said = {folder: pool.submit(finish, recipe, folder) for folder in cases}
    for folder in cases:
        assert said[folder].result() == "" and contents(folder) == same, folder


def test_where_nothing_may_be_written_a_finished_run_is_read_and_no_other_begun():
    """By a process without root's rights, in a folder that belongs to somebody else."""
    with tempfile.TemporaryDirectory() as made, elsewhere(nobody=True) as pool:
        runs = Path(made)
        runs.chmod(0o755)
        recipe = tiny(runs)
        there = train(recipe, runs / "tiny" / "seed-0").path
        half = runs / "tiny" / "seed-1"
        shutil.copytree(there, half)
        (half / "run.json").unlink()
        said = pool.submit(answers, recipe, there).result()
        before = contents(runs)
        for path in (runs, *runs.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        again = pool.submit(answers, recipe, there).result()
        refused = [pool.submit(finish, recipe, runs / "tiny" / f"seed-{seed}").result() for seed in (1, 2)]
        for path in (runs, *runs.rglob("*")):
            path.chmod(0o755)
        assert again == said and {kind for kind, _ in again.values()} == {"says"}
        for seed, line in zip((1, 2), refused, strict=True):
            assert line == (
                f"cannot write to {runs / 'tiny' / f'seed-{seed}'} (Permission denied); what was saved is kept"
            )
        assert contents(runs) == before
