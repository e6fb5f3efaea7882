"""Six kinds of positions, trained on windows of 64 tokens and read at 64, 128 and 256, on Shakespeare held out.

The same tokens are read at every length, so lengths are compared token by token: only how far back a window reaches
differs. Sinusoids: Vaswani et al. 2017; rotary: Su et al. 2021; shortformer: Press et al. 2021; ALiBi: the same 2022.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from circuits.examples import clustered_error
from workbench.errors import WorkbenchError
from workbench.runs import Run, build_model
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.perplexity import NOTE, interval_of, nats, perplexity, seeds_of
from workbench.tables.table import Column, Compared, Row, mean
from workbench.tasks.text import BLOCK, Text
from workbench.transformer import Transformer

TITLE = "Positions: trained on 64 tokens, read at 64, 128 and 256"
SEEDS, BUDGET = 1, "half"
QUICK = Quick(steps=0.15, batch=0.25)
RECIPE = "shakespeare-positions"
LENGTHS = (64, 128, 256)
"""The first is the one that is trained on."""
KINDS = {
    "none": "none",
    "learned": "a learned row for each, added to the token",
    "sinusoidal": "sines and cosines, added to the token",
    "rotary": "queries and keys turned by an angle",
    "alibi": "a penalty on distance, added to the scores",
    "shortformer": "a learned row for each, added to queries and keys only",
}
TABLES_OF_ROWS = ("learned", "shortformer")
"""Kinds that have a trained row for each position."""
SOURCE = {("alibi", 64): 44.95, ("alibi", 256): 42.49}
"""Published perplexities, in "attention derived from the average"."""
TOLERANCE = 0.04
CLIFF = 1.2
"""Times worse at 256 from which it is called a cliff."""
AT_ONCE = 2**14
"""Tokens: 64 MB of logits."""
NOTES = (
    "perplexity, exp(mean loss), on the same held-out tokens at every length, in windows side by side, all positions "
    "scored; a longer window gives most of them more to look back at",
    NOTE + "; neighbouring: 512 tokens",
    "change: loss in windows of 256 minus loss in windows of 64, token by token, in nats; no change is 0",
    "beyond 64: perplexity of those tokens that stand at positions 64 … 255 of the windows of 256",
    "learned and shortformer have rows for 256 positions, of which training sees the first 64: the other 192 stay "
    "where they started, N(0, 1), but for weight decay",
)


def plans(asked: Asked) -> list[Plan]:
    return [
        Plan({"positions": kind}, asked.recipes(RECIPE, positions=kind), measure, (list(LENGTHS),)) for kind in KINDS
    ]


def measure(runs: list[Run], lengths: list[int]) -> Row:
    """One kind, all seeds. Raises: BadPrompt for a length beyond the model's positions; WorkbenchError for a text that
    is shorter than two windows."""
    trained, longest, text = lengths[0], max(lengths), runs[0].task
    assert isinstance(text, Text)
    tokens = text.parts[1]
    losses = {
        length: torch.stack([losses_at(run.model, tokens, length, longest) for run in runs]) for length in lengths
    }
    beyond = torch.arange(losses[longest].shape[1]) % longest >= trained
    return {
        "about": KINDS[runs[0].recipe.model.positions],
        "perplexity": {str(length): perplexity(*_means(of, trained)) for length, of in losses.items()},
        "change": nats(*_means(losses[longest] - losses[trained], trained)),
        "beyond": [math.exp(mean(of[beyond].tolist())) for of in losses[longest]],
        "untrained_rows": untrained_rows(runs[0], trained),
        "tokens": len(beyond),
    }


def losses_at(model: Transformer, tokens: Int[Tensor, "text"], length: int, longest: int) -> Float[Tensor, "token"]:
    """The loss of each token but the first, in nats, read in windows of `length` side by side.

    Every length that divides `longest` reads the same tokens: as many as fill windows of `longest`.
    """
    n = (len(tokens) - 1) // longest * longest
    if n < 2 * longest:
        raise WorkbenchError(f"the held-out text has {len(tokens)} tokens; windows of {longest} need {2 * longest + 1}")
    windows, answers = tokens[:n].view(-1, length), tokens[1 : n + 1].view(-1, length)
    losses = []
    with torch.no_grad():
        for read, answer in zip(*(of.split(max(1, AT_ONCE // length)) for of in (windows, answers)), strict=True):
            losses.append(F.cross_entropy(model(read).flatten(0, 1), answer.flatten(), reduction="none"))
    return torch.cat(losses).double()


def _means(losses: Float[Tensor, "seed token"], window: int) -> tuple[list[float], list[float]]:
    """The mean of each seed, and its standard error over blocks of the text."""
    blocks = torch.arange(losses.shape[1]) // (BLOCK * window)
    return losses.mean(1).tolist(), clustered_error(losses, blocks).tolist()


def untrained_rows(run: Run, trained: int) -> Row | None:
    """Of a table of positions: how many rows training never read, and their size relative to where they started."""
    if run.recipe.model.positions not in TABLES_OF_ROWS:
        return None
    before, after = (m.W_pos[trained:].detach() for m in (build_model(run.recipe, run.task), run.model))
    return {
        "rows": len(after),
        "relative_size": float(after.norm() / before.norm()),
        "cosine": float((after * before).sum() / (after.norm() * before.norm())),
    }


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agreement: a perplexity within 4 %; better and worse where the 95 % interval of the change excludes 0; a cliff is
    at least 20 % worse at 256, and gently is worse by less than learned positions are."""
    by = {row["positions"]: row for row in rows}
    made = []
    for (kind, length), source in SOURCE.items():
        if kind in by:
            ours = at(by[kind], length)
            agrees = abs(ours - source) <= TOLERANCE * source
            made.append(Compared(f"{kind} at {length}", f"{source:g}", f"{ours:.2f}", agrees))
    if len(by) == len(KINDS):
        best = min(by, key=lambda kind: at(by[kind], 64))
        ours = f"{best} ({at(by[best], 64):.2f}; learned {at(by['learned'], 64):.2f})"
        made.append(Compared("best at 64", "learned", ours, best == "learned"))
    said = {"learned": "falls off a cliff", "sinusoidal": "does not extrapolate", "rotary": "degrades gently",
            "alibi": "improves"}  # fmt: skip
    for kind, row in by.items():
        ours = f"{at(row, 64):.2f} → {at(row, 256):.2f}, {moves(row)}"
        agrees = None
        if kind == "learned":
            agrees = moves(row) == "worse" and times(row) >= CLIFF
        elif kind == "sinusoidal":
            agrees = moves(row) == "worse"
        elif kind == "rotary" and "learned" in by:
            agrees = moves(row) == "worse" and times(row) < times(by["learned"])
        elif kind == "alibi":
            agrees = moves(row) == "better"
        made.append(Compared(f"{kind}, from 64 to 256", said.get(kind, ""), ours, agrees))
    return made


def at(row: Row, length: int) -> float:
    return row["perplexity"][str(length)]["mean"]


def times(row: Row) -> float:
    """How many times the perplexity at 64 that at 256 is."""
    return at(row, 256) / at(row, 64)


def moves(row: Row) -> str:
    """Better, worse or no different at 256, by the interval of the change."""
    low, high = row["change"]["interval"]
    return "worse" if low > 0 else "better" if high < 0 else "no different"


def discussion(rows: Sequence[Row]) -> list[str]:
    by = {row["positions"]: row for row in rows}
    said = []
    for kind in TABLES_OF_ROWS:
        if kind in by and moves(by[kind]) == "worse":
            row, rest = by[kind], by[kind]["untrained_rows"]
            said.append(
                f"**{kind.capitalize()} positions end where training did**: {at(row, 64):.2f} at 64, "
                f"{at(row, 256):.2f} at 256; beyond position 64 {mean(row['beyond']):.2f}. The {rest['rows']} rows "
                f"that were never read point where they started (cosine {rest['cosine']:.3f}) at "
                f"{rest['relative_size']:.2f} of their size, which is weight decay's doing: to the model they are "
                "noise of the size of a token."
            )
    if "alibi" in by:
        row = by["alibi"]
        ways = {"better": "improves with length", "worse": "loses with length",
                "no different": "neither gains nor loses with length"}  # fmt: skip
        said.append(
            f"**ALiBi {ways[moves(row)]}**: {at(row, 64):.2f} → {at(row, 128):.2f} → {at(row, 256):.2f}, change "
            f"{_change(row)} nats. A token early in a window of 64 has little before it; in a longer window there is "
            "more, and a penalty on distance means the same at any length."
        )
    if {"rotary", "learned", "alibi"} <= by.keys():
        ratios = {kind: times(by[kind]) for kind in ("alibi", "rotary", "learned")}
        between = sorted(ratios, key=lambda kind: ratios[kind]) == ["alibi", "rotary", "learned"]
        said.append(
            f"**Rotary positions lie {'between' if between else 'not between'} the two**: "
            + ", ".join(f"{kind} × {ratio:.3f}" for kind, ratio in ratios.items())
            + " from 64 to 256. Distances beyond 64 turn queries and keys by angles that training never saw."
        )
    if "sinusoidal" in by and moves(by["sinusoidal"]) == "worse":
        row = by["sinusoidal"]
        said.append(
            f"**Sinusoids go on for ever, and do not help**: {at(row, 64):.2f} → {at(row, 256):.2f}. That a position "
            "can be computed does not make it one that the weights know."
        )
    if len(by) == len(KINDS):
        best = min(by, key=lambda kind: at(by[kind], 64))
        if best != "learned":
            said.append(
                f"**At 64, {best} wins here** ({at(by[best], 64):.2f}), not learned positions "
                f"({at(by['learned'], 64):.2f}). They are added to the token and start as N(0, 1), as large as the "
                "tokens' embeddings, so that training must first learn to read past them; what start the source gave "
                "them is not known."
            )
    off = [(kind, length, source) for (kind, length), source in SOURCE.items()
           if kind in by and abs(at(by[kind], length) - source) > TOLERANCE * source]  # fmt: skip
    if off:
        said.append(
            "**Levels.** "
            + "; ".join(f"{kind} at {length}: {at(by[kind], length):.2f}, source {s:g}" for kind, length, s in off)
            + ". The source does not state its model, its steps or its batch here; ours is one block of the ladder, "
            f"{by[off[0][0]]['steps']:,} steps."
        )
    return said


def _change(row: Row) -> str:
    low, high = row["change"]["interval"]
    return f"{row['change']['mean']:+.3f} [{low:+.3f} {high:+.3f}]"


COLUMNS = (
    Column("positions", lambda row: row["positions"], essential=True, text=True),
    Column("what they are", lambda row: row["about"], text=True),
    *(
        Column(f"at {length}", lambda row, length=length: f"{at(row, length):.2f}", essential=True)
        for length in LENGTHS
    ),
    Column("95 % at 64", lambda row: interval_of(row["perplexity"]["64"])),
    Column("95 % at 256", lambda row: interval_of(row["perplexity"]["256"])),
    Column("change, 64 to 256 [95 %]", _change, essential=True),
    Column("beyond 64", lambda row: f"{mean(row['beyond']):.2f}"),
    Column("each seed at 64", lambda row: seeds_of(row["perplexity"]["64"]), text=True),
    Column("each seed at 256", lambda row: seeds_of(row["perplexity"]["256"]), text=True),
    Column("parameters", lambda row: f"{row['parameters']:,}"),
    Column("steps", lambda row: f"{row['steps']:,}"),
    Column("seconds", lambda row: f"{row['seconds']:.0f}"),
    Column("budget", lambda row: row["budget"], essential=True, text=True),
)
