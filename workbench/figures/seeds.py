"""A table's rows as a dot plot: every seed, their mean, its interval, and what chance allows.

A seed is a dot on a line of its own height, the same in all rows. It is hollow where its value lies inside its null:
between the ends of the band that the row gives, or, of an accuracy, where Wilson's interval with the clusters as the
sample (they err together) holds the row's chance. Where nothing is known of chance, all dots are filled.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from workbench.errors import UnknownName
from workbench.figures import style
from workbench.statistics import Z_95, wilson

CHANCE = {"chance": "chance", "look_back": "the best fixed look-back"}
"""Fields of a row that an accuracy is held against, and what they are called."""
ROW, DOT, TOP, BOTTOM = 26, 7, 8, 52  # pixels: least height of a row, of a dot, the room above and below
CHARACTER, LONGEST = 8, 34  # pixels a character of a row's name; characters of the longest one shown
LOGARITHMIC = 4
"""From this ratio of largest to smallest on, perplexities stand on a logarithmic axis."""


@dataclass(frozen=True)
class Line:
    """One row of the plot."""

    label: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None
    """95 %, of the mean."""
    bands: tuple[tuple[float, float], ...]
    """The null's 95 % band of each seed; empty where none is known."""
    chance: float | None
    against: str
    """What `chance` is."""
    inside: tuple[bool, ...]
    """Whether a seed is no further from its null than chance allows."""


def seed_measures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fields of these rows that have a mean and a value for each seed, nested ones as "accuracy.latin"."""
    return list(dict.fromkeys(name for row in rows for name, _ in _measures(row)))


def seed_lines(
    rows: Sequence[Mapping[str, Any]], measure: str, clusters: Sequence[int | None] | None = None
) -> list[Line]:
    """The rows that have this measure. `clusters`: how many groups of examples that err together an accuracy of each
    row is over; by default what the row says itself.

    Raises: UnknownName if no row has it.
    """
    known = clusters if clusters is not None else [row.get("held_out_pairs") for row in rows]
    lines = [
        _line(row, label, measure, dict(_measures(row))[measure], n)
        for row, label, n in zip(rows, row_labels(rows), known, strict=True)
        if measure in dict(_measures(row))
    ]
    if not lines:
        raise UnknownName("measure", measure, seed_measures(rows), " of these rows")
    return lines


def row_labels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells the rows apart: of the fields before "budget" that are not the same in all, the first that do."""
    fields = [list(row)[: list(row).index("budget")] for row in rows]
    names = [name for name in dict.fromkeys(name for each in fields for name in each)
             if len({str(row.get(name)) for row in rows}) > 1 or len(rows) == 1]  # fmt: skip
    for n in range(1, len(names) + 1):
        labels = [" · ".join(_word(row[name]) for name in names[:n] if name in row) for row in rows]
        if len(set(labels)) == len(rows):
            return labels
    return [f"row {i + 1}" for i in range(len(rows))]


def seeds_figure(
    rows: Sequence[Mapping[str, Any]], measure: str, clusters: Sequence[int | None] | None = None
) -> go.Figure:
    """One measure of a table's rows, as its JSON has them: dots are seeds, a tick their mean, a bar its 95 % interval.

    Dotted: chance; grey: the band of the null. Accuracies are in percent. Arguments as `seed_lines`.
    Raises: UnknownName.
    """
    lines = seed_lines(rows, measure, clusters)
    scale = 100 if is_rate(measure) else 1
    most = max(len(line.values) for line in lines)
    pitch = max(ROW, DOT * (most + 1))
    data = [*_nulls(lines, scale, pitch), *_means(lines, scale), _dots(lines, measure, scale, pitch)]
    labels = [_cut(line.label) for line in lines]
    left = CHARACTER * max(map(len, labels)) + 14
    axis = {"showgrid": False, "zeroline": False, "fixedrange": True, "tickfont": {"size": 13}}
    quiet = {"showline": True, "linecolor": style.FAINT, "ticks": "outside", "ticklen": 4, "tickcolor": style.FAINT}
    return go.Figure(data, style.layout(
        TOP + pitch * len(lines) + BOTTOM, margin={"l": left, "r": 16, "t": TOP, "b": BOTTOM},
        xaxis=axis | quiet | _range(lines, measure, scale) | {
            "title": {"text": measure_title(measure), "font": {"size": 13}},
        },
        yaxis=axis | {
            "range": [len(lines) - 0.5, -0.5], "tickmode": "array", "tickvals": list(range(len(lines))), "ticks": "",
            "ticktext": [style.escaped(label) for label in labels],
            "tickfont": {"family": style.MONOSPACE, "size": 13},
        },
    ))  # fmt: skip


def is_rate(measure: str) -> bool:
    """From 0 to 1, to be read as percent."""
    return "accuracy" in measure


def measure_words(measure: str) -> str:
    """Its name in words: "held-out accuracy"."""
    return measure.replace("_", " ").replace(".", " · ").replace("held out", "held-out").replace(" ov", " OV")


def measure_title(measure: str) -> str:
    """In words, with its unit."""
    unit = ", %" if is_rate(measure) else ", nats" if "loss" in measure or "kl" in measure.split("_") else ""
    return measure_words(measure) + unit


def written(value: float, measure: str) -> str:
    """A value with its unit: accuracies in percent, perplexities with two decimals, else three digits."""
    if is_rate(measure):
        return f"{100 * value:.1f} %"
    return f"{value:.2f}" if "perplexity" in measure else f"{value:.3g}".replace("-", "−")


def _measures(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key, value in row.items():
        if not isinstance(value, dict) or key.endswith("_p"):
            continue
        each = value.get("per_seed")
        if isinstance(each, list) and each and all(type(v) in (int, float) for v in (*each, value.get("mean"))):
            yield prefix + key, value
        elif each is None:
            yield from _measures(value, f"{prefix}{key}.")


def _line(row: Mapping[str, Any], label: str, measure: str, found: Mapping[str, Any], clusters: int | None) -> Line:
    values = tuple(found["per_seed"])
    field = next((field for field in CHANCE if row.get(field) is not None), "")
    chance = found.get("chance", row.get(field) if measure == "held_out_accuracy" else None)
    bands: tuple[tuple[float, float], ...] = ()
    if "low" in found and "high" in found:
        bands = tuple(zip(found["low"], found["high"], strict=True))
        inside = [low <= value <= high for value, (low, high) in zip(values, bands, strict=True)]
    elif measure.endswith(".z"):
        bands = ((-Z_95, Z_95),) * len(values)
        inside = [abs(value) <= Z_95 for value in values]
    elif "p" in found:
        inside = [p > 0.05 for p in found["p"]]
    elif chance is not None and clusters:
        ends = [wilson(value * clusters, clusters) for value in values]
        inside = [low <= chance <= high for low, high in ends]
    else:
        inside = [False] * len(values)
    interval = tuple(found["interval"]) if found.get("interval") else None
    seeds = row.get("seeds", range(len(values)))
    return Line(label, tuple(seeds), values, found["mean"], interval, bands, chance, CHANCE.get(field, "chance"),
                tuple(inside))  # fmt: skip


def _word(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _cut(label: str) -> str:
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def _range(lines: Sequence[Line], measure: str, scale: float) -> dict[str, Any]:
    """An accuracy's axis is 0 to 100; a perplexity's is logarithmic where it spans much."""
    if is_rate(measure):
        return {"range": [-1, 101], "ticksuffix": " %"}
    values = [value for line in lines for value in line.values]
    if "perplexity" in measure and max(values) > LOGARITHMIC * min(values):
        return {"type": "log", "dtick": "D2"}
    return {}


def _nulls(lines: Sequence[Line], scale: float, pitch: float) -> list[dict[str, Any]]:
    """Each row's chance as a dotted line, and the widest of its seeds' bands in grey."""
    chance: list[tuple[float | None, float | None]] = []
    data = []
    for i, line in enumerate(lines):
        if line.chance is not None:
            chance += [(line.chance * scale, i - 0.42), (line.chance * scale, i + 0.42), (None, None)]
        if line.bands:
            low, high = (scale * end for end in (min(b[0] for b in line.bands), max(b[1] for b in line.bands)))
            data.append({
                "type": "scatter", "mode": "lines", "x": [low, high, high, low, low], "hoverinfo": "skip",
                "y": [i - 0.4, i - 0.4, i + 0.4, i + 0.4, i - 0.4], "fill": "toself", "name": "null",
                "fillcolor": "rgba(138, 143, 152, 0.22)", "line": {"width": 0},
            })  # fmt: skip
    if chance:
        dotted = {"color": style.GREY, "width": 1.5, "dash": "dot"}
        data.append({"type": "scatter", "mode": "lines", "x": [x for x, _ in chance], "y": [y for _, y in chance],
                     "line": dotted, "hoverinfo": "skip", "name": "chance"})  # fmt: skip
    return data


def _means(lines: Sequence[Line], scale: float) -> list[dict[str, Any]]:
    bars = [(i, line.interval) for i, line in enumerate(lines) if line.interval is not None]
    data: list[dict[str, Any]] = []
    if bars:
        data.append({
            "type": "scatter", "mode": "lines", "name": "interval", "hoverinfo": "skip",
            "x": [x for _, (low, high) in bars for x in (low * scale, high * scale, None)],
            "y": [y for i, _ in bars for y in (i, i, None)],
            "line": {"color": style.rgba(style.INDIGO, 0.28), "width": 9},
        })  # fmt: skip
    data.append({
        "type": "scatter", "mode": "markers", "name": "mean", "hoverinfo": "skip",
        "x": [line.mean * scale for line in lines], "y": list(range(len(lines))),
        "marker": {"symbol": "line-ns", "size": 17, "line": {"color": style.rgba(style.INDIGO, 1), "width": 2.5}},
    })  # fmt: skip
    return data


def _dots(lines: Sequence[Line], measure: str, scale: float, pitch: float) -> dict[str, Any]:
    points = [(i, k, line) for i, line in enumerate(lines) for k in range(len(line.values))]
    solid = style.rgba(style.INDIGO, 1)
    return {
        "type": "scatter", "mode": "markers", "name": "seeds", "hovertemplate": "%{hovertext}<extra></extra>",
        "x": [line.values[k] * scale for _, k, line in points],
        "y": [i + (k - (len(line.values) - 1) / 2) * DOT / pitch for i, k, line in points],
        "hovertext": [_hover(line, k, measure) for _, k, line in points],
        "marker": {
            "size": DOT + 1, "symbol": ["circle-open" if line.inside[k] else "circle" for _, k, line in points],
            "color": solid, "line": {"width": 1.5, "color": solid},
        },
    }  # fmt: skip


def _hover(line: Line, k: int, measure: str) -> str:
    said = [style.escaped(line.label), f"seed {line.seeds[k]}: {written(line.values[k], measure)}"]
    mean = f"mean {written(line.mean, measure)}"
    if line.interval is not None:
        low, high = line.interval
        mean += f", 95 % {written(low, measure)} … {written(high, measure)}"
    said.append(mean)
    if line.bands:
        low, high = line.bands[k]
        said.append(f"95 % of its null: {written(low, measure)} … {written(high, measure)}")
    if line.chance is not None:
        said.append(f"{line.against}: {written(line.chance, measure)}")
    return "<br>".join([*said, *(["inside what chance allows"] if line.inside[k] else [])])
