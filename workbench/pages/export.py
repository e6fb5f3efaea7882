"""What a reader takes away from the Attention page: its numbers, and the Python that makes its figure."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from workbench.figures.numbers import Direction, Head, attention_records
from workbench.pages.cache import Side, Target
from workbench.pages.show import load_call

if TYPE_CHECKING:
    from circuits.attention import AttentionMaps


def records(prompts: "list[tuple[AttentionMaps, list[str]]]") -> Iterator[dict[str, Any]]:
    """Every cell of every head of each prompt (maps, tokens)."""
    for letter, (maps, tokens) in zip("AB", prompts, strict=False):
        yield from attention_records(maps, tokens, letter)


def arrays(
    sides: list[Side], vocabulary: tuple[str, ...], prompts: "list[tuple[AttentionMaps, list[str]]]"
) -> dict[str, Any]:
    """The arrays themselves: patterns [layer][head][destination][source], probabilities [position][word]."""
    parts = [
        {
            "prompt": letter,
            "model": {"name": side.entry.name, "seed": side.entry.seed, "weights": side.entry.key, "step": side.step},
            "tokens": tokens,
            "measure": maps.measure,
            "patterns": maps.patterns.tolist(),
            "probabilities": maps.probabilities.tolist(),
        }
        for letter, side, (maps, tokens) in zip("AB", sides, prompts, strict=False)
    ]
    return {"vocabulary": vocabulary, "prompts": parts}


def snippet(
    sides: list[Side],
    head: Head | None,
    destination: int,
    layers: list[int] | None = None,
    direction: Direction = "from",
    measure: str = "attention",
    target: Target | None = None,
    what: str = "",
    letters: tuple[str, str] = ("A", "B"),
    roles: bool = True,
) -> str:
    """The Python that makes the page's figure. It runs as it stands, in a notebook or a script."""
    runs = dict(zip(dict.fromkeys(load_call(side.run) for side in sides), ("run", "other"), strict=False))
    texts = dict(zip(dict.fromkeys(side.text for side in sides), "ab", strict=False))
    function = {"attention": "attention_maps", "moved": "moved_maps", "logit": "contribution_maps"}[measure]
    logit = f", {target.answer}, {target.foil}" if measure == "logit" and target else ""
    shown = ", ".join(
        f"{function}({runs[load_call(side.run)]}.model, {texts[side.text]}{logit}), run.str_tokens({texts[side.text]})"
        for side in sides
    )
    options = {
        "destination": destination, "head": head, "layers": layers,
        "direction": None if direction == "from" else direction,
        "what": what if logit else None, "letters": None if letters == ("A", "B") or len(sides) == 1 else letters,
    }  # fmt: skip
    given = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else value}"
                      for name, value in options.items() if value is not None)  # fmt: skip
    loads = "\n".join(f"{name} = {load}" for load, name in runs.items())
    encoded = ", ".join(f"run.encode({json.dumps(text, ensure_ascii=False)})" for text in texts)
    return f"""\
import workbench as wb
from circuits.attention import {function}
from workbench.figures import attention_figure

{loads}
{", ".join(texts.values())} = {encoded}
attention_figure({shown}, {given}, vocabulary=run.task.vocabulary.words{", roles=run.task.roles" * roles})
"""
