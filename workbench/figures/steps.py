"""One head's equations with their numbers, line under line, as HTML.

Every source word is a column that runs through keys, scores, softmax and values. Whatever is touched, by pointer or by
Tab, lights up where it comes from: its column, and the lines that it is computed from. That needs no server.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from circuits.steps import Steps
from workbench.figures import style

COLUMNS = 15
"""Most sources that get a column; fewer where their words or numbers are long."""
ROOM = 724
"""Pixels for all columns beside their names on a page of 1280 pixels."""
CHARACTER, BETWEEN = 7.9, 5
"""Pixels of a character, and between two columns."""
MOST = 16
"""Numbers of a vector that are written out."""
LIT, TOLD = style.rgba(style.INDIGO, 0.16), style.rgba(style.INDIGO, 0.32)
ORIGINS = {
    "dot": ("q",), "scale": ("dot",), "far": (), "mask": (), "soft": ("mask", "scale", "far"), "v": (), "av": ("soft",),
    "z": ("av",), "delta": ("z",), "q": ("norm", "pos"), "norm": ("x",), "after": ("x", "delta", "others"),
    "turn": ("q",),
}  # fmt: skip
"""Which lines each line is computed from, beside its own column."""


def _touch() -> Iterator[str]:
    for i in range(COLUMNS):
        touched = ", ".join(f".sb:has(.s{i}:{how})" for how in ("hover", "focus"))
        yield f":is({touched}) .s{i} {{ box-shadow: inset 0 0 0 99px {LIT}; }}"
    for line, origins in ORIGINS.items():
        for origin in origins:
            cells = f".r-{origin} :is(td, b)"
            yield f".sb:has(.r-{line} :is(td, b):hover) {cells} {{ box-shadow: inset 0 0 0 99px {LIT}; }}"
    yield f".sb .followed {{ box-shadow: inset 0 0 0 99px {TOLD}; }}"


STYLE = f"""<style>
.sb {{ overflow-x: auto; font: .82rem/1.4 {style.MONOSPACE}; font-variant-numeric: tabular-nums; }}
.sb table {{ border-collapse: collapse; }}
.sb th, .sb td {{ padding: .1rem .15rem; border: 0; text-align: right; white-space: nowrap; }}
.sb th[scope=row], .sb .eq {{ text-align: left; font-weight: 400; padding-right: .5rem; white-space: normal; }}
.sb th[scope=row], .sb .eq {{ flex: 0 0 10.6rem; width: 10.6rem; min-width: 10.6rem; max-width: 10.6rem; }}
.sb th[scope=row] small, .sb .eq small {{ display: block; font: .8rem/1.25 'Source Sans', sans-serif; opacity: .7; }}
.sb th[scope=row] small, .sb .eq small {{ white-space: normal; }}
.sb th[scope=col] {{ font-weight: 500; vertical-align: bottom; cursor: pointer; }}
.sb th[scope=col] small {{ display: block; opacity: .6; font-size: .68rem; }}
.sb .line {{ display: flex; align-items: center; margin: .3rem 0; padding: .1rem 0 .1rem .15rem; }}
.sb .numbers {{ display: flex; flex-wrap: wrap; gap: 2px; align-items: center; }}
.sb .numbers b {{ font-weight: 400; min-width: 2.5rem; text-align: right; }}
.sb .numbers b {{ padding: .05rem .12rem; border-radius: .15rem; }}
.sb .strip {{ display: block; width: min(34rem, 100%); min-width: 22rem; height: 1rem; border-radius: .15rem; }}
.sb .strip {{ outline: 1px solid {style.FAINT}; outline-offset: -1px; }}
.sb td .strip {{ width: 1.1rem; min-width: 0; height: 5.2rem; margin-left: auto; }}
.sb .note {{ opacity: .7; font-size: .78rem; padding-left: .5rem; }}
.sb .later {{ opacity: .42; }}
.sb .here {{ text-decoration: underline; text-underline-offset: .25em; }}
.sb :focus-visible {{ outline: 2px solid {style.rgba(style.INDIGO, 1)}; outline-offset: -2px; }}
.sb-told {{ font: .82rem/1.7 {style.MONOSPACE}; overflow-x: auto; border-left: 3px solid {TOLD}; padding-left: .9rem; }}
{chr(10).join(_touch())}
</style>"""


def steps_html(steps: Steps, tokens: Sequence[str], follow: int | None = None) -> str:
    """Every equation of one head at one destination, with its numbers, and `follow`, a source, marked in all of them.

    Vectors of more than 16 numbers are strips of colour, teal below 0 and brown above, their numbers in the tooltip.
    Of more sources than there is room for those with most attention are shown (`columns_of`), the rest in one column of
    which only the attention is written. It is HTML with its own style, without scripts.
    """
    at, columns = steps.destination, columns_of(steps, tokens, follow)
    here = f"{at} ‘{style.escaped(tokens[at])}’"
    lines = [_line("x", f"x<sub>{at}</sub>", f"the residual stream at {here}", steps.stream[at])]
    lines += _normed(steps)
    if steps.positions_added is not None:
        what = f"x̂<sub>{at}</sub> + p<sub>{at}</sub>"
        lines.append(_line("pos", what, "position, for queries and keys only", steps.read_for_scores[at]))
    source = "x̂" if steps.norm_before else "x"
    query = steps.query if steps.unturned is None else steps.unturned[0]
    lines.append(_line("q", f"q = {source}<sub>{at}</sub> W<sub>Q</sub> + b<sub>Q</sub>", "the query", query))
    if steps.unturned is not None:
        lines.append(_line("turn", f"q, turned by {at}", "rotary: by as many steps as its position", steps.query))
    lines.append(_sources(steps, tokens, columns, follow, source))
    lines.append(_line("z", "z = Σ<sub>s</sub> A<sub>s</sub> v<sub>s</sub>", "what the head has gathered", steps.z))
    delta = "what the head writes"
    lines.append(_line("delta", "Δ = z W<sub>O</sub>", delta, steps.result, f"‖Δ‖ = {float(steps.result.norm()):.2f}"))
    others = "other heads of the block, b<sub>O</sub>"
    lines.append(_line("others", "the rest of the block", others, steps.others, _size(steps.others)))
    lines.append(_after(steps))
    return f'{STYLE}<div class="sb" role="group" aria-label="equations of one head">{"".join(lines)}</div>'


def told_html(steps: Steps, tokens: Sequence[str], source: int) -> str:
    """One source's way through the equations, spelled out: every product, the scale, its share of the softmax."""
    s, q, k = source, steps.query.tolist(), steps.keys[source].tolist()
    shown = list(zip(q, k, strict=True))[:MOST]
    terms = " + ".join(f"({_number(a)})({_number(b)})" for a, b in shown)
    more = f" + … {len(q) - MOST} more" if len(q) > MOST else ""
    product, divided = float(steps.products[s]), float(steps.divided[s])
    lines = [f"q·k<sub>{s}</sub> = {terms}{more} = {_number(product)}"]
    if steps.other_products is not None:
        lines = [f"q·k<sub>{s}</sub> = {_number(product)}"]
    if steps.scaled and steps.divisor != 1:
        lines.append(f"{_number(product)} / √{len(q)} = {_number(divided)}")
    if steps.slope:
        lines.append(f"{_number(divided)} − {steps.slope:.4g} · {max(0, steps.destination - s)} = "
                     f"{_number(divided + float(steps.penalty[s]))}")  # fmt: skip
    score, best = float(steps.scores[s]), float(steps.scores.max())
    if math.isinf(score):
        lines.append("score = −∞: a later word, which cannot be seen; its attention is 0")
    else:
        total = float((steps.scores - best).exp().sum())
        share = f"{float(steps.pattern[s]):.4f}"
        lines.append(f"A<sub>{s}</sub> = e^({_number(score)} − {_number(best)}) / {total:.4f} = {share}, with the "
                     "largest score taken from all of them, which changes nothing")  # fmt: skip
        value = ", ".join(_number(x) for x in steps.values[s].tolist()[:MOST])
        more = ", …" if len(q) > MOST else ""
        lines.append(f"A<sub>{s}</sub> v<sub>{s}</sub> = {share} · ({value}{more})")
    title = f"{s} ‘{style.escaped(tokens[s])}’"
    return f'{STYLE}<div class="sb-told"><b>{title}</b><br>{"<br>".join(lines)}</div>'


def step_records(steps: Steps, tokens: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every number of every step: one dict each, `source` empty where it is of the destination alone."""
    vectors: list[tuple[str, Tensor]] = [("x", steps.stream[steps.destination]), ("query", steps.query)]
    vectors += [("z", steps.z), ("result", steps.result), ("others", steps.others), ("after", steps.after())]
    for step, vector in vectors:
        for i, number in enumerate(vector.tolist()):
            yield _record(step, None, tokens, i, number)
    for step in ("products", "divided", "penalty", "scores", "pattern"):
        for s, number in enumerate(getattr(steps, step).tolist()):
            yield _record(step, s, tokens, None, number)
    for step in ("keys", "values"):
        for s, row in enumerate(getattr(steps, step).tolist()):
            for i, number in enumerate(row):
                yield _record(step, s, tokens, i, number)


def _record(step: str, source: int | None, tokens: Sequence[str], index: int | None, value: float) -> dict[str, Any]:
    token = None if source is None else tokens[source]
    return {"step": step, "source": source, "source_token": token, "dimension": index, "value": value}


def columns_of(steps: Steps, tokens: Sequence[str], follow: int | None = None) -> list[int]:
    """The sources that get a column, in their order: all where there is room, else the destination, `follow`, and those
    with most attention."""
    most = steps.pattern.argsort(descending=True, stable=True).tolist()
    first = [i for i in (steps.destination, follow) if i is not None]
    wide = []
    for s, token in enumerate(tokens):
        numbers = [_number(float(x[s])) for x in (steps.products, steps.divided, steps.penalty)]
        wide.append(CHARACTER * max(map(len, [style.visible(token), *numbers])) + BETWEEN)
    chosen, room = [], ROOM - (len(tokens) > COLUMNS or sum(wide) > ROOM) * (CHARACTER * len("others") + BETWEEN)
    for s in dict.fromkeys([*first, *most]):
        room -= wide[s]
        if len(chosen) == COLUMNS or room < 0:
            break
        chosen.append(s)
    return sorted(chosen)


def _normed(steps: Steps) -> list[str]:
    at, norm = steps.destination, steps.norm_before
    if norm is None:
        return []
    x = steps.stream[at]
    mean = float(norm.mean(x))
    minus = f"(x {'+' if mean < 0 else '−'} {abs(mean):.2f})" if norm.centring else "x"
    what = f"x̂<sub>{at}</sub> = {minus} / {float(norm.scale(x)):.2f} · γ + β"
    return [_line("norm", what, "LayerNorm: minus mean, over √(variance + ε)", steps.read[at])]


def _after(steps: Steps) -> str:
    at = steps.destination
    written = f"x<sub>{at}</sub> + Δ + rest" if steps.adds else "Δ + rest"
    why = "the residual stream behind attention" if steps.adds else "no residual stream: the token is replaced"
    if steps.norm_after is not None:
        written, why = f"LayerNorm({written})", f"{why}, LayerNorm last"
    return _line("after", written, why, steps.after())


def _sources(steps: Steps, tokens: Sequence[str], columns: list[int], follow: int | None, read: str) -> str:
    """The table: a column a source, a line a step."""
    rest = [i for i in range(len(tokens)) if i not in columns]
    last = steps.destination

    def classes(j: int, s: int) -> str:
        return f"s{j}{' later' if s > last else ''}{' followed' if s == follow else ''}"

    head = "".join(
        f'<th scope="col" tabindex="0" class="{classes(j, s)}{" here" if s == last else ""}"><small>{s}</small>'
        f"{style.escaped(tokens[s])}</th>"
        for j, s in enumerate(columns)
    )
    if rest:
        head += f'<th scope="col"><small>others</small>{len(rest)}</th>'

    def row(name: str, equation: str, why: str, cells: Sequence[str], styles: Sequence[str] = (), end: str = "") -> str:
        inside = "".join(
            f'<td class="{classes(j, s)}"{f" style={chr(34)}{styles[j]}{chr(34)}" if styles else ""}>{cells[j]}</td>'
            for j, s in enumerate(columns)
        )
        tail = f"<td>{end}</td>" if rest else ""
        label = f'<th scope="row">{equation}<small>{why}</small></th>'
        return f'<tr class="r-{name}">{label}{inside}{tail}</tr>'

    def numbers(values: Tensor) -> list[str]:
        return [_number(float(values[s])) for s in columns]

    def strips(vectors: Tensor, top: float) -> list[str]:
        return [_strip(vectors[s], top, "bottom") for s in columns]

    attention = [float(steps.pattern[s]) for s in columns]
    shades = [f"background: {style.shade(a, 'attention', 1.0)}" for a in attention]
    keys, values = float(steps.keys.abs().max()), float(steps.values.abs().max())
    added = f"{read}<sub>s</sub>" if steps.positions_added is None else f"({read}<sub>s</sub> + p<sub>s</sub>)"
    turned = ", each turned by its position" if steps.unturned is not None else ""
    lines = [
        row("k", f"k<sub>s</sub> = {added} W<sub>K</sub> + b<sub>K</sub>", f"the keys{turned}",
            strips(steps.keys, keys)),
        row("dot", "q·k<sub>s</sub>", "how well key meets query", numbers(steps.products)),
    ]  # fmt: skip
    root = _root(steps)
    if steps.divisor == 1.0:
        lines.append(row("scale", "÷ 1", "this model does not scale", numbers(steps.divided)))
    elif steps.scaled:
        lines.append(row("scale", f"÷ {root}", "scaled", numbers(steps.divided)))
    else:
        lines.append(row("scale", f"<s>÷ {root}</s>", "not scaled", numbers(steps.divided)))
    if steps.slope:
        lines.append(row("far", f"− {steps.slope:.4g} · distance", "ALiBi", numbers(steps.penalty)))
    mask = ["−∞" if s > last and steps.masked else "0" for s in columns]
    lines += [
        row("mask", "+ mask" if steps.masked else "<s>+ mask</s>", "what comes later is not seen", mask),
        row("soft", "A = softmax", f"attention; sums to {float(steps.pattern.sum()):.2f}",
            [f"{a:.2f}" for a in attention], shades, f"{float(steps.pattern[rest].sum()):.2f}"),
        row("v", f"v<sub>s</sub> = {read}<sub>s</sub> W<sub>V</sub> + b<sub>V</sub>", "the values",
            strips(steps.values, values)),
        row("av", "A<sub>s</sub> v<sub>s</sub>", "each value by its weight",
            strips(steps.pattern[:, None] * steps.values, values)),
    ]  # fmt: skip
    corner = '<th scope="row"><small>every source s is a column</small></th>'
    return f"<table><thead><tr>{corner}{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _root(steps: Steps) -> str:
    return f"√{steps.keys.shape[1]} = {steps.divisor:.4g}"


def _size(vector: Tensor) -> str:
    return f"norm {float(vector.norm()):.2f}"


def _line(name: str, equation: str, why: str, vector: Float[Tensor, "width"], note: str = "") -> str:
    """One vector: its numbers, or a strip where they are many."""
    top = float(vector.abs().max()) or 1.0
    if len(vector) <= MOST:
        numbers = "".join(
            f'<b style="background: {style.shade(x, "logit", top)}">{_number(x)}</b>' for x in vector.tolist()
        )
    else:
        numbers, note = (
            f"<b>{_strip(vector, top, 'right')}</b>",
            note or f"{len(vector)} numbers, norm {float(vector.norm()):.2f}",
        )
    after = f'<span class="note">{note}</span>' if note else ""
    return (
        f'<div class="line r-{name}"><div class="eq">{equation}<small>{why}</small></div>'
        f'<div class="numbers">{numbers}{after}</div></div>'
    )


def _strip(vector: Float[Tensor, "width"], top: float, towards: str) -> str:
    """A vector as a strip of colours, its numbers in the tooltip."""
    step = 100 / len(vector)
    stops = ", ".join(
        f"{style.shade(x, 'logit', top)} {i * step:.4g}% {(i + 1) * step:.4g}%" for i, x in enumerate(vector.tolist())
    )
    numbers = " ".join(_number(x) for x in vector.tolist())
    return f'<i class="strip" title="{numbers}" style="background: linear-gradient(to {towards}, {stops})"></i>'


def _number(value: float) -> str:
    """Two decimals, a true minus."""
    return "−∞" if value == -math.inf else f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
