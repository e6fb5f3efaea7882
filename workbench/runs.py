"""A trained model on disk. A run is a folder:

    recipe.toml            what was asked, every default spelt out
    model.safetensors      the weights
    run.json               what came out: scores, seconds, versions, and the hash of every file that training wrote;
                           written last: if it is there, all is
    metrics.jsonl          one line a logged step
    probes.jsonl           one line a probed step, where the recipe asks for probes
    checkpoints/           weights during training, step-000400.safetensors
    trainer.safetensors    only while unfinished: weights, optimizer and step, all that going on needs, in one file
                           that carries its own hash and those of the checkpoints, metrics and probes so far

Shipped runs lie in models/NAME, yours in runs/NAME/seed-N (or under $WORKBENCH_RUNS); yours come first. Nothing is
pickled, and every write is atomic: a temporary file, flushed to disk, renamed. Every file is checked against its hash
when it is read (recipe and task against what they say, comments apart), run.json against its own.
"""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from workbench.content import content
from workbench.errors import BadRecipe, BadRun, UnknownName, WorkbenchError
from workbench.files import flush_folder, write_atomic
from workbench.recipes import ModelConfig, Recipe, load_recipe, read_recipe, recipe_names, shipped_names
from workbench.tasks import load_task, task_sha256
from workbench.untrusted import is_plain, plain, read_file, short
from workbench.wording import percent

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor

    from circuits.examples import Examples
    from workbench.tasks.task import Task
    from workbench.transformer import Transformer

WEIGHTS, METRICS, RESULTS = "model.safetensors", "metrics.jsonl", "run.json"
CHECKPOINT = re.compile(r"checkpoints/step-([0-9]{6,18})\.safetensors")
LARGEST = {".json": 2**24, ".jsonl": 2**28, ".safetensors": 2**32}
"""Bytes that are read of a run's files, by suffix."""
LARGEST_HEADER = 2**20
"""Bytes of what a safetensors file says of itself."""
MOST = 10**12
"""Of steps and parameters."""
MOST_LINES = 2**18
"""Of metrics or probes."""


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
        return f"{self.weights_sha256}@{self.step}"

    @property
    def weights_sha256(self) -> str:
        """Of model.safetensors: the weights at the end of training."""
        return self.results["files"][WEIGHTS]

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
        name = WEIGHTS
        if self.step is not None:
            if self.step not in self.checkpoints:
                have = ", ".join(str(step) for step in self.checkpoints) or "none"
                raise BadRun(f"{self.path} has no checkpoint at step {self.step}; it has {have}")
            name = checkpoint_name(self.step)
        most = 8 * sized(self.recipe, self.task).numbers + LARGEST_HEADER
        weights = self._read(name, most)
        model = build_model(self.recipe, self.task)
        model.load_state_dict(tensors_of(weights, self.path / name))
        return model.eval()

    def check_weights(self) -> None:
        """Raises: BadRun unless the weights on disk are those that run.json speaks of."""
        self._read(WEIGHTS)

    @cached_property
    def checkpoints(self) -> list[int]:
        """The steps whose weights were kept."""
        files = self.results["files"]
        steps = {int(found[1]) for name in files if (found := CHECKPOINT.fullmatch(name))}
        return sorted(step for step in steps if checkpoint_name(step) in files)

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a logged step: step, loss, lr, held_out_loss, held_out_accuracy."""
        return _metrics(self._read(METRICS), self.path / METRICS) if METRICS in self.results["files"] else []

    def _read(self, name: str, most: int | None = None) -> bytes:
        return read_checked(self.path / name, self.results["files"][name], again(self.path, RESULTS), most=most)

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
    yours_named = {p.parent.name for p in runs_folder().glob("*/seed-*")}
    known = {*recipe_names(), *filter(is_plain, yours_named)}
    if name in known:
        raise BadRun(f"{name} has no seed {seed or 0}; train it from its recipe")
    if name.strip() and (path.name != name or os.path.isdir(path)):
        raise BadRun(
            f"{short(name, 60)!r}: no run there; a run is a folder with recipe.toml, model.safetensors and run.json"
        )
    raise UnknownName("model", short(name, 60), known)


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
    """Raises: WorkbenchError where $WORKBENCH_RUNS leads nowhere."""
    asked = os.environ.get("WORKBENCH_RUNS") or "runs"
    try:
        return Path(asked).expanduser().resolve()
    except (RuntimeError, OSError) as error:  # links in a circle, or a user who has no home
        raise WorkbenchError(f"WORKBENCH_RUNS = {plain(asked)} leads nowhere ({error}); name a folder") from None


def run_folder(recipe: Recipe) -> Path:
    """Where this recipe's run belongs. A shipped recipe that was changed gets a name of its own from its hash."""
    name = recipe.name
    if name in recipe_names() and load_recipe(name).experiment != recipe.experiment:
        name = f"{name}-{recipe.experiment[:8]}"
    return runs_folder() / name / f"seed-{recipe.seeds.initialisation}"


def sized(recipe: Recipe, task: "Task") -> ModelConfig:
    """The recipe's model with the sizes of its task. Raises: BadRecipe where it does not fit the task, or memory."""
    sizes = {"n_ctx": recipe.model.n_ctx or task.n_ctx, "d_vocab": recipe.model.d_vocab or len(task.vocabulary)}
    if sizes["n_ctx"] < task.n_ctx:
        raise BadRecipe(f"n_ctx = {sizes['n_ctx']} is too small: {task.name} has sequences of {task.n_ctx} tokens")
    if sizes["d_vocab"] != len(task.vocabulary):
        raise BadRecipe(f"d_vocab = {sizes['d_vocab']}, but {task.name} has {len(task.vocabulary)} words; leave it out")
    config = replace(recipe.model, **sizes)
    config.check_size(recipe.name, task.n_ctx)
    return config


def build_model(recipe: Recipe, task: "Task") -> "Transformer":
    """The untrained model of a recipe: sizes from the task, initial weights from the seed, or written by hand."""
    from workbench.transformer import Transformer

    config = sized(recipe, task)
    try:
        model = Transformer(config, task.vocabulary, seed=recipe.seeds.initialisation)
    except (RuntimeError, MemoryError) as error:  # what torch's allocator raises
        raise BadRecipe(f"{recipe.name} does not fit into memory ({str(error).splitlines()[0][:80]})") from None
    if recipe.model.init == "by-hand":
        from workbench.by_hand import write_weights

        write_weights(model, task)
    return model


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of the metrics of a run that may still be training; a last line torn by a crash is left out.

    Raises: BadRun if another line is damaged.
    """
    file = path / METRICS
    try:
        data = bytes_in(file) if os.path.exists(file) else b""
    except OSError as error:
        raise BadRun(f"{file} cannot be read ({error.strerror or error})") from None
    return _metrics(data, file)


def bytes_in(file: Path, most: int | None = None) -> bytes:
    """All of one of a run's files. Raises: OSError, also for what is no ordinary file or larger than `most`."""
    largest = LARGEST[file.suffix] if most is None else most
    return read_file(file, min(file.stat().st_size, largest))  # which takes as much memory as it may need


def read_checked(file: Path, sha256: str, then: str, size: int | None = None, most: int | None = None) -> bytes:
    """A file's bytes, or the first `size` of them. `then` says what to do about a damaged one.

    Raises: BadRun unless they have this hash, and the file at most `most` bytes.
    """
    try:
        data = bytes_in(file, most)[:size]
    except FileNotFoundError:
        raise BadRun(f"{file} is missing; {then}") from None
    except OSError as error:
        raise BadRun(f"{file} cannot be read ({error.strerror or error}); {then}") from None
    if hashlib.sha256(data).hexdigest() != sha256:
        raise BadRun(f"{file} is damaged: its hash is not the recorded one; {then}")
    return data


def tensors_of(data: bytes, file: Path) -> "dict[str, torch.Tensor]":
    """What a safetensors file holds. Raises: BadRun naming the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise BadRun(f"{file} is damaged ({plain(error, 100)}); delete it and train again") from None


def as_safetensors(tensors: "dict[str, torch.Tensor]", metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file."""
    from safetensors.torch import save

    # a tied weight appears under two names, and safetensors refuses shared memory
    return save({name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}, metadata)


def write_tensors(file: Path, tensors: "dict[str, torch.Tensor]") -> str:
    """Write safetensors atomically; returns the file's sha256."""
    data = as_safetensors(tensors)
    write_atomic(file, data)
    return hashlib.sha256(data).hexdigest()


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write run.json."""
    write_atomic(folder / RESULTS, json_of(results))


def json_of(results: dict[str, Any]) -> bytes:
    """run.json: the results, and the hash of what they say."""
    return (json.dumps(results | {"sha256": _sha256(results)}, indent=1) + "\n").encode()


def place_run(folder: Path, files: Mapping[str, bytes]) -> None:
    """Put a whole run where it belongs, all of its files or none.

    Raises: OSError, also where there already is one; BadRun while another process trains it.
    """
    from workbench.unfinished import locked

    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, data in files.items():
            (made / name).parent.mkdir(exist_ok=True)
            write_atomic(made / name, data)
        made.chmod(0o755)
        with locked(folder):
            folder.rmdir()  # which the lock has made; Windows renames to nothing that is there
            os.rename(made, folder)
        flush_folder(folder.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def checkpoint_name(step: int) -> str:
    return f"checkpoints/step-{step:06}.safetensors"


def again(path: Path, name: str) -> str:
    """What to do about a damaged file of a run: where a crash left a state to go on from, the run is not lost."""
    if os.path.exists(path / "trainer.safetensors"):
        return f"delete {path / name}, and --resume goes on from the last saved state"
    return f"delete {path} and train it again"


def _run_folders() -> Iterator[Path]:
    yield from sorted(p for p in runs_folder().glob("*/seed-*") if os.path.isdir(p))
    yield from (content("models") / name for name in shipped_names())


def _read(path: Path, step: int | None) -> Run:
    if not is_plain(str(path)):
        raise BadRun(f"{plain(path)}: the name of this folder cannot be shown; rename it")
    file, then = path / RESULTS, again(path, RESULTS)
    if not os.path.exists(path / "recipe.toml"):
        raise BadRun(f"{path} is damaged: recipe.toml is missing; put it back, or delete {path} and train it again")
    recipe = read_recipe(path / "recipe.toml")
    if not os.path.exists(file):
        home, seed = run_folder(recipe), recipe.seeds.initialisation
        move = "" if home == path else f"move it to {home}, then "
        command = f"workbench train {shlex.quote(str(home / 'recipe.toml'))} --seeds {seed} --resume"
        raise BadRun(f"{path} is not finished; to go on: {move}{command}")
    try:
        results = json.loads(bytes_in(file))
        intact = results["sha256"] == _sha256(results)
        _check_results(results)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError, RecursionError) as error:
        raise BadRun(f"{file} is damaged ({type(error).__name__}: {plain(error, 100)}); {then}") from None
    if not intact:
        raise BadRun(f"{file} is damaged: its hash is not the one it holds; {then}")
    if results["recipe_sha256"] != recipe.sha256:
        raise BadRun(f"{path}: recipe.toml was changed after training; its hash is not the one in run.json")
    if results["task_sha256"] != task_sha256(recipe.task):
        raise BadRun(f"{path}: the task {recipe.task} was changed after training; {then}")
    return Run(path, recipe, results, step)


def _sha256(results: dict[str, Any]) -> str:
    """Of what run.json says, its own hash apart."""
    said = {key: value for key, value in results.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def lines_of(data: bytes, file: Path) -> list[bytes]:
    """Raises: BadRun for more than `MOST_LINES`."""
    if (n := data.count(b"\n")) > MOST_LINES:
        raise BadRun(f"{file} has {n:,} lines; expected at most {MOST_LINES:,}")
    return data.splitlines()


def _metrics(data: bytes, file: Path) -> list[dict[str, Any]]:
    lines = lines_of(data, file)
    metrics = []
    for number, line in enumerate(lines, start=1):
        try:
            metrics.append({"step": int(json.loads(line)["step"])} | json.loads(line))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            if number < len(lines):
                raise BadRun(f"{file} is damaged in line {number}") from None
    return metrics


def _check_results(results: Any) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError unless every figure that is read is there and sound."""
    rates, numbers = [], [results["seconds"]]
    for key in ("parameters", "steps"):
        if type(results[key]) is not int or not 0 <= results[key] <= MOST:
            raise ValueError(f"{key} is no whole number from 0 to {MOST}")
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
    for name, sha256 in ({key: results[key] for key in ("recipe_sha256", "task_sha256")} | results["files"]).items():
        if type(sha256) is not str:
            raise ValueError(f"the hash of {name} is no text")
    if WEIGHTS not in results["files"]:
        raise ValueError(f"files lacks {WEIGHTS}")
