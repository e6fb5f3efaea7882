"""The numbers of an attention figure without the figure: for the terminal, for sentences, for files."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from circuits.attention import AttentionMaps
from circuits.scores import Scores
from workbench.errors import BadPrompt, UnknownName
from workbench.figures.style import visible, written

Head = tuple[int, int]
"""(layer, head), counted from 0."""
Direction = Literal["from", "to"]
"""What one position looks at, or who looks at it."""


def head_name(head: Head) -> str:
    return f"{head[0]}.{head[1]}"


def check_head(maps: AttentionMaps, head: Head) -> None:
    """Raises UnknownName with the heads that there are."""
    known = [head_name((layer, h)) for layer in range(maps.n_layers) for h in range(maps.n_heads)]
    if head_name(head) not in known:
        raise UnknownName("head", head_name(head), known)


def check_destination(tokens: Sequence[str], destination: int) -> int:
    """The position counted from 0; negative ones count from the end. Raises BadPrompt if there is none."""
    if not -len(tokens) <= destination < len(tokens):
        raise BadPrompt(f"position {destination}: this prompt has positions 0 to {len(tokens) - 1}")
    return destination % len(tokens)


def views(
    maps: AttentionMaps, head: Head | None = None, layers: Sequence[int] | None = None
) -> list[tuple[int, int | None, str]]:
    """What is looked at, as (layer, head, title): one head, or with head None the heads of each layer together."""
    if head is not None:
        check_head(maps, head)
        return [(*head, f"block {head[0] + 1} · head {head_name(head)}")]
    how = "sum" if maps.measure == "logit" else "mean"
    which = "its one head" if maps.n_heads == 1 else f"{how} of {maps.n_heads} heads"
    return [
        (layer, None, f"block {layer + 1} · {which}") for layer in (range(maps.n_layers) if layers is None else layers)
    ]


def attention_rows(
    maps: AttentionMaps,
    tokens: Sequence[str],
    head: Head | None = None,
    destination: int = -1,
    layers: Sequence[int] | None = None,
    direction: Direction = "from",
) -> list[tuple[str, list[float]]]:
    """How much one position looks at each other: (title, values).

    "from" the position `destination`: values of sources 0 … destination; attention sums to 1. "to" it: of the
    destinations from it to the last. One row a layer (its heads together), or the one row of `head`. A model without
    layers has none.
    """
    at = check_destination(tokens, destination)
    rows = []
    for layer, which, title in views(maps, head, layers):
        pattern = maps.together[layer] if which is None else maps.patterns[layer, which]
        rows.append((title, pattern[at, : at + 1].tolist() if direction == "from" else pattern[at:, at].tolist()))
    return rows


def involvement(maps: AttentionMaps, at: int, direction: Direction = "from") -> Float[Tensor, "layer head"]:
    """How much each head has to do with one position: the largest value between it and another, without its sign.

    "from": what the position looks at; "to": who looks at it. Itself is left out, as that is where heads rest; so the
    first position has no "from" and the last no "to", and there it is 0.
    """
    others = maps.patterns[:, :, at, :at] if direction == "from" else maps.patterns[:, :, at + 1 :, at]
    return others.abs().amax(dim=-1) if others.shape[-1] else maps.patterns.new_zeros(maps.patterns.shape[:2])


def ranked(maps: AttentionMaps, scores: Scores | None = None, ascending: bool = False) -> list[Head]:
    """The heads by their score, largest first unless `ascending`; without scores block by block."""
    heads = [(layer, head) for layer in range(maps.n_layers) for head in range(maps.n_heads)]
    if scores is None:
        return heads
    return sorted(heads, key=lambda head: float(scores.scores[head]) * (1 if ascending else -1))


def next_words(
    maps: AttentionMaps, vocabulary: Sequence[str], destination: int = -1, n: int = 3, also: Sequence[str] = ()
) -> list[tuple[str, float]]:
    """The likeliest next words at `destination` with their probabilities 0 … 1, likeliest first.

    `n` words in all, of which those in `also` are never left out.
    """
    probabilities = maps.probabilities[destination, : len(vocabulary)]
    order = probabilities.argsort(descending=True, stable=True).tolist()
    words = [str(vocabulary[token]) for token in order]
    extra = [word for word in dict.fromkeys(also) if word not in words[:n]]
    kept = {*words[: max(1, n - len(extra))], *extra}
    return [(word, float(probabilities[token])) for word, token in zip(words, order, strict=True) if word in kept]


def predictions(maps: AttentionMaps, vocabulary: Sequence[str]) -> list[str]:
    """The likeliest next word at every position."""
    return [str(vocabulary[token]) for token in maps.probabilities[:, : len(vocabulary)].argmax(dim=-1).tolist()]


def attention_records(maps: AttentionMaps, tokens: Sequence[str], prompt: str = "A") -> Iterator[dict[str, Any]]:
    """Every number of every head as a long table: one dict a cell on or below the diagonal, and the heads together."""
    for layer in range(maps.n_layers):
        patterns = [
            ("sum" if maps.measure == "logit" else "mean", maps.together[layer]),
            *((head_name((layer, h)), maps.patterns[layer, h]) for h in range(maps.n_heads)),
        ]
        for name, pattern in patterns:
            for destination, row in enumerate(pattern.tolist()):
                for source, weight in enumerate(row[: destination + 1]):
                    yield {
                        "prompt": prompt, "block": layer + 1, "head": name,
                        "destination": destination, "destination_token": tokens[destination],
                        "source": source, "source_token": tokens[source], maps.measure: weight,
                    }  # fmt: skip


def summary(
    rows_a: list[tuple[str, list[float]]],
    tokens_a: Sequence[str],
    rows_b: list[tuple[str, list[float]]] | None = None,
    tokens_b: Sequence[str] | None = None,
    *,
    direction: Direction = "from",
    measure: str = "attention",
    what: str = "the logit",
    letters: tuple[str, str] = ("A", "B"),
) -> str:
    """One sentence on what one position of `attention_rows` looks at most, or is looked at from, layer by layer.

    `what` names the logit where that is the measure. If B is read at another position, being shorter, two sentences.
    """
    kind: dict[str, Any] = {"direction": direction, "measure": measure, "what": what}
    if (
        rows_b is not None
        and tokens_b is not None
        and _at(rows_b, tokens_b, direction) != _at(rows_a, tokens_a, direction)
    ):
        return f"A: {summary(rows_a, tokens_a, **kind)} B: {summary(rows_b, tokens_b, **kind)}"
    lead, verb, link = {
        ("from", "attention"): ("From", "looks most", "at"), ("to", "attention"): ("At", "looks most", "from"),
        ("from", "moved"): ("To", "moves most", "from"), ("to", "moved"): ("From", "moves most", "to"),
        ("from", "logit"): ("At", f"adds most to {what}", "from"),
        ("to", "logit"): ("From", f"adds most to {what}", "at"),
    }[direction, measure]  # fmt: skip
    at, parts = _at(rows_a, tokens_a, direction), []
    first = 0 if direction == "from" else at
    for k, (title, values) in enumerate(rows_a):
        most = _most(values, tokens_a, first, measure)
        part = f"{title.partition(' · ')[0] if ' of ' in title else title}{f' {verb}' if not k else ''} {link} {most}"
        if rows_b is not None and tokens_b is not None:
            other = _most(rows_b[k][1], tokens_b, first, measure)
            part += " in both" if other == most else f" in {letters[0]}, {link} {other} in {letters[1]}"
        parts.append(part)
    return f"{lead} {at} ‘{visible(tokens_a[at])}’, " + "; ".join(parts) + "."


def _at(rows: list[tuple[str, list[float]]], tokens: Sequence[str], direction: Direction) -> int:
    """The position that rows are of."""
    return len(rows[0][1]) - 1 if direction == "from" else len(tokens) - len(rows[0][1])


def _most(values: list[float], tokens: Sequence[str], first: int, measure: str) -> str:
    """The word that has most; all of them where two decimals do not tell them apart."""
    most = written(max(values), measure)
    best = [i for i, value in enumerate(values, first) if written(value, measure) == most]
    if len(best) > 3:
        return f"{len(best)} words alike ({most} each)"
    names = [f"{f'{i} ' if tokens.count(tokens[i]) > 1 else ''}‘{visible(tokens[i])}’" for i in best]
    return f"{' and '.join(names)} ({most}{' each' if len(best) > 1 else ''})"
