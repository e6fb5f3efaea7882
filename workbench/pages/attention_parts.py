"""The parts of the attention page, top to bottom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import streamlit as st

from workbench.figures import figure_html, numbers, style, words
from workbench.figures.numbers import Head
from workbench.pages import export
from workbench.pages.cache import Entry
from workbench.pages.frame import MEAN

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from circuits.attention import AttentionMaps

MANY_BLOCKS, BLOCKS_AT_ONCE = 4, 3

EXPLANATION = """\
**A map** shows where a head looks. A row is the position that looks (the destination), a column the position that is
looked at (the source), the colour the weight from 0 to 1 after the softmax. A row sums to 1: what one word gains,
others lose. A position sees itself and what came before it; the rest is a gap, not a zero.

**The mean of the heads** of a block hides heads that disagree: choose a head to see it alone.

**B − A** is the change of each weight when A becomes B: brown more, teal less. Rows before the first word that differs
show none. If the lengths differ, positions do not correspond, and there is no difference to show.

**What it does not say.** A weight tells how much is read, not what is read nor whether the answer depends on it. A map
suggests a mechanism; only cutting the edge and watching the answer confirms it.
"""


@dataclass(frozen=True)
class Shown:
    """One prompt on the page."""

    letter: str
    text: str
    tokens: list[str]
    maps: "AttentionMaps"
    destination: int

    @property
    def at(self) -> int:
        """The destination, or the last position of a prompt that is shorter."""
        return min(self.destination, len(self.tokens) - 1)

    def rows(self, head: Head | None, layers: Sequence[int] | None) -> list[tuple[str, list[float]]]:
        return numbers.attention_rows(self.maps, self.tokens, head, self.at, layers)


def label(prompt: Shown, prompts: list[Shown]) -> str:
    """A or B where there are two."""
    return prompt.letter if len(prompts) > 1 else ""


def other(prompt: Shown, prompts: list[Shown]) -> list[str] | None:
    """The tokens of the prompt that this one is compared with."""
    return next((p.tokens for p in prompts if p is not prompt), None)


def next_words(prompts: list[Shown], vocabulary: Sequence[str], roles: Mapping[str, int]) -> None:
    """Each prompt with the words that the model gives most to, at the destination."""
    first = [numbers.next_words(p.maps, vocabulary, p.at, n=1)[0][0] for p in prompts]
    lines = []
    for p in prompts:
        likely = numbers.next_words(p.maps, vocabulary, p.at, n=3, also=first)
        lines.append(words.prompt_line(p.tokens, p.at, likely, label(p, prompts), other(p, prompts), roles))
    st.html(words.STYLE + "".join(lines) + words.key(prompts[0].at, prompts[0].tokens, roles))


def choose(maps: "AttentionMaps") -> tuple[Head | None, list[int] | None]:
    """The head to show, None for the mean over heads; and of a deep model the blocks to show, None for all."""
    layers = None if maps.n_layers <= MANY_BLOCKS else _blocks(maps.n_layers)
    mean = "the only head" if maps.n_heads == 1 else f"mean of {maps.n_heads} heads"
    heads = [(layer, head) for layer in layers or range(maps.n_layers) for head in range(maps.n_heads)]
    named = {numbers.head_name(head): head for head in heads} if maps.n_heads > 1 else {}
    head = st.pills(
        "Head", [MEAN, *named], default=MEAN, required=True, key="head", bind="query-params",
        format_func=lambda name: mean if name == MEAN else name, label_visibility="collapsed",
    )  # fmt: skip
    return named.get(head or MEAN), layers


def _blocks(n_layers: int) -> list[int]:
    firsts = range(0, n_layers, BLOCKS_AT_ONCE)
    parts = {f"blocks {i + 1}–{min(i + BLOCKS_AT_ONCE, n_layers)}": i for i in firsts}

    def to_mean() -> None:
        st.session_state.head = MEAN

    part = st.pills("Blocks", list(parts), default=next(iter(parts)), required=True, key="blocks", bind="query-params",
                    on_change=to_mean, label_visibility="collapsed")  # fmt: skip
    first = parts.get(part or "", 0)
    return list(range(first, min(first + BLOCKS_AT_ONCE, n_layers)))


def sentence(a: Shown, b: Shown | None, head: Head | None, layers: list[int] | None) -> str:
    """What the destination looks at most."""
    if b is None:
        return numbers.summary(a.rows(head, layers), a.tokens)
    return numbers.summary(a.rows(head, layers), a.tokens, b.rows(head, layers), b.tokens)


def no_difference(a: Shown, b: Shown) -> str:
    """Why there is no B − A, and where B is read."""
    why = f"A has {len(a.tokens)} words and B {len(b.tokens)}: their positions do not correspond, so there is no B − A."
    return why if a.at == b.at else f"{why} B is shown at its last position, {b.at} ‘{style.visible(b.tokens[b.at])}’."


def chart(figure: "go.Figure") -> None:
    """The maps; a click on a cell makes its row the destination."""

    def touched() -> None:
        points = st.session_state.maps.selection.points
        if points:
            st.session_state.at = points[0]["y"]

    with st.container(key="attention"):
        st.plotly_chart(
            figure,
            key="maps",
            on_select=touched,
            selection_mode="points",
            config={"displaylogo": False, "displayModeBar": "hover"},
        )


def shaded(prompts: list[Shown], head: Head | None, layers: list[int] | None, roles: Mapping[str, int]) -> None:
    """Row by row of the figure: each word shaded by how much the destination looks at it."""
    html = []
    for together in zip(*(p.rows(head, layers) for p in prompts), strict=True):
        html.append(words.title(together[0][0]))
        for p, (_, weights) in zip(prompts, together, strict=True):
            html.append(words.shaded_words(p.tokens, weights, label(p, prompts), roles, other(p, prompts)))
    st.html("".join(html))


def downloads(figure: "go.Figure | None", entry: Entry, vocabulary: tuple[str, ...], prompts: list[Shown]) -> None:
    """Files are made when asked for."""
    data = [(p.maps, p.tokens) for p in prompts]
    name = f"attention-{entry.name}"
    files = {"numbers (JSON)": ("json", "application/json", partial(export.numbers_json, entry, vocabulary, data))}
    if figure is not None:
        files = {
            "figure (HTML)": ("html", "text/html", partial(figure_html, figure, name)),
            "numbers (CSV)": ("csv", "text/csv", partial(export.numbers_csv, data)),
        } | files
    with st.container(horizontal=True, gap="small"):
        for title, (ending, kind, make) in files.items():
            st.download_button(title, make, f"{name}.{ending}", kind, on_click="ignore")
