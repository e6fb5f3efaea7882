"""An unfinished run: the state it can go on from, whether it may, and one process at a time.

The state, all that going on needs, is one safetensors file. In its metadata stand, as JSON, where the training stands
(`Saved`), and the hashes of the recipe, of the task and of the file itself. A hash shows damage, but whoever wrote the
file could give it the right one: what it says is checked before it is used. Its tensors are checked by the trainer
(workbench.training), which knows their shapes.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from workbench.errors import BadRun, WorkbenchError
from workbench.files import write_atomic
from workbench.recipes import Recipe, read_recipe
from workbench.runs import RESULTS, again, as_safetensors, bytes_in, checkpoint_name, load, tensors_of
from workbench.tasks import task_sha256

STATE = "trainer.safetensors"
SEAL, UNSEALED = re.compile(rb'"sha256":"([0-9a-f]{64})"'), b"0" * 64
"""Where a state holds its hash, and what stands there while it is taken."""


@dataclass(frozen=True)
class Saved:
    """Where a training stood when its state was saved."""

    step: int
    """Updates made."""
    seconds: float
    losses: list[float]
    """Training losses since the last logged step."""
    files: dict[str, str]
    """The hash of each checkpoint and log so far."""
    sizes: dict[str, int]
    """Of the logs, in bytes: what comes after was written later."""

    @classmethod
    def of(cls, metadata: dict[str, str], steps: int, checkpoints: Collection[str], logs: Collection[str]) -> "Saved":
        """Raises: ValueError with what is not as a trainer of so many steps, with these files, writes it."""
        said: dict[str, Any] = {}
        for field in fields(cls):
            try:
                said[field.name] = json.loads(metadata[field.name])
            except (KeyError, ValueError, RecursionError):
                raise ValueError(f"its {field.name} cannot be read") from None
        step, seconds, losses, files, sizes = said.values()
        for name, sound in {
            "step": type(step) is int and 0 <= step <= steps,
            "seconds": _is_finite(seconds) and seconds >= 0,
            "losses": type(losses) is list and all(map(_is_finite, losses)) and math.isfinite(sum(losses)),
            "files": type(files) is dict
            and all(name in (*checkpoints, *logs) and type(sha256) is str for name, sha256 in files.items()),
            "sizes": type(sizes) is dict and sizes.keys() == {*logs}
            and all(type(size) is int and size >= 0 for size in sizes.values()),
        }.items():  # fmt: skip
            if not sound:
                raise ValueError(f"its {name} are none of this training")
        return cls(**said)

    def metadata(self) -> dict[str, str]:
        return {name: json.dumps(value) for name, value in asdict(self).items()}


def _is_finite(number: Any) -> bool:
    return type(number) is float and math.isfinite(number)


def check_folder(folder: Path, recipe: Recipe, resume: bool) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Whether this recipe may be trained in this folder; the saved state if there is one to go on from.

    Raises: BadRun if the folder holds another experiment, other files, a link in the place of its checkpoints, or an
    unfinished run without `resume`.
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
    if os.path.islink(checkpoints := (folder / checkpoint_name(0)).parent):
        raise BadRun(f"{checkpoints} is a link, and training writes there; put a folder in its place")
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
    if not _is_sealed(data):
        raise BadRun(f"{state} is damaged: its hash is not the one it holds; {start_over(folder)}")
    try:
        tensors = tensors_of(data, state)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (BadRun, ValueError, RecursionError):
        raise BadRun(f"{state} is no safetensors file; {start_over(folder)}") from None
    metadata = header.get("__metadata__") or {}
    for what, before, now in (
        ("recipe", metadata.get("recipe_sha256"), recipe.sha256),
        (f"task {recipe.task}", metadata.get("task_sha256"), task_sha256(recipe.task)),
    ):
        if before != now:
            raise BadRun(f"the {what} was changed since {folder} was begun; change it back, or {start_over(folder)}")
    return tensors, metadata


def _is_sealed(state: bytes) -> bool:
    """Whether it is what was written."""
    sealed = SEAL.search(state)
    return sealed is not None and sealed[1] == _sha256_unsealed(state.replace(sealed[1], UNSEALED, 1))


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
