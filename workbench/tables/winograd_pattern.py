"""What the answer position attends to in the Winograd models: every adjective, block and seed.

The map is read where the source reads it: destination = the last word before the answer, mean over the heads of a block
and over the held-out sentences of an adjective, with four sources: x, y, the adjective, and all other words together.

In block 1 two things hold exactly. The query is the same in every sentence, since it is computed from a word and a
position that never change. And of one noun pair all keys but the adjective's are the same, so the adjective can act on
the pattern through its own score alone: with its column left out and the rows renormalised, the adjectives of a pair
have one pattern. Both are measured, in block 2 too, where neither has to hold.

The null of a share of attention: what heads give that look everywhere alike, 1 / (words up to the answer), and what
models of the same shape give before training.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workbench.recipes import Recipe
from workbench.runs import Run, build_model
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.table import Column, Compared, Row, mean
from workbench.tasks import load_task
from workbench.tasks.winograd import Winograd
from workbench.transformer import Transformer

TITLE = "What the word before the answer attends to"
SEEDS = 5
QUICK = Quick()

MODELS = ("winograd-2", "winograd-2-attn", "winograd-1")
SOURCES = ("x", "y", "adjective")
REST = "rest"
UNTRAINED = 40
"""Initialisations that the band of untrained models is taken from."""
IDENTICAL = 1e-6
"""Differences up to this are rounding."""
MARGIN = 0.05
"""How far outside our seeds' range a published share of attention may lie and still agree."""
PUBLISHED_MODEL = "winograd-2"
"""The published map is of one seed of a model of two blocks, attention and feed-forward."""
PUBLISHED_X, PUBLISHED_ADJECTIVE, PUBLISHED_Y = 0.70, 1.00, 0.49
"""Block 1 on the first noun; block 2 on the adjective for *tired*, on the second noun for *wet*."""
TIRED, WET = "tired", "wet"
ADJECTIVES = (TIRED, "scared", "slow", "weak", WET, "wide", "busy", "steep")
"""Of the task: the first four speak of x, the others of y."""

NOTES = (
    "attention from the position of the word before the answer, mean over the heads of a block and over the held-out "
    "sentences; x, y, adjective: to that word; rest: to all other words together; rows sum to 1",
    "of x, of y: mean over the adjectives that speak of x (so the right answer is x), and over those that speak of y",
    f"{ADJECTIVES[0]} … {ADJECTIVES[-1]}: each adjective by itself, the attention to x, to y, to the adjective, to the "
    "rest",
    f"untrained: where 95 % of the shares of one word lie in {UNTRAINED} models of this shape before training "
    "(x, y and adjective alike); heads that look everywhere alike give 0.067 to each word",
    "query: the largest difference of a query at this position between any two sentences of the task, held out or "
    "trained on; in block 1 none is expected, since word and position are the same and nothing has been mixed in",
    "adjective moves: the largest change of one head's attention to one word, when nothing but the adjective changes",
    "without it: the same change after the adjective's column is taken out and the row renormalised; in block 1 "
    "rounding, since no other key or query depends on the adjective",
    "a map is a hypothesis: `workbench table mechanisms` cuts what it shows (docs/evidence.md)",
)


def plans(asked: Asked) -> list[Plan]:
    return [
        Plan({"model": name, "seed": recipe.seeds.initialisation, "block": block + 1}, (recipe,), measure, (block,))
        for name in MODELS
        for recipe in asked.recipes(name)
        for block in range(recipe.model.n_layers)
    ]


def measure(runs: list[Run], layer: int) -> Row:
    """One block of one seed."""
    (run,) = runs
    task = run.task
    assert isinstance(task, Winograd)
    every = torch.cat([task.held_out, task.train])
    pattern, query = at_answer(run.model, every, task.answer_position, layer)
    pattern = pattern[: len(task.held_out)]
    shares = shares_by_adjective(pattern, task)
    groups = by_pair(pattern, task)
    keep = [place for place in range(groups.shape[-1]) if place != task.role("adjective")]
    others = groups[..., keep] / groups[..., keep].sum(-1, keepdim=True)
    low, high = untrained_band(run.recipe.with_seed(0), layer, UNTRAINED)
    return {
        "held_out_accuracy": run.held_out_accuracy,
        "attention": shares,
        "by_role": {
            role: {
                source: mean([shares[adjective][source] for adjective, of in task.answer_of.items() if of == role])
                for source in (*SOURCES, REST)
            }
            for role in ("x", "y")
        },
        "null": {"uniform": 1 / pattern.shape[-1], "untrained_95": [low, high]},
        "query_difference": float((query.amax(0) - query.amin(0)).max()),
        "pattern_change": float((groups.amax(1) - groups.amin(1)).max()),
        "pattern_change_without_adjective": float((others.amax(1) - others.amin(1)).max()),
    }


def at_answer(
    model: Transformer, tokens: Int[Tensor, "sentence position"], answer: int, layer: int
) -> tuple[Float[Tensor, "sentence head source"], Float[Tensor, "sentence head d_head"]]:
    """The pattern row and the query of every head at the answer position."""
    names = [f"blocks.{layer}.attn.{what}" for what in ("hook_pattern", "hook_q")]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens[:, : answer + 1], names_filter=names)
    return cache[names[0]][:, :, answer], cache[names[1]][:, answer]


def shares_by_adjective(pattern: Float[Tensor, "sentence head source"], task: Winograd) -> dict[str, dict[str, float]]:
    """Adjective → source → mean attention over heads and its held-out sentences, 0 to 1; the four sum to 1."""
    words = task.held_out[:, task.role("adjective")]
    found = {}
    for adjective in task.answer_of:
        row = pattern[words == task.vocabulary.token(adjective)].double().mean((0, 1))
        shares = {source: float(row[task.role(source)]) for source in SOURCES}
        found[adjective] = shares | {REST: float(row.sum()) - sum(shares.values())}
    return found


def by_pair(
    pattern: Float[Tensor, "sentence head source"], task: Winograd
) -> Float[Tensor, "pair adjective head source"]:
    """The sentences of a noun pair together, which differ in the adjective alone."""
    members: dict[str, list[int]] = {}
    for sentence, pair in enumerate(task.clusters(task.held_out)):
        members.setdefault(pair, []).append(sentence)
    return pattern[torch.tensor(list(members.values()))]


@cache
def untrained_band(recipe: Recipe, layer: int, models: int) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles of the mean attention to x, y and the adjective in so many untrained models."""
    task = load_task(recipe.task, recipe.seeds.split)
    places = [task.role(source) for source in SOURCES]
    rows = []
    for seed in range(models):
        model = build_model(recipe.with_seed(seed), task).eval()
        pattern, _ = at_answer(model, task.held_out, task.answer_position, layer)
        rows.append(pattern.mean((0, 1))[places])
    low, high = torch.stack(rows).double().quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agrees: a published share within .05 of our seeds' range; a query that differs by at most 1e-6; one such seed.

    The published map is of one seed, so it can agree only with the range of ours.
    """
    made = []
    for block, adjective, source, published in (
        (1, TIRED, "x", PUBLISHED_X),
        (1, WET, "x", PUBLISHED_X),
        (2, TIRED, "adjective", PUBLISHED_ADJECTIVE),
        (2, WET, "y", PUBLISHED_Y),
    ):
        values = [row["attention"][adjective][source] for row in _of(rows, PUBLISHED_MODEL, block)]
        if values:
            made.append(Compared(
                f"{PUBLISHED_MODEL}, block {block}, {adjective}: attention to {source}",
                f"{published:.2f}",
                _by_seed(values),
                min(values) - MARGIN <= published <= max(values) + MARGIN,
            ))  # fmt: skip
    if first := [row for row in rows if row["block"] == 1]:
        largest = max(row["query_difference"] for row in first)
        made.append(Compared(
            "block 1: largest difference of the query between sentences", "0, exactly", f"{largest:.1g}",
            largest <= IDENTICAL,
        ))  # fmt: skip
    if seeds := _stories(rows, PUBLISHED_MODEL):
        like = sum(_as_published(*blocks) for blocks in seeds.values())
        made.append(Compared(
            f"{PUBLISHED_MODEL}: seeds whose map reads as the published one (block 1 most on x; block 2 most on the "
            f"adjective for {TIRED}, on y for {WET})", "1 of 1", f"{like} of {len(seeds)}", like > 0,
        ))  # fmt: skip
    return made


def discussion(rows: Sequence[Row]) -> list[str]:
    said = []
    for name in MODELS:
        first, second = _of(rows, name, 1), _of(rows, name, 2)
        if len(first) > 1 and len(second) > 1:
            nouns = [row["by_role"][role][role] for row in second for role in ("x", "y")]
            said.append(
                f"**Seeds differ, {name}.** In block 1 the first noun gets {_span(_role(first, 'x'))} by seed, the "
                f"adjective {_span(_role(first, 'adjective'))} and all words but x, y and the adjective together "
                f"{_span(_role(first, REST))}; in block 2 the right noun gets {_span(nouns)}, "
                f"the adjective {_span(_role(second, 'adjective'))} and the rest {_span(_role(second, REST))}, "
                f"although held-out accuracy is {_span([100 * row['held_out_accuracy'] for row in first], '.1f')} %. "
                "A map of one seed is an anecdote."
            )
    if seeds := _stories(rows, PUBLISHED_MODEL):
        like = [seed for seed, blocks in seeds.items() if _as_published(*blocks)]
        said.append(
            f"**The published map** is that of one seed. Of our {len(seeds)} seeds of {PUBLISHED_MODEL} {len(like)} "
            "read so" + (f" (seed {', '.join(map(str, like))})" if like else "") + ": seeds find different mechanisms, "
            "which the mechanisms table counts. Which seed and split the source had is not known."
        )
    if first := [row for row in rows if row["block"] == 1]:
        query, moved, left = (
            max(row[key] for row in first)
            for key in ("query_difference", "pattern_change", "pattern_change_without_adjective")
        )
        said.append(
            f"**What holds in block 1.** Between any two sentences the query at this position differs by at most "
            f"{query:.1g}. The pattern is not the same for all that: changing the adjective alone moves one head's "
            f"attention to one word by up to {moved:.2f}, through the adjective's own key. Take its column out, "
            f"renormalise, and {left:.1g} is left: whatever the adjective does to the attention paid to other words "
            "it does through the softmax's denominator."
        )
    if any(row["block"] == 2 for row in rows):
        said.append(
            "**A map is a hypothesis.** Where the heads look need not be what the answer needs: the mechanisms table "
            "asks each seed by cutting these edges, and docs/evidence.md shows seeds whose map points at a word that "
            "knows nothing."
        )
    return said


def _of(rows: Sequence[Row], name: str, block: int) -> list[Row]:
    return [row for row in rows if row["model"] == name and row["block"] == block]


def _role(rows: Sequence[Row], source: str) -> list[float]:
    """Of every row, for adjectives of both roles together."""
    return [mean([row["by_role"][role][source] for role in ("x", "y")]) for row in rows]


def _stories(rows: Sequence[Row], name: str) -> dict[int, tuple[Row, Row]]:
    """Seed → its two blocks, for seeds that have both."""
    second = {row["seed"]: row for row in _of(rows, name, 2)}
    return {row["seed"]: (row, second[row["seed"]]) for row in _of(rows, name, 1) if row["seed"] in second}


def _as_published(first: Row, second: Row) -> bool:
    def most(row: Row, adjective: str) -> str:
        return max(SOURCES, key=lambda source: row["attention"][adjective][source])

    reads = [most(first, TIRED), most(first, WET), most(second, TIRED), most(second, WET)]
    return reads == ["x", "x", "adjective", "y"]


def _by_seed(values: Sequence[float]) -> str:
    return f"{mean(values):.2f} (seeds {' '.join(f'{value:.2f}' for value in values)})"


def _span(values: Sequence[float], form: str = ".2f") -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}–{high}"


def _share(role: str, source: str) -> Column:
    essential = source in (role, "adjective", REST)
    return Column(f"of {role}: {source}", lambda row: f"{row['by_role'][role][source]:.2f}", essential=essential)


def _adjective(adjective: str) -> Column:
    return Column(adjective, lambda row: " ".join(f"{row['attention'][adjective][at]:.2f}" for at in (*SOURCES, REST)))


def _untrained(row: dict[str, Any]) -> str:
    low, high = row["null"]["untrained_95"]
    return f"{low:.3f}–{high:.3f}"


COLUMNS = (
    Column("model", lambda row: row["model"], essential=True, text=True),
    Column("seed", lambda row: str(row["seed"]), essential=True),
    Column("block", lambda row: str(row["block"]), essential=True),
    *(_share(role, source) for role in ("x", "y") for source in (*SOURCES, REST)),
    *map(_adjective, ADJECTIVES),
    Column("untrained", _untrained),
    Column("query", lambda row: f"{row['query_difference']:.1g}"),
    Column("adjective moves", lambda row: f"{row['pattern_change']:.2f}"),
    Column("without it", lambda row: f"{row['pattern_change_without_adjective']:.1g}"),
    Column("held-out %", lambda row: f"{100 * row['held_out_accuracy']:.1f}"),
    Column("budget", lambda row: row["budget"], essential=True),
)
