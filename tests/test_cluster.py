"""Many machines: a real Dask scheduler with two workers of which one is killed; what comes back is what trains here."""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import cluster
from workbench.cluster import train_on
from workbench.content import content
from workbench.errors import WorkbenchError
from workbench.recipes import load_recipe, read_recipe
from workbench.runs import run_folder
from workbench.sweeps import train_many

TINY = """\
about = "a few steps"
task = "bigram"
[model]
d_model = 16
n_layers = 0
[training]
steps = {steps}
batch = 8
log_every = 10
checkpoints = 3
"""


def tiny(tmp_path, steps=20):
    (tmp_path / "tiny.toml").write_text(TINY.format(steps=steps))
    return load_recipe(tmp_path / "tiny.toml")


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_comes_back_is_the_run_that_would_have_been_trained_here(tmp_path, monkeypatch):
    recipes = [tiny(tmp_path).with_seed(seed) for seed in (0, 1)]
    here = train_many(recipes, jobs=1)
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "elsewhere"))
    seen = []
    with ThreadPoolExecutor(1) as executor:
        cluster.fill(executor, [(r, run_folder(r)) for r in recipes], lambda index, line: seen.append((index, line)))
    for recipe, run in zip(recipes, here, strict=True):
        back = wb.load(run_folder(recipe))
        assert back.path != run.path and back.weights_sha256 == run.weights_sha256
        own, theirs = files(run.path), files(back.path)
        assert own.keys() == theirs.keys() and len(own) > 4
        assert all(own[name] == theirs[name] for name in own if name != "run.json")
        assert back.metrics[-1] == seen[back.seed][1] and seen[back.seed][0] == back.seed


def test_the_file_of_a_task_goes_with_its_recipe(tmp_path):
    (tmp_path / "mine.toml").write_text((content("datasets") / "bigram.toml").read_text().replace("32", "16"))
    (tmp_path / "r.toml").write_text(TINY.format(steps=2).replace('"bigram"', '"mine.toml"'))
    recipe = load_recipe(tmp_path / "r.toml")
    packed, task = cluster._packed(recipe)
    (tmp_path / "mine.toml").unlink()  # another machine does not have it
    back = cluster.trained(packed, task)
    assert back["mine.toml"] == task and "run.json" in back


def test_one_that_fails_stops_no_other(tmp_path):
    bad = tiny(tmp_path).changed(lr=1e30, log_every=1)
    good = tiny(tmp_path).with_seed(1)
    with ThreadPoolExecutor(1) as executor, pytest.raises(WorkbenchError, match="diverged"):
        cluster.fill(executor, [(bad, run_folder(bad)), (good, run_folder(good))], lambda index, line: None)
    assert wb.load(run_folder(good)).seed == 1 and not (run_folder(bad) / "run.json").exists()


def test_no_scheduler_is_said_in_one_line(tmp_path, monkeypatch, free_port):
    from distributed import Client

    monkeypatch.setattr(cluster, "PATIENCE", 1)
    recipe = tiny(tmp_path)
    for address in (f"tcp://127.0.0.1:{free_port}", "no such thing"):
        with pytest.raises(WorkbenchError, match="no Dask scheduler answers at") as error:
            train_on(address, [recipe], [run_folder(recipe)], lambda index, line: None)
        assert "\n" not in str(error.value)
        assert not any(type(each) is Client for each in gc.get_objects())  # it would end a later one's start


def test_a_result_that_does_not_get_through_is_asked_for_again(monkeypatch):
    """What a worker that dies while it sends does to the driver, by luck; here on purpose, and for good at the end."""
    from distributed import Client, LocalCluster

    local: Any = LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0")
    gather, broken = Client._gather_remote, [2]

    async def breaks(client, *arguments):
        answer = await gather(client, *arguments)
        broken[0] -= 1
        if broken[0] >= 0:
            raise OSError("cut off")
        return answer

    monkeypatch.setattr(Client, "_gather_remote", breaks)
    monkeypatch.setattr(cluster, "TRIES", 3)
    with local, cluster.workers(local.scheduler_address) as executor:
        assert executor.submit(divmod, 17, 5).result(timeout=60) == (3, 2) and broken == [-1]
        with pytest.raises(ZeroDivisionError):
            executor.submit(divmod, 17, 0).result(timeout=60)
        broken[0] = 3
        with pytest.raises(OSError, match="cut off"):
            executor.submit(divmod, 17, 5).result(timeout=60)


class Started:
    """A process of Dask's, whose log is read until it says what is waited for, and then to the end."""

    def __init__(self, environment: dict[str, str], *arguments: str):
        command = [sys.executable, "-m", "dask", *arguments]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        assert self.process.stderr is not None
        self.log = self.process.stderr

    def until(self, said: str) -> str:
        found = next(match for line in self.log if (match := re.search(said, line)))
        self.reader = threading.Thread(target=self.log.read)  # a full pipe would stop it
        self.reader.start()
        return found[1]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.log.close()


@pytest.fixture
def dask(tmp_path):
    """A scheduler and two workers of one thread, as processes: their address and the workers."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORKBENCH_RUNS": str(tmp_path / "never")}
    started = [Started(environment, "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")]
    try:
        address = started[0].until(r"Scheduler at:\s+(tcp://\S+)")
        for number in range(2):
            folder = str(tmp_path / f"worker-{number}")
            alone = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0", "--death-timeout", "60")
            started.append(Started(environment, "worker", address, *alone, "--local-directory", folder))
            started[-1].until("(Registered to)")
        yield address, [each.process for each in started[1:]]
    finally:
        for each in reversed(started):
            each.end()


def test_a_worker_that_is_killed_costs_its_own_run_only(dask, tmp_path):
    """Six seeds on two workers; one is killed when the first seed is back, with another under way in it."""
    address, workers = dask
    recipes = [tiny(tmp_path, steps=600).with_seed(seed) for seed in range(6)]
    back = []

    def watch(index, line):
        back.append(index)
        if len(back) == 1:
            workers[0].send_signal(signal.SIGKILL)

    runs = train_many(recipes, cluster=address, watch=watch)
    assert [run.seed for run in runs] == list(range(6)) and sorted(back) == list(range(6))
    assert workers[0].wait() == -signal.SIGKILL and workers[1].poll() is None
    assert all(
        read_recipe(run.path / "recipe.toml").sha256 == recipe.sha256 for run, recipe in zip(runs, recipes, strict=True)
    )
    assert not (tmp_path / "never").exists()

    again = [*recipes[:1], recipes[0].with_seed(6)]  # the driver, started again: only what is missing is trained
    before = (runs[0].path / "run.json").stat().st_mtime_ns
    back.append(-1)
    train_many(again, cluster=address, watch=watch)
    assert (runs[0].path / "run.json").stat().st_mtime_ns == before and back[-1] == 1
