"""All heads at a glance: one small map each, in one image, in the order of a score that stands beside its null.

A thumbnail shows the shape of a head, not its numbers: they are in the hover, the score under it, and the map of the
head at full size. So its colours go by the square root of the weight: a head that spreads its attention would else be
an empty frame. In a long prompt each pixel is the strongest of the cells that it covers, so that thin diagonals do
not vanish. Heads that have little to do with the position that is looked at fade (PySvelte's AttentionMulti).
"""

import base64
import html
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float, UInt8

from circuits.attention import AttentionMaps
from circuits.scores import Scores
from workbench.figures import style
from workbench.figures.numbers import Direction, Head, check_destination, head_name, involvement, ranked

LARGEST = 48  # cells along a thumbnail
PIXELS = 96  # along a thumbnail, so that cells stay sharp
COLUMNS, FEWEST = 12, 8  # thumbnails on a line, at most; and the room of how many there always is
SIDE, NAME, NULL = 0.9, 0.26, 0.2  # of the pitch: the thumbnail; the line of text under it, and its null's
WIDTH = 864  # pixels that a figure has at least
FADED = 0.25  # opacity of a head that has nothing to do with the position


def thumbnails_figure(
    maps: AttentionMaps,
    tokens: Sequence[str],
    destination: int = -1,
    *,
    direction: Direction = "from",
    scores: Scores | None = None,
    order: Sequence[Head] | None = None,
    chosen: Head | None = None,
) -> go.Figure:
    """A thumbnail of every head of one prompt, as one image.

    `scores` [layer, head] are written under the heads, each above the 95 % band of its null, in `order` or the highest
    first; the frame is solid where the score leaves the band, dotted where it stays inside, or the head is dead.
    `chosen` is framed in colour. Points (one a head) carry the head's name as customdata.
    Raises: BadPrompt for a position that is not there; UnknownName for a head.
    """
    at = check_destination(tokens, destination)
    heads = list(order) if order is not None else ranked(maps, scores)
    columns = min(max(len(heads), 1), COLUMNS)
    lines = -(-len(heads) // columns)
    room = max(columns, FEWEST)
    pitch = SIDE + NAME + (0 if scores is None else NULL)
    corners = {head: (i % columns, (i // columns) * pitch) for i, head in enumerate(heads)}
    involved = involvement(maps, at, direction)
    layout = style.layout(
        round(WIDTH / room * lines * pitch) or 1,
        xaxis={"visible": False, "fixedrange": True, "range": [-0.03, room], "constrain": "domain",
               "constraintoward": "left"},
        yaxis={"visible": False, "fixedrange": True, "range": [lines * pitch, -0.04], "scaleanchor": "x",
               "constrain": "domain", "constraintoward": "top"},
        shapes=_frames(corners, scores, chosen),
    )  # fmt: skip
    if heads:
        picture = _picture(maps, heads, columns, pitch, involved.numpy())
        layout["images"] = [{
            "source": _png(picture), "xref": "x", "yref": "y", "x": 0, "y": 0, "layer": "below", "sizing": "stretch",
            "sizex": columns, "sizey": lines * pitch, "xanchor": "left", "yanchor": "top",
        }]  # fmt: skip
    middle = [(x + SIDE / 2, y + SIDE / 2) for x, y in corners.values()]
    touch = {
        "type": "scatter", "mode": "markers", "x": [x for x, _ in middle], "y": [y for _, y in middle],
        "marker": {"symbol": "square", "size": round(0.8 * WIDTH / room), "opacity": 0},
        "selected": {"marker": {"opacity": 0}}, "unselected": {"marker": {"opacity": 0}},
        "customdata": [head_name(head) for head in heads],
        "hovertext": [_hover(maps, tokens, head, at, direction, scores) for head in heads],
        "hovertemplate": "%{hovertext}<extra></extra>", "name": "heads",
    }  # fmt: skip
    names = {
        "type": "scatter", "mode": "text", "x": [x for x, _ in corners.values()], "hoverinfo": "skip",
        "y": [(y + SIDE + pitch + y) / 2 for _, y in corners.values()], "textposition": "middle right",
        "text": [_label(head, scores) for head in heads], "textfont": {"family": style.MONOSPACE, "size": 12},
        "name": "names",
    }  # fmt: skip
    return go.Figure([touch, names], layout)


def _label(head: Head, scores: Scores | None) -> str:
    name = head_name(head)
    if scores is None:
        return name
    low, high = _band(scores, head)
    null = f'<span style="font-size:10px">{low}…{high}</span>'
    return f"<b>{name}</b> {style.signed(float(scores.scores[head]))}<br>{null}"


def _band(scores: Scores, head: Head) -> tuple[str, str]:
    low, high = (style.signed(float(end)) for end in scores.band[(slice(None), *head)])
    return low, high


def _hover(
    maps: AttentionMaps, tokens: Sequence[str], head: Head, at: int, direction: Direction, scores: Scores | None
) -> str:
    """The head, its score with its null, and the strongest of what it does at the position."""
    values = maps.patterns[head][at, : at + 1] if direction == "from" else maps.patterns[head][at:, at]
    most = int(values.abs().argmax())
    other = most if direction == "from" else at + most
    ends = (at, other) if direction == "from" else (other, at)
    words = [f"{i} ‘{style.escaped(tokens[i])}’" for i in ends]
    lines = [f"head {head_name(head)}", f"{words[0]} → {words[1]}: {style.written(float(values[most]), maps.measure)}"]
    if scores is not None:
        low, high = _band(scores, head)
        where = "dead" if bool(scores.dead[head]) else "outside it" if bool(scores.outside[head]) else "inside it"
        lines[1:1] = [
            f"{html.escape(scores.measure, quote=False)}: {style.signed(float(scores.scores[head]))}",
            f"95 % of its null: {low} … {high}; {where}, z {style.signed(float(scores.z[head]))}",
        ]
    return "<br>".join(lines)


def _frames(corners: dict[Head, tuple[int, float]], scores: Scores | None, chosen: Head | None) -> list[dict[str, Any]]:
    """All solid frames are one shape, and all dotted ones."""
    inside = [head for head in corners if scores is not None and not bool(scores.outside[head])]
    frames = [
        ([head for head in corners if head not in inside], {"color": style.GREY, "width": 1 if scores is None else 2}),
        (inside, {"color": style.GREY, "width": 1, "dash": "dot"}),
        ([head for head in corners if head == chosen], {"color": style.rgba(style.INDIGO, 1), "width": 3}),
    ]
    return [
        {"type": "path", "path": " ".join(_square(*corners[head]) for head in heads), "line": line}
        for heads, line in frames
        if heads
    ]


def _square(x: float, y: float) -> str:
    return f"M {x},{y} H {x + SIDE} V {y + SIDE} H {x} Z"


def _picture(
    maps: AttentionMaps, heads: Sequence[Head], columns: int, pitch: float, involved: Float[np.ndarray, "layer head"]
) -> UInt8[np.ndarray, "row column rgba"]:
    """The thumbnails side by side, with room for the text under each line."""
    patterns = maps.patterns.numpy()
    top = 1.0 if maps.measure == "attention" else float(np.abs(patterns).max()) or 1.0
    wide, high = round(PIXELS / SIDE), round(PIXELS / SIDE * pitch)
    sheet = np.zeros((-(-len(heads) // columns) * high, columns * wide, 4), dtype=np.uint8)
    most = float(involved.max()) or 1.0
    for i, head in enumerate(heads):
        cells = strongest(patterns[head], LARGEST) / top
        strength = FADED + (1 - FADED) * float(involved[head]) / most
        y, x = i // columns * high, i % columns * wide
        sheet[y : y + PIXELS, x : x + PIXELS] = _colours(cells, maps.measure == "logit", strength)
    return sheet


def strongest(pattern: Float[np.ndarray, "n n"], size: int) -> Float[np.ndarray, "m m"]:
    """A map of at most `size` cells along: of the cells that come together, the one furthest from 0."""
    step = -(-len(pattern) // size)
    side = -(-len(pattern) // step)
    padded = np.zeros((side * step, side * step), dtype=pattern.dtype)
    padded[: len(pattern), : len(pattern)] = pattern
    blocks = padded.reshape(side, step, side, step).transpose(0, 2, 1, 3).reshape(side, side, -1)
    return np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)[..., 0]


def _colours(cells: Float[np.ndarray, "m m"], signed: bool, strength: float) -> UInt8[np.ndarray, "pixel pixel rgba"]:
    """Cells −1 … 1 as PIXELS × PIXELS of colour by their square root; no pixel mixes two cells."""
    which = np.arange(PIXELS) * len(cells) // PIXELS
    values = cells[which][:, which]
    rgba = np.empty((PIXELS, PIXELS, 4), dtype=np.uint8)
    rgba[..., :3] = np.where(values[..., None] < 0, style.TEAL, style.BROWN) if signed else style.INDIGO
    rgba[..., 3] = np.round(255 * strength * np.sqrt(np.abs(values).clip(0, 1)))
    return rgba


def _png(rgba: UInt8[np.ndarray, "row column rgba"]) -> str:
    """As a data URI."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = rgba.shape[:2]
    raw = b"".join(b"\0" + row.tobytes() for row in rgba)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    file = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + file).decode()
