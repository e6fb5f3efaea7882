"""Breaking a training at any of its writes, and asking a run that was broken. For the tests of tests/faults.

What trains does so in processes forked from one that has imported torch: they can be killed, they take a tenth of a
second, and no run profits from what another process remembers.
"""

import hashlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from workbench.content import content
from workbench.dynamics import read_dynamics
from workbench.errors import WorkbenchError
from workbench.recipes import ModelConfig, Recipe, TrainingConfig
from workbench.runs import checkpoint_name, load
from workbench.sweeps import _without_main
from workbench.training import train

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["workbench.training", "torch._dynamo", "scipy.stats"])  # what a first step imports
NOBODY = 65534
FULL = 28
"""ENOSPC: what still fits is written."""
CHECKPOINTS = (0, 1, 4)
"""Of a tiny run."""

Fault = Callable[[str, Callable[[], Any], Callable[[], None]], Any]
"""What happens instead of a step of this name, given all of it and half of it."""


def tiny(folder: Path) -> Recipe:
    """A training of 16 steps with all that a run can have: a task of its own, dropout, checkpoints, probes, saves."""
    task = (content("datasets") / "induction.toml").read_text()
    sizes = {"tokens": 8, "length": 10, "shortest_period": 3, "longest_period": 5, "train": 16, "held_out": 8}
    for name, value in sizes.items():
        task = re.sub(rf"^{name} = .*", f"{name} = {value}", task, flags=re.MULTILINE)
    (folder / "small.toml").write_text(task)
    return Recipe(
        name="tiny", task=str(folder / "small.toml"),
        model=ModelConfig(n_layers=1, n_heads=1, d_model=4, d_mlp=0, dropout=0.1),
        training=TrainingConfig(
            steps=16, batch=4, warmup=3, schedule="cosine", log_every=4, save_every=5, checkpoints=2,
            probes=("in-context",),
        ),
    )  # fmt: skip


def contents(folder: Path) -> dict[str, Any]:
    """Every file below a folder, hidden ones too; run.json without its seconds and the hash that covers them."""
    found: dict[str, Any] = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }
    if found.get("run.json"):
        found["run.json"] = json.loads(found["run.json"])
        del found["run.json"]["seconds"], found["run.json"]["sha256"]
    return found


@contextmanager
def steps_of_writing(folder: Path, at: int = -1, fault: Fault | None = None) -> Iterator[list[str]]:
    """The names of what is done to a folder and its parents, in order; at index `at`, the fault happens instead.

    Half of a write is half of its bytes; half of a rename is what a power cut leaves on some disks: an empty file.
    """
    names = ("fsync", "replace", "unlink", "mkdir")
    real: dict[str, Any] = {name: getattr(os, name) for name in names}
    real_open: Any = io.open
    done: list[str] = []
    folder.parent.mkdir(parents=True, exist_ok=True)  # so that the same training takes the same steps anywhere

    def step(name: str, whole: Callable[[], Any], half: Callable[[], None] = lambda: None) -> Any:
        done.append(name)
        return fault(name, whole, half) if fault and len(done) == at + 1 else whole()

    def opened(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        def whole() -> Any:
            return real_open(file, mode, *more, **options)

        if not {*mode} & {*"wa"} or folder not in Path(file).parents:
            return whole()
        return _Written(step("open", whole), step)

    def counted(name: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            if name != "fsync" and folder not in (Path(given[0]), *Path(given[0]).parents):
                return real[name](*given, **options)

            def half() -> None:
                if name == "replace":
                    real["replace"](*given)
                    os.truncate(given[1], 0)

            return step(name, lambda: real[name](*given, **options), half)

        return call

    io.open = opened  # what pathlib calls
    for name in names:
        setattr(os, name, counted(name))
    try:
        yield done
    finally:
        io.open = real_open
        for name in names:
            setattr(os, name, real[name])


class _Written:
    """An open file whose writes are steps."""

    def __init__(self, file: Any, step: Callable[..., Any]):
        self.file, self.step = file, step

    def write(self, data: bytes) -> Any:
        def half() -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()

        return self.step("write", lambda: self.file.write(data), half)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> "_Written":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


# In another process


def finish(recipe: Recipe, folder: Path) -> str:
    """Train, or go on; what was said if it was refused."""
    try:
        train(recipe, folder, resume=True)
    except WorkbenchError as error:
        return str(error)
    return ""


def begin_and_finish(recipe: Recipe, folder: Path, there: Path) -> None:
    """Say so by a file, then train, or go on."""
    there.touch()
    assert finish(recipe, folder) == ""


def steps_of_training(recipe: Recipe, folder: Path) -> list[str]:
    """All that a training, or going on with one, does to its folder."""
    with steps_of_writing(folder) as done:
        train(recipe, folder, resume=True)
    return done


def die(recipe: Recipe, folder: Path, at: int, when: str) -> None:
    """Train, and be killed before, half-way through or after a step of writing."""

    def fault(_name: str, whole: Callable[[], Any], half: Callable[[], None]) -> None:
        try:
            {"before": lambda: None, "half": half, "after": whole}[when]()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    with steps_of_writing(folder, at, fault):
        train(recipe, folder, resume=True)


def fail(recipe: Recipe, folder: Path, at: int, code: int) -> str:
    """Train with one step of writing that fails; what was said."""

    def fault(name: str, _whole: Callable[[], Any], half: Callable[[], None]) -> None:
        if code == FULL and name == "write":
            half()
        raise OSError(code, os.strerror(code))

    with steps_of_writing(folder, at, fault):
        return finish(recipe, folder)


def wait_in_training(recipe: Recipe, folder: Path, step: int, there: Path) -> None:
    """Train as far as a step, say so by a file, and wait to be killed."""

    def stop(line: dict[str, Any]) -> None:
        while line["step"] == step:
            there.touch()
            time.sleep(0.01)

    train(recipe, folder, resume=True, progress=stop)


def finish_with_the_clock_set_back(recipe: Recipe, folder: Path) -> str:
    """Go on, in a year before the run was begun, by a clock of the machine that has just started too."""
    names = ("time", "time_ns", "perf_counter", "monotonic")
    real = {name: getattr(time, name) for name in names}
    began = {name: clock() for name, clock in real.items()}
    for name, clock in real.items():
        setattr(time, name, lambda name=name, clock=clock: clock() - began[name])
    try:
        return finish(recipe, folder)
    finally:
        for name, clock in real.items():
            setattr(time, name, clock)


def answers(recipe: Recipe, folder: Path) -> dict[str, tuple[str, Any]]:
    """What a run says when asked all that it can be asked, and trained: question → ("says", a value that is equal only
    if the answer is), ("refuses", the one line), or ("crashes", the traceback)."""

    def trained() -> Any:
        run = train(recipe, folder, resume=True)
        return run.results | {"seconds": 0, "sha256": ""}, _of_model(run.model)

    questions: dict[str, Callable[[], Any]] = {
        "run": lambda: load(folder).results,
        "recipe": lambda: load(folder).recipe.sha256,
        "model": lambda: _of_model(load(folder).model),
        "task": lambda: load(folder).task.held_out.tolist(),
        "checkpoints": lambda: load(folder).checkpoints,
        **{f"checkpoint {step}": lambda step=step: _of_model(load(folder, step=step).model) for step in CHECKPOINTS},
        "metrics": lambda: load(folder).metrics,
        "probes": lambda: _of_probes(folder),
        "trained": trained,
    }
    said: dict[str, tuple[str, Any]] = {}
    for question, ask in questions.items():
        try:
            said[question] = "says", json.dumps(ask(), sort_keys=True)
        except WorkbenchError as error:
            said[question] = "refuses", str(error)
        except Exception:
            said[question] = "crashes", traceback.format_exc()
    return said


def answer_of_probes(folder: Path) -> str:
    """Asked for the curves of a run: nothing if it says or refuses, else the traceback."""
    try:
        _of_probes(folder)
    except WorkbenchError as error:
        assert "\n" not in str(error)
    except Exception:
        return traceback.format_exc()
    return ""


def _of_model(model: Any) -> str:
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {weight.dtype} {list(weight.shape)}".encode() + weight.numpy().tobytes())
    return digest.hexdigest()


def _of_probes(folder: Path) -> Any:
    read = read_dynamics(folder)
    curves = {name: np.nan_to_num(series.scores, nan=-1.0).tolist() for name, series in read.series.items()}
    return [read.steps.tolist(), read.held_out_loss.tolist(), read.loss_by_position.tolist(), curves]


# Here


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.005)


def advised(said: str) -> Path:
    """What a refusal tells to delete."""
    found = re.search(r"delete (\S+?)(,| and train| to start)", said)
    assert found, said
    return Path(found[1])


def delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def killed(function: Callable[..., None], *given: Any, watch: Callable[[], None] | None = None) -> int | None:
    """Start a function in a process of its own; kill that when `watch` returns. Its exit code."""
    process = FORKED.Process(target=function, args=given)
    with _without_main():
        process.start()
    try:
        if watch:
            watch()
    finally:
        if watch:
            process.kill()
        process.join()
    return process.exitcode


@contextmanager
def elsewhere(jobs: int = 1, *, nobody: bool = False) -> Iterator[ProcessPoolExecutor]:
    """Processes that train; `nobody`: without the rights of root, whom no permission binds."""
    with ProcessPoolExecutor(jobs, FORKED, _become_nobody if nobody else None) as pool:
        with _without_main():
            pool.submit(os.getpid).result()  # starts them all
        yield pool


def _become_nobody() -> None:
    """After all has been imported that a training needs: it may lie where nobody can read."""
    with tempfile.TemporaryDirectory() as made:
        answers(tiny(Path(made)), Path(made) / "run")
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def unfinished(recipe: Recipe, folder: Path, there: Path) -> None:
    """Leave a run that was killed at step 12, after the save of step 10."""
    assert killed(wait_in_training, recipe, folder, 12, there, watch=lambda: wait_for(there)) == -signal.SIGKILL
    assert (folder / "trainer.safetensors").exists() and not (folder / "run.json").exists()


def intact(folder: Path, reference: dict[str, Any]) -> set[str]:
    """The checkpoints that are there as they should be."""
    names = map(checkpoint_name, CHECKPOINTS)
    return {name for name in names if (folder / name).exists() and (folder / name).read_bytes() == reference[name]}
