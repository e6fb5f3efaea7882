"""The ladder: from embedding and linear to two blocks, each rung one piece more, on Shakespeare held out.

What each rung adds is what it costs in parameters: the averages have neither value nor output matrix, a single head has
no output matrix, queries, keys and values have no biases.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from workbench.recipes import load_recipe
from workbench.runs import Run, build_model
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.perplexity import held_out_perplexity, interval_of, seeds_of
from workbench.tables.table import Column, Compared, Row, mean

TITLE = "The ladder: Shakespeare, held out"
SEEDS = 1
MORE_SEEDS = {"shakespeare-2": 3}
"""At the full budget: the rung that does worse the longer it trains, so that one seed says least of it. They were added
after its seed 0 was seen to be further from the published figure than 4 %; the discussion says so."""
QUICK = Quick(steps=0.06, batch=0.25)
RUNGS = {
    "shakespeare-0": "embedding and linear",
    "shakespeare-average": "uniform average in place of the token",
    "shakespeare-average-positions": "+ learned positions",
    "shakespeare-average-added": "average added to the token",
    "shakespeare-head-replacing": "one head in place of the token",
    "shakespeare-head": "one head added",
    "shakespeare-4-heads": "four heads, with an output matrix",
    "shakespeare-mlp": "+ feed-forward layer",
    "shakespeare-1": "+ LayerNorm: one block",
    "shakespeare-2": "two blocks",
}
NOTES = (
    "perplexity of the next token, exp(mean loss), on the last tenth of the text in 359 windows of 128 tokens, all of "
    "them scored; training perplexity on the first nine tenths, in the same way",
    "95 %: exp(mean loss ± 1.96 standard errors); the error is that of the text (blocks of eight windows go together) "
    "and, with several seeds, of the seeds; with one seed it says nothing about other seeds",
    "added: parameters beyond those of the rung that it grows from",
    "tokens: byte pairs, 1,024 of them, trained on the whole text, held-out part included, as the source's were",
)
GROWS_FROM = {
    "shakespeare-average": "shakespeare-0",
    "shakespeare-average-positions": "shakespeare-average",
    "shakespeare-average-added": "shakespeare-average-positions",
    "shakespeare-head-replacing": "shakespeare-average-positions",
    "shakespeare-head": "shakespeare-average-added",
    "shakespeare-4-heads": "shakespeare-head",
    "shakespeare-mlp": "shakespeare-4-heads",
    "shakespeare-1": "shakespeare-mlp",
    "shakespeare-2": "shakespeare-1",
}
SOURCE = {"shakespeare-0": 59.71, "shakespeare-average-added": 60.45, "shakespeare-1": 38.07, "shakespeare-2": 40.57}
SOURCE_TRAINING = {"shakespeare-1": 18.77, "shakespeare-2": 14.49}
"""Published perplexities, in "attention derived from the average"."""
TOLERANCE = 0.04
DIFFERENCE_TOLERANCE = 0.25
BETTER_BY = (
    ("positions, to the average", "shakespeare-average", "shakespeare-average-positions", 2.14),
    ("learned weights, over the average", "shakespeare-average-added", "shakespeare-head", 14),
    ("adding, over replacing, one head", "shakespeare-head-replacing", "shakespeare-head", 9),
    ("four heads, over one", "shakespeare-head", "shakespeare-4-heads", 3),
    ("LayerNorm", "shakespeare-mlp", "shakespeare-1", 1.8),
)
"""What the source says in words: by how much the second is better than the first."""
TIMES_WORSE = 4
SAME_TEXT = (
    "All rungs read the same held-out text, so a difference is better known than either of its figures; by how much "
    "was not measured."
)
ADDED = {"shakespeare-4-heads": 16_512, "shakespeare-1": 768}


def plans(asked: Asked) -> list[Plan]:
    return [
        Plan({"model": name, "rung": rung}, _seeds(asked, name).recipes(name), measure, (GROWS_FROM.get(name),))
        for name, rung in RUNGS.items()
    ]


def _seeds(asked: Asked, name: str) -> Asked:
    least = MORE_SEEDS.get(name, 1) if asked.budget == "full" else 1
    return dataclasses.replace(asked, seeds=max(asked.seeds, least))


def measure(runs: list[Run], grows_from: str | None) -> Row:
    """One rung, all seeds."""
    train, training = [run.results["train"] for run in runs], runs[0].recipe.training
    row = {
        "about": runs[0].recipe.about,
        "held_out_perplexity": held_out_perplexity(runs),
        "train_perplexity": math.exp(mean([scores["loss"] for scores in train])),
        "on_the_way": on_the_way(runs),
        "parameters_added": None,
        "tokens_seen": training.steps * training.batch * runs[0].task.n_ctx,
    }
    if grows_from is not None:
        before = build_model(load_recipe(grows_from), runs[0].task).n_parameters
        row["parameters_added"] = runs[0].results["parameters"] - before
    return row


def on_the_way(runs: Sequence[Run]) -> dict[str, float] | None:
    """Of the logged steps, means over seeds: the lowest held-out perplexity and when it was reached; how much the last
    steps add to it, and each nat of training loss in them. None where too few steps were logged.
    """
    logged = [run.metrics for run in runs]
    if any(len(lines) < 4 for lines in logged):
        return None
    lowest = [min(lines, key=lambda line: line["perplexity"]) for lines in logged]
    last = [(lines[-3], lines[-1]) for lines in logged]
    rises = [after["perplexity"] - before["perplexity"] for before, after in last]
    return {
        "lowest": mean([line["perplexity"] for line in lowest]),
        "lowest_at_step": mean([line["step"] for line in lowest]),
        "steps": mean([after["step"] - before["step"] for before, after in last]),
        "rise": mean(rises),
        "rise_per_nat": mean(
            [rise / (before["loss"] - after["loss"]) for rise, (before, after) in zip(rises, last, strict=True)]
        ),
    }


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agreement: a perplexity within 4 %, whatever its interval (in brackets, with every seed where there are several);
    a difference that has the right sign and is within 25 % of the published one; a ratio when rounded; parameters
    exactly.
    """
    by = {row["model"]: row for row in rows}
    made = []
    for name, rung in RUNGS.items():
        if name not in by:
            continue
        ours, source = perplexity(by, name), SOURCE.get(name)
        made.append(Compared(
            rung,
            "" if source is None else f"{source:g}",
            _with_interval(by[name]),
            None if source is None else _within(ours, source, TOLERANCE),
        ))  # fmt: skip
        if name in SOURCE_TRAINING:
            source, trained = SOURCE_TRAINING[name], by[name]["train_perplexity"]
            agrees = _within(trained, source, TOLERANCE)
            made.append(Compared(f"{rung}, training", f"{source:g}", f"{trained:.2f}", agrees))
        if name in ADDED:
            count = by[name]["parameters_added"]
            made.append(Compared(f"{rung}, parameters added", f"{ADDED[name]:,}", f"{count:,}", count == ADDED[name]))
    if {"shakespeare-0", "shakespeare-average"} <= by.keys():
        times = perplexity(by, "shakespeare-average") / perplexity(by, "shakespeare-0")
        what = "average in place of the token, times worse"
        made.append(Compared(what, f"about {TIMES_WORSE}", f"{times:.1f}", round(times) == TIMES_WORSE))
    for what, source, ours in _differences(by):
        agrees = _within(ours, source, DIFFERENCE_TOLERANCE)
        made.append(Compared(f"{what}: better by", f"{source:g}", f"{ours:.2f}", agrees))
    return made


def _within(ours: float, source: float, share: float) -> bool:
    """By at most this share of the published figure; with a share below 1 the sign is the same too."""
    return abs(ours - source) <= share * source


def _differences(by: dict[str, Row]) -> list[tuple[str, float, float]]:
    """Of those whose rungs are there: what is better, by how much in the source, by how much here."""
    return [
        (what, source, perplexity(by, first) - perplexity(by, second))
        for what, first, second, source in BETTER_BY
        if {first, second} <= by.keys()
    ]


def _with_interval(row: Row) -> str:
    figure = row["held_out_perplexity"]
    seeds = f"; {seeds_of(figure)}" if len(figure["per_seed"]) > 1 else ""
    return f"{figure['mean']:.2f} ({interval_of(figure)}{seeds})"


def discussion(rows: Sequence[Row]) -> list[str]:
    by = {row["model"]: row for row in rows}
    said = []
    order = (
        "shakespeare-average", "shakespeare-average-positions", "shakespeare-head-replacing", "shakespeare-head",
        "shakespeare-4-heads", "shakespeare-mlp", "shakespeare-1",
    )  # fmt: skip
    known = [name for name in order if name in by]
    falls = [perplexity(by, a) > perplexity(by, b) for a, b in itertools.pairwise(known)]
    if len(known) > 2:
        overlap = [_overlap(by[a], by[b]) for a, b in itertools.pairwise(known)]
        said.append(
            f"**Every piece pays.** From {perplexity(by, known[0]):.1f} to {perplexity(by, known[-1]):.1f}, each rung "
            f"from the average to one block is better than the one before. The intervals overlap in {sum(overlap)} of "
            f"these {len(overlap)} steps. {SAME_TEXT}"
            if all(falls)
            else "**Not every piece pays** at this budget: "
            + ", ".join(
                f"{RUNGS[b]} is no better than {RUNGS[a]}"
                for a, b, better in zip(known, known[1:], falls, strict=False)
                if not better
            )
            + "."
        )
    if {"shakespeare-0", "shakespeare-average-added"} <= by.keys():
        before, after = perplexity(by, "shakespeare-0"), perplexity(by, "shakespeare-average-added")
        word = "buys nothing" if after >= before else f"is worth {before - after:.2f}"
        said.append(
            f"**The average added to the token {word}**: {after:.2f} against {before:.2f} without any context. Which "
            "tokens came before, in no order and with equal weight, says little about the next one that the current "
            "token does not say."
        )
    for name in [name for name in SOURCE if name in by]:
        ours, source, seeds = perplexity(by, name), SOURCE[name], by[name]["held_out_perplexity"]["per_seed"]
        if not _within(ours, source, TOLERANCE):
            side = "below" if ours < source else "above"
            spread = f"{min(seeds):.2f} to {max(seeds):.2f} by seed" if len(seeds) > 1 else "from one seed"
            said.append(
                f"**{RUNGS[name].capitalize()}: {abs(ours / source - 1):.1%} {side} the source**, {ours:.2f} "
                f"({spread}) where it has {source:.2f}. {_how_far(by[name], name)}"
            )
    said += _seeds_differ(by)
    said += [_unsettled(by, *each) for each in _differences(by) if not _within(each[2], each[1], DIFFERENCE_TOLERANCE)]
    if {"shakespeare-1", "shakespeare-2"} <= by.keys():
        one, two = by["shakespeare-1"], by["shakespeare-2"]
        trains = two["train_perplexity"] < one["train_perplexity"]
        generalises = perplexity(by, "shakespeare-2") < perplexity(by, "shakespeare-1")
        figures = (
            f"{two['train_perplexity']:.2f} against {one['train_perplexity']:.2f} on the training part, "
            f"{perplexity(by, 'shakespeare-2'):.2f} against {perplexity(by, 'shakespeare-1'):.2f} held out"
        )
        if trains and not generalises:
            said.append(
                f"**Two blocks fit better and predict worse**, as in the source: {figures}. {_which_seeds(one, two)} "
                f"Training sees {two['tokens_seen'] / 1e6:.1f} million tokens of a text that has not half a million."
            )
        else:
            said.append(f"**Two blocks beside one**: {figures}; the source has them better, then worse.")
    return said


def _seeds_differ(by: dict[str, Row]) -> list[str]:
    """Rungs that were given more seeds than the others: of what that makes their figure, and what seed 0 alone says."""
    least, said = min((len(_per_seed(row)) for row in by.values()), default=0), []
    for name in [name for name in MORE_SEEDS if name in by and len(_per_seed(by[name])) > least]:
        seeds, source = _per_seed(by[name]), SOURCE[name]
        outside = "" if _within(seeds[0], source, TOLERANCE) else ", and would differ"
        said.append(
            f"**{RUNGS[name].capitalize()}: {len(seeds)} seeds, the other rungs {least}.** Seed 0 alone is "
            f"{seeds[0]:.2f}, {_off(seeds[0], source)} the source{outside}; the other seeds were added after it was "
            f"seen. What is compared above is the mean of {seeds_of(by[name]['held_out_perplexity'])}, "
            f"{perplexity(by, name):.2f}; with more seeds the other figures would move too."
        )
    return said


def _which_seeds(one: Row, two: Row) -> str:
    """What the held-out comparison of two rungs rests on."""
    figure, seeds = one["held_out_perplexity"]["mean"], _per_seed(two)
    worse = sum(seed > figure for seed in seeds)
    return (
        f"Held out this compares {_n_seeds(two)} with {_n_seeds(one)}: {worse} of {len(seeds)} are above "
        f"{figure:.2f} (seed 0: {seeds[0]:.2f}), and the intervals {'overlap' if _overlap(one, two) else 'lie apart'}."
    )


def _unsettled(by: dict[str, Row], what: str, source: float, ours: float) -> str:
    """A difference that is not the published one: how well both of its figures are known."""
    first, second = next((by[a], by[b]) for name, a, b, _ in BETTER_BY if name == what)
    several = [f"the {_n_seeds(row)} of {row['rung']} span {min(seeds):.2f}–{max(seeds):.2f}"
               for row in by.values() if len(seeds := _per_seed(row)) > 1]  # fmt: skip
    known = [f"{interval_of(row['held_out_perplexity'])} ({_n_seeds(row)})" for row in (first, second)]
    word, after = ("So small a difference is not settled here: the", f" {SAME_TEXT}")
    if not _overlap(first, second):
        word, after = "The", ""
    return (
        f"**{what[0].upper()}{what[1:]}: {'better' if ours > 0 else 'worse'} by {abs(ours):.2f}**, where the source "
        f"has better by {source:g}. {word} intervals of its two perplexities are {' and '.join(known)}"
        f"{'; ' if several else ''}{', '.join(several)}.{after}"
    )


def _overlap(one: Row, other: Row) -> bool:
    (low, high), (low2, high2) = (row["held_out_perplexity"]["interval"] for row in (one, other))
    return low <= high2 and low2 <= high


def _per_seed(row: Row) -> list[float]:
    return row["held_out_perplexity"]["per_seed"]


def _n_seeds(row: Row) -> str:
    n = len(_per_seed(row))
    return "one seed" if n == 1 else f"{n} seeds"


def _off(ours: float, source: float) -> str:
    return f"{abs(ours / source - 1):.1%} {'below' if ours < source else 'above'}"


def _how_far(row: Row, name: str) -> str:
    """What the end of training says about such a difference."""
    way = row["on_the_way"]
    if way is None or name not in SOURCE_TRAINING or way["rise"] <= 0:
        return "What the source did beyond what it states is not known."
    ours, source, trained = row["held_out_perplexity"]["mean"], SOURCE[name], SOURCE_TRAINING[name]
    there = ours + way["rise_per_nat"] * math.log(row["train_perplexity"] / trained)
    return (
        f"Held out it is best at step {way['lowest_at_step']:,.0f} ({way['lowest']:.2f}) and gets worse by "
        f"{way['rise']:.2f} in the last {way['steps']:,.0f} steps, so that the figure depends on how far training got: "
        f"continued at that slope to the source's training perplexity, {trained} where ours is "
        f"{row['train_perplexity']:.2f}, it would be {there:.2f}, {abs(there / source - 1):.1%} "
        f"{'below' if there < source else 'above'} the source."
    )


def perplexity(by: dict[str, Row], model: str) -> float:
    return by[model]["held_out_perplexity"]["mean"]


COLUMNS = (
    Column("model", lambda row: row["model"], essential=True, text=True),
    Column("rung", lambda row: row["rung"], text=True),
    Column("held-out", lambda row: f"{row['held_out_perplexity']['mean']:.2f}", essential=True),
    Column("95 %", lambda row: interval_of(row["held_out_perplexity"]), essential=True),
    Column("each seed", lambda row: seeds_of(row["held_out_perplexity"]), text=True),
    Column("training", lambda row: f"{row['train_perplexity']:.2f}", essential=True),
    Column("parameters", lambda row: f"{row['parameters']:,}"),
    Column("added", lambda row: "" if row["parameters_added"] is None else f"{row['parameters_added']:+,}"),
    Column("steps", lambda row: f"{row['steps']:,}"),
    Column("seconds", lambda row: f"{row['seconds']:.0f}"),
    Column("budget", lambda row: row["budget"], essential=True, text=True),
)
