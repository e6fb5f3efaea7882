"""The numbers of an attention figure without the figure: for the terminal, for sentences, for files."""

from collections.abc import Iterator, Sequence
from typing import Any

from circuits.attention import AttentionMaps
from workbench.errors import BadPrompt, UnknownName
from workbench.figures.style import visible

Head = tuple[int, int]
"""(layer, head), counted from 0."""


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
    """What is looked at, as (layer, head, title): one head, or with head None the mean over the heads of each layer."""
    if head is not None:
        check_head(maps, head)
        return [(*head, f"block {head[0] + 1} · head {head_name(head)}")]
    which = "its one head" if maps.n_heads == 1 else f"mean of {maps.n_heads} heads"
    return [
        (layer, None, f"block {layer + 1} · {which}") for layer in (range(maps.n_layers) if layers is None else layers)
    ]


def attention_rows(
    maps: AttentionMaps,
    tokens: Sequence[str],
    head: Head | None = None,
    destination: int = -1,
    layers: Sequence[int] | None = None,
) -> list[tuple[str, list[float]]]:
    """How much `destination` looks at each source: (title, weights of sources 0 … destination, which sum to 1).

    One row a layer (the mean over its heads), or the one row of `head`. A model without layers has none.
    """
    at = check_destination(tokens, destination)
    rows = []
    for layer, which, title in views(maps, head, layers):
        pattern = maps.mean[layer] if which is None else maps.patterns[layer, which]
        rows.append((title, pattern[at, : at + 1].tolist()))
    return rows


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
    """Every number of every head as a long table: one dict a cell on or below the diagonal, and the mean over heads."""
    for layer in range(maps.n_layers):
        patterns = [
            ("mean", maps.mean[layer]),
            *((head_name((layer, h)), maps.patterns[layer, h]) for h in range(maps.n_heads)),
        ]
        for name, pattern in patterns:
            for destination, row in enumerate(pattern.tolist()):
                for source, weight in enumerate(row[: destination + 1]):
                    yield {
                        "prompt": prompt, "block": layer + 1, "head": name,
                        "destination": destination, "destination_token": tokens[destination],
                        "source": source, "source_token": tokens[source], "attention": weight,
                    }  # fmt: skip


def summary(
    rows_a: list[tuple[str, list[float]]],
    tokens_a: Sequence[str],
    rows_b: list[tuple[str, list[float]]] | None = None,
    tokens_b: Sequence[str] | None = None,
) -> str:
    """One sentence on what the destination of `attention_rows` looks at most, layer by layer.

    If B is read at another position, being shorter, two sentences.
    """
    if rows_b is not None and tokens_b is not None and len(rows_b[0][1]) != len(rows_a[0][1]):
        return f"A: {summary(rows_a, tokens_a)} B: {summary(rows_b, tokens_b)}"
    parts = []
    for k, (title, weights) in enumerate(rows_a):
        part = f"{title.partition(' · ')[0] if 'mean' in title else title} at {_most(weights, tokens_a)}"
        if rows_b is not None and tokens_b is not None:
            other = _most(rows_b[k][1], tokens_b)
            part += " in both" if other == _most(weights, tokens_a) else f" in A, at {other} in B"
        parts.append(part)
    at = len(rows_a[0][1]) - 1
    return f"From {at} ‘{visible(tokens_a[at])}’, " + "; ".join(parts).replace(" at ", " looks most at ", 1) + "."


def _most(weights: list[float], tokens: Sequence[str]) -> str:
    """The word that is given most; all of them where two decimals do not tell them apart."""
    most = f"{max(weights):.2f}"
    best = [i for i, weight in enumerate(weights) if f"{weight:.2f}" == most]
    if len(best) > 3:
        return f"{len(best)} words alike ({most} each)"
    names = [f"{f'{i} ' if tokens.count(tokens[i]) > 1 else ''}‘{visible(tokens[i])}’" for i in best]
    return f"{' and '.join(names)} ({most}{' each' if len(best) > 1 else ''})"
