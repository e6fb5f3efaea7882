"""Where LayerNorm stands in twelve blocks, with and without warm-up of a high learning rate: Shakespeare held out."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from workbench.recipes import Recipe
from workbench.runs import Run, build_model
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.perplexity import NOTE, held_out_perplexity, interval_of, seeds_of
from workbench.tables.table import Column, Compared, Row, mean, over_seeds
from workbench.tasks import load_task
from workbench.tasks.text import Text

TITLE = "Where LayerNorm stands, with and without warm-up"
SEEDS, BUDGET = 1, "half"
QUICK = Quick(batch=0.0625)
QUICK_MODEL = {"n_layers": 6, "d_model": 96}
"""At the budget "quick". Five blocks get going without warm-up too; twelve, on batches so small, not even with it."""
RECIPE = "shakespeare-12"
BLOCKS, WARMUP = 12, 200
VARIANTS = (("pre", 0), ("pre", WARMUP), ("post", 0), ("post", WARMUP))
"""(placement, steps of warm-up at the full budget)."""
SOURCE = {("pre", 0): 37.82, ("pre", WARMUP): 37.62, ("post", 0): 308.05, ("post", WARMUP): 37.88}
SOURCE_GRADIENT = {"pre": 1.32, "post": 1.65}
"""Published in "attention derived from the average"; the second: norm of the gradient, last block over first."""
TOLERANCE = 0.05
TIMES_WORSE = 3
GRADIENT_TOLERANCE = 0.1
DRAWS = 5
"""Fresh models, of which each sees one batch."""
DRAWN = 16
"""Sequences in it."""
NOTES = (
    "perplexity of the next token, exp(mean loss), on the last tenth of the text in windows of 128 tokens",
    NOTE,
    f"gradient: norm of the loss's gradient with respect to all weights of a block, last block over first, before "
    f"training; mean and range over {DRAWS} initialisations, each with its own {DRAWN} windows; where all blocks get "
    "the same it is 1",
    "token frequencies: perplexity of a predictor that knows how often each token occurs in the training part, and "
    "nothing else; a model that ends there has learned nothing of context",
    f"blocks: {BLOCKS}; at the budget quick {QUICK_MODEL['n_layers']} of width {QUICK_MODEL['d_model']}",
)


def plans(asked: Asked) -> list[Plan]:
    model = QUICK_MODEL if asked.budget == "quick" else {"n_layers": BLOCKS}
    return [
        Plan(
            {"norm": norm, "warmup": warmup},
            asked.recipes(RECIPE, norm=norm, warmup=warmup, **model),
            measure,
        )
        for norm, warmup in VARIANTS
    ]


def measure(runs: list[Run]) -> Row:
    """One placement and schedule, all seeds."""
    recipe, text = runs[0].recipe, runs[0].task
    assert isinstance(text, Text)
    gradients = [gradient_norms(recipe.with_seed(draw)) for draw in range(DRAWS)]
    return {
        "blocks": recipe.model.n_layers,
        "warmup_steps": recipe.training.warmup,
        "held_out_perplexity": held_out_perplexity(runs),
        "train_perplexity": math.exp(mean([run.results["train"]["loss"] for run in runs])),
        "gradient": {
            "last_over_first": over_seeds([norms[-1] / norms[0] for norms in gradients]),
            "per_block": [mean(of_block) for of_block in zip(*gradients, strict=True)],
        },
        "frequencies_perplexity": frequencies_perplexity(text),
    }


def gradient_norms(recipe: Recipe) -> list[float]:
    """[block]: the norm of the gradient of the loss with respect to all of a fresh block's weights together, on the
    first sequences that this recipe would train on."""
    task = load_task(recipe.task, recipe.seeds.split)
    model, tokens = build_model(recipe, task), task.batch(recipe.seeds.batches, 0, DRAWN)
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return [
        math.sqrt(sum(float(p.grad.pow(2).sum()) for p in block.parameters() if p.grad is not None))
        for block in model.blocks
    ]


def frequencies_perplexity(text: Text) -> float:
    """exp(cross-entropy) of the held-out part under the training part's frequencies, each count one more than it is."""
    train, held_out = text.parts
    counts = torch.bincount(train, minlength=len(text.vocabulary)).double() + 1
    return math.exp(-float((counts / counts.sum()).log()[held_out].mean()))


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agreement: a perplexity within 5 %; without warm-up post-norm at least 3 times worse than with it, and with it
    within 5 % of pre-norm; a ratio of gradients within 10 %."""
    by = {(row["norm"], row["warmup"]): row for row in rows}
    made = []
    for variant, row in by.items():
        ours, source = row["held_out_perplexity"]["mean"], SOURCE[variant]
        agrees = abs(ours - source) <= TOLERANCE * source
        made.append(Compared(name_of(row), f"{source:.2f}", f"{ours:.2f}", agrees))
    without, warmed, pre = by.get(("post", 0)), by.get(("post", WARMUP)), by.get(("pre", WARMUP))
    if without and warmed:
        ours, source = ratio(without, warmed), SOURCE["post", 0] / SOURCE["post", WARMUP]
        made.append(Compared("post-norm: without warm-up over with it", f"{source:.1f}", f"{ours:.1f}",
                             ours >= TIMES_WORSE))  # fmt: skip
    if warmed and pre:
        ours, source = ratio(warmed, pre), SOURCE["post", WARMUP] / SOURCE["pre", WARMUP]
        made.append(Compared("with warm-up: post-norm over pre-norm", f"{source:.3f}", f"{ours:.3f}",
                             abs(ours - 1) <= TOLERANCE))  # fmt: skip
    for norm in SOURCE_GRADIENT:
        row = next((row for row in rows if row["norm"] == norm), None)
        if row:
            found, source = row["gradient"]["last_over_first"], SOURCE_GRADIENT[norm]
            ours = f"{found['mean']:.2f} ({found['min']:.2f}–{found['max']:.2f})"
            agrees = abs(found["mean"] - source) <= GRADIENT_TOLERANCE * source
            made.append(Compared(f"gradient, last block over first, {norm}-norm", f"{source:.2f}", ours, agrees))
    return made


def ratio(one: Row, other: Row) -> float:
    return one["held_out_perplexity"]["mean"] / other["held_out_perplexity"]["mean"]


def name_of(row: Row) -> str:
    return f"{row['norm']}-norm, {'warm-up' if row['warmup'] else 'no warm-up'}"


def discussion(rows: Sequence[Row]) -> list[str]:
    by = {(row["norm"], row["warmup"]): row for row in rows}
    without, warmed = by.get(("post", 0)), by.get(("post", WARMUP))
    pre, cold = by.get(("pre", WARMUP)), by.get(("pre", 0))
    said = []
    if without and warmed:
        stuck = abs(ratio(without, warmed)) >= TIMES_WORSE
        floor = without["frequencies_perplexity"]
        figures = f"{_figure(without)} without, {_figure(warmed)} with {warmed['warmup_steps']} steps of it"
        said.append(
            f"**Post-norm {'needs' if stuck else 'gains by'} the warm-up** at this rate: {figures}."
            + (
                f" Without it the model ends where token frequencies alone stand, {floor:.2f}: its predictions use "
                "nothing of the context."
                if stuck and abs(without["held_out_perplexity"]["mean"] / floor - 1) <= TOLERANCE
                else ""
            )
        )
    if pre and cold:
        said.append(
            f"**Pre-norm without warm-up**: {_figure(cold)}, {ratio(cold, pre):.3f} times {_figure(pre)} with it."
        )
    if pre and warmed:
        apart = ratio(warmed, pre) - 1
        said.append(
            f"**With warm-up, post-norm {'is as good' if abs(apart) <= TOLERANCE else 'is not as good'}**: "
            f"{_figure(warmed)} against {_figure(pre)}, {abs(apart):.1%} {'worse' if apart > 0 else 'better'}."
        )
    found = {row["norm"]: row["gradient"]["last_over_first"] for row in rows}
    if found.keys() == SOURCE_GRADIENT.keys():
        pre_, post = found["pre"], found["post"]
        said.append(
            f"**Gradients before training**, last block over first: {pre_['mean']:.2f} "
            f"({pre_['min']:.2f}–{pre_['max']:.2f}) in pre-norm, {post['mean']:.2f} ({post['min']:.2f}–"
            f"{post['max']:.2f}) in post-norm. "
            + (
                "As in the source, post-norm's is the larger. " if post["min"] > pre_["max"]
                else "The two are not told apart. "
            )
            + "Its size depends on the initialisation and on which weights are counted, and the source states neither: "
            "here they are torch's, embeddings N(0, 1), and all of a block's."
        )  # fmt: skip
    return said


def _figure(row: Row) -> str:
    return f"{row['held_out_perplexity']['mean']:.2f}"


def _gradient(row: Row) -> str:
    found = row["gradient"]["last_over_first"]
    return f"{found['mean']:.2f} ({found['min']:.2f}–{found['max']:.2f})"


COLUMNS = (
    Column("norm", lambda row: row["norm"], essential=True, text=True),
    Column("warm-up", lambda row: f"{row['warmup_steps']:,} steps" if row["warmup"] else "none", essential=True),
    Column("held-out", _figure, essential=True),
    Column("95 %", lambda row: interval_of(row["held_out_perplexity"]), essential=True),
    Column("each seed", lambda row: seeds_of(row["held_out_perplexity"]), text=True),
    Column("training", lambda row: f"{row['train_perplexity']:.2f}"),
    Column("token frequencies", lambda row: f"{row['frequencies_perplexity']:.2f}"),
    Column("gradient, last over first", _gradient, essential=True),
    Column("gradient by block", lambda row: " ".join(f"{norm:.3f}" for norm in row["gradient"]["per_block"])),
    Column("blocks", lambda row: str(row["blocks"])),
    Column("parameters", lambda row: f"{row['parameters']:,}"),
    Column("steps", lambda row: f"{row['steps']:,}"),
    Column("seconds", lambda row: f"{row['seconds']:.0f}"),
    Column("budget", lambda row: row["budget"], essential=True, text=True),
)
