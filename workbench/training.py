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
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

import workbench
from workbench.dynamics import PROBES
from workbench.errors import BadRecipe, BadRun, WorkbenchError
from workbench.files import Lines, write_atomic
from workbench.memory import NUMBERS_AT_ONCE, keep_freed, machine_bytes
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
from workbench.short import FEW
from workbench.tasks import load_task, task_sha256
from workbench.tasks.task import Scores, Task
from workbench.transformer import Transformer
from workbench.unfinished import STATE, Saved, check_folder, locked, start_over, write_state
from workbench.untrusted import LARGEST_TOML, plain, read_file

Progress = Callable[[dict[str, Any]], None]
"""Called with each line of metrics as it is written."""


TOKENS_AT_ONCE = 2**15
"""Drawn at once, in batches: right after a step the processor's caches hold nothing of what draws one."""
LEAST_PROBED = 24
"""Steps that are probed."""
OUT_OF_MEMORY = re.compile("not enough memory|can't allocate memory|out of memory", re.IGNORECASE)
"""What torch's allocators say in a RuntimeError."""


def train(
    recipe: Recipe, folder: Path | None = None, *, resume: bool = False, progress: Progress | None = None,
    device: str = "cpu",
) -> Run:  # fmt: skip
    """Train a recipe, or return its run if it is already trained.

    `resume` goes on with an unfinished run instead of refusing it. Uses one thread: a tiny model gains nothing from a
    second one, and results would depend on their number. `device` is cpu, cuda, cuda:1 … or mps: where the steps are
    made and scored. It is no part of the recipe, and runs are read on the CPU. Without dropout it changes results by
    rounding only; with dropout, other masks are drawn from the same seed on another kind of device.

    Raises: WorkbenchError where there is no such device, or where the loss or a score is no longer finite; BadRecipe
    where memory does not suffice; BadRun if the folder holds an unfinished run (without `resume`), one whose state is
    not of this training, or one made from another recipe.
    """
    folder = Path(os.path.realpath(folder or run_folder(recipe)))  # one lock, whichever link leads there
    check_folder(folder, recipe, resume)
    if not os.path.exists(folder / RESULTS):
        with enough_memory(recipe):
            trainer = Trainer.build(recipe, folder, device)  # what is wrong with a recipe is found before writing
            try:
                keep_freed()
                generators = [device] if device.startswith("cuda") else []
                with locked(folder), single_thread(), torch.random.fork_rng(generators):
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


def check_step(recipe: Recipe, model: ModelConfig, length: int, device: torch.device, trained: int = 0) -> None:
    """`trained`: how many numbers are; each is held with its gradient and the two moments of Adam.

    Raises: BadRecipe for a batch of sequences so long, or a model so large, that no memory of the machine's size holds
    a step on it.
    """
    few = FEW if device.type == "cpu" else 0
    needed = 4 * (4 * trained + model.numbers_of_step(recipe.training.batch, length, few))
    there = machine_bytes(device)
    if recipe.training.steps and there and needed > there:
        raise BadRecipe(
            f"{recipe.name}: a step on batch = {recipe.training.batch:,} holds at least {needed / 2**30:,.1f} GiB, "
            f"and there are {there / 2**30:,.1f}; give a smaller batch or model"
        )


def evaluate(model: Transformer, task: Task, tokens: Int[Tensor, "example position"] | None = None) -> Scores:
    """The task's scores of a model, on the held-out sequences unless others are given."""
    tokens = task.held_out if tokens is None else tokens
    length = max(task.scored) + 1
    at_once = max(1, min(512, NUMBERS_AT_ONCE // (length * model.config.widest(length))))
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
    made: list[str] = field(default_factory=list)
    """Recipe and task, if they were not in the folder before."""

    @classmethod
    def build(cls, recipe: Recipe, folder: Path, device: str = "cpu") -> "Trainer":
        """The state before the first step; nothing is written. Initial weights are the same on every device."""
        where = device_of(device)
        task = load_task(recipe.task, recipe.seeds.split)
        length = task.batch(0, 0, 1).shape[1] - 1  # a text that is not here is missed now
        config = sized(recipe, task)
        check_step(recipe, config, length, where)  # what would not fit is not made
        model = build_model(recipe, task)
        check_step(recipe, config, length, where, model.n_parameters)
        model = model.to(where)
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

        Raises: BadRun, before anything is written, if it is none of this training, or if what was written before it is
        no longer there as it was.
        """
        then, training = start_over(self.folder), self.recipe.training
        try:
            checkpoints = [checkpoint_name(step) for step in checkpoint_steps(training)]
            saved = Saved.of(metadata, training.steps, checkpoints, self.logs)
            self._check_tensors(tensors)
        except ValueError as error:
            raise BadRun(f"{self.folder / STATE} is no state of this training ({error}); {then}") from None
        written = {name: read_checked(self.folder / name, sha256, then, saved.sizes.get(name))
                   for name, sha256 in saved.files.items()}  # fmt: skip
        self._write_asked()
        for name, log in self.logs.items():
            log.begin(written.get(name, b""))
        self.checkpoints = {name: sha256 for name, sha256 in saved.files.items() if name not in self.logs}
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(weights)
        for name, parameter in self.model.named_parameters():
            kinds = ("step", "exp_avg", "exp_avg_sq")
            state = {kind: tensors[f"{kind}.{name}"].to(parameter.device) for kind in kinds}
            self.optimizer.state[parameter] = state
        self.step, self.seconds, self.losses = saved.step, saved.seconds, saved.losses

    def _check_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The fused AdamW looks at no shape: of others than its parameter's it reads what lies beside them in memory.

        Raises: ValueError with the name of the first that is not what `_save` writes.
        """
        expected = {f"model.{name}": weight for name, weight in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            expected |= {f"exp_avg.{name}": parameter, f"exp_avg_sq.{name}": parameter, f"step.{name}": torch.zeros(())}
        for name in [*expected, *tensors]:
            found, wanted = ([list(t.shape), str(t.dtype)] if t is not None else "missing"
                             for t in (tensors.get(name), expected.get(name)))  # fmt: skip
            if found != wanted:
                raise ValueError(f"its {plain(name, 80)} is not what is trained here")

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
            if not os.path.lexists(self.folder / name):
                self.made.append(name)
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
        self._check_finite("loss", self.losses[-1])

    def _check_finite(self, what: str, *numbers: float) -> None:
        """Raises: WorkbenchError if one is not; where nothing was saved, all that was begun is taken away."""
        wrong = next((number for number in numbers if not math.isfinite(number)), None)
        if wrong is None:
            return
        then = "lower lr, add warmup, or clip the gradient" if self.step else "lower init_scale"
        if os.path.lexists(self.folder / STATE):
            then += f", and move {self.folder} away"
        else:
            self._clear()
        raise WorkbenchError(f"{self.recipe.name} diverged: the {what} of step {self.step} is {wrong}; {then}")

    def _clear(self) -> None:
        """What this training wrote; recipe.toml last, by which the folder is known to be a run's."""
        for name in [*self.checkpoints, *self.logs, *reversed(self.made)]:
            (self.folder / name).unlink(missing_ok=True)
        for folder in ((self.folder / checkpoint_name(0)).parent, self.folder):
            with suppress(OSError):  # it is not there, or holds something else
                folder.rmdir()

    def _batch(self) -> Int[Tensor, "example position"]:
        """The sequences of this step."""
        if self.step not in self.drawn:
            steps = max(1, TOKENS_AT_ONCE // (self.recipe.training.batch * self.task.n_ctx))
            seed, size = self.recipe.seeds.batches, self.recipe.training.batch
            end = min(self.step + steps, self.recipe.training.steps)
            self.drawn = {step: self.task.batch(seed, step, size) for step in range(self.step, end)}
        return self.drawn.pop(self.step)

    def _log(self, progress: Progress) -> None:
        scores = evaluate(self.model, self.task)
        self._check_finite("held-out loss", scores.loss)
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
            self._check_finite("held-out loss", read["held_out_loss"])
            loss = self.losses[-1] if self.losses else None
            self.logs[PROBES].append({"step": self.step, "loss": loss} | read)

    def _save(self) -> None:
        tensors = {f"model.{name}": weight for name, weight in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"{kind}.{name}": value for kind, value in self.optimizer.state[parameter].items()}
        sizes = {name: log.size for name, log in self.logs.items()}
        saved = Saved(self.step, self.seconds, self.losses, self._written(), sizes)
        hashes = {"recipe_sha256": self.recipe.sha256, "task_sha256": self.task_sha256}
        write_state(self.folder, tensors, saved.metadata() | hashes)

    def _finish(self) -> None:
        results = results_of(self.recipe, self.model, self.task, {}, self._command(), self.seconds)
        self._check_finite("score", *_figures(results["held_out"]), *_figures(results["train"]))
        files = self._written() | {WEIGHTS: write_tensors(self.folder / WEIGHTS, self.model.state_dict())}
        write_results(self.folder, results | {"files": files, "task_sha256": self.task_sha256})
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


def _figures(scores: dict[str, Any]) -> Iterable[float]:
    return scores["accuracy"], scores["loss"], *scores["rates"].values(), *scores["measures"].values()


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
def enough_memory(recipe: Recipe) -> Iterator[None]:
    """Raises: BadRecipe where torch, or Python, gets no more of it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        raise BadRecipe(
            f"{recipe.name} does not fit into memory; give a smaller batch or model; what was saved is kept"
        ) from None


@contextmanager
def single_thread() -> Iterator[None]:
    """Tiny models are slower on more threads, and their figures would depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
