"""The bigram table: a model without layers is its direct path, and that is the chain's log transition matrix.

With no layers the logits are W_E W_U + b_U, so the weights can be laid beside the matrix that drew the sequences
(*A Mathematical Framework for Transformer Circuits* (2021): zero layers model bigram statistics).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from circuits import Scores, direct_path
from circuits.scores import DRAWS, from_draws, p_text
from workbench.runs import Run
from workbench.tables.engine import Asked, Plan, Quick
from workbench.tables.table import Column, Compared, Row, over_seeds, percent
from workbench.tasks.generated import Bigram

TITLE = "A Markov chain: the weights beside the true matrix"
SEEDS = 5
QUICK = Quick()
MODELS = ("bigram-0",)
LIKELY = 0.01
"""A next token of at least this probability is met in training often enough for its entry to be pinned down."""

NOTES = (
    "mean KL, worst row: Σ_j P_ij log(P_ij / Q_ij) in nats over the rows of the true matrix P, Q the softmax of the "
    "direct path W_E W_U, read from weights; mean over rows; every seed's value is given. The seeds are of "
    "initialisation and batches; the chain is the task's",
    "blind: the mean KL of the best predictor that does not look at the token, the chain's stationary distribution",
    "excess: held-out loss less the loss of the true matrix on the same sequences, nats, ± the standard error over "
    "sequences (of the first seed); both losses scatter about the entropy rate together, since the sequences are few",
    "deviation: direct path less log P less a constant for each row (the mean under P, which the softmax ignores), in "
    "nats: the mean of its size, weighted by how often the chain makes the step, and the largest among next tokens of "
    f"p ≥ {LIKELY} and among all",
    f"turned: where the middle 95 % of the deviations begins when the rows are paired with those of other tokens at "
    f"random ({DRAWS} draws), with p (.010 is the least that so many draws can give); arg-max: the share of rows whose "
    "most likely next token is right, and where the middle 95 % of the same draws ends",
)


def plans(asked: Asked) -> list[Plan]:
    return [Plan({"model": name}, asked.recipes(name), measure) for name in MODELS]


def measure(runs: list[Run]) -> Row:
    """The weights of all seeds beside the matrix of their task."""
    read = [_read(run) for run in runs]
    task = _task(runs[0])
    truth = torch.from_numpy(task.transition)
    stationary = torch.from_numpy(task.stationary)
    likely = truth >= LIKELY
    return {
        "about": runs[0].recipe.about,
        "task": task.name,
        "states": len(truth),
        "entropy_rate": task.entropy_rate,
        "blind_kl": float((truth * (truth / stationary).log()).sum(1).mean()),
        "likely_share": float((stationary[:, None] * truth)[likely].sum()),
        "likely_entries": int(likely.sum()),
        **{name: over_seeds([seed[name] for seed in read]) for name in read[0]},
    }


def _read(run: Run) -> dict[str, float]:
    """One seed."""
    task = _task(run)
    truth = torch.from_numpy(task.transition)
    logits = direct_path(run.model).dense().double()
    kl = (truth * (truth.log() - logits.log_softmax(1))).sum(1)
    weights = torch.from_numpy(task.stationary)[:, None] * truth
    size = deviation(logits, truth).abs()
    turned = [torch.randperm(len(truth), generator=torch.Generator().manual_seed(draw)) for draw in range(DRAWS)]
    close = _scored("deviation", _step_mean(size, weights),
                    [_step_mean(deviation(logits[rows], truth).abs(), weights) for rows in turned])  # fmt: skip
    guesses, best = logits.argmax(1), truth.argmax(1)
    named = _scored("arg-max", _share(guesses == best), [_share(guesses[rows] == best) for rows in turned])
    tokens = task.held_out
    true_losses = -truth.log()[tokens[:, :-1], tokens[:, 1:]].mean(1)
    losses = -logits.log_softmax(1)[tokens[:, :-1], tokens[:, 1:]].mean(1)
    excess = losses - true_losses
    return {
        "mean_kl": float(kl.mean()),
        "worst_kl": float(kl.max()),
        "held_out_loss": run.results["held_out"]["loss"],
        "true_loss": float(true_losses.mean()),
        "excess": float(excess.mean()),
        "excess_se": float(excess.std() / len(excess) ** 0.5),
        "deviation": close.value,
        "deviation_turned": float(close.band[0]),
        "deviation_p": float(close.p),
        "deviation_likely": float(size[truth >= LIKELY].max()),
        "deviation_all": float(size.max()),
        "argmax": named.value,
        "argmax_turned": float(named.band[1]),
        "argmax_p": float(named.p),
    }


def deviation(logits: Float[Tensor, "state next"], truth: Float[Tensor, "state next"]) -> Float[Tensor, "state next"]:
    """Logits less the log transition matrix less the row's mean of that under the matrix, nats: 0 where they are the
    same distribution."""
    apart = logits - truth.log()
    return apart - (truth * apart).sum(1, keepdim=True)


def _step_mean(values: Float[Tensor, "state next"], weights: Float[Tensor, "state next"]) -> Tensor:
    """Over the steps of the chain."""
    return (values * weights).sum()


def _share(right: Tensor) -> Tensor:
    return right.double().mean()


def _scored(measure: str, score: Tensor, draws: list[Tensor]) -> Scores:
    null = "rows of the weights paired with those of other tokens at random"
    return from_draws(measure, score, torch.stack(draws), parts=(), null=null, basis="raw")


def _task(run: Run) -> Bigram:
    assert isinstance(run.task, Bigram)
    return run.task


PUBLISHED_KL = 0.0005
MOST_MEAN, MOST_ROW = 0.02, 0.1


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Agreement: the mean over seeds is within twice the published KL; every seed keeps the two bounds."""
    made = []
    for row in rows:
        kl, worst = row["mean_kl"], row["worst_kl"]
        made += [
            Compared("mean KL from the true matrix (within a factor of two)", f"{PUBLISHED_KL} nats",
                     f"{_mean(row, 'mean_kl', 5)} nats ({kl['min']:.5f}–{kl['max']:.5f})",
                     kl["mean"] <= 2 * PUBLISHED_KL),
            Compared("mean KL, every seed", f"at most {MOST_MEAN} nats", f"at most {kl['max']:.5f} nats",
                     kl["max"] <= MOST_MEAN),
            Compared("KL of the worst row, every seed", f"at most {MOST_ROW} nats", f"at most {worst['max']:.5f} nats",
                     worst["max"] <= MOST_ROW),
        ]  # fmt: skip
    return made


def discussion(rows: Sequence[Row]) -> list[str]:
    said = []
    for row in rows:
        close = row["mean_kl"]["max"] <= MOST_MEAN and row["worst_kl"]["max"] <= MOST_ROW
        said.append(
            f"**The weights are the table.** W_E W_U differs from the log transition matrix, up to a constant in each "
            f"row, by {_mean(row, 'deviation', 3)} nats a step on average (rows paired at random: at least "
            f"{_mean(row, 'deviation_turned', 2)}); the mean KL is {_mean(row, 'mean_kl', 5)} nats where the best "
            f"predictor that ignores the token has {row['blind_kl']:.2f}. {percent(row['argmax']['mean'])} % of the "
            "rows name the right most likely next token."
            if close
            else f"**Not yet the table**: on some seed the mean KL or the worst row's is above {MOST_MEAN} or "
            f"{MOST_ROW} nats (highest {row['mean_kl']['max']:.4f} and {row['worst_kl']['max']:.4f}) after "
            f"{row['steps']:,} steps."
        )
        if row["deviation_all"]["min"] > row["deviation_likely"]["max"]:
            said.append(
                f"**Where it is loose it does not matter.** The largest deviation is "
                f"{_mean(row, 'deviation_likely', 2)} nats among next tokens of p ≥ {LIKELY}, "
                f"which are {percent(row['likely_share'])} % of all steps, but "
                f"{_mean(row, 'deviation_all', 2)} among all: the rest are rare, and training says little of them."
            )
    return said


def _mean(row: Row, name: str, digits: int) -> str:
    return f"{row[name]['mean']:.{digits}f}"


def _seeds(row: Row, name: str, digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in row[name]["per_seed"])


def _number(heading: str, name: str, digits: int, essential: bool = False) -> Column:
    return Column(heading, lambda row: _mean(row, name, digits), essential=essential)


COLUMNS = (
    Column("model", lambda row: row["model"], essential=True, text=True),
    _number("mean KL", "mean_kl", 5, essential=True),
    Column("each seed", lambda row: _seeds(row, "mean_kl", 5), essential=True),
    Column("worst row", lambda row: _seeds(row, "worst_kl", 4), essential=True),
    Column("blind", lambda row: f"{row['blind_kl']:.2f}"),
    _number("loss", "held_out_loss", 4),
    _number("true matrix", "true_loss", 4),
    Column("entropy rate", lambda row: f"{row['entropy_rate']:.4f}"),
    Column("excess", lambda row: f"{_seeds(row, 'excess', 4)} ± {row['excess_se']['per_seed'][0]:.4f}"),
    _number("deviation", "deviation", 3),
    Column("turned", lambda row: f"{_mean(row, 'deviation_turned', 2)} (p {p_text(row['deviation_p']['max'])})"),
    _number(f"largest, p ≥ {LIKELY}", "deviation_likely", 2),
    _number("largest", "deviation_all", 2),
    Column("arg-max %", lambda row: " ".join(percent(value) for value in row["argmax"]["per_seed"])),
    Column("arg-max turned %",
           lambda row: f"{percent(row['argmax_turned']['mean'])} (p {p_text(row['argmax_p']['max'])})"),
    Column("parameters", lambda row: f"{row['parameters']:,}"),
    Column("steps", lambda row: f"{row['steps']:,}"),
    Column("seconds", lambda row: f"{row['seconds']:.0f}"),
    Column("budget", lambda row: row["budget"], essential=True),
)  # fmt: skip
