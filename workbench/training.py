"""Training: AdamW on next-token loss, made so that going on after a crash ends in the very same weights.

Everything random is a pure function of the recipe: initial weights of `seeds.initialisation`, batch t of
(`seeds.batches`, t), dropout of the same pair. The trainer's state (weights, optimizer, step) is one file, written
atomically. So a run that is stopped anywhere, by Ctrl-C or by a power cut, and resumed from its last saved state
repeats the lost steps exactly.
"""

import ctypes
import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from jaxtyping import Int
from torch import Tensor

import workbench
from workbench.errors import BadRun, WorkbenchError
from workbench.files import write_atomic
from workbench.probes import PROBES, append_probes, keep_probes, probe, sequences_of
from workbench.recipes import Recipe, TrainingConfig, load_recipe, read_recipe, recipe_names
from workbench.runs import (
    Run,
    build_model,
    checkpoint_path,
    load,
    read_metrics,
    read_tensors,
    run_folder,
    write_tensors,
)
from workbench.tasks import load_task, task_sha256
from workbench.tasks.task import Scores, Task
from workbench.transformer import Transformer

Progress = Callable[[dict[str, Any]], None]
"""Called with each line of metrics as it is written."""


GLIBC = {-3: 2**30, -1: 2**31 - 1, -2: 2**26}
"""malloc.h: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD, in bytes."""
LOGITS_AT_ONCE = 2**24
"""Numbers: 64 MB, and as much again for their logarithms."""
LEAST_PROBED = 24
"""Steps that are probed."""


def train(recipe: Recipe, folder: Path | None = None, *, resume: bool = False, progress: Progress | None = None) -> Run:
    """Train a recipe, or return its run if it is already trained.

    `resume` goes on with an unfinished run instead of refusing it. Uses one thread: a tiny model gains nothing from a
    second one, and results would depend on their number.

    Raises: BadRun if the folder holds an unfinished run (without `resume`) or one made from another recipe.
    """
    folder = folder or run_folder(recipe)
    check_folder(folder, recipe, resume)
    if (folder / "run.json").exists():
        return load(folder)
    trainer = Trainer.build(recipe, folder)  # whatever is wrong with a recipe is found before anything is written
    try:
        _keep_freed_memory()
        with _locked(folder), single_thread(), torch.random.fork_rng(devices=[]):
            saved = check_folder(folder, recipe, resume)
            if not (folder / "run.json").exists():
                trainer.begin() if saved is None else trainer.restore(*saved)
                trainer.run(progress or (lambda line: None))
    except OSError as error:
        raise WorkbenchError(f"cannot write to {folder} ({error.strerror or error}); what was saved is kept") from None
    return load(folder)


def evaluate(model: Transformer, task: Task, tokens: Int[Tensor, "example position"] | None = None) -> Scores:
    """The task's scores of a model, on the held-out sequences unless others are given."""
    tokens = task.held_out if tokens is None else tokens
    length = max(task.scored) + 1
    at_once = max(1, min(512, LOGITS_AT_ONCE // (length * len(task.vocabulary))))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        parts = [task.score(model(chunk[:, :length]), chunk) for chunk in tokens.split(at_once)]
    model.train(was_training)
    return type(parts[0]).join(parts, task.clusters(tokens))


def checkpoint_steps(training: TrainingConfig) -> list[int]:
    """Log-spaced steps from 1 to the last but one: 0, 1, 2, 4 … thinned or thickened to `checkpoints` of them."""
    return _log_spaced(training.steps, training.checkpoints)


def probed_steps(training: TrainingConfig) -> list[int]:
    """Where `probes` are read: the checkpoints' steps, thickened to 24 at least, and the last one."""
    if not training.probes:
        return []
    n = training.checkpoints or LEAST_PROBED
    return [*_log_spaced(training.steps, n * -(-LEAST_PROBED // n)), training.steps]


def _log_spaced(last: int, n: int) -> list[int]:
    return sorted({0, *(round(last ** (i / n)) for i in range(n))} - {last}) if n and last else []


@dataclass
class Trainer:
    """The state of a training run between two steps."""

    recipe: Recipe
    folder: Path
    task: Task
    model: Transformer
    optimizer: torch.optim.Optimizer
    step: int = 0
    """Updates made."""
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    """Training losses since the last logged step."""

    @classmethod
    def build(cls, recipe: Recipe, folder: Path) -> "Trainer":
        """The state before the first step; nothing is written."""
        task = load_task(recipe.task, recipe.seeds.split)
        task.batch(0, 0, 1)  # a text that is not here is missed now
        model = build_model(recipe, task)
        return cls(recipe, folder, task, model, _optimizer(model, recipe.training))

    def begin(self) -> None:
        """Write what was asked, the task's own file included if it is none of the shipped ones."""
        self._clear_temporaries()
        task = Path(self.recipe.task)
        if task.suffix == ".toml":
            write_atomic(self.folder / task.name, task.read_bytes())
        write_atomic(self.folder / "recipe.toml", self.recipe.to_toml().encode())
        for name in ("metrics.jsonl", PROBES):
            (self.folder / name).unlink(missing_ok=True)

    def restore(self, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        """Take up a saved state; metrics and probes after it are dropped, they will come again."""
        self._clear_temporaries()
        write_atomic(self.folder / "recipe.toml", self.recipe.to_toml().encode())  # it may ask for other probes now
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(weights)
        for name, parameter in self.model.named_parameters():
            kinds = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[parameter] = {kind: tensors[f"{kind}.{name}"] for kind in kinds}
        self.step, self.seconds = int(metadata["step"]), float(metadata["seconds"])
        self.losses = json.loads(metadata["losses"])
        kept = [line for line in read_metrics(self.folder) if line["step"] <= self.step]
        write_atomic(self.folder / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())
        keep_probes(self.folder, self.step)

    def _clear_temporaries(self) -> None:
        """What a crash in the middle of a write left."""
        for path in self.folder.glob(".*.tmp"):
            path.unlink()

    def run(self, progress: Progress) -> None:
        training, keep = self.recipe.training, set(checkpoint_steps(self.recipe.training))
        probed = set(probed_steps(training))
        started = time.perf_counter() - self.seconds
        if self.step == 0:
            self._log(progress)
            self._checkpoint(keep)
            self._probe(probed)
        while self.step < training.steps:
            self._update()
            self._probe(probed)  # before the losses since the last logged step are cleared
            if self.step % training.log_every == 0 or self.step == training.steps:
                self._log(progress)
            self._checkpoint(keep)
            if self.step % training.save_every == 0 and self.step < training.steps:
                self.seconds = time.perf_counter() - started
                self._save()
        self.seconds = time.perf_counter() - started
        self._finish()

    def _update(self) -> None:
        training = self.recipe.training
        tokens = self.task.batch(self.recipe.seeds.batches, self.step, training.batch)
        if self.recipe.model.dropout:
            torch.manual_seed(self.recipe.seeds.batches * 1_000_003 + self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = training.learning_rate(self.step)
        self.model.train()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if training.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.step += 1
        if not math.isfinite(self.losses[-1]):
            raise WorkbenchError(
                f"{self.recipe.name} diverged: the loss of step {self.step} is {self.losses[-1]}; "
                "lower lr, add warmup, or clip the gradient"
            )

    def _log(self, progress: Progress) -> None:
        scores = evaluate(self.model, self.task)
        line = {
            "step": self.step,
            "loss": sum(self.losses) / len(self.losses) if self.losses else None,
            "lr": self.recipe.training.learning_rate(max(0, self.step - 1)),
            "held_out_loss": scores.loss,
            "held_out_accuracy": scores.accuracy,
            **scores.rates,
            **scores.measures,
        }
        self.losses.clear()
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        progress(line)

    def _checkpoint(self, steps: set[int]) -> None:
        if self.step in steps:
            path = checkpoint_path(self.folder, self.step)
            path.parent.mkdir(exist_ok=True)
            write_tensors(path, self.model.state_dict())

    def _probe(self, steps: set[int]) -> None:
        if self.step in steps:
            training = self.recipe.training
            read = probe(self.model, self.task, training.probes, sequences_of(training))
            append_probes(self.folder, {"step": self.step, "loss": self.losses[-1] if self.losses else None} | read)

    def _save(self) -> None:
        tensors = {f"model.{name}": weight for name, weight in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"{kind}.{name}": value for kind, value in self.optimizer.state[parameter].items()}
        metadata = {
            "step": str(self.step),
            "seconds": str(self.seconds),
            "losses": json.dumps(self.losses),
            "task_sha256": task_sha256(self.recipe.task),
        }
        write_tensors(self.folder / "trainer.safetensors", tensors, metadata)

    def _finish(self) -> None:
        weights_sha256 = write_tensors(self.folder / "model.safetensors", self.model.state_dict())
        results = results_of(self.recipe, self.model, self.task, weights_sha256, self._command(), self.seconds)
        write_atomic(self.folder / "run.json", (json.dumps(results, indent=1) + "\n").encode())
        (self.folder / "trainer.safetensors").unlink(missing_ok=True)

    def _command(self) -> str:
        """The command that makes this run again: from the shipped recipe, or from the one in the run's own folder."""
        name, seed = self.recipe.name, self.recipe.seeds.initialisation
        shipped = name in recipe_names() and load_recipe(name).experiment == self.recipe.experiment
        return f"workbench train {name if shipped else 'recipe.toml'} --seeds {seed}"


def results_of(
    recipe: Recipe, model: Transformer, task: Task, weights_sha256: str, made_by: str, seconds: float
) -> dict[str, Any]:
    """What run.json says of a trained model; scores it on both parts of the task."""
    held_out, train = evaluate(model, task), evaluate(model, task, task.train)
    return {
        "made_by": made_by,
        "recipe_sha256": recipe.sha256,
        "task_sha256": task_sha256(recipe.task),
        "weights_sha256": weights_sha256,
        "seeds": asdict(recipe.seeds),
        "steps": recipe.training.steps,
        "parameters": model.n_parameters,
        "seconds": round(seconds, 1),
        "versions": versions(),
        "held_out": _as_json(held_out),
        "train": _as_json(train, clusters=False),
    }


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    import numpy

    return {
        "workbench": workbench.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        "numpy": numpy.__version__,
    }


def _as_json(scores: Scores, clusters: bool = True) -> dict[str, Any]:
    data = {"accuracy": scores.accuracy, "loss": scores.loss, "rates": scores.rates, "measures": scores.measures}
    if clusters:
        data["by_cluster"] = {name: [n, accuracy] for name, (n, accuracy) in scores.by_cluster().items()}
    return data


def check_folder(folder: Path, recipe: Recipe, resume: bool) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Whether this recipe may be trained in this folder; the saved state if there is one to go on from.

    Raises: BadRun if the folder holds another experiment, other files, or an unfinished run without `resume`.
    """
    if (folder / "recipe.toml").exists():
        there = read_recipe(folder / "recipe.toml")
        if there.sha256 != recipe.sha256:
            raise BadRun(
                f"{folder} was made from another recipe ({_difference(there, recipe)}); "
                "move it away, or choose another name"
            )
    elif folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise BadRun(f"{folder} holds other files and no run; choose another name")
    state = folder / "trainer.safetensors"
    if (folder / "run.json").exists():
        finished = load(folder)
        finished.check_weights()
        if finished.results["task_sha256"] != task_sha256(recipe.task):
            raise BadRun(f"the task {recipe.task} was changed since {folder} was trained; move it away")
        return None
    if not state.exists():
        return None
    if not resume:
        raise BadRun(f"{folder} is unfinished; add --resume to go on, or delete it to start over")
    tensors, metadata = read_tensors(state)
    if metadata.get("task_sha256") != task_sha256(recipe.task):
        raise BadRun(f"the task {recipe.task} was changed since {folder} was begun; delete it to start over")
    return tensors, metadata


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
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
            elif key not in ("name", "about"):
                yield key, value

    return next(
        f"{key} = {before} there, {after} here"
        for (key, before), (_, after) in zip(flat(one), flat(other), strict=True)
        if before != after
    )


def _optimizer(model: Transformer, training: TrainingConfig) -> torch.optim.Optimizer:
    decayed = [p for name, p in model.named_parameters() if name.rpartition(".")[2].startswith("W_")]
    others = [p for name, p in model.named_parameters() if not name.rpartition(".")[2].startswith("W_")]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.lr,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        fused=True,
    )


def _keep_freed_memory() -> None:
    """Have glibc keep what a step frees. It would give tensors of megabytes back to the system and get them anew at
    every step, page by page: a quarter of the time of a step on a text."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return  # another system's allocator
    for parameter, value in GLIBC.items():
        mallopt(parameter, value)


@contextmanager
def single_thread() -> Iterator[None]:
    """Tiny models are slower on more threads, and their figures would depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
