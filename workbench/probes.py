"""What a run says of itself while it trains: at log-spaced steps every score beside its null, as JSON lines.

A recipe asks with `probes = ["heads", "composition", "copying", "in-context", "edges"]`. Each probe gives series:

    heads        previous_token, current_token, duplicate_token, prefix_matching, entropy_share, copying; [layer, head]
                 (`circuits.head_scores` on 4 repeated sequences of at most 32 tokens, 39 draws of the null)
    composition  composition.Q, .K, .V; [layer, head, layer, head], writer, then reader (`circuits.compositions`)
    copying      copying.eigenvalue, copying.argmax; [layer, head] (`circuits.copying_score`, 39 draws)
    in-context   in_context, nats (`circuits.in_context_learning_score`), on held-out sequences
    edges        edges.NAME, the change of answer − foil in nats when all of a block's attention from the answer's
                 position to that role is cut (`circuits.edge_effects` on 32 prompts: contribution, mean over them)

A series at one step is {"score", "null_mean", "null_sd"}, each a number or nested lists. The null is drawn anew, from
the very weights of the step, since turned heads of a trained model do not score as those of a fresh one do. Sequences
and draws are the same at all steps, so that a curve moves when the model does. Few of them make it cheap: as many
held-out sequences as two batches have, and nothing here touches a random state or a weight.

The line of one step, {"step", "loss", "held_out_loss", "held_out_accuracy", "loss_by_position", "sequences", "series",
"undefined"}, is what `probe` computes from a model; probing a checkpoint afterwards gives the same numbers.
`workbench.dynamics` reads them without torch.
"""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from circuits.errors import CircuitError
from circuits.scores import LEAST_DRAWS, Scores
from workbench.dynamics import PROBES
from workbench.errors import BadRun, Undefined, WorkbenchError
from workbench.evidence import examples
from workbench.files import write_atomic
from workbench.memory import NUMBERS_AT_ONCE
from workbench.recipes import Probe, TrainingConfig
from workbench.runs import Run, load, write_results
from workbench.tasks.generated import Induction
from workbench.tasks.task import Scores as TaskScores
from workbench.tasks.task import Task
from workbench.transformer import Transformer

HEADS = ("previous_token", "current_token", "duplicate_token", "prefix_matching", "entropy_share", "copying")
SEQUENCES, LENGTH = 4, 32  # that head scores are measured on
PROMPTS = 32  # that edges are cut on
DIGITS = 5  # of every number that is written


def probe(model: Transformer, task: Task, which: tuple[Probe, ...], sequences: int) -> dict[str, Any]:
    """What the probes read from a model, as one line of probes.jsonl has it, without step and training loss.

    `sequences`: how many held-out ones. What is undefined for a model (composition of one layer that replaces the
    token, edges of a task without roles) is a reason under "undefined".
    """
    tokens = _spread(task.held_out, sequences)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            scores, losses = _held_out(model, task, tokens)
            series, undefined = {}, {}
            for name in which:
                try:
                    series |= _SERIES[name](model, task, tokens)
                except (CircuitError, WorkbenchError) as error:
                    undefined[name] = str(error)
    finally:
        model.train(was_training)
    return {
        "held_out_loss": _rounded(scores.loss),
        "held_out_accuracy": _rounded(scores.accuracy),
        "loss_by_position": _rounded(losses.mean(0).tolist()),
        "sequences": len(tokens),
        "series": series,
        "undefined": undefined,
    }


def probe_checkpoints(run: Run, which: tuple[Probe, ...] | None = None) -> Path:
    """Write probes.jsonl of a finished run from its checkpoints and its last weights; `which`: its recipe's, or all.

    Raises: BadRun for a run without checkpoints.
    """
    if not run.checkpoints:
        raise BadRun(f"{run.path} has no checkpoints to probe; train it with probes = [...] in its recipe")
    training = run.recipe.training
    which = which or training.probes or ("heads", "composition", "copying", "in-context")
    lines = []
    for step in [*run.checkpoints, None]:
        model = load(run.path, step=step).model
        read = probe(model, run.task, which, sequences_of(training))
        lines.append({"step": run.results["steps"] if step is None else step, "loss": None} | read)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (run.path / PROBES).unlink(missing_ok=True)  # so that a crash leaves none, not those of another hash
    run.results["files"][PROBES] = hashlib.sha256(data).hexdigest()
    write_results(run.path, run.results)
    write_atomic(run.path / PROBES, data)
    return run.path / PROBES


def sequences_of(training: TrainingConfig) -> int:
    """Held-out sequences to probe on: two batches', so that the cost goes with that of training."""
    return 2 * training.batch


def _heads(model: Transformer, task: Task, tokens: Tensor) -> dict[str, Any]:
    from circuits.heads import head_scores
    from circuits.sequences import default_length

    length = min(LENGTH, default_length(model.cfg.n_ctx, model.cfg.d_vocab))
    scores = head_scores(model, sequences=SEQUENCES, length=length, draws=LEAST_DRAWS)
    return {name: _plain(scores[name]) for name in HEADS}


def _composition(model: Transformer, task: Task, tokens: Tensor) -> dict[str, Any]:
    from circuits.composition import compositions

    if model.cfg.n_layers < 2:
        raise Undefined("no head stands behind another")
    return {f"composition.{kind}": _plain(scores) for kind, scores in compositions(model).items()}


def _copying(model: Transformer, task: Task, tokens: Tensor) -> dict[str, Any]:
    from circuits.spectra import copying_score

    scores = copying_score(model, draws=LEAST_DRAWS)
    return {"copying.eigenvalue": _plain(scores.eigenvalue), "copying.argmax": _plain(scores.argmax)}


def _in_context(model: Transformer, task: Task, tokens: Int[Tensor, "example position"]) -> dict[str, Any]:
    """Against no difference; where the task knows what the order of the words adds, against those who ignore it."""
    from circuits.sequences import in_context_learning_score

    tokens = tokens[:, : model.cfg.n_ctx]  # a text's windows end with an answer that no model reads
    score = in_context_learning_score(model, tokens)
    known = (
        {"null_mean": _rounded(_late_minus_early(task.order_blind_losses(tokens)))}
        if isinstance(task, Induction)
        else {}
    )
    return {"in_context": _plain(score) | known}


def _late_minus_early(losses: Float[Tensor, "example destination"]) -> float:
    """As `in_context_learning_score` has it: places T/2 … T minus T/16 … T/8."""
    length = losses.shape[1] + 1
    early, late = slice(length // 16 - 1, length // 8 - 1), slice(length // 2 - 1, length - 1)
    return (losses[:, late].mean() - losses[:, early].mean()).item()


def _edges(model: Transformer, task: Task, tokens: Int[Tensor, "example position"]) -> dict[str, Any]:
    from circuits.edges import Edge
    from circuits.effects import edge_effects

    prompts = examples(SimpleNamespace(task=task), n=PROMPTS)
    edges = [Edge(layer, None, "answer", role) for layer in range(model.cfg.n_layers) for role in prompts.roles]
    effects = edge_effects(model, prompts, edges=edges, pairs=0)
    found = zip(edges, effects.difference_change.tolist(), effects.difference_error.tolist(), strict=True)
    return {
        f"edges.{edge}": {"score": _rounded(change), "null_mean": 0.0, "null_sd": _rounded(error)}
        for edge, change, error in found
    }


_SERIES = {
    "heads": _heads, "composition": _composition, "copying": _copying, "in-context": _in_context, "edges": _edges,
}  # fmt: skip


def _held_out(
    model: Transformer, task: Task, tokens: Int[Tensor, "example position"]
) -> tuple[TaskScores, Float[Tensor, "example destination"]]:
    """The task's scores, and the loss of every next token, nats."""
    length = tokens.shape[1]
    at_once = max(1, NUMBERS_AT_ONCE // (length * model.config.widest(length)))
    parts, losses = [], []
    for chunk in tokens.split(at_once):
        logits = model(chunk[:, :-1])
        parts.append(task.score(logits, chunk))
        losses.append(F.cross_entropy(logits.transpose(1, 2), chunk[:, 1:], reduction="none"))
    return type(parts[0]).join(parts, task.clusters(tokens)), torch.cat(losses)


def _spread(tokens: Int[Tensor, "all position"], n: int) -> Int[Tensor, "some position"]:
    """n of them, evenly spaced: neighbours in a text are of one scene."""
    return tokens[:: max(1, len(tokens) // n)][:n]


def _plain(scores: Scores) -> dict[str, Any]:
    named = {"score": scores.scores, "null_mean": scores.null_mean, "null_sd": scores.null_sd}
    return {name: _rounded(values.tolist()) for name, values in named.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.{DIGITS}g}")
