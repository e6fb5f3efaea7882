"""Figures of circuits: cells, dots and bands where the numbers are."""

from typing import Any

import numpy as np
import pytest
import torch

from circuits.entries import Entries
from circuits.scores import Scores
from workbench.figures import matrix_figure, next_figure, positivity_figure, spectrum_figure, tables_figure
from workbench.positivity import Point


def scores(values, low, high, outside):
    """[1, head] with this band."""
    values, low, high = (torch.tensor([x]) for x in (values, low, high))
    p = torch.where(torch.tensor([outside]), 0.01, 0.5)
    yes = torch.ones_like(values, dtype=torch.bool)
    mean, sd, band = (low + high) / 2, (high - low) / 4, torch.stack([low, high])
    return Scores("s", values, mean, sd, band, p, ("head",), "null", "raw", yes, ~yes)


def traces(figure) -> dict[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_a_matrix_leaves_blank_what_chance_gives():
    values = torch.tensor([[1.0, -2.0], [0.5, 3.0]])
    entries = Entries(values, torch.full((2, 2), -1.5), torch.full((2, 2), 1.5))
    figure = matrix_figure(entries, ["a", "<b>"], ["a", "<b>"])
    cells = traces(figure)["entries"]
    np.testing.assert_array_equal(cells["z"], [[0, -2], [0, 3]])
    assert "source ‘&lt;b&gt;’ → output ‘a’: +0.50 logits<br>by chance −1.50 … +1.50, inside" in cells["customdata"][1]
    axis = figure.layout.coloraxis
    assert (axis.cmin, axis.cmax) == (-3, 3)  # symmetric about 0
    every = matrix_figure(entries, ["a", "b"], ["a", "b"], all_entries=True)
    np.testing.assert_array_equal(traces(every)["entries"]["z"], values)


def test_repeated_words_keep_their_own_column():
    entries = Entries(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))
    layout = matrix_figure(entries, ["x", "x"], ["", "y", "y"]).to_dict()["layout"]
    assert list(layout["xaxis"]["tickvals"]) == [0, 1, 2] and len(set(layout["xaxis"]["ticktext"])) == 3


def test_tables_share_one_scale_from_zero():
    a, b = torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    figure = tables_figure([("truth", a), ("model", b)], ["p", "q"])
    assert figure.layout.coloraxis.cmax == 1 and set(traces(figure)) == {"truth", "model"}
    np.testing.assert_array_equal(traces(figure)["truth"]["z"], a)


def test_what_follows_a_token_stands_beside_the_truth():
    shown = traces(next_figure([("a", 0.5, 0.4), ("<i>", 0.1, 0.2)], "training"))
    assert list(shown["model"]["x"]) == [0.5, 0.1] and list(shown["training"]["x"]) == [0.4, 0.2]
    assert shown["model"]["customdata"][1] == "‘&lt;i&gt;’: model 0.100, training 0.200"


def test_eigenvalues_are_divided_by_the_largest_and_areas_follow_their_size():
    values = torch.tensor([2.0 + 0j, 0.5j, -0.5j], dtype=torch.complex128)
    drawn = torch.tensor([[0.2 + 0.2j, 0.2 - 0.2j, 0.2]], dtype=torch.complex128)
    both = scores([0.9, 0.1], [-0.2, -0.3], [0.2, 0.3], [True, False])
    figure = spectrum_figure(values, drawn, both, "0.0", ["0.0", "0.1"])
    shown = traces(figure)
    np.testing.assert_allclose(shown["head 0.0"]["x"], [1, 0, 0])
    np.testing.assert_allclose(shown["head 0.0"]["y"], [0, 0.25, -0.25])
    size = np.array(shown["head 0.0"]["marker"]["size"])
    assert size[0] ** 2 / size[1] ** 2 == pytest.approx(4)
    np.testing.assert_allclose(shown["by chance"]["x"], [0.1, 0.1, 0.1])
    dots = shown["positivity"]
    assert dots["marker"]["color"][1] == "rgba(0,0,0,0)" != dots["marker"]["color"][0]
    np.testing.assert_allclose([x for x in shown["null"]["x"] if x is not None], [-0.2, 0.2, -0.3, 0.3], atol=1e-6)


def test_the_plane_names_the_corner_once_where_dots_cover_each_other():
    band = (-0.2, 0.2)
    points = [Point(f"0.{i} → 1.0", "1.0", 0.9, band, 0.9 - 0.01 * i, band, True) for i in range(3)]
    points += [Point("0.9 → 1.1", "1.1", -0.5, band, 0.1, band, False)]
    shown = traces(positivity_figure(points))
    assert shown["outside both nulls"]["text"] == ("0.0 → 1.0 and 2 more", "", "")
    assert shown["inside a null"]["text"] == ("",) and shown["inside a null"]["marker"]["color"] == "rgba(0,0,0,0)"
    assert shown["inside a null"]["customdata"] == ("1.1",)
    boxes = positivity_figure(points).to_dict()["layout"]["shapes"]
    assert (boxes[0]["x0"], boxes[0]["x1"]) == pytest.approx(band)
    assert not traces(positivity_figure([]))
