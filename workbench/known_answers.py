"""Small models built by hand, without training, each with the answer that a library of circuits must find.

Every model is a norm-free, attention-only transformer of at most two layers. Its residual stream is one-hot: parts such
as [token | position | said], in which embeddings, heads and the unembedding read and write by names. So what each
weight does can be read off the lines that set it, and `about` says what the whole does.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from workbench.recipes import ModelConfig
from workbench.transformer import Transformer
from workbench.vocabulary import Vocabulary

SIZE = 24  # tokens and positions: as many, so that there are sequences without a repeat
SCORE = 30.0  # attention score of what a head looks at; what it does not look at gets e⁻³⁰ of that
LOGIT = 10.0  # of the token that a head says
LETTERS = tuple("abcdefghijklmnopqrstuvwx")
Trigram = tuple[int, int, int]
"""(source, destination, output), as tokens: source … destination → output."""


@dataclass(frozen=True, repr=False)
class KnownModel:
    """A model and the truth about it. What does not apply to it is None or empty."""

    name: str
    about: str
    model: Transformer
    tokens: Int[Tensor, "sequence position"]
    """Sequences that show what it does."""
    head: str | None = None
    """The head that it is about, such as "0.0"."""
    table: Float[Tensor, "d_vocab d_vocab"] | None = None
    """Log-probability of the next token, [this token, next token]."""
    pair: tuple[str, str] | None = None
    """The two heads that compose: writer, then reader, which reads it in its keys."""
    rules: tuple[Trigram, ...] = ()
    """Skip-trigrams that it is meant to say."""
    head_bugs: tuple[Trigram, ...] = ()
    """Skip-trigrams that its head raises as the rules, though none is meant."""
    bugs: tuple[Trigram, ...] = ()
    """Those of them that the whole model says, in place of the rule."""
    look_back: int | None = None
    """How many positions back its head looks, whatever the tokens."""

    def __repr__(self) -> str:
        return f"KnownModel({self.name}: {self.about})"


def known_models() -> tuple[KnownModel, ...]:
    """All of them, built anew; the same every time."""
    return tuple(build() for build in BUILDERS.values())


def bigram_table() -> KnownModel:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(SIZE, SIZE, generator=generator).mul(2).log_softmax(-1)
    model, _ = _empty(LETTERS, n_layers=0, stream=SIZE + 8)
    basis = torch.linalg.qr(torch.randn(SIZE + 8, SIZE, generator=generator)).Q
    model.W_E[:] = basis.T  # not one-hot: the table must be found in the product
    model.W_U[:] = basis @ table
    about = "no layers; W_E W_U is a table of log transition probabilities"
    return KnownModel("bigram-table", about, model, _random(generator), table=table)


def copying_head() -> KnownModel:
    model, at = _empty(LETTERS, token=SIZE, said=SIZE)
    _embed(model, at)
    _moves(model, "0.0", at["token"], at["said"])
    _says(model, at["said"])
    about = "head 0.0 attends alike to every position so far and says the tokens there"
    return KnownModel("copying-head", about, model, _random(), head="0.0")


def previous_token_head() -> KnownModel:
    model, at = _empty(LETTERS, token=SIZE, position=SIZE, said=SIZE)
    _embed(model, at)
    _looks_back(model, "0.0", at["position"], 1)
    _moves(model, "0.0", at["token"], at["said"])
    _says(model, at["said"], shift=1)  # not the token itself, or the head would be a copying head too
    about = "head 0.0 attends to the position before; the model says the letter after the one there, a for x"
    return KnownModel("previous-token-head", about, model, _random(), head="0.0", look_back=1)


def erasing_head() -> KnownModel:
    model, at = _empty(LETTERS, token=SIZE, position=SIZE)
    _embed(model, at)
    _looks_back(model, "0.0", at["position"], 0)
    _moves(model, "0.0", at["token"], at["token"], -0.9)
    _says(model, at["token"])
    about = "head 0.0 attends to its own position and takes away nine tenths of what the embedding wrote"
    return KnownModel("erasing-head", about, model, _random(), head="0.0", look_back=0)


def positional_impostor() -> KnownModel:
    model, at = _empty(LETTERS, token=SIZE, position=SIZE, said=SIZE)
    _embed(model, at)
    _looks_back(model, "0.0", at["position"], 5)
    _moves(model, "0.0", at["token"], at["said"])
    _says(model, at["said"])
    about = (
        "head 0.0 attends five positions back, whatever the tokens, and says the one there: it looks like an induction "
        "head where sequences repeat after six"
    )
    return KnownModel("positional-impostor", about, model, repeated(64, (4, 12)), head="0.0", look_back=5)


def induction_pair() -> KnownModel:
    """Head 0.0 writes the previous token into a part of its own; head 1.0 finds the current token there.

    At position 0 there is no previous token, and 0.0 writes token 0 itself. Head 1.0's key subtracts the token at its
    own position, which cancels that. Beside them: head 0.1 attends to its own position, copies the token to where
    nobody looks and writes a little noise everywhere; head 1.1 reads noise everywhere and says a little noise.
    """
    generator = torch.Generator().manual_seed(0)

    def noise(rows: int, columns: int, size: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * size

    model, at = _empty(LETTERS, n_layers=2, n_heads=2, token=SIZE, position=SIZE, previous=SIZE, said=SIZE, spare=SIZE)
    d_head, width = model.config.d_head, model.config.d_model
    _embed(model, at)
    _looks_back(model, "0.0", at["position"], 1)
    _moves(model, "0.0", at["token"], at["previous"])
    _looks_back(model, "0.1", at["position"], 0)
    _moves(model, "0.1", at["token"], at["spare"])
    model.blocks[0].attn.W_O[1] += noise(d_head, width, 0.02)

    attention, length = model.blocks[1].attn, _length(model)
    attention.W_Q[0, at["token"], :SIZE] = length * torch.eye(SIZE)
    attention.W_K[0, at["previous"], :SIZE] = length * torch.eye(SIZE)
    attention.W_K[0, at["token"], :SIZE] = -length * torch.eye(SIZE)
    attention.b_Q[0, SIZE] = length  # every query asks a little for position 0, where it rests if nothing matches
    attention.W_K[0, at["position"].start, SIZE] = length / 2
    _moves(model, "1.0", at["token"], at["said"])
    for weight in (attention.W_Q, attention.W_K, attention.W_V):
        weight[1] = noise(width, d_head, 0.1)
    attention.W_O[1, :, at["said"]] = noise(d_head, SIZE, 0.02)
    _says(model, at["said"])
    about = (
        "head 0.0 writes the previous token, head 1.0 attends to where that is the current one, or else to position 0, "
        "and says the token there; heads 0.1 and 1.1 do nothing that matters"
    )
    return KnownModel("induction-pair", about, model, repeated(64, (4, 12)), head="1.0", pair=("0.0", "1.0"))


def repaired_skip_trigrams() -> KnownModel:
    return _skip_trigrams(repaired=True)


def broken_skip_trigrams() -> KnownModel:
    return _skip_trigrams(repaired=False)


BUILDERS: dict[str, Callable[[], KnownModel]] = {
    "bigram-table": bigram_table,
    "copying-head": copying_head,
    "previous-token-head": previous_token_head,
    "erasing-head": erasing_head,
    "positional-impostor": positional_impostor,
    "induction-pair": induction_pair,
    "repaired-skip-trigrams": repaired_skip_trigrams,
    "broken-skip-trigrams": broken_skip_trigrams,
}


def repeated(n: int, periods: tuple[int, int], length: int = SIZE, seed: int = 0) -> Int[Tensor, "sequence position"]:
    """Random segments, no token twice in one, repeated; the period is drawn for each sequence, ends included."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        period = int(torch.randint(periods[0], periods[1] + 1, (), generator=generator))
        segment = torch.randperm(SIZE, generator=generator)[:period]
        rows.append(segment.repeat(math.ceil(length / period))[:length])
    return torch.stack(rows)


def _skip_trigrams(repaired: bool) -> KnownModel:
    """Four sources, two destinations: s…in→o and s…at→o′, each source with outputs of its own.

    One head attends from both destinations to any source, and what it moves from a source cannot depend on the
    destination. So it raises o′ after `in` and o after `at` as well, and o′ the more. `repaired`: the direct path,
    destination → output, decides between the two. Otherwise the model says o′ after either.
    """
    sources, destinations = [f"s{i}" for i in range(4)], ["in", "at"]
    strength = {"in": 1.0, "at": 1.2}
    outputs = [f"{place}-o{i}" for i in range(4) for place in destinations]
    vocabulary = (*sources, *destinations, *outputs, "w", "x", "y", "z")
    n = len(vocabulary)
    token = {word: i for i, word in enumerate(vocabulary)}
    model, at = _empty(vocabulary, d_head=8, token=n, said=n)
    _embed(model, at)
    attention, length = model.blocks[0].attn, _length(model)
    rules, head_bugs = [], []
    for i, source in enumerate(sources):
        attention.W_K[0, token[source], 0] = length
        attention.W_V[0, token[source], i] = 1.0
        for destination in destinations:
            attention.W_Q[0, token[destination], 0] = length
            attention.W_O[0, i, at["said"].start + token[f"{destination}-o{i}"]] = strength[destination]
            for place in destinations:
                trigram = (token[source], token[destination], token[f"{place}-o{i}"])
                (rules if place == destination else head_bugs).append(trigram)
                if repaired:
                    sign = 1 if place == destination else -1
                    model.W_U[token[destination], trigram[2]] = sign * LOGIT / 2
    _says(model, at["said"])
    about = "head 0.0 attends from `in` and `at` to sources and raises both outputs of a source after either; " + (
        "the direct path decides between them" if repaired else "nothing decides, and the model says that of `at`"
    )
    fillers = torch.tensor([token[word] for word in "wxyz"])
    rows = fillers[torch.randint(4, (len(rules), 12), generator=torch.Generator().manual_seed(0))]
    for row, (source, destination, output) in zip(rows, rules, strict=True):
        row[3], row[10], row[11] = source, destination, output
    return KnownModel(
        f"{'repaired' if repaired else 'broken'}-skip-trigrams", about, model, rows, head="0.0", rules=tuple(rules),
        head_bugs=tuple(head_bugs), bugs=() if repaired else tuple(bug for bug in head_bugs if bug[1] == token["in"]),
    )  # fmt: skip


def _empty(
    vocabulary: tuple[str, ...], n_layers: int = 1, n_heads: int = 1, d_head: int = SIZE + 1, **parts: int
) -> tuple[Transformer, dict[str, slice]]:
    """A model whose weights are all zero, and where in its residual stream each part lies."""
    model = Transformer(
        ModelConfig(
            n_layers=n_layers, n_heads=n_heads, d_head=d_head, d_model=sum(parts.values()), d_mlp=0, n_ctx=SIZE,
            d_vocab=len(vocabulary), norm="none",
        ),
        Vocabulary(vocabulary),
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        parameter.requires_grad_(False).zero_()
    at, start = {}, 0
    for name, width in parts.items():
        at[name] = slice(start, start + width)
        start += width
    return model, at


def _embed(model: Transformer, at: dict[str, slice]) -> None:
    """One-hot tokens, and positions where there is a part for them."""
    for name, weight in (("token", model.W_E), ("position", model.W_pos)):
        if name in at:
            weight[:, at[name]] = torch.eye(len(weight))


def _head(model: Transformer, head: str) -> tuple[Any, int]:
    layer, index = (int(number) for number in head.split("."))
    return model.blocks[layer].attn, index


def _length(model: Transformer) -> float:
    """Of query and key: their product over √d_head is SCORE."""
    return math.sqrt(SCORE * math.sqrt(model.config.d_head))


def _looks_back(model: Transformer, head: str, position: slice, distance: int) -> None:
    """The query of position i is the key of i − distance. The first ones have no query and attend alike to all."""
    attention, index = _head(model, head)
    eye = _length(model) * torch.eye(SIZE)
    attention.W_K[index, position, :SIZE] = eye
    attention.W_Q[index, position, :SIZE] = eye.roll(distance, 0)
    attention.W_Q[index, position.start : position.start + distance] = 0


def _moves(model: Transformer, head: str, source: slice, target: slice, strength: float = 1.0) -> None:
    """What the head reads in one part of the stream at the source it writes into another at the destination."""
    attention, index = _head(model, head)
    attention.W_V[index, source, :SIZE] = torch.eye(SIZE)
    attention.W_O[index, :SIZE, target] = strength * torch.eye(SIZE)


def _says(model: Transformer, part: slice, shift: int = 0) -> None:
    """Logits from one part of the stream, of the token there or `shift` tokens on."""
    model.W_U[part] = LOGIT * torch.eye(part.stop - part.start).roll(shift, 1)


def _random(generator: torch.Generator | None = None) -> Int[Tensor, "sequence position"]:
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randint(SIZE, (64, SIZE), generator=generator)
