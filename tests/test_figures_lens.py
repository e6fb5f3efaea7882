"""Figures of the lens show the numbers they were given, and text as text."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from circuits.errors import Undefined
from circuits.lens import Attribution, Patching, StreamWords
from workbench.figures import attribution_figure, lens_figure, patching_figure, patching_records, style
from workbench.figures.lens import MOST, attribution_records, stream_records

WORDS = ["the", "<b>", "the", " cat\n"]
OTHER = ["the", "<b>", "a&b", " cat\n"]
VOCABULARY = ["x", "<i>y", "a word that is long"]


def drawn(make: Any, *args: Any, **options: Any) -> Any:
    return make(*args, **options)


def stream(n=4, places=3):
    p = torch.randn(places, n, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    return StreamWords(tuple(f"block {i}" for i in range(places)), p)


def grids(n=4):
    generator = torch.Generator().manual_seed(0)
    parts = {name: torch.randn(2, n, generator=generator) for name in ("resid_pre", "attn_out")}
    return Patching(parts, torch.randn(2, 3, n, generator=generator), 2.0, -1.0)


def test_words_of_the_stream():
    found = stream()
    heat = drawn(lens_figure, found, WORDS, VOCABULARY, 2).data[0]
    assert torch.allclose(torch.tensor(heat.z), found.probabilities.max(-1).values)
    said = {"x", "&lt;i&gt;y", "a word t…"}
    assert {word for row in heat.text for word in row} <= said
    best = int(found.probabilities[1, 1].argmax())
    share = f"{100 * float(found.probabilities[1, 1, best]):.1f} %"
    assert heat.customdata[1][1].startswith("block 1<br>at 1 ‘&lt;b&gt;’<br>") and share in heat.customdata[1][1]
    long = drawn(lens_figure, stream(40), ["w"] * 40, VOCABULARY)
    assert long.data[0].text is None and len(long.layout.xaxis.tickvals) <= style.MAX_TICKS
    assert long.data[0].xgap == 1 and drawn(lens_figure, stream(200), ["w"] * 200, VOCABULARY).data[0].xgap == 0
    rows = list(stream_records(found, WORDS, VOCABULARY))
    assert len(rows) == 12 and rows[5] == {
        "place": "block 1", "position": 1, "token": "<b>", "says": VOCABULARY[best],
        "probability": float(found.probabilities[1, 1, best]),
    }  # fmt: skip


def test_a_bar_for_each_component():
    found = Attribution(("embed", "0.0", "0.mlp", "last norm"), torch.tensor([0.5, -1.0, 0.0, 0.25]), -0.25)
    bars = drawn(attribution_figure, found, "‘<b>’ − ‘y’").data[0]
    assert list(bars.x) == [0.5, -1.0, 0.0, 0.25]
    assert list(bars.customdata) == ["embedding", "head 0.0", "neurons of block 1", "last norm's bias"]
    assert bars.marker.color[0] == style.rgba(style.BROWN, 0.85) and bars.marker.color[1] == style.rgba(
        style.TEAL, 0.85
    )
    rows = list(attribution_records(found))
    assert rows[2] == {"component": "neurons of block 1", "adds to answer − foil": 0.0} and len(rows) == 4
    names = tuple(f"0.{i}" for i in range(40))
    many = Attribution(names, torch.linspace(0.1, 4, 40), 82.0)
    bars = drawn(attribution_figure, many, "x").data[0]
    assert len(bars.x) == MOST and bars.customdata[-1] == "17 others"
    assert sum(bars.x) == pytest.approx(82.0, abs=1e-4)


def test_grids_normalised_and_raw():
    found = grids()
    figure = drawn(patching_figure, found, WORDS, OTHER, clickable=True)
    heats = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(heats) == 3
    expected = (found.parts["resid_pre"] + 1) / 3
    assert torch.allclose(torch.tensor(heats[0].z), expected)
    assert torch.allclose(torch.tensor(heats[2].z), (found.heads.flatten(0, 1) + 1) / 3)
    assert "‘the | a&amp;b’" in heats[0].customdata[0][2]
    axis = figure.layout.coloraxis
    assert axis.cmin == -axis.cmax and axis.cmax >= 1
    touch = figure.data[1]
    assert tuple(touch.customdata[5]) == ("the stream before a block", "block 2", 1)
    raw = drawn(patching_figure, found, WORDS, OTHER, normalised=False).data[0]
    assert torch.allclose(torch.tensor(raw.z), found.parts["resid_pre"] + 1)
    same = replace(found, clean=-1.0)
    with pytest.raises(Undefined, match="nothing to restore"):
        patching_figure(same, WORDS, OTHER)
    assert patching_figure(same, WORDS, OTHER, normalised=False).data


def test_records_are_raw():
    found = grids()
    records = list(patching_records(found, WORDS))
    assert len(records) == 2 * 2 * 4 + 2 * 3 * 4
    one = next(r for r in records if r["head"] == "1.2" and r["position"] == 3)
    assert one["answer − foil"] == float(found.heads[1, 2, 3]) and one["clean"] == 2.0 and one["token"] == " cat\n"
    everywhere = list(patching_records(replace(found, heads=found.heads[..., :1]), WORDS))
    assert [r["position"] for r in everywhere if r["part"] == "head"] == ["all"] * 6
