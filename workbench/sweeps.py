"""Training many recipes side by side: processes, one thread each."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from workbench.errors import BadRun, WorkbenchError
from workbench.recipes import Recipe
from workbench.runs import RESULTS, Run, load, read_metrics, run_folder
from workbench.training import train
from workbench.unfinished import check_folder

Result = TypeVar("Result")
Watch = Callable[[int, dict[str, Any]], None]
"""Called with the index of a recipe and its newest line of metrics."""


def train_many(
    recipes: Sequence[Recipe], *, jobs: int | None = None, resume: bool = True, watch: Watch | None = None,
    cluster: str | None = None, device: str = "cpu",
) -> list[Run]:  # fmt: skip
    """Train every recipe that is not trained yet; their runs, in order. By default on all cores.

    `cluster` is the address of a Dask scheduler whose workers train instead (workbench.cluster); `device` is where, as
    `train` takes it. Progress is read from the runs' own metrics files; runs that were finished before make none.
    Raises what the first failing training raises.
    """
    seen: Watch = watch or (lambda index, line: None)
    folders = [run_folder(recipe) for recipe in recipes]
    for recipe, folder in zip(recipes, folders, strict=True):  # one that may not run stops none that is under way
        check_folder(folder, recipe, resume)

    if cluster is not None:
        from workbench.cluster import train_on

        train_on(cluster, recipes, folders, seen, device)
        return [load(folder) for folder in folders]
    if min(jobs or os.cpu_count() or 1, len(recipes)) <= 1:
        return [train(r, resume=resume, progress=partial(seen, i), device=device) for i, r in enumerate(recipes)]

    finished = {index for index, folder in enumerate(folders) if (folder / RESULTS).exists()}

    def poll(done: set[int], running: set[int]) -> None:
        for index in (done | running) - finished:
            for line in newest_line(folders[index]):
                seen(index, line)

    work = [(recipe, folder, resume, device) for recipe, folder in zip(recipes, folders, strict=True)]
    side_by_side(_train, work, jobs=jobs, poll=poll)
    return [load(folder) for folder in folders]


def newest_line(folder: Path) -> list[dict[str, Any]]:
    """Of a run's metrics, if there is one. A damaged file has none here: progress stops no training."""
    try:
        return read_metrics(folder)[-1:]
    except BadRun:
        return []


def side_by_side(
    function: Callable[..., Result], arguments: Sequence[tuple[Any, ...]], *, jobs: int | None = None,
    poll: Callable[[set[int], set[int]], None],
) -> list[Result]:  # fmt: skip
    """The function of each tuple of arguments, in order, in processes of their own; by default one a core.

    `poll` is called twice a second with the indices that are done and those that run, and at the end. With one job, or
    one tuple, everything happens in this process, and `poll` is called after each.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(arguments))
    results: dict[int, Result] = {}
    if jobs <= 1:
        for index, given in enumerate(arguments):
            results[index] = function(*given)
            poll(set(results), set())
        return list(results.values())
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":  # one import of torch and TransformerLens for all workers
        context.set_forkserver_preload(["workbench.training"])
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_obey_parent) as pool:
        with _without_main():
            futures = [pool.submit(function, *given) for given in arguments]
        try:
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=0.5)
                for future in done:
                    future.result()
                numbered = list(enumerate(futures))
                poll({i for i, f in numbered if f.done()}, {i for i, f in numbered if f.running()})
        except BrokenProcessPool:
            raise WorkbenchError(
                "a process was killed; what was saved is kept, and the same command (train: with --resume) goes on"
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise
    return [future.result() for future in futures]


@contextmanager
def _without_main() -> Iterator[None]:
    """Start workers without the caller's script: multiprocessing would run it again in each of them, and a script
    without an `if __name__ == "__main__"` would train for ever. Workers need nothing of it."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _train(recipe: Recipe, folder: Path, resume: bool, device: str) -> None:
    train(recipe, folder, resume=resume, device=device)


def _obey_parent() -> None:
    """In a worker: leave Ctrl-C to the parent, and end when it ends, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
