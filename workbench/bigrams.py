"""What a model says after each token without any head, against the truth: bigrams.

The direct path: logits W_E W_U + b_U, as if no layer had written anything; behind a final LayerNorm with the scale of
the embedding alone. In a model without layers that is all there is. The truth is the task's own transition matrix where
it has one (a Markov chain), else how often each token followed in the training sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from circuits.matrices import direct_path
from circuits.sequences import normed
from circuits.surface import check_stream, folded, read
from workbench.errors import Undefined
from workbench.runs import Run
from workbench.tasks.generated import Bigram
from workbench.tasks.text import Text

MOST = 4_096  # tokens: beyond, the table of all pairs is too large
Table = Float[Tensor, "token next"]


@dataclass(frozen=True)
class Bigrams:
    """Probabilities of the next token; rows sum to 1."""

    model: Table
    truth: Table
    """Rows of tokens that were never seen are 0."""
    share: Float[Tensor, "token"]
    """How often each token is the one that is left; sums to 1."""
    exact: bool
    """Whether the truth is known, not counted."""

    @property
    def seen(self) -> Bool[Tensor, "token"]:
        return self.share > 0

    @property
    def kl(self) -> Float[Tensor, "token"]:
        """Of each token, KL(truth ‖ model) in nats; 0 where it was never seen."""
        return _kl(self.truth, self.model)

    @property
    def mean_kl(self) -> float:
        """Nats a token, by how often each occurs."""
        return float((self.share * self.kl).sum())

    @property
    def null_kl(self) -> float:
        """The same for one who knows how often each next token occurs, and not after which: the null."""
        alike = (self.share[:, None] * self.truth).sum(0)
        return float((self.share * _kl(self.truth, alike.expand_as(self.truth))).sum())


def bigrams(run: Run) -> Bigrams:
    """Raises: Undefined for a large vocabulary; CircuitError for a model whose direct path is undefined; NoCorpus."""
    d_vocab = int(run.model.cfg.d_vocab)
    if d_vocab > MOST:
        raise Undefined(f"a table of bigrams is shown up to {MOST:,} tokens; this vocabulary has {d_vocab:,}")
    said = direct_probabilities(run.model)
    if isinstance(run.task, Bigram):
        truth = torch.from_numpy(run.task.transition).float()
        return Bigrams(said, truth, torch.from_numpy(run.task.stationary).float(), True)
    rows = run.task.parts[0][None] if isinstance(run.task, Text) else run.task.train
    pairs = (rows[:, :-1] * d_vocab + rows[:, 1:]).flatten()
    counts = pairs.bincount(minlength=d_vocab**2).view(d_vocab, d_vocab).float()
    total = counts.sum(1)
    return Bigrams(said, counts / total[:, None].clamp(min=1), total / total.sum(), False)


def direct_probabilities(model: Any) -> Table:
    """softmax of the direct path. Raises: CircuitError where there is none (LayerNorm after each addition, no residual
    stream)."""
    check_stream(model)
    if not normed(model):
        return direct_path(model).dense().float().softmax(-1)
    w = read(folded(model))
    scale = (w.W_E.pow(2).mean(1, keepdim=True) + getattr(model.cfg, "eps", 1e-5)).sqrt()
    return ((w.W_E / scale) @ w.W_U + w.b_U).float().softmax(-1)


def _kl(truth: Table, said: Table) -> Float[Tensor, "token"]:
    return torch.where(truth > 0, truth * (truth.clamp(min=1e-30) / said.clamp(min=1e-30)).log(), 0.0).sum(1)


def rows_of(found: Bigrams, token: int, n: int = 20) -> list[tuple[int, float, float]]:
    """(next token, model's p, true p) of one token: the n highest of either, the truest first."""
    either = torch.maximum(found.model[token], found.truth[token]).topk(min(n, found.model.shape[1])).indices
    order = either[found.truth[token, either].argsort(descending=True, stable=True)]
    return [(int(i), float(found.model[token, i]), float(found.truth[token, i])) for i in order]
