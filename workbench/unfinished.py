"""An unfinished run: the state it can go on from, whether it may, and one process at a time.

The state, all that going on needs, is one safetensors file; what else it holds, in its metadata, is the trainer's
business (workbench.training), but for the recipe's hash, the task's, and that of the file itself.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from workbench.errors import BadRun, WorkbenchError
from workbench.files import write_atomic
from workbench.recipes import Recipe, read_recipe
from workbench.runs import RESULTS, again, as_safetensors, bytes_in, load, tensors_of
from workbench.tasks import task_sha256

STATE = "trainer.safetensors"
SEAL, UNSEALED = re.compile(rb'"sha256":"([0-9a-f]{64})"'), b"0" * 64
"""Where a state holds its hash, and what stands there while it is taken."""


def check_folder(folder: Path, recipe: Recipe, resume: bool) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Whether this recipe may be trained in this folder; the saved state if there is one to go on from.

    Raises: BadRun if the folder holds another experiment, other files, or an unfinished run without `resume`.
    """
    state, asked = folder / STATE, folder / "recipe.toml"
    if os.path.exists(asked):
        try:
            there = read_recipe(asked)
        except WorkbenchError as error:
            raise BadRun(f"{error}; {again(folder, asked.name)}") from None
        if there.sha256 != recipe.sha256:
            raise BadRun(
                f"{folder} was made from another recipe ({_difference(there, recipe)}); "
                "move it away, or choose another name"
            )
    elif (
        os.path.exists(folder) and not os.path.lexists(state) and any(name[0] != "." for name in _names(folder))
        and not os.path.exists(asked)  # asked again: another process may have begun just now
    ):  # fmt: skip
        raise BadRun(f"{folder} holds other files and no run; choose another name")
    if os.path.exists(folder / RESULTS):
        finished = load(folder)
        finished.check_weights()
        if finished.results["task_sha256"] != task_sha256(recipe.task):
            raise BadRun(f"the task {recipe.task} was changed since {folder} was trained; move it away")
        return None
    if not os.path.lexists(state):
        return None
    if not resume:
        raise BadRun(f"{folder} is unfinished; add --resume to go on, or delete it to start over")
    try:
        data = bytes_in(state)
    except FileNotFoundError:  # the process that trains it has just finished
        return None
    except OSError as error:
        raise BadRun(f"{state} cannot be read ({error.strerror or error}); {start_over(folder)}") from None
    metadata = _metadata(data)
    if metadata is None:
        raise BadRun(f"{state} is damaged: its hash is not the one it holds; {start_over(folder)}")
    for what, before, now in (
        ("recipe", metadata.get("recipe_sha256"), recipe.sha256),
        (f"task {recipe.task}", metadata.get("task_sha256"), task_sha256(recipe.task)),
    ):
        if before != now:
            raise BadRun(f"the {what} was changed since {folder} was begun; change it back, or {start_over(folder)}")
    return tensors_of(data, state), metadata


def _metadata(state: bytes) -> dict[str, str] | None:
    """What a trainer's state says beside its tensors; None if it is not what was written."""
    sealed = SEAL.search(state)
    if sealed is None or sealed[1] != _sha256_unsealed(state.replace(sealed[1], UNSEALED, 1)):
        return None
    return json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])["__metadata__"]


def _sha256_unsealed(state: bytes) -> bytes:
    return hashlib.sha256(state).hexdigest().encode()


def write_state(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Whole or not at all, with a hash of itself."""
    data = as_safetensors(tensors, metadata | {"sha256": UNSEALED.decode()})
    write_atomic(folder / STATE, data.replace(UNSEALED, _sha256_unsealed(data), 1))


def start_over(folder: Path) -> str:
    return f"delete {folder / STATE} to start over"


def _names(folder: Path) -> list[str]:
    """Of what a folder holds. Raises: BadRun."""
    try:
        return os.listdir(folder)
    except OSError as error:
        raise BadRun(f"{folder} cannot be read ({error.strerror}); choose another name") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time. The lock is the system's and ends with its process; its file lies beside the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
            yield
    except Timeout:
        raise BadRun(f"another process is training {folder}; wait for it") from None


def _difference(one: Recipe, other: Recipe) -> str:
    """The first field in which two recipes differ."""

    def flat(recipe: Recipe) -> Iterator[tuple[str, Any]]:
        for key, value in recipe.to_dict().items():
            if isinstance(value, dict):
                yield from ((f"{key}.{k}", v) for k, v in value.items() if k != "probes")
            elif key == "task":
                yield key, Path(value).name  # wherever it lies
            elif key not in ("name", "about"):
                yield key, value

    return next(
        f"{key} = {before} there, {after} here"
        for (key, before), (_, after) in zip(flat(one), flat(other), strict=True)
        if before != after
    )
