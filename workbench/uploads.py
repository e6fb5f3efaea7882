"""A model that was trained elsewhere: its recipe and its weights, checked as what they are: a stranger's files.

Nothing is executed or unpickled. Sizes are compared before anything of that size is made: the file's header against
the shapes that the recipe asks for, which are worked out without memory. What is taken becomes a run like any other,
scored on the held-out sequences here.
"""

import dataclasses
import hashlib
import json
import tomllib
from typing import TYPE_CHECKING, Any

from workbench.errors import BadRecipe, BadRun, WorkbenchError
from workbench.recipes import Recipe, parse_recipe, recipe_names
from workbench.runs import Run, build_model, load, place_run, run_folder, runs_folder
from workbench.tasks import load_task, task_names

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_RECIPE = 2**16  # bytes
LARGEST_WEIGHTS = 2**25  # bytes
LARGEST_HEADER = 2**20  # bytes
MOST = {"n_layers": 128, "n_ctx": 2**14}
LARGEST_MODEL = 2**28  # bytes, with what the recipe fixes and the file does not hold
FLOATS = ("F64", "F32", "F16", "BF16")


def add_run(name: str, recipe: bytes, weights: bytes) -> Run:
    """Keep a recipe (TOML) and its weights (safetensors) as a run of this name, and return it.

    Raises: BadRecipe or BadRun with one line on what is wrong with which of the two; then nothing is kept.
    """
    asked = _recipe(name, recipe)
    _check_header(asked, weights)
    folder = run_folder(asked)
    if folder.exists():
        raise BadRun(f"there is a run {asked.name} with seed {asked.seeds.initialisation} already; choose another name")
    results = _scored(asked, weights)
    files = {
        "recipe.toml": asked.to_toml().encode(),
        "model.safetensors": weights,
        "run.json": json.dumps(results, indent=1).encode(),
    }
    try:
        place_run(folder, files)
    except OSError as error:
        raise WorkbenchError(f"cannot keep {asked.name} in {runs_folder()} ({error.strerror or error})") from None
    return load(folder)


def _recipe(name: str, data: bytes) -> Recipe:
    where = f"the recipe of {name[:100]!r}"
    if len(data) > LARGEST_RECIPE:
        raise BadRecipe(f"{where} has {len(data):,} bytes; expected at most {LARGEST_RECIPE:,}")
    try:
        raw = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise BadRecipe(f"{where} is not readable TOML ({str(error)[:100] or type(error).__name__})") from None
    recipe = parse_recipe(raw, name, where)
    if recipe.name in recipe_names():
        raise BadRecipe(f"a model of the project is called {recipe.name}; choose another name")
    if recipe.name.startswith("."):
        raise BadRecipe(f"{recipe.name!r} begins with a dot; choose another name")
    if recipe.task not in task_names():
        raise BadRecipe(f"{where}: its task {recipe.task[:100]!r} is none of {', '.join(task_names())}")
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
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        there = {
            name: (str(entry["dtype"]), [int(size) for size in entry["shape"]])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise BadRun(f"{where} are no safetensors file: the header is damaged") from None
    task = load_task(recipe.task, recipe.seeds.split)
    sizes = {"n_ctx": recipe.model.n_ctx or task.n_ctx, "d_vocab": recipe.model.d_vocab or len(task.vocabulary)}
    with torch.device("meta"):
        model = Transformer(dataclasses.replace(recipe.model, **sizes), task.vocabulary)
    size = 4 * sum(weight.numel() for weight in [*model.parameters(), *model.buffers()])
    if size > LARGEST_MODEL:
        raise BadRun(f"{where}: the recipe's model takes {size:,} bytes; expected at most {LARGEST_MODEL:,}")
    expected = {name: list(weight.shape) for name, weight in model.state_dict().items()}
    for name in [*expected, *there]:
        shape, (kind, found) = expected.get(name), there.get(name, ("", None))
        if found != shape:
            raise BadRun(
                f"{where}: {name[:100]} is {found or 'missing'}, where the recipe has {shape or 'no such tensor'}"
            )
        if kind not in FLOATS:
            raise BadRun(f"{where}: {name[:100]} is of type {kind[:20]}; expected one of {', '.join(FLOATS)}")


def _scored(recipe: Recipe, data: bytes) -> dict[str, Any]:
    """What run.json says of these weights."""
    from safetensors import SafetensorError
    from safetensors.torch import load as read

    from workbench.training import results_of, single_thread

    try:
        tensors: dict[str, Tensor] = read(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadRun(f"the weights of {recipe.name!r} are damaged ({str(error)[:100]})") from None
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise BadRun(f"the weights of {recipe.name!r}: {name} holds numbers that are not finite")
    task = load_task(recipe.task, recipe.seeds.split)
    model = build_model(recipe, task)
    model.load_state_dict(tensors)
    with single_thread():
        return results_of(recipe, model.eval(), task, hashlib.sha256(data).hexdigest(), "trained elsewhere", 0.0)
