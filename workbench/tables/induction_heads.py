"""Which previous-token heads feed which induction heads, seed by seed: named by score, confirmed by cuts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.table import Column, Compared, Row, percent

if TYPE_CHECKING:
    from torch import Tensor

    from circuits import Path
    from workbench.runs import Run

TITLE = "Which previous-token heads feed which induction heads"
SEEDS = 16
QUICK = Quick()
MODELS = ("induction-2-attn",)
EXAMPLES = 256
NOTES = (
    "previous-token, induction: heads with an attention score of at least .3, above every one of 199 draws of turned "
    "queries, on random repeated sequences; of induction, less the attention at the same offsets without repeats",
    "feeds: the reader's own attention to what followed earlier occurrences falls, surely and by a twentieth, when "
    "just that path from a head of layer 0 into its keys is cut (mean over sequences instead); 16 paths are tested",
    "accuracy: percent of second-half predictions that are right; fed: with all paths that feed cut at once; looking: "
    "with the attention of the previous-token heads to the position before knocked out",
    "naive: share of the loss that the naive induction hypothesis explains by causal scrubbing, with these heads",
)


def plans(asked: Asked) -> list[Plan]:
    """One row a seed."""
    return [
        Plan({"model": name, "seed": recipe.seeds.initialisation}, (recipe,), measure)
        for name in MODELS
        for recipe in asked.recipes(name)
    ]


def measure(runs: list["Run"]) -> Row:
    from circuits import composition_scores, every_path, head_scores, induction_explained, path_effects

    run = runs[0]
    tokens, positions = run.task.held_out[:EXAMPLES], list(run.task.scored)
    roles = head_scores(run.model).roles()
    previous = [head for head in roles["previous-token"] if head.startswith("0.")]
    paths = every_path(run.model, ("K",))
    effects = path_effects(run.model, tokens, paths, positions=positions, measure="prefix_matching")
    feeding = [path for path, yes in zip(paths, effects.confirmed(), strict=True) if yes]
    first = composition_scores(run.model, "K").top(1).iloc[0]
    return {
        "held_out_accuracy": run.held_out_accuracy,
        "previous_token": list(roles["previous-token"]),
        "induction": list(roles["induction"]),
        "feeds": [repr(path) for path in feeding],
        "first_by_composition": f"{first['writer']}→K→{first['reader']}",
        "accuracy_fed": _accuracy(run, tokens, feeding) if feeding else None,
        "accuracy_looking": _without_looking(run, tokens, previous) if previous else None,
        "naive": induction_explained(run.model, tokens, previous=previous, positions=positions).shares["naive"]
        if previous else None,
    }  # fmt: skip


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Nothing is published of many seeds; what one model of language gave stands beside ours."""
    if not rows:
        return []
    first = sum(row["first_by_composition"] in row["feeds"] for row in rows)
    below = [row["accuracy_looking"] for row in rows if row["accuracy_looking"] is not None]
    naive = [row["naive"] for row in rows if row["naive"] is not None]
    made = [Compared("highest K-composition confirmed by its cut, seeds", "", f"{first} of {len(rows)}", None)]
    if below:
        made.append(Compared("highest accuracy with the looking knocked out, %", "", percent(max(below)), None))
    if naive:
        ours = f"{percent(min(naive))}–{percent(max(naive))}"
        made.append(Compared("loss explained by the naive hypothesis, %", "35, of a model of language", ours, None))
    return made


def discussion(rows: Sequence[Row]) -> list[str]:
    naive = [row["naive"] for row in rows if row["naive"] is not None]
    if not naive or min(naive) < 0.95:
        return []
    return [
        "The published 35 % is of a model of language, where much else lowers the loss; here repeating is the whole "
        "task, and attention to what followed the last occurrence explains at least "
        f"{percent(min(naive))} % of what is learned."
    ]


def _accuracy(run: "Run", tokens: "Tensor", feeding: list["Path"]) -> float:
    from circuits import cut

    with cut(run.model, feeding):
        return _right(run, tokens)


def _without_looking(run: "Run", tokens: "Tensor", previous: list[str]) -> float:
    """With every edge i → i − 1 of these heads out of the softmax."""
    from circuits import Edge, cut

    edges = [
        Edge(0, int(head.partition(".")[2]), at, at - 1) for head in previous for at in range(1, tokens.shape[1])
    ]  # fmt: skip
    with cut(run.model, edges, what="knock-out"):
        return _right(run, tokens)


def _right(run: "Run", tokens: "Tensor") -> float:
    import torch

    at = torch.tensor(run.task.scored)
    with torch.no_grad():
        guesses = run.model(tokens)[:, at].argmax(-1)
    return (guesses == tokens[:, at + 1]).float().mean().item()


def _rate(value: float | None) -> str:
    return "–" if value is None else percent(value)


def _feeds(row: Row) -> str:
    """0.0 → 1.0 1.1; one writer after the other."""
    by_writer: dict[str, list[str]] = {}
    for path in row["feeds"]:
        writer, _, reader = path.split("→")
        by_writer.setdefault(writer, []).append(reader)
    return "; ".join(f"{writer} → {' '.join(readers)}" for writer, readers in by_writer.items()) or "none"


COLUMNS = (
    Column("model", lambda row: row["model"], essential=True, text=True),
    Column("seed", lambda row: str(row["seed"]), essential=True),
    Column("accuracy %", lambda row: percent(row["held_out_accuracy"]), essential=True),
    Column("previous-token", lambda row: " ".join(row["previous_token"]) or "none", essential=True),
    Column("induction", lambda row: " ".join(row["induction"]) or "none", essential=True),
    Column("feeds", _feeds, essential=True),
    Column("highest K-composition", lambda row: row["first_by_composition"] or "–"),
    Column("fed %", lambda row: _rate(row["accuracy_fed"]), essential=True),
    Column("looking %", lambda row: _rate(row["accuracy_looking"])),
    Column("naive %", lambda row: _rate(row["naive"])),
    Column("budget", lambda row: row["budget"], essential=True, text=True),
)
