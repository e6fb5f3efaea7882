"""How far a predictor gets that understands nothing: fitted on the training sequences, scored on the held-out ones.

A task that a shortcut solves proves nothing about the model that solves it. Five shortcuts:

- most frequent answer: one token, always.
- current word: the most frequent answer after the token at the destination. On a bigram task this is the truth.
- bag of words: a softmax regression on how often each word occurs so far. Which words, no order.
- same bag: the most frequent answer in training after exactly the same words in any order.
- fixed look-back: the token k before the answer, k being the best on the training set. Order, no content.

Bags are left out where the vocabulary is large: a table of words by words could not be fitted to what there is.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from workbench.tasks.task import Task

MOST_WORDS = 500  # in a bag
MOST_EXAMPLES = 20_000  # of bags; enough to fit a few thousand weights; keeps every task under a few seconds


def shortcut_accuracies(task: Task) -> dict[str, float]:
    """Held-out accuracy of each shortcut, 0 to 1."""
    train, held_out = _Predictions(task, task.train), _Predictions(task, task.held_out)
    most_frequent = Counter(train.answers.tolist()).most_common(1)[0][0]
    found = {
        "most frequent answer": held_out.accuracy(torch.full_like(held_out.answers, most_frequent)),
        "current word": _lookup(train.current, train, held_out.current, held_out, most_frequent),
    }
    if len(task.vocabulary) <= MOST_WORDS:
        found["bag of words"] = _bag_of_words(train, held_out)
        found["same bag"] = _lookup(train.bag_keys(), train, held_out.bag_keys(), held_out, most_frequent)
    return found | {"fixed look-back": _look_back(train, held_out)}


class _Predictions:
    """Every scored position as one example: its context, and the answer."""

    def __init__(self, task: Task, tokens: Int[Tensor, "example position"]):
        most = MOST_EXAMPLES if len(task.vocabulary) <= MOST_WORDS else tokens.numel()
        sequences = tokens[: max(1, most // len(task.scored))]
        self.task, self.tokens = task, sequences
        self.answers = sequences[:, [p + 1 for p in task.scored]].flatten()
        self.current = sequences[:, list(task.scored)].flatten().tolist()

    @cached_property
    def bags(self) -> Float[Tensor, "example d_vocab"]:
        """How often each word occurs, up to the destination."""
        counts = F.one_hot(self.tokens, len(self.task.vocabulary)).cumsum(dim=1)
        return counts[:, list(self.task.scored)].flatten(0, 1).float()

    def bag_keys(self) -> list[Hashable]:
        return [bytes(bag) for bag in self.bags.to(torch.int32).numpy()]

    def look_back(self, k: int) -> Int[Tensor, "example"]:
        return self.tokens[:, [p + 1 - k for p in self.task.scored]].flatten()

    def accuracy(self, guesses: Int[Tensor, "example"]) -> float:
        return (guesses == self.answers).float().mean().item()


def _lookup(keys: list, train: _Predictions, held_keys: list, held_out: _Predictions, fallback: int) -> float:
    answers = defaultdict(Counter)
    for key, answer in zip(keys, train.answers.tolist(), strict=True):
        answers[key][answer] += 1
    best = {key: counter.most_common(1)[0][0] for key, counter in answers.items()}
    return held_out.accuracy(torch.tensor([best.get(key, fallback) for key in held_keys]))


def _bag_of_words(train: _Predictions, held_out: _Predictions) -> float:
    n_words = train.bags.shape[1]
    weight, bias = torch.zeros(n_words, n_words, requires_grad=True), torch.zeros(n_words, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(train.bags @ weight + bias, train.answers) + 1e-5 * weight.pow(2).sum()
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type] - torch types the closure as returning a float
    with torch.no_grad():
        return held_out.accuracy((held_out.bags @ weight + bias).argmax(dim=1))


def _look_back(train: _Predictions, held_out: _Predictions) -> float:
    farthest = min(train.task.scored) + 1
    best = max(range(1, farthest + 1), key=lambda k: train.accuracy(train.look_back(k)))
    return held_out.accuracy(held_out.look_back(best))
