"""Many machines: a real Dask scheduler with two workers of which one is killed; what comes back is what trains here."""

import gc
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import workbench as wb
from workbench import cluster
from workbench.cluster import train_on
from workbench.content import content
from workbench.errors import BadRun, WorkbenchError
from workbench.recipes import load_recipe, read_recipe
from workbench.runs import place_run, run_folder
from workbench.sweeps import train_many
from workbench.training import train
from workbench.unfinished import locked

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


@pytest.mark.parametrize("name", ["mine.toml", ".mine.toml"])
def test_the_file_of_a_task_goes_with_its_recipe(tmp_path, name):
    (tmp_path / name).write_text((content("datasets") / "bigram.toml").read_text().replace("32", "16"))
    (tmp_path / "r.toml").write_text(TINY.format(steps=2).replace("bigram", name))
    recipe = load_recipe(tmp_path / "r.toml")
    packed, task = cluster._packed(recipe)
    (tmp_path / name).unlink()  # another machine does not have it
    back = cluster.trained(packed, task, "cpu", wb.__version__)
    place_run(tmp_path / "back", back)
    assert back[name] == task and len(wb.load(tmp_path / "back").task.vocabulary) == 16


def test_a_task_that_is_missing_is_said_before_anything_is_sent(tmp_path, free_port):
    (tmp_path / "r.toml").write_text(TINY.format(steps=2).replace("bigram", "gone.toml"))
    recipe = load_recipe(tmp_path / "r.toml")
    with pytest.raises(WorkbenchError, match=r"gone.toml: no such task file"):
        train_on(f"tcp://127.0.0.1:{free_port}", [recipe], [run_folder(recipe)], lambda index, line: None)


def test_one_that_fails_stops_no_other(tmp_path):
    bad = tiny(tmp_path).changed(lr=1e30, log_every=1)
    good = tiny(tmp_path).with_seed(1)
    with ThreadPoolExecutor(1) as executor, pytest.raises(WorkbenchError, match="diverged"):
        cluster.fill(executor, [(bad, run_folder(bad)), (good, run_folder(good))], lambda index, line: None)
    assert wb.load(run_folder(good)).seed == 1 and not (run_folder(bad) / "run.json").exists()


@pytest.mark.parametrize("left", ["recipe.toml", ".recipe.toml.tmp", "link"])
def test_what_was_begun_here_is_not_sent(tmp_path, free_port, left):
    """What is stopped before it saved leaves a recipe, or half of one: what comes back would find no place."""
    recipe = tiny(tmp_path)
    folder = run_folder(recipe)
    folder.parent.mkdir(parents=True)
    if left == "link":
        (tmp_path / "disk").mkdir()
        folder.symlink_to(tmp_path / "disk")
    else:
        folder.mkdir()
        (folder / left).write_text(recipe.to_toml())
    with pytest.raises(WorkbenchError, match="seed-0 is unfinished here; finish it without --dask"):
        train_on(f"tcp://127.0.0.1:{free_port}", [recipe], [folder], lambda index, line: None)
    assert train(recipe, resume=True).seed == 0  # as it says


def test_what_comes_from_elsewhere_meanwhile_stops_no_other(tmp_path):
    """Another driver, or a training here: one run is finished when its twin comes back, one is only begun."""
    recipes = [tiny(tmp_path).with_seed(seed) for seed in range(4)]
    back, finished, begun = [], [], []

    def meanwhile(index, line):
        back.append(index)
        if len(back) == 1:
            first, second = [recipe for recipe in recipes if recipe is not recipes[index]][:2]
            finished.append(train(first))
            begun.append(run_folder(second))
            begun[0].mkdir()
            (begun[0] / "recipe.toml").write_text(second.to_toml())

    def fill():
        with ThreadPoolExecutor(1) as executor:
            cluster.fill(executor, [(recipe, run_folder(recipe)) for recipe in recipes], meanwhile)

    with pytest.raises(WorkbenchError, match=r"cannot write .*seed-\d \(Directory not empty\)") as error:
        fill()
    assert str(begun[0]) in str(error.value) and os.listdir(begun[0]) == ["recipe.toml"]
    here = [recipe.seeds.initialisation for recipe in recipes if (run_folder(recipe) / "run.json").exists()]
    assert len(here) == 3 and len(back) == 2 and [wb.load(run_folder(recipes[seed])).seed for seed in here] == here
    assert wb.load(finished[0].path).results == finished[0].results  # seconds too: it is not the twin
    shutil.rmtree(begun[0])
    fill()  # all that is there already is as good as what comes back
    assert wb.load(begun[0]).path == begun[0]


def test_a_run_is_not_put_where_one_is_being_trained(tmp_path):
    folder = tmp_path / "runs" / "tiny" / "seed-0"
    with locked(folder), pytest.raises(BadRun, match="another process is training"):
        place_run(folder, {"run.json": b"{}"})
    assert list(folder.iterdir()) == [] and not list(folder.parent.glob(".seed-0-*"))
    place_run(folder, {"run.json": b"{}"})
    assert files(folder) == {"run.json": b"{}"}


def test_a_worker_that_joins_late_with_another_workbench_trains_nothing(tmp_path):
    with pytest.raises(WorkbenchError, match=f"has another workbench \\({re.escape(wb.__version__)}\\), not 0.0"):
        cluster.trained(tiny(tmp_path), None, "cpu", "0.0")


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
def scheduler(tmp_path):
    """A scheduler without workers, as a process: it and its address."""
    started = Started(dict(os.environ), "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
    try:
        yield started, started.until(r"Scheduler at:\s+(tcp://\S+)")
    finally:
        started.end()


@pytest.fixture
def dask(tmp_path, scheduler):
    """A scheduler and two workers of one thread, as processes: their address and the workers."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "WORKBENCH_RUNS": str(tmp_path / "never")}
    address, started = scheduler[1], []
    try:
        for number in range(2):
            folder = str(tmp_path / f"worker-{number}")
            alone = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0", "--death-timeout", "60")
            started.append(Started(environment, "worker", address, *alone, "--local-directory", folder))
            started[-1].until("(Registered to)")
        yield address, [each.process for each in started]
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


DRIVER = """\
import sys
from workbench import cluster
from workbench.recipes import load_recipe
from workbench.sweeps import train_many

packed = cluster._packed

def packs(recipe):
    print("sent", recipe.seeds.initialisation, flush=True)
    return packed(recipe)

def watch(index, line):
    print("back", index, flush=True)
    sys.stdin.readline()

cluster._packed = packs
train_many([load_recipe(sys.argv[1]).with_seed(seed) for seed in range(3)], cluster=sys.argv[2], watch=watch)
"""


def test_a_driver_that_is_killed_and_started_again_goes_on(dask, tmp_path):
    """It is killed when one of three seeds is here and it waits for an answer, which the second time is never asked."""
    recipe = tiny(tmp_path)
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "tiny.toml"), dask[0]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout
        said = [driver.stdout.readline().split() for _ in range(4)]
        driver.kill()
    first = int(said[3][1])
    assert said == [["sent", "0"], ["sent", "1"], ["sent", "2"], ["back", str(first)]]
    folders = [run_folder(recipe.with_seed(seed)) for seed in range(3)]
    assert driver.returncode == -signal.SIGKILL and [f.exists() for f in folders] == [i == first for i in range(3)]
    before = files(folders[first])

    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    rest = {0, 1, 2} - {first}
    assert sorted(done.stdout.splitlines()) == sorted(f"{what} {seed}" for what in ("sent", "back") for seed in rest)
    assert [wb.load(folder).seed for folder in folders] == [0, 1, 2] and files(folders[first]) == before


def test_a_scheduler_without_workers_is_said_in_one_line(scheduler, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "PATIENCE", 1)
    recipe, address = tiny(tmp_path), scheduler[1]
    with pytest.raises(WorkbenchError) as error:
        train_on(address, [recipe], [run_folder(recipe)], lambda index, line: None)
    assert str(error.value) == (
        f"the Dask scheduler at {address} has no workers; start one: dask worker {address} --nthreads 1"
    )


def test_workers_with_another_workbench_are_refused(monkeypatch):
    from distributed import LocalCluster

    local: Any = LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0")
    monkeypatch.setattr(cluster, "version", lambda: threading.current_thread().name)  # another one there than here
    refused = pytest.raises(WorkbenchError, match=r"worker \S+ has another workbench \(.*\), here is MainThread")
    with local, refused, cluster.workers(local.scheduler_address):
        pass


def test_a_scheduler_that_dies_ends_what_waits_and_logs_nothing(scheduler, monkeypatch):
    monkeypatch.setattr(cluster, "_check_workers", lambda client, address: None)  # there are none: all work waits
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("asyncio", "distributed", "distributed.client")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with cluster.workers(scheduler[1]) as executor:
            waiting = executor.submit(time.sleep, 0)
            scheduler[0].process.kill()
            with pytest.raises(Exception, match="scheduler"):
                waiting.result(timeout=120)
        gc.collect()
        assert said == []
        loggers[-1].error("as before")
        assert set(said) == {"as before"}
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
