"""What every task offers: sequences to train on, sequences held out, and the right answers.

A sequence is a row of tokens; the model reads tokens[:-1] and is trained to predict tokens[1:]. A task scores the
predictions made at its `scored` positions: the answer to position p is the token at p + 1. Errors come in clusters
(all sentences about one pair of nouns, all sequences of one period); `Scores` keeps them, since an interval that
treats the sentences as independent would be too narrow.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from workbench.errors import BadPrompt, UnknownName
from workbench.vocabulary import Vocabulary


@dataclass(frozen=True)
class Scores:
    """How well a set of sequences was predicted, example by example."""

    right: Float[np.ndarray, "example"]
    """Share of the scored positions of each example whose most likely next token is the answer, 0 to 1."""
    losses: Float[np.ndarray, "example"]
    """Mean cross-entropy at the scored positions of each example, in nats."""
    clusters: list[str]
    """The cluster of each example; errors within one are not independent."""
    kinds: dict[str, Float[np.ndarray, "example"]] = field(default_factory=dict)
    """Share of each example's predictions that are of a kind, such as wrong_noun; NaN where the kind cannot occur."""
    measured: dict[str, Float[np.ndarray, "example"]] = field(default_factory=dict)
    """Other figures of each example, in nats."""

    @classmethod
    def join(cls, parts: "Sequence[Scores]", clusters: list[str]) -> "Scores":
        """One set of scores from those of its parts."""

        def joined(of: Callable[[Scores], Float[np.ndarray, "part_example"]]) -> Float[np.ndarray, "example"]:
            return np.concatenate([of(part) for part in parts])

        return cls(
            joined(lambda part: part.right),
            joined(lambda part: part.losses),
            clusters,
            {name: joined(lambda part, name=name: part.kinds[name]) for name in parts[0].kinds},
            {name: joined(lambda part, name=name: part.measured[name]) for name in parts[0].measured},
        )

    @property
    def accuracy(self) -> float:
        """Mean over examples, 0 to 1."""
        return float(self.right.mean())

    @property
    def loss(self) -> float:
        """Mean cross-entropy at the scored positions, in nats."""
        return float(self.losses.mean())

    @property
    def rates(self) -> dict[str, float]:
        """Shares of the predictions, 0 to 1, by kind; without kinds that could not occur."""
        return {name: float(np.nanmean(share)) for name, share in self.kinds.items() if not np.isnan(share).all()}

    @property
    def measures(self) -> dict[str, float]:
        """Other figures, means over examples."""
        return {name: float(values.mean()) for name, values in self.measured.items()}

    def by_cluster(self) -> dict[str, tuple[int, float]]:
        """Cluster → (examples, accuracy), in order of appearance."""
        members: dict[str, list[float]] = {}
        for cluster, right in zip(self.clusters, self.right, strict=True):
            members.setdefault(cluster, []).append(float(right))
        return {cluster: (len(rights), float(np.mean(rights))) for cluster, rights in members.items()}


@dataclass(frozen=True)
class Task(ABC):
    """Base of all tasks. `train` and `held_out` are tokens [example, position]."""

    name: str
    about: str
    vocabulary: Vocabulary
    train: Int[Tensor, "train_example position"]
    held_out: Int[Tensor, "held_out_example position"]
    scored: tuple[int, ...]
    """Destination positions whose next token is scored."""
    roles: dict[str, int]
    """Named positions of a sequence, where the task has such: x, y, adjective, answer …"""
    chance: float
    """Accuracy of a guess among the plausible answers."""

    @property
    def n_ctx(self) -> int:
        return self.train.shape[1]

    @property
    def answer_position(self) -> int:
        """The position from which the (last) answer is predicted."""
        return self.scored[-1]

    def role(self, name: str) -> int:
        if name not in self.roles:
            raise UnknownName("role", name, self.roles, f" in task {self.name}")
        return self.roles[name]

    def encode(self, text: str) -> Int[Tensor, "1 position"]:
        """Raises: BadPrompt for an empty or too long text, UnknownName for an unknown word."""
        tokens = self.vocabulary.encode(text)
        if len(tokens) > self.n_ctx:
            raise BadPrompt(f"the prompt has {len(tokens)} tokens, but {self.name} has a context of {self.n_ctx}")
        return torch.tensor([tokens])

    def decode(self, tokens: Int[Tensor, "*one position"]) -> str:
        return self.vocabulary.decode(tokens.flatten().tolist())

    def str_tokens(self, tokens: Int[Tensor, "*one position"]) -> list[str]:
        return self.vocabulary.str_tokens(tokens.flatten().tolist())

    def batch(self, seed: int, step: int, size: int) -> Int[Tensor, "example position"]:
        """The sequences of training step `step`: a pure function of (seed, step), so that resuming is exact."""
        rng = np.random.default_rng([seed, step])
        return self.train[torch.from_numpy(rng.integers(len(self.train), size=size))]

    def score(
        self, logits: Float[Tensor, "example position d_vocab"], tokens: Int[Tensor, "example length"] | None = None
    ) -> Scores:
        """Score logits [example, position, d_vocab], computed on `tokens` (by default the held-out sequences).

        They need to reach only to the last scored position.
        """
        tokens = self.held_out if tokens is None else tokens
        at = list(self.scored)
        logits, answers = logits[:, at].float(), tokens[:, [p + 1 for p in at]]
        log_probs = logits.log_softmax(dim=-1)
        guesses = logits.argmax(dim=-1)
        losses = -log_probs.gather(2, answers[..., None])[..., 0].mean(dim=1)
        right = (guesses == answers).double().mean(dim=1).numpy()
        kinds, measured = self.details(tokens, guesses, log_probs)
        return Scores(right, losses.double().numpy(), self.clusters(tokens), kinds, measured)

    @abstractmethod
    def clusters(self, tokens: Int[Tensor, "example position"]) -> list[str]:
        """The name of each sequence's cluster."""

    def details(
        self,
        tokens: Int[Tensor, "example position"],
        guesses: Int[Tensor, "example scored"],
        log_probs: Float[Tensor, "example scored d_vocab"],
    ) -> tuple[dict[str, Float[np.ndarray, "example"]], dict[str, Float[np.ndarray, "example"]]]:
        """The task's own kinds of prediction and measures, as `Scores` has them."""
        return {}, {}

    @abstractmethod
    def truth(self) -> str:
        """The rule that generated the answers, in a sentence or two."""
