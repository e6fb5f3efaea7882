"""One language for all figures: colours, scales, and how a token is written.

Every colour is legible on a light and on a dark page, and every scale begins at transparent, so that "nothing" looks
like the page itself. Text has no colour of its own: it takes the page's.
"""

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

Scale = list[list[float | str]]

INDIGO, TEAL, BROWN = (106, 110, 246), (15, 148, 136), (178, 98, 26)
COMPOSITION = {"Q": "#0072B2", "K": "#E69F00", "V": "#009E73"}
"""Reserved for query-, key- and value-composition."""
ROLES = {"x": "#D6409F", "y": "#B8960C", "adjective": "#E5484D", "answer": "#868E96"}
"""The named positions of a sentence; never a colour of a scale or of Q, K, V."""
GREY = "#8A8F98"
"""Secondary text and guide lines."""
FAINT = "rgba(138, 143, 152, 0.45)"
MONOSPACE = "'Source Code Pro', 'SFMono-Regular', 'DejaVu Sans Mono', Menlo, Consolas, monospace"

MAX_TICKS = 20
"""Most tick labels on an axis: they are what a map costs."""
MAX_TOUCH = 32
"""Longest prompt in tokens whose cells answer clicks."""
MAX_DIFFERING = 6
"""Most differing words that are marked: where nearly all differ, marks say nothing."""
MAX_LABEL = 14
"""Longest tick label in characters."""
SHADE = 0.6
"""Opacity behind a word of attention 1: the word itself must stay legible on both themes."""


def rgba(color: tuple[int, int, int], alpha: float) -> str:
    return f"rgba({color[0]}, {color[1]}, {color[2]}, {alpha:.3g})"


ATTENTION: Scale = [[0, rgba(INDIGO, 0.0)], [1, rgba(INDIGO, 1.0)]]
"""0 … 1, linear in opacity."""
DIFFERENCE: Scale = [[0, rgba(TEAL, 1.0)], [0.5, rgba(TEAL, 0.0)], [0.5, rgba(BROWN, 0.0)], [1, rgba(BROWN, 1.0)]]
"""−1 … +1, symmetric about 0: teal is less, brown is more."""


def role_color(role: str) -> str:
    """The colour of a named position; grey for roles that have none."""
    return ROLES.get(role, GREY)


def visible(token: str) -> str:
    """A token with its blanks made visible: · for leading spaces, ↵ for a line break. Plain text, escape codes too."""
    token = token.replace("\r\n", "↵").replace("\n", "↵").replace("\r", "↵").replace("\t", "⇥")
    if not token:
        return "∅"
    token = "".join(letter if letter.isprintable() or letter == "\u00a0" else repr(letter)[1:-1] for letter in token)
    return "·" * (len(token) - len(token.lstrip(" "))) + token.lstrip(" ")


def escaped(token: str) -> str:
    """`visible`, as HTML text: `<b>` is shown, not obeyed."""
    return html.escape(visible(token), quote=False)


def repeats(tokens: Sequence[str]) -> list[bool]:
    """Which tokens occur more than once."""
    return [tokens.count(token) > 1 for token in tokens]


def plain_labels(tokens: Sequence[str]) -> list[str]:
    """Every token so that no two look alike: its position before it where it repeats. Plain text."""
    return [
        f"{i} {visible(t)}" if again else visible(t)
        for i, (t, again) in enumerate(zip(tokens, repeats(tokens), strict=True))
    ]


def tick_labels(tokens: Sequence[str]) -> list[str]:
    """As `plain_labels`, in Plotly's HTML: the position small and grey, long tokens cut."""
    labels = []
    for i, (token, again) in enumerate(zip(tokens, repeats(tokens), strict=True)):
        shown = visible(token)
        shown = shown if len(shown) <= MAX_LABEL else shown[: MAX_LABEL - 1] + "…"
        index = f'<span style="font-size:10px;color:{GREY}">{i}</span> ' if again else ""
        labels.append(index + html.escape(shown, quote=False))
    return labels


def differing(tokens: Sequence[str], other: Sequence[str]) -> list[int]:
    """Where two prompts of one length have different words; none where the lengths differ or nearly all words do."""
    if len(tokens) != len(other):
        return []
    places = [i for i, (s, t) in enumerate(zip(tokens, other, strict=True)) if s != t]
    return places if len(places) <= MAX_DIFFERING else []


def tick_positions(length: int) -> list[int]:
    """At most MAX_TICKS positions, evenly spaced from 0."""
    step = -(-length // MAX_TICKS)
    return list(range(0, length, step))


def signed(value: float) -> str:
    """Two decimals with a sign: +0.48, −0.27, 0.00."""
    text = f"{value:+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text.replace("-", "−")


def written(value: float, measure: str) -> str:
    """A value of a map: attention and norms without a sign, contributions to a logit with one."""
    return signed(value) if measure == "logit" else f"{value:.2f}"


def shade(value: float, measure: str, top: float) -> str:
    """The colour behind a word: as strong as the value is large, of `top`."""
    strength = SHADE * min(1.0, abs(value) / top) if top > 0 else 0.0
    return rgba(INDIGO if measure != "logit" else BROWN if value > 0 else TEAL, strength)


def layout(height: int, **more: Any) -> dict[str, Any]:
    """What every figure begins with: the page's own paper, no template, nothing that can be dragged by mistake."""
    return {
        "template": "none", "height": height, "margin": {"l": 0, "r": 0, "t": 0, "b": 0}, "showlegend": False,
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "dragmode": False, "hovermode": "closest",
        "hoverlabel": {"font": {"family": MONOSPACE, "size": 13}}, "font": {"size": 13},
    } | more  # fmt: skip


def empty_figure(height: int = 320) -> go.Figure:
    """Nothing, on the page's own paper."""
    figure = go.Figure(layout=layout(height))
    return figure.update_xaxes(visible=False).update_yaxes(visible=False)
