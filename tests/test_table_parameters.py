"""The table of parameters: formulas against modules that are filled, published figures, and the committed table."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from workbench.tables import order, parameters
from workbench.tables.parameters import (
    BLOCK,
    GPT2_SMALL,
    OPTIONS,
    PUBLISHED,
    SHAPES,
    SMALL,
    measure_ours,
    measure_torch,
    sizes_of,
    transformer_formula,
    value,
    wording,
)
from workbench.transformer import Transformer

COMMITTED = Path(__file__).parent.parent / "docs" / "results" / "parameters.json"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_RUNS", str(tmp_path_factory.mktemp("runs")))
        return order("parameters", 1, "quick").make(jobs=1)


@pytest.mark.parametrize("what", OPTIONS | SHAPES)
def test_the_formula_is_what_a_filled_module_saves(what):
    """`state_dict` holds what is trained, once, and nothing that is fixed or tied."""
    config = replace(SMALL, **(OPTIONS | SHAPES)[what])
    saved = sum(weight.numel() for weight in Transformer(config).state_dict().values())
    row = measure_ours([], asdict(config))
    assert row["value"] == row["counted"] == saved and row["difference"] == 0


def test_formulas_read_as_they_are_computed():
    """What is printed, evaluated as arithmetic, is the value."""
    for config in (SMALL, GPT2_SMALL, replace(SMALL, tied_unembedding=True, attention="uniform", d_mlp=0)):
        formula = transformer_formula(config)
        said = wording(formula).replace("·", "*").replace("²", "**2")
        assert eval(said, {}, sizes_of(config)) == value(formula, sizes_of(config))  # our own text
    assert wording(BLOCK) == "12·d² + 13·d"
    assert value(BLOCK, {"d": 10}) == 1330


def test_published_figures(table):
    counted = {row["what"]: row["counted"] for row in table.data["rows"]}
    assert {what: counted[what] for what in PUBLISHED} == PUBLISHED
    assert counted["GPT-2 small, ours"] == 124_439_808
    assert counted["GPT-3: attention matrices of all layers"] == 57_982_058_496
    assert counted["shakespeare-4-heads − shakespeare-head"] == 16_512
    assert counted["torch's block, d = 768"] == sum(
        p.numel() for p in torch.nn.TransformerEncoderLayer(768, 12, 3072).parameters()
    )


def test_every_difference_is_zero_and_one_that_is_not_shows(table, monkeypatch):
    assert len(table.data["rows"]) == len(OPTIONS) + len(SHAPES) + 17
    assert {row["difference"] for row in table.data["rows"]} == {0}
    assert {row["budget"] for row in table.data["rows"]} == {"exact"}
    monkeypatch.setattr(parameters, "BLOCK", ((12, "d", "d"), (12, "d")))
    row = {"what": "GPT-2 small, ours"} | measure_torch([], 64, 4)
    assert row["difference"] == -64
    assert [each.agrees for each in parameters.compared([row])] == [False]
    assert "0 of 1 rows; not in: GPT-2 small, ours." in parameters.discussion([row])[0]


def test_comparison_and_discussion_of_all_rows_and_of_few(table):
    rows = table.data["rows"]
    assert [each.agrees for each in parameters.compared(rows)] == [True] * len(PUBLISHED)
    said = " ".join(parameters.discussion(rows))
    assert f"{len(rows)} of {len(rows)} rows" in said and "16,512" in said and "9,216 times one head" in said
    assert len(parameters.discussion(rows[:1])) == 1 and parameters.compared([]) == []


def test_faces(table):
    assert "| ours: no blocks | V·d + n·d + 2·d + d·V | V 30, n 20, d 48 | 3,936 |" in table.markdown()
    assert table.csv().count("\n") == len(table.data["rows"]) + 1
    assert r"12$\cdot$d$^2$ + 13$\cdot$d" in table.tex()
    assert json.loads(table.json()) == table.data


def test_the_committed_table_is_todays(table):
    committed = json.loads(COMMITTED.read_bytes())
    assert committed["command"] == "workbench table parameters --seeds 1 --budget full"
    assert committed["rows"] == table.data["rows"]
    assert committed["notes"] == table.data["notes"]
