"""What a reader takes away: the figure as a page of its own, its numbers, and the Python that makes it."""

import csv
import io
import json
from typing import TYPE_CHECKING

from workbench.figures.numbers import Head, attention_records
from workbench.pages.cache import Entry

if TYPE_CHECKING:
    from circuits.attention import AttentionMaps


def numbers_csv(prompts: "list[tuple[AttentionMaps, list[str]]]") -> str:
    """Every cell of every head of each prompt (maps, tokens), one a line."""
    records = [
        r
        for letter, (maps, tokens) in zip("AB", prompts, strict=False)
        for r in attention_records(maps, tokens, letter)
    ]
    names = ["prompt", "block", "head", "destination", "destination_token", "source", "source_token", "attention"]
    file = io.StringIO()
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def numbers_json(entry: Entry, vocabulary: tuple[str, ...], prompts: "list[tuple[AttentionMaps, list[str]]]") -> str:
    """The arrays themselves: patterns [layer][head][destination][source], probabilities [position][word]."""
    model = {"name": entry.name, "seed": entry.seed, "weights": entry.key}
    parts = [
        {
            "prompt": letter,
            "tokens": tokens,
            "patterns": maps.patterns.tolist(),
            "probabilities": maps.probabilities.tolist(),
        }
        for letter, (maps, tokens) in zip("AB", prompts, strict=False)
    ]
    return json.dumps({"model": model, "vocabulary": vocabulary, "prompts": parts}, ensure_ascii=False)


def snippet(
    entry: Entry, prompts: list[str], head: Head | None, destination: int, layers: list[int] | None = None
) -> str:
    """The Python that makes the page's figure. It runs as it stands, in a notebook or a script."""
    seed = f", seed={entry.seed}" if entry.seed else ""
    options = (
        f"destination={destination}" + (f", head={head}" if head else "") + (f", layers={layers}" if layers else "")
    )
    shown = ", ".join(f"attention_maps(run.model, {t}), run.str_tokens({t})" for t in "ab"[: len(prompts)])
    names = ", ".join("ab"[: len(prompts)])
    encoded = ", ".join(f"run.encode({json.dumps(' '.join(p.split()), ensure_ascii=False)})" for p in prompts)
    return f"""\
import workbench as wb
from circuits import attention_maps
from workbench.figures import attention_figure

run = wb.load({json.dumps(entry.name)}{seed})
{names} = {encoded}
attention_figure({shown}, {options}, vocabulary=run.task.vocabulary.words, roles=run.task.roles)
"""
