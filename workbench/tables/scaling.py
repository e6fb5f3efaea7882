"""Why scores are divided by √d_k: what q·k is for random vectors, what a softmax over it does, and what training with
and without the division comes to, on Shakespeare held out.

For entries of mean 0 and variance 1, q·k has variance d_k (Vaswani et al. 2017, §3.2.1). The softmax of scores so
large is nearly one-hot, and its Jacobian diag(p) − p pᵀ, through which the scores' gradient must pass, nearly zero.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from workbench.recipes import Recipe
from workbench.runs import Run, build_model
from workbench.statistics import Z_95
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.perplexity import NOTE, held_out_perplexity, interval_of, seeds_of
from workbench.tables.table import Column, Compared, Row, over_seeds, percent
from workbench.tasks import load_task
from workbench.transformer import Transformer

TITLE = "Scaling scores by √d_k"
SEEDS = 1
QUICK = Quick(steps=0.2, batch=0.25)
RECIPE = "shakespeare-scaling"
PRODUCT, FRESH, TRAINED = "q·k", "softmax", "trained"
WIDTHS = (4, 16, 64, 256, 1024)
HEADS = (32, 128, 256, 1024)
"""Widths of the trained heads."""
PAIRS, DRAWS = 20_000, 5
ROWS, TOKENS = 2_000, 64
ONE_TOKEN = 0.99
"""Share of its attention from which a row is said to be on one token; the trace of its Jacobian is then below .02."""
CHUNK = 100
"""Rows, or windows, at once."""
SOURCE_VARIANCE = {4: 3.98, 16: 16.07, 64: 64.2, 256: 253, 1024: 1016}
SOURCE_TRACE = 0.96
SOURCE_FROZEN = (1024, 0.7)
SOURCE_ONE = 256
"""Published width at which a fresh head without the division puts everything on one token."""
SOURCE_COST = {32: 0, 256: 18, 1024: 17}
SOURCE_UNSCALED = {"before": 21, "after": 5147, "one_token": 0.999}
SOURCE_SCALED = 3.44
"""Published in "attention derived from the average": costs in points of perplexity; s.d. of scores at width 1,024."""
NO_COST, COST_SLACK = 2, 8
NOTES = (
    f"q·k: its variance over {PAIRS:,} pairs of vectors whose entries are N(0, 1), mean of {DRAWS} draws; expected: d, "
    "and the 95 % band of such a mean",
    f"softmax: {ROWS:,} rows, each one query against {TOKENS} keys of N(0, 1), mean of {DRAWS} draws; effective "
    f"tokens: exp(entropy), {TOKENS} where all get the same; Jacobian: its trace, 1 − Σp², which is "
    f"{1 - 1 / TOKENS:.3f} there and 0 where one token gets all",
    f"on one token: percent of rows with more than {ONE_TOKEN} on one",
    "trained: one head on the plain residual stream of width 128, no norm before its projections; scores' s.d., "
    "entropy and the rest over all held-out windows and the destinations with at least 64 tokens to look at; before: "
    "the same of the untrained model",
    NOTE,
)


def plans(asked: Asked) -> list[Plan]:
    return [
        *(Plan({"what": PRODUCT, "width": width, "scaled": None}, (), measure_product, (width,)) for width in WIDTHS),
        *(
            Plan({"what": FRESH, "width": width, "scaled": scaled}, (), measure_fresh, (width, scaled))
            for width in WIDTHS
            for scaled in (True, False)
        ),
        *(
            Plan(
                {"what": TRAINED, "width": width, "scaled": scaled},
                asked.recipes(RECIPE, d_head=width, attention="softmax" if scaled else "softmax-unscaled"),
                measure_trained,
            )
            for width in HEADS
            for scaled in (True, False)
        ),
    ]


def measure_product(runs: list[Run], width: int) -> Row:
    """The variance of q·k, in every draw."""
    variances = []
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        q, k = (torch.randn(PAIRS, width, generator=generator) for _ in range(2))
        variances.append(float((q * k).sum(1).double().var()))
    half = Z_95 * standard_error(width, PAIRS * DRAWS)
    return {"variance": over_seeds(variances) | {"band": [width - half, width + half]}}


def standard_error(width: int, pairs: int) -> float:
    """Of the sample variance of q·k: √((m₄ − m₂²) / n), with m₂ = d and m₄ = 3 d² + 6 d for standard normal entries."""
    return math.sqrt((2 * width**2 + 6 * width) / pairs)


def measure_fresh(runs: list[Run], width: int, scaled: bool) -> Row:
    """What a softmax over q·k does before any training, in every draw."""
    draws = [statistics(fresh_pattern(width, scaled, draw)) for draw in range(DRAWS)]
    return {name: over_seeds([of[name] for of in draws]) for name in draws[0]}


def fresh_pattern(width: int, scaled: bool, draw: int) -> Float[Tensor, "row source"]:
    """One query a row against keys of its own."""
    generator = torch.Generator().manual_seed(draw)
    scores = []
    for _ in range(ROWS // CHUNK):
        q, k = (torch.randn(CHUNK, *shape, width, generator=generator) for shape in ((), (TOKENS,)))
        scores.append(torch.einsum("rd, rsd -> rs", q, k))
    return (torch.cat(scores).double() / (math.sqrt(width) if scaled else 1)).softmax(-1)


def statistics(pattern: Float[Tensor, "*row source"]) -> dict[str, float]:
    """Means over rows: the entropy in nats, its exp, the trace of the softmax's Jacobian, the share on one token."""
    entropy = -torch.xlogy(pattern, pattern).sum(-1)
    return {
        "entropy": float(entropy.mean()),
        "effective_tokens": float(entropy.exp().mean()),
        "jacobian": float((1 - pattern.pow(2).sum(-1)).mean()),
        "one_token": float((pattern.amax(-1) > ONE_TOKEN).double().mean()),
    }


def measure_trained(runs: list[Run]) -> Row:
    """A trained head, all seeds: what it costs, and what its scores are before and after."""
    before, after = [head_statistics(untrained(run.recipe), run) for run in runs], [
        head_statistics(run.model, run) for run in runs
    ]  # fmt: skip
    return {
        "held_out_perplexity": held_out_perplexity(runs),
        "before": {name: over_seeds([of[name] for of in before]) for name in before[0]},
        **{name: over_seeds([of[name] for of in after]) for name in after[0]},
    }


def untrained(recipe: Recipe) -> Transformer:
    return build_model(recipe, load_task(recipe.task, recipe.seeds.split)).eval()


def head_statistics(model: Transformer, run: Run) -> dict[str, float]:
    """Of the one head on all held-out windows, from the destinations that have at least half of a window to look at;
    `score_sd` is over all scores that are not masked."""
    half = run.task.n_ctx // 2
    name, scores = "blocks.0.attn.hook_attn_scores", []
    with torch.no_grad():
        for windows in run.task.held_out[:, :-1].split(CHUNK):
            _, cache = model.run_with_cache(windows, return_type=None, names_filter=name)
            scores.append(cache[name][:, 0, half:].double())
    of_all = torch.cat(scores)
    sd = float(of_all[of_all.isfinite()].std())
    return {"score_sd": sd, **statistics(of_all.softmax(-1))}


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agreement: a variance within 2 % of d; fewer than 1.5 effective tokens where the source has everything on one;
    shares within 10 points, traces within .01; no cost is at most 2 points of perplexity, others within 8 points; an
    s.d. of scores within a quarter before training, and within a factor of 2 after it."""
    made = []
    for row in (row for row in rows if row["what"] == PRODUCT):
        d, ours = row["width"], row["variance"]["mean"]
        agrees = abs(ours - d) <= 0.02 * d
        made.append(Compared(f"variance of q·k, d = {d:,}", f"{SOURCE_VARIANCE[d]:g}", f"{ours:.4g}", agrees))
    for row in (row for row in rows if row["what"] == FRESH):
        d = row["width"]
        tokens, trace, frozen = (row[name]["mean"] for name in ("effective_tokens", "jacobian", "one_token"))
        if row["scaled"]:
            what = f"fresh, divided, d = {d:,}: trace of the Jacobian"
            made.append(Compared(what, f"{SOURCE_TRACE}", f"{trace:.3f}", abs(trace - SOURCE_TRACE) <= 0.01))
        elif d == SOURCE_ONE:
            what = f"fresh, not divided, d = {d:,}: effective tokens of {TOKENS}"
            made.append(Compared(what, "1", f"{tokens:.2f}", tokens < 1.5))
        elif d == SOURCE_FROZEN[0]:
            what = f"fresh, not divided, d = {d:,}: frozen rows, %"
            agrees = abs(frozen - SOURCE_FROZEN[1]) <= 0.1
            made.append(Compared(what, percent(SOURCE_FROZEN[1]), percent(frozen), agrees))
    for width, (scaled, unscaled) in pairs(rows).items():
        cost = points(scaled, unscaled)
        source = SOURCE_COST.get(width)
        agrees = None if source is None else cost <= NO_COST if source == 0 else abs(cost - source) <= COST_SLACK
        said = "" if source is None else "none" if source == 0 else str(source)
        made.append(Compared(f"cost of not dividing, width {width:,}, points", said, f"{cost:.2f}", agrees))
    if 1024 in pairs(rows):
        scaled, unscaled = pairs(rows)[1024]
        before, after = unscaled["before"]["score_sd"]["mean"], unscaled["score_sd"]["mean"]
        made += [
            Compared("width 1,024, not divided: s.d. of scores before", f"{SOURCE_UNSCALED['before']}",
                     f"{before:.1f}", abs(before / SOURCE_UNSCALED["before"] - 1) <= 0.25),
            Compared("width 1,024, not divided: s.d. of scores after", f"{SOURCE_UNSCALED['after']}", f"{after:.0f}",
                     0.5 <= after / SOURCE_UNSCALED["after"] <= 2),
            Compared("width 1,024, not divided: rows on one token, %", percent(SOURCE_UNSCALED["one_token"]),
                     percent(unscaled["one_token"]["mean"]),
                     abs(unscaled["one_token"]["mean"] - SOURCE_UNSCALED["one_token"]) <= 0.1),
            Compared("width 1,024, divided: s.d. of scores after", f"{SOURCE_SCALED}",
                     f"{scaled['score_sd']['mean']:.2f}", 0.5 <= scaled["score_sd"]["mean"] / SOURCE_SCALED <= 2),
        ]  # fmt: skip
    return made


def pairs(rows: Sequence[Row]) -> dict[int, tuple[Row, Row]]:
    """Width → trained rows with and without the division, where both are there."""
    trained = {(row["width"], row["scaled"]): row for row in rows if row["what"] == TRAINED}
    return {
        width: (trained[width, True], trained[width, False])
        for width in HEADS
        if {(width, True), (width, False)} <= trained.keys()
    }


def points(scaled: Row, unscaled: Row) -> float:
    """Of perplexity that leaving out the division costs."""
    return unscaled["held_out_perplexity"]["mean"] - scaled["held_out_perplexity"]["mean"]


def discussion(rows: Sequence[Row]) -> list[str]:
    said = []
    fresh = {(row["width"], row["scaled"]): row for row in rows if row["what"] == FRESH}
    divided = [row["jacobian"]["mean"] for (_, scaled), row in fresh.items() if scaled]
    if {(max(WIDTHS), True), (max(WIDTHS), False)} <= fresh.keys():
        with_, without = fresh[max(WIDTHS), True], fresh[max(WIDTHS), False]
        said.append(
            f"**Before training**, at width {max(WIDTHS):,}, a row without the division attends to "
            f"{without['effective_tokens']['mean']:.2f} of {TOKENS} tokens, and "
            f"{percent(without['one_token']['mean'])} % of rows are on one; the trace of the Jacobian is "
            f"{without['jacobian']['mean']:.3f}. Divided: {with_['effective_tokens']['mean']:.1f} tokens, and a "
            f"trace of {min(divided):.3f} to {max(divided):.3f} over widths {min(WIDTHS)} to {max(WIDTHS):,}."
        )
    costs = {width: points(*both) for width, both in pairs(rows).items()}
    if costs:
        said.append(
            "**What it costs**, in points of perplexity: "
            + ", ".join(f"{cost:.1f} at {width:,}" for width, cost in costs.items())
            + "."
            + (
                " The narrow head is as well off without it."
                if costs.get(32, math.inf) <= NO_COST
                else ""
            )
        )  # fmt: skip
    for width, (scaled, unscaled) in pairs(rows).items():
        if width != max(HEADS):
            continue
        runs_away = unscaled["score_sd"]["mean"] > 10 * unscaled["before"]["score_sd"]["mean"]
        ending = f"{unscaled['before']['score_sd']['mean']:.1f} to {unscaled['score_sd']['mean']:,.0f}"
        said.append(
            f"**At width {width:,} the scores without the division {'run away' if runs_away else 'grow'}**: s.d. from "
            f"{ending}, {percent(unscaled['one_token']['mean'])} % of rows on one token, entropy "
            f"{unscaled['entropy']['mean']:.3f} nats. Divided, the s.d. goes from "
            f"{scaled['before']['score_sd']['mean']:.2f} to {scaled['score_sd']['mean']:.2f} and the entropy is "
            f"{scaled['entropy']['mean']:.2f} nats."
        )
    off = [each for each in compared(rows) if each.agrees is False]
    if off:
        said.append(
            "**Where it differs**: "
            + "; ".join(f"{each.what}: {each.ours}, source {each.source}" for each in off)
            + ". The source does not state the width of its residual stream, its value and output matrices or its "
            "initialisation; which of them makes the difference is not known."
        )
    return said


def _if(name: str, row: Row, form: str) -> str:
    return format(row[name]["mean"], form) if name in row else ""


def _grows(row: Row) -> str:
    return f"{row['before']['score_sd']['mean']:.3g} → {row['score_sd']['mean']:,.4g}" if "before" in row else ""


COLUMNS = (
    Column("what", lambda row: row["what"], essential=True, text=True),
    Column("width", lambda row: f"{row['width']:,}", essential=True),
    Column("divided", lambda row: {True: "yes", False: "no", None: ""}[row["scaled"]], essential=True, text=True),
    Column("variance", lambda row: _if("variance", row, ".4g"), essential=True),
    Column("expected", lambda row: "–".join(f"{x:.4g}" for x in row["variance"]["band"]) if "variance" in row else ""),
    Column("effective tokens", lambda row: _if("effective_tokens", row, ".2f"), essential=True),
    Column("Jacobian", lambda row: _if("jacobian", row, ".3f")),
    Column("on one token", lambda row: percent(row["one_token"]["mean"]) if "one_token" in row else "", essential=True),
    Column("entropy", lambda row: _if("entropy", row, ".3f")),
    Column("scores' s.d.", _grows, essential=True),
    Column("held-out", lambda row: _if("held_out_perplexity", row, ".2f"), essential=True),
    Column("95 %", lambda row: interval_of(row["held_out_perplexity"]) if "before" in row else ""),
    Column("each seed", lambda row: seeds_of(row["held_out_perplexity"]) if "before" in row else "", text=True),
    Column("parameters", lambda row: f"{row['parameters']:,}" if "before" in row else ""),
    Column("steps", lambda row: f"{row['steps']:,}" if "before" in row else ""),
    Column("seconds", lambda row: f"{row['seconds']:.0f}" if "before" in row else ""),
    Column("budget", lambda row: row["budget"], essential=True, text=True),
)
