"""A trained model on disk. A run is a folder:

    recipe.toml            what was asked, every default spelt out
    model.safetensors      the weights
    run.json               what came out: scores, seconds, versions, hashes; written last: if it is there, all is
    metrics.jsonl          one line a logged step
    probes.jsonl           one line a probed step, where the recipe asks for probes
    checkpoints/           weights during training, step-000400.safetensors
    trainer.safetensors    only while unfinished: weights, optimizer and step, all that going on needs, in one file

Shipped runs lie in models/NAME, yours in runs/NAME/seed-N (or under $WORKBENCH_RUNS); yours come first. Nothing is
pickled, and every write is atomic: a temporary file, flushed to disk, renamed.
"""

import hashlib
import json
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.content import content
from workbench.errors import BadRecipe, BadRun, UnknownName, WorkbenchError
from workbench.files import write_atomic
from workbench.recipes import Recipe, load_recipe, read_recipe, recipe_names, shipped_names
from workbench.tasks import load_task, task_sha256
from workbench.wording import percent

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor

    from circuits.examples import Examples
    from workbench.tasks.task import Task
    from workbench.transformer import Transformer


@dataclass(frozen=True)
class Run:
    """A finished run. Model and task are read when first asked for."""

    path: Path
    recipe: Recipe
    results: dict[str, Any]
    """What run.json holds."""
    step: int | None = None
    """The checkpoint whose weights `model` has; None is the end of training."""

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def seed(self) -> int:
        return self.recipe.seeds.initialisation

    @property
    def shipped(self) -> bool:
        """Part of the project, or yours."""
        return self.path.parent == content("models")

    @property
    def key(self) -> str:
        """Changes whenever the weights do: what caches go by."""
        return f"{self.results['weights_sha256']}@{self.step}"

    @property
    def held_out_accuracy(self) -> float:
        return self.results["held_out"]["accuracy"]

    @property
    def score(self) -> str:
        """The figure that tells how good it is, in words: where even the truth guesses badly, not the accuracy."""
        measures = self.results["held_out"]["measures"]
        if "kl_to_truth" in measures:
            return f"KL to the truth {measures['kl_to_truth']:.4f} nats"
        if "perplexity" in measures:
            return f"held-out perplexity {measures['perplexity']:.2f}"
        return f"held-out {percent(self.held_out_accuracy)}"

    @cached_property
    def task(self) -> "Task":
        return load_task(self.recipe.task, self.recipe.seeds.split)

    @cached_property
    def model(self) -> "Transformer":
        """In evaluation mode, on the CPU."""
        weights = self.path / "model.safetensors"
        if self.step is not None:
            if self.step not in self.checkpoints:
                have = ", ".join(str(step) for step in self.checkpoints) or "none"
                raise BadRun(f"{self.path} has no checkpoint at step {self.step}; it has {have}")
            weights = checkpoint_path(self.path, self.step)
        else:
            self.check_weights()
        model = build_model(self.recipe, self.task)
        model.load_state_dict(read_tensors(weights)[0])
        return model.eval()

    def check_weights(self) -> None:
        """Raises: BadRun unless the weights on disk are those that run.json speaks of."""
        weights, again = self.path / "model.safetensors", f"delete {self.path} and train it again"
        try:
            intact = hashlib.sha256(weights.read_bytes()).hexdigest() == self.results["weights_sha256"]
        except OSError:
            raise BadRun(f"{weights} is missing; {again}") from None
        if not intact:
            raise BadRun(f"{weights} is damaged: its hash is not the one in run.json; {again}")

    @cached_property
    def checkpoints(self) -> list[int]:
        """The steps whose weights were kept."""
        steps = (path.stem.removeprefix("step-") for path in self.path.glob("checkpoints/step-*.safetensors"))
        return sorted(int(step) for step in steps if step.isdecimal())

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a logged step: step, loss, lr, held_out_loss, held_out_accuracy."""
        return read_metrics(self.path)

    def encode(self, text: str) -> "Int[Tensor, '1 position']":
        return self.task.encode(text)

    def decode(self, tokens: "Int[Tensor, '*one position']") -> str:
        return self.task.decode(tokens)

    def str_tokens(self, tokens: "Int[Tensor, '*one position']") -> list[str]:
        return self.task.str_tokens(tokens)

    def examples(self, part: Literal["train", "held_out"] = "held_out", n: int | None = None) -> "Examples":
        """The task's prompts with right and wrong answers, roles and clusters, as `circuits` takes them.

        `n` draws that many, the same ones every time. Raises: Undefined for a task that names no wrong answer.
        """
        from workbench.evidence import examples

        return examples(self, part, n)


def load(name_or_path: str | Path, seed: int | None = None, step: int | None = None) -> Run:
    """A run by name (yours before the shipped one), by name and seed, or by the path of its folder.

    `step` loads a checkpoint instead of the final weights. Raises: UnknownName with the nearest names; BadRun if the
    run is missing, unfinished or damaged.
    """
    path, name = Path(name_or_path), str(name_or_path)
    if name.strip() and os.path.exists(path / "recipe.toml"):  # os.path: a name too long for the system is no error
        run = _read(path.resolve(), step)
        if seed not in (None, run.seed):
            raise BadRun(f"{path} has seed {run.seed}, not {seed}")
        return run
    yours, shipped = runs_folder() / name / f"seed-{seed or 0}", content("models") / name
    ships = not seed and name in shipped_names()
    if os.path.exists(yours / "run.json") or (os.path.exists(yours / "recipe.toml") and not ships):
        return _read(yours, step)
    if ships:
        return _read(shipped, step)
    if name in recipe_names():
        raise BadRun(f"{name} with seed {seed or 0} is not trained; run: workbench train {name} --seeds {seed or 0}")
    known = {*recipe_names(), *(p.parent.name for p in runs_folder().glob("*/seed-*"))}
    if name in known:
        raise BadRun(f"{name} has no seed {seed or 0}; train it from its recipe")
    if name.strip() and (path.name != name or os.path.isdir(path)):
        raise BadRun(
            f"{name[:200]!r}: no run there; a run is a folder with recipe.toml, model.safetensors and run.json"
        )
    raise UnknownName("model", name, known)


def list_runs() -> tuple[list[Run], list[WorkbenchError]]:
    """Every finished run, yours before the shipped ones, and what is wrong with the others."""
    runs, faults = [], []
    for folder in _run_folders():
        try:
            runs.append(_read(folder, None))
        except WorkbenchError as error:
            faults.append(error)
    return runs, faults


def runs_folder() -> Path:
    return Path(os.environ.get("WORKBENCH_RUNS") or "runs").resolve()


def run_folder(recipe: Recipe) -> Path:
    """Where this recipe's run belongs. A shipped recipe that was changed gets a name of its own from its hash."""
    name = recipe.name
    if name in recipe_names() and load_recipe(name).experiment != recipe.experiment:
        name = f"{name}-{recipe.experiment[:8]}"
    return runs_folder() / name / f"seed-{recipe.seeds.initialisation}"


def build_model(recipe: Recipe, task: "Task") -> "Transformer":
    """The untrained model of a recipe: sizes from the task, initial weights from the seed, or written by hand."""
    from dataclasses import replace

    from workbench.transformer import Transformer

    sizes = {"n_ctx": recipe.model.n_ctx or task.n_ctx, "d_vocab": recipe.model.d_vocab or len(task.vocabulary)}
    if sizes["n_ctx"] < task.n_ctx:
        raise BadRecipe(f"n_ctx = {sizes['n_ctx']} is too small: {task.name} has sequences of {task.n_ctx} tokens")
    if sizes["d_vocab"] != len(task.vocabulary):
        raise BadRecipe(f"d_vocab = {sizes['d_vocab']}, but {task.name} has {len(task.vocabulary)} words; leave it out")
    try:
        model = Transformer(replace(recipe.model, **sizes), task.vocabulary, seed=recipe.seeds.initialisation)
    except (RuntimeError, MemoryError) as error:  # what torch's allocator raises
        raise BadRecipe(f"{recipe.name} does not fit into memory ({str(error).splitlines()[0][:80]})") from None
    if recipe.model.init == "by-hand":
        from workbench.by_hand import write_weights

        write_weights(model, task)
    return model


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line torn by a crash is left out."""
    file = path / "metrics.jsonl"
    lines = file.read_bytes().splitlines() if file.exists() else []
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            metrics.append({"step": int(json.loads(line)["step"])} | json.loads(line))
        except (ValueError, TypeError, KeyError):
            if number < len(lines):
                raise BadRun(f"{file} is damaged in line {number}") from None
    return metrics


def write_tensors(path: Path, tensors: "dict[str, torch.Tensor]", metadata: dict[str, str] | None = None) -> str:
    """Write safetensors atomically; returns the file's sha256."""
    from safetensors.torch import save

    # a tied weight appears under two names, and safetensors refuses shared memory
    data = save({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, metadata)
    write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def read_tensors(path: Path) -> "tuple[dict[str, torch.Tensor], dict[str, str]]":
    """Tensors and metadata of a safetensors file. Raises: BadRun if it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadRun(f"{path} is missing or damaged ({error}); delete it and train again") from None


def place_run(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put a whole run where it belongs, all of its files or none. Raises: OSError, also where there already is one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, data in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            write_atomic(made / name, data)
        made.chmod(0o755)
        os.rename(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06}.safetensors"


def _run_folders() -> Iterator[Path]:
    yield from sorted(p for p in runs_folder().glob("*/seed-*") if p.is_dir())
    yield from (content("models") / name for name in shipped_names())


def _read(path: Path, step: int | None) -> Run:
    again = f"delete {path} and train it again"
    if not (path / "recipe.toml").exists():
        raise BadRun(f"{path} is damaged: recipe.toml is missing; {again}")
    recipe = read_recipe(path / "recipe.toml")
    if not (path / "run.json").exists():
        home, seed = run_folder(recipe), recipe.seeds.initialisation
        move = "" if home == path else f"move it to {home}, then "
        command = f"workbench train {shlex.quote(str(home / 'recipe.toml'))} --seeds {seed} --resume"
        raise BadRun(f"{path} is not finished; to go on: {move}{command}")
    try:
        results = json.loads((path / "run.json").read_bytes())
        _check_results(results)
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise BadRun(f"{path / 'run.json'} is damaged ({type(error).__name__}: {error}); {again}") from None
    if results["recipe_sha256"] != recipe.sha256:
        raise BadRun(f"{path}: recipe.toml was changed after training; its hash is not the one in run.json")
    if results["task_sha256"] != task_sha256(recipe.task):
        raise BadRun(f"{path}: the task {recipe.task} was changed after training; {again}")
    return Run(path, recipe, results, step)


def _check_results(results: Any) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError unless every figure that is read is there and sound."""
    rates, numbers = [], [results["seconds"]]
    for key in ("parameters", "steps"):
        if type(results[key]) is not int:
            raise ValueError(f"{key} is no whole number")
    for part in (results["held_out"], results["train"]):
        rates += [part["accuracy"], *part["rates"].values()]
        numbers += [part["loss"], *part["measures"].values()]
    for n, accuracy in results["held_out"]["by_cluster"].values():
        numbers.append(n)
        rates.append(accuracy)
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers + rates):
        raise ValueError("a figure is no number")
    if not all(0 <= rate <= 1 for rate in rates):
        raise ValueError("a rate is not between 0 and 1")
    for key in ("recipe_sha256", "task_sha256", "weights_sha256"):
        if type(results[key]) is not str:
            raise ValueError(f"{key} is no text")
