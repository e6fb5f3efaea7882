"""Tasks whose sequences are drawn afresh at every step, from a truth that is known.

`Bigram`: a Markov chain; the best possible predictor is its transition matrix. `SkipTrigram`: rules
source … destination → out, some of which no sum of a source term and a destination term can fit. `Induction`: a
segment of different tokens, repeated; the period is drawn for every sequence, or fixed, which is a trap.
"""

import itertools
import random
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from workbench.errors import BadRecipe
from workbench.tasks.fields import Fields
from workbench.tasks.task import Task
from workbench.vocabulary import Vocabulary
from workbench.wording import percent


@dataclass(frozen=True)
class Generated(Task):
    """`train` is a sample (to fit shortcuts on); training draws fresh sequences. Held-out ones have a stream of their
    own: [seed, step] and [split seed, 1 or 2, 0] never meet."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, size: int) -> Int[np.ndarray, "example position"]:
        """Fresh sequences."""

    def batch(self, seed: int, step: int, size: int) -> Int[Tensor, "example position"]:
        return torch.from_numpy(self.draw(np.random.default_rng([seed, step]), size))

    def sampled(self, seed: int, n_train: int, n_held_out: int) -> dict[str, Tensor]:
        parts = {"train": (1, n_train), "held_out": (2, n_held_out)}
        return {
            part: torch.from_numpy(self.draw(np.random.default_rng([seed, stream, 0]), n))
            for part, (stream, n) in parts.items()
        }


@dataclass(frozen=True)
class Bigram(Generated):
    transition: Float[np.ndarray, "state next"]
    """Rows sum to 1."""
    length: int

    @property
    def stationary(self) -> Float[np.ndarray, "state"]:
        """The distribution that the chain keeps: the left eigenvector of eigenvalue 1."""
        decomposition = np.linalg.eig(self.transition.T)
        vector = np.abs(decomposition.eigenvectors[:, np.argmax(np.real(decomposition.eigenvalues))])
        return vector / vector.sum()

    @property
    def entropy_rate(self) -> float:
        """Nats a token: the lowest loss that any predictor can reach."""
        return float(-(self.stationary[:, None] * self.transition * np.log(self.transition)).sum())

    def draw(self, rng, size):
        cumulative = self.transition.cumsum(axis=1)
        tokens = np.empty((size, self.length), dtype=np.int64)
        tokens[:, 0] = np.searchsorted(self.stationary.cumsum()[:-1], rng.random(size))
        for position, uniform in enumerate(rng.random((self.length - 1, size)), start=1):
            tokens[:, position] = (cumulative[tokens[:, position - 1], :-1] <= uniform[:, None]).sum(axis=1)
        return tokens

    def clusters(self, tokens):
        return [f"sequence {i}" for i in range(len(tokens))]

    def details(self, tokens, guesses, log_probs):
        truth = torch.from_numpy(self.transition).float()[tokens[:, list(self.scored)]]
        kl = (truth * (truth.log() - log_probs)).sum(dim=-1).mean(dim=1)
        return {}, {"kl_to_truth": kl.double().numpy(), "entropy_rate": np.full(len(tokens), self.entropy_rate)}

    def truth(self) -> str:
        best = float((self.stationary * self.transition.max(axis=1)).sum())
        return (
            f"a Markov chain of {len(self.transition)} states, entropy rate {self.entropy_rate:.3f} nats; "
            f"even the true matrix guesses only {percent(best)} of the next tokens"
        )


def read_bigram(name: str, about: str, raw: Fields, seed: int) -> Bigram:
    states, length = raw.whole("states", 2, 5_000), raw.whole("length", 2, 5_000)
    n_train, n_held_out = raw.whole("train", 1), raw.whole("held_out", 1)
    spread = raw.number("spread", 0, 10)
    raw.done()
    raw.check_size(states=states, next=states)
    raw.check_size(sequences=max(n_train, n_held_out), tokens=length)
    # random.Random.random() is the one stream that Python promises never to change: one truth on every machine
    uniform = random.Random(f"{name}|{seed}")
    weights = np.array([[-np.log(1 - uniform.random()) for _ in range(states)] for _ in range(states)]) ** spread
    weights = weights.clip(min=1e-6)
    transition = weights / weights.sum(axis=1, keepdims=True)
    return _sample(
        Bigram, seed, n_train, n_held_out, name=name, about=about, roles={}, chance=1 / states,
        vocabulary=Vocabulary(tuple(f"s{i}" for i in range(states))),
        scored=tuple(range(length - 1)), transition=transition, length=length,
    )  # fmt: skip


@dataclass(frozen=True)
class SkipTrigram(Generated):
    rules: dict[tuple[int, int], int]
    """(source, destination) → out, as tokens."""
    latin: frozenset[tuple[int, int]]
    """The rules that no sum of source and destination terms can fit: out is their sum modulo the size."""
    length: int
    distractors: int

    def draw(self, rng, size):
        fillers = [i for i, word in enumerate(self.vocabulary.words) if word.startswith("f")]
        rules = list(self.rules.items())
        sources = {is_latin: np.array(sorted({s for s, d in self.rules if ((s, d) in self.latin) == is_latin}))
                   for is_latin in (False, True)}  # fmt: skip
        tokens = rng.choice(fillers, (size, self.length))
        chosen = rng.integers(len(rules), size=size)
        places = rng.random((size, self.length - 2)).argsort(axis=1)[:, : self.distractors + 1]
        number = rng.integers(self.distractors + 1, size=size)
        for i, which in enumerate(chosen):
            (source, destination), out = rules[which]
            # distractors are sources of the other set: without a rule for this destination
            others = sources[(source, destination) not in self.latin]
            tokens[i, places[i, 1 : 1 + number[i]]] = rng.choice(others, number[i])
            tokens[i, [places[i, 0], -2, -1]] = source, destination, out
        return tokens

    def rule_of(self, row: list[int]) -> tuple[int, int]:
        """The (source, destination) that decides this sequence."""
        return next((s, row[-2]) for s in row[:-2] if (s, row[-2]) in self.rules)

    def clusters(self, tokens):
        return [self.vocabulary.decode(self.rule_of(row)).replace(" ", " … ") for row in tokens.tolist()]

    def details(self, tokens, guesses, log_probs):
        is_latin = np.array([self.rule_of(row) in self.latin for row in tokens.tolist()])
        right = (guesses[:, 0] == tokens[:, -1]).double().numpy()
        sets = {"factorable": ~is_latin, "latin": is_latin}
        return {f"{name}_accuracy": np.where(part, right, np.nan) for name, part in sets.items()}, {}

    def truth(self) -> str:
        n = len(self.rules) - len(self.latin)
        return (
            f"{len(self.rules)} rules source … destination → out: {n} with an out of their own, which a sum of a "
            f"source term and a destination term can fit, and {len(self.latin)} of a cyclic Latin square, which "
            "no sum can"
        )


def read_skip_trigram(name: str, about: str, raw: Fields, seed: int) -> SkipTrigram:
    n_source, n_destination = raw.whole("sources", 0, 100), raw.whole("destinations", 0, 100)
    order, n_filler = raw.whole("latin_square", 0, 100), raw.whole("fillers", 1, 1_000)
    length, distractors = raw.whole("length", 4, 1_000), raw.whole("distractors", 0, 100)
    n_train, n_held_out = raw.whole("train", 1), raw.whole("held_out", 1)
    raw.done()
    raw.check_size(sequences=max(n_train, n_held_out), tokens=length)
    if not n_source * n_destination and not order:
        raise BadRecipe(f"{raw.where}: no rules; give sources and destinations, or latin_square")
    if distractors > length - 3 or (distractors and not (n_source * n_destination and order)):
        raise BadRecipe(
            f"{raw.where}: distractors are sources of the other set; they need both sets, and room in length"
        )
    a, b = [f"a{i}" for i in range(n_source)], [f"b{i}" for i in range(n_destination)]
    s, d, o = ([f"{letter}{i}" for i in range(order)] for letter in "sdo")
    words = (*a, *b, *(x + y for x in a for y in b), *s, *d, *o, *(f"f{i}" for i in range(n_filler)))
    vocabulary = Vocabulary(words)
    token = vocabulary.token
    plain = {(token(x), token(y)): token(x + y) for x in a for y in b}
    latin = {(token(s[i]), token(d[j])): token(o[(i + j) % order])
             for i, j in itertools.product(range(order), repeat=2)}  # fmt: skip
    return _sample(
        SkipTrigram, seed, n_train, n_held_out, name=name, about=about, vocabulary=vocabulary, scored=(length - 2,),
        roles={"destination": length - 2, "answer": length - 2}, chance=1 / len({*plain.values(), *latin.values()}),
        rules=plain | latin, latin=frozenset(latin), length=length, distractors=distractors,
    )  # fmt: skip


@dataclass(frozen=True)
class Induction(Generated):
    shortest: int
    """Shortest period; the longest is `longest`."""
    longest: int
    length: int
    shuffled: bool = False
    """Every position's tokens are dealt out anew among the sequences: nothing foretells the next one, the control."""

    def draw(self, rng, size):
        # no token twice in a segment: else the follower is ambiguous and no model can reach 100 %
        segments = rng.random((size, len(self.vocabulary))).argsort(axis=1)[:, : self.longest]
        periods = rng.integers(self.shortest, self.longest + 1, size=size)
        tokens = np.take_along_axis(segments, np.arange(self.length)[None] % periods[:, None], axis=1)
        return rng.permuted(tokens, axis=0) if self.shuffled else tokens

    def clusters(self, tokens):
        if self.shuffled:
            return [f"sequence {i}" for i in range(len(tokens))]
        return [f"period {period}" for period in _periods(tokens).tolist()]

    def order_blind_losses(self, tokens: Int[Tensor, "example position"]) -> Float[Tensor, "example destination"]:
        """The loss of every next token, nats, for one who knows the period and which tokens came, but not their order.

        log of how many can still come: those not yet seen while the segment is new, then those left of this turn. No
        bag of words does better once the segment has begun again.
        """
        at, period = torch.arange(1, tokens.shape[1]), _periods(tokens)[:, None]
        left = torch.where(at < period, len(self.vocabulary) - at, period - at % period)
        if self.shuffled:
            left = torch.full_like(left, len(self.vocabulary))
        return left.float().log()

    def truth(self) -> str:
        if self.shuffled:
            return "none: every position's tokens are dealt out anew among the sequences"
        period = (
            f"of {self.longest}" if self.shortest == self.longest else f"drawn from {self.shortest} to {self.longest}"
        )
        return (
            f"a segment of different tokens, repeated with a period {period}: "
            "what followed this token before follows it again"
        )


def read_induction(name: str, about: str, raw: Fields, seed: int) -> Induction:
    n_vocab, length = raw.whole("tokens", 2, 5_000), raw.whole("length", 3, 5_000)
    shortest, longest = raw.whole("shortest_period", 2), raw.whole("longest_period", 2)
    n_train, n_held_out = raw.whole("train", 1), raw.whole("held_out", 1)
    shuffled = "labels" in raw.raw and raw.choice("labels", ("shuffled",)) == "shuffled"
    raw.done()
    raw.check_size(sequences=max(n_train, n_held_out), tokens=max(length, n_vocab))
    if not shortest <= longest <= min(n_vocab, length - 2):
        raise BadRecipe(
            f"{raw.where}: periods must satisfy shortest ≤ longest ≤ tokens and ≤ length − 2; "
            f"they are {shortest}, {longest}, {n_vocab} and {length - 2}"
        )
    return _sample(
        Induction, seed, n_train, n_held_out, name=name, about=about, roles={}, chance=1 / n_vocab,
        vocabulary=Vocabulary(tuple(f"t{i}" for i in range(n_vocab))),
        scored=tuple(range(longest, length - 1)), shortest=shortest, longest=longest, length=length,
        shuffled=shuffled,
    )  # fmt: skip


def _periods(tokens: Int[Tensor, "example position"]) -> Int[Tensor, "example"]:
    """Where the first token comes again."""
    return (tokens[:, 1:] == tokens[:, :1]).float().argmax(dim=1) + 1


def _sample(kind: type[Generated], seed: int, n_train: int, n_held_out: int, **fields: Any) -> Any:
    """Build the task, then let it draw its own samples."""
    blank = torch.zeros(1, fields["length"], dtype=torch.int64)
    empty = kind(train=blank, held_out=blank, **fields)
    return kind(**empty.sampled(seed, n_train, n_held_out), **fields)
