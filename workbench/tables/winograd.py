"""The Winograd table: who waited, by models of growing ability, scored on noun pairs never seen in this order."""

import math
from collections.abc import Sequence

from workbench.runs import Run
from workbench.statistics import interval, seeds_supported
from workbench.tables.table import Column, Row, Table, percent
from workbench.tasks import load_task
from workbench.tasks.shortcuts import shortcut_accuracies
from workbench.training import versions

MODELS = (
    "winograd-average",
    "winograd-1",
    "winograd-2",
    "winograd-1-attn",
    "winograd-1-attn-long",
    "winograd-1-hand",
    "winograd-2-attn",
    "winograd-leaky-average",
    "winograd-leaky-1",
)

NOTES = (
    "held-out: percent of held-out sentences whose next word after `so the` is right; every seed's value is given",
    "95 %: percentile bootstrap over seeds and noun pairs (the eight sentences of a pair err together), never narrower "
    "than Wilson's interval with the pairs as the sample; {coverage}",
    "wrong noun, other word: what was said instead, percent of held-out sentences",
    "chance: a guess between the two nouns; the five columns after it are the shortcuts of `workbench tasks`, "
    "predictors that understand nothing",
    "winograd-1-hand is written by hand, not trained, and winograd-1-attn-long starts small and learns faster: one "
    "layer of attention can; winograd-1-attn shows the plateau of its recipe, not a limit",
)


def coverage(seeds: int) -> str:
    """What the interval is worth with so many seeds: simulated in tests/test_statistics.py."""
    if seeds == 1:
        return "with one seed it says nothing about other seeds"
    alike = math.floor(100 * seeds_supported(seeds))
    return (
        "in simulation it covers about 84 % with three seeds, 90 % with five, 92 % with ten, and less where a rare "
        f"kind of seed was not met: {seeds} of {seeds} alike show only that at least {alike} % of all seeds are so"
    )


def tabulate(command: str, seeds: int, budget: str, runs: dict[str, list[Run]]) -> Table:
    """One row a model. `command` is printed with the table."""
    rows = [_row(name, budget, group) for name, group in runs.items()]
    data = {
        "table": "winograd",
        "title": "The Winograd task, held out",
        "command": command,
        "versions": versions(),
        "notes": [note.format(coverage=coverage(seeds)) for note in NOTES],
        "rows": rows,
    }
    return Table(data, COLUMNS)


def _row(name: str, budget: str, runs: Sequence[Run]) -> Row:
    results = [run.results for run in runs]
    accuracies = [r["held_out"]["accuracy"] for r in results]
    by_seed = [{k: (n, a) for k, (n, a) in r["held_out"]["by_cluster"].items()} for r in results]
    task = load_task(runs[0].recipe.task, runs[0].recipe.seeds.split)
    return {
        "model": name,
        "about": runs[0].recipe.about,
        "task": task.name,
        "budget": budget,
        "seeds": [run.seed for run in runs],
        "held_out_accuracy": {
            "mean": _mean(accuracies),
            "min": min(accuracies),
            "max": max(accuracies),
            "interval": list(interval(by_seed)),
            "per_seed": accuracies,
        },
        "wrong_noun": _mean([r["held_out"]["rates"]["wrong_noun"] for r in results]),
        "other_word": _mean([r["held_out"]["rates"]["other_word"] for r in results]),
        "train_accuracy": _mean([r["train"]["accuracy"] for r in results]),
        "chance": task.chance,
        "shortcuts": shortcut_accuracies(task),
        "held_out_sentences": len(task.held_out),
        "held_out_pairs": len(by_seed[0]),
        "parameters": results[0]["parameters"],
        "steps": results[0]["steps"],
        "seconds": _mean([r["seconds"] for r in results]),
        "recipe_sha256": runs[0].recipe.experiment,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _interval(row: Row) -> str:
    low, high = row["held_out_accuracy"]["interval"]
    return f"{percent(low)}–{percent(high)}"


def _seeds(row: Row) -> str:
    return " ".join(percent(a) for a in row["held_out_accuracy"]["per_seed"])


def _spread(row: Row) -> str:
    return f"{percent(row['held_out_accuracy']['min'])}–{percent(row['held_out_accuracy']['max'])}"


def _shortcut(name: str) -> Column:
    return Column(name, lambda row: percent(row["shortcuts"][name]))


COLUMNS = (
    Column("model", lambda row: row["model"], essential=True),
    Column("held-out %", lambda row: percent(row["held_out_accuracy"]["mean"]), essential=True),
    Column("95 %", _interval, essential=True),
    Column("min–max", _spread),
    Column("each seed", _seeds, essential=True),
    Column("wrong noun", lambda row: percent(row["wrong_noun"])),
    Column("other word", lambda row: percent(row["other_word"])),
    Column("training %", lambda row: percent(row["train_accuracy"])),
    Column("chance", lambda row: percent(row["chance"])),
    _shortcut("most frequent answer"),
    _shortcut("current word"),
    _shortcut("bag of words"),
    _shortcut("same bag"),
    _shortcut("fixed look-back"),
    Column("parameters", lambda row: f"{row['parameters']:,}"),
    Column("steps", lambda row: f"{row['steps']:,}"),
    Column("seconds", lambda row: f"{row['seconds']:.0f}"),
    Column("budget", lambda row: row["budget"], essential=True),
)
