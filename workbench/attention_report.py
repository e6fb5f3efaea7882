"""What `workbench attention` prints: one destination's attention in every block, and the next words, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from circuits import AttentionMaps, attention_maps
from workbench.errors import UnknownName
from workbench.figures.attention import attention_figure, figure_html
from workbench.figures.numbers import Head, attention_rows, check_destination, head_name, next_words, summary
from workbench.figures.style import visible
from workbench.runs import Run
from workbench.wording import percent

NEXT_WORDS = 5


@dataclass(frozen=True)
class Prompt:
    """One prompt as the model read it."""

    tokens: list[str]
    maps: AttentionMaps
    destination: int
    blocks: list[tuple[str, list[float]]]
    """(title, weights of sources 0 … destination) for each block, or the one head that was chosen."""
    next_words: list[tuple[str, float]]

    @property
    def data(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "destination": self.destination,
            "blocks": [title for title, _ in self.blocks],
            "attention": [weights for _, weights in self.blocks],
            "next_words": [{"word": word, "probability": p} for word, p in self.next_words],
        }


@dataclass(frozen=True)
class AttentionReport:
    run: Run
    prompts: list[Prompt]
    """One, or two to compare."""
    head: Head | None
    """None is the mean over each block's heads."""

    @property
    def data(self) -> dict[str, Any]:
        """Everything in plain numbers."""
        model = {"model": self.run.name, "seed": self.run.seed, "step": self.run.step}
        head = "mean" if self.head is None else head_name(self.head)
        return model | {"head": head} | {k: p.data for k, p in zip(("prompt", "against"), self.prompts, strict=False)}

    @property
    def _pair(self) -> tuple[Prompt, Prompt | None]:
        return self.prompts[0], self.prompts[1] if len(self.prompts) > 1 else None

    def lines(self) -> list[str]:
        """Each prompt with its next words, and a sentence on what the destination looks at most."""
        lines = []
        for p in self.prompts:
            words = "  ".join(f"{visible(word)} {percent(probability)}" for word, probability in p.next_words)
            shown = [visible(token) for token in p.tokens]
            lines += [" ".join(shown), f"  after {p.destination} ‘{shown[p.destination]}’: {words}"]
        if not self.prompts[0].blocks:
            return [*lines, "This model has no layers, so nothing attends."]
        a, b = self._pair
        return [*lines, summary(a.blocks, a.tokens, b and b.blocks, b and b.tokens)]

    @property
    def headings(self) -> list[str]:
        letters = ("",) if len(self.prompts) == 1 else (" A", " B")
        return ["", "source", *(title + letter for title, _ in self.prompts[0].blocks for letter in letters)]

    @property
    def rows(self) -> list[list[str]]:
        """One line a source: its position, its word (A | B where they differ), what the destination gives it."""
        rows = []
        for source in range(max((p.destination for p in self.prompts), default=0) + 1):
            words = dict.fromkeys(visible(p.tokens[source]) for p in self.prompts if source < len(p.tokens))
            weights = [
                f"{p.blocks[block][1][source]:.2f}" if source <= p.destination else ""
                for block in range(len(self.prompts[0].blocks))
                for p in self.prompts
            ]
            rows.append([str(source), " | ".join(words), *weights])
        return rows if self.prompts[0].blocks else []

    def html(self) -> str:
        """The whole maps as a page of its own, which needs no network."""
        a, b = self._pair
        figure = attention_figure(
            a.maps, a.tokens, b and b.maps, b and b.tokens, self.head, a.destination,
            vocabulary=self.run.task.vocabulary.words, roles=self.run.task.roles,
        )  # fmt: skip
        return figure_html(figure, f"attention-{self.run.name}")


def attention_report(
    run: Run, prompts: Sequence[str], *, head: str | None = None, destination: int = -1
) -> AttentionReport:
    """Read one prompt, or two to compare, with a model.

    `head` is such as "1.3", or None for the mean over each block's heads; a negative `destination` counts from the
    end. Raises: UnknownName for a word or a head, BadPrompt for a prompt or a position that there is not.
    """
    encoded = [run.encode(prompt) for prompt in prompts]
    read = []
    which = None if head is None else _head(run, head)
    for tokens in encoded:
        words = run.str_tokens(tokens)
        at = check_destination(words, destination)
        maps = attention_maps(run.model, tokens)
        likely = next_words(maps, run.task.vocabulary.words, at, NEXT_WORDS)
        read.append(Prompt(words, maps, at, attention_rows(maps, words, which, at), likely))
    return AttentionReport(run, read, which)


def _head(run: Run, name: str) -> Head:
    config = run.recipe.model
    heads = {head_name((layer, h)): (layer, h) for layer in range(config.n_layers) for h in range(config.n_heads)}
    if name not in heads:
        raise UnknownName("head", name, heads, f" in {run.name}")
    return heads[name]
