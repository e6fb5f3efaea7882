"""Next-token prediction on a text, in windows. Shakespeare's plays are the one that is known here.

The text is read only when its tokens are asked for: a trained model is opened, and prompted, without it.
"""

import hashlib
import math
import sys
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from circuits.examples import clustered_error
from workbench.byte_pairs import BytePairs
from workbench.content import content
from workbench.corpora import CORPORA, read_corpus
from workbench.errors import BadPrompt, BadRecipe
from workbench.tasks.fields import Fields
from workbench.tasks.task import Scores, Task
from workbench.untrusted import short

BLOCK = 8
"""Windows in a cluster: neighbouring windows are of one scene, and as hard as each other."""
LARGEST_LOSS = math.log(sys.float_info.max)
"""Nats."""


@dataclass(frozen=True)
class TextScores(Scores):
    @property
    def measures(self) -> dict[str, float]:
        """With the perplexity, exp(loss), and the loss's standard error over the blocks of the text, in nats."""
        number = {name: i for i, name in enumerate(dict.fromkeys(self.clusters))}
        blocks = torch.tensor([number[name] for name in self.clusters])
        error = float(clustered_error(torch.from_numpy(self.losses)[None], blocks))
        known = {"loss_standard_error": error} if math.isfinite(error) else {}
        perplexity = math.exp(self.loss) if self.loss < LARGEST_LOSS else math.inf
        return super().measures | {"perplexity": perplexity} | known


@dataclass(frozen=True)
class Text(Task):
    """`train` and `held_out` are windows side by side; training draws windows that begin anywhere in its part."""

    train: Int[Tensor, "train_example position"] = field(init=False, repr=False, compare=False)
    held_out: Int[Tensor, "held_out_example position"] = field(init=False, repr=False, compare=False)
    corpus: str
    window: int
    """Tokens that a model sees; each sequence has one more, the last answer."""
    held_out_share: float

    def __getattr__(self, name: str) -> Int[Tensor, "example position"]:
        """`train` and `held_out`, which no object has as an attribute: cut from the text when they are asked for."""
        if name not in ("train", "held_out"):
            raise AttributeError(name)
        return _windows(self.parts[name == "held_out"], self.window)

    @cached_property
    def parts(self) -> tuple[Int[Tensor, "train_token"], Int[Tensor, "held_out_token"]]:
        """The training and the held-out part, in the order of the text. Raises: NoCorpus."""
        tokens = torch.tensor(self.vocabulary.encode(read_corpus(self.corpus)))
        train = round(len(tokens) * (1 - self.held_out_share))
        if min(train, len(tokens) - train) <= self.window:
            raise BadRecipe(f"{self.name}: held_out = {self.held_out_share} leaves no window of {self.window} tokens")
        return tokens[:train], tokens[train:]

    @property
    def n_ctx(self) -> int:
        return self.window

    def encode(self, text: str) -> Int[Tensor, "1 position"]:
        """Of an endless text nothing is cut into tokens. Raises: BadPrompt."""
        if len(text) > self.n_ctx * max(map(len, self.vocabulary.words)):
            raise BadPrompt(
                f"the prompt has {len(text):,} characters, but {self.name} has a context of {self.n_ctx} tokens"
            )
        return super().encode(text)

    def batch(self, seed: int, step: int, size: int) -> Int[Tensor, "example position"]:
        tokens = self.parts[0]
        starts = np.random.default_rng([seed, step]).integers(len(tokens) - self.window, size=size)
        return tokens[torch.from_numpy(starts)[:, None] + torch.arange(self.window + 1)]

    def score(self, logits, tokens=None):
        return TextScores(**vars(super().score(logits, tokens)))

    def clusters(self, tokens):
        return [f"windows {i - i % BLOCK}–{i - i % BLOCK + BLOCK - 1}" for i in range(len(tokens))]

    def truth(self) -> str:
        share = round(100 * self.held_out_share)
        return f"a text; its last {share} % of tokens are held out, and what comes next is known for every one of them"


def read_text(name: str, about: str, raw: Fields, seed: int) -> Text:
    """`seed` changes nothing: the text has one order, and its last part is held out."""
    corpus, window = raw.choice("corpus", tuple(CORPORA)), raw.whole("window", 1, 10_000)
    share, tokenizer = raw.number("held_out", 0, 1), raw.table("tokenizer")
    file, sha256 = content("datasets") / tokenizer.choice("file", ("shakespeare-1024.json",)), tokenizer.text("sha256")
    tokenizer.done()
    raw.done()
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise BadRecipe(f"{tokenizer.where}: {file.name} has the sha256 {found}, not {short(sha256, 70)!r}")
    vocabulary = BytePairs.read(file)
    return Text(
        name=name, about=about, vocabulary=vocabulary, scored=tuple(range(window)), roles={},
        chance=1 / len(vocabulary), corpus=corpus, window=window, held_out_share=share,
    )  # fmt: skip


def _windows(tokens: Int[Tensor, "token"], window: int) -> Int[Tensor, "example position"]:
    """Side by side: the answer to the last token of one is the first token of the next."""
    return tokens.unfold(0, window + 1, window)
