"""Training: AdamW on next-token loss, made so that going on after a crash ends in the very same weights.

Everything random is a pure function of the recipe: initial weights of `seeds.initialisation`, batch t of
(`seeds.batches`, t), dropout of the same pair. The trainer's state (weights, optimizer, step) is one file, written
atomically. So a run that is stopped anywhere, by Ctrl-C or by a power cut, and resumed from its last saved state
repeats the lost steps exactly.

The state carries a hash of itself, and those of what was written before it: checkpoints, metrics, probes. These go
into run.json in the end, taken when a file was written, never from what the disk then says. A run is not resumed where
one of them differs.
"""

import copy
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

import workbench
from workbench.dynamics import PROBES
from workbench.errors import BadRecipe, WorkbenchError
from workbench.files import Lines, write_atomic
from workbench.memory import keep_freed, machine_bytes
from workbench.probes import probe, sequences_of
from workbench.recipes import ModelConfig, Recipe, TrainingConfig, load_recipe, recipe_names
from workbench.runs import (
    METRICS,
    RESULTS,
    WEIGHTS,
    Run,
    build_model,
    checkpoint_name,
    load,
    read_checked,
    run_folder,
    sized,
    write_results,
    write_tensors,
)
from workbench.tasks import load_task, task_sha256
from workbench.tasks.task import Scores, Task
from workbench.transformer import Transformer
from workbench.unfinished import STATE, check_folder, locked, start_over, write_state
from workbench.untrusted import LARGEST_TOML, read_file

Progress = Callable[[dict[str, Any]], None]
"""Called with each line of metrics as it is written."""


LOGITS_AT_ONCE = 2**24
"""Numbers: 64 MB, and as much again for their logarithms."""
TOKENS_AT_ONCE = 2**15
"""Drawn at once, in batches: right after a step the processor's caches hold nothing of what draws one."""
LEAST_PROBED = 24
"""Steps that are probed."""


def train(
    recipe: Recipe, folder: Path | None = None, *, resume: bool = False, progress: Progress | None = None,
    device: str = "cpu",
) -> Run:  # fmt: skip
    """Train a recipe, or return its run if it is already trained.

    `resume` goes on with an unfinished run instead of refusing it. Uses one thread: a tiny model gains nothing from a
    second one, and results would depend on their number. `device` is cpu, cuda, cuda:1 … or mps: where the steps are
    made and scored. It is no part of the recipe, for it changes results by rounding only, and runs are read on the CPU.

    Raises: WorkbenchError where there is no such device; BadRun if the folder holds an unfinished run (without
    `resume`) or one made from another recipe.
    """
    folder = folder or run_folder(recipe)
    check_folder(folder, recipe, resume)
    if not os.path.exists(folder / RESULTS):
        trainer = Trainer.build(recipe, folder, device)  # what is wrong with a recipe is found before writing
        try:
            keep_freed()
            with locked(folder), single_thread(), torch.random.fork_rng([device] if device.startswith("cuda") else []):
                saved = check_folder(folder, recipe, resume)
                if not os.path.exists(folder / RESULTS):
                    trainer.begin() if saved is None else trainer.restore(*saved)
                    trainer.run(progress or (lambda line: None))
        except OSError as error:
            said = error.strerror or error
            raise WorkbenchError(f"cannot write to {folder} ({said}); what was saved is kept") from None
    run = load(folder)
    with suppress(OSError):
        (folder / STATE).unlink()  # a crash after run.json was written left it
    return run


def device_of(name: str) -> torch.device:
    """Raises: WorkbenchError, saying which there are."""
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    there += ["mps"] if torch.backends.mps.is_available() else []
    if (f"{name}:0" if name == "cuda" else name) not in there:
        raise WorkbenchError(f"no device {name!r} here; there is {', '.join(there)}")
    return torch.device(name)


def check_step(recipe: Recipe, model: ModelConfig, length: int, device: torch.device) -> None:
    """Raises: BadRecipe for a batch of sequences so long that no memory of the machine's size holds a step on it."""
    needed, there = 4 * model.numbers_of_step(recipe.training.batch, length), machine_bytes(device)
    if recipe.training.steps and there and needed > there:
        raise BadRecipe(
            f"{recipe.name}: a step on batch = {recipe.training.batch:,} holds at least {needed / 2**30:,.1f} GiB, "
            f"and there are {there / 2**30:,.1f}; give a smaller batch"
        )


def evaluate(model: Transformer, task: Task, tokens: Int[Tensor, "example position"] | None = None) -> Scores:
    """The task's scores of a model, on the held-out sequences unless others are given."""
    tokens = task.held_out if tokens is None else tokens
    length = max(task.scored) + 1
    at_once = max(1, min(512, LOGITS_AT_ONCE // (length * len(task.vocabulary))))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        parts = [
            task.score(model(chunk[:, :length].to(model.W_E.device)).cpu(), chunk) for chunk in tokens.split(at_once)
        ]
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
    drawn: dict[int, Int[Tensor, "example position"]] = field(default_factory=dict)
    """Batches of the steps to come."""
    checkpoints: dict[str, str] = field(default_factory=dict)
    """The hash of each that was written."""

    @classmethod
    def build(cls, recipe: Recipe, folder: Path, device: str = "cpu") -> "Trainer":
        """The state before the first step; nothing is written. Initial weights are the same on every device."""
        where = device_of(device)
        task = load_task(recipe.task, recipe.seeds.split)
        length = task.batch(0, 0, 1).shape[1] - 1  # a text that is not here is missed now
        check_step(recipe, sized(recipe, task), length, where)
        model = build_model(recipe, task).to(where)
        return cls(recipe, folder, task, model, _optimizer(model, recipe.training))

    def __post_init__(self) -> None:
        self.task_sha256 = task_sha256(self.recipe.task)  # now: whoever changes the file later changes another task
        self.logs = {name: Lines(self.folder / name) for name in (METRICS, PROBES)}

    def begin(self) -> None:
        self._write_asked()
        for log in self.logs.values():
            log.begin(b"")

    def restore(self, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        """Take up a saved state; metrics and probes after it are dropped, they will come again.

        Raises: BadRun, before anything is written, if what was written before it is no longer there as it was.
        """
        files, sizes, then = json.loads(metadata["files"]), json.loads(metadata["sizes"]), start_over(self.folder)
        written = {name: read_checked(self.folder / name, sha256, then, sizes.get(name))
                   for name, sha256 in files.items()}  # fmt: skip
        self._write_asked()
        for name, log in self.logs.items():
            log.begin(written.get(name, b""))
        self.checkpoints = {name: sha256 for name, sha256 in files.items() if name not in self.logs}
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(weights)
        for name, parameter in self.model.named_parameters():
            kinds = ("step", "exp_avg", "exp_avg_sq")
            state = {kind: tensors[f"{kind}.{name}"].to(parameter.device) for kind in kinds}
            self.optimizer.state[parameter] = state
        self.step, self.seconds = int(metadata["step"]), float(metadata["seconds"])
        self.losses = json.loads(metadata["losses"])

    def _write_asked(self) -> None:
        """What was asked (of a resumed run, it may be other probes now), the task's own file if it is none of the
        shipped ones; and clear away what a crash in the middle of a write left."""
        for path in self.folder.rglob(".*.tmp"):
            path.unlink()
        task = Path(self.recipe.task)
        asked = {"recipe.toml": self.recipe.to_toml().encode()}  # the first: by it the folder is known to be a run's
        if task.suffix == ".toml":
            asked[task.name] = read_file(task, LARGEST_TOML)
        for name, data in asked.items():
            if not _holds(self.folder / name, data):
                write_atomic(self.folder / name, data)

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
        tokens = self._batch().to(self.model.W_E.device)
        if self.recipe.model.dropout:
            torch.manual_seed(self.recipe.seeds.batches * 1_000_003 + self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = training.learning_rate(self.step)
        if not self.model.training:  # asked first: setting it visits every hook point
            self.model.train()
        loss = self.model.training_loss(tokens)
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

    def _batch(self) -> Int[Tensor, "example position"]:
        """The sequences of this step."""
        if self.step not in self.drawn:
            steps = max(1, TOKENS_AT_ONCE // (self.recipe.training.batch * self.task.n_ctx))
            seed, size = self.recipe.seeds.batches, self.recipe.training.batch
            self.drawn = {step: self.task.batch(seed, step, size) for step in range(self.step, self.step + steps)}
        return self.drawn.pop(self.step)

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
        self.logs[METRICS].append(line)
        progress(line)

    def _checkpoint(self, steps: set[int]) -> None:
        if self.step in steps:
            name = checkpoint_name(self.step)
            (self.folder / name).parent.mkdir(exist_ok=True)
            self.checkpoints[name] = write_tensors(self.folder / name, self.model.state_dict())

    def _probe(self, steps: set[int]) -> None:
        if self.step in steps:
            training = self.recipe.training
            model = self.model if self.model.W_E.device.type == "cpu" else copy.deepcopy(self.model).cpu()
            read = probe(model, self.task, training.probes, sequences_of(training))
            loss = self.losses[-1] if self.losses else None
            self.logs[PROBES].append({"step": self.step, "loss": loss} | read)

    def _save(self) -> None:
        tensors = {f"model.{name}": weight for name, weight in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"{kind}.{name}": value for kind, value in self.optimizer.state[parameter].items()}
        metadata = {
            "step": str(self.step),
            "seconds": str(self.seconds),
            "losses": json.dumps(self.losses),
            "recipe_sha256": self.recipe.sha256,
            "task_sha256": self.task_sha256,
            "files": json.dumps(self._written()),
            "sizes": json.dumps({name: log.size for name, log in self.logs.items()}),
        }
        write_state(self.folder, tensors, metadata)

    def _finish(self) -> None:
        files = self._written() | {WEIGHTS: write_tensors(self.folder / WEIGHTS, self.model.state_dict())}
        results = results_of(self.recipe, self.model, self.task, files, self._command(), self.seconds)
        write_results(self.folder, results | {"task_sha256": self.task_sha256})
        (self.folder / STATE).unlink(missing_ok=True)

    def _written(self) -> dict[str, str]:
        """The hash of every file so far."""
        return self.checkpoints | {name: log.sha256 for name, log in self.logs.items() if log.size}

    def _command(self) -> str:
        """The command that makes this run again: from the shipped recipe, or from the one in the run's own folder."""
        name, seed = self.recipe.name, self.recipe.seeds.initialisation
        shipped = name in recipe_names() and load_recipe(name).experiment == self.recipe.experiment
        device = self.model.W_E.device
        command = f"workbench train {name if shipped else 'recipe.toml'} --seeds {seed}"
        return command if device.type == "cpu" else f"{command} --device {device}"


def results_of(
    recipe: Recipe, model: Transformer, task: Task, files: dict[str, str], made_by: str, seconds: float
) -> dict[str, Any]:
    """What run.json says of a trained model; scores it on both parts of the task. `files`: the hash of each."""
    held_out, train = evaluate(model, task), evaluate(model, task, task.train)
    return {
        "made_by": made_by,
        "recipe_sha256": recipe.sha256,
        "task_sha256": task_sha256(recipe.task),
        "files": files,
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


def _holds(file: Path, data: bytes) -> bool:
    try:
        return read_file(file, len(data)) == data
    except OSError:
        return False


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


@contextmanager
def single_thread() -> Iterator[None]:
    """Tiny models are slower on more threads, and their figures would depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
