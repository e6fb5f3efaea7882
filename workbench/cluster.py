"""Training on an existing Dask cluster: many seeds on many machines, which share nothing but the network.

What is sent is a recipe, and the file of its task if that is not one of the project's; a worker trains in a folder of
its own and sends the run back, which is put into the runs folder here, whole or not at all. So a worker that dies costs
its own run only (Dask starts it again elsewhere), and a driver that was killed and is started again goes on with the
runs that are not here yet. Workers need the same version of the workbench, and the text where a recipe trains on one.
"""

import asyncio
import dataclasses
import gc
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
from workbench.runs import place_run, read_metrics
from workbench.training import train
from workbench.unfinished import check_folder

PATIENCE = 20  # seconds to find the scheduler
TRIES = 10  # a second apart, to get a result that a worker has


def train_on(
    address: str, recipes: Sequence[Recipe], folders: Sequence[Path], watch: Callable[[int, dict[str, Any]], None],
    device: str = "cpu",
) -> None:  # fmt: skip
    """Train what is not in its folder yet on the workers of the scheduler at `address`.

    `watch` is called with the index of each run that has come back and its last line of metrics. Raises:
    WorkbenchError if no scheduler answers or its workers have another workbench; what the first failing training
    raised, once all others are done and kept.
    """
    missing = [index for index, folder in enumerate(folders) if not (folder / "run.json").exists()]
    for index in missing:
        if check_folder(folders[index], recipes[index], resume=True) is not None:
            raise WorkbenchError(
                f"{folders[index]} is unfinished here; finish it without --dask, or delete it to start over there"
            )
    if missing:
        with workers(address) as executor:
            work = [(recipes[index], folders[index]) for index in missing]
            fill(executor, work, lambda i, m: watch(missing[i], m), device)


def fill(
    executor: Executor, work: Sequence[tuple[Recipe, Path]], watch: Callable[[int, dict[str, Any]], None],
    device: str = "cpu",
) -> None:  # fmt: skip
    """Train every recipe by any executor and put each run into its folder as it comes back."""
    futures = {executor.submit(trained, *_packed(recipe), device): i for i, (recipe, _) in enumerate(work)}
    failed: list[BaseException] = []
    for future in as_completed(futures):
        index = futures[future]
        try:
            files = future.result()
        except (Exception, CancelledError) as error:  # one that fails stops no other
            failed.append(error)
            continue
        folder = work[index][1]
        try:
            place_run(folder, files)
        except OSError as error:
            raise WorkbenchError(f"cannot write {folder} ({error.strerror or error}); the others are kept") from None
        for line in read_metrics(folder)[-1:]:
            watch(index, line)
    if failed:
        first = failed[0]
        if isinstance(first, WorkbenchError):
            raise first
        reason = " ".join(f"{type(first).__name__}: {first}".split())[:200]
        said = f"{len(failed)} of {len(work)} trainings failed ({reason})"
        raise WorkbenchError(f"{said}; the others are kept, and the same command goes on")


def trained(recipe: Recipe, task: bytes | None, device: str = "cpu") -> dict[str, bytes]:
    """On a worker: the files of a finished run, by their names in its folder."""
    with tempfile.TemporaryDirectory() as made:
        if task is not None:
            file = Path(made) / Path(recipe.task).name
            file.write_bytes(task)
            recipe = dataclasses.replace(recipe, task=str(file))
        run = train(recipe, Path(made) / "run" / f"seed-{recipe.seeds.initialisation}", device=device)
        files = (path for path in run.path.rglob("*") if path.is_file() and not path.name.startswith("."))
        return {path.relative_to(run.path).as_posix(): path.read_bytes() for path in files}


def _packed(recipe: Recipe) -> tuple[Recipe, bytes | None]:
    """A recipe with the bytes of its task's file, if it has one."""
    path = Path(recipe.task)
    return recipe, path.read_bytes() if path.suffix == ".toml" else None


@contextmanager
def workers(address: str) -> Iterator[Executor]:
    """The workers of a scheduler; what still runs is cancelled in the end."""
    try:
        from distributed import Client
    except ImportError:
        raise WorkbenchError("--dask needs Dask: pip install 'circuit-workbench[cluster]'") from None
    client, reason = None, ""
    try:
        client = Client(address, timeout=PATIENCE, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        reason = " ".join(str(error).split())[:100]
    if client is None:
        gc.collect()  # what failed closes when it is collected; while the next one starts, both would wait for ever
        raise WorkbenchError(f"no Dask scheduler answers at {address} ({reason}); start one: dask scheduler")
    try:
        versions: Any = client.run(version, on_error="return")
        for worker, found in versions.items():
            if found != workbench.__version__:
                said = found if isinstance(found, str) else " ".join(f"{type(found).__name__}: {found}".split())[:100]
                raise WorkbenchError(f"worker {worker} has another workbench ({said}), here is {workbench.__version__}")
        executor = _Workers(client)
        try:
            yield executor
        finally:
            executor.shutdown(cancel_futures=True)
    finally:
        client.close()


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
    """On a worker."""
    return workbench.__version__
