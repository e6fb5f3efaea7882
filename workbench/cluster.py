"""Training on an existing Dask cluster: many seeds on many machines, which share nothing but the network.

What is sent is a recipe, and the file of its task if that is not one of the project's; a worker trains in a folder of
its own and sends the run back, which is put into the runs folder here, whole or not at all. So a worker that dies costs
its own run only (Dask starts it again elsewhere), and a driver that was killed and is started again goes on with the
runs that are not here yet. Workers need the same version of the workbench, and the text where a recipe trains on one.
"""

import asyncio
import dataclasses
import gc
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, as_completed
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import workbench
from workbench.errors import WorkbenchError
from workbench.recipes import Recipe
from workbench.runs import RESULTS, place_run
from workbench.sweeps import newest_line
from workbench.tasks import task_sha256
from workbench.training import train
from workbench.unfinished import check_folder
from workbench.untrusted import LARGEST_TOML, read_file

PATIENCE = 20  # seconds to find the scheduler, and as many for its first worker
TRIES = 10  # a second apart, to get a result that a worker has


def train_on(
    address: str, recipes: Sequence[Recipe], folders: Sequence[Path], watch: Callable[[int, dict[str, Any]], None],
    device: str = "cpu",
) -> None:  # fmt: skip
    """Train what is not in its folder yet on the workers of the scheduler at `address`.

    `watch` is called with the index of each run that has come back and its last line of metrics. Raises:
    WorkbenchError, before anything is sent, if a run is unfinished here, no scheduler answers, or it has no workers or
    some with another workbench; what the first failing training raised, once all others are done and kept.
    """
    missing = [index for index, folder in enumerate(folders) if not (folder / RESULTS).exists()]
    for index in missing:
        folder, recipe = folders[index], recipes[index]
        check_folder(folder, recipe, resume=True)
        if folder.is_symlink() or (folder.exists() and os.listdir(folder)):  # what comes back would find no place
            raise WorkbenchError(
                f"{folder} is unfinished here; finish it without --dask (train: with --resume), "
                "or delete it to start over there"
            )
        task_sha256(recipe.task)  # a task's file that is missing or wrong is found here
    if missing:
        with workers(address) as executor:
            work = [(recipes[index], folders[index]) for index in missing]
            fill(executor, work, lambda i, m: watch(missing[i], m), device)


def fill(
    executor: Executor, work: Sequence[tuple[Recipe, Path]], watch: Callable[[int, dict[str, Any]], None],
    device: str = "cpu",
) -> None:  # fmt: skip
    """Train every recipe by any executor and put each run into its folder as it comes back.

    One that another process has put there meanwhile is as good. Raises: WorkbenchError, at the end, if one is missing.
    """
    packed = [_packed(recipe) for recipe, _ in work]
    futures = {executor.submit(trained, *each, device, version()): index for index, each in enumerate(packed)}
    errors: dict[int, BaseException] = {}
    for future in as_completed(futures):
        index = futures[future]
        try:
            _place(work[index][1], future.result())
        except (Exception, CancelledError) as error:  # one that fails stops no other
            errors[index] = error
            continue
        for line in newest_line(work[index][1]):
            watch(index, line)
    failed = [error for index, error in errors.items() if not _finished(*work[index])]
    if failed:
        first = failed[0]
        if isinstance(first, WorkbenchError):
            raise first
        reason = " ".join(f"{type(first).__name__}: {first}".split())[:200]
        said = f"{len(failed)} of {len(work)} trainings failed ({reason})"
        raise WorkbenchError(f"{said}; the others are kept, and the same command goes on")


def _place(folder: Path, files: dict[str, bytes]) -> None:
    try:
        place_run(folder, files)
    except OSError as error:
        raise WorkbenchError(f"cannot write {folder} ({error.strerror or error}); the others are kept") from None


def _finished(recipe: Recipe, folder: Path) -> bool:
    """Whether the folder holds a whole run of this recipe."""
    try:
        check_folder(folder, recipe, resume=True)
    except WorkbenchError:
        return False
    return (folder / RESULTS).exists()


def trained(recipe: Recipe, task: bytes | None, device: str, wanted: str) -> dict[str, bytes]:
    """On a worker: the files of a finished run, by their names in its folder.

    Raises: WorkbenchError unless the worker, which may have joined late, has the `wanted` version of the workbench.
    """
    if version() != wanted:
        raise WorkbenchError(f"a worker on {platform.node()} has another workbench ({version()}), not {wanted}")
    with tempfile.TemporaryDirectory() as made:
        if task is not None:
            file = Path(made) / Path(recipe.task).name
            file.write_bytes(task)
            recipe = dataclasses.replace(recipe, task=str(file))
        run = train(recipe, Path(made) / "run" / f"seed-{recipe.seeds.initialisation}", device=device)
        names = ["recipe.toml", RESULTS, *run.results["files"]]
        if task is not None:
            names.append(Path(recipe.task).name)
        return {name: (run.path / name).read_bytes() for name in names}


def _packed(recipe: Recipe) -> tuple[Recipe, bytes | None]:
    """A recipe with the bytes of its task's file, if it has one."""
    path = Path(recipe.task)
    return recipe, read_file(path, LARGEST_TOML) if path.suffix == ".toml" else None


@contextmanager
def workers(address: str) -> Iterator[Executor]:
    """The workers of a scheduler; what still runs is cancelled in the end."""
    try:
        from distributed import Client
    except ImportError:
        raise WorkbenchError("--dask needs Dask: pip install 'circuit-workbench[cluster]'") from None
    with _silent("distributed", "tornado", "asyncio"):
        client, reason = None, ""
        try:
            client = Client(address, timeout=PATIENCE, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            reason = _in_short(error)
        if client is None:
            gc.collect()  # what failed closes when it is collected; while the next one starts, both would wait for ever
            raise WorkbenchError(f"no Dask scheduler answers at {address} ({reason}); start one: dask scheduler")
        try:
            _check_workers(client, address)
            executor = _Workers(client)
            try:
                yield executor
            finally:
                executor.shutdown(cancel_futures=True)
        finally:
            client.close()


def _check_workers(client: Any, address: str) -> None:
    """Raises: WorkbenchError unless there are workers, and all have this version of the workbench."""
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
        versions: dict[str, Any] = client.run(version, on_error="return")
    except TimeoutError:
        raise WorkbenchError(
            f"the Dask scheduler at {address} has no workers; start one: dask worker {address} --nthreads 1"
        ) from None
    except OSError:
        raise WorkbenchError(f"the Dask scheduler at {address} is gone; start it again: dask scheduler") from None
    for worker, found in versions.items():
        if found != version():
            said = found if isinstance(found, str) else f"{type(found).__name__}: {_in_short(found)}"
            raise WorkbenchError(f"worker {worker} has another workbench ({said}), here is {version()}")


def _in_short(error: BaseException) -> str:
    return " ".join(str(error).split())[:100]


@contextmanager
def _silent(*packages: str) -> Iterator[None]:
    """Without what these log: a scheduler that dies would be told of in tracebacks, above the line that says it."""
    known = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    silenced = [each for each in known if each.name.split(".")[0] in packages and not each.disabled]
    for each in silenced:
        each.disabled = True
    try:
        yield
    finally:
        for each in silenced:
            each.disabled = False


class _Workers(Executor):
    """The workers of a scheduler; calls may be made again, on another worker, if one dies.

    Dask's own, `Client.get_executor`, takes a result whose worker dies while it is sent for a failure (12 of 360 when
    one of two workers was killed as results came back), and its future is never done when the sending itself raises.
    """

    def __init__(self, client: Any):
        self._client = client
        self._futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = self._client.submit(fn, *args, **kwargs, pure=False)
        self._futures.append(asyncio.run_coroutine_threadsafe(_result(future), self._client.loop.asyncio_loop))
        return self._futures[-1]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for future in self._futures:
                future.cancel()
        if wait:
            wait_for(self._futures)


async def _result(future: Any) -> Any:
    """Of a future of Dask's. Getting it from a worker that dies may raise, while the scheduler has it made again."""
    for left in reversed(range(TRIES)):
        try:
            return await future
        except Exception:
            if future.status in ("error", "cancelled") or not left:  # raised by the call itself, or given up
                raise
            await asyncio.sleep(1)


def version() -> str:
    """Of the workbench, here or on a worker."""
    return workbench.__version__
