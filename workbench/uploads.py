"""A model that was trained elsewhere: its recipe and its weights, checked as what they are: a stranger's files.

Nothing is executed or unpickled. Sizes are compared before anything of that size is made: the file's header against
the shapes that the recipe asks for, which are worked out without memory. What is taken becomes a run like any other,
scored on the held-out sequences here.
"""

import dataclasses
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from workbench.errors import BadRecipe, BadRun, WorkbenchError
from workbench.recipes import Recipe, parse_recipe, recipe_names
from workbench.runs import WEIGHTS, Run, build_model, json_of, load, place_run, run_folder, runs_folder
from workbench.tasks import load_task, task_names
from workbench.untrusted import LARGEST_TOML, parse_toml, plain, short

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.recipes import ModelConfig
    from workbench.tasks.task import Task

LARGEST_WEIGHTS = 2**25  # bytes
LARGEST_HEADER = 2**20  # bytes
MOST = {"n_layers": 128, "n_ctx": 2**14}
LARGEST_MODEL = 2**28  # bytes, with what the recipe fixes and the file does not hold
LARGEST_STEP = 2**27  # numbers of one layer for all sequences that are scored at once
AT_ONCE = 512  # sequences, at most
LARGEST_MAPS = 2**25  # numbers of all heads' attention in one sequence
FLOATS = ("F64", "F32", "F16", "BF16")


def add_run(name: str, recipe: bytes, weights: bytes) -> Run:
    """Keep a recipe (TOML) and its weights (safetensors) as a run of this name, and return it.

    Raises: BadRecipe or BadRun with one line on what is wrong with which of the two; then nothing is kept.
    """
    asked = _recipe(name, recipe)
    _check_header(asked, weights)
    folder = run_folder(asked)
    if os.path.realpath(folder) != str(folder):
        raise BadRun(f"{plain(folder.parent)} is a link to another folder; choose another name")
    if folder.exists():
        raise BadRun(f"there is a run {asked.name} with seed {asked.seeds.initialisation} already; choose another name")
    results = _scored(asked, weights)
    files = {
        "recipe.toml": asked.to_toml().encode(),
        "model.safetensors": weights,
        "run.json": json_of(results),
    }
    try:
        place_run(folder, files)
    except OSError as error:
        raise WorkbenchError(f"cannot keep {asked.name} in {runs_folder()} ({error.strerror or error})") from None
    return load(folder)


def _recipe(name: str, data: bytes) -> Recipe:
    where = f"the recipe of {short(name, 60)!r}"
    if len(data) > LARGEST_TOML:
        raise BadRecipe(f"{where} has {len(data):,} bytes; expected at most {LARGEST_TOML:,}")
    try:
        raw = parse_toml(data)
    except ValueError as error:
        raise BadRecipe(f"{where} is not readable TOML ({error})") from None
    recipe = parse_recipe(raw, name, where)
    if recipe.name in recipe_names():
        raise BadRecipe(f"a model of the project is called {recipe.name}; choose another name")
    if recipe.name.startswith("."):
        raise BadRecipe(f"{recipe.name!r} begins with a dot; choose another name")
    if recipe.task not in task_names():
        raise BadRecipe(f"{where}: its task {short(recipe.task, 60)!r} is none of {', '.join(task_names())}")
    for field, most in MOST.items():
        if getattr(recipe.model, field) > most:
            raise BadRecipe(f"{where}: {field} = {getattr(recipe.model, field)}; expected at most {most}")
    return recipe


def _check_header(recipe: Recipe, data: bytes) -> None:
    """The tensors that the file says it holds are those of the recipe's model. Reads the header alone."""
    import torch

    from workbench.transformer import Transformer

    where = f"the weights of {recipe.name!r}"
    if len(data) > LARGEST_WEIGHTS:
        raise BadRun(f"{where} have {len(data):,} bytes; expected at most {LARGEST_WEIGHTS:,}")
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(LARGEST_HEADER, len(data) - 8):
        raise BadRun(f"{where} are no safetensors file; expected model.safetensors of a run")
    try:
        header = json.loads(data[8 : 8 + length].decode(), object_pairs_hook=_once_each)
        there = {name: _kind_and_shape(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadRun(f"{where} are no safetensors file: the header is damaged") from None
    task = load_task(recipe.task, recipe.seeds.split)
    sizes = {"n_ctx": recipe.model.n_ctx or task.n_ctx, "d_vocab": recipe.model.d_vocab or len(task.vocabulary)}
    config = dataclasses.replace(recipe.model, **sizes)
    if (size := 4 * config.numbers) > LARGEST_MODEL:
        raise BadRun(f"{where}: the recipe's model takes {size:,} bytes; expected at most {LARGEST_MODEL:,}")
    _check_work(where, config, task)
    with torch.device("meta"):
        model = Transformer(config, task.vocabulary)
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    for name in [*expected, *there]:
        shape, (kind, found) = expected.get(name), there.get(name, ("", None))
        if found != shape:
            has, wanted = short(str(found or "missing"), 60), shape or "no such tensor"
            raise BadRun(f"{where}: {plain(name, 80)} is {has}, where the recipe has {wanted}")
        if kind not in FLOATS:
            raise BadRun(
                f"{where}: {plain(name, 80)} is of type {plain(kind, 20)}; expected one of {', '.join(FLOATS)}"
            )


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What two readers cannot read in two ways. Raises: ValueError."""
    if len(made := dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return made


def _kind_and_shape(entry: dict[str, Any]) -> tuple[str, list[int]]:
    """Raises: TypeError or KeyError where they are not what they have to be."""
    kind, shape = entry["dtype"], entry["shape"]
    if type(kind) is not str or type(shape) is not list or not all(type(size) is int for size in shape):
        raise TypeError
    return kind, shape


def _check_work(where: str, config: "ModelConfig", task: "Task") -> None:
    """What the model computes on its way: heads and neurons may be many though the weights are few. Raises: BadRun."""
    length = task.n_ctx
    for what, size, most in (
        ("scoring", AT_ONCE * length * config.widest(length), LARGEST_STEP),
        ("attention", config.n_layers * config.n_heads * length**2, LARGEST_MAPS),
    ):
        if size > most:
            raise BadRun(f"{where}: the recipe's model takes {size:,} numbers in {what}; expected at most {most:,}")


def _scored(recipe: Recipe, data: bytes) -> dict[str, Any]:
    """What run.json says of these weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load as read

    from workbench.training import results_of, single_thread

    try:
        tensors: dict[str, Tensor] = read(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadRun(f"the weights of {recipe.name!r} are damaged ({plain(error, 100)})") from None
    for name, tensor in tensors.items():
        if not bool(tensor.float().isfinite().all()):  # as the model holds them
            raise BadRun(f"the weights of {recipe.name!r}: {name} holds numbers that are not finite")
    task = load_task(recipe.task, recipe.seeds.split)
    model = build_model(recipe, task)
    model.load_state_dict(tensors)
    with single_thread():
        files = {WEIGHTS: hashlib.sha256(data).hexdigest()}
        results = results_of(recipe, model.eval(), task, files, "trained elsewhere", 0.0)
    try:
        json.dumps(results, allow_nan=False)
    except ValueError:
        raise BadRun(f"the weights of {recipe.name!r} give scores that are not finite: they are too large") from None
    return results
