"""Prompts as words: shaded by how much one position looks at each, or marked with what sets two prompts apart. HTML."""

import html
from collections.abc import Mapping, Sequence

from workbench.figures import style
from workbench.wording import percent

STYLE = f"""<style>
.wb-line {{ display: flex; flex-wrap: wrap; align-items: baseline; gap: .15rem 1.1rem; margin: .1rem 0 .35rem; }}
.wb-words {{ display: flex; flex-wrap: wrap; gap: .2rem .12rem; }}
.wb-words {{ font: .84rem/1.35 {style.MONOSPACE}; }}
.wb-letter {{ flex: 0 0 auto; min-width: 1rem; font-size: .9rem; opacity: .65; }}
.wb-word {{ display: inline-flex; flex-direction: column; align-items: center; }}
.wb-word {{ padding: .05rem .22rem; border-radius: .2rem; box-sizing: border-box; }}
.wb-word small {{ font-size: .72rem; opacity: .75; font-variant-numeric: tabular-nums; }}
.wb-index {{ font-size: .68rem; opacity: .6; margin-right: .35em; }}
.wb-token {{ border-bottom: 2px solid transparent; white-space: pre; }}
.wb-later {{ opacity: .38; }}
.wb-at {{ box-shadow: inset 0 0 0 1.5px {style.GREY}; }}
.wb-differs {{ box-shadow: inset 0 0 0 1px {style.FAINT}; font-weight: 650; }}
.wb-next {{ font-size: .88rem; white-space: nowrap; font-variant-numeric: tabular-nums; }}
.wb-next b {{ font-weight: 600; }}
.wb-next span {{ opacity: .65; margin-left: .7rem; }}
.wb-title {{ font-size: .88rem; font-weight: 600; margin: .55rem 0 .1rem; }}
.wb-key {{ font-size: .82rem; opacity: .8; display: flex; gap: .2rem 1.1rem; flex-wrap: wrap; }}
.wb-key i {{ display: inline-block; width: .9rem; height: 3px; margin-right: .35rem; vertical-align: middle; }}
</style>"""


def shaded_words(
    tokens: Sequence[str],
    weights: Sequence[float],
    letter: str = "",
    roles: Mapping[str, int] | None = None,
    other: Sequence[str] | None = None,
    *,
    direction: str = "from",
    measure: str = "attention",
    top: float = 1.0,
) -> str:
    """A prompt, each word shaded by its value with the number under it, full at `top`.

    "from": values are of words 0 … the one that looks, which is framed; words after it are faint, it cannot see them.
    "to": values are of the words from the one that is looked at to the last; words before it are faint. Where `other`
    has as many words, each takes the room of the longer of the two, so that two lines stand in columns. In a long
    prompt numbers that are below 0.005 are left out.
    """
    first = 0 if direction == "from" else len(tokens) - len(weights)
    at = len(weights) - 1 if direction == "from" else first
    parts, indexed = [], style.repeats(tokens)
    for i, token in enumerate(tokens):
        longer = max(len(style.visible(t)) for t in (token, other[i] if other and len(other) == len(tokens) else token))
        css = f"min-width: calc({max(4, longer + 3 * indexed[i])}ch + .5rem)"
        if not first <= i < first + len(weights):
            parts.append(_word(token, i, indexed[i], roles, "wb-later", css))
        else:
            value = weights[i - first]
            css += f"; background: {style.shade(value, measure, top)}"
            shown = len(tokens) <= style.MAX_TOUCH or abs(value) >= 0.005
            number = style.written(value, measure) if shown else "&nbsp;"
            parts.append(_word(token, i, indexed[i], roles, "wb-at" if i == at else "", css, number))
    return _line(letter, "".join(parts))


def prompt_line(
    tokens: Sequence[str],
    destination: int,
    next_words: Sequence[tuple[str, float]],
    letter: str = "",
    other: Sequence[str] | None = None,
    roles: Mapping[str, int] | None = None,
) -> str:
    """A prompt with its destination framed, the words in which it differs from `other` marked, and what comes next."""
    differs = style.differing(tokens, other or [])
    kinds = ["wb-at" if i == destination else "wb-differs" if i in differs else "" for i in range(len(tokens))]
    words = "".join(_word(tokens[i], i, False, roles, kind) for i, kind in enumerate(kinds))
    (first, probability), *rest = next_words
    said = f"▸ <b>{style.escaped(first)}</b> {percent(probability)}"
    said += "".join(f"<span>{style.escaped(word)} {percent(p)}</span>" for word, p in rest)
    return _line(letter, words, f'<div class="wb-next">{said}</div>')


def key(destination: int, tokens: Sequence[str], roles: Mapping[str, int]) -> str:
    """What the percentages and the thin underlines mean."""
    marks = "".join(
        f'<span><i style="background:{style.role_color(role)}"></i>{html.escape(role)}</span>'
        for role, position in roles.items()
        if position < len(tokens)
    )
    what = f"<span>% = probability of the next word after {destination} ‘{style.escaped(tokens[destination])}’</span>"
    return f'<div class="wb-key">{what}{marks}</div>'


def title(text: str) -> str:
    return f'<div class="wb-title">{html.escape(text)}</div>'


def _line(letter: str, words: str, after: str = "") -> str:
    label = f'<div class="wb-letter">{html.escape(letter)}</div>' if letter else ""
    return f'<div class="wb-line">{label}<div class="wb-words">{words}</div>{after}</div>'


def _word(
    token: str, i: int, indexed: bool, roles: Mapping[str, int] | None, kind: str, css: str = "", under: str = ""
) -> str:
    index = f'<span class="wb-index">{i}</span>' if indexed else ""
    role = next((role for role, position in (roles or {}).items() if position == i), "")
    line = f' style="border-color:{style.role_color(role)}" title="{html.escape(role)}"' if role else ""
    below = f"<small>{under}</small>" if under else ""
    return (
        f'<span class="wb-word {kind}" style="{css}"><span>{index}'
        f'<span class="wb-token"{line}>{style.escaped(token)}</span></span>{below}</span>'
    )
