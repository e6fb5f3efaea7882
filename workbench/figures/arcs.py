"""Two hops on one line of words: arcs of the earlier block below it, of the later block above, and what each is worth.

A chain is two arcs of one colour, which says into what the later head takes what the earlier one moved: query, key or
value. How thick they are is the chain's worth in logits of answer − foil, and that is measured in two ways, which are
not the same and are never summed together: solid arcs are exact contributions, dashed ones what is lost when the path
is cut. A query-chain has no second source of its own: its upper arc comes from where that head then looks most.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import plotly.graph_objects as go

from circuits.attention import AttentionMaps
from circuits.chains import Chain, TwoHops
from workbench.figures import style
from workbench.figures.numbers import head_name

WORDS = {"Q": "query", "K": "key", "V": "value"}
MEASURED = {"Q": "effect of the cut", "K": "effect of the cut", "V": "exact contribution"}
MOST = 12
"""Most chains that are drawn."""
WIDTH = 864  # units of the x axis, as many as pixels on the narrowest figure
CHARACTER, SMALL = 7.9, 6.6  # pixels: a letter of a word, and of other text
THINNEST, THICKEST = 1.5, 9.0  # pixels
WORD, LABEL, LEGEND, LOOP = 17, 17, 30, 17  # pixels: half a line of words, a line of text, the key, half a loop
POINTS = 33  # of an arc
DASH = "14px,4px"
SPREAD = 0.6  # how far strands part where they stand, of how far they part at the top
NEAREST, FURTHEST = 8.0, 90.0  # pixels: between two words
STEP_COST = 0.08  # of a conflict: what a step upwards may avoid
APART = 15  # pixels: between the markers of strands that lie side by side


def chains_that_matter(
    hops: TwoHops, share: float = 0.05, kinds: str = "QKV", most: int = MOST
) -> list[tuple[Chain, float]]:
    """The chains worth at least this share of answer − foil (without its sign), the largest first, at most so many."""
    least = share * abs(float(hops.clean.mean()))
    return [(c, v) for c, v in hops.ranked() if c.kind in kinds and abs(v) >= least and v != 0][:most]


def at_position(place: int | str, position: int) -> int:
    """Of a chain on one prompt: the role "answer" is the position itself."""
    return position if isinstance(place, str) else place


def looks_at(maps: AttentionMaps, chain: Chain, position: int) -> int:
    """What the later head reads at the answer: the middle, or for a query-chain where it looks most."""
    if chain.kind != "Q":
        return at_position(chain.middle, position)
    return int(maps.patterns[chain.reader][position, : position + 1].argmax())


def arcs_figure(
    hops: TwoHops,
    tokens: Sequence[str],
    maps: AttentionMaps,
    position: int,
    *,
    answer: str,
    foil: str,
    share: float = 0.05,
    kinds: str = "QKV",
    chosen: Chain | None = None,
    roles: Mapping[str, int] | None = None,
    v_sum: float | None = None,
) -> go.Figure:
    """The chains of one prompt that matter (`chains_that_matter`), on its words up to `position`.

    `hops`: of this prompt and position (`circuits.two_hops`); `maps`: its attention, for the hover and the upper arc of
    query-chains. `answer`, `foil`: the two words. `v_sum`: the sum of all V-chains, in logits, where `hops` holds only
    some. `chosen` stands out. Markers at the tops carry the chain's name as customdata; they are hollow where the chain
    speaks against the answer. Words that no arc touches make room where the line is too long.
    """
    shown = chains_that_matter(hops, share, kinds)
    clean = float(hops.clean.mean())
    total = sum(v for _, v in hops.ranked("V")) if v_sum is None else v_sum
    said = [
        f"→ {style.escaped(answer)} − {style.escaped(foil)} = {one_decimal(clean)}",
        f"V-chains sum: {one_decimal(total)} of {one_decimal(clean)}",
    ]
    room = WIDTH - SMALL * max(map(len, said)) - 24
    touched = {at_position(p, position) for chain, _ in shown for p in (chain.source, chain.middle)}
    touched |= {looks_at(maps, chain, position) for chain, _ in shown} | {position}
    line = _line(tokens[: position + 1], touched, room)
    top = max([abs(clean), *(abs(value) for _, value in shown)], default=1.0) or 1.0
    strands = [_Strand.of(c, v, maps, tokens, position, top, chosen) for c, v in shown]
    above = _side(strands, line.centre, +1)
    below = _side(strands, line.centre, -1)
    data: list[dict[str, Any]] = [trace for bunch in (*below, *above) for trace in bunch.traces()]
    data += _key(kinds)
    high = max([3 * LABEL, *(bunch.reach for bunch in above)])
    low = max([2.2 * LABEL, *(bunch.reach for bunch in below)])
    width = max(WIDTH, line.end + SMALL * max(map(len, said)) + 24)
    texts = [_text(x, 0, label, "middle center", mono=True) for x, label in line.labels]
    texts += [_text(line.end + 12, 0, f"<b>{said[0]}</b>", "middle right"),
              _text(line.end + 12, -1.25 * LABEL, said[1], "middle right")]  # fmt: skip
    for bunches, edge in ((above, high + WORD), (below, -low - WORD)):
        blocks = {f"block {b.strands[0].layer(b.sign) + 1}" for b in bunches}
        texts += [_text(0, edge - math.copysign(LABEL / 2, edge), ", ".join(sorted(blocks)), "middle right")]
    layout = style.layout(
        round(LEGEND + high + low + 2 * WORD + LABEL / 2),
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yref": "container", "yanchor": "top", "font": {"size": 13},
                "itemclick": False, "itemdoubleclick": False, "bgcolor": "rgba(0,0,0,0)", "itemwidth": 40},
        margin={"l": 0, "r": 0, "t": LEGEND, "b": 0},
        xaxis={"visible": False, "fixedrange": True, "range": [0, width]},
        yaxis={"visible": False, "fixedrange": True, "range": [-low - WORD - LABEL / 2, high + WORD]},
        shapes=_marks(line, position, roles or {}),
    )  # fmt: skip
    return go.Figure([*data, *texts], layout)


def chain_records(
    hops: TwoHops, tokens: Sequence[str], position: int, shown: Sequence[Chain] = ()
) -> Iterator[dict[str, Any]]:
    """Every chain as a row, the largest first: what is measured, and whether it is drawn."""
    for chain, value in hops.ranked():
        source, middle = (at_position(p, position) for p in (chain.source, chain.middle))
        yield {
            "chain": str(chain), "kind": chain.kind, "source": source, "source_token": tokens[source],
            "writer": head_name(chain.writer), "middle": middle, "middle_token": tokens[middle],
            "reader": head_name(chain.reader), "measured": MEASURED[chain.kind], "logits": value,
            "drawn": chain in shown,
        }  # fmt: skip


def chain_words(chain: Chain, tokens: Sequence[str], position: int) -> str:
    """In words: 11 ‘tired’ → 0.0 → 14 ‘the’ → query of 1.3."""
    source, middle = (at_position(p, position) for p in (chain.source, chain.middle))
    names = [f"{i} ‘{style.visible(tokens[i])}’" for i in (source, middle)]
    return f"{names[0]} → {head_name(chain.writer)} → {names[1]} → {WORDS[chain.kind]} of {head_name(chain.reader)}"


def one_decimal(value: float) -> str:
    """Logits with a sign: +6.2, −0.3, 0.0."""
    text = f"{value:+.1f}"
    return "0.0" if text in ("+0.0", "-0.0") else text.replace("-", "−")


@dataclass(frozen=True)
class _Line:
    """The words, and where they stand."""

    centre: dict[int, float]
    """Position → x; of the words that are shown."""
    half: dict[int, float]
    labels: list[tuple[float, str]]
    """x and text, with … for what is left out."""
    end: float


def _line(tokens: Sequence[str], touched: set[int], room: float) -> _Line:
    """Every word where there is room, else those that arcs touch and what stands between them as …"""
    ticks = style.tick_labels(tokens)
    widths = [CHARACTER * min(len(style.visible(t)), style.MAX_LABEL) + (16 if again else 0)
              for t, again in zip(tokens, style.repeats(tokens), strict=True)]  # fmt: skip
    kept = list(range(len(tokens)))
    if sum(widths) + NEAREST * (len(tokens) - 1) > room:
        kept = sorted(touched | {0, len(tokens) - 1})
    items: list[tuple[int | None, str, float]] = []
    for before, i in zip([-1, *kept], kept, strict=False):
        if i > before + 1:
            items.append((None, "…", CHARACTER))
        items.append((i, ticks[i], widths[i]))
    space = min(FURTHEST, max(NEAREST, (room - sum(w for *_, w in items)) / max(len(items) - 1, 1)))
    x, centre, half, labels = LOOP / 2 + 4, {}, {}, []
    for i, label, wide in items:
        labels.append((x + wide / 2, label))
        if i is not None:
            centre[i], half[i] = x + wide / 2, wide / 2
        x += wide + space
    return _Line(centre, half, labels, x - space)


@dataclass(frozen=True)
class _Strand:
    """One chain's arcs."""

    chain: Chain
    value: float
    source: int
    middle: int
    looked: int
    position: int
    width: float
    opacity: float
    chosen: bool
    hover: str

    @classmethod
    def of(
        cls, chain: Chain, value: float, maps: AttentionMaps, tokens: Sequence[str], position: int, top: float,
        chosen: Chain | None,
    ) -> "_Strand":  # fmt: skip
        source, middle = (at_position(p, position) for p in (chain.source, chain.middle))
        looked = looks_at(maps, chain, position)
        names = {i: f"{i} ‘{style.escaped(tokens[i])}’" for i in (source, middle, looked, position)}
        writer, reader = head_name(chain.writer), head_name(chain.reader)
        weight = float(maps.patterns[chain.reader][position, looked])
        second = {
            "Q": f"{reader} takes it into its query there, and looks most at {names[looked]} ({weight:.2f})",
            "K": f"{reader} takes it into its key there, and looks there from {names[position]} ({weight:.2f})",
            "V": f"{reader} moves it on to {names[position]} (attention {weight:.2f})",
        }[chain.kind]
        worth = f"effect of the cut: without it answer − foil loses {style.signed(value)} logits"
        if chain.kind == "V":
            worth = f"exact contribution to answer − foil: {style.signed(value)} logits"
        lines = [
            f'<b>{WORDS[chain.kind]}-chain</b> <span style="color:{style.GREY}">{chain}</span>', worth,
            f"block {chain.writer[0] + 1}: {writer} moves {names[source]} to {names[middle]} "
            f"(attention {float(maps.patterns[chain.writer][middle, source]):.2f})",
            f"block {chain.reader[0] + 1}: {second}",
        ]  # fmt: skip
        width = THINNEST + (THICKEST - THINNEST) * abs(value) / top
        opacity = 1.0 if chosen is None or chain == chosen else 0.5
        return cls(chain, value, source, middle, looked, position, width, opacity, chain == chosen, "<br>".join(lines))

    def ends(self, sign: int) -> tuple[int, int]:
        return (self.looked, self.position) if sign > 0 else (self.source, self.middle)

    def head(self, sign: int) -> tuple[int, int]:
        return self.chain.reader if sign > 0 else self.chain.writer

    def layer(self, sign: int) -> int:
        return self.head(sign)[0]


@dataclass
class _Bunch:
    """Strands of one head between the same two words: side by side, under one label."""

    strands: list[_Strand]
    sign: int
    left: float
    right: float
    height: float
    paths: list[tuple[list[float], list[float]]] = field(default_factory=list)
    tops: list[tuple[float, float]] = field(default_factory=list)
    """Where the markers stand."""

    def __post_init__(self) -> None:
        offset = 0.0
        for strand in self.strands:
            offset += strand.width / 2
            self.paths.append(_arc(self.left, self.right, self.height + offset, SPREAD * offset, self.sign))
            self.tops.append(self._top(len(self.tops), offset))
            offset += strand.width / 2 + 2

    def _top(self, i: int, offset: float) -> tuple[float, float]:
        """The first strand's in the middle, the others' to its left and right, so that none covers another."""
        half = (self.right - self.left) / 2 + SPREAD * offset
        turn = min(APART / half, 0.55) * ((i + 1) // 2) * (-1 if i % 2 else 1)
        height = (self.height + offset) * math.cos(turn)
        return round(self.middle + half * math.sin(turn), 1), round(self.sign * (WORD + height), 1)

    @property
    def label(self) -> str:
        """The head, and above the words what its strands are worth: as many as fit under an arc around it."""
        name = head_name(self.strands[0].head(self.sign))
        if self.sign < 0:
            return name
        parts = [f"{WORDS[s.chain.kind]} {one_decimal(s.value)}" for s in self.strands]
        n = min(3, len(parts))
        while n > 1 and SMALL * len(f"{name}  {', '.join(parts[:n])}") > 0.6 * (self.right - self.left):
            n -= 1
        return f"{name}  {', '.join(parts[:n])}{' …' if len(parts) > n else ''}"

    @property
    def middle(self) -> float:
        return (self.left + self.right) / 2

    @property
    def top(self) -> float:
        """Of the strands, over the line of words."""
        return max(abs(y) for _, ys in self.paths for y in ys) - WORD + max(self.strands[-1].width / 2, 5)

    @property
    def reach(self) -> float:
        return self.top + LABEL + 3

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Of the label: left, right, near, far."""
        half = SMALL * len(self.label) / 2 + 3
        centre = self.centre
        return centre - half, centre + half, self.top + 1, self.top + LABEL + 1

    @property
    def centre(self) -> float:
        """Of the label: over the arc's middle, but not beyond the figure's left edge."""
        return max(self.middle, SMALL * len(self.label) / 2 + 2)

    def traces(self) -> Iterator[dict[str, Any]]:
        for strand, (xs, ys), (x, y) in zip(self.strands, self.paths, self.tops, strict=True):
            color = style.COMPOSITION[strand.chain.kind]
            dash = "solid" if strand.chain.kind == "V" else DASH
            yield {
                "type": "scatter", "mode": "lines", "x": xs, "y": ys, "hoverinfo": "skip", "showlegend": False,
                "line": {"color": color, "width": strand.width, "dash": dash}, "opacity": strand.opacity,
                "name": f"{strand.chain}",
            }  # fmt: skip
            marker = {
                "size": 13 if strand.chosen else 10, "color": color, "opacity": 1,
                "symbol": "circle" if strand.value > 0 else "circle-open",
                "line": {"color": color if strand.value < 0 else style.GREY, "width": 2 if strand.value < 0 else 1},
            }  # fmt: skip
            plain = {"marker": {"opacity": 1}}
            yield {
                "type": "scatter", "mode": "markers", "x": [x], "y": [y], "marker": marker,
                "customdata": [str(strand.chain)], "hovertext": [strand.hover], "showlegend": False,
                "hovertemplate": "%{hovertext}<extra></extra>", "selected": plain, "unselected": plain,
                "name": f"top of {strand.chain}",
            }  # fmt: skip
        yield _text(self.centre, self.sign * (WORD + self.top + LABEL / 2 + 1), self.label, "middle center")


def _arc(left: float, right: float, height: float, offset: float, sign: int) -> tuple[list[float], list[float]]:
    """Half an ellipse that stands on the line of words."""
    middle, half = (left + right) / 2, (right - left) / 2 + offset
    angles = [math.pi * i / (POINTS - 1) for i in range(POINTS)]
    return (
        [round(middle - half * math.cos(a), 1) for a in angles],
        [round(sign * (WORD + height * math.sin(a)), 1) for a in angles],
    )


def _side(strands: Sequence[_Strand], centre: Mapping[int, float], sign: int) -> list[_Bunch]:
    """The bunches of one side, each as high as it must be so that no label is crossed or covered."""

    def key(strand: _Strand) -> tuple[Any, ...]:
        (left, right), head = strand.ends(sign), strand.head(sign)
        return centre[right] - centre[left], left, right, head

    placed: list[_Bunch] = []
    for (span, left, right, _), group in groupby(sorted(strands, key=key), key):
        members = sorted(group, key=lambda s: -abs(s.value))
        ends = (centre[left] - LOOP, centre[left] + LOOP) if left == right else (centre[left], centre[right])
        found: list[tuple[float, _Bunch]] = []
        for step in range(30):
            bunch = _Bunch(members, sign, *ends, 26 + 0.11 * span + 9 * step)
            conflicts = _conflicts(bunch, placed)
            found.append((conflicts + STEP_COST * step, bunch))
            if not conflicts:
                break
        placed.append(min(found, key=lambda pair: pair[0])[1])
    return placed


def _conflicts(bunch: _Bunch, placed: Sequence[_Bunch]) -> int:
    """How often a label is covered by another, or crossed by an arc."""
    count = 0
    for other in placed:
        a, b = bunch.box, other.box
        count += 4 * (a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3])
        for box, of in ((a, other), (b, bunch)):
            count += any(
                box[0] < x < box[1] and box[2] - strand.width / 2 < abs(y) - WORD < box[3] + strand.width / 2
                for strand, (xs, ys) in zip(of.strands, of.paths, strict=True)
                for x, y in zip(xs, ys, strict=True)
            )
        count += 2 * (abs(bunch.top - other.top) < 6 and abs(bunch.middle - other.middle) < 12)
    return count


def _key(kinds: str) -> list[dict[str, Any]]:
    """What colours, lines and hollow markers mean."""
    lines = [
        {
            "type": "scatter", "mode": "lines", "x": [None], "y": [None], "showlegend": True,
            "name": f"{WORDS[kind]}: {MEASURED[kind]}", "hoverinfo": "skip",
            "line": {"color": style.COMPOSITION[kind], "width": 5, "dash": "solid" if kind == "V" else DASH},
        }
        for kind in "QKV" if kind in kinds
    ]  # fmt: skip
    hollow = {
        "type": "scatter", "mode": "markers", "x": [None], "y": [None], "showlegend": True, "hoverinfo": "skip",
        "name": "against the answer",
        "marker": {"symbol": "circle-open", "size": 10, "color": style.GREY, "line": {"width": 2}},
    }  # fmt: skip
    return [*lines, hollow]


def _text(x: float, y: float, text: str, where: str, *, mono: bool = False) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "text", "x": [x], "y": [y], "text": [text], "textposition": where,
        "hoverinfo": "skip", "showlegend": False, "name": "text", "cliponaxis": False,
        "textfont": {"size": 13} | ({"family": style.MONOSPACE} if mono else {}),
    }  # fmt: skip


def _marks(line: _Line, position: int, roles: Mapping[str, int]) -> list[dict[str, Any]]:
    """A frame around the position, and a thin line in its colour under each named word."""
    marks = [
        {
            "type": "line", "x0": line.centre[at] - line.half[at], "x1": line.centre[at] + line.half[at], "y0": -11,
            "y1": -11, "line": {"color": style.role_color(role), "width": 2}, "name": role,
        }
        for role, at in roles.items() if at in line.centre
    ]  # fmt: skip
    x, half = line.centre[position], line.half[position] + 4
    frame = {"type": "rect", "x0": x - half, "x1": x + half, "y0": -14, "y1": 12}
    return [*marks, frame | {"line": {"color": style.GREY, "width": 1.5}}]
